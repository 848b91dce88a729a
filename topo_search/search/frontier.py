"""The nested family of best trees of every size: one sort."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from topo_search.estimates import PathProbabilities
from topo_search.tree import Path, Tree

_SIGNIFICANT_DIGITS = 12  # ties are compared after rounding, which is monotone, so closure survives


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """Paths in the order in which the best trees add them.

    Attributes:
        order: the first n paths are the best tree of n draft nodes, for every n.
        probabilities: of each path; they do not rise.
    """

    order: tuple[Path, ...]
    probabilities: Float[np.ndarray, " nodes"]

    def tree(self, num_draft_nodes: int) -> Tree:
        """The best tree of that size; the largest one where the paths run out."""
        return Tree(self.order[:num_draft_nodes])

    def expected_tokens(self) -> Float[np.ndarray, " sizes"]:
        """Expected tokens per step of every size from 0 up: 1 plus the sum of the probabilities."""
        return np.concatenate([[1.0], 1.0 + np.cumsum(self.probabilities)])


def frontier(estimate: PathProbabilities, *, num_draft_nodes: int, max_depth: int | None = None) -> Frontier:
    """Sort by (falling probability, depth, ranks) and keep the first `num_draft_nodes`; zero is never added.

    Args:
        estimate: probabilities that fall from parent to child.
        num_draft_nodes: the largest size wanted.
        max_depth: leave out deeper nodes.
    """
    allowed = estimate.probabilities > 0
    if max_depth is not None:
        allowed &= estimate.depths <= max_depth
    nodes = np.flatnonzero(allowed)
    rounded = _rounded(estimate.probabilities[nodes])
    if 0 < num_draft_nodes < len(nodes):  # sort only what can be among the first, ties of the last one included
        contenders = rounded >= np.partition(rounded, -num_draft_nodes)[-num_draft_nodes]
        nodes, rounded = nodes[contenders], rounded[contenders]
    rank_keys = tuple(estimate.ranks[nodes, column] for column in reversed(range(estimate.ranks.shape[1])))
    chosen = nodes[np.lexsort((*rank_keys, estimate.depths[nodes], -rounded))][:num_draft_nodes]
    order = tuple(tuple(int(r) for r in estimate.ranks[node, : estimate.depths[node]]) for node in chosen)
    return Frontier(order=order, probabilities=estimate.probabilities[chosen])


def _rounded(values: Float[np.ndarray, " nodes"]) -> Float[np.ndarray, " nodes"]:
    exponents = np.floor(np.log10(values))
    scale = 10.0 ** (_SIGNIFICANT_DIGITS - 1 - exponents)
    rounded: np.ndarray = np.round(values * scale) / scale
    return rounded
