"""Tokens per millisecond where a step's cost depends on width and depth only: scan every measured width."""

from __future__ import annotations

from topo_search.errors import InputError
from topo_search.estimates import PathProbabilities
from topo_search.search.fastest import Fastest, expected_tokens, plain
from topo_search.search.frontier import frontier
from topo_search.search.step_costs import StepCosts


def fastest_by_width(estimate: PathProbabilities, costs: StepCosts, *, num_draft_nodes: int) -> Fastest:
    """The best frontier tree over all measured widths and depth caps; exact, and blind to no plateau or drop.

    A tie goes to the smaller tree, then to the shallower one.

    Args:
        estimate: path probabilities.
        costs: without draft time per expanded node below the root.
        num_draft_nodes: the largest size allowed.

    Raises:
        InputError: the costs do depend on which nodes are expanded.
    """
    if costs.draft.per_node:
        raise InputError("Draft time depends on the nodes expanded, so no scan over widths is exact; use the knapsack.")
    best = plain(costs.verify_ms[1])
    for max_depth in range(1, costs.draft.max_depth + 1):
        family = frontier(estimate, num_draft_nodes=num_draft_nodes, max_depth=max_depth)
        for width in sorted(costs.verify_ms):
            nodes = width - 1
            if not 0 < nodes <= len(family.order):
                continue
            tree = family.tree(nodes)
            found = Fastest(
                tree=tree,
                tokens_per_step=expected_tokens(family.probabilities[:nodes].tolist()),
                step_ms=costs.step_ms(tree),
                tokens_at_most_lost=family.tokens_at_most_lost(num_draft_nodes),
            )
            if found.tokens_per_s > best.tokens_per_s or (
                found.tokens_per_s == best.tokens_per_s and tree.num_draft_nodes < best.tree.num_draft_nodes
            ):
                best = found
    return best
