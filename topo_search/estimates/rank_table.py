"""`independent`: every depth has one rank table, whatever path led there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from topo_search.estimates.best_children import best_children
from topo_search.estimates.probabilities import PathProbabilities, best_order
from topo_search.prefixes import PrefixTable

RankTable = Sequence[Sequence[float]]


def rank_table_of(table: PrefixTable) -> list[list[float]]:
    """Per depth the share of each rank among all counted rows that observe the depth: the heads' own accuracies."""
    observed = np.maximum(table.rank_counts.sum(axis=1, keepdims=True), 1)
    shares: list[list[float]] = (table.rank_counts[:, :-1] / observed).tolist()
    return shares


def independent(rank_table: RankTable, count: int, *, repeat_last: bool = False) -> PathProbabilities:
    """The `count` likeliest paths when depths are independent: products of per-depth rank probabilities.

    This is Medusa's assumption (arXiv 2401.10774, section 2.3.3), for comparison and for peers' accuracy tables.
    Expanded level by level, so exact without listing every path. Likeliest first.

    Args:
        rank_table: per depth, the probability of each rank.
        count: nodes wanted; fewer where the table has fewer of positive probability.
        repeat_last: whether depths beyond the table use its last row, without bound.
    """
    ranks, depths = np.zeros((0, 0), dtype=np.int64), np.zeros(0, dtype=np.int64)
    probabilities, left_out = np.zeros(0), 0.0
    level_ranks, level = np.zeros((1, 0), dtype=np.int64), np.ones(1)
    depth = 0
    while len(level) and rank_table and (depth < len(rank_table) or repeat_last):
        row = np.array(rank_table[min(depth, len(rank_table) - 1)], dtype=np.float64)
        parents, added, children, missed = best_children(level, np.tile(row, (len(level), 1)), count)
        depth += 1
        level_ranks = np.concatenate([level_ranks[parents], added[:, None]], axis=1)
        ranks = np.concatenate([np.pad(ranks, ((0, 0), (0, 1)), constant_values=-1), level_ranks])
        depths = np.append(depths, np.full(len(children), depth))
        probabilities = np.append(probabilities, children)
        best = best_order(ranks, depths, probabilities, count)
        left_out = max(left_out, missed, float(np.delete(probabilities, best).max(initial=0.0)))
        ranks, depths, probabilities = ranks[best], depths[best], probabilities[best]
        deepest = np.flatnonzero(depths == depth)  # only these can have children among the likeliest
        deepest = deepest[np.lexsort(tuple(reversed(ranks[deepest].T)))]
        level_ranks, level = ranks[deepest], probabilities[deepest]
    width = int(depths.max(initial=0))
    return PathProbabilities(ranks=ranks[:, :width], depths=depths, probabilities=probabilities, left_out=left_out)
