"""What `optimize` writes and prints: tree files, JSON, tables, the verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from topo_search.cli.origins import Origin
from topo_search.cli.serving import serving_options
from topo_search.errors import TopoSearchError
from topo_search.files.artefacts import file_ref
from topo_search.files.tree_file import TREE_SUFFIX, MadeFrom, Predicted, TreeFile, read_tree, write_tree
from topo_search.identity import differing_fields
from topo_search.provenance import command, now, versions
from topo_search.report.console import note, stdout
from topo_search.report.optimized import comparison_table, figure_json, heads_table, workload_table
from topo_search.search.among import Among
from topo_search.search.assess import Assessment
from topo_search.search.optimize import CHAIN, PLAIN, TREE, Alternative
from topo_search.search.verdict import basis, heads_verdict, verdict

Several = tuple[Among, Sequence[Origin]]  # all heads' answers, and the files behind each


def report(
    found: Assessment,
    origin: Origin,
    out: Path,
    *,
    as_json: bool,
    study: dict[str, Any] | None,
    among: Several | None = None,
) -> None:
    """Write the tree files and print the answer: JSON, or tables and words."""
    files = _write_trees(found, out, _made_from(origin))
    if as_json:
        answer = answer_json(
            found, files, study, heads=_heads(origin), among=among, warnings=_warnings(found, origin, among)
        )
        print(json.dumps(answer, indent=2, allow_nan=False))  # noqa: T201
        return
    if among is not None:
        stdout().print(heads_table(among[0]))
    stdout().print(comparison_table(found))
    if found.workloads:
        stdout().print(workload_table(found.workloads))
    for line in (_verdict(found, among), *_details(found), basis(found.assumptions, found.result.settings)):
        note(line)
    for warning in _warnings(found, origin, among):
        note(f"Warning: {warning}")
    if study:
        note(_study_line(study))
    mode = None if origin.table is None else origin.table.mode
    trace = origin.trace
    options = "" if trace is None else serving_options(trace.target, trace.heads, trace.rule, mode)
    _note_files(files, found.recommended, options)


def _note_files(files: dict[str, Path], recommended: str, options: str) -> None:
    """What was written, and what can be done with it; an alternative without a draft node has no file."""
    for name, file in files.items():
        note(f"Wrote {file} ({name})")
    if not files:
        note("No tree file: plain decoding has no draft node. Leave out --tree and --chain to decode plainly.")
        return
    tree = files.get(recommended) or files.get(TREE, next(iter(files.values())))
    chain = f" --chain {files[CHAIN]}" if CHAIN in files else ""
    note(f"Next: topo-search show {tree}, topo-search generate{options} --tree {tree} PROMPT, or ")
    note(f"topo-search bench{options} --tree {files.get(TREE, tree)}{chain}")


def _study_line(study: dict[str, Any]) -> str:
    """What a study did and where it is kept."""
    if not study["tried"]:
        return "Study: nothing to try: no width above 1 may win."
    known = f"went on from {study['known']} trees tried before" if study["known"] else "new"
    gain = study["value"] / study["seed_value"] - 1
    return (
        f"Study {study['name']} in {study['storage']}: {known}; {study['tried']} trees, {study['pruned']} given up; "
        f"best {study['value']:.4g} against {study['seed_value']:.4g} of the exact search's tree ({100 * gain:+.2f} %)."
        " "
        "The same command with more --trials goes on; another --storage or --out begins anew."
    )


def answer_json(
    found: Assessment,
    files: dict[str, Path],
    study: dict[str, Any] | None,
    *,
    heads: dict[str, Any] | None = None,
    among: Several | None = None,
    warnings: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The answer for machines: the recommended alternative's figures on top; unknown is null.

    Args:
        found: the answer; of the chosen heads where there are several.
        files: tree files by alternative; one without a draft node has none.
        study: what a study did.
        heads: identity of the heads that the answer is for.
        among: all heads' answers; null where there was nothing to choose.
        warnings: what a reader should know before trusting it; the answer's own by default.
    """
    rows = [_row(found, alternative, files.get(alternative.name)) for alternative in found.result.alternatives]
    recommended = next(row for row in rows if row["name"] == found.recommended)
    return {
        **recommended,
        "recommended": found.recommended,
        "alternatives": rows,
        "heads": heads,
        "among": [] if among is None else _among_json(*among),
        "verdict": _verdict(found, among),
        "warnings": list(found.warnings if warnings is None else warnings),
        "assumptions": asdict(found.assumptions),
        "settings": asdict(found.result.settings),
        "over_plain": figure_json(found.over_plain),
        "over_runner_up": None
        if found.over_runner_up is None
        else {"name": found.over_runner_up[0], **(figure_json(found.over_runner_up[1]) or {}), "sure": found.sure},
        "unseen_shares": None if found.unseen is None else list(found.unseen),
        "unseen_tokens_per_step_at_most": None if found.unseen is None else sum(found.unseen),
        "prompts_to_halve_intervals": found.prompts_to_halve,
        "workloads": [
            {
                "workload": row.workload,
                "prompts": row.prompts,
                "paths": [list(path) for path in row.tree.paths],
                "tokens_per_step": row.tokens_per_step,
                "loss_on": row.loss_on,
            }
            for row in found.workloads
        ],
        "study": study,
    }


def _among_json(among: Among, origins: Sequence[Origin]) -> list[dict[str, Any]]:
    """Every heads' recommended alternative, and how much faster that of the chosen heads is."""
    return [
        {
            **_row(standing.found, standing.found.result[standing.found.recommended], None),
            "heads": _heads(origin),
            "trace": str(origin.trace_path),
            "latency": None if origin.latency_path is None else str(origin.latency_path),
            "chosen": standing is among.best,
            "chosen_over": None
            if standing.chosen_over is None
            else {**(figure_json(standing.chosen_over) or {}), "sure": standing.sure},
        }
        for standing, origin in zip(among.standings, origins, strict=True)
    ]


def _heads(origin: Origin) -> dict[str, Any] | None:
    return None if origin.trace is None else asdict(origin.trace.heads)


def _verdict(found: Assessment, among: Several | None) -> str:
    return verdict(found) if among is None else f"{heads_verdict(among[0])} {verdict(found)}"


def _warnings(found: Assessment, origin: Origin, among: Several | None) -> list[str]:
    return [*origin.warnings, *found.warnings, *(() if among is None else among[0].warnings)]


def _row(found: Assessment, own: Alternative, file: Path | None) -> dict[str, Any]:
    honest = found.figures(own.name)
    shown = _shown(found, own)
    return {
        "name": own.name,
        "tree_file": None if file is None else str(file),
        "paths": [list(path) for path in own.tree.paths],
        "num_draft_nodes": own.tree.num_draft_nodes,
        "verify_width": own.tree.verify_width,
        "depth": own.tree.depth,
        "tokens_per_step": shown.tokens_per_step,
        "tokens_per_step_all_positions": shown.tokens_per_step_all_positions,
        "step_ms": shown.step_ms,
        "tokens_per_s": shown.tokens_per_s,
        "speedup": shown.speedup,
        "tokens_per_step_own": own.tokens_per_step,
        "tokens_per_s_own": own.tokens_per_s,
        "speedup_own": own.speedup,
        "intervals": None
        if honest is None
        else {name: figure_json(getattr(honest, name)) for name in ("tokens_per_step", "tokens_per_s", "speedup")},
        "faster_than_plain": None if honest is None else honest.faster_than_plain,
        "break_even_tokens_per_step": None if honest is None else honest.break_even_tokens_per_step,
        "steps_per_answer_p50": None if honest is None else honest.steps_per_answer_p50,
        "steps_per_answer_p95": None if honest is None else honest.steps_per_answer_p95,
    }


def _shown(found: Assessment, own: Alternative) -> Predicted:
    """The figures to print: never a winner's own score, except plain decoding's, which nothing chose."""
    honest = found.figures(own.name)
    if honest is not None:
        return Predicted(
            tokens_per_step=None if honest.tokens_per_step is None else honest.tokens_per_step.value,
            tokens_per_step_all_positions=own.tokens_per_step_all_positions,
            step_ms=honest.step_ms,
            tokens_per_s=None if honest.tokens_per_s is None else honest.tokens_per_s.value,
            speedup=None if honest.speedup is None else honest.speedup.value,
        )
    if own.name != PLAIN and found.assumptions.prompts is not None:
        return Predicted(tokens_per_step_all_positions=own.tokens_per_step_all_positions)
    return Predicted(
        tokens_per_step=own.tokens_per_step,
        tokens_per_step_all_positions=own.tokens_per_step_all_positions,
        step_ms=own.step_ms,
        tokens_per_s=own.tokens_per_s,
        speedup=own.speedup,
    )


def _details(found: Assessment) -> list[str]:
    """Break-even, steps per answer and what unseen paths could add, in words."""
    lines = []
    best = found.figures(found.recommended)
    if best is not None and found.recommended != PLAIN:
        shown = {"tokens per step": best.tokens_per_step, "speed-up": best.speedup}
        ranges = [
            f"{what} {f.prediction.low:.2f} to {f.prediction.high:.2f}"
            for what, f in shown.items()
            if f and f.prediction
        ]
        lines.append(f"On as many other prompts (95 % prediction interval): {', '.join(ranges)}.")
    for name in (CHAIN, TREE):
        honest = found.figures(name)
        if honest is not None and honest.break_even_tokens_per_step is not None:
            lines.append(
                f"{name}: breaks even with plain decoding at {honest.break_even_tokens_per_step:.2f} tokens per step; "
                f"steps per answer {honest.steps_per_answer_p50:.0f} (median), {honest.steps_per_answer_p95:.0f} (95th "
                "percentile)."
            )
    if found.unseen is not None:
        lines.append(
            f"Paths that only one prompt shows: more prompts could add at most {sum(found.unseen):.3f} tokens per step "
            "(Good-Turing, by prompt, every position alike)."
        )
    return lines


def _made_from(origin: Origin) -> MadeFrom:
    trace, table = origin.trace, origin.table
    return MadeFrom(
        target=None if trace is None else trace.target,
        heads=None if trace is None else trace.heads,
        rule=None if trace is None else trace.rule,
        trace=None if origin.trace_path is None else file_ref(origin.trace_path),
        latency=None if table is None or origin.latency_path is None else file_ref(origin.latency_path),
        device=None if table is None else table.device.get("name"),
        mode=None if table is None else table.mode,
        versions=versions(),
        command=command(),
        created=now(),
    )


def _write_trees(found: Assessment, folder: Path, made_from: MadeFrom) -> dict[str, Path]:
    files = {}
    for alternative in found.result.alternatives:
        if not alternative.tree.paths:
            continue
        files[alternative.name] = folder / (alternative.name.replace(" ", "-") + TREE_SUFFIX)
        content = TreeFile(
            tree=alternative.tree,
            name=alternative.name,
            probabilities=alternative.probabilities,
            predicted=_shown(found, alternative),
            made_from=made_from,
        )
        _note_replaced(files[alternative.name], made_from)
        write_tree(files[alternative.name], content)
    return files


def _note_replaced(path: Path, made_from: MadeFrom) -> None:
    """Say where a tree of another rule is written over: `generate` will ask for other settings from now on."""
    if not path.exists() or made_from.rule is None:
        return
    try:
        before = read_tree(path).made_from
    except TopoSearchError:
        return
    rule = None if before is None else before.rule
    if rule is not None and differing_fields(rule, made_from.rule, ignore=("seed",)):
        note(f"{path} was a tree for {rule.in_words}, and is now one for {made_from.rule.in_words}.")
