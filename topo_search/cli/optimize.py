"""`topo-search optimize`: the fastest tree from a trace and a latency table; needs neither model nor torch."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from topo_search.cli import options

if TYPE_CHECKING:
    from topo_search.cost import LatencyTable
    from topo_search.files.tree_file import MadeFrom
    from topo_search.search.optimize import Alternative, SearchResult
    from topo_search.trace import RankTrace


class Objective(StrEnum):
    """What to make best."""

    throughput = "throughput"
    tokens_per_step = "tokens-per-step"


class Strategy(StrEnum):
    """How to search."""

    greedy = "greedy"


def optimize(
    budget: Annotated[int, typer.Option(help="Most tokens verified per step, root included.")] = options.DEFAULT_BUDGET,
    trace: options.TraceFile = None,
    latency: options.LatencyFile = None,
    strategy: Annotated[
        Strategy, typer.Option(help="greedy: sort path probabilities, exact for every size.")
    ] = Strategy.greedy,
    objective: Annotated[Objective, typer.Option(help="Tokens per second, or fill the budget.")] = Objective.throughput,
    workload: options.Workload = None,
    out: Annotated[Path, typer.Option(help="Folder for the tree files.")] = options.TREES_FOLDER,
    as_json: options.Json = False,
    allow_mismatch: options.AllowMismatch = False,
) -> None:
    """Find the fastest tree, the best chain, and say whether plain decoding beats both.

    Examples: topo-search optimize --budget 64 | topo-search optimize --objective tokens-per-step --json
    """
    del strategy
    from topo_search.cli.inputs import is_shipped, newest_or_shipped
    from topo_search.errors import InputError
    from topo_search.files.trace_file import TRACE_SUFFIX, read_trace
    from topo_search.report.console import note
    from topo_search.search.optimize import optimize as search

    trace_path = newest_or_shipped(trace, TRACE_SUFFIX)
    if trace_path is None:
        raise InputError("No rank trace in ./calibration: run topo-search calibrate, or name one with --trace.")
    ranks = _of_workload(read_trace(trace_path), workload)
    note(
        f"Trace {trace_path}: {len(ranks.prompts)} prompts, {len(ranks.ranks)} positions, "
        f"{ranks.provenance.get('device', 'unknown device')}, {_made(ranks.provenance)}"
    )
    table, latency_path = _table_for(ranks, latency, objective, allow_mismatch=allow_mismatch)
    if is_shipped(trace_path) or (latency_path is not None and is_shipped(latency_path)):
        note("These are the demo's shipped figures, not this device's or your prompts': run topo-search calibrate.")
    if table is not None and budget > max(table.widths()):
        note(f"The table ends at width {max(table.widths())}; topo-search measure --max-width {budget} times more.")
    result = search(ranks, table, budget=budget, objective=objective.value)
    files = _write_trees(result, out, _made_from(ranks, trace_path, table, latency_path))
    if as_json:
        print(json.dumps(_as_json(result, files), indent=2))  # noqa: T201
    else:
        _show(result, files)


def _of_workload(trace: RankTrace, workload: str | None) -> RankTrace:
    from topo_search.errors import InputError

    if workload is None:
        return trace
    known = sorted({prompt.workload for prompt in trace.prompts})
    if workload not in known:
        raise InputError(f"The trace has no prompts of workload {workload!r}; it has {', '.join(known)}.")
    return trace.select(lambda prompt: prompt.workload == workload)


def _made(provenance: dict[str, Any]) -> str:
    return f"made {provenance.get('created', 'at an unknown time')}"


def _table_for(
    trace: RankTrace, given: Path | None, objective: Objective, *, allow_mismatch: bool
) -> tuple[LatencyTable | None, Path | None]:
    """The table given, else the newest one or the demo's; one that nobody named is left out where it does not fit.

    Raises:
        MismatchError: the table was measured with another target or other heads.
    """
    from topo_search.cli.inputs import is_shipped, newest_or_shipped, require_fit
    from topo_search.files.latency_file import LATENCY_SUFFIX, read_latency
    from topo_search.identity import differing_fields
    from topo_search.report.console import note
    from topo_search.report.tables import device_line

    path = newest_or_shipped(given, LATENCY_SUFFIX)
    if path is None:
        return None, None
    table = read_latency(path)
    differs = differing_fields(table.target, trace.target) + differing_fields(table.heads, trace.heads)
    if differs and given is None and (is_shipped(path) or objective is Objective.tokens_per_step):
        note(f"Latency {path} is of another target or other heads, so it is left out.")
        return None, None
    note(f"Latency {path}: {device_line(table)}, {table.mode}, {_made(table.provenance)}")
    hint = "measure this one with topo-search measure, name its table with --latency"
    require_fit("The latency table's target", table.target, trace.target, allow_mismatch=allow_mismatch, way_out=hint)
    require_fit("The latency table's heads", table.heads, trace.heads, allow_mismatch=allow_mismatch, way_out=hint)
    return table, path


def _made_from(trace: RankTrace, trace_path: Path, table: LatencyTable | None, latency_path: Path | None) -> MadeFrom:
    from topo_search.files.artefacts import file_ref
    from topo_search.files.tree_file import MadeFrom
    from topo_search.provenance import command, now, versions

    return MadeFrom(
        target=trace.target,
        heads=trace.heads,
        rule=trace.rule,
        trace=file_ref(trace_path),
        latency=None if latency_path is None else file_ref(latency_path),
        device=None if table is None else table.device.get("name"),
        versions=versions(),
        command=command(),
        created=now(),
    )


def _write_trees(result: SearchResult, folder: Path, made_from: MadeFrom) -> dict[str, Path]:
    from topo_search.files.tree_file import TREE_SUFFIX, Predicted, TreeFile, write_tree
    from topo_search.search.optimize import PLAIN

    files = {}
    for found in result.alternatives:
        if found.name == PLAIN:
            continue
        predicted = Predicted(
            tokens_per_step=found.tokens_per_step,
            tokens_per_step_all_positions=found.tokens_per_step_all_positions,
            step_ms=found.step_ms,
            tokens_per_s=found.tokens_per_s,
            speedup=found.speedup,
        )
        files[found.name] = folder / (found.name.replace(" ", "-") + TREE_SUFFIX)
        content = TreeFile(
            tree=found.tree,
            name=found.name,
            probabilities=found.probabilities,
            predicted=predicted,
            made_from=made_from,
        )
        write_tree(files[found.name], content)
    return files


def _as_json(result: SearchResult, files: dict[str, Path]) -> dict[str, Any]:
    rows = [_json_row(found, files.get(found.name)) for found in result.alternatives]
    recommended = next(row for row in rows if row["name"] == result.recommended)
    return {**recommended, "recommended": result.recommended, "alternatives": rows}


def _json_row(found: Alternative, file: Path | None) -> dict[str, Any]:
    return {
        "name": found.name,
        "tree_file": None if file is None else str(file),
        "paths": [list(path) for path in found.tree.paths],
        "num_draft_nodes": found.tree.num_draft_nodes,
        "verify_width": found.tree.verify_width,
        "depth": found.tree.depth,
        "tokens_per_step": found.tokens_per_step,
        "tokens_per_step_all_positions": found.tokens_per_step_all_positions,
        "step_ms": found.step_ms,
        "tokens_per_s": found.tokens_per_s,
        "speedup": found.speedup,
    }


def _show(result: SearchResult, files: dict[str, Path]) -> None:
    from topo_search.report.console import note, stdout
    from topo_search.report.tables import comparison_table
    from topo_search.search.optimize import CHAIN, TREE

    stdout().print(comparison_table(result))
    note(_verdict(result))
    for name, file in files.items():
        note(f"Wrote {file} ({name})")
    tree, chain = files[TREE], files[CHAIN]
    note(f"Next: topo-search show {tree}, or topo-search bench --tree {tree} --chain {chain}")


def _verdict(result: SearchResult) -> str:
    """What to use, and why, in a sentence."""
    from topo_search.search.optimize import PLAIN, TREE

    best = result[result.recommended]
    if best.name == PLAIN and not result[TREE].tree.paths:
        return "Recommended: plain decoding; within this budget no tree could be tried."
    if best.name == PLAIN:
        return "Recommended: plain decoding. No tree or chain of these heads earns its cost here."
    if best.speedup is None:
        width = best.tree.verify_width
        return f"Recommended: {best.name}, {best.tokens_per_step:.3f} tokens per step; width {width} has no time."
    if best.speedup < 1:
        return (
            f"Asked for tokens per step: {best.name}, {best.tokens_per_step:.3f}. By the measured step times it is "
            f"{best.speedup:.2f} times plain decoding, so plain decoding is faster."
        )
    return f"Recommended: {best.name}, {best.speedup:.2f} times plain decoding at batch 1 by the measured step times."
