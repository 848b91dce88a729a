"""Step times of Llama-shaped targets with random weights, over width, depth, context and batch: eager and from graphs.

Weights are made on the device from a configuration, so nothing is downloaded. The verify part is one target pass over
a tree's tokens with the vocabulary projection and every slot's choice, behind a full cache; the draft part is all that
heads propose down to a depth. Acceptance on the host is left out. The floor is the weights' bytes over the measured
copy bandwidth. Cells that do not fit into memory say so; a grid that the time does not suffice for is an error.

`gpu.sh` runs it; by hand:

    python benchmarks/gpu.py --shape 8b --device cuda --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from topo_search.decode.modes import FixedCache, cuda_capture
from topo_search.decode.plan import TreePlan, plan_tree
from topo_search.device import device_record
from topo_search.files.atomic import write_text
from topo_search.heads import DraftHeads
from topo_search.heads.hydra import HydraHeads, HydraShape, untrained_hydra
from topo_search.heads.medusa import MedusaHeads, untrained_blocks
from topo_search.identity import HeadsIdentity
from topo_search.provenance import provenance
from topo_search.ranking import best_token
from topo_search.target import Target
from topo_search.target.attention import suited_attention
from topo_search.target.load import DTYPES, make_target
from topo_search.timed_steps import is_out_of_memory, timed_ms, timed_tree
from topo_search.tree import Tree

RESULTS = Path(__file__).parent / "results"
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8},
}
VOCAB = {"1b": 128256, "8b": 128256, "tiny": 256}
NUM_HEADS = 4
ROUNDS = 9

Call = Callable[[], Sequence[Tensor]]


def main() -> int:
    options = _options()
    deadline = time.monotonic() + options.seconds
    device = torch.device(options.device)
    modes = ("eager", "graph") if device.type == "cuda" else ("eager",)
    widths, contexts, batches = (tuple(int(n) for n in part.split(",")) for part in _grid(options))
    target = _target(options.shape, device, options.dtype)
    rows: list[dict[str, Any]] = []
    late = 0
    with torch.inference_mode():
        for kind in ("medusa", "hydra"):
            heads = _heads(kind, target)
            for batch in batches:
                for depth in range(1, NUM_HEADS + 1):
                    cell = {"part": "draft", "heads": kind, "batch": batch, "depth": depth}
                    late += _timed(rows, cell, modes, deadline, partial(_draft, target, heads, batch, depth), device)
        for context in contexts:
            for batch in batches:
                for width in widths:
                    cell = {"part": "verify", "batch": batch, "context": context, "width": width}
                    late += _timed(rows, cell, modes, deadline, partial(_verify, target, batch, context, width), device)
    document = {
        "shape": options.shape,
        "dtype": options.dtype,
        "device": device_record(target),
        "attention": target.attention,
        "bandwidth_floor_ms": _bandwidth_floor_ms(target, device),
        "provenance": provenance(),
        "rows": rows,
        "cells_not_reached": late,
    }
    write_text(options.out, json.dumps(document, indent=2) + "\n")
    print(markdown(rows))
    if late:
        print(f"The time did not suffice for {late} cells; give --seconds more or a smaller grid.", file=sys.stderr)
    return 3 if late else 0


def _target(shape: str, device: torch.device, dtype: str) -> Target:
    config = LlamaConfig(
        **SHAPES[shape],
        vocab_size=VOCAB[shape],
        num_key_value_heads=SHAPES[shape]["num_attention_heads"] // 4,
        max_position_embeddings=16384,
        tie_word_embeddings=shape == "1b",
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[dtype], attn_implementation=suited_attention(config)
        )
    return make_target(model, None, name=f"random Llama {shape}", dtype=dtype)


def _heads(kind: str, target: Target) -> DraftHeads:
    identity = HeadsIdentity(name=f"untrained {kind}", kind=kind, fingerprint="untrained", num_heads=NUM_HEADS)
    if kind == "medusa":
        blocks = untrained_blocks(target, num_heads=NUM_HEADS, num_layers=1, share_projection=True)
        return MedusaHeads(blocks, target, identity)
    shape = HydraShape(hidden=target.hidden_size, num_heads=NUM_HEADS)
    return HydraHeads(untrained_hydra(target, shape, share_projection=True), target, identity)


def _plan(target: Target, tree: Tree, capacity: int) -> TreePlan:
    return plan_tree(tree, capacity=capacity, window=None, dtype=target.dtype, device=target.device)


def _draft(target: Target, heads: DraftHeads, batch: int, depth: int) -> Call:
    """A list of ten at the root and one node below another down to `depth`."""
    plan = _plan(target, Tree(Tree.chain(depth).paths + tuple((rank,) for rank in range(1, 10))), 1)
    features = torch.randn(batch, target.hidden_size, dtype=target.dtype, device=target.device)
    roots = torch.zeros(batch, dtype=torch.long, device=target.device)
    return lambda: (heads.propose(features, roots, plan),)


def _verify(target: Target, batch: int, context: int, width: int) -> Call:
    """One pass over a tree of that width behind `context` tokens per row, and every slot's choice."""
    plan = _plan(target, timed_tree(width - 1, NUM_HEADS), context)
    storage = target.new_cache(context + width, batch=batch).storage
    slots = torch.arange(context, context + width, device=target.device)
    cache = FixedCache(storage, slots, context + width)
    ids = torch.arange(batch * width, device=target.device).view(batch, width) % target.known_ids
    positions = (plan.offsets + context).expand(batch, -1).contiguous()
    mask = plan.mask_at(context).expand(batch, -1, -1, -1)

    def run() -> tuple[Tensor]:
        hidden = target.hidden_states(ids, cache=cache, position_ids=positions, attention_mask=mask)
        return (best_token(target.logits(hidden)),)

    return run


def _timed(
    rows: list[dict[str, Any]],
    cell: dict[str, Any],
    modes: Sequence[str],
    deadline: float,
    build: Callable[[], Call],
    device: torch.device,
) -> int:
    """Add one row per mode; how many cells the time did not suffice for."""
    late = 0
    for mode in modes:
        if time.monotonic() > deadline:
            rows.append({**cell, "mode": mode, "status": "not reached"})
            late += 1
            continue
        try:
            call: Callable[[], object] = build()
            if mode == "graph":
                call, _ = cuda_capture(call)  # type: ignore[arg-type]
            for _ in range(2):
                call()
            times = [timed_ms(call, device) for _ in range(ROUNDS)]
            p10, median, p90 = (round(float(v), 4) for v in np.percentile(times, (10, 50, 90)))
            rows.append({**cell, "mode": mode, "status": "ok", "median_ms": median, "p10_ms": p10, "p90_ms": p90})
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            rows.append({**cell, "mode": mode, "status": "out of memory"})
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return late


def _bandwidth_floor_ms(target: Target, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    # A table of embeddings that is not the output layer too is only looked up.
    table = target.input_embeddings.weight
    read = [p for p in target.model.parameters() if p is not table or p is target.output_layer.weight]
    weights = sum(p.numel() * p.element_size() for p in read)
    block = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    copy = torch.empty_like(block)
    times = [timed_ms(lambda: copy.copy_(block), device) for _ in range(ROUNDS)]
    return weights * float(np.median(times)) / (2 * block.numel())


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of the docs."""
    lines = ["| part | heads | batch | context | width or depth | mode | ms (p10-p90) |", "|" + " --- |" * 7]
    for row in rows:
        size = row.get("width", row.get("depth"))
        known = row["status"] == "ok"
        figure = f"{row['median_ms']:.3f} ({row['p10_ms']:.3f}-{row['p90_ms']:.3f})" if known else row["status"]
        lines.append(
            f"| {row['part']} | {row.get('heads', '')} | {row['batch']} | {row.get('context', '')} | {size} | "
            f"{row['mode']} | {figure} |"
        )
    return "\n".join(lines)


def _grid(options: argparse.Namespace) -> tuple[str, str, str]:
    return options.widths, options.contexts, options.batches


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--widths", default="1,2,4,8,16,32,64")
    parser.add_argument("--contexts", default="512,2048,8192")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--seconds", type=float, default=180.0, help="no cell starts later than this")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
