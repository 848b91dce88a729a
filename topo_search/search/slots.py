"""Ordered slots: Sequoia's problem, where a child's chance depends on its place among its siblings only.

T_d[n] = 1 + max over children with n_1, n_2, ... nodes of the sum of acceptance[d][k] x T_{d+1}[n_k] (arXiv 2402.12374,
section 3.1), slots filled from the first. A knapsack over the slots of each depth solves it in depth x slots x n^2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from topo_search.search.by_size import TreesBySize, no_worse_than_smaller
from topo_search.search.max_plus import convolved
from topo_search.tree import Path, Tree


def ordered_slots(acceptance: Sequence[Sequence[float]], *, num_draft_nodes: int) -> TreesBySize:
    """The best tree of every size.

    Args:
        acceptance: per depth from 1, the probability that the child in each slot is accepted; as many depths as the
            tree may have levels below the root. Sequoia's one vector for every depth is `[vector] * max_depth`.
        num_draft_nodes: the largest size wanted, root excluded.
    """
    size = num_draft_nodes + 1  # a subtree is counted with its own root
    worth = np.concatenate([[-np.inf, 1.0], np.full(size - 1, -np.inf)])  # a node without children
    splits: list[list[np.ndarray]] = []
    for slots in reversed(acceptance):
        worth, split = _level(slots, worth, size)
        splits.insert(0, split)
    tokens = worth[1:]
    possible = np.flatnonzero(np.isfinite(tokens))
    nearest = [int(possible[possible <= nodes].max()) for nodes in range(num_draft_nodes + 1)]
    trees = {nodes: Tree(tuple(_paths(splits, (), nodes))) for nodes in possible.tolist()}
    return no_worse_than_smaller((trees[nodes] for nodes in nearest), tokens[nearest], 0.0)


def _level(
    slots: Sequence[float], below: Float[np.ndarray, " sizes"], size: int
) -> tuple[Float[np.ndarray, " sizes"], list[np.ndarray]]:
    """Worth of a subtree of each size one depth up, and per slot how many nodes go to it, by nodes left for it on."""
    rest = np.concatenate([[0.0], np.full(size - 1, -np.inf)])  # of the slots after: none
    splits: list[np.ndarray] = []
    known = np.isfinite(below[:size])
    for chance in reversed(slots):
        filled = np.full(size, -np.inf)
        filled[known] = chance * below[:size][known]
        best, split = convolved(rest, filled, size)
        best[0], split[0] = 0.0, 0  # the slot, and with it every later one, stays empty
        rest = best
        splits.insert(0, split)
    return np.concatenate([[-np.inf], 1.0 + rest]), splits


def _paths(splits: list[list[np.ndarray]], node: Path, nodes: int) -> list[Path]:
    """The nodes below one node, `nodes` of them."""
    found: list[Path] = []
    slot = 0
    while nodes:
        taken = int(splits[len(node)][slot][nodes])
        child = (*node, slot)
        found += [child, *_paths(splits, child, taken - 1)]
        nodes, slot = nodes - taken, slot + 1
    return found
