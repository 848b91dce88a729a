"""What typical acceptance brings, and what it costs: tokens per step, speed, and how far the text's law moved.

Exact sampling with the best exact tree against typical acceptance (Medusa, section 2.3, which changes the text) at
several epsilon and delta: for each, accept masks are recorded from a wide tree on calibration prompts, the tree is
searched for (a heuristic), and decoding the same prompts with it gives its true figure beside the masks' one. Then both
rules answer the evaluation prompts.

How far the law moved needs no sample: given the text so far, a token after the accepted path is drawn as exact sampling
draws it (or is the best one), and a drafted token that was taken is certain. So at each position Kullback-Leibler
divergence to the target's law, and the chance that an exact draw would give another token, are known; means are over
the emitted positions. Exact sampling has 0 for both.

The exact rule's tree is refused where it was made for other heads or another rule. A line per piece of work is appended
as it is done, so a killed run continues:

    topo-search calibrate --temperature 0.7 --num-prompts 32 --max-new-tokens 64 --no-measure
    topo-search optimize --budget 64
    python benchmarks/typical.py --tree trees/best-tree.tree.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from topo_search.calibrate import EncodedPrompt, encode_prompts
from topo_search.cli.decoding import fitting_tree, stored_tree
from topo_search.cli.inputs import evenly
from topo_search.decode.decoder import TreeDecoder
from topo_search.decode.sampling import choose, filtered
from topo_search.decode.typical import Acceptable
from topo_search.device import device_record
from topo_search.files.latency_file import read_latency
from topo_search.files.prompts import packaged_prompts
from topo_search.files.tree_file import read_tree
from topo_search.heads import DraftHeads, load_heads
from topo_search.identity import RuleIdentity, sampling_rule, typical_rule
from topo_search.provenance import provenance
from topo_search.recording import record_accepts
from topo_search.resources import packaged
from topo_search.search.choose import Settings
from topo_search.search.optimize import TREE
from topo_search.search.typical import assess_typical
from topo_search.target import Target, load_target
from topo_search.tree import Tree

RESULTS = Path(__file__).parent / "results"
# epsilon and delta: Medusa's defaults, the same swapped as in one of its own functions, and the paper's square root
GRID = ((0.09, 0.3), (0.3, 0.09), (0.3, 0.55))


def main() -> None:
    options = _options()
    target = load_target("demo")
    heads = load_heads("demo-medusa", target)
    bench = Bench(target, heads, options)
    exact = sampling_rule(temperature=options.temperature, seed=options.seed)
    own = stored_tree(options.tree, rule=exact)
    tree = fitting_tree(options.tree, own, target, heads, allow_mismatch=False)
    rows = [bench.row("plain decoding", exact, Tree(())), bench.row("exact", exact, tree)]
    for epsilon, delta in GRID:
        for bonus in options.bonus:
            rule = typical_rule(
                temperature=options.temperature, epsilon=epsilon, delta=delta, bonus=bonus, seed=options.seed
            )
            searched = bench.searched(rule)
            rows.append(searched | bench.row(rule.in_words, rule, Tree.parse(searched["paths"])))
    content = {
        "rows": rows,
        "settings": bench.settings,
        "device": device_record(target),
        **provenance(),
    }
    options.out.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    page = markdown(rows)
    options.out.with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)


class Bench:
    """The work, piece by piece, each found again in the lines of an earlier run with the same settings."""

    def __init__(self, target: Target, heads: DraftHeads, options: argparse.Namespace) -> None:
        self.target, self.heads, self.cap, self.seed = target, heads, options.max_new_tokens, options.seed
        self.wide = read_tree(packaged("trees/reference/medusa-63.tree.json")).tree.pruned(heads.identity.num_heads)
        self.latency = read_latency(options.latency or packaged("calibration/demo/demo.latency.json"))
        self.evaluation = self._prompts("evaluation", options.num_prompts)
        self.calibration = self._prompts("calibration", options.calibration_prompts)
        self.settings = {
            "target": asdict(target.identity),
            "heads": asdict(heads.identity),
            "max_new_tokens": self.cap,
            "budget": options.budget,
            "prompts": [prompt.id for prompt in self.evaluation],
            "calibration_prompts": [prompt.id for prompt in self.calibration],
        }
        self.budget, self.masks = options.budget, options.out.parent / "typical"
        self.masks.mkdir(parents=True, exist_ok=True)
        self.lines = options.out.with_suffix(".jsonl")
        self.done = _resumed(self.lines, self.settings)

    def searched(self, rule: RuleIdentity) -> dict[str, Any]:
        """The tree found from the wide tree's masks, what the masks promise it, and what it did on the same prompts."""

        def work() -> dict[str, Any]:
            masks = self._recorded(self.wide, rule, "wide")
            tree = assess_typical(masks, self.latency, Settings(budget=self.budget))[TREE].tree
            rerolled = self._recorded(tree, rule, "rerolled")
            return {
                "paths": [list(path) for path in tree.paths],
                "wide_tokens_per_step": masks.tokens_per_step(self.wide),
                "masks_tokens_per_step": masks.tokens_per_step(tree),
                "rerolled_tokens_per_step": rerolled.tokens_per_step(tree),
            }

        return self._once(f"search {_name(rule)}", work)

    def row(self, name: str, rule: RuleIdentity, tree: Tree) -> dict[str, Any]:
        """Decode the evaluation prompts, one by one, and put their figures together."""
        decoder = TreeDecoder(self.target, self.heads, tree, run_probe=False)
        decoder.generate(self.evaluation[0].tokens, max_new_tokens=4, rule=rule)  # warm up
        answers = []
        for number, prompt in enumerate(self.evaluation, start=1):
            key = f"decode {_name(rule)} {tree.paths} {prompt.id}"
            answers.append(self._once(key, lambda prompt=prompt: self._answer(decoder, rule, prompt)))  # type: ignore[misc]
            print(f"{name}: {number} of {len(self.evaluation)}", file=sys.stderr)
        total = {key: float(np.sum([answer[key] for answer in answers])) for key in answers[0]}
        return {
            "name": name,
            "changes_text": rule.changes_text,
            "num_draft_nodes": tree.num_draft_nodes,
            "depth": tree.depth,
            "tokens_per_step": (total["tokens"] - len(answers)) / total["steps"],
            "tokens_per_s": 1000 * (total["tokens"] - len(answers)) / total["decode_ms"],
            "log_prob": total["log_prob"] / total["tokens"],
            "divergence": total["divergence"] / total["tokens"],
            "other_than_exact": total["certain_other"] / total["tokens"],
            "other_than_exact_drawn": total["other"] / total["tokens"],
        }

    def _answer(self, decoder: TreeDecoder, rule: RuleIdentity, prompt: EncodedPrompt) -> dict[str, float]:
        seen: list[Acceptable] = []
        found = decoder.generate(
            prompt.tokens, max_new_tokens=self.cap, rule=rule, request=prompt.request, observe=seen.append
        )
        moved = moved_law(self.target, prompt, found.tokens, taken(found.accepted, seen), rule, seed=self.seed)
        return {
            "tokens": len(found.tokens),
            "steps": len(found.accepted),
            "decode_ms": found.decode_ms,
            **moved,
        }

    def _recorded(self, tree: Tree, rule: RuleIdentity, kind: str) -> Any:
        longest = max(len(prompt.tokens) for prompt in self.calibration)
        print(f"recording {kind}: {rule.in_words}", file=sys.stderr)
        return record_accepts(
            TreeDecoder(self.target, self.heads, tree, capacity=longest + self.cap, run_probe=False),
            self.calibration,
            rule=rule,
            max_new_tokens=self.cap,
            out=self.masks / f"{kind}_{_name(rule)}.accepts.safetensors",
            provenance=provenance(),
        )

    def _prompts(self, split: str, count: int) -> list[EncodedPrompt]:
        return encode_prompts(
            self.target, evenly(packaged_prompts(workload=None, split=split), count), max_new_tokens=self.cap
        )

    def _once(self, key: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if key not in self.done:
            self.done[key] = work()
            with self.lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "found": self.done[key]}) + "\n")
        return self.done[key]


def taken(accepted: Sequence[int], seen: Sequence[Acceptable]) -> list[bool]:
    """Per token of an answer, whether it is a drafted one that typical acceptance took.

    The last token of a step may be: where it ends the answer, no token is chosen behind it.
    """
    flags = [False]  # the prefill's
    for length, step in zip(accepted, seen, strict=False):
        drafted = len(step.path) - 1
        flags += [place < drafted for place in range(length + 1)]
    return flags


def moved_law(
    target: Target,
    prompt: EncodedPrompt,
    tokens: Sequence[int],
    drafted: Sequence[bool],
    rule: RuleIdentity,
    *,
    seed: int,
) -> dict[str, float]:
    """Sums over an answer's tokens, from one pass over it: how likely they are, and how far their law is from exact.

    Args:
        target: the model.
        prompt: its sequence number keys the exact draws that tokens are compared with.
        tokens: the answer.
        drafted: which tokens are drafted ones that were taken; empty where none is.
        rule: by which it was written.
        seed: of the exact draws.
    """
    exact = sampling_rule(temperature=rule.temperature, top_k=rule.top_k, top_p=rule.top_p, min_p=rule.min_p, seed=seed)
    ids = torch.tensor([[*prompt.tokens, *tokens[:-1]]], device=target.device)
    places = len(prompt.tokens) + torch.arange(len(tokens), device=target.device)
    with torch.inference_mode():
        scores = target.logits(target.hidden_states(ids)[0, len(prompt.tokens) - 1 :])
        log_probs = torch.log_softmax(filtered(scores, exact).double(), dim=-1)
        draws = choose(scores, exact, positions=places, requests=torch.full_like(places, prompt.request))
    written = torch.tensor(tokens, device=target.device)
    logs = log_probs.gather(-1, written[:, None])[:, 0]
    certain = torch.zeros(len(tokens), dtype=torch.bool, device=target.device)
    certain[: len(drafted)] = torch.tensor(list(drafted), dtype=torch.bool, device=target.device)
    if rule.bonus == "greedy":
        certain[:] = True
    return {
        "log_prob": float(logs.sum()),
        "divergence": float(-logs[certain].sum()),
        "certain_other": float((1 - logs[certain].exp()).sum()),
        "other": float((draws != written).sum()),
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The two tables: speed against moved text, and what masks promised against what the trees did."""
    exact = next(row for row in rows if row["name"] == "exact")
    lines = [
        "| acceptance | nodes | depth | tokens per step | tokens/s | over exact | log-probability per token "
        "| KL per token | another token than exact |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = [row["name"], row["num_draft_nodes"], row["depth"], f"{row['tokens_per_step']:.2f}"]
        cells += [f"{row['tokens_per_s']:.1f}", f"{row['tokens_per_s'] / exact['tokens_per_s']:.2f}"]
        cells += [f"{row['log_prob']:.3f}", f"{row['divergence']:.3f}"]
        cells.append(f"{100 * row['other_than_exact']:.1f} % ({100 * row['other_than_exact_drawn']:.1f} % drawn)")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        "| acceptance | wide tree | found tree by its masks | found tree, decoded |",
        "| --- | ---: | ---: | ---: |",
    ]
    for row in rows:
        if "masks_tokens_per_step" in row:
            names = ("wide_tokens_per_step", "masks_tokens_per_step", "rerolled_tokens_per_step")
            lines.append(f"| {row['name']} | " + " | ".join(f"{row[name]:.2f}" for name in names) + " |")
    return "\n".join(lines) + "\n"


def _name(rule: RuleIdentity) -> str:
    words = [rule.rule, f"T{rule.temperature:g}", rule.epsilon, rule.delta, rule.bonus, rule.seed]
    return "_".join(str(word) for word in words if word is not None)


def _resumed(lines: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Pieces of an earlier run with the same settings; those of another run are dropped."""
    rows = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()] if lines.exists() else []
    if not rows or rows[0] != {"settings": settings}:
        lines.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
        return {}
    return {row["key"]: row["found"] for row in rows[1:]}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, required=True, help="the exact rule's tree")
    parser.add_argument("--latency", type=Path, default=None, help="step times; the demo's own by default")
    parser.add_argument("--budget", type=int, default=64, help="most tokens verified per step")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--bonus", nargs="+", default=["sampled", "greedy"])
    parser.add_argument("--num-prompts", type=int, default=24, help="evaluation prompts")
    parser.add_argument("--calibration-prompts", type=int, default=16, help="to record masks on")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "typical.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
