"""Swaps of single nodes: take a leaf away, put another node on, accept only fewer replayed steps.

Candidates are ranked by what they change to first order. With W(j) the steps left from row j, a node v that a step
starting at s would accept next changes the total by about W(s + emitted + 1) - W(s + emitted), summed over the starts
of the present walk; taking a leaf away is the reverse. Exact is the same sum over the starts of the *new* walk, so
replay has the last word.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from topo_search.prefixes import NO_NODE, PrefixTable
from topo_search.replay import replay, walk
from topo_search.trace import RankTrace
from topo_search.tree import Path, Tree

_TRIED = 256  # swaps replayed before a tree counts as one that no swap betters
_BATCH, _BATCH_ROWS = 32, 2**22  # swaps replayed at once, and the rows they may have together
_UNSEEN = -2  # a node of the tree that no row passes; its removal changes nothing


def swapped(trace: RankTrace, table: PrefixTable, tree: Tree, *, max_depth: int, max_swaps: int) -> Tree:
    """The tree after swaps that each lower the replayed steps; the best of those tried together is taken.

    Args:
        trace: the selection prompts.
        table: its prefixes.
        tree: where to start.
        max_depth: nodes deeper than this are never added.
        max_swaps: swaps made at most.
    """
    for _ in range(max_swaps):
        better = _best_swap(_State.of(trace, table, tree), max_depth)
        if better is None:
            break
        tree = better
    return tree


def steps_left(
    emitted: Int[np.ndarray, " rows"], remaining: Int[np.ndarray, " rows"]
) -> Int[np.ndarray, " rows_and_end"]:
    """Steps from each row to its answer's end, and 0 for the end itself, last. By doubling the jumps.

    Args:
        emitted: what a step starting at each row emits.
        remaining: tokens left at each row, at least that many.
    """
    end = len(emitted)
    jump = np.append(np.where(emitted == remaining, end, np.arange(end) + emitted), end)
    steps = np.append(np.ones(end, dtype=np.int64), 0)
    while np.any(jump != end):
        steps = steps + steps[jump]
        jump = jump[jump]
    return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """One tree's walk.

    Attributes:
        hits: `[rows]`, how deep each row runs in the tree.
        hit_node, next_node: `[rows]`, the deepest node of the tree that the row passes and the one after it, or -1.
        steps: of the whole walk.
        gain, loss: `[nodes]`, steps saved by adding and lost by removing each node, to first order.
    """

    trace: RankTrace
    table: PrefixTable
    tree: Tree
    hits: np.ndarray
    hit_node: np.ndarray
    next_node: np.ndarray
    steps: int
    gain: np.ndarray
    loss: np.ndarray

    @classmethod
    def of(cls, trace: RankTrace, table: PrefixTable, tree: Tree) -> _State:
        nodes = table.find(tree.paths)
        inside = np.zeros(len(table.depths) + 1, dtype=np.int16)
        inside[nodes[nodes != NO_NODE]] = 1
        hits = inside[table.node_of_row].sum(axis=1, dtype=np.int16)
        rows, edge = np.arange(len(hits)), np.full((len(hits), 1), NO_NODE, dtype=np.int32)
        passed = np.concatenate([edge, table.node_of_row, edge], axis=1)
        hit_node, next_node = passed[rows, hits], passed[rows, hits + 1]
        walked = replay(trace, [tree], table=table)
        starts = np.flatnonzero(walked.visited[0])
        saved, lost = _first_order(starts, walked.emitted[0].astype(np.int64), hits, trace.remaining)
        count = len(table.depths) + 1  # entry 0: no node
        return cls(
            trace=trace,
            table=table,
            tree=tree,
            hits=hits,
            hit_node=hit_node,
            next_node=next_node,
            steps=len(starts),
            gain=np.bincount(next_node[starts] + 1, weights=saved, minlength=count)[1:],
            loss=np.bincount(hit_node[starts] + 1, weights=lost, minlength=count)[1:],
        )


def _first_order(
    starts: Int[np.ndarray, " steps"],
    emitted: Int[np.ndarray, " rows"],
    hits: Int[np.ndarray, " rows"],
    remaining: Int[np.ndarray, " rows"],
) -> tuple[Int[np.ndarray, " steps"], Int[np.ndarray, " steps"]]:
    """Per present start: the steps saved if it hit one token more, and lost if it hit one less."""
    left = steps_left(emitted, remaining)
    at, room = starts + emitted[starts], (remaining - emitted)[starts]
    end = len(emitted)
    here, further = np.where(room > 0, at, end), np.where(room > 1, at + 1, end)
    saved = np.where(room > 0, left[here] - left[further], 0)
    bites = hits[starts] + 1 == emitted[starts]  # else the answer's end cut the step, and one hit less changes nothing
    lost = np.where(bites & (hits[starts] > 0), left[at - 1] - left[here], 0)
    return saved, lost


def _best_swap(state: _State, max_depth: int) -> Tree | None:
    removed, leaves, added = _ranked_swaps(state, max_depth)
    size = max(1, min(_BATCH, _BATCH_ROWS // max(len(state.hits), 1)))
    for first in range(0, len(added), size):
        batch = slice(first, first + size)
        steps = _steps_after(state, leaves[batch], added[batch])
        best = int(steps.argmin())
        if steps[best] < state.steps:
            node = int(added[first + best])
            path = tuple(state.table.ranks[node, : state.table.depths[node]].tolist())
            kept = tuple(p for p in state.tree.paths if p != removed[first + best])
            return Tree((*kept, path))
    return None


def _ranked_swaps(
    state: _State, max_depth: int
) -> tuple[list[Path], Int[np.ndarray, " swaps"], Int[np.ndarray, " swaps"]]:
    """The likeliest swaps first: the leaf's path, its number (or `_UNSEEN`), and the node to put on."""
    table, leaves = state.table, state.tree.leaves
    numbers = table.find(leaves)
    loss = np.where(numbers == NO_NODE, 0.0, np.append(state.loss, 0.0)[numbers])
    cheap = np.argsort(loss, kind="stable")
    addable = _addable(state, max_depth)
    useful = addable[np.lexsort((addable, -table.starting[addable], -state.gain[addable]))]
    cheap, useful = cheap[:_TRIED], useful[:_TRIED]
    scores = state.gain[useful][None, :] - loss[cheap][:, None]
    orphans = table.parents[useful][None, :] == np.where(numbers == NO_NODE, _UNSEEN, numbers)[cheap][:, None]
    scores[orphans] = -np.inf
    order = np.argsort(-scores, axis=None, kind="stable")[: min(_TRIED, int((~orphans).sum()))]
    leaf, node = cheap[order // max(len(useful), 1)], useful[order % max(len(useful), 1)]
    return [leaves[i] for i in leaf], np.where(numbers == NO_NODE, _UNSEEN, numbers)[leaf], node


def _addable(state: _State, max_depth: int) -> Int[np.ndarray, " nodes"]:
    """Nodes that occur, are not in the tree, whose parent is in it or the root, and that are shallow enough."""
    table = state.table
    nodes = table.find(state.tree.paths)
    inside = np.zeros(len(table.depths) + 1, dtype=np.bool_)
    inside[nodes[nodes != NO_NODE]] = True
    inside[-1] = True  # the root, which NO_NODE = -1 picks
    found: np.ndarray = np.flatnonzero(inside[table.parents] & ~inside[:-1] & (table.depths <= max_depth))
    return found


def _steps_after(
    state: _State, removed: Int[np.ndarray, " swaps"], added: Int[np.ndarray, " swaps"]
) -> Int[np.ndarray, " swaps"]:
    """Replayed steps of the tree after each swap."""
    hits = state.hits + (state.next_node == added[:, None]) - (state.hit_node == removed[:, None])
    return walk(state.trace, hits.astype(np.int16)).steps
