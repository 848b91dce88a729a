"""Trees for typical acceptance, where several siblings can be acceptable at once: the gain is coverage, not a sum.

A step accepts the deepest acceptable node that is in the tree, so a node is worth only what the others do not cover.
Coverage is monotone and submodular in the nodes, but a child can gain more than its parent and prefixes must be closed:
no constant guarantee holds. The search offers whole paths by gain per new node, then exchanges paths for leaves. It is
a heuristic, and is called one wherever its tree is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int

from topo_search.accepts import AcceptTrace
from topo_search.tree import Tree

_TRIED = 64  # paths exchanged for leaves before a tree counts as one that no exchange betters
_SWAPS = 64

Nodes = frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Accept masks made ready to score sets of nodes.

    Attributes:
        tree: the wide tree; node i is `tree.paths[i]`.
        reach: `[kinds, nodes]`, tokens that a step emits if the path to each node is in the tree.
        counts: `[kinds]`, recorded steps of each kind: steps alike in every node are one.
        allowed: `[nodes]`, nodes that may be used.
    """

    tree: Tree
    reach: Int[np.ndarray, "kinds nodes"]
    counts: Int[np.ndarray, " kinds"]
    allowed: Bool[np.ndarray, " nodes"]

    @classmethod
    def of(cls, trace: AcceptTrace, *, max_depth: int | None = None, max_rank: int | None = None) -> Coverage:
        """Count the kinds of steps; deeper nodes and higher ranks are left out."""
        reach, counts = np.unique(trace.reach, axis=0, return_counts=True)
        allowed = [
            (max_depth is None or len(path) <= max_depth) and (max_rank is None or max(path) <= max_rank)
            for path in trace.tree.paths
        ]
        return cls(tree=trace.tree, reach=reach, counts=counts, allowed=np.array(allowed, dtype=np.bool_))

    @cached_property
    def lineages(self) -> tuple[Nodes, ...]:
        """Per node, itself and its ancestors."""
        return tuple(frozenset(slot - 1 for slot in seen[1:]) for seen in self.tree.ancestors[1:])

    def emitted(self, nodes: Iterable[int]) -> Int[np.ndarray, " kinds"]:
        """Tokens that a step of each kind emits with these nodes."""
        emitted: np.ndarray = self.reach[:, sorted(nodes)].max(axis=1, initial=1)
        return emitted

    def tokens(self, nodes: Iterable[int]) -> int:
        """Tokens of all recorded steps together."""
        return int(self.emitted(nodes) @ self.counts)

    def subtree(self, nodes: Iterable[int]) -> Tree:
        """The tree of these nodes, prefix-closed as they are."""
        return Tree(tuple(self.tree.paths[node] for node in nodes))


def covering_trees(coverage: Coverage, sizes: Iterable[int]) -> dict[int, Tree]:
    """Per number of draft nodes, what the greedy search over whole paths finds; smaller where nothing more gains.

    Up to where a path no longer fits, the search for one size is that for every larger one, so it runs once.
    """
    wanted = sorted(set(sizes))
    stages: list[Nodes] = [frozenset()]
    while wanted and (path := _best_path(coverage, stages[-1], wanted[-1] - len(stages[-1]))) is not None:
        stages.append(stages[-1] | path)
    found = {}
    for size in wanted:
        nodes = next(stage for stage in reversed(stages) if len(stage) <= size)
        while (path := _best_path(coverage, nodes, size - len(nodes))) is not None:
            nodes |= path
        found[size] = coverage.subtree(nodes)
    return found


def exchanged(coverage: Coverage, tree: Tree, *, max_swaps: int = _SWAPS) -> Tree:
    """The tree after swaps that each raise the tokens: a whole path comes in, as many leaves go; the best one is taken.

    Args:
        coverage: of the prompts to choose on.
        tree: where to start, a subtree of the wide tree.
        max_swaps: swaps made at most.
    """
    nodes = frozenset(coverage.tree.slots[path] - 1 for path in tree.paths)
    for _ in range(max_swaps):
        best = max(_exchanges(coverage, nodes), key=lambda found: (found[0], -found[1]), default=None)
        if best is None or best[0] <= coverage.tokens(nodes):
            break
        nodes = best[2]
    return coverage.subtree(nodes)


def _best_path(coverage: Coverage, nodes: Nodes, room: int) -> Nodes | None:
    """The new nodes of the path of the largest gain per new node, of equals the shorter, then the first in path order.

    None where no path that fits gains anything.
    """
    gains = _gains(coverage, nodes)
    missing = np.array([len(lineage - nodes) for lineage in coverage.lineages])
    fits = (missing > 0) & (missing <= room) & coverage.allowed & (gains > 0)
    if not fits.any():
        return None
    per_node = np.where(fits, gains / np.maximum(missing, 1), -1.0)
    best = int(np.lexsort((np.arange(len(missing)), missing, -per_node))[0])
    return coverage.lineages[best] - nodes


def _gains(coverage: Coverage, nodes: Nodes) -> Int[np.ndarray, " nodes"]:
    """Tokens gained by adding the path to each node."""
    now = coverage.emitted(nodes)
    gains: np.ndarray = coverage.counts @ (np.maximum(coverage.reach, now[:, None]) - now[:, None])
    return gains


def _exchanges(coverage: Coverage, nodes: Nodes) -> list[tuple[int, int, Nodes]]:
    """The likeliest swaps: tokens after each, the node that its path leads to, and the nodes."""
    gains = _gains(coverage, nodes)
    outside = [v for v in np.argsort(-gains, kind="stable").tolist() if v not in nodes and coverage.allowed[v]]
    found = []
    for node in outside[:_TRIED]:
        if gains[node] <= 0:
            break
        kept = _without_leaves(coverage, nodes | coverage.lineages[node], keep=node, size=len(nodes))
        if kept is not None:
            found.append((coverage.tokens(kept), node, kept))
    return found


def _without_leaves(coverage: Coverage, nodes: Nodes, *, keep: int, size: int) -> Nodes | None:
    """The nodes after taking away, one by one, the leaf that loses least, never `keep`; None where none is left."""
    while len(nodes) > size:
        inner = {int(coverage.tree.parents[node + 1]) - 1 for node in nodes}
        leaves = [node for node in sorted(nodes) if node not in inner]
        if leaves == [keep]:
            return None
        losses = _losses(coverage, leaves)
        nodes -= {min((loss, leaf) for loss, leaf in zip(losses, leaves, strict=True) if leaf != keep)[1]}
    return nodes


def _losses(coverage: Coverage, leaves: Sequence[int]) -> list[int]:
    """Tokens lost by taking each leaf away, its parent staying."""
    reach = coverage.reach[:, leaves]
    best = reach.max(axis=1, initial=1)
    at = reach.argmax(axis=1)
    others = reach.copy()
    np.put_along_axis(others, at[:, None], 1, axis=1)
    second = others.max(axis=1, initial=1)
    losses = []
    for index, leaf in enumerate(leaves):
        parent = int(coverage.tree.parents[leaf + 1]) - 1
        fallback = coverage.reach[:, parent] if parent >= 0 else np.ones_like(best)
        left = np.where(at == index, np.maximum(second, fallback), best)
        losses.append(int((best - left) @ coverage.counts))
    return losses
