"""Is the text the same, and is replay the truth? Evaluation prompts, several trees, on the real model in fp32.

For each prompt and temperature: transformers' `generate` on the target as a user loads it, then our decoder with the
empty tree and with every other tree, each prompt alone and in a batch with others. Texts must be equal, and the replay
of the plain run's trace must give every step's accepted length, alone and in the batch. What differs must be a
near-tie, and is listed.

One line per batch of prompts is appended to the results as it is done, so a killed run continues:

    python benchmarks/equality.py --heads demo-medusa --num-prompts 12 --temperature 0 --temperature 0.7 --batch 4
    python benchmarks/equality.py --tree trees/best-tree.tree.json --tree trees/best-chain.tree.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from topo_search.answers import Answer
from topo_search.calibrate import EncodedPrompt, empty_trace, encode_prompts, trace_of_answers
from topo_search.compare import divergence, step_mismatch, teacher_forced
from topo_search.decode.batch import decode_batch
from topo_search.decode.decoder import Decoded, TreeDecoder
from topo_search.device import device_record
from topo_search.files.prompts import Prompt, packaged_prompts
from topo_search.files.tree_file import read_tree
from topo_search.heads import DraftHeads, load_heads
from topo_search.identity import RuleIdentity, sampling_rule
from topo_search.memory import keep_freed_memory
from topo_search.provenance import provenance
from topo_search.reference import generate_plain
from topo_search.replay import replay
from topo_search.resources import packaged
from topo_search.stats import DecodeStats
from topo_search.target import Target, load_target
from topo_search.tree import Tree

RESULTS = Path(__file__).parent / "results"
_EXPLAINED = ("near_tie", "filter_edge")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What a batch of prompts is decoded with: `reference` is the target as a transformers user runs it."""

    target: Target
    reference: Target
    heads: DraftHeads
    decoders: dict[str, TreeDecoder]
    max_new_tokens: int


def main() -> int:
    options = _options()
    keep_freed_memory()
    lines = options.out.with_suffix(".jsonl")
    target, reference = load_target(options.target), load_target(options.target, pack=False)
    heads = load_heads(options.heads, target)
    trees = _trees(options.tree, heads)
    rules = {f"{t:g}": sampling_rule(temperature=t, seed=options.seed) for t in options.temperature}
    settings = {
        "target": asdict(target.identity),
        "heads": asdict(heads.identity),
        "trees": {name: [list(path) for path in tree.paths] for name, tree in trees.items()},
        "rules": {name: asdict(rule) for name, rule in rules.items()},
        "batch": options.batch,
        "max_new_tokens": options.max_new_tokens,
    }
    chosen = in_turn(packaged_prompts(workload=None, split="evaluation"), options.num_prompts)
    prompts = encode_prompts(target, chosen, max_new_tokens=options.max_new_tokens)
    check = Check(
        target=target,
        reference=reference,
        heads=heads,
        decoders={n: TreeDecoder(target, heads, tree, run_probe=n == "plain") for n, tree in trees.items()},
        max_new_tokens=options.max_new_tokens,
    )
    rows = _all_rows(check, rules, prompts, options.batch, lines, settings)
    summary = _summary(rows, trees, settings, target)
    options.out.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({key: summary[key] for key in ("prompts", "tokens", "per_tree", "failures")}, indent=2))
    return 1 if summary["failures"] else 0


def in_turn(prompts: list[Prompt], count: int | None) -> list[Prompt]:
    """The workloads in turn, so that a run cut short has covered them all."""
    return sorted(prompts, key=lambda prompt: (prompt.id.split("-")[1], prompt.workload))[:count]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--heads", default="demo-medusa")
    parser.add_argument(
        "--tree", type=Path, action="append", help="a tree file, repeatable; Medusa's 63 nodes and dense [3, 2, 2]"
    )
    parser.add_argument("--temperature", type=float, action="append", help="repeatable; 0 by default")
    parser.add_argument("--batch", type=int, default=1, help="prompts decoded together, beside each alone")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=None, help="all by default")
    parser.add_argument("--out", type=Path, default=RESULTS / "equality.json")
    options = parser.parse_args()
    options.temperature = options.temperature or [0.0]
    return options


def _trees(files: Sequence[Path] | None, heads: DraftHeads) -> dict[str, Tree]:
    """Plain decoding and the trees named, or two that every model can be asked with, cut to the heads' depth."""
    depth = heads.identity.num_heads
    if files:
        return {"plain": Tree(()), **{path.name.removesuffix(".tree.json"): read_tree(path).tree for path in files}}
    medusa = read_tree(packaged("trees/reference/medusa-63.tree.json")).tree
    return {"plain": Tree(()), "medusa-63": medusa.pruned(depth), "dense [3, 2, 2]": Tree.dense([3, 2, 2][:depth])}


def _all_rows(
    check: Check,
    rules: dict[str, RuleIdentity],
    prompts: Sequence[EncodedPrompt],
    batch: int,
    lines: Path,
    settings: dict[str, Any],
) -> list[Row]:
    """A row per temperature and prompt, taken from an earlier run with the same settings where it has them."""
    done = _resumed(lines, settings)
    for name, rule in rules.items():
        for group in _groups(prompts, batch):
            if not all((name, prompt.id) in done for prompt in group):
                found = _one_batch(check, rule, group, together=batch > 1)
                rows = [{"temperature": name, **row} for row in found]
                with lines.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
                done |= {(name, row["prompt"]): row for row in rows}
            print(f"temperature {name}: {', '.join(prompt.id for prompt in group)}", file=sys.stderr)
    return [done[name, prompt.id] for name in rules for prompt in prompts]


def _groups(prompts: Sequence[EncodedPrompt], batch: int) -> Iterator[Sequence[EncodedPrompt]]:
    return (prompts[start : start + batch] for start in range(0, len(prompts), batch))


def _resumed(lines: Path, settings: dict[str, Any]) -> dict[tuple[str, str], Row]:
    """Rows of an earlier run with the same settings; those of another run are dropped."""
    lines.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()] if lines.exists() else []
    if not rows or rows[0] != {"settings": settings}:
        lines.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
        return {}
    return {(row["temperature"], row["prompt"]): row for row in rows[1:]}


def _one_batch(check: Check, rule: RuleIdentity, prompts: Sequence[EncodedPrompt], *, together: bool) -> list[Row]:
    """Every prompt alone, then all of them in one batch."""
    drawn: dict[str, Any] = {"max_new_tokens": check.max_new_tokens, "rule": rule}
    expected = [generate_plain(check.reference, p.tokens, request=p.request, **drawn) for p in prompts]
    found: dict[str, list[Decoded]] = {}
    for name, decoder in check.decoders.items():
        found[f"{name}, alone"] = [decoder.generate(p.tokens, request=p.request, **drawn) for p in prompts]
        if together:
            tokens, requests = [p.tokens for p in prompts], [p.request for p in prompts]
            found[f"{name}, batch"] = decode_batch(decoder, tokens, requests=requests, **drawn)
    return [
        _row(check, rule, prompt, expected[index], {way: answers[index] for way, answers in found.items()})
        for index, prompt in enumerate(prompts)
    ]


def _row(check: Check, rule: RuleIdentity, prompt: EncodedPrompt, expected: Decoded, found: dict[str, Decoded]) -> Row:
    plain = found["plain, alone"]
    answer = teacher_forced(
        check.target, prompt.tokens, plain.tokens, index=0, end="eos" if plain.end == "eos" else "cap"
    )
    steps = _replayed(check, rule, prompt, answer)
    ways: dict[str, Any] = {}
    for way, decoded in found.items():
        parted = divergence(
            check.target,
            prompt.id,
            prompt.tokens,
            expected.tokens,
            decoded.tokens,
            rule=rule,
            request=prompt.request,
        )
        step = None if parted else step_mismatch(check.heads, prompt.id, answer, steps[_tree_of(way)], decoded.accepted)
        ways[way] = {
            "accepted": list(decoded.accepted),
            "divergence": None if parted is None else asdict(parted),
            "mismatch": None if step is None else asdict(step),
        }
    return {"prompt": prompt.id, "tokens": len(expected.tokens), "end": expected.end, "ways": ways}


def _tree_of(way: str) -> str:
    """The tree's name in `NAME, alone` and `NAME, batch`."""
    return way.rsplit(", ", 1)[0]


def _replayed(check: Check, rule: RuleIdentity, prompt: EncodedPrompt, answer: Answer) -> dict[str, list[int]]:
    """Accepted tokens of every step, by the trace of the plain text."""
    identity = empty_trace(check.target, check.heads, max_new_tokens=check.max_new_tokens, rule=rule)
    trace = trace_of_answers(identity, check.heads, [prompt], [answer])
    walks = replay(trace, [decoder.tree for decoder in check.decoders.values()])
    return {name: list(walks.accepted(index)[0]) for index, name in enumerate(check.decoders)}


def _summary(rows: list[Row], trees: dict[str, Tree], settings: dict[str, Any], target: Target) -> dict[str, Any]:
    per_tree: dict[str, Any] = {}
    failures = []
    for temperature in settings["rules"]:
        mine = [row for row in rows if row["temperature"] == temperature]
        for way in mine[0]["ways"]:
            found = [row["ways"][way] for row in mine]
            parted = [one["divergence"] for one in found if one["divergence"]]
            steps = [one["mismatch"] for one in found if one["mismatch"]]
            where = f"temperature {temperature}, {way}"
            failures += [{"where": where, **p} for p in parted + steps if not any(p.get(why) for why in _EXPLAINED)]
            stats = DecodeStats.of(length for one in found for length in one["accepted"])
            per_tree[where] = {
                "num_draft_nodes": trees[_tree_of(way)].num_draft_nodes,
                "texts_equal": len(found) - len(parted),
                "explained_in_text": [p for p in parted if any(p.get(why) for why in _EXPLAINED)],
                "replays_equal": len(found) - len(parted) - len(steps),
                "near_ties_in_ranks": [step for step in steps if step["near_tie"]],
                "steps": stats.steps,
                "tokens_per_step": round(stats.tokens_per_step, 4),
            }
    return {
        "prompts": len({row["prompt"] for row in rows}),
        "tokens": sum(row["tokens"] for row in rows),
        "per_tree": per_tree,
        "failures": failures,
        "settings": settings,
        "device": device_record(target),
        **provenance(),
    }


if __name__ == "__main__":
    sys.exit(main())
