"""The tree with the most expected tokens per millisecond, exact for each kind of cost.

    no draft time per node below the root   every measured width along the frontier   `width_scan`
    verify time affine in the width         Dinkelbach and a tree recursion           `affine`
    any measured verify times               Dinkelbach and a knapsack over preorder   `knapsack`

Expected tokens are 1 + the sum of path probabilities: judge the winner by replay, and time it for real where draft time
is no sum over expanded nodes.
"""

from __future__ import annotations

import math

from topo_search.estimates import PathProbabilities
from topo_search.search.affine import fastest_affine
from topo_search.search.fastest import Fastest
from topo_search.search.knapsack import fastest_by_knapsack
from topo_search.search.step_costs import AffineCosts, StepCosts
from topo_search.search.width_scan import fastest_by_width


def fastest(estimate: PathProbabilities, costs: StepCosts | AffineCosts, *, num_draft_nodes: int) -> Fastest:
    """The fastest tree of at most `num_draft_nodes`, by the solver that is exact for these costs.

    Args:
        estimate: path probabilities.
        costs: measured verify times, or affine ones.
        num_draft_nodes: the largest size allowed; the empty tree, plain decoding, always is.
    """
    if isinstance(costs, AffineCosts):
        found = fastest_affine(estimate, costs)
        if found.tree.num_draft_nodes <= num_draft_nodes and math.isfinite(found.tokens_at_most_lost):
            return found
        costs = costs.at_every_width(num_draft_nodes)
    solver = fastest_by_knapsack if costs.draft.per_node else fastest_by_width
    return solver(estimate, costs, num_draft_nodes=num_draft_nodes)
