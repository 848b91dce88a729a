"""Medusa-1: train draft heads on the target's own text, the target frozen (arXiv 2401.10774, section 2.2).

Head k at position t learns x_{t+1+k}. In the stored text, `states[t]` chose `tokens[t]` = x_{t+1}, so head k's label
is `tokens[t + k]` where that still belongs to the same answer.

A shared projection over a whole vocabulary is most of the work. Each step therefore scores the labels of its batch
and a random sample of the other tokens, whose scores are raised by the log of the sampling ratio: an unbiased estimate
of the softmax's denominator (sampled softmax, Jean et al. 2015, arXiv 1412.2007).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from topo_search.errors import InputError
from topo_search.heads.medusa import MedusaBlocks
from topo_search.training.text import TrainingText

IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaRecipe:
    """Everything that decides the trained heads besides target and text.

    Attributes:
        num_heads, num_layers: shape of the heads.
        epochs: passes over the text.
        batch: positions per step.
        learning_rate: peak of a linear warm-up and cosine decay.
        weight_decay: AdamW's.
        head_decay: loss weight of head k is head_decay ** (k - 1).
        sampled_tokens: negatives per step; 0 scores the whole vocabulary.
        seed: order of positions and negatives.
    """

    num_heads: int = 4
    num_layers: int = 1
    epochs: int = 4
    batch: int = 512
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    head_decay: float = 0.9
    sampled_tokens: int = 4096
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """Where a run stands after some step: loss per head, for the progress display."""

    step: int
    steps: int
    loss_per_head: tuple[float, ...]


Report = Callable[[TrainingReport], None]


def aligned_labels(
    tokens: Int[Tensor, " positions"], answer_of: Int[Tensor, " positions"], num_heads: int
) -> Int[Tensor, "positions heads"]:
    """Label of head k at position t in column k - 1: `tokens[t + k]`, or IGNORED past the answer's end."""
    labels = torch.full((tokens.shape[0], num_heads), IGNORED, dtype=torch.long)
    for k in range(1, min(num_heads, tokens.shape[0] - 1) + 1):
        same = answer_of[k:] == answer_of[:-k]
        labels[:-k, k - 1] = torch.where(same, tokens[k:], IGNORED)
    return labels


def train_medusa(
    blocks: MedusaBlocks,
    output_weight: Float[Tensor, "vocab hidden"],
    text: TrainingText,
    recipe: MedusaRecipe,
    *,
    checkpoint: Path | None = None,
    report: Report | None = None,
) -> MedusaBlocks:
    """Train `blocks` in place.

    Args:
        blocks: untrained heads; with their own projection, that is trained too.
        output_weight: the target's frozen output layer, used where the projection is shared.
        text: the target's own text.
        recipe: settings and seed.
        checkpoint: file that a killed run continues from, written every 100 steps and removed at the end.
        report: called about every 20 steps.

    Raises:
        InputError: the text has no position with a label, or an id beyond the vocabulary.
    """
    blocks.to(output_weight.device)
    labels = aligned_labels(text.tokens, text.answer_of, recipe.num_heads)
    _require_usable(labels, output_weight.shape[0])
    run = _Run.start(blocks, recipe, torch.nonzero(labels[:, 0] != IGNORED).flatten(), checkpoint)
    while run.step < run.steps:
        rows = run.next_rows()
        losses = head_losses(blocks, output_weight, text.states[rows].float(), labels[rows], recipe, run.sampler)
        run.descend(losses)
        if report and (run.step % 20 == 0 or run.step == run.steps):
            report(TrainingReport(step=run.step, steps=run.steps, loss_per_head=tuple(losses.tolist())))
    if checkpoint:
        checkpoint.unlink(missing_ok=True)
    return blocks


def head_losses(
    blocks: MedusaBlocks,
    output_weight: Float[Tensor, "vocab hidden"],
    states: Float[Tensor, "rows hidden"],
    labels: Int[Tensor, "rows heads"],
    recipe: MedusaRecipe,
    sampler: torch.Generator,
) -> Float[Tensor, " heads"]:
    """Mean cross-entropy of each head over the rows that it has a label for; 0 where it has none.

    States and labels may lie on the CPU; the work is done where `output_weight` is.
    """
    device = output_weight.device
    candidates, correction = _candidates(labels, output_weight.shape[0], recipe.sampled_tokens, sampler)
    candidates, correction, labels = candidates.to(device), correction.to(device), labels.to(device)
    position_of = torch.full((output_weight.shape[0],), IGNORED, dtype=torch.long, device=device)
    position_of[candidates] = torch.arange(candidates.shape[0], device=device)
    features = blocks(states.to(device), labels.shape[1])
    shared = output_weight[candidates]
    losses = []
    for head in range(labels.shape[1]):
        wanted = labels[:, head] != IGNORED
        if not bool(wanted.any()):
            losses.append(features.new_zeros(()))
            continue
        weight = shared if blocks.projection is None else blocks.projection[head, candidates]
        scores = functional.linear(features[head, wanted], weight, correction)
        losses.append(functional.cross_entropy(scores, position_of[labels[wanted, head]]))
    return torch.stack(losses)


def _candidates(
    labels: Int[Tensor, "rows heads"], vocab: int, sampled: int, sampler: torch.Generator
) -> tuple[Int[Tensor, " candidates"], Float[Tensor, " candidates"]]:
    """Tokens to score in this step, and what each score is raised by for the tokens left out."""
    if sampled == 0 or sampled >= vocab:
        return torch.arange(vocab), torch.zeros(vocab)
    present = torch.unique(labels[labels != IGNORED])
    absent = torch.ones(vocab, dtype=torch.bool)
    absent[present] = False
    others = torch.nonzero(absent).flatten()
    if not others.shape[0]:
        return present, torch.zeros(vocab)
    picked = others[torch.randint(others.shape[0], (sampled,), generator=sampler).unique()]
    raised = math.log(others.shape[0] / picked.shape[0])
    correction = torch.cat([torch.zeros(present.shape[0]), torch.full((picked.shape[0],), raised)])
    return torch.cat([present, picked]), correction


def _require_usable(labels: Int[Tensor, "positions heads"], vocab: int) -> None:
    if not bool((labels != IGNORED).any()):
        raise InputError("The training text has 0 supervised tokens: every answer is one token long.")
    if int(labels.max()) >= vocab or int(labels[labels != IGNORED].min()) < 0:
        raise InputError(f"The training text has token ids outside 0 .. {vocab - 1}, the target's vocabulary.")


@dataclass(slots=True)
class _Run:
    """Optimiser, schedule and position order of one training run."""

    blocks: MedusaBlocks
    recipe: MedusaRecipe
    usable: Int[Tensor, " usable"]
    optimizer: torch.optim.AdamW
    sampler: torch.Generator
    checkpoint: Path | None
    step: int = 0

    @classmethod
    def start(
        cls, blocks: MedusaBlocks, recipe: MedusaRecipe, usable: Int[Tensor, " usable"], checkpoint: Path | None
    ) -> _Run:
        optimizer = torch.optim.AdamW(
            blocks.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, betas=(0.9, 0.98)
        )
        sampler = torch.Generator().manual_seed(recipe.seed)
        run = cls(blocks, recipe, usable, optimizer, sampler, checkpoint)
        if checkpoint and checkpoint.exists():
            run._resume(torch.load(checkpoint, weights_only=True))
        return run

    @property
    def steps_per_epoch(self) -> int:
        return max(1, self.usable.shape[0] // self.recipe.batch)

    @property
    def steps(self) -> int:
        return self.recipe.epochs * self.steps_per_epoch

    def next_rows(self) -> Int[Tensor, " rows"]:
        """The positions of this step: each epoch is one seeded shuffle."""
        epoch, at = divmod(self.step, self.steps_per_epoch)
        order = torch.randperm(
            self.usable.shape[0], generator=torch.Generator().manual_seed(self.recipe.seed * 7919 + epoch)
        )
        return self.usable[order[at * self.recipe.batch : (at + 1) * self.recipe.batch]]

    def descend(self, losses: Float[Tensor, " heads"]) -> None:
        weights = self.recipe.head_decay ** torch.arange(losses.shape[0], device=losses.device)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * _schedule(self.step, self.steps)
        self.optimizer.zero_grad(set_to_none=True)
        (losses * weights).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.blocks.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        if self.checkpoint and self.step % 100 == 0 and self.step < self.steps:
            self._save(self.checkpoint)

    def _save(self, path: Path) -> None:
        state = {
            "recipe": asdict(self.recipe),
            "positions": self.usable.shape[0],
            "step": self.step,
            "blocks": self.blocks.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sampler": self.sampler.get_state(),
        }
        scratch = path.with_suffix(".writing")
        torch.save(state, scratch)
        scratch.replace(path)

    def _resume(self, state: dict[str, Any]) -> None:
        if state["recipe"] != asdict(self.recipe) or state["positions"] != self.usable.shape[0]:
            raise InputError(f"{self.checkpoint} is of a run with other settings; delete it or use another --work.")
        self.blocks.load_state_dict(state["blocks"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sampler.set_state(state["sampler"])
        self.step = state["step"]


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up over the first 5 %, then a cosine down to a tenth."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm))
