"""What is a tree worth on a quantised target, and what does the unquantised target's tree lose there?

For every form of the target (weights:precision): calibrate on calibration prompts, time the step, optimize, then decode
evaluation prompts three ways in turn: plain, with the form's own best tree, with the best tree of the first form. The
table gives tokens per step, speed-up over the form's own plain decoding, and the loss from the other form's tree. Where
the tree's text differs from the plain one, the first divergence is listed with the gap of the two best logits in both
runs; one that rounding does not explain is a failure.

Every stage keeps its result beside the output, so a killed run continues:

    python benchmarks/quantised.py
    python benchmarks/quantised.py --form none:float32 --form int8:bfloat16 --num-decoded 12
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from topo_search.calibrate import EncodedPrompt, calibrate, encode_prompts
from topo_search.cli.inputs import evenly
from topo_search.compare import divergence
from topo_search.cost import LatencyTable
from topo_search.decode.decoder import Decoded, TreeDecoder
from topo_search.device import device_record
from topo_search.files.atomic import write_text
from topo_search.files.latency_file import read_latency, write_latency
from topo_search.files.prompts import Prompt, packaged_prompts
from topo_search.heads import DraftHeads, load_heads
from topo_search.identity import require_same
from topo_search.measure import MeasureGrid, measure
from topo_search.memory import keep_freed_memory
from topo_search.provenance import provenance
from topo_search.search.choose import Settings
from topo_search.search.optimize import TREE, SearchResult, optimize
from topo_search.target import Target, load_target
from topo_search.target.load import known_dtype
from topo_search.tree import Tree

RESULTS = Path(__file__).parent / "results"
FORMS = ("none:float32", "int8:float32", "int8:bfloat16", "int4:bfloat16")
PLAIN, OWN, OTHER = "plain", "own best tree", "unquantised target's tree"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One form of the target with its heads and what the search found for it."""

    name: str
    target: Target
    heads: DraftHeads
    found: SearchResult


def main() -> int:
    options = _options()
    keep_freed_memory()
    work = options.out.with_suffix("")
    work.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    first_tree: Tree | None = None
    for name in options.form or FORMS:
        print(f"{name} ...", file=sys.stderr)
        form = _form(name, options, work)
        first_tree = first_tree or form.found[TREE].tree
        rows.append(_row(form, first_tree, options, work))
        print(markdown(rows[-1:]), file=sys.stderr)
        document = {"forms": rows, "settings": _settings(options), **provenance()}
        write_text(options.out, json.dumps(document, indent=2) + "\n")
        del form  # the next one's weights need its memory
    table = markdown(rows)
    write_text(options.out.with_suffix(".md"), table + "\n")
    print(table)
    return 1 if any(row["failures"] for row in rows) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--heads", default="demo-medusa")
    parser.add_argument("--heads-dtype", default=None, help="the target's by default")
    parser.add_argument("--form", action="append", help=f"repeatable; {' '.join(FORMS)}")
    parser.add_argument("--budget", type=int, default=9, help="largest verify width")
    parser.add_argument("--num-calibration", type=int, default=16)
    parser.add_argument("--num-decoded", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "quantised.json")
    return parser.parse_args()


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name != "out"}


def _form(name: str, options: argparse.Namespace, work: Path) -> Form:
    """Load, calibrate, measure, optimize; what lies beside the output is not done again."""
    weights, dtype = name.split(":")
    target = load_target(options.target, quantize=None if weights == "none" else weights, dtype=dtype)
    heads_dtype = None if options.heads_dtype is None else known_dtype(options.heads_dtype)
    heads = load_heads(options.heads, target, dtype=heads_dtype)
    prompts = _prompts(target, "calibration", options.num_calibration, options.max_new_tokens)
    stem = name.replace(":", "-")
    trace = calibrate(
        target,
        heads,
        prompts,
        out=work / f"{stem}.trace.safetensors",
        max_new_tokens=options.max_new_tokens,
        batch_size=16,
    ).trace
    table = _table(target, heads, prompts[0].tokens, work / f"{stem}.latency.json", options)
    found = optimize(trace, table, Settings(budget=options.budget, pick="best"))
    return Form(name=name, target=target, heads=heads, found=found)


def _prompts(target: Target, split: str, count: int, max_new_tokens: int) -> list[EncodedPrompt]:
    chosen: list[Prompt] = evenly(packaged_prompts(workload=None, split=split), count)
    return encode_prompts(target, chosen, max_new_tokens=max_new_tokens)


def _table(
    target: Target, heads: DraftHeads, text: Sequence[int], path: Path, options: argparse.Namespace
) -> LatencyTable:
    if path.exists():
        table = read_latency(path)
        require_same(str(path), table.target, target.identity)
        require_same(str(path), table.heads, heads.identity)
        return table
    grid = MeasureGrid.quick(max_width=options.budget, rounds=options.rounds, contexts=(96,))
    table = measure(target, heads, grid, list(text), partial=path.with_suffix(".part"), provenance=provenance())
    write_latency(path, table)
    return table


def _row(form: Form, first_tree: Tree, options: argparse.Namespace, work: Path) -> Row:
    best = form.found[TREE]
    trees = {PLAIN: Tree(()), OWN: best.tree, OTHER: first_tree}
    prompts = _prompts(form.target, "evaluation", options.num_decoded, options.max_new_tokens)
    answers = _decoded(form, trees, prompts, options.max_new_tokens, work / f"{form.name.replace(':', '-')}.jsonl")
    sums = {way: _sums([answer[way] for answer in answers.values()]) for way in trees}
    parted = [answer[way]["divergence"] for answer in answers.values() for way in trees if answer[way]["divergence"]]
    rates = {way: found["tokens_per_s"] for way, found in sums.items()}
    return {
        "form": form.name,
        "target": asdict(form.target.identity),
        "heads": asdict(form.heads.identity),
        "device": device_record(form.target),
        "own_tree": [list(path) for path in best.tree.paths],
        "unquantised_tree": [list(path) for path in first_tree.paths],
        "predicted_speedup": best.speedup,
        "recommended": form.found.recommended,
        "decoded": sums,
        "speedup_over_own_plain": {way: rates[way] / rates[PLAIN] for way in (OWN, OTHER)},
        "loss_from_unquantised_tree": 1 - rates[OTHER] / rates[OWN],
        "divergences": parted,
        "failures": [point for point in parted if not (point["near_tie"] or point["filter_edge"])],
    }


def _decoded(
    form: Form, trees: dict[str, Tree], prompts: Sequence[EncodedPrompt], cap: int, lines: Path
) -> dict[str, Row]:
    """Every prompt's answers, all ways in turn; one line per prompt, taken from an earlier run with the same trees."""
    header = {
        "target": asdict(form.target.identity),
        "max_new_tokens": cap,
        "trees": {way: [list(path) for path in tree.paths] for way, tree in trees.items()},
    }
    kept = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()] if lines.exists() else []
    if not kept or kept[0] != header:
        kept = [header]
        lines.write_text(json.dumps(header) + "\n", encoding="utf-8")
    done = {row["prompt"]: row["ways"] for row in kept[1:]}
    decoders = {way: TreeDecoder(form.target, form.heads, tree, run_probe=way == PLAIN) for way, tree in trees.items()}
    for way in trees:
        decoders[way].generate(prompts[0].tokens, max_new_tokens=4)  # warm-up
    for index, prompt in enumerate(prompts):
        if prompt.id not in done:
            done[prompt.id] = _one_prompt(form.target, decoders, prompt, cap, turn=index % len(trees))
            with lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"prompt": prompt.id, "ways": done[prompt.id]}) + "\n")
        print(f"  {index + 1}/{len(prompts)} {prompt.id}", file=sys.stderr)
    return {prompt.id: done[prompt.id] for prompt in prompts}


def _one_prompt(target: Target, decoders: dict[str, TreeDecoder], prompt: EncodedPrompt, cap: int, *, turn: int) -> Row:
    ways = list(decoders)
    runs: dict[str, Decoded] = {}
    for way in ways[turn:] + ways[:turn]:
        runs[way] = decoders[way].generate(prompt.tokens, max_new_tokens=cap)
    row = {}
    for way, run in runs.items():
        point = divergence(
            target,
            prompt.id,
            prompt.tokens,
            runs[PLAIN].tokens,
            run.tokens,
            reruns=(_again(decoders[PLAIN], prompt), _again(decoders[way], prompt)),
        )
        row[way] = {
            "steps": len(run.accepted),
            "tokens": len(run.tokens),
            "decode_ms": run.decode_ms,
            "divergence": None if point is None else {"way": way, **asdict(point)},
        }
    return row


def _again(decoder: TreeDecoder, prompt: EncodedPrompt) -> Callable[[int, Any], object]:
    return partial(_with_processor, decoder, prompt)


def _with_processor(decoder: TreeDecoder, prompt: EncodedPrompt, cap: int, processor: Any) -> Decoded:
    return decoder.generate(prompt.tokens, max_new_tokens=cap, processors=[processor])


def _sums(answers: Sequence[Row]) -> dict[str, float]:
    tokens = sum(answer["tokens"] - 1 for answer in answers)
    steps, total_ms = sum(answer["steps"] for answer in answers), sum(answer["decode_ms"] for answer in answers)
    return {
        "tokens_per_step": tokens / max(steps, 1),
        "step_ms": total_ms / max(steps, 1),
        "tokens_per_s": 1000 * tokens / total_ms,
        "texts_equal": sum(answer["divergence"] is None for answer in answers),
    }


def markdown(rows: Sequence[Row]) -> str:
    """The table of the docs; rates cover what follows the first token."""
    lines = [
        "| weights, precision | plain tokens/s | own best tree: nodes, depth | tokens per step | over own plain | "
        "unquantised target's tree: tokens per step | over own plain | loss by it | texts equal to plain |",
        "| --- |" + " ---: |" * 8,
    ]
    for row in rows:
        decoded, tree, other = row["decoded"], Tree(tuple(map(tuple, row["own_tree"]))), row["unquantised_tree"]
        same = [list(path) for path in tree.paths] == other
        weights, dtype = row["form"].split(":")
        cells = [
            f"{'as loaded' if weights == 'none' else weights}, {dtype}",
            f"{decoded[PLAIN]['tokens_per_s']:.1f}",
            f"{tree.num_draft_nodes}, {tree.depth}",
            f"{decoded[OWN]['tokens_per_step']:.2f}",
            f"{row['speedup_over_own_plain'][OWN]:.2f}",
            f"{decoded[OTHER]['tokens_per_step']:.2f}",
            f"{row['speedup_over_own_plain'][OTHER]:.2f}",
            "the same tree" if same else f"{100 * row['loss_from_unquantised_tree']:.0f} %",
            f"{decoded[OWN]['texts_equal']} and {decoded[OTHER]['texts_equal']}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
