"""Is the text the same, and is replay the truth? Every evaluation prompt, five trees, on the real model in fp32.

For each prompt: transformers' `generate` on the target as a user loads it, then our decoder with the empty tree, the
best chain, Medusa's 63-node tree, `Tree.dense([3, 2, 2])` and the best tree. Texts must be equal, and the replay of
the plain run's trace must give every step's accepted length. What differs must be a near-tie, and is listed.

One line per prompt is appended to the results as it is done, so a killed run continues:

    python benchmarks/equality.py --tree trees/best-tree.tree.json --chain trees/best-chain.tree.json
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from topo_search.calibrate import EncodedPrompt, empty_trace, encode_prompts, trace_of_answers
from topo_search.compare import divergence, step_mismatch, teacher_forced
from topo_search.decode.decoder import TreeDecoder
from topo_search.device import device_record
from topo_search.files.prompts import Prompt, packaged_prompts
from topo_search.files.tree_file import read_tree
from topo_search.heads import DraftHeads, load_heads
from topo_search.provenance import provenance
from topo_search.reference import generate_plain
from topo_search.replay import replay
from topo_search.resources import packaged
from topo_search.stats import DecodeStats
from topo_search.target import Target, load_target
from topo_search.tree import Tree

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    options = _options()
    lines = options.out.with_suffix(".jsonl")
    target, reference = load_target("demo"), load_target("demo", pack=False)
    heads = load_heads("demo-medusa", target)
    trees = {
        "plain": Tree(()),
        "best chain": read_tree(options.chain).tree,
        "medusa-63": read_tree(packaged("trees/reference/medusa-63.tree.json")).tree,
        "dense [3, 2, 2]": Tree.dense([3, 2, 2]),
        "best tree": read_tree(options.tree).tree,
    }
    settings = {
        "target": asdict(target.identity),
        "heads": asdict(heads.identity),
        "trees": {name: [list(path) for path in tree.paths] for name, tree in trees.items()},
        "max_new_tokens": options.max_new_tokens,
    }
    chosen = in_turn(packaged_prompts(workload=None, split="evaluation"), options.num_prompts)
    prompts = encode_prompts(target, chosen, max_new_tokens=options.max_new_tokens)
    done = _resumed(lines, settings)
    decoders = {name: TreeDecoder(target, heads, tree, run_probe=name == "plain") for name, tree in trees.items()}
    for number, prompt in enumerate(prompts, start=1):
        if prompt.id not in done:
            row = _one_prompt(target, reference, heads, decoders, prompt, options.max_new_tokens)
            done[prompt.id] = row
            with lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        print(f"{number}/{len(prompts)} {prompt.id}", file=sys.stderr)
    summary = _summary(list(done.values()), trees, settings, target)
    options.out.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({key: summary[key] for key in ("prompts", "tokens", "per_tree", "failures")}, indent=2))
    return 1 if summary["failures"] else 0


def in_turn(prompts: list[Prompt], count: int | None) -> list[Prompt]:
    """The workloads in turn, so that a run cut short has covered them all."""
    return sorted(prompts, key=lambda prompt: (prompt.id.split("-")[1], prompt.workload))[:count]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, required=True, help="the best tree")
    parser.add_argument("--chain", type=Path, required=True, help="the best chain")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=None, help="all by default")
    parser.add_argument("--out", type=Path, default=RESULTS / "equality.json")
    return parser.parse_args()


def _resumed(lines: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of an earlier run with the same settings; those of another run are dropped."""
    lines.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()] if lines.exists() else []
    if not rows or rows[0] != {"settings": settings}:
        lines.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
        return {}
    return {row["prompt"]: row for row in rows[1:]}


def _one_prompt(
    target: Target,
    reference: Target,
    heads: DraftHeads,
    decoders: dict[str, TreeDecoder],
    prompt: EncodedPrompt,
    max_new_tokens: int,
) -> dict[str, Any]:
    expected = generate_plain(reference, prompt.tokens, max_new_tokens=max_new_tokens)
    found = {name: d.generate(prompt.tokens, max_new_tokens=max_new_tokens) for name, d in decoders.items()}
    plain = found["plain"]
    answer = teacher_forced(target, prompt.tokens, plain.tokens, index=0, end="eos" if plain.end == "eos" else "cap")
    trace = trace_of_answers(empty_trace(target, heads, max_new_tokens=max_new_tokens), heads, [prompt], [answer])
    walks = replay(trace, [decoder.tree for decoder in decoders.values()])
    rows: dict[str, Any] = {}
    for index, (name, decoded) in enumerate(found.items()):
        parted = divergence(target, prompt.id, prompt.tokens, expected.tokens, decoded.tokens)
        step = step_mismatch(heads, prompt.id, answer, walks.accepted(index)[0], decoded.accepted)
        rows[name] = {
            "accepted": list(decoded.accepted),
            "divergence": None if parted is None else asdict(parted),
            "mismatch": None if step is None else asdict(step),
        }
    return {"prompt": prompt.id, "tokens": len(expected.tokens), "end": expected.end, "trees": rows}


def _summary(
    rows: list[dict[str, Any]], trees: dict[str, Tree], settings: dict[str, Any], target: Target
) -> dict[str, Any]:
    per_tree = {}
    failures = []
    for name, tree in trees.items():
        mine = [row["trees"][name] for row in rows]
        parted = [row["divergence"] for row in mine if row["divergence"]]
        steps = [row["mismatch"] for row in mine if row["mismatch"]]
        failures += [{"tree": name, **point} for point in parted + steps if not point["near_tie"]]
        stats = DecodeStats.of(length for row in mine for length in row["accepted"])
        per_tree[name] = {
            "num_draft_nodes": tree.num_draft_nodes,
            "texts_equal": len(mine) - len(parted),
            "near_ties_in_text": [point for point in parted if point["near_tie"]],
            "replays_equal": len(mine) - len(steps),
            "near_ties_in_ranks": [step for step in steps if step["near_tie"]],
            "steps": stats.steps,
            "tokens_per_step": round(stats.tokens_per_step, 4),
        }
    return {
        "prompts": len(rows),
        "tokens": sum(row["tokens"] for row in rows),
        "per_tree": per_tree,
        "failures": failures,
        "settings": settings,
        "device": device_record(target),
        **provenance(),
    }


if __name__ == "__main__":
    sys.exit(main())
