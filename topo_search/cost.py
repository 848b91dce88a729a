"""`LatencyTable`: measured step times, and what one step of a tree costs by them.

A step's time is the verify part (tree forward, acceptance, cache commit) at its width and context plus the draft part
(draft heads and their ranking) at the tree's depth; both are timed inside the decoder's own step. Plain decoding is
width 1 and runs no head. Nothing is smoothed or extrapolated: a width that was not measured cannot win, and a step's
context is taken from the nearest one measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from topo_search.errors import InputError
from topo_search.identity import HeadsIdentity, TargetIdentity

OK, OUT_OF_MEMORY = "ok", "out of memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One shape's repeated timing; times are null where the shape ran out of memory."""

    median_ms: float | None
    p10_ms: float | None
    p90_ms: float | None
    count: int
    status: str = OK


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTable:
    """Step times of one target, heads, device and execution mode.

    Attributes:
        verify: timing by (batch, context_tokens, verify_width).
        draft: timing by (batch, depth), depth 1 up to the number of heads.
        device: name, kind, threads and versions of where it was measured.
        mode: execution mode, part of the table's key; tables of different modes never mix.
        attention: attention backend.
    """

    verify: dict[tuple[int, int, int], Timing]
    draft: dict[tuple[int, int], Timing]
    target: TargetIdentity
    heads: HeadsIdentity
    device: dict[str, Any]
    mode: str
    attention: str
    provenance: dict[str, Any] = field(default_factory=dict)

    def contexts(self, batch: int = 1) -> list[int]:
        """Context lengths measured, in tokens, ascending."""
        return sorted({context for b, context, _ in self.verify if b == batch})

    def widths(self, batch: int = 1) -> list[int]:
        """Verify widths with a time at every measured context."""
        contexts = self.contexts(batch)
        known = {width for b, _, width in self.verify if b == batch}
        return [w for w in sorted(known) if all(self._median((batch, c, w)) is not None for c in contexts)]

    def step_ms(self, *, verify_width: int, depth: int, batch: int = 1) -> Float[np.ndarray, " contexts"]:
        """Step time at each measured context.

        Raises:
            InputError: the width or the draft depth was not measured.
        """
        times = [self._median((batch, context, verify_width)) for context in self.contexts(batch)]
        if not times or any(time is None for time in times):
            raise InputError(
                f"The latency table has no time for verify width {verify_width} at batch {batch}; measured: "
                f"{_listed(self.widths(batch))}. Run topo-search measure for more widths."
            )
        step: np.ndarray = np.array(times, dtype=np.float64) + self.draft_ms(depth, batch=batch)
        return step

    def draft_ms(self, depth: int, *, batch: int = 1) -> float:
        """Time of drafting to `depth`; 0 for plain decoding, where no head runs.

        Raises:
            InputError: that depth was not measured.
        """
        if depth == 0:
            return 0.0
        timing = self.draft.get((batch, depth))
        if timing is None or timing.median_ms is None:
            raise InputError(f"The latency table has no draft time for depth {depth}; run topo-search measure again.")
        return timing.median_ms

    def nearest_context(self, contexts: Int[np.ndarray, " steps"], *, batch: int = 1) -> Int[np.ndarray, " steps"]:
        """Index of the measured context nearest to each given one, the smaller one between two."""
        measured = np.array(self.contexts(batch))
        nearest: np.ndarray = np.abs(contexts[:, None] - measured[None, :]).argmin(axis=1)
        return nearest

    def _median(self, key: tuple[int, int, int]) -> float | None:
        timing = self.verify.get(key)
        return None if timing is None else timing.median_ms


def _listed(values: Iterable[int]) -> str:
    return ", ".join(str(value) for value in values) or "none"
