"""What `optimize` answers, pinned: figures and trees of many questions, as they were before the code was rearranged.

The expected answers lie in `tests/golden/answers.json`. `UPDATE_ANSWERS=1 pytest tests/unit/test_characterisation.py`
writes them anew; do that only where an answer was meant to change, and say so in the commit.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import HEADS, TABLE_A, TARGET, drawn_trace, latency_table, timing

from topo_search.accepts import AcceptTrace
from topo_search.cli.app import main
from topo_search.cost import LatencyTable
from topo_search.files.accepts_file import write_accepts
from topo_search.files.latency_file import write_latency
from topo_search.files.trace_file import write_trace
from topo_search.identity import typical_rule
from topo_search.trace import RankTrace, TracePrompt
from topo_search.tree import Tree

ROOT = Path(__file__).resolve().parents[2]
ANSWERS = ROOT / "tests/golden/answers.json"
SHIPPED = "--trace calibration/demo/demo.trace.safetensors --latency calibration/demo/demo.latency.json"
HYDRA = "--trace benchmarks/results/heads/demo-hydra.trace.safetensors"
HYDRA_TIMES = "--latency benchmarks/results/heads/demo-hydra.compiled.latency.json"
MEDUSA = "--trace benchmarks/results/heads/demo-medusa.trace.safetensors"
MEDUSA_TIMES = "--latency benchmarks/results/heads/demo-medusa.compiled.latency.json"
PREFIX = "--trace benchmarks/results/heads/demo-hydra++.trace.safetensors"
PREFIX_TIMES = "--latency benchmarks/results/heads/demo-hydra++.compiled.latency.json"
TOY, TYPICAL = "--trace TMP/toy.trace.safetensors", "--acceptance typical --trace TMP/wide.accepts.safetensors"
FLAT, STEEP, NODES = (f"--latency TMP/{name}.latency.json" for name in ("flat", "steep", "nodes"))

QUESTIONS = {
    "shipped": f"{SHIPPED} --budget 64",
    "shipped tokens": f"{SHIPPED} --budget 64 --objective tokens-per-step",
    "shipped joint": f"{MEDUSA} {MEDUSA_TIMES} --budget 32 --estimator joint --pick best",
    "shipped independent": f"{MEDUSA} {MEDUSA_TIMES} --budget 32 --estimator independent --pick best",
    "shipped best pick": f"{SHIPPED} --budget 64 --pick best",
    "shipped recount": f"{MEDUSA} {MEDUSA_TIMES} --budget 16 --refine recount --pick best",
    "shipped swaps": f"{SHIPPED} --budget 8 --refine swaps",
    "shipped caps": f"{SHIPPED} --budget 64 --max-depth 3 --max-rank 2",
    "shipped chain only": f"{SHIPPED} --budget 16 --max-rank 0",
    "shipped workload": f"{SHIPPED} --budget 32 --workload code",
    "shipped contexts": f"{SHIPPED} --budget 64 --context-weights 128=0.25,512=0.75",
    "shipped folds": f"{SHIPPED} --budget 64 --folds 3 --seed 7",
    "shipped contiguous": f"{MEDUSA} {MEDUSA_TIMES} --budget 16 --rule contiguous --pick best",
    "shipped expanded first": f"{HYDRA} --budget 8 --rule expanded-first --objective tokens-per-step",
    "shipped uniform": f"{MEDUSA} --budget 32 --rule uniform --objective tokens-per-step",
    "shipped optuna": f"{SHIPPED} --budget 16 --strategy optuna --trials 8",
    "hydra": f"{HYDRA} {HYDRA_TIMES} --budget 64",
    "hydra caps": f"{HYDRA} {HYDRA_TIMES} --budget 32 --max-depth 2",
    "hydra optuna": f"{HYDRA} {HYDRA_TIMES} --budget 16 --strategy optuna --trials 6 --seed 3",
    "hydra++ best": f"{PREFIX} {PREFIX_TIMES} --budget 64 --pick best",
    "hydra++ tokens": f"{PREFIX} {PREFIX_TIMES} --budget 48 --objective tokens-per-step --refine recount",
    "three drafters": f"{MEDUSA} {HYDRA} {PREFIX} {MEDUSA_TIMES} {HYDRA_TIMES} {PREFIX_TIMES} --budget 64",
    "two drafters tokens": f"{MEDUSA} {HYDRA} --objective tokens-per-step --budget 16",
    "two drafters optuna": f"{MEDUSA} {HYDRA} {MEDUSA_TIMES} {HYDRA_TIMES} --budget 8 --strategy optuna --trials 8",
    "toy flat": f"{TOY} {FLAT} --budget 8",
    "toy steep": f"{TOY} {STEEP} --budget 8",
    "toy by nodes": f"{TOY} {NODES} --budget 8",
    "toy batch": f"{TOY} {FLAT} --budget 8 --batch 4",
    "toy batches": f"{TOY} {FLAT} --budget 8 --batch-weights 1=0.7,4=0.3",
    "toy batches contexts": f"{TOY} {FLAT} --budget 6 --batch-weights 1=0.5,4=0.5 --context-weights 16=1,64=3",
    "toy by nodes batches": f"{TOY} {NODES} --budget 8 --batch-weights 1=0.5,4=0.5",
    "toy tokens": f"{TOY} --budget 8 --objective tokens-per-step",
    "toy beyond the table": f"{TOY} {FLAT} --budget 30",
    "toy budget of one": f"{TOY} {FLAT} --budget 1",
    "toy one prompt": "--trace TMP/single.trace.safetensors " + FLAT + " --budget 8",
    "toy two workloads": "--trace TMP/workloads.trace.safetensors " + STEEP + " --budget 8",
    "toy repeated text": "--trace TMP/repeated.trace.safetensors " + FLAT + " --budget 6",
    "accuracies tokens": "--accuracies TMP/accuracies.json --objective tokens-per-step --budget 9",
    "accuracies": f"--accuracies TMP/accuracies.json {FLAT} --budget 9",
    "accuracies uniform": f"--accuracies TMP/accuracies.json {STEEP} --budget 9 --rule uniform",
    "accuracies by nodes": f"--accuracies TMP/accuracies.json {NODES} --budget 9 --max-rank 1",
    "typical tokens": f"{TYPICAL} --budget 5 --objective tokens-per-step",
    "typical": f"{TYPICAL} {FLAT} --budget 7",
    "typical steep": f"{TYPICAL} {STEEP} --budget 7 --max-depth 2",
    "typical batch": f"{TYPICAL} {FLAT} --budget 7 --batch 4 --seed 2",
}


def _toy(prompts: int = 12, seed: int = 4) -> RankTrace:
    return drawn_trace(TABLE_A, prompts=prompts, rows=20, seed=seed)


def _with_prompts(trace: RankTrace, **changes: list[str]) -> RankTrace:
    prompts = [
        replace(prompt, **{field: values[index % len(values)] for field, values in changes.items()})
        for index, prompt in enumerate(trace.prompts)
    ]
    return replace(trace, prompts=tuple(prompts))


def _spread(table: LatencyTable) -> LatencyTable:
    """With a spread of the timings and a second batch, four rows of which take 2.5 times as long as one."""
    cells = {
        name: {
            (batch, *key[1:]): replace(
                timing((timed.median_ms or 0.0) * (1 if batch == 1 else 2.5)),
                mean_ms=(timed.median_ms or 0.0) * (1.02 if batch == 1 else 2.6),
                p10_ms=(timed.median_ms or 0.0) * 0.97,
                p90_ms=(timed.median_ms or 0.0) * (1.06 if batch == 1 else 2.7),
            )
            for key, timed in getattr(table, name).items()
            for batch in (1, 4)
        }
        for name in ("verify", "draft")
    }
    return replace(table, **cells)


def _masks() -> AcceptTrace:
    rng = np.random.default_rng(5)
    tree = Tree.dense([3, 2, 1])
    rows = [6] * 14
    accepted = rng.random((sum(rows), tree.num_draft_nodes)) < 0.4
    for node, parent in enumerate(tree.parents[1:]):
        if parent > 0:
            accepted[:, node] &= accepted[:, parent - 1]
    emitted = (accepted * np.array(tree.depths[1:])).max(axis=1) + 1
    prompts, remaining = [], []
    for index, steps in enumerate(np.split(emitted, np.cumsum(rows)[:-1])):
        total = int(steps.sum())
        remaining += [total - int(steps[:at].sum()) for at in range(len(steps))]
        prompts.append(
            TracePrompt(id=f"p{index}", workload="chat", prompt_tokens=7, answer_tokens=total + 1, end="cap")
        )
    return AcceptTrace(
        prompts=tuple(prompts),
        tree=tree,
        accepted=accepted,
        prompt_of_step=np.repeat(np.arange(len(rows)), rows),
        remaining=np.array(remaining, dtype=np.int64),
        target=TARGET,
        heads=HEADS,
        rule=typical_rule(temperature=0.7),
        max_new_tokens=300,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    flat = latency_table({width: 10 + 0.3 * width for width in range(1, 10)}, (1.0, 1.5, 2.0), contexts={16: 1, 64: 2})
    steep = latency_table({width: 6.0 + 4.0 * width for width in range(1, 10)}, (0.5, 0.8, 1.0))
    calls = {(1, depth, nodes): timing(1.0 * depth + 0.4 * nodes * (depth - 1)) for depth in (2, 3) for nodes in (1, 4)}
    by_nodes = replace(flat, draft={(1, 1, 1): timing(1.0), **calls})
    for name, table in (("flat", flat), ("steep", steep), ("nodes", by_nodes)):
        write_latency(folder / f"{name}.latency.json", _spread(table))
    texts = [f"d{index // 2}" for index in range(12)]
    for name, trace in (
        ("toy", _toy()),
        ("single", _toy(prompts=1)),
        ("workloads", _with_prompts(_toy(seed=6), workload=["code", "chat", "chat"])),
        ("repeated", _with_prompts(_toy(), digest=texts)),
    ):
        write_trace(folder / f"{name}.trace.safetensors", trace)
    write_accepts(folder / "wide.accepts.safetensors", _masks())
    (folder / "accuracies.json").write_text(json.dumps({"rank_table": TABLE_A}))
    return folder


def _row(row: dict[str, Any]) -> dict[str, Any]:
    numbers = (
        *("tokens_per_step", "tokens_per_step_all_positions", "step_ms", "tokens_per_s", "speedup"),
        *("tokens_per_step_own", "tokens_per_s_own", "speedup_own", "faster_than_plain", "break_even_tokens_per_step"),
        *("steps_per_answer_p50", "steps_per_answer_p95"),
    )
    return {
        "paths": ["".join(map(str, path)) for path in row["paths"]],
        "numbers": {name: row.get(name) for name in numbers},
        "intervals": {name: row["intervals"][name] for name in sorted(row["intervals"] or ())},
    }


def answer_of(found: dict[str, Any]) -> dict[str, Any]:
    """The figures and trees of an answer, without its words; the one place that knows the keys."""
    return {
        "recommended": found["recommended"],
        "alternatives": {row["name"]: _row(row) for row in found["alternatives"]},
        "among": [
            [row["name"], row["chosen"], ["".join(map(str, path)) for path in row["paths"]], row["chosen_over"]]
            for row in found.get("among", ())
        ],
        "over_plain": found.get("over_plain"),
        "over_runner_up": found.get("over_runner_up"),
        "unseen_shares": found.get("unseen_shares"),
        "prompts_to_halve_intervals": found.get("prompts_to_halve_intervals"),
        "workloads": [
            [row["workload"], row["prompts"], row["tokens_per_step"], row["loss_on"], [*map(str, row["paths"])]]
            for row in found.get("workloads", ())
        ],
        "study": {name: (found.get("study") or {}).get(name) for name in ("tried", "pruned", "value", "seed_value")},
    }


def asked(
    words: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    typed = shlex.split(words.replace("TMP", str(made)))
    monkeypatch.chdir(ROOT)
    out = ["--out", str(tmp_path), "--json", *([] if "--accuracies" in typed else ["--resamples", "200"])]
    monkeypatch.setattr(sys, "argv", ["topo-search", "optimize", *typed, *out])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    assert not ended.value.code, printed.err
    found: dict[str, Any] = answer_of(json.loads(printed.out))
    return found


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_answer_is_as_it_was(
    name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked(QUESTIONS[name], made, tmp_path, monkeypatch, capsys)
    pinned: dict[str, Any] = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    if os.environ.get("UPDATE_ANSWERS"):
        rows = [
            f"{json.dumps(key)}: {json.dumps(row, sort_keys=True)}" for key, row in (pinned | {name: found}).items()
        ]
        ANSWERS.write_text("{\n" + ",\n".join(rows) + "\n}\n")
        return
    assert_same(found, pinned[name], name)


def assert_same(found: Any, expected: Any, where: str) -> None:
    """Equal but for the last bits of a float, which another processor's sums may round otherwise."""
    if isinstance(expected, dict):
        assert isinstance(found, dict) and set(found) == set(expected), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where} / {key}")
    elif isinstance(expected, list):
        assert isinstance(found, list) and len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(found[index], value, f"{where} / {index}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12), where
    else:
        assert found == expected, where
