"""The best trees of every size under the rules of the engine that will load them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from topo_search.errors import InputError
from topo_search.estimates import PathProbabilities
from topo_search.search.by_size import TreesBySize
from topo_search.search.contiguous import contiguous
from topo_search.search.expanded_first import expanded_first
from topo_search.search.frontier import Frontier, frontier
from topo_search.search.uniform import uniform

RULES: dict[str, Callable[..., Frontier | TreesBySize]] = {
    "any": frontier,
    "contiguous": contiguous,
    "expanded-first": expanded_first,
    "uniform": uniform,
}


def best_trees(
    estimate: PathProbabilities,
    *,
    num_draft_nodes: int,
    rule: str = "any",
    max_depth: int | None = None,
    ranks_per_depth: Sequence[int] | None = None,
) -> Frontier | TreesBySize:
    """The best tree of every size, by the method that is exact under the rule.

    Args:
        estimate: path probabilities.
        num_draft_nodes: the largest size wanted.
        rule: `any` prefix-closed tree (one sort); `contiguous` sibling ranks (knapsack over preorder);
            `expanded-first`, contiguous and expanded siblings before the others, as Hydra drafts (programme over
            children); `uniform` branching per level (all vectors).
        max_depth, ranks_per_depth: caps, which every rule keeps.

    Raises:
        InputError: no such rule; the message names the choices.
    """
    if rule not in RULES:
        raise InputError(f"There is no tree rule {rule!r}; choose one of {', '.join(RULES)}.")
    return RULES[rule](estimate, num_draft_nodes=num_draft_nodes, max_depth=max_depth, ranks_per_depth=ranks_per_depth)
