"""The nested family of best trees of every size: one sort."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from topo_search.estimates import PathProbabilities
from topo_search.estimates.probabilities import best_order
from topo_search.tree import Path, Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """Paths in the order in which the best trees add them.

    Attributes:
        order: the first n paths are the best tree of n draft nodes, for every n.
        probabilities: of each path; they do not rise.
        left_out: no node that the estimate does not list has a larger probability.
    """

    order: tuple[Path, ...]
    probabilities: Float[np.ndarray, " nodes"]
    left_out: float = 0.0

    def tree(self, num_draft_nodes: int) -> Tree:
        """The best tree of that size; the largest one where the paths run out."""
        return Tree(self.order[:num_draft_nodes])

    def expected_tokens(self) -> Float[np.ndarray, " sizes"]:
        """Expected tokens per step of every size from 0 up: 1 plus the sum of the probabilities."""
        return np.concatenate([[1.0], 1.0 + np.cumsum(self.probabilities)])

    def tokens_at_most_lost(self, num_draft_nodes: int) -> float:
        """What nodes that the estimate does not list could still add to the tree of that size; 0 where it is exact."""
        known = np.zeros(num_draft_nodes)
        known[: len(self.probabilities)] = self.probabilities[:num_draft_nodes]
        return float(np.maximum(self.left_out - known, 0.0).sum())


def frontier(
    estimate: PathProbabilities,
    *,
    num_draft_nodes: int,
    max_depth: int | None = None,
    ranks_per_depth: Sequence[int] | None = None,
) -> Frontier:
    """Sort by (falling probability, depth, ranks) and keep the first `num_draft_nodes`; zero is never added.

    Exact under both caps: what they allow is prefix-closed, and no child is likelier than its parent.

    Args:
        estimate: probabilities that fall from parent to child.
        num_draft_nodes: the largest size wanted.
        max_depth: leave out deeper nodes.
        ranks_per_depth: how many ranks each depth may use, from depth 1; depths beyond it may use none.
    """
    nodes = np.flatnonzero(allowed(estimate, max_depth=max_depth, ranks_per_depth=ranks_per_depth))
    ranks, depths, probabilities = estimate.ranks[nodes], estimate.depths[nodes], estimate.probabilities[nodes]
    chosen = best_order(ranks, depths, probabilities, num_draft_nodes)
    order = tuple(tuple(ranks[node, : depths[node]].tolist()) for node in chosen)
    return Frontier(order=order, probabilities=probabilities[chosen], left_out=estimate.left_out)


def allowed(
    estimate: PathProbabilities, *, max_depth: int | None, ranks_per_depth: Sequence[int] | None
) -> Bool[np.ndarray, " nodes"]:
    """Which nodes the caps allow; see `frontier`."""
    deepest = estimate.ranks.shape[1] if max_depth is None else max_depth
    kept: np.ndarray = estimate.depths <= deepest
    if ranks_per_depth is not None:
        caps = np.zeros(estimate.ranks.shape[1], dtype=np.int64)
        caps[: len(ranks_per_depth)] = ranks_per_depth[: len(caps)]
        kept &= (estimate.ranks < caps).all(axis=1, where=estimate.ranks >= 0)
    return kept
