"""Trees in which every node of a level has the same number of children, the only ones some engines draft as written.

There are few enough branching vectors to try them all: 26,643 for 256 nodes and five levels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool

from topo_search.estimates import PathProbabilities
from topo_search.search.by_size import TreesBySize, candidates, no_worse_than_smaller
from topo_search.search.forest import Forest
from topo_search.tree import Tree


def uniform(
    estimate: PathProbabilities,
    *,
    num_draft_nodes: int,
    max_depth: int | None = None,
    ranks_per_depth: Sequence[int] | None = None,
) -> TreesBySize:
    """The best trees of every size with uniform branching and contiguous ranks.

    Args:
        estimate, num_draft_nodes, max_depth, ranks_per_depth: as for `frontier`.
    """
    found = candidates(estimate, max_depth=max_depth, ranks_per_depth=ranks_per_depth)
    levels = _Levels.of(found)
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    root = np.ones(1, dtype=np.bool_)
    for worth, nodes, branching in _branchings(levels, (), root, 0.0, 0, 1, num_draft_nodes):
        if nodes not in best or worth > best[nodes][0]:
            best[nodes] = worth, branching
    size = max(best)
    fitting = [max(n for n in best if n <= nodes) for nodes in range(size + 1)]
    trees = {nodes: Tree.dense(branching) for nodes, (_, branching) in best.items()}
    tokens = np.array([1.0 + best[nodes][0] for nodes in fitting])
    return no_worse_than_smaller((trees[nodes] for nodes in fitting), tokens, found.left_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Levels:
    """Per depth from 1: each node's probability, rank and place of its parent among the nodes one depth above."""

    probabilities: tuple[np.ndarray, ...]
    ranks: tuple[np.ndarray, ...]
    parents: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, found: PathProbabilities) -> _Levels:
        forest = Forest.of_paths(dict(zip(found.paths, found.probabilities.tolist(), strict=True)), left_out=0.0)
        last_ranks = np.array([path[-1] for path in forest.paths], dtype=np.int64)
        place = np.zeros(len(forest.paths) + 1, dtype=np.int64)  # within its depth; the root, -1, is place 0 of its own
        levels = [np.flatnonzero(forest.depths == depth) for depth in range(1, int(forest.depths.max(initial=0)) + 1)]
        for nodes in levels:
            place[nodes] = np.arange(len(nodes))
        return cls(
            probabilities=tuple(forest.probabilities[nodes] for nodes in levels),
            ranks=tuple(last_ranks[nodes] for nodes in levels),
            parents=tuple(place[forest.parents[nodes]] for nodes in levels),
        )


def _branchings(
    levels: _Levels,
    above: tuple[int, ...],
    inside: Bool[np.ndarray, " parents"],
    worth: float,
    nodes: int,
    width: int,
    budget: int,
) -> Iterator[tuple[float, int, tuple[int, ...]]]:
    """Every branching vector that starts with `above` and goes deeper: worth, nodes, vector.

    `inside` marks the nodes of the last level that are in the tree; `width` is how many it has, absent ones included.
    """
    depth = len(above)
    if depth == len(levels.ranks):
        return
    alive = inside[levels.parents[depth]]
    ranks, probabilities = levels.ranks[depth], levels.probabilities[depth]
    by_rank = np.cumsum(np.bincount(ranks[alive], weights=probabilities[alive]))
    for branching in range(1, min((budget - nodes) // width, len(by_rank)) + 1):
        reached = worth + float(by_rank[branching - 1])
        vector, total = (*above, branching), nodes + width * branching
        yield reached, total, vector
        if total + width * branching <= budget:
            kept = alive & (ranks < branching)
            yield from _branchings(levels, vector, kept, reached, total, width * branching, budget)
