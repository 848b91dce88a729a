"""Tables for people: head accuracies, the latency staircase, the race."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from topo_search.accuracy import SHOWN_RANKS, depth_accuracies
from topo_search.cost import LatencyTable, Timing
from topo_search.trace import RankTrace

if TYPE_CHECKING:
    from topo_search.bench import RaceResult
    from topo_search.heads.checkpoints import HeadsDescription

_UNKNOWN = "-"
_CLAIMED_SHARE = "claimed for a 7B target: under 1.5 %"


def accuracy_table(trace: RankTrace) -> Table:
    """Per depth how often the true token is within the first ranks."""
    table = Table(title=f"Head accuracy: {len(trace.prompts)} prompts, {len(trace.ranks)} positions")
    table.add_column("depth", justify="right")
    table.add_column("rows")
    table.add_column("positions", justify="right")
    for rank in SHOWN_RANKS:
        table.add_column(f"top {rank}", justify="right")
    for found in depth_accuracies(trace):
        table.add_row(str(found.depth), "accuracy", str(found.observed), *map(_share, found.accuracy))
        table.add_row("", "accuracy_given_path", str(found.on_path), *map(_share, found.accuracy_given_path))
    return table


def latency_table(latency: LatencyTable) -> Table:
    """The staircase: verify time of every width at every context, and the draft time of every depth."""
    contexts = latency.contexts()
    table = Table(title=f"Step time on {device_line(latency)}, {latency.mode}, {latency.attention}")
    table.add_column("verify_width", justify="right")
    for context in contexts:
        table.add_column(f"verify_ms at {context} tokens (p10-p90)", justify="right")
    table.add_column("over plain", justify="right")
    plain = latency.verify[1, contexts[0], 1].median_ms
    for width in sorted({w for _, _, w in latency.verify}):
        timings = [latency.verify.get((1, context, width)) for context in contexts]
        first = timings[0].median_ms if timings[0] else None
        over = _UNKNOWN if first is None or plain is None else f"{first / plain:.2f} x"
        table.add_row(str(width), *map(_timing, timings), over)
    for (_, depth, _), timing in sorted(latency.draft.items()):
        table.add_row(f"draft depth {depth}", _timing(timing), *[""] * (len(contexts) - 1), "")
    return table


def race_table(result: RaceResult) -> Table:
    """The measured race."""
    table = Table(title=f"Race over {result.prompts} prompts, {result.repeats} repeats, times after the first token")
    for name in (
        "contender",
        "tokens_per_step",
        "predicted",
        "forecast",
        "step_ms",
        "tokens/s (range)",
        "predicted/s",
        "text",
    ):
        table.add_column(name, justify="left" if name == "contender" else "right")
    for standing in result.standings:
        low, high = standing.tokens_per_s_spread
        table.add_row(
            standing.name,
            f"{standing.tokens_per_step:.3f}",
            _number(standing.predicted_tokens_per_step, 3),
            _number(standing.forecast_tokens_per_step, 3),
            f"{standing.step_ms:.1f}",
            f"{standing.tokens_per_s:.1f} ({low:.1f}-{high:.1f})",
            _number(standing.predicted_tokens_per_s, 1),
            _text_verdict(standing.text_equal, [d.near_tie for d in standing.divergences]),
        )
    return table


def heads_table(found: HeadsDescription) -> Table:
    """Draft heads: family, shape, size, training."""
    table = Table(title=f"Draft heads {found.name}", show_header=False)
    listed = "the whole vocabulary" if found.shortlist is None else f"a shortlist of {found.shortlist} tokens"
    rows = {
        "family": f"{found.kind}, stored as {found.layout} in {found.dtype}, fingerprint {found.fingerprint}",
        **{key: _plain_words(value) for key, value in found.shape.items() if value is not None},
        "projection": "one per head" if found.projection == "own" else "the target's output layer",
        "drafts from": listed,
        "parameters": f"{found.num_parameters:,}, {100 * found.share:.2f} % of the target's "
        f"{found.target_parameters:,} ({_CLAIMED_SHARE})",
        **{key: _plain_words(value) for key, value in found.record.items()},
    }
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    return table


def _plain_words(value: object) -> str:
    """A recorded value for people: `key value` pairs and lists by commas, whatever lies inside in brackets."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_inner_words(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_inner_words(item) for item in value)
    return str(value)


def _inner_words(value: object) -> str:
    return f"({_plain_words(value)})" if isinstance(value, dict | list | tuple) else str(value)


def ratio_lines(result: RaceResult) -> list[str]:
    """Every ratio of the race as a line."""
    return [f"{r.of} / {r.over}: {r.median:.2f} x ({r.low:.2f}-{r.high:.2f})" for r in result.ratios]


def device_line(latency: LatencyTable) -> str:
    """The device a table was measured on, in words."""
    device = latency.device
    threads = f", {device['threads']} threads" if device.get("threads") else ""
    return f"{device.get('name', 'unknown device')}{threads}"


def _text_verdict(equal: bool, near_ties: Sequence[bool]) -> str:
    if equal:
        return "equal"
    return f"{len(near_ties)} near-tie(s)" if all(near_ties) else "DIFFERS"


def _share(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.3f}"


def _number(value: float | None, digits: int) -> str:
    return _UNKNOWN if value is None else f"{value:.{digits}f}"


def _timing(timing: Timing | None) -> str:
    if timing is None:
        return _UNKNOWN
    if timing.median_ms is None:
        return timing.status
    return f"{timing.median_ms:.1f} ({timing.p10_ms:.1f}-{timing.p90_ms:.1f})"
