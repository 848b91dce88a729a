"""The staircase of step times: a table with bars on the terminal, or a picture.

A jump is a width that costs clearly more than the one measured before it: its fastest tenth lies above the other's
slowest, and it rises at least twice as much per token as the staircase does on average.
"""

from __future__ import annotations

import importlib
import io
import itertools
from pathlib import Path
from typing import Any

from rich.progress_bar import ProgressBar
from rich.table import Table

from topo_search.cost import WHATEVER_EXPANDED, LatencyTable, Timing
from topo_search.errors import InputError
from topo_search.files.atomic import write_bytes
from topo_search.report.tables import device_line

_BAR = 8  # characters
_WITH_BARS = 2  # contexts that leave room for bars beside them on 100 columns
_STEEP = 2.0  # times the average rise per token
_UNKNOWN, _JUMP = "-", "jump"


def staircase_tables(latency: LatencyTable) -> list[Table]:
    """Per batch the verify times of every width at every context, and the draft times."""
    batches = sorted({batch for batch, _, _ in latency.verify})
    return [table for batch in batches for table in (_verify_table(latency, batch), _draft_table(latency, batch))]


def jumps(latency: LatencyTable, context: int, *, batch: int = 1) -> set[int]:
    """Widths at which the staircase jumps at that context."""
    timed = [
        (width, timing)
        for (b, c, width), timing in sorted(latency.verify.items())
        if (b, c) == (batch, context) and timing.median_ms is not None
    ]
    if len(timed) < 2:
        return set()
    (narrowest, first), (widest, last) = timed[0], timed[-1]
    usual = ((last.median_ms or 0.0) - (first.median_ms or 0.0)) / (widest - narrowest)
    found = set()
    for (before, lower), (width, upper) in itertools.pairwise(timed):
        apart = (upper.p10_ms or 0.0) > (lower.p90_ms or 0.0)
        rise = ((upper.median_ms or 0.0) - (lower.median_ms or 0.0)) / (width - before)
        if apart and rise >= _STEEP * usual:
            found.add(width)
    return found


def require_plot(path: Path) -> None:
    """Check that a picture can be drawn there before minutes are spent on what it shows.

    Raises:
        InputError: matplotlib is not installed, or the name does not end in .png.
    """
    if path.suffix.lower() != ".png":
        raise InputError(f"--plot {path} must name a .png file.")
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        raise InputError(
            "--plot draws with matplotlib, which is not installed: pip install 'topo-search[plot]', or leave it out."
        ) from None


def plot_staircase(latency: LatencyTable, path: Path) -> None:
    """Draw verify times over widths, one line per batch and context with its spread, as a PNG file.

    Raises:
        InputError: see `require_plot`; or the file cannot be written.
    """
    require_plot(path)
    figure: Any = importlib.import_module("matplotlib.figure").Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    for batch, context in sorted({(batch, context) for batch, context, _ in latency.verify}):
        rows = [
            (width, timing.median_ms, timing.p10_ms, timing.p90_ms)
            for (b, c, width), timing in sorted(latency.verify.items())
            if (b, c) == (batch, context) and timing.median_ms is not None
        ]
        if rows:
            widths, medians, lows, highs = (list(column) for column in zip(*rows, strict=True))
            axes.plot(widths, medians, marker=".", label=f"batch {batch}, {context} tokens")
            axes.fill_between(widths, lows, highs, alpha=0.2)
    axes.set_xlabel("verify width (tokens)")
    axes.set_ylabel("verify_ms (median, p10 to p90)")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{latency.target.name}, {latency.mode}, {device_line(latency)}", fontsize="medium")
    axes.legend()
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    write_bytes(path, drawn.getvalue())


def _verify_table(latency: LatencyTable, batch: int) -> Table:
    contexts = latency.contexts(batch)
    table = Table(title=f"Verify times, batch {batch}: {device_line(latency)}, {latency.mode}, {latency.attention}")
    table.caption = "verify_ms by verify width and context: median (10th to 90th percentile)"
    table.add_column("width", justify="right")
    for context in contexts:
        table.add_column(f"at {context} tokens", justify="right", no_wrap=True)
        if len(contexts) <= _WITH_BARS:
            table.add_column("", min_width=_BAR)
        table.add_column("")
    table.add_column("over plain", justify="right", no_wrap=True)
    known = [t.median_ms for (b, _, _), t in latency.verify.items() if b == batch and t.median_ms is not None]
    jumping = {context: jumps(latency, context, batch=batch) for context in contexts}
    for width in sorted({w for b, _, w in latency.verify if b == batch}):
        cells: list[Any] = []
        for context in contexts:
            timing = latency.verify.get((batch, context, width))
            ms = None if timing is None else timing.median_ms
            bar = "" if ms is None else ProgressBar(total=max(known), completed=ms, width=_BAR)
            jump = _JUMP if width in jumping[context] else ""
            cells += [_timing(timing), *([bar] if len(contexts) <= _WITH_BARS else []), jump]
        table.add_row(str(width), *cells, _over_plain(latency, batch, contexts[0], width))
    return table


def _draft_table(latency: LatencyTable, batch: int) -> Table:
    rows = {(depth, n): timing for (b, depth, n), timing in latency.draft.items() if b == batch}
    counts = sorted({expanded for _, expanded in rows})
    table = Table(title=f"Draft times, batch {batch}")
    table.caption = "draft_ms by depth: median (10th to 90th percentile)"
    if counts != [WHATEVER_EXPANDED]:
        table.caption = "draft_ms by depth and nodes expanded at every depth below the root: median (p10 to p90)"
    table.add_column("depth", justify="right")
    for expanded in counts:
        name = "ms (p10-p90)" if expanded == WHATEVER_EXPANDED else str(expanded)
        table.add_column(name, justify="right")
    for depth in sorted({depth for depth, _ in rows}):
        table.add_row(str(depth), *(_timing(rows.get((depth, expanded))) for expanded in counts))
    return table


def _over_plain(latency: LatencyTable, batch: int, context: int, width: int) -> str:
    plain, own = (latency.verify.get((batch, context, w)) for w in (1, width))
    if plain is None or own is None or plain.median_ms is None or own.median_ms is None:
        return _UNKNOWN
    return f"{own.median_ms / plain.median_ms:.2f} x"


def _timing(timing: Timing | None) -> str:
    if timing is None:
        return _UNKNOWN
    if timing.median_ms is None:
        return timing.status
    return f"{timing.median_ms:.1f} ({timing.p10_ms:.1f}-{timing.p90_ms:.1f})"
