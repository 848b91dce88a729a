"""The loss of draft heads: cross-entropy with the true token, with the target's own distribution, or a mixture.

A projection over a whole vocabulary is most of the work. A step therefore scores the labels of its batch and a random
sample of the other tokens, whose scores are raised by the log of the sampling ratio: an unbiased estimate of the
softmax's denominator (sampled softmax, Jean et al. 2015, arXiv 1412.2007). The teacher's distribution is taken over
the same candidates (knowledge distillation as in Hydra++, arXiv 2402.05109, section 4.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from topo_search.training.batches import IGNORED, Batch


@runtime_checkable
class DraftBlocks(Protocol):
    """The trainable part of a family of draft heads."""

    projection: Tensor | None

    @property
    def num_heads(self) -> int:
        """Draft heads, one per depth."""
        ...

    @property
    def reads_prefix(self) -> bool:
        """Whether `read_prefix` mixes positions."""
        ...

    def read_prefix(self, states: Tensor, following: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """What heads read at each position of whole texts; `following` are the embeddings of the tokens after each."""
        ...

    def true_path(self, features: Tensor, path: Tensor, heads: int) -> Tensor:
        """What each head hands to its projection under the true path."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Columns scored in one step.

    Attributes:
        columns: `[candidates]`, which.
        correction: `[candidates]`, what each score is raised by for the columns left out.
    """

    columns: Int[Tensor, " candidates"]
    correction: Float[Tensor, " candidates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Teacher:
    """The target's distributions: `probs` is `[states, candidates]`, `row_of` its row for each of `[rows, heads]`."""

    probs: Float[Tensor, "states candidates"]
    row_of: Int[Tensor, "rows heads"]


def shorten_projection(blocks: nn.Module, token_map: Int[Tensor, " columns"] | None) -> None:
    """Keep of an own projection the rows of a shortlist, in its order."""
    if token_map is not None and blocks.projection is not None:
        rows: Tensor = blocks.projection.detach()[:, token_map]  # type: ignore[operator]
        blocks.projection = nn.Parameter(rows.clone())


class HeadLoss(nn.Module):
    """Losses of `blocks` against frozen target weights.

    Args:
        blocks: the heads.
        output_weight: `[vocab, hidden]`, the target's output layer.
        embedding: the target's input embeddings.
        token_map: `[columns]`, ids that heads draft from, ascending; None: all. An own projection has these rows.
        distill: share of the teacher's distribution in the target of the loss; 0 is the true token alone.
    """

    def __init__(
        self,
        blocks: nn.Module,
        output_weight: Float[Tensor, "vocab hidden"],
        embedding: nn.Module,
        *,
        token_map: Int[Tensor, " columns"] | None = None,
        distill: float = 0.0,
    ) -> None:
        super().__init__()
        self.blocks = blocks
        self.token_map = token_map
        self.distill = distill
        vocab = output_weight.shape[0]
        ids = torch.arange(vocab) if token_map is None else token_map.long()
        self.column_of_id = torch.full((vocab,), IGNORED, dtype=torch.long)
        self.column_of_id[ids] = torch.arange(len(ids))
        # Frozen parts stay out of the module's parameters and buffers: they are neither trained, stored nor broadcast.
        self._frozen = (output_weight if token_map is None else output_weight[ids.to(output_weight.device)], embedding)

    @property
    def columns(self) -> int:
        """Tokens that heads can draft."""
        return self._frozen[0].shape[0]

    @property
    def num_heads(self) -> int:
        """Draft heads."""
        return self._blocks.num_heads

    def candidates(self, labels: Int[Tensor, "rows heads"], sampled: int, sampler: torch.Generator) -> Candidates:
        """Columns for a step with the given labels: theirs, and `sampled` others at random; 0 takes all."""
        if sampled == 0 or sampled >= self.columns:
            return Candidates(columns=torch.arange(self.columns), correction=torch.zeros(self.columns))
        wanted = self.column_of_id[labels[labels != IGNORED]]
        present = torch.unique(wanted[wanted != IGNORED])
        absent = torch.ones(self.columns, dtype=torch.bool)
        absent[present] = False
        others = torch.nonzero(absent).flatten()
        if not len(others):
            return Candidates(columns=present, correction=torch.zeros(len(present)))
        picked = others[torch.randint(len(others), (sampled,), generator=sampler).unique()]
        raised = math.log(len(others) / len(picked))
        correction = torch.cat([torch.zeros(len(present)), torch.full((len(picked),), raised)])
        return Candidates(columns=torch.cat([present, picked]), correction=correction)

    def forward(self, batch: Batch, candidates: Candidates) -> Float[Tensor, " heads"]:
        """Sum of every head's loss over the rows that it has a drafted label for."""
        weight, device = self._frozen[0], self._frozen[0].device
        columns, correction = candidates.columns.to(device), candidates.correction.to(device)
        place = torch.full((self.columns,), IGNORED, dtype=torch.long, device=device)
        place[columns] = torch.arange(len(columns), device=device)
        wanted = self.wanted(batch.labels).to(device)
        labels = torch.where(wanted == IGNORED, IGNORED, place[wanted.clamp(min=0)])
        handed = self.handed(batch)
        teacher = self._teacher(batch, weight[columns], correction) if self.distill > 0 else None
        losses = []
        for head in range(handed.shape[0]):
            projection = self._blocks.projection
            chosen = weight[columns] if projection is None else projection[head, columns]
            logs = functional.log_softmax(functional.linear(handed[head], chosen, correction), dim=-1)
            hard = functional.nll_loss(logs, labels[:, head], ignore_index=IGNORED, reduction="sum")
            if teacher is None:
                losses.append(hard)
                continue
            kept = labels[:, head] != IGNORED
            probs = teacher.probs[teacher.row_of[kept, head]]
            # The correction belongs to the denominator only.
            soft = (probs @ correction).sum() - (probs * logs[kept]).sum()
            losses.append((1 - self.distill) * hard + self.distill * soft)
        return torch.stack(losses)

    def handed(self, batch: Batch) -> Float[Tensor, "heads rows hidden"]:
        """What every head hands to its projection at every row."""
        weight, embedding = self._frozen
        states, following, mask = batch.states.to(weight.device), None, None
        with torch.no_grad():
            path = embedding(batch.path.to(weight.device)).float()
            if self._blocks.reads_prefix:
                following = embedding(batch.following.to(weight.device)).float()
                mask = batch.mask.to(weight.device)
        features = self._blocks.read_prefix(states, following, mask).flatten(0, 1)[batch.rows.to(weight.device)]
        return self._blocks.true_path(features, path, batch.labels.shape[1])

    def supervised(self, labels: Int[Tensor, "rows heads"]) -> Int[Tensor, " heads"]:
        """Rows that each head has a drafted label for."""
        return (self.wanted(labels) != IGNORED).sum(dim=0)

    def scores(self, handed: Float[Tensor, "rows hidden"], head: int) -> Float[Tensor, "rows columns"]:
        """Scores of every column from what head number `head`, from 0, hands on."""
        projection = self._blocks.projection
        return functional.linear(handed, self._frozen[0] if projection is None else projection[head])

    def wanted(self, labels: Int[Tensor, "rows heads"]) -> Int[Tensor, "rows heads"]:
        """Columns of the labels; IGNORED past the end and where the shortlist lacks the token."""
        return torch.where(labels == IGNORED, IGNORED, self.column_of_id[labels.clamp(min=0)])

    @property
    def _blocks(self) -> DraftBlocks:
        blocks: DraftBlocks = self.blocks  # type: ignore[assignment]
        return blocks

    def _teacher(
        self, batch: Batch, weight: Float[Tensor, "candidates hidden"], correction: Float[Tensor, " candidates"]
    ) -> _Teacher:
        with torch.no_grad():
            used, row_of = torch.unique(batch.teachers, return_inverse=True)
            states = batch.states.flatten(0, 1)[used].to(weight.device)
            probs = functional.softmax(functional.linear(states, weight, correction), dim=-1)
            return _Teacher(probs=probs, row_of=row_of.to(weight.device))
