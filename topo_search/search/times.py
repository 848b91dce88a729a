"""Step times at one batch, read from a latency table once, for code that asks for thousands of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from topo_search.cost import LatencyTable
from topo_search.search.step_costs import DraftCosts, StepCosts
from topo_search.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The table at one batch as arrays.

    Attributes:
        contexts: measured ones, in tokens; a single 0 without a table.
        verify_ms: by width, `[contexts]`; only widths with a time at every context.
        draft_ms: by depth of the tree.
        expanded_ms: on top of that per expanded node by its depth, the root's first; empty where drafting is timed by
            depth alone, as for heads that are blind to the path.
    """

    contexts: tuple[int, ...]
    verify_ms: dict[int, Float[np.ndarray, " contexts"]]
    draft_ms: dict[int, float]
    expanded_ms: tuple[float, ...] = ()

    @classmethod
    def of(cls, latency: LatencyTable | None, batch: int) -> StepTimes:
        """Read the table; nothing has a time where there is none."""
        if latency is None:
            return cls(contexts=(0,), verify_ms={}, draft_ms={})
        contexts = tuple(latency.contexts(batch))
        verify = {
            width: [latency.verify[batch, context, width].median_ms for context in contexts]
            for width in latency.widths(batch)
        }
        draft = {depth: timing.median_ms for (at, depth), timing in latency.draft.items() if at == batch}
        return cls(
            contexts=contexts or (0,),
            verify_ms={width: np.array(times, dtype=np.float64) for width, times in verify.items()},
            draft_ms={0: 0.0} | {depth: ms for depth, ms in draft.items() if ms is not None},
        )

    def step_ms(self, verify_width: int, depth: int) -> Float[np.ndarray, " contexts"]:
        """Step time at each context, expanded nodes aside; NaN where the width or the depth was not measured."""
        verify, draft = self.verify_ms.get(verify_width), self.draft_ms.get(depth)
        return np.full(len(self.contexts), np.nan) if verify is None or draft is None else verify + draft

    def tree_ms(self, tree: Tree) -> Float[np.ndarray, " contexts"]:
        """Step time of a tree at each context."""
        expanded = {path[:-1] for path in tree.paths} if self.expanded_ms else ()
        return self.step_ms(tree.verify_width, tree.depth) + sum(self.expanded_ms[len(path)] for path in expanded)

    def costs(self, weights: Float[np.ndarray, " contexts"], max_depth: int) -> StepCosts:
        """What the ratio solvers need: one time per width, averaged over contexts.

        Draft times by depth must not fall there; where measured ones do, by noise, the larger one above counts.
        """
        timed = [self.draft_ms[depth] for depth in range(max_depth + 1) if depth in self.draft_ms]
        by_depth = tuple(np.maximum.accumulate(timed).tolist())
        per_expanded = (self.expanded_ms or (0.0,) * len(timed))[: len(timed) - 1]
        return StepCosts(
            verify_ms={width: float(ms @ weights) for width, ms in self.verify_ms.items()},
            draft=DraftCosts(per_expanded=per_expanded, by_depth=by_depth),
        )
