"""Path probabilities: how often a step would pass each node.

Every estimator is a product of conditional shares, so a child never exceeds its parent and one sort of the result is
prefix-closed at every size.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from topo_search.prefixes import PrefixTable
from topo_search.tree import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class PathProbabilities:
    """Nodes with their probability, parents before children.

    Attributes:
        ranks: `[nodes, depth]`, each path padded with -1.
        depths: `[nodes]`.
        probabilities: `[nodes]`, of a row starting with the node.
    """

    ranks: Int[np.ndarray, "nodes depth"]
    depths: Int[np.ndarray, " nodes"]
    probabilities: Float[np.ndarray, " nodes"]


def joint(table: PrefixTable) -> PathProbabilities:
    """Product-limit counts: each node's share of the rows that reached its parent and observe its depth."""
    probabilities = np.zeros(len(table.depths))
    shares = table.shares
    for depth in range(1, table.ranks.shape[1] + 1):
        nodes = np.flatnonzero(table.depths == depth)
        above = probabilities[table.parents[nodes]] if depth > 1 else 1.0
        probabilities[nodes] = above * shares[nodes]
    return PathProbabilities(ranks=table.ranks, depths=table.depths, probabilities=probabilities)


def independent(rank_table: Sequence[Sequence[float]], count: int, *, repeat_last: bool = False) -> PathProbabilities:
    """The `count` likeliest paths when depths are independent: products of per-depth rank probabilities.

    This is Medusa's assumption (arXiv 2401.10774, section 2.3.3), for comparison and for peers' accuracy tables.
    Best first, so exact without listing every path.

    Args:
        rank_table: per depth, the probability of each rank.
        count: nodes wanted; fewer where the table has fewer of positive probability.
        repeat_last: whether depths beyond the table use its last row, without bound.
    """

    def row(depth: int) -> Sequence[float]:
        if depth < len(rank_table):
            return rank_table[depth]
        return rank_table[-1] if repeat_last else ()

    found = _best_first(row, count)
    width = max((len(path) for path, _ in found), default=0)
    return PathProbabilities(
        ranks=np.array([[*path, *[-1] * (width - len(path))] for path, _ in found], dtype=np.int64).reshape(
            len(found), width
        ),
        depths=np.array([len(path) for path, _ in found], dtype=np.int64),
        probabilities=np.array([probability for _, probability in found]),
    )


def _best_first(row: Callable[[int], Sequence[float]], count: int) -> list[tuple[Path, float]]:
    found: list[tuple[Path, float]] = []
    heap: list[tuple[float, int, Path, float]] = [(-1.0, 0, (), 1.0)]
    while heap and len(found) <= count:
        _, _, path, probability = heapq.heappop(heap)
        found.append((path, probability))
        for rank, share in enumerate(row(len(path))):
            child = probability * share
            if child > 0:
                heapq.heappush(heap, (-float(f"{child:.11e}"), len(path) + 1, (*path, rank), child))
    return found[1:]
