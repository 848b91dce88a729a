"""The race in figures: transformers' generate and prompt lookup, our plain decoding, chain and trees of every family.

Per family of heads the chain and the tree are those that `optimize` takes from the traces of the calibration prompts
over a table of step times measured here, in the same sitting. Then all contenders answer evaluation prompts in turn,
several times: tokens per second with intervals paired over prompts, tokens per step, text against `generate`, and the
rate that replaying the raced prompts over the table predicts. The ceiling is what the best tree would reach if it were
chosen on the raced prompts themselves: no tree of this table can promise more.

Every answered prompt is kept beside the output, so a killed run continues:

    python benchmarks/decode.py --heads demo-medusa --heads demo-hydra --heads demo-hydra++
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from heads import family_traces
from topo_search.bench import predicted_rate
from topo_search.calibrate import EncodedPrompt, empty_trace, encode_prompts, trace_of_answers
from topo_search.compare import divergence, step_mismatch, teacher_forced
from topo_search.cost import LatencyTable
from topo_search.decode.decoder import Decoded, TreeDecoder
from topo_search.decode.modes import MODES, in_mode, ready_mode
from topo_search.device import HostWatch, device_record
from topo_search.files.atomic import write_text
from topo_search.files.latency_file import read_latency, write_latency
from topo_search.files.prompts import packaged_prompts
from topo_search.files.tree_file import read_tree
from topo_search.heads import DraftHeads, load_heads
from topo_search.measure import MeasureGrid, measure
from topo_search.memory import keep_freed_memory
from topo_search.provenance import provenance
from topo_search.reference import generate_plain
from topo_search.replay import replay
from topo_search.resources import packaged
from topo_search.search.choose import Settings
from topo_search.search.intervals import resampling_weights
from topo_search.search.optimize import CHAIN, TREE, optimize
from topo_search.target import Target, load_target
from topo_search.trace import RankTrace
from topo_search.tree import Tree

RESULTS = Path(__file__).parent / "results"
GENERATE, LOOKUP, PLAIN, MEDUSA, DENSE = "generate", "prompt lookup", "plain", "medusa-63", "dense 4,4,4,3"
LOOKUP_TOKENS = 10
BUDGET = 64
RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Heads with what chooses their trees."""

    name: str
    heads: DraftHeads
    chosen_on: RankTrace
    latency: LatencyTable
    trees: dict[str, Tree]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to decode; transformers' own have no tree, plain decoding belongs to the first family."""

    name: str
    answer: Callable[[Sequence[int]], Decoded]
    family: Family | None = None
    tree: Tree | None = None


Runs = dict[str, list[list[Decoded]]]  # contender -> repeat -> prompt


def main() -> int:
    options = _options()
    keep_freed_memory()
    work = options.out.with_suffix("")
    clock = time.perf_counter()
    target = in_mode(load_target(options.target), ready_mode(options.mode, "cpu"), say=partial(print, file=sys.stderr))
    load_s = time.perf_counter() - clock
    prompts = _prompts(target, options)
    plain = TreeDecoder(target, None, Tree(()))
    first_token_ms = plain.generate(prompts[0].tokens, max_new_tokens=1).prefill_ms
    families = _families(target, options, work)
    contenders = _contenders(target, families, plain, options)
    watch = HostWatch.start()
    runs = _race(contenders, prompts, options, work / "answers.jsonl")
    load = watch.load()
    rows, failures = _rows(target, families, contenders, prompts, runs, options)
    document = {
        "target": asdict(target.identity),
        "device": device_record(target),
        "attention": target.attention,
        "mode": target.mode,
        "max_new_tokens": options.max_new_tokens,
        "prompts": len(prompts),
        "repeats": options.repeats,
        "load_s": round(load_s, 2),
        "first_token_ms": round(first_token_ms, 1),
        "host": asdict(load),
        "provenance": provenance(),
        "contenders": rows,
        "ceilings": [_ceiling(target, family, prompts, runs, options) for family in families],
        "failures": failures,
    }
    write_text(options.out, json.dumps(document, indent=2) + "\n")
    print(markdown(document))
    return 1 if failures else 0


def _prompts(target: Target, options: argparse.Namespace) -> list[EncodedPrompt]:
    found = packaged_prompts(workload=None, split="evaluation")
    chosen = [found[int(i * len(found) / options.num_prompts)] for i in range(min(options.num_prompts, len(found)))]
    return encode_prompts(target, chosen, max_new_tokens=options.max_new_tokens)


def _families(target: Target, options: argparse.Namespace, work: Path) -> list[Family]:
    """Traces of the calibration prompts, then every family's steps, timed one family after another."""
    loaded = {Path(spec).name: load_heads(spec, target) for spec in options.heads}
    texts = packaged_prompts(workload=None, split="calibration")[: options.num_calibration]
    calibration = encode_prompts(target, texts, max_new_tokens=128)
    traces = family_traces(target, loaded, calibration, work, 128)
    ids = {prompt.id for prompt in calibration}
    families = []
    for name, heads in loaded.items():
        latency = _latency(target, heads, calibration, work / f"{name}.{target.mode}.latency.json", options)
        trace = traces[name].select(lambda prompt: prompt.id in ids)
        chosen = optimize(trace, latency, Settings(budget=BUDGET, pick="best"))
        trees = {which: chosen[which].tree for which in (CHAIN, TREE)}
        families.append(Family(name=name, heads=heads, chosen_on=trace, latency=latency, trees=trees))
    return families


def _latency(
    target: Target, heads: DraftHeads, prompts: Sequence[EncodedPrompt], path: Path, options: argparse.Namespace
) -> LatencyTable:
    if path.exists():
        return read_latency(path)
    print(f"timing steps for {path.name}", file=sys.stderr)
    grid = MeasureGrid.quick(max_width=BUDGET)
    widths = set(grid.widths) | {_dense(heads).verify_width, _medusa(heads).verify_width}
    grid = replace(grid, widths=tuple(sorted(widths)), rounds=options.rounds)
    text = [token for prompt in prompts for token in prompt.tokens]
    table = measure(target, heads, grid, text, partial=path.with_suffix(".part"), provenance=provenance())
    write_latency(path, table)
    return table


def _dense(heads: DraftHeads) -> Tree:
    return Tree.dense([4, 4, 4, 3][: heads.identity.num_heads])


def _medusa(heads: DraftHeads) -> Tree:
    return read_tree(packaged("trees/reference/medusa-63.tree.json")).tree.pruned(heads.identity.num_heads)


def _contenders(
    target: Target, families: Sequence[Family], plain: TreeDecoder, options: argparse.Namespace
) -> list[Contender]:
    cap = options.max_new_tokens
    reference = load_target(options.target, pack=False, attention="sdpa")
    found = [
        Contender(name=GENERATE, answer=partial(generate_plain, reference, max_new_tokens=cap)),
        Contender(
            name=LOOKUP, answer=partial(generate_plain, reference, max_new_tokens=cap, prompt_lookup=LOOKUP_TOKENS)
        ),
        Contender(name=PLAIN, answer=partial(plain.generate, max_new_tokens=cap), family=families[0], tree=Tree(())),
    ]
    for family in families:
        trees = family.trees
        if family is families[0]:
            trees = trees | {MEDUSA: _medusa(family.heads), DENSE: _dense(family.heads)}
        for which, tree in trees.items():
            decoder = TreeDecoder(target, family.heads, tree, run_probe=False)
            answer = partial(decoder.generate, max_new_tokens=cap)
            found.append(Contender(name=f"{which}, {family.name}", answer=answer, family=family, tree=tree))
    return found


def _race(
    contenders: Sequence[Contender], prompts: Sequence[EncodedPrompt], options: argparse.Namespace, log: Path
) -> Runs:
    """Every contender answers a prompt before any answers the next; who starts rotates."""
    key = repr([(c.name, None if c.tree is None else c.tree.paths) for c in contenders])
    key += repr(([p.digest for p in prompts], options.max_new_tokens, options.mode))
    done = _logged(log, key)
    names = [contender.name for contender in contenders]
    for contender in contenders:
        contender.answer(prompts[0].tokens)
    runs: Runs = {name: [[] for _ in range(options.repeats)] for name in names}
    for repeat in range(options.repeats):
        for index, prompt in enumerate(prompts):
            answers = done.get((repeat, index))
            if answers is None:
                turn = (index + repeat) % len(names)
                order = [*contenders[turn:], *contenders[:turn]]
                answers = {contender.name: contender.answer(prompt.tokens) for contender in order}
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([repeat, index, {n: asdict(a) for n, a in answers.items()}]) + "\n")
                print(f"repeat {repeat + 1}: {index + 1} of {len(prompts)} prompts", file=sys.stderr)
            for name in names:
                runs[name][repeat].append(answers[name])
    return runs


def _logged(log: Path, key: str) -> dict[tuple[int, int], dict[str, Decoded]]:
    """Answers of an interrupted run of the same race; a log of another race is started anew."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    if not lines or json.loads(lines[0]) != key:
        log.parent.mkdir(parents=True, exist_ok=True)
        write_text(log, json.dumps(key) + "\n")
        return {}
    found = {}
    for line in lines[1:]:
        try:
            repeat, index, answers = json.loads(line)
        except ValueError:  # cut off when the run was killed
            continue
        found[repeat, index] = {name: _decoded(answer) for name, answer in answers.items()}
    return found


def _decoded(stored: dict[str, Any]) -> Decoded:
    return Decoded(**stored | {"tokens": tuple(stored["tokens"]), "accepted": tuple(stored["accepted"])})


def _rows(
    target: Target,
    families: Sequence[Family],
    contenders: Sequence[Contender],
    prompts: Sequence[EncodedPrompt],
    runs: Runs,
    options: argparse.Namespace,
) -> tuple[list[dict[str, Any]], list[str]]:
    traces = {family.name: _raced_trace(target, family, prompts, runs, options) for family in families}
    weights = resampling_weights(len(prompts), RESAMPLES, options.seed)
    rows, failures = [], []
    for contender in contenders:
        passes = runs[contender.name]
        measured = float(np.median([_rate(passed) for passed in passes]))
        steps = sum(len(run.accepted) for run in passes[0])
        row: dict[str, Any] = {
            "name": contender.name,
            "draft_nodes": None if contender.tree is None else len(contender.tree.paths),
            "tokens_per_step": round(sum(_emitted(run) for run in passes[0]) / steps, 3),
            "tokens_per_s": round(measured, 2),
            "tokens_per_s_range": [round(f([_rate(passed) for passed in passes]), 2) for f in (min, max)],
            "over_generate": _ratio(passes, runs[GENERATE], weights),
            "over_plain": _ratio(passes, runs[PLAIN], weights),
            "predicted_tokens_per_s": None,
            "prediction_off_percent": None,
        }
        if contender.family is not None and contender.tree is not None:
            trace = traces[contender.family.name]
            predicted = predicted_rate(contender.family.latency, trace, replay(trace, [contender.tree]), contender.tree)
            if predicted is not None:
                row["predicted_tokens_per_s"] = round(predicted, 2)
                row["prediction_off_percent"] = round(100 * (predicted / measured - 1), 1)
        found = _failures(target, contender, prompts, runs)
        row["text"] = "equal" if not found else f"{len(found)} differences"
        rows.append(row)
        failures += found
    return rows, failures + [
        failure for contender in contenders for failure in _step_failures(target, contender, prompts, runs, traces)
    ]


def _raced_trace(
    target: Target, family: Family, prompts: Sequence[EncodedPrompt], runs: Runs, options: argparse.Namespace
) -> RankTrace:
    """Ranks of the raced text under the family's heads."""
    answers = [
        teacher_forced(target, p.tokens, run.tokens, index=i, end="eos" if run.end == "eos" else "cap")
        for i, (p, run) in enumerate(zip(prompts, runs[PLAIN][0], strict=True))
    ]
    empty = empty_trace(target, family.heads, max_new_tokens=options.max_new_tokens)
    return trace_of_answers(empty, family.heads, prompts, answers)


def _ceiling(
    target: Target, family: Family, prompts: Sequence[EncodedPrompt], runs: Runs, options: argparse.Namespace
) -> dict[str, Any]:
    """What the best tree of this table would reach on the raced prompts, chosen on them."""
    found = optimize(
        _raced_trace(target, family, prompts, runs, options), family.latency, Settings(budget=BUDGET, pick="best")
    )[TREE]
    assert found.tokens_per_s is not None and found.speedup is not None
    generate = float(np.median([_rate(passed) for passed in runs[GENERATE]]))
    return {
        "heads": family.name,
        "draft_nodes": len(found.tree.paths),
        "tokens_per_s": round(found.tokens_per_s, 2),
        "over_plain": round(found.speedup, 3),
        "over_generate": round(found.tokens_per_s / generate, 3),
    }


def _failures(target: Target, contender: Contender, prompts: Sequence[EncodedPrompt], runs: Runs) -> list[str]:
    """Texts of any repeat that are not those of `generate`, near-ties named as such."""
    found = []
    for passed in runs[contender.name]:
        for prompt, expected, run in zip(prompts, runs[GENERATE][0], passed, strict=True):
            parted = divergence(target, prompt.id, prompt.tokens, expected.tokens, run.tokens)
            if parted is not None:
                kind = "near-tie" if parted.explained else "text differs"
                found.append(f"{contender.name}: {kind} at token {parted.position} of {prompt.id} ({parted.gap:.2g})")
    return sorted(set(found))


def _step_failures(
    target: Target,
    contender: Contender,
    prompts: Sequence[EncodedPrompt],
    runs: Runs,
    traces: dict[str, RankTrace],
) -> list[str]:
    """Steps that replay counts otherwise than the decoder did, save where two draft scores nearly tie."""
    if contender.family is None or contender.tree is None:
        return []
    accepted = replay(traces[contender.family.name], [contender.tree]).accepted(0)
    found = []
    for index, (prompt, steps, run) in enumerate(zip(prompts, accepted, runs[contender.name][0], strict=True)):
        if tuple(steps) == run.accepted or run.tokens != runs[PLAIN][0][index].tokens:
            continue
        answer = teacher_forced(target, prompt.tokens, run.tokens, index=index, end="cap")
        parted = step_mismatch(contender.family.heads, prompt.id, answer, steps, run.accepted)
        if parted is not None and not parted.near_tie:
            found.append(f"{contender.name}: {prompt.id} accepted {parted.decoded}, replay said {parted.replayed}")
    return found


def _emitted(run: Decoded) -> int:
    """Tokens of the steps after the first."""
    return sum(accepted + 1 for accepted in run.accepted)


def _rate(runs: Sequence[Decoded]) -> float:
    return 1000.0 * sum(_emitted(run) for run in runs) / sum(run.decode_ms for run in runs)


def _ratio(mine: list[list[Decoded]], theirs: list[list[Decoded]], weights: np.ndarray) -> dict[str, Any]:
    """Ratio of rates with its 95 % interval: prompts are resampled, both sides on the same ones."""

    def rates(passes: list[list[Decoded]]) -> tuple[float, np.ndarray]:
        tokens = np.array([[_emitted(run) for run in passed] for passed in passes]).mean(axis=0)
        times = np.median([[run.decode_ms for run in passed] for passed in passes], axis=0)
        return tokens.sum() / times.sum(), (weights @ tokens) / (weights @ times)

    (value, sampled), (base, base_sampled) = rates(mine), rates(theirs)
    low, high = np.percentile(sampled / base_sampled, (2.5, 97.5))
    return {"ratio": round(float(value / base), 3), "low": round(float(low), 3), "high": round(float(high), 3)}


def markdown(document: dict[str, Any]) -> str:
    """The tables of the docs."""
    lines = [
        "| contender | draft nodes | tokens per step | tokens/s | over `generate` (95 %) | over plain (95 %) | "
        "predicted tokens/s | off | text |",
        "| --- |" + " ---: |" * 7 + " --- |",
    ]
    for row in document["contenders"]:
        over = [f"{r['ratio']:.2f} ({r['low']:.2f}-{r['high']:.2f})" for r in (row["over_generate"], row["over_plain"])]
        known = row["predicted_tokens_per_s"] is not None
        cells = [
            row["name"],
            "" if row["draft_nodes"] is None else str(row["draft_nodes"]),
            f"{row['tokens_per_step']:.2f}",
            f"{row['tokens_per_s']:.1f}",
            *over,
            f"{row['predicted_tokens_per_s']:.1f}" if known else "",
            f"{row['prediction_off_percent']:+.1f} %" if known else "",
            row["text"],
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| ceiling of | draft nodes | tokens/s | over `generate` | over plain |", "| --- |" + " ---: |" * 4]
    for found in document["ceilings"]:
        lines.append(
            f"| {found['heads']} | {found['draft_nodes']} | {found['tokens_per_s']:.1f} | "
            f"{found['over_generate']:.2f} | {found['over_plain']:.2f} |"
        )
    lines += ["", f"Loading took {document['load_s']} s, the first token {document['first_token_ms']:.0f} ms."]
    if document["host"]["other_cpu_share"] is not None:
        lines.append(
            f"While the race ran, others took {100 * document['host']['other_cpu_share']:.0f} % of the processors."
        )
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--heads", action="append", required=True)
    parser.add_argument("--mode", choices=MODES, default="auto")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--num-calibration", type=int, default=None, help="calibration prompts; all by default")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=9, help="timings per width of the table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "decode.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
