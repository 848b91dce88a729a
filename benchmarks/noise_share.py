"""Which share of the draw's own noise should rank the candidates? Tokens per step by share and temperature.

The text does not depend on the share, so the target answers the calibration prompts once per temperature and seed; its
answers are ranked again for every share and replayed. Several seeds are several samples of one law: the spread over
them is printed. The share is chosen on calibration prompts and judged on evaluation prompts.

    python benchmarks/noise_share.py --tree trees/best-tree.tree.json --num-prompts 16
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from topo_search.answers import answer_batch
from topo_search.calibrate import EncodedPrompt, empty_trace, encode_prompts, trace_of_answers
from topo_search.cli.decoding import fitting_tree
from topo_search.cli.inputs import evenly
from topo_search.files.prompts import packaged_prompts
from topo_search.files.tree_file import read_tree
from topo_search.heads import DraftHeads, load_heads
from topo_search.identity import RuleIdentity, sampling_rule
from topo_search.provenance import provenance
from topo_search.replay import replay
from topo_search.target import Target, load_target
from topo_search.tree import Tree

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def main() -> None:
    options = _options()
    target = load_target("demo")
    heads = load_heads("demo-medusa", target)
    tree = fitting_tree(options.tree, read_tree(options.tree), target, heads, allow_mismatch=False)
    cap, rows = options.max_new_tokens, []
    splits = {
        split: encode_prompts(
            target, evenly(packaged_prompts(workload=None, split=split), options.num_prompts), max_new_tokens=cap
        )
        for split in ("calibration", "evaluation")
    }
    for temperature in options.temperatures:
        figures = {
            split: np.array(
                [
                    by_share(target, heads, prompts, tree, sampling_rule(temperature=temperature, seed=seed), cap)
                    for seed in range(options.seeds)
                ]
            )
            for split, prompts in splits.items()
        }
        rows.append(_row(temperature, figures["calibration"], figures["evaluation"]))
        print(json.dumps(rows[-1]))
    content = {
        "target": asdict(target.identity),
        "heads": asdict(heads.identity),
        "tree": [list(path) for path in tree.paths],
        "prompts": {split: len(prompts) for split, prompts in splits.items()},
        "seeds": options.seeds,
        "shares": SHARES,
        "rows": rows,
        "provenance": provenance(),
    }
    options.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def by_share(
    target: Target,
    heads: DraftHeads,
    prompts: Sequence[EncodedPrompt],
    tree: Tree,
    rule: RuleIdentity,
    max_new_tokens: int,
    shares: Sequence[float] = SHARES,
) -> list[float]:
    """Replayed tokens per step of a tree for every share of the noise, from one set of answers."""
    answers = answer_batch(
        target,
        [prompt.tokens for prompt in prompts],
        max_new_tokens=max_new_tokens,
        rule=rule,
        requests=[prompt.request for prompt in prompts],
        keep_prompt_states=heads.reads_prefix,
    )
    found = []
    for share in shares:
        identity = empty_trace(
            target, heads, max_new_tokens=max_new_tokens, rule=replace(rule, noise_share=float(share))
        )
        found.append(float(replay(trace_of_answers(identity, heads, prompts, answers), [tree]).tokens_per_step[0]))
    return found


def _row(temperature: float, calibration: np.ndarray, evaluation: np.ndarray) -> dict[str, Any]:
    """The share that is best on the calibration prompts, and what it gains on the others, by seed."""
    best = int(calibration.mean(axis=0).argmax())
    gains = evaluation[:, best] / evaluation[:, 0]
    return {
        "temperature": temperature,
        "calibration_tokens_per_step": calibration.mean(axis=0).round(4).tolist(),
        "chosen_share": SHARES[best],
        "evaluation_tokens_per_step": evaluation.mean(axis=0).round(4).tolist(),
        "evaluation_gain_median_low_high": [round(float(v), 4) for v in (np.median(gains), gains.min(), gains.max())],
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=16, help="of each split")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0, 1.5])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "noise_share.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
