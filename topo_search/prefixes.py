"""Every path that a trace's rows take, numbered once, so that counting and replay are array look-ups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from topo_search.trace import PAST_END, RankTrace
from topo_search.tree import Path

NO_NODE = -1


@dataclass(frozen=True, kw_only=True)
class PrefixTable:
    """The distinct nodes that occur in a trace and, per row and depth, which one the row passes.

    Attributes:
        ranks: `[nodes, depth]`, each node's path padded with -1.
        depths: `[nodes]`, at least 1; nodes come by depth, then ranks: canonical order.
        parents: `[nodes]`, the parent's number; -1 under the root.
        node_of_row: `[rows, depth]`, the node that the row's first d ranks spell, or -1 where one of them is a miss
            or not observed.
        starting: `[nodes]`, rows that start with the node.
        reached: `[nodes]`, rows that start with its parent and observe its depth.
    """

    ranks: Int[np.ndarray, "nodes depth"]
    depths: Int[np.ndarray, " nodes"]
    parents: Int[np.ndarray, " nodes"]
    node_of_row: Int[np.ndarray, "rows depth"]
    starting: Int[np.ndarray, " nodes"]
    reached: Int[np.ndarray, " nodes"]

    @classmethod
    def of(cls, trace: RankTrace, *, rows: Int[np.ndarray, " chosen"] | None = None) -> PrefixTable:
        """Number the nodes of a trace, or of some of its rows."""
        return _number_prefixes(trace.ranks if rows is None else trace.ranks[rows], trace.resolved_ranks)

    @property
    def shares(self) -> Float[np.ndarray, " nodes"]:
        """Conditional share of each node among the rows that reached its parent and observe its depth."""
        shares: np.ndarray = self.starting / self.reached
        return shares

    @cached_property
    def numbers(self) -> dict[Path, int]:
        """The number of every path that occurs."""
        pairs = zip(self.ranks.tolist(), self.depths.tolist(), strict=True)
        return {tuple(ranks[:depth]): number for number, (ranks, depth) in enumerate(pairs)}


def _number_prefixes(ranks: Int[np.ndarray, "rows depth"], resolved: int) -> PrefixTable:
    rows, max_depth = ranks.shape
    node_of_row = np.full((rows, max_depth), NO_NODE, dtype=np.int64)
    node_ranks: list[np.ndarray] = []
    depths: list[np.ndarray] = []
    parents: list[np.ndarray] = []
    starting: list[np.ndarray] = []
    reached: list[np.ndarray] = []
    total, above = 0, np.zeros(rows, dtype=np.int64)  # number of the node above, 0 standing for the root at depth 1
    above_ranks, above_offset = np.zeros((1, 0), dtype=np.int64), 0
    for depth in range(1, max_depth + 1):
        column = ranks[:, depth - 1].astype(np.int64)
        observed = (above >= 0) & (column != PAST_END)
        matching = np.flatnonzero(observed & (column < resolved))
        keys, inverse, counts = np.unique(
            (above[matching] - above_offset) * resolved + column[matching], return_inverse=True, return_counts=True
        )
        local_parent, rank = keys // resolved, keys % resolved
        at_parent = np.bincount(above[observed] - above_offset, minlength=above_ranks.shape[0])
        node_of_row[matching, depth - 1] = total + inverse
        node_ranks.append(np.concatenate([above_ranks[local_parent], rank[:, None]], axis=1))
        depths.append(np.full(len(keys), depth, dtype=np.int64))
        parents.append(local_parent + above_offset if depth > 1 else np.full(len(keys), NO_NODE, dtype=np.int64))
        starting.append(counts)
        reached.append(at_parent[local_parent])
        above, above_ranks, above_offset = node_of_row[:, depth - 1], node_ranks[-1], total
        total += len(keys)
    padded = [np.pad(block, ((0, 0), (0, max_depth - block.shape[1])), constant_values=-1) for block in node_ranks]
    return PrefixTable(
        ranks=np.concatenate(padded) if padded else np.zeros((0, 0), dtype=np.int64),
        depths=_joined(depths),
        parents=_joined(parents),
        node_of_row=node_of_row,
        starting=_joined(starting),
        reached=_joined(reached),
    )


def _joined(blocks: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.int64)
