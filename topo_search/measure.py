"""Time the decoder's own step on the device: every shape warmed up, in shuffled order, synchronised, median and spread.

What is timed is in `timed_steps`. The order of shapes is reshuffled every round, so a machine that drifts slows all
shapes alike. Times that other work disturbed are taken again, as far as a bound on extra time allows.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from topo_search.cost import OK, OUT_OF_MEMORY, LatencyTable, Timing
from topo_search.device import HostWatch, device_record
from topo_search.errors import InputError
from topo_search.files.atomic import write_text
from topo_search.heads.base import DraftHeads
from topo_search.target.adapter import Target
from topo_search.timed_steps import DRAFT, VERIFY, Cell, TimedSteps

EDGE_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 16, 17, 20, 24, 31, 32, 33, 48, 63, 64, 65)
EXPANDED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_WARM_UPS = 2
_OUTLIER_MADS = 5.0  # scaled median deviations above the median that no undisturbed step takes
_SCALED_MAD = 1.4826  # of a normal law's sigma
_LEAST_DEVIATION = 0.01  # of the median: few rounds may agree by chance
_WIDE_SPREAD = 3.0  # times the usual spread: a shape that needs more rounds
_EXTRA_PASSES, _EXTRA_SHARE = 3, 0.2  # the most passes over disturbed shapes, and of all timings

Progress = Callable[[int, int], None]  # rounds done, rounds in all


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureGrid:
    """What is timed.

    Attributes:
        widths: verify widths, 1 (plain decoding) always among them.
        contexts: committed tokens in the cache.
        rounds: timings per shape.
        batches: sequences that one step serves.
        expanded: nodes expanded at every depth of a timed draft, for heads that pay for them; 1 is always timed.
        seed: order of shapes.
    """

    widths: tuple[int, ...]
    contexts: tuple[int, ...]
    rounds: int
    batches: tuple[int, ...] = (1,)
    expanded: tuple[int, ...] = (1,)
    seed: int = 0

    @classmethod
    def full(
        cls, *, max_width: int, rounds: int = 9, contexts: tuple[int, ...] = (128, 512), seed: int = 0
    ) -> MeasureGrid:
        """Every width up to the bound."""
        return cls._upto(max_width, range(1, max_width + 1), rounds=rounds, contexts=contexts, seed=seed)

    @classmethod
    def quick(
        cls, *, max_width: int, rounds: int = 5, contexts: tuple[int, ...] = (64, 256), seed: int = 0
    ) -> MeasureGrid:
        """The widths at which kernels change, and their neighbours."""
        widths = {width for width in EDGE_WIDTHS if width <= max_width} | {1, max_width}
        return cls._upto(max_width, sorted(widths), rounds=rounds, contexts=contexts, seed=seed)

    @classmethod
    def _upto(cls, max_width: int, widths: Sequence[int], **others: Any) -> MeasureGrid:
        """With all that a tree of `max_width` can expand at one depth: every such node needs a child of its own."""
        most = max(1, (max_width - 1) // 2)
        expanded = sorted({count for count in EXPANDED if count < most} | {most})
        return cls(widths=tuple(widths), expanded=tuple(expanded), **others)


@dataclass(slots=True, kw_only=True)
class _Samples:
    """Milliseconds taken so far, by cell, and how many were taken again."""

    times: dict[str, list[float]]
    taken_again: int = 0

    def of(self, cell: Cell) -> list[float]:
        """Of one shape."""
        return self.times.setdefault(cell.name, [])


def measure(
    target: Target,
    heads: DraftHeads,
    grid: MeasureGrid,
    text: Sequence[int],
    *,
    partial: Path | None = None,
    provenance: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> LatencyTable:
    """The latency table of `grid`.

    Args:
        target, heads: as they will serve.
        grid: what to time.
        text: token ids of real text that fill the cache, another stretch every round; repeated if it is short.
        partial: file that keeps finished rounds, so that a killed run continues.
        provenance: recorded in the table, with how often a shape was timed again and what else the host did.
        progress: called after every round.

    Raises:
        InputError: a context does not fit the target's positions, or `partial` is of another run.
    """
    _require_fit(target, grid, text)
    key = repr((target.identity, heads.identity, grid, target.attention, target.mode, device_record(target)))
    samples = _load_partial(partial, key)
    host = HostWatch.start()

    def save() -> None:
        if partial:
            write_text(partial, json.dumps({"key": key, "samples": samples.times, "taken_again": samples.taken_again}))

    with torch.inference_mode():
        steps = TimedSteps.of(
            target,
            heads,
            text,
            batches=grid.batches,
            contexts=grid.contexts,
            widths=grid.widths,
            expanded=grid.expanded,
        )
        _take_rounds(steps, grid, samples, save, progress)
        _take_again(steps, grid, samples, save)
    if partial:
        partial.unlink(missing_ok=True)
    record = {"taken_again": samples.taken_again, "host": asdict(host.load())}
    return _table(steps, samples, (provenance or {}) | {"timing": record})


def _take_rounds(
    steps: TimedSteps, grid: MeasureGrid, samples: _Samples, save: Callable[[], None], progress: Progress | None
) -> None:
    """Warm every shape up, then time all that a file does not hold yet."""
    cells = steps.cells()
    steps.fill(0)
    for cell in cells:
        for _ in range(_WARM_UPS):
            steps.time(cell)
    done = min((len(samples.of(cell)) for cell in cells if cell not in steps.failed), default=0)
    for number in range(done, grid.rounds):
        steps.fill(number)
        for cell in in_turn(cells, random.Random(grid.seed * 1009 + number)):
            _take(steps, samples, cell)
        save()
        if progress:
            progress(number + 1, grid.rounds)


def in_turn(cells: Sequence[Cell], rng: random.Random) -> list[Cell]:
    """All cells in shuffled order, a verify before every draft as long as there are enough."""
    verifies, drafts = ([cell for cell in cells if cell.kind == kind] for kind in (VERIFY, DRAFT))
    rng.shuffle(verifies)
    rng.shuffle(drafts)
    after = dict(zip(rng.sample(range(len(verifies)), min(len(verifies), len(drafts))), drafts, strict=False))
    order = [cell for at, verify in enumerate(verifies) for cell in (verify, *([after[at]] if at in after else []))]
    return order + drafts[len(after) :]


def _take_again(steps: TimedSteps, grid: MeasureGrid, samples: _Samples, save: Callable[[], None]) -> None:
    """Replace times that other work disturbed, and take more of shapes that scatter far more than the rest."""
    left = int(_EXTRA_SHARE * sum(len(times) for times in samples.times.values())) - samples.taken_again
    for number in range(_EXTRA_PASSES):
        cells = [cell for cell in steps.cells() if cell not in steps.failed and samples.of(cell)]
        wide = _scattered({cell: samples.of(cell) for cell in cells})
        found = [cell for cell in cells for _ in disturbed(samples.of(cell))] + [cell for cell in cells if cell in wide]
        if not found or left <= 0:
            return
        steps.fill(grid.rounds + number)
        random.Random(grid.seed * 1009 + grid.rounds + number).shuffle(found)
        for cell in found[:left]:
            outliers = disturbed(samples.of(cell))
            if outliers:
                del samples.of(cell)[outliers[-1]]
            _take(steps, samples, cell)
        left -= len(found)
        samples.taken_again += min(len(found), left + len(found))
        save()


def disturbed(times_ms: Sequence[float]) -> list[int]:
    """Indices of times far above what their own scatter explains, the largest last."""
    median = statistics.median(times_ms)
    deviation = _SCALED_MAD * statistics.median(abs(time - median) for time in times_ms)
    bound = median + _OUTLIER_MADS * max(deviation, _LEAST_DEVIATION * median)
    return sorted((at for at, time in enumerate(times_ms) if time > bound), key=lambda at: times_ms[at])


def _scattered(times_ms: dict[Cell, list[float]]) -> set[Cell]:
    """Shapes whose spread, over their median, is far above the usual one of their kind."""
    found: set[Cell] = set()
    for kind in (VERIFY, DRAFT):
        spreads = {cell: _relative_spread(times) for cell, times in times_ms.items() if cell.kind == kind}
        usual = statistics.median(spreads.values()) if spreads else 0.0
        bound = _WIDE_SPREAD * max(usual, _LEAST_DEVIATION)
        found |= {cell for cell, spread in spreads.items() if spread > bound}
    return found


def _relative_spread(times_ms: Sequence[float]) -> float:
    p10, median, p90 = np.percentile(times_ms, (10, 50, 90))
    return float((p90 - p10) / median)


def _take(steps: TimedSteps, samples: _Samples, cell: Cell) -> None:
    elapsed = steps.time(cell)
    if elapsed is not None:
        samples.of(cell).append(elapsed)


def _table(steps: TimedSteps, samples: _Samples, provenance: dict[str, Any]) -> LatencyTable:
    timings = {cell: _timing(samples.of(cell), failed=cell in steps.failed) for cell in steps.cells()}
    return LatencyTable(
        verify={(c.batch, c.first, c.size): timing for c, timing in timings.items() if c.kind == VERIFY},
        draft={(c.batch, c.first, c.size): timing for c, timing in timings.items() if c.kind == DRAFT},
        target=steps.target.identity,
        heads=steps.heads.identity,
        device=device_record(steps.target),
        mode=steps.target.mode,
        attention=steps.target.attention,
        provenance=provenance,
    )


def _timing(times_ms: Sequence[float], *, failed: bool) -> Timing:
    if failed or not times_ms:
        return Timing(median_ms=None, p10_ms=None, p90_ms=None, count=0, status=OUT_OF_MEMORY)
    p10, median, p90 = (round(float(v), 4) for v in np.percentile(times_ms, (10, 50, 90)))
    mean = round(statistics.fmean(times_ms), 4)
    return Timing(median_ms=median, mean_ms=mean, p10_ms=p10, p90_ms=p90, count=len(times_ms), status=OK)


def _require_fit(target: Target, grid: MeasureGrid, text: Sequence[int]) -> None:
    limit = target.position_limit
    if not text:
        raise InputError("Measuring needs a text to fill the cache with; it has no token.")
    if 1 not in grid.widths or min(grid.widths) < 1:
        raise InputError("The measured widths must start at 1: width 1 is plain decoding, which every figure needs.")
    if min(grid.contexts) < 1 or (limit is not None and max(grid.contexts) + 16 > limit):
        raise InputError(
            f"The contexts {grid.contexts} must lie between 1 and the target's positions ({limit}) less 16."
        )
    for name, least in (("batches", grid.batches), ("expanded", grid.expanded), ("rounds", (grid.rounds,))):
        if not least or min(least) < 1:
            raise InputError(f"The measured {name} are {least}; each must be at least 1.")


def _load_partial(path: Path | None, key: str) -> _Samples:
    if path is None or not path.exists():
        return _Samples(times={})
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] != key:
            raise InputError(f"{path} is of a measurement with other settings; delete it or give another --out.")
        return _Samples(times=stored["samples"], taken_again=stored["taken_again"])
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path} is no unfinished measurement; delete it.") from None
