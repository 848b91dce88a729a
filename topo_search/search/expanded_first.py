"""Trees that Hydra can draft: contiguous sibling ranks, of which the first few are expanded.

Hydra's grounded drafting knows each parent's number of children and how many of them have children themselves (arXiv
2402.05109; its buffers hold counts only). Exact by a programme over the children of each node: c of them, the first
e <= c expanded, and the max-plus convolution of the tables of what lies below those e.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from topo_search.estimates import PathProbabilities
from topo_search.search.by_size import TreesBySize, candidates, no_worse_than_smaller, with_left_siblings
from topo_search.search.max_plus import convolved
from topo_search.tree import Path, Tree


def expanded_first(
    estimate: PathProbabilities,
    *,
    num_draft_nodes: int,
    max_depth: int | None = None,
    ranks_per_depth: Sequence[int] | None = None,
) -> TreesBySize:
    """The best trees of every size with contiguous ranks whose expanded siblings come before the others.

    Args:
        estimate, num_draft_nodes, max_depth, ranks_per_depth: as for `frontier`.
    """
    found = candidates(estimate, max_depth=max_depth, ranks_per_depth=ranks_per_depth)
    probabilities = _with_first_children(with_left_siblings(found))
    size = min(num_draft_nodes, len(probabilities))
    tables = _tables(probabilities, size)
    worth = tables[()].worth[: size + 1]
    possible = np.flatnonzero(np.isfinite(worth)).tolist()
    trees = {nodes: Tree(tuple(_paths(tables, (), nodes))) for nodes in possible}
    smaller = [trees[max(n for n in possible if n <= nodes)] for nodes in range(size + 1)]
    tokens = 1.0 + np.pad(worth, (0, size + 1 - len(worth)), constant_values=-np.inf)
    return no_worse_than_smaller(smaller, tokens, found.left_out)


def _with_first_children(probabilities: dict[Path, float]) -> dict[Path, float]:
    """With a child of probability 0 for every node that must be expanded before a later sibling may be."""
    expanded = {path[:-1] for path in probabilities if len(path) > 1}
    missing = {
        (*node[:-1], rank, 0): 0.0
        for node in expanded
        for rank in range(node[-1])
        if (*node[:-1], rank) not in expanded
    }
    return probabilities | missing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Below:
    """The best that lies strictly below one node, for exactly m nodes.

    Attributes:
        worth: `[sizes]`, sum of probabilities; -inf where there is no such tree.
        children, expanded: `[sizes]`, how many children it has and how many of them are expanded.
        last: per number e of expanded children, `[sizes]`: of the nodes below those e, how many lie below the last.
    """

    worth: np.ndarray
    children: np.ndarray
    expanded: np.ndarray
    last: tuple[np.ndarray, ...]


def _tables(probabilities: dict[Path, float], size: int) -> dict[Path, _Below]:
    """The table of every node that has candidate children, and of the root."""
    below: dict[Path, list[float]] = {(): []}
    for path in sorted(probabilities, key=lambda path: path[-1]):
        below.setdefault(path[:-1], []).append(probabilities[path])
    tables: dict[Path, _Below] = {}
    for parent in sorted(below, key=len, reverse=True):
        deeper = [tables[(*parent, rank)].worth for rank in range(len(below[parent])) if (*parent, rank) in tables]
        gaps = next((r for r in range(len(below[parent])) if (*parent, r) not in tables), len(deeper))
        tables[parent] = _table(below[parent], deeper[:gaps], size)
    return tables


def _table(siblings: list[float], deeper: list[Float[np.ndarray, ...]], size: int) -> _Below:
    """Combine the children's probabilities with the tables of the first of them, up to the first without any."""
    length = min(size, len(siblings) + sum(len(worth) - 1 for worth in deeper)) + 1
    worth, children, expanded = np.full(length, -np.inf), np.zeros(length, np.int64), np.zeros(length, np.int64)
    worth[0] = 0.0
    sums, last = np.zeros(1), [np.zeros(1, dtype=np.int64)]
    most, most_expanded = np.full(length, -np.inf), np.zeros(length, dtype=np.int64)  # over e expanded so far
    most[0] = 0.0
    shown = 0.0
    for count, probability in enumerate(siblings, start=1):
        shown += probability
        if count <= len(deeper):
            opened = deeper[count - 1].copy()
            opened[0] = -np.inf  # an expanded child has at least one node below it
            sums, split = convolved(sums, opened, length)
            last.append(split)
            better = sums > most[: len(sums)]
            most[: len(sums)][better], most_expanded[: len(sums)][better] = sums[better], count
        if count >= length:
            break
        total = shown + most[: length - count]
        better = total > worth[count:]
        worth[count:][better] = total[better]
        children[count:][better], expanded[count:][better] = count, most_expanded[: length - count][better]
    return _Below(worth=worth, children=children, expanded=expanded, last=tuple(last))


def _paths(tables: dict[Path, _Below], node: Path, nodes: int) -> list[Path]:
    if not nodes:
        return []
    table = tables[node]
    children = [(*node, rank) for rank in range(int(table.children[nodes]))]
    rest, found = nodes - len(children), list(children)
    for count in range(int(table.expanded[nodes]), 0, -1):
        below = int(table.last[count][rest])
        found += _paths(tables, children[count - 1], below)
        rest -= below
    return found
