"""`LatencyTable`: measured step times, and what one step of a tree costs by them.

A step's time is the verify part (tree forward, acceptance, cache commit, the host's bookkeeping) at its width and
context plus the draft part (draft heads and their ranking); both are timed inside the decoder's own step. Plain
decoding is width 1 and runs no head. A width that was not measured cannot win, and a step's context is taken from the
nearest one measured. Drafts are priced by `DraftTimes`, and beyond what was measured they have no price.

Medians say what a shape costs, undisturbed. A decode pays for the sum of its steps, so for their mean: every time is
multiplied by what the means of all shapes together exceed their medians by. That changes no comparison of two trees.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from topo_search.errors import InputError
from topo_search.identity import HeadsIdentity, TargetIdentity
from topo_search.tree import Tree

OK, OUT_OF_MEMORY = "ok", "out of memory"
WHATEVER_EXPANDED = 0  # expanded nodes of a draft that costs the same whatever the tree expands below its root

DraftCell = tuple[int, int]  # depth, nodes expanded at every depth below the root
Batches = tuple[tuple[int, float], ...]  # batch, share of the steps taken with so many sequences; shares sum to 1
ALONE: Batches = ((1, 1.0),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One shape's repeated timing; times are null where the shape ran out of memory, the mean where it is unknown."""

    median_ms: float | None
    mean_ms: float | None = None
    p10_ms: float | None
    p90_ms: float | None
    count: int
    status: str = OK


@dataclass(frozen=True, kw_only=True)
class DraftTimes:
    """What drafting a tree costs at one batch, by the nodes it expands at each depth.

    Heads that draft all depths in one call are timed by depth alone. Others run one call per depth over that depth's
    expanded nodes, and are timed on trees that expand equally many nodes at every depth below the root: D(depth, n).
    The call at depth k over n nodes costs D(k + 1, n) - D(k, n), linear between the counts measured, and a draft costs
    the sum of its calls. A tree of a measured shape so costs exactly what it was timed at.

    Attributes:
        ms: by (depth, expanded nodes); depth 1 expands the root alone and is listed with 1 node.
    """

    ms: Mapping[DraftCell, float]

    @property
    def by_expanded(self) -> bool:
        """Whether it matters how many nodes are expanded."""
        return any(expanded != WHATEVER_EXPANDED for _, expanded in self.ms)

    def of(self, tree: Tree) -> float:
        """Draft time of one step; 0 for plain decoding, where no head runs; NaN beyond what was measured."""
        return self.of_counts(expanded_by_depth(tree))

    def of_counts(self, expanded: Sequence[int]) -> float:
        """The same of any tree that expands so many nodes at each depth from the root, 0, on."""
        weights = self._weights(expanded)
        return math.nan if weights is None else math.fsum(weight * self.ms[cell] for cell, weight in weights.items())

    def weights(self, tree: Tree) -> dict[DraftCell, float] | None:
        """How often each timing enters a tree's draft time; None where one that it needs is missing."""
        return self._weights(expanded_by_depth(tree))

    def _weights(self, expanded: Sequence[int]) -> dict[DraftCell, float] | None:
        deepest = len(expanded)
        if not deepest or (deepest, WHATEVER_EXPANDED) in self.ms:
            return {(deepest, WHATEVER_EXPANDED): 1.0} if deepest else {}
        if (1, 1) not in self.ms:
            return None
        found: Counter[DraftCell] = Counter({(1, 1): 1.0})
        for depth, count in enumerate(expanded[1:], start=1):
            deeper = self._between(depth + 1, count)
            before = self._between(depth, count) if depth > 1 else {(1, 1): 1.0}
            if deeper is None or before is None:
                return None
            found.update(deeper)
            found.subtract(before)
        return {cell: weight for cell, weight in found.items() if weight}

    def _between(self, depth: int, expanded: int) -> dict[DraftCell, float] | None:
        """The measured counts around `expanded` at that depth, weighted linearly."""
        counts = self._counts.get(depth, [])
        at = bisect.bisect_left(counts, expanded)
        if at == len(counts):
            return None
        if counts[at] == expanded:
            return {(depth, expanded): 1.0}
        if at == 0:
            return None
        below, above = counts[at - 1], counts[at]
        share = (expanded - below) / (above - below)
        return {(depth, below): 1 - share, (depth, above): share}

    @cached_property
    def _counts(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for depth, expanded in sorted(self.ms):
            found.setdefault(depth, []).append(expanded)
        return found


def expanded_by_depth(tree: Tree) -> list[int]:
    """Expanded nodes of a tree at each depth, the root's first."""
    counts = Counter(len(path) for path in {path[:-1] for path in tree.paths})
    return [counts[depth] for depth in range(tree.depth)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTable:
    """Step times of one target, heads, device and execution mode.

    Attributes:
        verify: timing by (batch, context_tokens, verify_width).
        draft: timing by (batch, depth, expanded nodes at every depth below the root); see `DraftTimes`.
        device: name, kind, threads and versions of where it was measured.
        mode: execution mode, part of the table's key; tables of different modes never mix.
        attention: attention backend.
    """

    verify: dict[tuple[int, int, int], Timing]
    draft: dict[tuple[int, int, int], Timing]
    target: TargetIdentity
    heads: HeadsIdentity
    device: dict[str, Any]
    mode: str
    attention: str
    provenance: dict[str, Any] = field(default_factory=dict)

    def contexts(self, *batches: int) -> list[int]:
        """Context lengths measured at every batch given, in tokens, ascending; batch 1 by default."""
        at = [{context for b, context, _ in self.verify if b == batch} for batch in batches or (1,)]
        return sorted(set.intersection(*at))

    def widths(self, *batches: int) -> list[int]:
        """Verify widths with a time at every batch given and each of their contexts; batch 1 by default."""
        shapes = [(batch, context) for batch in batches or (1,) for context in self.contexts(*batches)]
        known = {width for _, _, width in self.verify} if shapes else set()
        return [w for w in sorted(known) if all(self._median((b, c, w)) is not None for b, c in shapes)]

    def step_ms(self, tree: Tree, *, batch: int = 1) -> Float[np.ndarray, " contexts"]:
        """Expected step time of a tree at each measured context.

        Raises:
            InputError: its width, or a draft as deep or with as many expanded nodes as its own, was not measured.
        """
        times = [self._median((batch, context, tree.verify_width)) for context in self.contexts(batch)]
        if not times or any(time is None for time in times):
            raise InputError(
                f"The latency table has no time for verify width {tree.verify_width} at batch {batch}; measured: "
                f"{_listed(self.widths(batch))}. Run topo-search measure for more widths."
            )
        draft_ms = self.draft_times(batch).of(tree)
        if math.isnan(draft_ms):
            raise InputError(
                f"The latency table has no draft time for depth {tree.depth} with {_listed(expanded_by_depth(tree))} "
                f"expanded nodes by depth at batch {batch}; run topo-search measure again."
            )
        step: np.ndarray = (np.array(times, dtype=np.float64) + draft_ms) * self.mean_over_median
        return step

    def draft_times(self, batch: int = 1) -> DraftTimes:
        """What drafting costs at a batch, in medians."""
        known = {(depth, n): timing.median_ms for (at, depth, n), timing in self.draft.items() if at == batch}
        return DraftTimes(ms={cell: ms for cell, ms in known.items() if ms is not None})

    @property
    def mean_over_median(self) -> float:
        """Mean over median of all timings together, by which single medians are too low for a sum of steps."""
        timed = [timing for timing in (*self.verify.values(), *self.draft.values()) if timing.mean_ms is not None]
        medians = math.fsum(timing.median_ms or 0.0 for timing in timed)
        return math.fsum(timing.mean_ms or 0.0 for timing in timed) / medians if medians else 1.0

    def nearest_context(
        self, contexts: Int[np.ndarray, " steps"], *, batches: Sequence[int] = (1,)
    ) -> Int[np.ndarray, " steps"]:
        """Index of the context measured at these batches nearest to each given one, the smaller one between two."""
        measured = np.array(self.contexts(*batches))
        nearest: np.ndarray = np.abs(contexts[:, None] - measured[None, :]).argmin(axis=1)
        return nearest

    def _median(self, key: tuple[int, int, int]) -> float | None:
        timing = self.verify.get(key)
        return None if timing is None else timing.median_ms


def _listed(values: Iterable[int]) -> str:
    return ", ".join(str(value) for value in values) or "none"
