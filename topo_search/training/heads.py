"""Train draft heads of any family on the target's own text, the target frozen (Medusa-1, Hydra, Hydra++).

Same seed, same heads: every step's texts, negatives and dropout follow from the seed and the step's number alone, so
a run that was killed and continued ends in the same weights. Several processes share each step's texts; their
gradients add up to that of one process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from topo_search.answers import digest_of
from topo_search.errors import InputError
from topo_search.training.batches import (
    IGNORED,
    Batch,
    load_batch,
    rows_of,
    seeded,
    steps_per_epoch,
    texts_of_step,
    usable_texts,
)
from topo_search.training.checkpoint import read_checkpoint, require_finite, write_checkpoint
from topo_search.training.loss import HeadLoss
from topo_search.training.states import HiddenStates
from topo_search.training.text import TrainingText, prompts_of

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

_SAVE_EVERY = 100
_REPORT_EVERY = 20
_SCORED_ROWS = 512  # scored together in an evaluation, over the whole vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the trained heads besides target, text and the heads' shape.

    Attributes:
        epochs: passes over the target's own text.
        ordinary_epochs: passes over ordinary text before it, where there is any.
        batch_texts: texts per step.
        learning_rate: peak of a linear warm-up and cosine decay.
        weight_decay: AdamW's.
        head_decay: loss weight of head k is head_decay ** (k - 1).
        sampled_tokens: negatives per step; 0 scores every token that heads draft.
        distill: share of the target's distribution in the loss; the rest is the true token.
        learn_prompts: whether heads learn from the prompts too, what the target would have said after each token.
        seed: order of texts, negatives, dropout.
        started_from: fingerprint of the trained heads that the run went on from; null: new ones.
    """

    epochs: int = 4
    ordinary_epochs: int = 1
    batch_texts: int = 8
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    head_decay: float = 0.9
    sampled_tokens: int = 2048
    distill: float = 0.0
    learn_prompts: bool = False
    seed: int = 0
    started_from: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A text with its hidden states, and how often it is passed."""

    text: TrainingText
    states: HiddenStates
    epochs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """Where a run stands after some step: mean loss per head over that step's rows, none where it was just resumed."""

    step: int
    steps: int
    loss_per_head: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """How heads do on text that they were not trained on, per depth.

    Attributes:
        loss: mean cross-entropy with the true token over all drafted tokens, where that is among them.
        accuracy: share of rows whose true token is the head's first.
        accuracy_given_path: the same over the rows where all shallower heads are right.
        rows: rows of depth 1.
    """

    loss: tuple[float, ...]
    accuracy: tuple[float, ...]
    accuracy_given_path: tuple[float, ...]
    rows: int


Report = Callable[[TrainingReport], None]


def split_held_out(text: TrainingText, share: float, *, seed: int) -> tuple[TrainingText, TrainingText]:
    """Texts to train on and texts to hold out, about `share` of them.

    A text's prompt and the seed alone decide, so that no text changes sides whatever is read beside it, and what a
    smaller share holds out a larger one does too.
    """
    draws = [int(digest_of([seed, *prompt]), 16) / 16.0**16 for prompt in prompts_of(text)]
    return (
        text.select([index for index, draw in enumerate(draws) if draw >= share]),
        text.select([index for index, draw in enumerate(draws) if draw < share]),
    )


def train_heads(
    loss: HeadLoss,
    corpora: Sequence[Corpus],
    recipe: Recipe,
    *,
    num_heads: int,
    checkpoint: Path | None = None,
    report: Report | None = None,
    accelerator: Accelerator | None = None,
) -> float:
    """Train the heads of `loss` in place; returns the seconds spent, those before an interruption included.

    Args:
        loss: heads and what they are held against.
        corpora: texts in the order in which they are learned from.
        recipe: settings and seed.
        num_heads: draft heads.
        checkpoint: file that a killed run continues from, written every 100 steps and at the end; the caller removes
            it once the heads are safe.
        report: called about every 20 steps and where a run is resumed, in the first process.
        accelerator: where several processes train together, as `accelerate launch` starts them.

    Raises:
        InputError: no text has a position with a label, the loss is not a number, the disk is full, or `checkpoint` is
            of other settings. The last checkpoint stays.
    """
    run = _Run.start(loss, corpora, recipe, num_heads, checkpoint, accelerator)
    if run.step and report and run.is_first:
        report(TrainingReport(step=run.step, steps=run.steps, loss_per_head=()))
    while run.step < run.steps:
        clock = time.perf_counter()
        losses = run.descend()
        run.seconds += time.perf_counter() - clock
        if checkpoint and run.is_first and (run.step % _SAVE_EVERY == 0 or run.step == run.steps):
            run.save(checkpoint)
        if report and run.is_first and (run.step % _REPORT_EVERY == 0 or run.step == run.steps):
            report(TrainingReport(step=run.step, steps=run.steps, loss_per_head=tuple(losses.tolist())))
    return run.seconds


def evaluate(
    loss: HeadLoss, text: TrainingText, states: HiddenStates, *, num_heads: int, texts_at_once: int = 8
) -> HeldOut:
    """Loss and accuracy of the heads on `text`."""
    blocks = loss.blocks.eval()
    whole = bool(blocks.reads_prefix)
    sums, counts = torch.zeros(3, num_heads), torch.zeros(3, num_heads)
    with torch.inference_mode():
        for texts in torch.arange(len(text.prompt_lengths)).split(texts_at_once):
            batch = load_batch(text, states, texts, num_heads, whole=whole)
            wanted = loss.wanted(batch.labels).T
            known = (batch.labels != IGNORED).T
            losses, found = _losses_and_first_columns(loss, batch, wanted)
            hits = (found == wanted) & known
            on_path = torch.cat([known[:1], hits[:-1].cumprod(dim=0).bool() & known[1:]])
            sums += torch.stack([losses.sum(dim=1), hits.sum(dim=1), (hits & on_path).sum(dim=1)])
            counts += torch.stack([(wanted != IGNORED).sum(dim=1), known.sum(dim=1), on_path.sum(dim=1)])
    blocks.train()
    means = sums / counts.clamp(min=1)
    return HeldOut(
        loss=_rounded(means[0]),
        accuracy=_rounded(means[1]),
        accuracy_given_path=_rounded(means[2]),
        rows=int(counts[1, 0]),
    )


def _losses_and_first_columns(
    loss: HeadLoss, batch: Batch, wanted: Int[Tensor, "heads rows"]
) -> tuple[Float[Tensor, "heads rows"], Int[Tensor, "heads rows"]]:
    """Each row's cross-entropy, 0 without a wanted column, and its best column; a slice of rows at a time."""
    losses, found = torch.zeros(wanted.shape), torch.zeros_like(wanted)
    handed = loss.handed(batch)
    for head in range(wanted.shape[0]):
        for rows in torch.arange(wanted.shape[1]).split(_SCORED_ROWS):
            scores = loss.scores(handed[head, rows.to(handed.device)], head)
            labels = wanted[head, rows].to(scores.device)
            found[head, rows] = scores.argmax(dim=-1).cpu()
            losses[head, rows] = nn.functional.cross_entropy(
                scores, labels, ignore_index=IGNORED, reduction="none"
            ).cpu()
    return losses, found


@dataclass(slots=True)
class _Run:
    """Model, optimiser and place in one training run."""

    loss: HeadLoss
    model: nn.Module
    corpora: Sequence[Corpus]
    usable: list[Int[Tensor, " _"]]
    recipe: Recipe
    num_heads: int
    optimizer: Any
    checkpoint: Path | None
    accelerator: Accelerator | None
    step: int = 0
    seconds: float = 0.0

    @classmethod
    def start(
        cls,
        loss: HeadLoss,
        corpora: Sequence[Corpus],
        recipe: Recipe,
        num_heads: int,
        checkpoint: Path | None,
        accelerator: Accelerator | None,
    ) -> _Run:
        usable = [usable_texts(corpus.text) for corpus in corpora]
        if not any(len(texts) for texts in usable):
            raise InputError("The training text has 0 supervised tokens: every answer is one token long.")
        optimizer: Any = torch.optim.AdamW(
            loss.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, betas=(0.9, 0.98)
        )
        model: nn.Module = loss.train()
        if accelerator is not None:
            model, optimizer = accelerator.prepare(loss, optimizer)
        run = cls(loss, model, corpora, usable, recipe, num_heads, optimizer, checkpoint, accelerator)
        if checkpoint and (state := read_checkpoint(checkpoint, run._settings())):
            loss.blocks.load_state_dict(state["blocks"])
            optimizer.load_state_dict(state["optimizer"])
            run.step, run.seconds = state["step"], state["seconds"]
        return run

    @property
    def steps(self) -> int:
        return sum(self._steps_of(index) for index in range(len(self.corpora)))

    @property
    def is_first(self) -> bool:
        return self.accelerator is None or self.accelerator.is_main_process

    def _steps_of(self, index: int) -> int:
        return self.corpora[index].epochs * steps_per_epoch(self.usable[index], self.recipe.batch_texts)

    def _place(self) -> tuple[Corpus, Int[Tensor, " texts"]]:
        """The corpus and the texts of this step."""
        step, recipe = self.step, self.recipe
        for index, corpus in enumerate(self.corpora):
            if step < self._steps_of(index):
                usable = self.usable[index]
                return corpus, texts_of_step(
                    usable, step, batch_texts=recipe.batch_texts, seed=recipe.seed, corpus=index
                )
            step -= self._steps_of(index)
        raise AssertionError("a run has no step beyond its last")

    def descend(self) -> Float[Tensor, " heads"]:
        """One step; returns each head's mean loss over the rows of this process."""
        corpus, texts = self._place()
        batch = self._share(corpus, texts)
        labels = rows_of(corpus.text, texts, self.num_heads).labels
        candidates = self.loss.candidates(labels, self.recipe.sampled_tokens, seeded(self.recipe.seed, self.step, 7))
        torch.manual_seed(seeded(self.recipe.seed, self.step, 11).initial_seed())
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * schedule(self.step, self.steps)
        self.optimizer.zero_grad(set_to_none=True)
        sums = self.model(batch, candidates)
        device = sums.device
        supervised = self.loss.supervised(labels).to(device)
        weights = self.recipe.head_decay ** torch.arange(self.num_heads, device=device)
        total = (weights * sums / supervised.clamp(min=1)).sum()
        self._backward(total)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        require_finite(total.detach(), norm, step=self.step, checkpoint=self.checkpoint)
        self.optimizer.step()
        self.step += 1
        own: Tensor = sums.detach() / self.loss.supervised(batch.labels).to(device).clamp(min=1)
        return own

    def _share(self, corpus: Corpus, texts: Int[Tensor, " texts"]) -> Batch:
        """This process's part of the step's texts."""
        whole = bool(self.loss.blocks.reads_prefix)
        own = texts if self.accelerator is None else texts[self.accelerator.process_index :: self._processes]
        batch = load_batch(corpus.text, corpus.states, own if len(own) else texts[:1], self.num_heads, whole=whole)
        # A process without a text of its own still takes part in the exchange of gradients, with nothing to learn.
        return batch if len(own) else replace(batch, labels=torch.full_like(batch.labels, IGNORED))

    @property
    def _processes(self) -> int:
        return 1 if self.accelerator is None else int(self.accelerator.num_processes)

    def _backward(self, total: Tensor) -> None:
        if self.accelerator is None:
            total.backward()
            return
        # Processes average their gradients, while the losses above are already shares of one sum.
        self.accelerator.backward(total * self._processes)

    def save(self, path: Path) -> None:
        """Write where the run stands."""
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "blocks": self.loss.blocks.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        write_checkpoint(path, self._settings(), state)

    def _settings(self) -> dict[str, Any]:
        tensors = {name: list(value.shape) for name, value in self.loss.blocks.state_dict().items()}
        return {
            "recipe": asdict(self.recipe),
            "texts": [corpus.text.digest for corpus in self.corpora],
            "passes": [corpus.epochs for corpus in self.corpora],
            "heads": [str(self.loss.blocks.shape), tensors],
            "columns": self.loss.columns,
        }


def schedule(step: int, steps: int) -> float:
    """Share of the peak learning rate: linear warm-up over the first 5 %, then a cosine down to a tenth."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm))


def _rounded(values: Tensor) -> tuple[float, ...]:
    return tuple(round(float(value), 4) for value in values)
