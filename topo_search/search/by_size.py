"""`TreesBySize`: the best tree of every size where the trees are not nested."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from topo_search.estimates import PathProbabilities
from topo_search.search.frontier import allowed
from topo_search.tree import Path, Tree

_CANDIDATES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TreesBySize:
    """What `Frontier` is for the free problem, for trees under a rule.

    Attributes:
        trees: entry n is the best tree of at most n draft nodes.
        tokens: `[sizes]`, expected tokens per step of each.
        left_out: no node that was not considered has a larger probability.
    """

    trees: tuple[Tree, ...]
    tokens: Float[np.ndarray, " sizes"]
    left_out: float = 0.0

    def tree(self, num_draft_nodes: int) -> Tree:
        """The best tree of at most that size."""
        return self.trees[min(num_draft_nodes, len(self.trees) - 1)]

    def expected_tokens(self) -> Float[np.ndarray, " sizes"]:
        """Expected tokens per step of every size from 0 up."""
        return self.tokens

    def tokens_at_most_lost(self, num_draft_nodes: int) -> float:
        """What nodes that were not considered could still add."""
        return num_draft_nodes * self.left_out


def candidates(
    estimate: PathProbabilities, *, max_depth: int | None, ranks_per_depth: Sequence[int] | None
) -> PathProbabilities:
    """The likeliest nodes within the caps, few enough for a dynamic programme."""
    nodes = np.flatnonzero(allowed(estimate, max_depth=max_depth, ranks_per_depth=ranks_per_depth))
    within = PathProbabilities(
        ranks=estimate.ranks[nodes],
        depths=estimate.depths[nodes],
        probabilities=estimate.probabilities[nodes],
        left_out=estimate.left_out,
    )
    return within.first(_CANDIDATES)


def with_left_siblings(found: PathProbabilities) -> dict[Path, float]:
    """The listed paths and, with probability 0, every sibling of lower rank that a contiguous tree must take first."""
    known = dict(zip(found.paths, found.probabilities.tolist(), strict=True))
    widest: dict[Path, int] = {}
    for path in known:
        widest[path[:-1]] = max(widest.get(path[:-1], 0), path[-1])
    filled = ((*parent, rank) for parent, last in widest.items() for rank in range(last + 1))
    return {path: known.get(path, 0.0) for path in filled}


def no_worse_than_smaller(trees: Iterable[Tree], tokens: Float[np.ndarray, " sizes"], left_out: float) -> TreesBySize:
    """From trees of exactly n nodes to those of at most n: a larger tree counts only where it emits more."""
    kept: list[Tree] = []
    most: list[float] = []
    for tree, value in zip(trees, tokens.tolist(), strict=True):
        rises = not most or value > most[-1]
        kept.append(tree if rises else kept[-1])
        most.append(value if rises else most[-1])
    return TreesBySize(trees=tuple(kept), tokens=np.array(most), left_out=left_out)
