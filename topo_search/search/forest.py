"""Candidate nodes in preorder, the order in which the tree recursions and knapsacks run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from topo_search.estimates import PathProbabilities
from topo_search.search.frontier import allowed
from topo_search.tree import Path, Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Nodes of positive probability, each parent right before its subtree.

    Attributes:
        paths: of the nodes.
        depths: `[nodes]`.
        probabilities: `[nodes]`.
        parents: `[nodes]`, index of the parent; -1 under the root.
        ends: `[nodes]`, index after the node's subtree.
        left_out: no node that is not here has a larger probability.
    """

    paths: tuple[Path, ...]
    depths: Int[np.ndarray, " nodes"]
    probabilities: Float[np.ndarray, " nodes"]
    parents: Int[np.ndarray, " nodes"]
    ends: Int[np.ndarray, " nodes"]
    left_out: float

    @classmethod
    def of(cls, estimate: PathProbabilities, *, max_depth: int, count: int) -> Forest:
        """The `count` likeliest nodes no deeper than `max_depth`; a prefix-closed set."""
        nodes = np.flatnonzero(allowed(estimate, max_depth=max_depth, ranks_per_depth=None))
        best = PathProbabilities(
            ranks=estimate.ranks[nodes],
            depths=estimate.depths[nodes],
            probabilities=estimate.probabilities[nodes],
            left_out=estimate.left_out,
        ).first(count)
        known = dict(zip(best.paths, best.probabilities.tolist(), strict=True))
        return cls.of_paths(known, left_out=best.left_out)

    @classmethod
    def of_paths(cls, probabilities: dict[Path, float], *, left_out: float) -> Forest:
        """The forest of a prefix-closed set of paths."""
        paths = tuple(sorted(probabilities))  # tuples sort a prefix before what it begins: preorder
        at = {path: index for index, path in enumerate(paths)}
        depths = np.array([len(path) for path in paths], dtype=np.int64)
        return cls(
            paths=paths,
            depths=depths,
            probabilities=np.array([probabilities[path] for path in paths], dtype=np.float64),
            parents=np.array([at.get(path[:-1], -1) for path in paths], dtype=np.int64),
            ends=_ends(depths),
            left_out=left_out,
        )

    def tree(self, nodes: Iterable[int] | Int[np.ndarray, " chosen"]) -> Tree:
        """The tree of these nodes."""
        return Tree(tuple(self.paths[node] for node in nodes))


def _ends(depths: Int[np.ndarray, " nodes"]) -> Int[np.ndarray, " nodes"]:
    """A subtree ends before the next node that is no deeper than its root."""
    ends = np.full(len(depths), len(depths), dtype=np.int64)
    for depth in np.unique(depths):
        shallow = np.append(np.flatnonzero(depths <= depth), len(depths))
        nodes = np.flatnonzero(depths == depth)
        ends[nodes] = shallow[np.searchsorted(shallow, nodes) + 1]
    return ends
