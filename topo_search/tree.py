"""A verification tree: which paths of ranks one step tries.

A node is written as its path of ranks from the root, `(0, 2)`: the third candidate after the first one. The root is
`()`, depth 0, and never listed. Every order, mask and index of the package follows from the canonical order: by
depth, then by ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Int

from topo_search.errors import InputError, is_whole, shown

if TYPE_CHECKING:
    import networkx

Path = tuple[int, ...]


@dataclass(frozen=True)
class Tree:
    """Paths in canonical order, without the root; the empty tree is plain decoding.

    Slot 0 of every array below is the root, slot i + 1 the node `paths[i]`.

    Raises:
        InputError: an entry is no path, occurs twice, or its parent is missing; the message names entry and rule.
    """

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        paths = [_checked_path(index, entry) for index, entry in enumerate(self.paths)]
        _check_distinct(paths)
        _check_closed(paths)
        object.__setattr__(self, "paths", tuple(sorted(paths, key=canonical_key)))

    @classmethod
    def parse(cls, entries: Any) -> Tree:
        """A tree from untrusted data: a list of lists of ranks, in any order.

        Raises:
            InputError: see the class; also when `entries` is no list.
        """
        if isinstance(entries, str) or not isinstance(entries, Sequence):
            raise InputError(f"A tree is a list of rank paths such as [[0], [1], [0, 0]], not {shown(entries)}.")
        return cls(tuple(_checked_path(index, entry) for index, entry in enumerate(entries)))

    @classmethod
    def chain(cls, length: int) -> Tree:
        """The single path of rank 0, `length` nodes deep; 0 is plain decoding.

        Raises:
            InputError: `length` is no whole number from 0 on.
        """
        if not _is_count(length, least=0):
            raise InputError(f"A chain's length is {shown(length)}; it counts nodes, from 0 (plain decoding) on.")
        return cls(tuple((0,) * depth for depth in range(1, length + 1)))

    @classmethod
    def dense(cls, branching: Sequence[int]) -> Tree:
        """Every path with `branching[k]` candidates at depth k + 1; `[3, 2, 2]` has 21 nodes.

        Raises:
            InputError: an entry is no whole number from 1 on.
        """
        if isinstance(branching, str) or not isinstance(branching, Sequence):
            raise InputError(
                f"A dense tree is a list of candidates per depth such as [3, 2, 2], not {shown(branching)}."
            )
        for index, count in enumerate(branching):
            if not _is_count(count, least=1):
                raise InputError(
                    f"Entry {index} of a dense tree is {shown(count)}; each depth has at least 1 candidate, a whole "
                    "number. End the list sooner for a shallower tree."
                )
        levels = range(1, len(branching) + 1)
        return cls(
            tuple(path for level in levels for path in itertools.product(*(range(b) for b in branching[:level])))
        )

    @property
    def num_draft_nodes(self) -> int:
        """Nodes without the root."""
        return len(self.paths)

    @property
    def verify_width(self) -> int:
        """Tokens the target runs per step: draft nodes and the root."""
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        """Length of the longest path; 0 for the empty tree."""
        return len(self.paths[-1]) if self.paths else 0

    @property
    def max_rank(self) -> int:
        """The largest rank used; -1 for the empty tree."""
        return max((max(path) for path in self.paths), default=-1)

    @property
    def is_chain(self) -> bool:
        """Whether no node has a sibling and every rank is 0."""
        return self.paths == Tree.chain(self.depth).paths

    @cached_property
    def slots(self) -> dict[Path, int]:
        """Slot of every path, the root included."""
        return {(): 0} | {path: slot for slot, path in enumerate(self.paths, start=1)}

    @cached_property
    def depths(self) -> Int[np.ndarray, " width"]:
        """Depth of each slot: its position is that of the root plus this."""
        return np.array([0, *(len(path) for path in self.paths)], dtype=np.int64)

    @cached_property
    def parents(self) -> Int[np.ndarray, " width"]:
        """Parent slot of each slot; -1 for the root."""
        return np.array([-1, *(self.slots[path[:-1]] for path in self.paths)], dtype=np.int64)

    @cached_property
    def ancestors(self) -> tuple[tuple[int, ...], ...]:
        """Per slot the slots it may see: its ancestors from the root down, itself last."""
        prefixes = (path[:length] for path in ((), *self.paths) for length in range(len(path) + 1))
        slots = iter([self.slots[prefix] for prefix in prefixes])
        return tuple(tuple(itertools.islice(slots, int(depth) + 1)) for depth in self.depths)

    @cached_property
    def mask(self) -> Bool[np.ndarray, "width width"]:
        """Row i is True at the slots that slot i may see."""
        mask = np.zeros((self.verify_width, self.verify_width), dtype=np.bool_)
        for slot, seen in enumerate(self.ancestors):
            mask[slot, list(seen)] = True
        return mask

    @property
    def leaves(self) -> tuple[Path, ...]:
        """Paths without children, in canonical order."""
        inner = {path[:-1] for path in self.paths}
        return tuple(path for path in self.paths if path not in inner)

    def pruned(self, max_depth: int) -> Tree:
        """The same tree without the nodes deeper than `max_depth`."""
        return Tree(tuple(path for path in self.paths if len(path) <= max_depth))

    def to_networkx(self) -> networkx.DiGraph[Path]:
        """A directed graph of paths, parents to children, with `rank` and `depth` on every node."""
        import networkx

        graph: networkx.DiGraph[Path] = networkx.DiGraph()
        graph.add_node((), rank=-1, depth=0)
        for path in self.paths:
            graph.add_node(path, rank=path[-1], depth=len(path))
            graph.add_edge(path[:-1], path)
        return graph


def canonical_key(path: Path) -> tuple[int, Path]:
    """Sort key of the canonical order: depth, then ranks."""
    return len(path), path


def _checked_path(index: int, entry: Any) -> Path:
    if not isinstance(entry, list | tuple):
        raise InputError(f"Tree entry {index} is {shown(entry)}; a node is a list of ranks such as [0, 1].")
    path = tuple(entry)
    if not path:
        raise InputError(f"Tree entry {index} is empty; the root is implied and never listed.")
    for rank in path:
        if not is_whole(rank):
            raise InputError(f"Tree entry {index} is {shown(entry)}: rank {shown(rank)} is not an integer.")
        if rank < 0:
            raise InputError(f"Tree entry {index} is {shown(entry)}: rank {rank} is negative; ranks start at 0.")
    return tuple(int(rank) for rank in path)


def _is_count(value: Any, *, least: int) -> bool:
    return is_whole(value) and bool(value >= least)


def _check_distinct(paths: Sequence[Path]) -> None:
    first_at: dict[Path, int] = {}
    for index, path in enumerate(paths):
        if path in first_at:
            raise InputError(f"Tree entry {index} repeats {list(path)}, already entry {first_at[path]}; list it once.")
        first_at[path] = index


def _check_closed(paths: Sequence[Path]) -> None:
    listed = {(), *paths}
    for index, path in enumerate(paths):
        if path[:-1] not in listed:
            raise InputError(
                f"Tree entry {index} is {list(path)}, but its prefix {list(path[:-1])} is missing; "
                "every prefix of a path must be listed."
            )
