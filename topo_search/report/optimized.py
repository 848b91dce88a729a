"""Tables of what `optimize` found: the alternatives with their intervals, and trees across workloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from topo_search.search.among import Among
from topo_search.search.assess import Assessment
from topo_search.search.intervals import Figure, Interval
from topo_search.search.optimize import PLAIN, Alternative
from topo_search.search.workloads import WorkloadRow

_UNKNOWN = "-"
_COUNTED = ("tokens_per_step", "own score", "all positions")
_TIMED = ("step_ms", "tokens/s", "speed-up")
_HEADERS = {"own score": "own\nscore", "all positions": "all\npositions"}
_TRACE_WORDS = (
    "On prompts that did not choose the tree (below: 95 % interval)",
    "own score: on the prompts that chose it, often too high; all positions: steps start everywhere",
)
_ACCURACIES_WORDS = (
    "As the accuracies let expect, if no depth depends on the path before it",
    "step_ms: mean over all measured contexts alike, since no prompt says how long its context is",
)


def comparison_table(found: Assessment) -> Table:
    """Plain decoding, best chain and best tree side by side, with 95 % intervals below each figure."""
    title, caption = _TRACE_WORDS if found.assumptions.prompts is not None else _ACCURACIES_WORDS
    table = Table(title=title, caption=caption, show_lines=True, padding=0)  # whole on 80 columns
    table.add_column("", no_wrap=True)
    timed = any(own.step_ms is not None for own in found.result.alternatives[1:])
    names = _COUNTED + (_TIMED if timed else ())
    if found.assumptions.prompts is None:  # every position alike: the three counts are one
        names = tuple(name for name in names if name not in _COUNTED[1:])
    for name in names:
        table.add_column(_HEADERS.get(name, name), justify="right", no_wrap=True)
    for own in found.result.alternatives:
        shape, *cells = _cells(found, own)
        shown = dict(zip(_COUNTED + _TIMED, cells, strict=True))
        table.add_row(shape, *(shown[name] for name in names))
    return table


def heads_table(among: Among) -> Table:
    """Heads side by side, each with what is recommended for it, and how many times as fast the chosen ones are."""
    table = Table(title="Heads, each with its recommended alternative", caption="* chosen; over: how far ahead it is")
    table.add_column("heads")
    table.add_column("recommended")
    names = ("nodes", "tokens_per_step", "tokens/s", "speed-up", "over")
    for name in names:
        table.add_column(name, justify="right")
    for standing in among.standings:
        found = standing.found
        own, honest = found.result[found.recommended], found.figures(found.recommended)
        shown: tuple[float | None, ...] = (own.tokens_per_step, own.tokens_per_s, own.speedup)
        if honest is not None:
            figures_ = (honest.tokens_per_step, honest.tokens_per_s, honest.speedup)
            shown = tuple(None if figure is None else figure.value for figure in figures_)
        mark = " *" if standing is among.best else ""
        figures = [_number(shown[0], 3), _number(shown[1], 1), _number(shown[2], 2, " x")]
        over = _UNKNOWN if standing.chosen_over is None else _figure(standing.chosen_over, 2, " x")
        nodes = str(own.tree.num_draft_nodes)
        table.add_row(f"{standing.name}{mark}", found.recommended, nodes, *figures, over)
    return table


def workload_table(rows: Sequence[WorkloadRow]) -> Table:
    """Per workload its own tree, and what each tree loses where another workload is served."""
    table = Table(title="Tree chosen on one workload, served on another: speed lost against that one's own tree")
    table.add_column("chosen on")
    for name in ("prompts", "nodes", "tokens_per_step"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_column(f"on {row.workload}", justify="right")
    for row in rows:
        per_step = _UNKNOWN if row.tokens_per_step is None else f"{row.tokens_per_step:.3f}"
        losses = ["own" if other is row else _percent(row.loss_on[other.workload]) for other in rows]
        table.add_row(row.workload, str(row.prompts), str(row.tree.num_draft_nodes), per_step, *losses)
    return table


def figure_json(figure: Figure | None) -> dict[str, Any] | None:
    """A figure with its intervals for machines; unknown is null."""
    if figure is None:
        return None
    return {
        "value": figure.value,
        "interval": None if figure.interval is None else [figure.interval.low, figure.interval.high],
        "prediction": None if figure.prediction is None else [figure.prediction.low, figure.prediction.high],
    }


def _cells(found: Assessment, own: Alternative) -> list[str]:
    honest = found.figures(own.name)
    mark = " *" if own.name == found.recommended else ""
    nodes = own.tree.num_draft_nodes
    shape = f"{own.name}{mark}\n{nodes} node{'s' if nodes != 1 else ''}, depth {own.tree.depth}"
    scores = [f"{own.tokens_per_step:.3f}", f"{own.tokens_per_step_all_positions:.3f}"]
    if honest is None:
        expected = found.assumptions.prompts is None or own.name == PLAIN
        figures = [own.step_ms, own.tokens_per_s, own.speedup] if expected else [None, None, None]
        first = f"{own.tokens_per_step:.3f}" if expected else _UNKNOWN
        return [shape, first, *scores, *(_UNKNOWN if f is None else f"{f:.2f}" for f in figures)]
    step_ms = _UNKNOWN if honest.step_ms is None else f"{honest.step_ms:.1f}"
    rates = [_figure(honest.tokens_per_s, 1), _figure(honest.speedup, 2, " x")]
    return [shape, _figure(honest.tokens_per_step, 3), *scores, step_ms, *rates]


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return _UNKNOWN if value is None else f"{value:.{digits}f}{unit}"


def _figure(figure: Figure | None, digits: int, unit: str = "") -> str:
    if figure is None:
        return _UNKNOWN
    return f"{figure.value:.{digits}f}{unit}\n{_range(figure.interval, digits)}"


def _range(interval: Interval | None, digits: int) -> str:
    return _UNKNOWN if interval is None else f"{interval.low:.{digits}f}-{interval.high:.{digits}f}"


def _percent(share: float | None) -> str:
    return _UNKNOWN if share is None else f"{100 * share:.1f} %"
