"""Which positions a training step learns from, which token each head must guess there, and what it may see.

In a text s_0 .. s_{L-1} the state at position g chose s_{g+1}, the root. Head k learns s_{g+1+k}, or, where the text is
not the target's own, what that would have said after s_{g+k}; a path-aware head reads the embeddings of s_{g+1} ..
s_{g+k}; its teacher is the target's distribution at position g + k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from topo_search.training.states import HiddenStates
from topo_search.training.text import TrainingText

IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRows:
    """Rows of a batch by position in the whole text.

    Attributes:
        positions: `[rows]`, where the state is read.
        text_of_row: `[rows]`, index of the row's text within the batch.
        path: `[rows, heads]`, root and true tokens after it; past the end the last token.
        labels: `[rows, heads]`, the token head k must guess in column k - 1, or IGNORED past the end.
        teachers: `[rows, heads]`, the position whose state chose that token; past the end the last position.
    """

    positions: Int[Tensor, " rows"]
    text_of_row: Int[Tensor, " rows"]
    path: Int[Tensor, "rows heads"]
    labels: Int[Tensor, "rows heads"]
    teachers: Int[Tensor, "rows heads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's input. Rows point into the flattened `states`.

    Attributes:
        states: `[texts, positions, hidden]`, fp32, padded on the right.
        following: `[texts, positions]`, the token after each position; past the end the last one.
        mask: `[texts, positions]`, 1 where a position is real.
        rows: `[rows]`, indices of the rows' states.
        teachers: `[rows, heads]`, indices of the states that chose the labels.
        path, labels: as in `TextRows`.
    """

    states: Float[Tensor, "texts positions hidden"]
    following: Int[Tensor, "texts positions"]
    mask: Int[Tensor, "texts positions"]
    rows: Int[Tensor, " rows"]
    teachers: Int[Tensor, "rows heads"]
    path: Int[Tensor, "rows heads"]
    labels: Int[Tensor, "rows heads"]


def rows_of(text: TrainingText, texts: Int[Tensor, " chosen"], heads: int) -> TextRows:
    """Every row of the given texts: positions from the prompt's last token on that have a label for head 1."""
    positions, owners, last = [], [], []
    for number, index in enumerate(texts.tolist()):
        start, end = int(text.starts[index]), int(text.starts[index + 1])
        found = torch.arange(start + int(text.prompt_lengths[index]) - 1, end - 2)
        positions.append(found)
        owners.append(torch.full_like(found, number))
        last.append(torch.full_like(found, end - 1))
    at, ends = torch.cat(positions), torch.cat(last)[:, None]
    ahead = at[:, None] + torch.arange(1, heads + 1)
    chosen = text.tokens[(ahead + 1).minimum(ends)] if text.choices is None else text.choices[ahead.minimum(ends)]
    labels = torch.where(ahead + 1 <= ends, chosen, IGNORED)
    return TextRows(
        positions=at,
        text_of_row=torch.cat(owners),
        path=text.tokens[ahead.minimum(ends)],
        labels=labels,
        teachers=ahead.minimum(ends),
    )


def usable_texts(text: TrainingText) -> Int[Tensor, " texts"]:
    """Texts with at least one row that has a label."""
    return torch.nonzero(text.lengths - text.prompt_lengths >= 2).flatten()


def seeded(seed: int, *parts: int) -> torch.Generator:
    """A generator of its own for every combination of numbers, e.g. of a step."""
    for part in parts:
        seed = (seed * 1_000_003 + part + 1) % (1 << 62)
    return torch.Generator().manual_seed(seed)


def texts_of_step(
    usable: Int[Tensor, " texts"], step: int, *, batch_texts: int, seed: int, corpus: int = 0
) -> Int[Tensor, " chosen"]:
    """The texts of a step counted from a corpus's first; each epoch is one seeded shuffle."""
    epoch, at = divmod(step, steps_per_epoch(usable, batch_texts))
    order = torch.randperm(len(usable), generator=seeded(seed, epoch, corpus))
    return usable[order[at * batch_texts : (at + 1) * batch_texts]]


def steps_per_epoch(usable: Int[Tensor, " texts"], batch_texts: int) -> int:
    """Steps in which every text is seen once."""
    return math.ceil(len(usable) / batch_texts)


def load_batch(
    text: TrainingText, states: HiddenStates, texts: Int[Tensor, " chosen"], heads: int, *, whole: bool
) -> Batch:
    """The batch of the given texts.

    Args:
        text, states: the text and its hidden states.
        texts: indices of texts, at least one.
        heads: draft heads.
        whole: whether the states of the prompt are needed too, for heads that read the prefix.
    """
    rows = rows_of(text, texts, heads)
    starts = text.starts[texts] + (0 if whole else text.prompt_lengths[texts] - 1)
    lengths = text.starts[texts + 1] - starts
    width = int(lengths.max())
    columns = torch.arange(width)
    real = columns[None, :] < lengths[:, None]
    places, last = starts[:, None] + columns[None, :], text.starts[texts + 1][:, None] - 1
    base = rows.text_of_row * width - starts[rows.text_of_row]
    return Batch(
        states=states.rows(places.minimum(last)),
        following=text.tokens[(places + 1).minimum(last)],
        mask=real.long(),
        rows=base + rows.positions,
        teachers=base[:, None] + rows.teachers,
        path=rows.path,
        labels=rows.labels,
    )
