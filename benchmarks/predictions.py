"""How far to trust a predicted figure: prompts are split at random, trees chosen on one half, measured on the other.

Per trace and tree size, over random halvings of the prompts:

- predicted (cross-fitted on the chosen half) against measured tokens per step on the other half, and how often the
  95 % prediction interval holds the measured figure;
- the bias of counting at all positions, over the replayed figure of the same tree on the same prompts;
- what the `independent` estimator loses against `joint`, and `joint` against `backoff`, on the other half;
- the regret of choosing from 500, 2,000, 10,000 and all positions of the chosen half.

Measured means replayed on prompts that took no part: replay gives the decoder's own steps (ARCHITECTURE.md).

    python benchmarks/predictions.py --trace calibration/demo/demo.trace.safetensors

writes `benchmarks/results/predictions.json` and `predictions.md`. `--trace` may be repeated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from topo_search.estimates import estimate
from topo_search.files.artefacts import file_ref
from topo_search.files.trace_file import read_trace
from topo_search.provenance import provenance
from topo_search.search.frontier import frontier
from topo_search.search.intervals import ratio, resampling_weights
from topo_search.search.judge import ReplayJudge
from topo_search.search.selection import fold_of_prompts, text_units
from topo_search.trace import RankTrace
from topo_search.tree import Tree

RESULTS = Path(__file__).parent / "results"
SIZES, SPLITS, FOLDS, RESAMPLES = (7, 15, 31, 63), 200, 5, 400
POSITIONS = (500, 2_000, 10_000, None)  # None: all of the chosen half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, action="append", required=True)
    parser.add_argument("--splits", type=int, default=SPLITS)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    rows = [row for path in asked.trace for row in rows_of(path, asked.sizes, asked.splits)]
    asked.out.mkdir(parents=True, exist_ok=True)
    found = {"splits": asked.splits, "folds": FOLDS, "resamples": RESAMPLES, "rows": rows, **provenance()}
    (asked.out / "predictions.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    (asked.out / "predictions.md").write_text(markdown(rows, asked.splits), encoding="utf-8")
    print(markdown(rows, asked.splits))


def rows_of(path: Path, sizes: Sequence[int], splits: int) -> list[dict[str, Any]]:
    """One row per size of one trace."""
    trace = read_trace(path)
    judge = ReplayJudge.of(trace, None)
    halves = [half_of_prompts(trace, seed) for seed in range(splits)]
    rows = []
    for size in sizes:
        outcomes = [outcome(judge, half, size, seed) for seed, half in enumerate(halves)]
        rows.append(
            {
                "trace": path.name,
                "sha256": file_ref(path).sha256,
                "heads": trace.heads.kind,
                "prompts": len(trace.prompts),
                "positions": len(trace.ranks),
                "num_draft_nodes": size,
                **{name: mean(outcomes, name) for name in outcomes[0]},
            }
        )
        print(f"{path.name}, {size} nodes: done", flush=True)
    return rows


def half_of_prompts(trace: RankTrace, seed: int) -> np.ndarray:
    """Which prompts choose: half of them at random, repetitions of one text on one side.

    Workloads are not balanced: prompts still to come are not either, and that is what the interval is for.
    """
    units = text_units(trace.prompts)
    count = int(units.max(initial=-1)) + 1
    chosen: np.ndarray = np.isin(units, np.random.default_rng(seed).permutation(count)[: count // 2])
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A tree to choose: on which prompts, by which estimator."""

    chosen_on: np.ndarray
    estimator: str = "backoff"


def outcome(judge: ReplayJudge, half: np.ndarray, size: int, seed: int) -> dict[str, float]:
    """Every figure of one halving at one size."""
    wanted = {"all": Wanted(chosen_on=half), "joint": Wanted(chosen_on=half, estimator="joint")}
    wanted["independent"] = Wanted(chosen_on=half, estimator="independent")
    fold = np.full(len(half), -1)
    fold[half] = fold_of_prompts(part(judge.trace, half).prompts, FOLDS, seed)
    wanted |= {f"fold {number}": Wanted(chosen_on=half & (fold != number)) for number in range(FOLDS)}
    for count in POSITIONS[:-1]:
        for estimator in ("backoff", "joint"):
            subset = prompts_with(judge.trace, half, count or 0, seed)
            wanted[f"{estimator} {count}"] = Wanted(chosen_on=subset, estimator=estimator)
    trees = [tree_of(judge, choice, size) for choice in wanted.values()]
    scores = judge.score(trees)
    steps, names = scores.steps, list(wanted)
    tokens = scores.tokens.astype(np.float64)

    def measured(name: str, prompts: np.ndarray) -> float:
        return float(tokens[prompts].sum() / steps[names.index(name), prompts].sum())

    crossed = np.zeros(len(half))
    for number in range(FOLDS):
        crossed[fold == number] = steps[names.index(f"fold {number}"), fold == number]
    held = measured("all", ~half)
    own = measured("all", half)
    figure = predicted(judge.trace, tokens, crossed, half, seed)
    everywhere = all_positions(judge, trees[names.index("all")], half)
    return {
        "predicted": figure["value"],
        "measured": held,
        "covered": float(figure["low"] <= held <= figure["high"]),
        "prediction_half_width": (figure["high"] - figure["low"]) / 2 / figure["value"],
        "own_score_over_measured": own / held - 1,
        "predicted_over_measured": figure["value"] / held - 1,
        "all_positions_over_replay": everywhere / own - 1,
        "independent_loses_to_joint": 1 - measured("independent", ~half) / measured("joint", ~half),
        "joint_loses_to_backoff": 1 - measured("joint", ~half) / held,
        **{
            f"regret_{estimator}_{count}": 1 - measured(f"{estimator} {count}", ~half) / held
            for count in POSITIONS[:-1]
            for estimator in ("backoff", "joint")
        },
    }


def tree_of(judge: ReplayJudge, wanted: Wanted, size: int) -> Tree:
    """The frontier's tree of that size from some prompts' rows."""
    rows = np.flatnonzero(wanted.chosen_on[judge.trace.prompt_of_row])
    return frontier(estimate(wanted.estimator, judge.table.counted(rows)), num_draft_nodes=size).tree(size)


def predicted(
    trace: RankTrace, tokens: np.ndarray, crossed: np.ndarray, half: np.ndarray, seed: int
) -> dict[str, float]:
    """Cross-fitted tokens per step of the chosen half, and its prediction interval for the other half."""
    units = text_units(trace.prompts)
    known, others = np.unique(units[half]), np.unique(units[~half])
    places = np.searchsorted(known, units[half])
    sums = [np.bincount(places, weights=values[half], minlength=len(known)) for values in (tokens, crossed)]
    weights = resampling_weights(len(known), RESAMPLES, seed)
    figure = ratio(sums[0], sums[1], weights, new_prompts=len(others))
    assert figure is not None
    assert figure.prediction is not None
    return {"value": figure.value, "low": figure.prediction.low, "high": figure.prediction.high}


def all_positions(judge: ReplayJudge, tree: Tree, half: np.ndarray) -> float:
    """Mean emitted over every row of the chosen half."""
    return float(ReplayJudge.of(part(judge.trace, half), None).score([tree]).all_positions[0])


def prompts_with(trace: RankTrace, half: np.ndarray, positions: int, seed: int) -> np.ndarray:
    """Prompts of the half, in random order, until they hold so many positions."""
    order = np.random.default_rng(seed).permutation(np.flatnonzero(half))
    rows = np.cumsum([trace.prompts[index].rows for index in order])
    kept = np.zeros(len(half), dtype=np.bool_)
    kept[order[: int(np.searchsorted(rows, positions)) + 1]] = True
    return kept


def mean(outcomes: list[dict[str, float]], name: str) -> float:
    return float(np.mean([found[name] for found in outcomes]))


def part(trace: RankTrace, kept: np.ndarray) -> RankTrace:
    ids = {prompt.id for prompt, wanted in zip(trace.prompts, kept, strict=True) if wanted}
    return trace.select(lambda prompt: prompt.id in ids)


COLUMNS = {
    "trace": "trace",
    "num_draft_nodes": "nodes",
    "predicted": "predicted",
    "measured": "measured",
    "predicted_over_measured": "predicted / measured - 1",
    "own_score_over_measured": "own score / measured - 1",
    "covered": "covered",
    "all_positions_over_replay": "all positions / replay - 1",
    "independent_loses_to_joint": "`independent` loses to `joint`",
    "joint_loses_to_backoff": "`joint` loses to `backoff`",
    "regret_backoff_500": "regret 500",
    "regret_backoff_2000": "regret 2,000",
    "regret_backoff_10000": "regret 10,000",
    "regret_joint_500": "regret 500 (`joint`)",
}


def markdown(rows: list[dict[str, Any]], splits: int) -> str:
    """The table for the documentation: means over the splits; the regret of all positions is 0 by definition."""
    lines = [
        f"Means over {splits} random halvings of the prompts; shares in percent.",
        "",
        "| " + " | ".join(COLUMNS.values()) + " |",
        "| --- |" + " ---: |" * (len(COLUMNS) - 1),
    ]
    for row in rows:
        lines.append("| " + " | ".join(_cell(name, row[name]) for name in COLUMNS) + " |")
    return "\n".join(lines) + "\n"


def _cell(name: str, value: Any) -> str:
    if isinstance(value, str | int):
        return str(value)
    return f"{value:.3f}" if name in ("predicted", "measured") else f"{100 * value:.1f} %"


if __name__ == "__main__":
    main()
