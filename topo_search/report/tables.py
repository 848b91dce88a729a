"""Tables for people: head accuracies, the race, draft heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from topo_search.accuracy import SHOWN_RANKS, depth_accuracies
from topo_search.cost import LatencyTable
from topo_search.trace import RankTrace

if TYPE_CHECKING:
    from topo_search.bench import RaceResult
    from topo_search.heads.checkpoints import HeadsDescription

_UNKNOWN = "-"
_FAR_OFF = 0.05  # of a rate: more than repeats of a race differ by on a quiet machine
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
            "changes the text"
            if standing.changes_text
            else _text_verdict(standing.text_equal, [d.near_tie for d in standing.divergences]),
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


def prediction_lines(result: RaceResult) -> list[str]:
    """How far each contender's measured rate is from the table's, and what that says of the table."""
    found = []
    for standing in result.standings:
        share = standing.measured_over_predicted
        if share is not None:
            found.append(
                f"{standing.name}: predicted {standing.predicted_tokens_per_s:.1f} tokens/s, measured "
                f"{standing.tokens_per_s:.1f}, {_off(share)}"
            )
    plain = next((s.measured_over_predicted for s in result.standings if s.name == "plain"), None)
    if plain is not None and abs(plain - 1) > _FAR_OFF:
        found.append(
            f"Plain decoding, which no tree decides, is itself {_off(plain)} the latency table: the machine is "
            f"{'slower' if plain < 1 else 'faster'} now than when it was timed, so compare rates with plain's, or run "
            "topo-search measure again."
        )
    return found


def _off(share: float) -> str:
    return f"{100 * abs(share - 1):.0f} % {'below' if share < 1 else 'above'}"


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
