"""Step times at one batch, read from a latency table once, for code that asks for thousands of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from topo_search.cost import LatencyTable


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The table at one batch as arrays.

    Attributes:
        contexts: measured ones, in tokens; a single 0 without a table.
        verify_ms: by width, `[contexts]`; only widths with a time at every context.
        draft_ms: by depth.
    """

    contexts: tuple[int, ...]
    verify_ms: dict[int, Float[np.ndarray, " contexts"]]
    draft_ms: dict[int, float]

    @classmethod
    def of(cls, latency: LatencyTable | None, batch: int) -> StepTimes:
        """Read the table; nothing has a time where there is none."""
        if latency is None:
            return cls(contexts=(0,), verify_ms={}, draft_ms={})
        depths = (depth for at, depth in latency.draft if at == batch)
        timed = {depth: latency.draft[batch, depth].median_ms for depth in depths}
        return cls(
            contexts=tuple(latency.contexts(batch)) or (0,),
            verify_ms={
                width: latency.step_ms(verify_width=width, depth=0, batch=batch) for width in latency.widths(batch)
            },
            draft_ms={0: 0.0} | {depth: ms for depth, ms in timed.items() if ms is not None},
        )

    def step_ms(self, verify_width: int, depth: int) -> Float[np.ndarray, " contexts"]:
        """Step time at each context; NaN where the width or the depth was not measured."""
        verify, draft = self.verify_ms.get(verify_width), self.draft_ms.get(depth)
        return np.full(len(self.contexts), np.nan) if verify is None or draft is None else verify + draft
