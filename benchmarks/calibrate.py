"""What does profiling cost over running the model once?

The text is written already. Its bare cost is the target's forward passes over it and the products of every draft head
on every row: head layers and projections, nothing ranked. The profiling stage is what `calibrate` does with the same
text: forward passes, heads, ranks, a trace. Both are timed in turn, several times.

    python benchmarks/calibrate.py
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from topo_search.answers import Answer
from topo_search.calibrate import (
    EncodedPrompt,
    answer_features,
    empty_trace,
    encode_prompts,
    trace_of_answers,
    true_paths,
)
from topo_search.compare import teacher_forced
from topo_search.decode.decoder import TreeDecoder
from topo_search.device import device_record
from topo_search.files.atomic import write_text
from topo_search.files.prompts import packaged_prompts
from topo_search.heads import DraftHeads, load_heads
from topo_search.memory import keep_freed_memory
from topo_search.provenance import provenance
from topo_search.target import Target, load_target
from topo_search.timed_steps import timed_ms
from topo_search.tree import Tree

RESULTS = Path(__file__).parent / "results"
Texts = list[tuple[EncodedPrompt, tuple[int, ...]]]


def main() -> int:
    options = _options()
    keep_freed_memory()
    target = load_target(options.target)
    heads = load_heads(options.heads, target)
    prompts = encode_prompts(
        target,
        packaged_prompts(workload=None, split="calibration")[: options.num_prompts],
        max_new_tokens=options.max_new_tokens,
    )
    plain = TreeDecoder(target, None, Tree(()))
    texts: Texts = [(p, plain.generate(p.tokens, max_new_tokens=options.max_new_tokens).tokens) for p in prompts]
    calls = {"bare": partial(bare, target, heads, texts), "profiling": partial(profile, target, heads, texts, options)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for number in range(options.rounds):
        order = list(calls)
        random.Random(options.seed + number).shuffle(order)
        for name in order:
            times[name].append(timed_ms(calls[name], target.device))
    positions = sum(len(prompt.tokens) + len(tokens) for prompt, tokens in texts)
    medians = {name: float(np.median(found)) for name, found in times.items()}
    ratio = medians["profiling"] / medians["bare"]
    document = {
        "target": asdict(target.identity),
        "heads": asdict(heads.identity),
        "device": device_record(target),
        "prompts": len(texts),
        "positions": positions,
        "rounds": options.rounds,
        "median_ms": {name: round(time, 1) for name, time in medians.items()},
        "positions_per_s": {name: round(1000 * positions / time, 1) for name, time in medians.items()},
        "profiling_over_bare": round(ratio, 3),
        "provenance": provenance(),
    }
    write_text(options.out, json.dumps(document, indent=2) + "\n")
    print(markdown(document))
    return 0


def bare(target: Target, heads: DraftHeads, texts: Texts) -> None:
    """Forward passes over the text and every head's scores on every row."""
    for index, answer in enumerate(_forwarded(target, texts)):
        tokens = torch.tensor(texts[index][1])
        features = answer_features(heads, answer)[:-1]
        path = true_paths(tokens, heads.identity.num_heads)
        with torch.inference_mode():
            heads.path_scores(features, path[:, :-1])


def profile(target: Target, heads: DraftHeads, texts: Texts, options: argparse.Namespace) -> None:
    """The same forward passes, and the trace made from them."""
    empty = empty_trace(target, heads, max_new_tokens=options.max_new_tokens)
    trace_of_answers(empty, heads, [prompt for prompt, _ in texts], _forwarded(target, texts))


def _forwarded(target: Target, texts: Texts) -> list[Answer]:
    return [
        teacher_forced(target, prompt.tokens, tokens, index=index, end="cap")
        for index, (prompt, tokens) in enumerate(texts)
    ]


def markdown(document: dict[str, Any]) -> str:
    """The table of the docs."""
    lines = ["| stage | ms | positions/s |", "| --- | ---: | ---: |"]
    for name, time in document["median_ms"].items():
        lines.append(f"| {name} | {time:.0f} | {document['positions_per_s'][name]:.0f} |")
    return "\n".join([*lines, "", f"Profiling over bare: {document['profiling_over_bare']:.2f}"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--heads", default="demo-medusa")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "calibrate.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
