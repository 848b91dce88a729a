"""`optimize --acceptance typical`: the tree that covers most, from accept masks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from topo_search.accepts import AcceptTrace
from topo_search.cli.options import CALIBRATION_FOLDER
from topo_search.cli.serving import serving_options
from topo_search.cost import LatencyTable
from topo_search.errors import InputError
from topo_search.files.accepts_file import ACCEPTS_SUFFIX, read_accepts
from topo_search.files.artefacts import file_ref, newest
from topo_search.files.tree_file import TREE_SUFFIX, MadeFrom, Predicted, TreeFile, write_tree
from topo_search.provenance import command, now, versions
from topo_search.report.console import note, stdout
from topo_search.report.optimized import figure_json
from topo_search.report.typical import typical_table
from topo_search.search.choose import Settings
from topo_search.search.optimize import CHAIN, PLAIN, TREE
from topo_search.search.typical import TypicalAssessment, TypicalFigures, assess_typical

_NOT_EXACT = (
    "Typical acceptance changes the text. The search is a heuristic, and its figures are those of the recording tree's "
    "steps: decode with the tree for its own."
)


def masks_for(given: Path | None) -> tuple[AcceptTrace, Path]:
    """The masks named, or the newest in ./calibration.

    Raises:
        InputError: there are none.
    """
    path = given or newest(CALIBRATION_FOLDER, ACCEPTS_SUFFIX)
    if path is None:
        raise InputError(
            "No accept masks in ./calibration: run topo-search calibrate --acceptance typical, or name a "
            f"*{ACCEPTS_SUFFIX} file with --trace."
        )
    masks = read_accepts(path)
    note(
        f"Accept masks {path}: {len(masks.prompts)} prompts, {len(masks.prompt_of_step)} steps of a tree of "
        f"{masks.tree.num_draft_nodes} nodes, {masks.rule.in_words}"
    )
    return masks, path


def report_typical(
    masks: AcceptTrace,
    masks_path: Path,
    table: LatencyTable | None,
    latency_path: Path | None,
    settings: Settings,
    out: Path,
    *,
    as_json: bool,
) -> None:
    """Search, write the tree files, and print the answer.

    Raises:
        InputError: no time is at hand for the objective, or no step in the masks.
    """
    found = assess_typical(masks, table, settings)
    files = _write_trees(found, masks, masks_path, table, latency_path, out)
    if as_json:
        print(json.dumps(_answer_json(found, masks, files), indent=2, allow_nan=False))  # noqa: T201
        return
    stdout().print(typical_table(found))
    note(f"Recommended: {found.recommended}. {_NOT_EXACT}")
    for name, file in files.items():
        note(f"Wrote {file} ({name})")
    if TREE not in files:
        note("No tree file: plain decoding has no draft node.")
        return
    chain = f" --chain {files[CHAIN]}" if CHAIN in files else ""
    options = serving_options(masks.target, masks.heads, masks.rule, None if table is None else table.mode)
    note(f"Next: topo-search calibrate{options} --tree {files[TREE]} --no-measure, its true figure")
    note(f"      topo-search bench{options} --tree {files[TREE]}{chain}")


def _predicted(found: TypicalFigures) -> Predicted:
    return Predicted(
        tokens_per_step=found.tokens_per_step_own if found.tokens_per_step is None else found.tokens_per_step.value,
        step_ms=found.step_ms,
        tokens_per_s=None if found.tokens_per_s is None else found.tokens_per_s.value,
        speedup=None if found.speedup is None else found.speedup.value,
    )


def _write_trees(
    found: TypicalAssessment,
    masks: AcceptTrace,
    masks_path: Path,
    table: LatencyTable | None,
    latency_path: Path | None,
    folder: Path,
) -> dict[str, Path]:
    made_from = MadeFrom(
        target=masks.target,
        heads=masks.heads,
        rule=masks.rule,
        trace=file_ref(masks_path),
        latency=None if table is None or latency_path is None else file_ref(latency_path),
        device=None if table is None else table.device.get("name"),
        mode=None if table is None else table.mode,
        versions=versions(),
        command=command(),
        created=now(),
    )
    files = {}
    for name, stem in ((CHAIN, "typical-chain"), (TREE, "typical-tree")):
        if not found[name].tree.paths:
            continue
        files[name] = folder / (stem + TREE_SUFFIX)
        words = f"{name}, typical acceptance (changes the text)"
        content = TreeFile(tree=found[name].tree, name=words, predicted=_predicted(found[name]), made_from=made_from)
        write_tree(files[name], content)
    return files


def _answer_json(found: TypicalAssessment, masks: AcceptTrace, files: dict[str, Path]) -> dict[str, Any]:
    rows = [_row(alternative, files.get(alternative.name)) for alternative in found.alternatives]
    return {
        **next(row for row in rows if row["name"] == found.recommended),
        "recommended": found.recommended,
        "alternatives": rows,
        "acceptance": masks.rule.in_words,
        "heuristic": True,
        "warnings": [_NOT_EXACT],
        "prompts": found.prompts,
        "steps": found.steps,
    }


def _row(found: TypicalFigures, file: Path | None) -> dict[str, Any]:
    shown = _predicted(found)
    names = ("tokens_per_step", "tokens_per_s", "speedup")
    return {
        "name": found.name,
        "changes_text": found.name != PLAIN,
        "tree_file": None if file is None else str(file),
        "paths": [list(path) for path in found.tree.paths],
        "num_draft_nodes": found.tree.num_draft_nodes,
        "verify_width": found.tree.verify_width,
        "depth": found.tree.depth,
        "tokens_per_step": shown.tokens_per_step,
        "tokens_per_step_own": found.tokens_per_step_own,
        "step_ms": shown.step_ms,
        "tokens_per_s": shown.tokens_per_s,
        "speedup": shown.speedup,
        "intervals": {name: figure_json(getattr(found, name)) for name in names},
    }
