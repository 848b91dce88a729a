"""Every path that a trace's rows take, numbered once, so that counting and replay are array look-ups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from topo_search.trace import PAST_END, RankTrace
from topo_search.tree import Path

NO_NODE = -1
_ABSENT = -2  # while looking up: left the table, whereas NO_NODE is still at the root
_DENSE = 16  # distinct keys are found by marking them while their range is below this times their number


@dataclass(frozen=True, kw_only=True)
class PrefixTable:
    """The distinct nodes that occur in a trace and, per row and depth, which one the row passes.

    Attributes:
        ranks: `[nodes, depth]`, each node's path padded with -1.
        depths: `[nodes]`, at least 1; nodes come by depth, then ranks: canonical order.
        parents: `[nodes]`, the parent's number; -1 under the root.
        node_of_row: `[rows, depth]`, the node that the row's first d ranks spell, or -1 where one of them is a miss
            or not observed; int32, column by column in memory.
        row_ranks: `[rows, depth]`, the trace's own.
        resolved_ranks: K; rank K is a miss.
        observed: counted rows that observe depth 1.
        starting: `[nodes]`, counted rows that start with the node.
        continuing: `[nodes]`, counted rows that start with the node and observe the depth below it.
        rank_counts: `[depth, outcomes]`, counted rows by rank at each depth, whatever came before; K, the miss, last.
    """

    ranks: Int[np.ndarray, "nodes depth"]
    depths: Int[np.ndarray, " nodes"]
    parents: Int[np.ndarray, " nodes"]
    node_of_row: Int[np.ndarray, "rows depth"]
    row_ranks: Int[np.ndarray, "rows depth"]
    resolved_ranks: int
    observed: int
    starting: Int[np.ndarray, " nodes"]
    continuing: Int[np.ndarray, " nodes"]
    rank_counts: Int[np.ndarray, "depth outcomes"]

    @classmethod
    def of(cls, trace: RankTrace, *, rows: Int[np.ndarray, " chosen"] | None = None) -> PrefixTable:
        """Number the nodes of a trace, or of some of its rows."""
        return _number_prefixes(trace.ranks if rows is None else trace.ranks[rows], trace.resolved_ranks)

    def counted(self, rows: Int[np.ndarray, " chosen"]) -> PrefixTable:
        """The same nodes and rows with every count taken over some rows only (step starts, a fold's prompts).

        Much cheaper than numbering again; a node that none of these rows passes stays, with counts of zero.
        """
        nodes = self.node_of_row[rows]
        ranks = self.row_ranks[rows]
        return replace(self, **_counts(nodes, ranks, len(self.depths), self.resolved_ranks))

    def among(self, rows: Int[np.ndarray, " chosen"]) -> PrefixTable:
        """`counted`, with only those rows kept."""
        columns = [self.node_of_row[rows, depth] for depth in range(self.node_of_row.shape[1])]
        nodes = np.empty((len(rows), len(columns)), dtype=np.int32, order="F")
        for depth, column in enumerate(columns):
            nodes[:, depth] = column
        ranks = self.row_ranks[rows]
        counts = _counts(nodes, ranks, len(self.depths), self.resolved_ranks)
        return replace(self, node_of_row=nodes, row_ranks=ranks, **counts)

    @property
    def reached(self) -> Int[np.ndarray, " nodes"]:
        """Counted rows that start with each node's parent and observe the node's depth."""
        reached: np.ndarray = np.append(self.continuing, self.observed)[self.parents]  # -1 picks the last: the root
        return reached

    @property
    def shares(self) -> Float[np.ndarray, " nodes"]:
        """Conditional share of each node among the rows that reached its parent; 0 where none did."""
        reached = self.reached
        shares: np.ndarray = np.divide(self.starting, reached, out=np.zeros(len(reached)), where=reached > 0)
        return shares

    @cached_property
    def level_starts(self) -> Int[np.ndarray, " levels"]:
        """First node of each depth from 1 up, and the number of nodes last."""
        starts: np.ndarray = np.searchsorted(self.depths, np.arange(1, self.ranks.shape[1] + 2))
        return starts

    @cached_property
    def numbers(self) -> dict[Path, int]:
        """The number of every path that occurs."""
        pairs = zip(self.ranks.tolist(), self.depths.tolist(), strict=True)
        return {tuple(ranks[:depth]): number for number, (ranks, depth) in enumerate(pairs)}

    def find(self, paths: Sequence[Path]) -> Int[np.ndarray, " paths"]:
        """The number of each path, -1 where it never occurs; without the dictionary, which large tables pay for."""
        lengths = np.array([len(path) for path in paths], dtype=np.int64)
        longest = int(lengths.max(initial=0))
        ranks = np.zeros((len(paths), longest), dtype=np.int64)
        for at, path in enumerate(paths):
            ranks[at, : len(path)] = path
        found = np.full(len(paths), NO_NODE, dtype=np.int64)
        for depth in range(longest):
            keys = (found + 1) * self.resolved_ranks + ranks[:, depth]
            places = np.searchsorted(self._keys, keys)
            known = np.append(self._keys, -1)[places] == keys
            known &= (ranks[:, depth] < self.resolved_ranks) & (found != _ABSENT)
            found = np.where(depth < lengths, np.where(known, places, _ABSENT), found)
        return np.maximum(found, NO_NODE)

    @cached_property
    def _keys(self) -> Int[np.ndarray, " nodes"]:
        """Parent and last rank in one number each, which rises with the node's number."""
        keys: np.ndarray = (self.parents + 1) * self.resolved_ranks + self.ranks[
            np.arange(len(self.depths)), self.depths - 1
        ]
        return keys


def _number_prefixes(ranks: Int[np.ndarray, "rows depth"], resolved: int) -> PrefixTable:
    rows, max_depth = ranks.shape
    node_of_row = np.full((rows, max_depth), NO_NODE, dtype=np.int32, order="F")
    node_ranks: list[np.ndarray] = []
    parents: list[np.ndarray] = []
    total, offset = 0, 0  # nodes numbered so far, and the first one of the depth above
    above, above_ranks = np.zeros(rows, dtype=np.int64), np.zeros((1, 0), dtype=np.int64)
    matching = np.arange(rows)
    for depth in range(1, max_depth + 1):
        column = ranks[matching, depth - 1]
        hit = (column != PAST_END) & (column < resolved)
        matching, above = matching[hit], above[hit]
        keys, numbers = _distinct(above * resolved + column[hit], len(above_ranks) * resolved)
        local_parent, rank = keys // resolved, keys % resolved
        node_of_row[matching, depth - 1] = total + numbers
        node_ranks.append(np.concatenate([above_ranks[local_parent], rank[:, None]], axis=1))
        parents.append(local_parent + offset if depth > 1 else np.full(len(keys), NO_NODE, dtype=np.int64))
        above, above_ranks, offset = numbers, node_ranks[-1], total
        total += len(keys)
    padded = [np.pad(block, ((0, 0), (0, max_depth - block.shape[1])), constant_values=-1) for block in node_ranks]
    depths = [np.full(len(block), depth, dtype=np.int64) for depth, block in enumerate(node_ranks, start=1)]
    return PrefixTable(
        ranks=np.concatenate(padded) if padded else np.zeros((0, 0), dtype=np.int64),
        depths=_joined(depths),
        parents=_joined(parents),
        node_of_row=node_of_row,
        row_ranks=ranks,
        resolved_ranks=resolved,
        **_counts(node_of_row, ranks, total, resolved),
    )


def _distinct(
    keys: Int[np.ndarray, " rows"], limit: int
) -> tuple[Int[np.ndarray, " distinct"], Int[np.ndarray, " rows"]]:
    """The distinct keys below `limit`, ascending, and which one each row has; sorts only where keys are sparse."""
    if limit > _DENSE * len(keys):
        distinct, numbers = np.unique(keys, return_inverse=True)
        return distinct, numbers
    seen = np.zeros(limit, dtype=np.bool_)
    seen[keys] = True
    distinct = np.flatnonzero(seen)
    number_of = np.zeros(limit, dtype=np.int64)
    number_of[distinct] = np.arange(len(distinct))
    return distinct, number_of[keys]


def _counts(
    nodes: Int[np.ndarray, "rows depth"], ranks: Int[np.ndarray, "rows depth"], total: int, resolved: int
) -> dict[str, Any]:
    """The counted fields of a table of `total` nodes, over these rows."""
    starting, continuing = np.zeros(total + 1, dtype=np.int64), np.zeros(total + 1, dtype=np.int64)
    depth = ranks.shape[1]
    rank_counts = np.zeros((depth, resolved + 1), dtype=np.int64)
    for k in range(depth):
        observed = ranks[:, k] != PAST_END
        rank_counts[k] = np.bincount(ranks[observed, k], minlength=resolved + 1)
        starting += np.bincount(nodes[:, k] + 1, minlength=total + 1)  # entry 0: no node
        if k:
            continuing += np.bincount(nodes[observed, k - 1] + 1, minlength=total + 1)
    return {
        "observed": int(rank_counts[0].sum()) if depth else 0,
        "starting": starting[1:],
        "continuing": continuing[1:],
        "rank_counts": rank_counts,
    }


def _joined(blocks: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.int64)
