"""Trees whose siblings have ranks 0, 1, 2, ... without a gap, as growmaps and most engines need them.

Where a rank is likelier than one before it, the sort leaves gaps. Then each node has one predecessor, its left sibling
or, for rank 0, its parent, and a knapsack over the preorder of that forest is exact. Increments may rise with size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from topo_search.estimates import PathProbabilities
from topo_search.search.by_size import TreesBySize, candidates, with_left_siblings
from topo_search.search.forest import Forest


def contiguous(
    estimate: PathProbabilities,
    *,
    num_draft_nodes: int,
    max_depth: int | None = None,
    ranks_per_depth: Sequence[int] | None = None,
) -> TreesBySize:
    """The best trees of every size whose sibling ranks are contiguous from 0.

    Args:
        estimate, num_draft_nodes, max_depth, ranks_per_depth: as for `frontier`.
    """
    found = candidates(estimate, max_depth=max_depth, ranks_per_depth=ranks_per_depth)
    forest = Forest.of_paths(with_left_siblings(found), left_out=found.left_out)
    size = min(num_draft_nodes, len(forest.paths))
    skip = np.where(forest.parents >= 0, forest.ends[forest.parents], len(forest.paths))  # no later sibling either
    best = np.zeros((len(forest.paths) + 1, size + 1))
    for place in reversed(range(len(forest.paths))):
        np.maximum(best[skip[place], 1:], forest.probabilities[place] + best[place + 1, :-1], out=best[place, 1:])
    trees = tuple(forest.tree(_chosen(best, skip, nodes)) for nodes in range(size + 1))
    return TreesBySize(trees=trees, tokens=1.0 + best[0], left_out=found.left_out)


def _chosen(best: Float[np.ndarray, "places sizes"], skip: Int[np.ndarray, " nodes"], nodes: int) -> list[int]:
    """The nodes of the best tree; of two that are equal the smaller one."""
    chosen: list[int] = []
    place = 0
    while nodes and place < len(skip):
        if best[place, nodes] > best[skip[place], nodes]:
            chosen.append(place)
            place, nodes = place + 1, nodes - 1
        else:
            place = int(skip[place])
    return chosen
