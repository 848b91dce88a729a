"""Step-start refinement: a tree of the same size and depth that takes fewer steps on the selection prompts.

Counting every position assumes that steps start everywhere. They start where the previous step ended, which depends on
the tree. So: count at the step starts of the present tree, sort again, repeat; the iteration may cycle and its fixed
point may be worse than its start, so the best tree by replay is kept. Then single nodes are swapped, judged by replay.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import numpy as np

from topo_search.estimates import PathProbabilities, backoff
from topo_search.prefixes import PrefixTable
from topo_search.replay import replay
from topo_search.search.frontier import frontier
from topo_search.search.swaps import swapped
from topo_search.trace import RankTrace
from topo_search.tree import Path, Tree

_ROUNDS = 16  # recounts at most; most traces repeat a tree within five


def refine(
    trace: RankTrace,
    table: PrefixTable,
    tree: Tree,
    *,
    estimator: Callable[[PrefixTable], PathProbabilities] = backoff,
    max_depth: int | None = None,
    max_swaps: int = 64,
) -> Tree:
    """A tree of the same size that replays in no more steps than `tree`; the same one where none is found.

    Never worse than `tree` on these prompts; nothing is promised for others, so score the result on prompts that were
    not used here. The end is no global optimum.

    Args:
        trace: the selection prompts.
        table: its prefixes.
        tree: where to start: the frontier's.
        estimator: turns counts at step starts into path probabilities.
        max_depth: of the result; as deep as `tree` unless given, so that its step takes no longer.
        max_swaps: swaps made at most; 0 only recounts.

    Raises:
        MismatchError: the tree is deeper, or uses higher ranks, than the trace resolves.
    """
    deepest = tree.depth if max_depth is None else min(max_depth, trace.depth)
    every_row = frontier(estimator(table), num_draft_nodes=tree.num_draft_nodes, max_depth=deepest).order
    best, fewest = tree, None
    present, seen = tree, set[tuple[Path, ...]]()
    while present.paths not in seen and len(seen) < _ROUNDS:
        seen.add(present.paths)
        walk = replay(trace, [present], table=table)
        if fewest is None or walk.steps[0] < fewest:
            best, fewest = present, int(walk.steps[0])
        counted = table.counted(np.flatnonzero(walk.visited[0]))
        family = frontier(estimator(counted), num_draft_nodes=tree.num_draft_nodes, max_depth=deepest)
        present = _filled(family.order, every_row, tree)
    return swapped(trace, table, best, max_depth=deepest, max_swaps=max_swaps)


def _filled(order: tuple[Path, ...], further: tuple[Path, ...], tree: Tree) -> Tree:
    """The first paths of `order`, then of `further`, then of the tree, up to its size: few starts pass few nodes."""
    distinct = dict.fromkeys(chain(order, further, tree.paths))
    return Tree(tuple(distinct)[: tree.num_draft_nodes])
