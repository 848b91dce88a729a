"""Which tree for which work? The guide's advice on topology, checked on recorded ranks, with intervals.

The guide says: at a high temperature wide and shallow trees, for code and JSON deep and narrow ones. For every workload
and temperature the target answers the same prompts (traces are kept and extended, so a killed run continues), and for
each the best tree is searched for: at fixed numbers of verified tokens, and for measured step times. Figures are
cross-fitted; losses say what another cell's tree would cost. Then the guide's own shapes are compared at equal size,
paired by prompt, and so are the shapes of the best trees, by searching again on resampled prompts.

    python benchmarks/topologies.py
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from topo_search.cost import LatencyTable
from topo_search.files.latency_file import read_latency
from topo_search.provenance import provenance
from topo_search.resources import packaged
from topo_search.search.choose import Settings, choose, merit
from topo_search.search.intervals import Figure, ratio, resampling_weights, t_quantile
from topo_search.search.judge import ReplayJudge
from topo_search.search.selection import chosen_trees, fold_of_prompts, hold_out
from topo_search.trace import RankTrace
from topo_search.tree import Tree

RESULTS = Path(__file__).parent / "results"
WORKLOADS = ("chat", "math", "code", "json")
STRUCTURED = ("code", "json")
RESAMPLES = 2000
FASTEST = "fastest"

# The guide's shapes. The first pair has equally many nodes; in the second its deep tree has two more than its wide one.
WIDE_15, DEEP_15 = Tree.dense([5, 2]), Tree((*Tree.dense([2, 2, 2]).paths, (0, 0, 0, 0)))
WIDE_28, DEEP_30 = Tree.dense([4, 2, 2]), Tree.dense([2, 2, 2, 2])

Cell = tuple[str, float]  # workload, temperature
Traces = Mapping[Cell, RankTrace]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What "wide", "deep", "narrow" and "shallow" are measured by."""

    depth: int
    width_at_1: int
    nodes: int
    mean_branching: float
    mean_depth: float

    @classmethod
    def of(cls, tree: Tree) -> Shape:
        """Mean branching is over expanded nodes, the root included; mean depth over draft nodes."""
        expanded = {path[:-1] for path in tree.paths}
        lengths = [len(path) for path in tree.paths]
        return cls(
            depth=tree.depth,
            width_at_1=lengths.count(1),
            nodes=len(lengths),
            mean_branching=round(len(lengths) / max(len(expanded), 1), 3),
            mean_depth=round(sum(lengths) / max(len(lengths), 1), 3),
        )


def main() -> None:
    options = _options()
    latency = read_latency(options.latency or packaged("calibration/demo/demo.latency.json"))
    traces = _recorded(options)
    questions = {f"width {budget}": settings_of(budget) for budget in options.budgets}
    questions[FASTEST] = Settings(budget=max(options.budgets))
    cells = {name: cell_rows(traces, latency, settings) for name, settings in questions.items()}
    claims = [
        *guide_shapes(traces),
        *(line for budget in options.budgets for line in best_shapes(traces, settings_of(budget), options.searches)),
    ]
    some = next(iter(traces.values()))
    content = {
        "target": asdict(some.target),
        "heads": asdict(some.heads),
        "device": latency.device,
        "prompts": {f"{w} T={t:g}": len(trace.prompts) for (w, t), trace in traces.items()},
        "max_new_tokens": options.max_new_tokens,
        "cells": cells,
        "claims": claims,
        **provenance(),
    }
    page = markdown(content)
    options.out.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    options.out.with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)


def settings_of(budget: int) -> Settings:
    """Fill a fixed number of verified tokens."""
    return Settings(budget=budget, objective="tokens-per-step")


def cell_rows(traces: Traces, latency: LatencyTable, settings: Settings) -> list[dict[str, Any]]:
    """Per cell its best tree's shape, its cross-fitted tokens per step, and what the others' trees would lose there."""
    table = None if settings.objective == "tokens-per-step" else latency
    judges = {cell: ReplayJudge.of(trace, table) for cell, trace in traces.items()}
    trees = {cell: choose(judge, settings, shortlist=True).trees[-1] for cell, judge in judges.items()}
    rows = []
    for cell, trace in traces.items():
        fold = fold_of_prompts(trace.prompts, settings.folds, settings.seed)
        held = hold_out(judges[cell], chosen_trees(settings), fold)
        assert held is not None
        weights = resampling_weights(len(held.tokens), RESAMPLES, settings.seed)
        scores = judges[cell].score(list(trees.values()))
        own = float(held.tokens.sum() / (held.steps if table is None else held.ms)[-1].sum())
        losses = dict(zip(trees, (1 - merit(scores, settings) / own).tolist(), strict=True))
        rows.append(
            {
                "workload": cell[0],
                "temperature": cell[1],
                "paths": [list(path) for path in trees[cell].paths],
                **asdict(Shape.of(trees[cell])),
                "tokens_per_step": _figure(ratio(held.tokens, held.steps[-1], weights)),
                "speedup": None if table is None else _figure(ratio(held.ms[0], held.ms[-1], weights)),
                "worst_loss_other_workload": _worst(losses, lambda c, cell=cell: c[1] == cell[1] and c != cell),
                "worst_loss_other_temperature": _worst(losses, lambda c, cell=cell: c[0] == cell[0] and c != cell),
            }
        )
        print(f"{settings.objective} {settings.budget}: {cell} done", file=sys.stderr)
    return rows


def guide_shapes(traces: Traces) -> list[dict[str, Any]]:
    """The guide's own trees against each other: ratios of tokens per step, paired by prompt."""
    cold, hot = min(t for _, t in traces), max(t for _, t in traces)
    found = []
    for temperature in sorted({t for _, t in traces}):
        cells = [(w, temperature) for w in WORKLOADS if (w, temperature) in traces]
        question = f"[5, 2] over a deep tree of 15 nodes, all workloads at temperature {temperature:g}"
        found.append(_answer(question, *_pooled_logs(traces, cells, WIDE_15, DEEP_15)))
    pairs = [[(w, t) for w in WORKLOADS if (w, t) in traces] for t in (hot, cold)]
    logs = [_pooled_logs(traces, cells, WIDE_15, DEEP_15) for cells in pairs]
    question = f"the same ratio at temperature {hot:g} over that at {cold:g}"
    found.append(_answer(question, logs[0][0] - logs[1][0], logs[0][1] - logs[1][1], logs[0][2]))
    parts = []
    for group in (STRUCTURED, tuple(w for w in WORKLOADS if w not in STRUCTURED)):
        cells = [(w, cold) for w in group if (w, cold) in traces]
        parts.append(_pooled_logs(traces, cells, DEEP_30, WIDE_28))
        question = f"[2, 2, 2, 2] over [4, 2, 2], {' and '.join(group)} at temperature {cold:g}"
        found.append(_answer(question, *parts[-1]))
    question = "the same ratio on code and json over that on chat and math"
    smaller = min(parts[0][2], parts[1][2])
    found.append(_answer(question, parts[0][0] - parts[1][0], parts[0][1] - parts[1][1], smaller))
    return found


def best_shapes(traces: Traces, settings: Settings, searches: int) -> list[dict[str, Any]]:
    """How the best tree's shape moves with temperature and workload, searched again on resampled prompts.

    A resample takes the same prompts at every temperature, so temperatures are compared in pairs.
    """
    cold, hot = min(t for _, t in traces), max(t for _, t in traces)
    rng = np.random.default_rng(settings.seed)
    drawn: dict[Cell, list[Shape]] = {cell: [] for cell in traces}
    for search in range(searches + 1):  # the first one on the prompts as they are
        for workload in sorted({w for w, _ in traces}):
            mine = [cell for cell in traces if cell[0] == workload]
            count = len(traces[mine[0]].prompts)
            chosen = np.arange(count) if search == 0 else rng.integers(count, size=count)
            for cell in mine:
                judge = ReplayJudge.of(resampled(traces[cell], chosen), None)
                drawn[cell].append(Shape.of(choose(judge, settings, shortlist=True).trees[-1]))
        print(f"search {search} of {searches} at width {settings.budget}", file=sys.stderr)
    found = []
    for name in ("mean_depth", "width_at_1"):
        values = {cell: np.array([getattr(shape, name) for shape in shapes]) for cell, shapes in drawn.items()}
        workloads = sorted({w for w, _ in traces})
        moved = np.mean([values[w, hot] - values[w, cold] for w in workloads], axis=0)
        found.append(_moved(f"{name} at width {settings.budget}: temperature {hot:g} less {cold:g}", moved))
        structured = np.mean([values[w, cold] for w in workloads if w in STRUCTURED], axis=0)
        prose = np.mean([values[w, cold] for w in workloads if w not in STRUCTURED], axis=0)
        question = f"{name} at width {settings.budget}: code and json less chat and math, temperature {cold:g}"
        found.append(_moved(question, structured - prose))
    return found


def resampled(trace: RankTrace, chosen: Sequence[int] | np.ndarray) -> RankTrace:
    """The trace of the prompts with these indices; a prompt that is drawn twice is there twice."""
    prompts = [replace(trace.prompts[i], id=f"{trace.prompts[i].id}#{n}") for n, i in enumerate(chosen)]
    blocks = [trace.ranks[trace.starts[i] : trace.starts[i + 1]] for i in chosen]
    return replace(trace, prompts=tuple(prompts), ranks=np.concatenate(blocks))


def markdown(content: Mapping[str, Any]) -> str:
    """The page: a table per question, then the comparisons."""
    lines = []
    for name, rows in content["cells"].items():
        is_timed = name == FASTEST
        lines += [f"**{_titles(name)}**", "", _header(is_timed), "| --- | ---: |" + " ---: |" * (7 + is_timed)]
        lines += [_row(row, is_timed) for row in rows] + [""]
    lines += ["**Comparisons**", "", "| question | figure | 95 % interval | answer |", "| --- | ---: | ---: | --- |"]
    for claim in content["claims"]:
        low, high = claim["interval"]
        lines.append(f"| {claim['question']} | {claim['value']:.3f} | {low:.3f} to {high:.3f} | {claim['answer']} |")
    return "\n".join(lines) + "\n"


def _titles(name: str) -> str:
    return "Fastest tree by the measured step times" if name == FASTEST else f"Most tokens per step, {name}"


def _header(is_timed: bool) -> str:
    speed = " over plain |" if is_timed else ""
    return (
        "| workload | temperature | depth | width at depth 1 | mean branching | nodes | tokens per step (95 %) |"
        f"{speed} worst loss with another workload's tree | worst loss with another temperature's tree |"
    )


def _row(row: Mapping[str, Any], is_timed: bool) -> str:
    cells = [
        row["workload"],
        f"{row['temperature']:g}",
        row["depth"],
        row["width_at_1"],
        f"{row['mean_branching']:.2f}",
    ]
    cells += [row["nodes"], _shown(row["tokens_per_step"])] + ([_shown(row["speedup"])] if is_timed else [])
    for name in ("worst_loss_other_workload", "worst_loss_other_temperature"):
        worst = row[name]
        cells.append("-" if worst is None else f"{100 * worst['loss']:.1f} % ({worst['of']})")
    return "| " + " | ".join(map(str, cells)) + " |"


def _shown(figure: Mapping[str, Any] | None) -> str:
    return "-" if figure is None else f"{figure['value']:.2f} ({figure['low']:.2f}-{figure['high']:.2f})"


def _figure(found: Figure | None) -> dict[str, float] | None:
    if found is None or found.interval is None:
        return None
    return {"value": found.value, "low": found.interval.low, "high": found.interval.high}


def _worst(losses: Mapping[Cell, float], other: Any) -> dict[str, Any] | None:
    compared = {cell: loss for cell, loss in losses.items() if other(cell)}
    if not compared:
        return None
    worst = max(compared, key=lambda cell: compared[cell])
    return {"of": f"{worst[0]} T={worst[1]:g}", "loss": compared[worst]}


def _pooled_logs(traces: Traces, cells: Sequence[Cell], one: Tree, other: Tree) -> tuple[float, np.ndarray, int]:
    """Log of tokens per step of one tree over another's, the same over resamples of the prompts, and their number.

    Both trees walk the same text, so the ratio is that of the steps. Cells count by their steps, and each is resampled
    on its own, with the draws of its workload whatever its temperature.
    """
    above, below = 0.0, 0.0
    drawn_above, drawn_below, count = np.zeros(RESAMPLES), np.zeros(RESAMPLES), 0
    for workload, temperature in cells:
        trace = traces[workload, temperature]
        steps = ReplayJudge.of(trace, None).score([one, other]).steps
        weights = resampling_weights(len(trace.prompts), RESAMPLES, seed=WORKLOADS.index(workload))
        above, below, count = above + steps[1].sum(), below + steps[0].sum(), count + len(trace.prompts)
        drawn_above, drawn_below = drawn_above + weights @ steps[1], drawn_below + weights @ steps[0]
    return float(np.log(above / below)), np.log(drawn_above / drawn_below), count


def _answer(question: str, log: float, drawn: np.ndarray, prompts: int) -> dict[str, Any]:
    """A ratio with its interval; above 1 where the first named is better."""
    half = t_quantile(prompts - 1) * float(drawn.std(ddof=1))
    low, high = np.exp(log - half), np.exp(log + half)
    answer = "more" if low > 1 else "less" if high < 1 else "no measurable difference"
    return {"question": question, "value": float(np.exp(log)), "interval": [low, high], "answer": answer}


def _moved(question: str, values: np.ndarray) -> dict[str, Any]:
    """A difference of shapes: on all prompts, with the spread of the searches on resampled ones."""
    half = t_quantile(len(values) - 2) * float(values[1:].std(ddof=1))
    low, high = float(values[0]) - half, float(values[0]) + half
    answer = "more" if low > 0 else "less" if high < 0 else "no measurable difference"
    return {"question": question, "value": float(values[0]), "interval": [low, high], "answer": answer}


def _recorded(options: argparse.Namespace) -> dict[Cell, RankTrace]:
    """A trace per cell, made or continued; the target is loaded only where one is missing."""
    from topo_search.calibrate import calibrate, encode_prompts
    from topo_search.files.prompts import packaged_prompts
    from topo_search.heads import load_heads
    from topo_search.identity import sampling_rule
    from topo_search.target import load_target

    target = load_target("demo")
    heads = load_heads(options.heads, target)
    options.traces.mkdir(parents=True, exist_ok=True)
    found: dict[Cell, RankTrace] = {}
    for temperature in sorted(options.temperatures):
        for workload in WORKLOADS:
            prompts = packaged_prompts(workload=workload, split="all")[: options.num_prompts]
            found[workload, temperature] = calibrate(
                target,
                heads,
                encode_prompts(target, prompts, max_new_tokens=options.max_new_tokens),
                out=options.traces / f"{workload}-T{temperature:g}.trace.safetensors",
                max_new_tokens=options.max_new_tokens,
                rule=sampling_rule(temperature=temperature, seed=options.seed),
                provenance=provenance(),
            ).trace
            print(f"{workload} at {temperature:g}: recorded", file=sys.stderr)
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="demo-medusa")
    parser.add_argument("--latency", type=Path, default=None, help="step times; the demo's own by default")
    parser.add_argument("--num-prompts", type=int, default=40, help="of each workload")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 64], help="tokens verified per step")
    parser.add_argument("--searches", type=int, default=30, help="on resampled prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traces", type=Path, default=RESULTS / "topologies", help="folder for the traces")
    parser.add_argument("--out", type=Path, default=RESULTS / "topologies.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
