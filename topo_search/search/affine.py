"""Tokens per millisecond where verify time is affine in the width: Dinkelbach (1967) and a tree recursion.

For a price of lambda tokens per millisecond and a depth cap, a node is worth its probability less its verify time, and
its children's worth less the draft time of expanding it. The root is different: it is always there, and where it is not
expanded no head runs at all.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from jaxtyping import Bool

from topo_search.estimates import PathProbabilities
from topo_search.search.fastest import RISES, Fastest, expected_tokens, plain
from topo_search.search.forest import Forest
from topo_search.search.step_costs import AffineCosts


def fastest_affine(estimate: PathProbabilities, costs: AffineCosts) -> Fastest:
    """The fastest tree of any size; exact among the nodes that the estimate lists.

    Args:
        estimate: path probabilities.
        costs: affine verify time, draft times per expanded node and per depth.

    Returns:
        The tree; `tokens_at_most_lost` is infinite where unlisted nodes are likely enough to pay for themselves.
    """
    forest = Forest.of(estimate, max_depth=costs.draft.max_depth, count=len(estimate.depths))
    best = plain(costs.fixed_ms)
    while True:
        price = best.tokens_per_step / best.step_ms
        options = [_best_at(forest, costs, price, max_depth) for max_depth in range(1, costs.draft.max_depth + 1)]
        if not options:
            return best
        _, nodes = max(options, key=lambda option: option[0])
        tree = forest.tree(np.flatnonzero(nodes))
        lost = 0.0 if forest.left_out <= price * costs.per_node_ms else math.inf
        found = Fastest(
            tree=tree,
            tokens_per_step=expected_tokens(forest.probabilities[nodes].tolist()),
            step_ms=costs.step_ms(tree),
            tokens_at_most_lost=lost,
        )
        if found.tokens_per_s <= best.tokens_per_s * RISES:
            return replace(best, tokens_at_most_lost=lost)
        best = found


def _best_at(
    forest: Forest, costs: AffineCosts, price: float, max_depth: int
) -> tuple[float, Bool[np.ndarray, " nodes"]]:
    """The largest worth of a tree within the depth cap, and its nodes."""
    worth = forest.probabilities - price * costs.per_node_ms
    expanded = np.zeros(len(worth) + 1, dtype=np.bool_)  # last: the root, which its children's parent -1 picks
    gain = 0.0
    for depth in range(max_depth - 1, -1, -1):
        children = np.flatnonzero((forest.depths == depth + 1) & (worth > 0))
        below = np.bincount(forest.parents[children] + 1, weights=worth[children], minlength=len(worth) + 1)
        gains = np.roll(below, -1) - price * costs.draft.per_expanded[depth]  # entry 0, the root, moves to the end
        at = np.append(forest.depths == depth, depth == 0)
        expanded |= at & (gains > 0)
        worth += np.where(expanded & at, gains, 0.0)[:-1]
        gain = max(0.0, float(gains[-1]))
    chosen = np.zeros(len(worth) + 1, dtype=np.bool_)
    chosen[-1] = True
    for depth in range(1, max_depth + 1):
        nodes = np.flatnonzero((forest.depths == depth) & (worth > 0))
        above = forest.parents[nodes]
        chosen[nodes] = chosen[above] & expanded[above]
    fixed = price * (costs.fixed_ms + costs.draft.by_depth[max_depth])
    return 1.0 - fixed + gain, chosen[:-1]
