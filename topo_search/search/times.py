"""Step times read from a latency table once, for code that asks for thousands: at one batch, or a mix of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from topo_search.cost import ALONE, Batches, DraftTimes, LatencyTable
from topo_search.errors import InputError
from topo_search.search.step_costs import DraftCosts, StepCosts
from topo_search.tree import Path, Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The table as arrays, at one batch or as the mean over steps at several.

    A mean of times is again one time per width and per draft, so everything exact for one batch is for a mix.

    Attributes:
        contexts: those measured at every batch, in tokens; a single 0 without a table.
        verify_ms: by width, `[contexts]`; only widths with a time at every batch and context.
        draft: draft times.
        weights: how much each context counts, summing to 1; null where steps count at the context they start at.
        scale: what every time is multiplied by, see `LatencyTable.mean_over_median`.
    """

    contexts: tuple[int, ...]
    verify_ms: dict[int, Float[np.ndarray, " contexts"]]
    draft: DraftTimes
    weights: Float[np.ndarray, " contexts"] | None = None
    scale: float = 1.0

    @classmethod
    def of(
        cls,
        latency: LatencyTable | None,
        batches: Batches = ALONE,
        context_weights: Sequence[tuple[int, float]] | None = None,
    ) -> StepTimes:
        """Read the table; nothing has a time where there is none.

        Args:
            latency: the table.
            batches: (batch, share of the steps) pairs to average over.
            context_weights: (context, weight) pairs to average over; null to look up each step's own.

        Raises:
            InputError: weights are given without a table, or for a context that the table does not have.
        """
        served = [batch for batch, _ in batches]
        weights = None if context_weights is None else _weights(latency, served, dict(context_weights))
        if latency is None:
            return cls(contexts=(0,), verify_ms={}, draft=DraftTimes(ms={}))
        contexts = tuple(latency.contexts(*served))
        verify = {
            width: [[latency.verify[batch, context, width].median_ms for context in contexts] for batch in served]
            for width in latency.widths(*served)
        }
        shares, scale = np.array([share for _, share in batches]), latency.mean_over_median
        return cls(
            contexts=contexts or (0,),
            verify_ms={width: scale * (shares @ np.array(ms, dtype=np.float64)) for width, ms in verify.items()},
            draft=_mean_drafts(latency, batches),
            weights=weights,
            scale=scale,
        )

    def tree_ms(self, tree: Tree) -> Float[np.ndarray, " contexts"]:
        """Step time of a tree at each context; NaN where its width or its draft was not measured."""
        verify = self.verify_ms.get(tree.verify_width)
        return np.full(len(self.contexts), np.nan) if verify is None else verify + self.scale * self.draft.of(tree)

    def family_ms(self, order: Sequence[Path], sizes: Sequence[int]) -> Float[np.ndarray, "sizes contexts"]:
        """The same of the trees of the first `sizes` nodes, ascending, of a nested family."""
        found, expanded, counts, size = [], set(), [0] * max(map(len, order), default=0), 0
        by_expanded = self.draft.by_expanded
        unmeasured, drafts = np.full(len(self.contexts), np.nan), dict[tuple[int, ...], float]()
        for wanted in sizes:
            for path in order[size:wanted]:
                if path[:-1] not in expanded:
                    expanded.add(path[:-1])
                    counts[len(path) - 1] += 1
            size = wanted
            calls = tuple(count if by_expanded else 1 for count in counts if count)
            if calls not in drafts:
                drafts[calls] = self.scale * self.draft.of_counts(calls)
            found.append(self.verify_ms.get(size + 1, unmeasured) + drafts[calls])
        return np.array(found).reshape(len(sizes), len(self.contexts))

    def costs(self, weights: Float[np.ndarray, " contexts"], max_depth: int) -> StepCosts:
        """What the ratio solvers need: one time per width, averaged over contexts, and affine draft calls.

        The solvers add up times of single nodes, so the call of every depth is taken as c + a x expanded nodes, neither
        negative, fitted to the calls measured with weight 1 / nodes: small trees, which win most often, fit best.
        `tree_ms` then judges what they find. Draft times must not fall with depth; where measured ones do, by noise,
        the larger one above counts.
        """
        calls = self._calls(max_depth)
        return StepCosts(
            verify_ms={width: float(ms @ weights) for width, ms in self.verify_ms.items()},
            draft=DraftCosts(
                per_expanded=tuple(self.scale * per_node for _, per_node in calls),
                by_depth=tuple(self.scale * np.maximum.accumulate(np.cumsum([0.0, *(ms for ms, _ in calls)]))),
            ),
        )

    def _calls(self, max_depth: int) -> list[tuple[float, float]]:
        """Fixed time and time per expanded node of each depth's call, as deep as drafts were measured."""
        ms, calls = self.draft.ms, []
        for depth in range(1, max_depth + 1):
            spent = {n: ms[at, n] - self._above(depth, n) for at, n in sorted(ms) if at == depth}
            known = {n: time for n, time in spent.items() if np.isfinite(time)}
            if not known:
                break
            by_node = self.draft.by_expanded and depth > 1
            calls.append(_affine(known) if by_node else (next(iter(known.values())), 0.0))
        return calls

    def _above(self, depth: int, expanded: int) -> float:
        """Draft time of the depths before this one's call, as wide."""
        if depth == 1:
            return 0.0
        return self.draft.ms.get((depth - 1, min(expanded, 1) if depth == 2 else expanded), math.nan)


def _mean_drafts(latency: LatencyTable, batches: Batches) -> DraftTimes:
    """Draft times averaged over steps; only shapes timed at every batch."""
    drafts = [(share, latency.draft_times(batch).ms) for batch, share in batches]
    cells = [cell for cell in drafts[0][1] if all(cell in ms for _, ms in drafts)]
    return DraftTimes(ms={cell: math.fsum(share * ms[cell] for share, ms in drafts) for cell in cells})


def _weights(
    latency: LatencyTable | None, batches: Sequence[int], given: dict[int, float]
) -> Float[np.ndarray, " contexts"]:
    """Shares of the measured contexts, 0 where none is given."""
    if latency is None:
        raise InputError("Context weights are over the contexts of a latency table, and there is none; pass --latency.")
    measured = latency.contexts(*batches)
    if measured and (unknown := sorted(set(given) - set(measured))):
        raise InputError(
            f"The latency table has no time at context {unknown[0]} for batch {' and '.join(map(str, batches))}, only "
            f"at {', '.join(map(str, measured))}; weight these, or measure at yours."
        )
    weights = np.array([given.get(context, 0.0) for context in measured or [0]])
    return weights / weights.sum() if weights.any() else weights


def _affine(calls: dict[int, float]) -> tuple[float, float]:
    """The line through times by count that is closest to them, weighted by 1 / count, of those never negative."""
    from scipy.optimize import nnls  # a quarter of a second to import, and only heads that pay by node need it

    counts, ms = np.array(list(calls), dtype=np.float64), np.array(list(calls.values()))
    root = 1 / np.sqrt(counts)
    basis = np.stack([root, root * counts], axis=1) if len(calls) > 1 else root[:, None]
    found, _ = nnls(basis, root * ms)
    return float(found[0]), float(found[1]) if len(calls) > 1 else 0.0
