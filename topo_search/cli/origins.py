"""The files behind an answer of `optimize`: the trace and its table, or several heads' traces, each with its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topo_search.cli.inputs import (
    LATENCY,
    TRACE,
    is_shipped,
    newest_or_shipped,
    refuse_mismatch,
    require_fit,
    require_kind,
)
from topo_search.cost import LatencyTable
from topo_search.errors import InputError
from topo_search.files.latency_file import LATENCY_SUFFIX, read_latency
from topo_search.files.trace_file import TRACE_SUFFIX, read_trace
from topo_search.identity import HeadsIdentity, differing_fields
from topo_search.report.console import note
from topo_search.report.tables import device_line
from topo_search.search.among import Entrant, differing_devices
from topo_search.search.choose import Settings
from topo_search.trace import RankTrace

if TYPE_CHECKING:
    from topo_search.accepts import AcceptTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What an answer was made from."""

    trace: RankTrace | None
    trace_path: Path | None
    table: LatencyTable | None
    latency_path: Path | None

    @property
    def warnings(self) -> list[str]:
        """Which of the files came with topo-search."""
        shipped = {
            "The trace is the demo's shipped one, not of your prompts: run topo-search calibrate.": self.trace_path,
            "The step times are the demo's shipped ones, not this device's: run topo-search measure.": (
                self.latency_path
            ),
        }
        return [words for words, path in shipped.items() if path is not None and is_shipped(path)]


def origin_of_one(asked: dict[str, Any], settings: Settings) -> Origin:
    """The trace named, else the newest one or the demo's, with its table found likewise.

    Raises:
        InputError: there is no trace, or a file is of another kind.
        MismatchError: the table was measured with another target or other heads.
    """
    trace_path = newest_or_shipped(single(asked["trace"]), TRACE_SUFFIX)
    if trace_path is None:
        raise InputError("No rank trace in ./calibration: run topo-search calibrate, or name one with --trace.")
    trace = _read(trace_path, asked["workload"])
    table, latency_path = table_for(trace, asked)
    _note_narrow(table, settings)
    return Origin(trace=trace, trace_path=trace_path, table=table, latency_path=latency_path)


def origins_of_several(asked: dict[str, Any], settings: Settings) -> list[Origin]:
    """Every trace named with the table of the same heads, in the traces' order, whatever order the tables have.

    Raises:
        InputError: a trace has no table or a table no trace, or two are of the same heads.
        MismatchError: a table is of another target, or the tables are of different devices or modes.
    """
    traces = {path: _read(path, asked["workload"]) for path in asked["trace"] or ()}
    for path in asked["latency"] or ():
        require_kind(path, LATENCY)
    tables = {path: read_latency(path) for path in asked["latency"] or ()}
    _require_distinct(TRACE, "--trace", [(path, traces[path].heads) for path in asked["trace"] or ()])
    _require_distinct(LATENCY, "--latency", [(path, tables[path].heads) for path in asked["latency"] or ()])
    origins = [_paired(path, trace, tables, asked) for path, trace in traces.items()]
    used = {origin.latency_path for origin in origins}
    if idle := [path for path in tables if path not in used]:
        raise InputError(
            f"--latency {idle[0]} is of heads {tables[idle[0]].heads.name}, of which there is no --trace; name their "
            "trace too, or leave the table out."
        )
    if differing := differing_devices(entrants_of(origins)):
        refuse_mismatch(
            "A latency table to compare",
            differing,
            allow_mismatch=asked["allow_mismatch"],
            way_out="measure all heads on one device in one mode",
        )
    for origin in origins:
        _note_narrow(origin.table, settings)
    return origins


def entrants_of(origins: Sequence[Origin]) -> list[Entrant]:
    """The traces and tables of several heads under names that tell them apart."""
    traces = [origin.trace for origin in origins if origin.trace is not None]
    names = Counter(trace.heads.name for trace in traces)
    called = [h.name if names[h.name] == 1 else f"{h.name} {h.fingerprint[:8]}" for h in (t.heads for t in traces)]
    return [
        Entrant(name=name, trace=trace, latency=origin.table)
        for name, trace, origin in zip(called, traces, origins, strict=True)
    ]


def single(given: Sequence[Path] | None) -> Path | None:
    """The one path given, or none."""
    return given[0] if given else None


def of_workload(trace: Any, workload: str | None) -> Any:
    """The rank trace, or the accept masks, of one workload's prompts."""
    if workload is None:
        return trace
    known = sorted({prompt.workload for prompt in trace.prompts})
    if workload not in known:
        raise InputError(f"The trace has no prompts of workload {workload!r}; it has {', '.join(known)}.")
    return trace.select(lambda prompt: prompt.workload == workload)


def table_for(trace: RankTrace | AcceptTrace, asked: dict[str, Any]) -> tuple[LatencyTable | None, Path | None]:
    """The table given, else the newest one or the demo's; one that nobody named is left out where it does not fit.

    Raises:
        MismatchError: the table was measured with another target or other heads.
    """
    given = single(asked["latency"])
    path = newest_or_shipped(given, LATENCY_SUFFIX)
    if path is None:
        return None, None
    require_kind(path, LATENCY)
    table = read_latency(path)
    differs = differing_fields(table.target, trace.target) + differing_fields(table.heads, trace.heads)
    if differs and given is None and (is_shipped(path) or asked["objective"] == "tokens-per-step"):
        note(f"Latency {path} is of another target or other heads, so it is left out.")
        return None, None
    _note_table(path, table)
    hint = "measure this one with topo-search measure, name its table with --latency"
    require_fit(
        "The latency table's target",
        table.target,
        trace.target,
        allow_mismatch=asked["allow_mismatch"],
        way_out=hint,
    )
    require_fit(
        "The latency table's heads", table.heads, trace.heads, allow_mismatch=asked["allow_mismatch"], way_out=hint
    )
    return table, path


def _read(path: Path, workload: str | None) -> RankTrace:
    require_kind(path, TRACE)
    trace: RankTrace = of_workload(read_trace(path), workload)
    note(
        f"Trace {path}: {len(trace.prompts)} prompts, {len(trace.ranks)} positions, "
        f"{trace.provenance.get('device', 'unknown device')}, {_made(trace.provenance)}"
    )
    return trace


def _paired(path: Path, trace: RankTrace, tables: dict[Path, LatencyTable], asked: dict[str, Any]) -> Origin:
    """The trace with the table of its heads; without any table where none is given and none is needed."""
    fitting = [(at, table) for at, table in tables.items() if not differing_fields(table.heads, trace.heads)]
    if not fitting and (tables or asked["objective"] != "tokens-per-step"):
        raise InputError(
            f"--trace {path} is of heads {trace.heads.name}, of which there is no --latency; heads are compared by a "
            "table each: run topo-search measure with these heads and name its table too."
        )
    if not fitting:
        return Origin(trace=trace, trace_path=path, table=None, latency_path=None)
    latency_path, table = fitting[0]
    _note_table(latency_path, table)
    require_fit(
        f"The target of {latency_path}",
        table.target,
        trace.target,
        allow_mismatch=asked["allow_mismatch"],
        way_out=f"measure the target of {path}",
    )
    return Origin(trace=trace, trace_path=path, table=table, latency_path=latency_path)


def _require_distinct(what: str, option: str, given: Sequence[tuple[Path, HeadsIdentity]]) -> None:
    """Refuse two files of the same heads, and a file named twice."""
    first: dict[str, Path] = {}
    for path, heads in given:
        if heads.fingerprint in first:
            raise InputError(
                f"{option} {first[heads.fingerprint]} and {option} {path} are of the same heads, {heads.name}; give "
                f"one {what} of each heads to choose among."
            )
        first[heads.fingerprint] = path


def _note_narrow(table: LatencyTable | None, settings: Settings) -> None:
    """Say where the table ends before the budget does."""
    widest = 0 if table is None else max(table.widths(*(batch for batch, _ in settings.batches)), default=0)
    if widest and settings.budget > widest:
        note(f"The table ends at width {widest}; topo-search measure --max-width {settings.budget} times more.")


def _note_table(path: Path, table: LatencyTable) -> None:
    note(f"Latency {path}: {device_line(table)}, {table.mode}, {_made(table.provenance)}")


def _made(provenance: dict[str, Any]) -> str:
    return f"made {provenance.get('created', 'at an unknown time')}"
