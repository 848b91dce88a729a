"""What is each family of draft heads worth? One target, one text budget, one table.

For every family: accuracy by depth, tokens per step of several trees, step time and speed-up. Trees are chosen on the
calibration prompts and scored by replay on the evaluation prompts, so no figure is its own choice's; then every
family's fastest tree decodes evaluation prompts side by side with plain decoding and transformers' `generate`: texts
must be equal, and replay must give every step's accepted length.

Every stage keeps its result beside the output, so a killed run continues:

    python benchmarks/heads.py --heads demo-medusa --heads demo-hydra --heads demo-hydra++

With `--tokens-only` no step is timed and nothing is decoded: tokens per step alone, for comparing ways to train heads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from topo_search.accuracy import depth_accuracies
from topo_search.answers import answer_batch, batches_by_length
from topo_search.calibrate import EncodedPrompt, empty_trace, encode_prompts, trace_of_answers
from topo_search.compare import divergence
from topo_search.cost import LatencyTable
from topo_search.decode.decoder import Decoded, TreeDecoder
from topo_search.decode.modes import MODES, in_mode, ready_mode
from topo_search.device import device_record
from topo_search.estimates import joint
from topo_search.files.atomic import write_text
from topo_search.files.latency_file import read_latency, write_latency
from topo_search.files.prompts import WORKLOADS, packaged_prompts
from topo_search.files.trace_file import read_trace, write_trace
from topo_search.files.tree_file import read_tree
from topo_search.heads import DraftHeads, load_heads
from topo_search.heads.checkpoints import read_checkpoint
from topo_search.measure import MeasureGrid, measure
from topo_search.memory import keep_freed_memory
from topo_search.prefixes import PrefixTable
from topo_search.provenance import provenance
from topo_search.reference import generate_plain
from topo_search.replay import replay
from topo_search.resources import packaged
from topo_search.search.choose import Settings
from topo_search.search.frontier import frontier
from topo_search.search.optimize import optimize
from topo_search.target import Target, load_target
from topo_search.trace import RankTrace, merge_traces
from topo_search.tree import Tree

RESULTS = Path(__file__).parent / "results"
BUDGETS = (8, 16, 32, 64)
BEST_TREE, GENERATE, PLAIN = "best tree", "generate", "plain"
BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Heads and what was measured of them; `fastest` was chosen on the calibration prompts, empty without times."""

    name: str
    heads: DraftHeads
    record: dict[str, Any]
    chosen_on: RankTrace
    scored_on: RankTrace
    latency: LatencyTable | None
    fastest: Tree


def main() -> int:
    options = _options()
    keep_freed_memory()
    work = options.out.with_suffix("")
    target = in_mode(load_target(options.target), ready_mode(options.mode, "cpu"), say=partial(print, file=sys.stderr))
    loaded = {Path(spec).name: load_heads(spec, target) for spec in options.heads}
    prompts = encode_prompts(
        target, packaged_prompts(workload=None, split="all"), max_new_tokens=options.max_new_tokens
    )
    traces = family_traces(target, loaded, prompts, work, options.max_new_tokens)
    filler = prompts[0].tokens
    families = [
        _family(
            spec,
            target,
            loaded[Path(spec).name],
            traces[Path(spec).name],
            None if options.tokens_only else filler,
            work,
        )
        for spec in options.heads
    ]
    rows = [_row(family) for family in families]
    decoded = {} if options.tokens_only or not options.num_decoded else _decoded(target, families, options)
    document = {
        "target": asdict(target.identity),
        "device": device_record(target),
        "attention": target.attention,
        "mode": target.mode,
        "threads": torch.get_num_threads(),
        "max_new_tokens": options.max_new_tokens,
        "provenance": provenance(),
        "families": rows,
        "decoded": decoded,
    }
    write_text(options.out, json.dumps(document, indent=2) + "\n")
    print(markdown(rows, decoded))
    return 1 if decoded.get("failures") else 0


def family_traces(
    target: Target, loaded: dict[str, DraftHeads], prompts: Sequence[EncodedPrompt], work: Path, max_new_tokens: int
) -> dict[str, RankTrace]:
    """One answer to every prompt, ranked by all heads; finished batches are kept in the folder `work`."""
    paths = {name: work / f"{name}.trace.safetensors" for name in loaded}
    empty = {name: empty_trace(target, heads, max_new_tokens=max_new_tokens) for name, heads in loaded.items()}
    traces = {name: read_trace(path) if path.exists() else empty[name] for name, path in paths.items()}
    for name, trace in traces.items():
        empty[name].require_same_identity(trace)
    known = [{prompt.id for prompt in trace.prompts} for trace in traces.values()]
    missing = [prompt for prompt in prompts if not all(prompt.id in ids for ids in known)]
    for batch in batches_by_length([len(prompt.tokens) for prompt in missing], BATCH):
        chosen = [missing[index] for index in batch]
        answers = answer_batch(
            target, [prompt.tokens for prompt in chosen], max_new_tokens=max_new_tokens, keep_prompt_states=True
        )
        for name, heads in loaded.items():
            traces[name] = merge_traces([traces[name], trace_of_answers(empty[name], heads, chosen, answers)])
            write_trace(paths[name], traces[name])
        print(f"answered {len(traces[name].prompts)} of {len(prompts)} prompts", file=sys.stderr)
    return traces


def _family(
    spec: str, target: Target, heads: DraftHeads, trace: RankTrace, filler: Sequence[int] | None, work: Path
) -> Family:
    """`filler`: text that fills the cache of the timed steps, or None where none is timed."""
    chosen_on, scored_on = (_by_split(trace, split) for split in ("calibration", "evaluation"))
    path = work / f"{Path(spec).name}.{target.mode}.latency.json"
    latency = None if filler is None else _latency(target, heads, filler, path)
    settings = Settings(budget=64, pick="best")
    fastest = Tree(()) if latency is None else optimize(chosen_on, latency, settings)[BEST_TREE].tree
    return Family(
        name=Path(spec).name,
        heads=heads,
        record=read_checkpoint(spec, target).config,
        chosen_on=chosen_on,
        scored_on=scored_on,
        latency=latency,
        fastest=fastest,
    )


def _latency(target: Target, heads: DraftHeads, prompt: Sequence[int], path: Path) -> LatencyTable:
    if path.exists():
        return read_latency(path)
    print(f"timing steps for {path.name}", file=sys.stderr)
    grid = MeasureGrid.quick(max_width=64)
    table = measure(target, heads, grid, prompt, partial=path.with_suffix(".part"), provenance=provenance())
    write_latency(path, table)
    return table


def _by_split(trace: RankTrace, split: str, workload: str | None = None) -> RankTrace:
    wanted = {prompt.id for prompt in packaged_prompts(workload=workload, split=split)}
    return trace.select(lambda prompt: prompt.id in wanted)


def _row(family: Family) -> dict[str, Any]:
    record, trees, latency = family.record, _trees(family.chosen_on), family.latency
    scores, largest = replay(family.scored_on, trees.values()).tokens_per_step.tolist(), trees[f"best {max(BUDGETS)}"]
    depths = range(1, family.heads.identity.num_heads + 1)
    return {
        "heads": asdict(family.heads.identity),
        "parameters": record.get("parameters"),
        "share_of_target_parameters": record.get("share_of_target_parameters"),
        "training_minutes": round(_training_seconds(record) / 60, 1),
        "training_text": record.get("training_text"),
        "accuracy_given_path": [depth.accuracy_given_path[0] for depth in depth_accuracies(family.scored_on)],
        "tokens_per_step": {name: round(score, 4) for name, score in zip(trees, scores, strict=True)},
        "dense": next(iter(trees)),
        "best_trees": {str(b): [list(path) for path in trees[f"best {b}"].paths] for b in BUDGETS},
        "prompts": {"chosen_on": len(family.chosen_on.prompts), "scored_on": len(family.scored_on.prompts)},
        "largest": _largest(family, largest),
        "draft_ms": [] if latency is None else [round(latency.draft_times().of(Tree.chain(n)), 2) for n in depths],
        "fastest": None if latency is None else _fastest(family, latency),
    }


def _largest(family: Family, tree: Tree) -> dict[str, Any]:
    """The best tree of the largest budget: what it brings each workload, and what drafting it takes of its step."""
    of_workload = {workload: _by_split(family.scored_on, "evaluation", workload) for workload in WORKLOADS}
    latency = family.latency
    return {
        "tokens_per_step": {
            workload: round(float(replay(trace, [tree]).tokens_per_step[0]), 4)
            for workload, trace in of_workload.items()
        },
        "draft_ms": None if latency is None else round(latency.draft_times().of(tree), 1),
        "step_ms": None if latency is None else round(float(latency.step_ms(tree)[0]), 1),
    }


def _training_seconds(record: dict[str, Any]) -> float:
    """Of this training and of those that it went on from."""
    earlier = record.get("earlier")
    return float(record.get("training_seconds", 0)) + (_training_seconds(earlier) if earlier else 0.0)


def _trees(trace: RankTrace) -> dict[str, Tree]:
    """The trees that are scored: the dense one that promises most within 64, Medusa's, and the best of each budget."""
    table = PrefixTable.of(trace)
    family = frontier(joint(table), num_draft_nodes=max(BUDGETS) - 1)
    dense = [Tree.dense(list(vector)) for vector in _dense_vectors(trace.depth, max(BUDGETS), trace.resolved_ranks)]
    promised = replay(trace, dense, table=table).tokens_per_step
    best = dense[int(promised.argmax())]
    trees = {f"dense {_branching(best)}": best}
    if trace.depth >= 4:
        trees["medusa-63"] = read_tree(packaged("trees/reference/medusa-63.tree.json")).tree
    return trees | {f"best {budget}": family.tree(budget - 1) for budget in BUDGETS}


def _dense_vectors(depth: int, width: int, ranks: int) -> list[tuple[int, ...]]:
    """Branching vectors, of ranks that the trace resolves, to whose last level no further child fits."""
    found: list[tuple[int, ...]] = []
    level: list[tuple[tuple[int, ...], int, int]] = [((), 1, 1)]
    for _ in range(depth):
        level = [
            ((*vector, branches), leaves * branches, total + leaves * branches)
            for vector, leaves, total in level
            for branches in range(1, min(ranks, (width - total) // leaves) + 1)
        ]
        found += [
            vector for vector, leaves, total in level if total + leaves // vector[-1] > width or vector[-1] == ranks
        ]
    return found


def _branching(tree: Tree) -> list[int]:
    counts = [sum(len(path) == depth for path in tree.paths) for depth in range(tree.depth + 1)]
    return [count // (before or 1) for before, count in itertools.pairwise(counts)]


def _fastest(family: Family, latency: LatencyTable) -> dict[str, Any]:
    """The tree that the calibration prompts recommend, by replay of the evaluation prompts over measured times."""
    trees = (Tree(()), family.fastest)
    walk = replay(family.scored_on, trees)
    contexts = latency.nearest_context(family.scored_on.contexts)
    total_ms = [
        float(latency.step_ms(tree)[contexts[visited]].sum()) for visited, tree in zip(walk.visited, trees, strict=True)
    ]
    return {
        "paths": [list(path) for path in family.fastest.paths],
        "verify_width": family.fastest.verify_width,
        "depth": family.fastest.depth,
        "tokens_per_step": round(float(walk.tokens_per_step[1]), 4),
        "step_ms": round(total_ms[1] / int(walk.steps[1]), 2),
        "speedup": round(total_ms[0] / total_ms[1], 3),
    }


def _decoded(target: Target, families: Sequence[Family], options: argparse.Namespace) -> dict[str, Any]:
    """Every family's fastest tree on the same evaluation prompts, each prompt by all contenders in turn."""
    reference = load_target(options.target, pack=False, attention="sdpa")
    prompts = packaged_prompts(workload=None, split="evaluation")
    chosen = [prompts[int(i * len(prompts) / options.num_decoded)] for i in range(options.num_decoded)]
    encoded = encode_prompts(target, chosen, max_new_tokens=options.decode_tokens)
    cap = options.decode_tokens
    plain = TreeDecoder(target, None, Tree(()))
    contenders: dict[str, Callable[[Sequence[int]], Decoded]] = {
        GENERATE: lambda tokens: generate_plain(reference, tokens, max_new_tokens=cap),
        PLAIN: lambda tokens: plain.generate(tokens, max_new_tokens=cap),
    }
    for family in families:
        decoder = TreeDecoder(target, family.heads, family.fastest, run_probe=False)
        contenders[family.name] = partial(decoder.generate, max_new_tokens=cap)
    runs: dict[str, list[Decoded]] = {name: [] for name in contenders}
    for number, prompt in enumerate(encoded):
        names = list(contenders)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            runs[name].append(contenders[name](prompt.tokens))
        print(f"decoded {number + 1} of {len(encoded)} prompts", file=sys.stderr)
    failures = _text_failures(target, encoded, runs) + [
        failure for family in families for failure in _step_failures(family, encoded, runs[family.name], cap)
    ]
    return {
        "prompts": len(encoded),
        "max_new_tokens": cap,
        "tokens_per_s": {name: round(_tokens_per_s(passed), 2) for name, passed in runs.items()},
        "tokens_per_step": {
            name: round(sum(len(run.tokens) - 1 for run in passed) / sum(len(run.accepted) for run in passed), 4)
            for name, passed in runs.items()
        },
        "failures": failures,
    }


def _text_failures(target: Target, prompts: Sequence[EncodedPrompt], runs: dict[str, list[Decoded]]) -> list[str]:
    found = []
    for name, passed in runs.items():
        for prompt, expected, run in zip(prompts, runs[GENERATE], passed, strict=True):
            parted = divergence(target, prompt.id, prompt.tokens, expected.tokens, run.tokens)
            if parted is not None:
                kind = "near-tie" if parted.near_tie else "text differs"
                found.append(f"{name}: {kind} at token {parted.position} of {prompt.id} (gap {parted.gap:.2g})")
    return found


def _step_failures(family: Family, prompts: Sequence[EncodedPrompt], runs: Sequence[Decoded], cap: int) -> list[str]:
    """Prompts whose steps replay counts otherwise than the decoder did."""
    trace = family.scored_on.capped(cap)
    order = {prompt.id: index for index, prompt in enumerate(trace.prompts)}
    accepted = replay(trace, [family.fastest]).accepted(0)
    return [
        f"{family.name}: replay and decoder differ on {prompt.id}"
        for prompt, run in zip(prompts, runs, strict=True)
        if tuple(accepted[order[prompt.id]]) != run.accepted
    ]


def _tokens_per_s(runs: Sequence[Decoded]) -> float:
    return 1000.0 * sum(len(run.tokens) - 1 for run in runs) / sum(run.decode_ms for run in runs)


def markdown(rows: Sequence[dict[str, Any]], decoded: dict[str, Any]) -> str:
    """The table of the docs."""
    budgets = " | ".join(f"best {budget}" for budget in BUDGETS)
    lines = [
        f"| heads | M params | minutes | rank 1 given path, depth 1.. | best dense | Medusa's 63 | {budgets} | "
        "fastest: nodes, depth | step_ms | speed-up by replay | decoded: over plain |",
        "|" + " --- |" * (10 + len(BUDGETS)),
    ]
    rates = decoded.get("tokens_per_s", {})
    for row in rows:
        score, fastest, name = row["tokens_per_step"], row["fastest"], Path(row["heads"]["name"]).name
        accuracy = " ".join("-" if value is None else f"{100 * value:.0f}" for value in row["accuracy_given_path"])
        cells = [
            name,
            f"{(row['parameters'] or 0) / 1e6:.1f}",
            f"{row['training_minutes']}",
            f"{accuracy} %",
            f"{score[row['dense']]:.2f} {row['dense'].removeprefix('dense ')}",
            f"{score['medusa-63']:.2f}" if "medusa-63" in score else "-",
            *(f"{score[f'best {budget}']:.2f}" for budget in BUDGETS),
            f"{fastest['verify_width'] - 1}, {fastest['depth']}" if fastest else "-",
            f"{fastest['step_ms']:.0f}" if fastest else "-",
            f"{fastest['speedup']:.2f}" if fastest else "-",
            f"{rates[name] / rates[PLAIN]:.2f}" if name in rates else "-",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--heads", action="append", required=True)
    parser.add_argument("--mode", choices=MODES, default="auto")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--tokens-only", action="store_true")
    parser.add_argument("--num-decoded", type=int, default=24)
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS / "heads.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
