"""Replay: the exact decode walk of any tree over a trace, without the model.

A row decides what any tree would accept there. Start at a prompt's first row, look up what is emitted, jump, repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from topo_search.errors import MismatchError
from topo_search.prefixes import NO_NODE, PrefixTable
from topo_search.trace import RankTrace
from topo_search.tree import Path, Tree

_CACHED = 2**20  # rows of all trees that walk at once: what they read and write stays in a core's own cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The walks of several trees over one trace.

    Attributes:
        emitted: `[trees, rows]`, small integers, what a step starting at each row would emit.
        visited: `[trees, rows]`, whether a step starts there.
        tokens: `[prompts]`, N - 1 of each prompt: what all its steps emit together.
        prompt_of_row: `[rows]`.
    """

    emitted: Int[np.ndarray, "trees rows"]
    visited: Bool[np.ndarray, "trees rows"]
    tokens: Int[np.ndarray, " prompts"]
    prompt_of_row: Int[np.ndarray, " rows"]

    @property
    def steps(self) -> Int[np.ndarray, " trees"]:
        """Steps of each tree over all prompts."""
        return np.array([np.count_nonzero(starts) for starts in self.visited], dtype=np.int64)

    @property
    def tokens_per_step(self) -> Float[np.ndarray, " trees"]:
        """All tokens over all steps, never a mean of prompt means; 1.0 where no step is taken."""
        steps = self.steps
        per_step: np.ndarray = np.divide(self.tokens.sum(), steps, out=np.ones(len(steps)), where=steps > 0)
        return per_step

    @property
    def all_positions(self) -> Float[np.ndarray, " trees"]:
        """Mean emitted over every row, as if steps started everywhere; usually too high."""
        rows = self.emitted.shape[1]
        return self.emitted.sum(axis=1, dtype=np.int64) / rows if rows else np.ones(self.emitted.shape[0])

    def accepted(self, tree: int) -> list[list[int]]:
        """Accepted drafted tokens of every step of one tree, prompt by prompt."""
        lengths: list[list[int]] = [[] for _ in self.tokens]
        for row in np.flatnonzero(self.visited[tree]):
            lengths[self.prompt_of_row[row]].append(int(self.emitted[tree, row]) - 1)
        return lengths

    def histogram(self, tree: int) -> list[int]:
        """Steps of one tree by accepted drafted tokens, from 0 up."""
        steps: list[int] = np.bincount(self.emitted[tree][self.visited[tree]] - 1, minlength=1).tolist()
        return steps


def replay(trace: RankTrace, trees: Iterable[Tree], *, table: PrefixTable | None = None) -> Replay:
    """Walk each tree over the trace.

    Args:
        trace: the rows.
        trees: none deeper than the trace.
        table: the trace's prefixes, where they are at hand.

    Raises:
        MismatchError: a tree is deeper, or uses higher ranks, than the trace resolves.
    """
    table = table or PrefixTable.of(trace)
    hits = [_hit_lengths(trace, tree, table) for tree in trees]
    return walk(trace, np.stack(hits) if hits else np.zeros((0, len(trace.ranks)), dtype=_length_type(table)))


def replay_nested(
    trace: RankTrace, families: Iterable[tuple[Sequence[Path], Sequence[int]]], *, table: PrefixTable | None = None
) -> Replay:
    """Walk, for each family of nested trees, those made of the first n paths of its order, for each n of its sizes.

    Args:
        trace: the rows.
        families: pairs of an order of paths and the sizes wanted.
        table: the trace's prefixes, where they are at hand.
    """
    table = table or PrefixTable.of(trace)
    hits = [_nested_hit_lengths(table, order, sizes) for order, sizes in families]
    return walk(trace, np.concatenate([np.zeros((0, len(trace.ranks)), dtype=_length_type(table)), *hits]))


def walk(trace: RankTrace, hits: Int[np.ndarray, "trees rows"]) -> Replay:
    """The walks that follow from how deep each row hits: emitted = min(hit + 1, remaining).

    All prompts of as many trees as the cache holds walk at once, each by its index into the flattened `[trees, rows]`.
    """
    remaining = np.minimum(trace.remaining, trace.depth + 1).astype(hits.dtype)  # no step emits more
    emitted = np.minimum(hits + hits.dtype.type(1), remaining)
    visited = np.zeros(emitted.shape, dtype=np.bool_)
    together = max(1, _CACHED // max(len(trace.ranks), 1))
    for first in range(0, len(hits), together):
        _mark_starts(trace, emitted[first : first + together], visited[first : first + together])
    return Replay(
        emitted=emitted,
        visited=visited,
        tokens=np.array([max(prompt.rows, 0) for prompt in trace.prompts], dtype=np.int64),
        prompt_of_row=trace.prompt_of_row,
    )


def _mark_starts(
    trace: RankTrace, emitted: Int[np.ndarray, "trees rows"], visited: Bool[np.ndarray, "trees rows"]
) -> None:
    first_of_tree = np.arange(len(emitted))[:, None] * len(trace.ranks)
    at, end = (first_of_tree + trace.starts[:-1]).ravel(), (first_of_tree + trace.starts[1:]).ravel()
    emitted_at, visited_at = emitted.reshape(-1), visited.reshape(-1)
    at, end = at[at < end], end[at < end]  # an answer of one token has no step
    while at.size:
        visited_at[at] = True
        at = at + emitted_at[at]
        going = at < end
        at, end = at[going], end[going]


def _nested_hit_lengths(
    table: PrefixTable, order: Sequence[Path], sizes: Sequence[int]
) -> Int[np.ndarray, "sizes rows"]:
    never = len(order) + 1
    entry = np.full(len(table.depths) + 1, never, dtype=np.int32)  # the size from which each node is in; last: no node
    nodes = table.find(order)
    entry[nodes[nodes != NO_NODE]] = np.flatnonzero(nodes != NO_NODE) + 1
    wanted = np.array(sizes, dtype=np.int32)[:, None]
    hits = np.zeros((len(wanted), len(table.node_of_row)), dtype=_length_type(table))
    for passed in table.node_of_row.T:
        hits += entry[passed] <= wanted  # NO_NODE = -1 picks the last entry: never
    return hits


def _hit_lengths(trace: RankTrace, tree: Tree, table: PrefixTable) -> Int[np.ndarray, " rows"]:
    if tree.depth > trace.depth:
        raise MismatchError(f"The tree is {tree.depth} deep, but the trace records {trace.depth} draft heads.")
    if tree.max_rank >= trace.resolved_ranks:
        raise MismatchError(
            f"The tree uses rank {tree.max_rank}, but the trace resolves ranks 0 to {trace.resolved_ranks - 1}."
        )
    inside = np.zeros(len(table.depths) + 1, dtype=_length_type(table))  # last: no node
    found = table.find(tree.paths)
    inside[found[found != NO_NODE]] = 1
    hits = np.zeros(len(table.node_of_row), dtype=_length_type(table))
    for nodes in table.node_of_row.T:
        hits += inside[nodes]
    return hits


def _length_type(table: PrefixTable) -> type[np.signedinteger]:
    """Bytes where they hold what a step can emit: half the memory to walk through."""
    return np.int8 if table.node_of_row.shape[1] < np.iinfo(np.int8).max else np.int16
