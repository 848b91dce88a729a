"""How far is a decode step from what the machine allows?

The floor of a step is its bare matrix products: every linear layer of the target and its output layer, on the same
packed weights, one after another on vectors of the right shape, and nothing else. Where the target's layers are fused
the products are the fused ones (queries, keys and values as one, both halves of the gated layer as one): fewer and
larger, they are the faster floor. Steps and floors of all widths are timed in one run, interleaved in shuffled order.
On a GPU the bytes of the weights over the measured copy bandwidth are given too. Drafting is set against the products
of the heads that run.

    python benchmarks/step.py
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from topo_search.decode.cache import SlotCache
from topo_search.decode.modes import MODES, in_mode, new_step, ready_mode
from topo_search.decode.plan import plan_tree
from topo_search.decode.step import DecodeState, TreeStep
from topo_search.device import device_record
from topo_search.files.atomic import write_text
from topo_search.heads import DraftHeads, load_heads
from topo_search.memory import keep_freed_memory
from topo_search.provenance import provenance
from topo_search.target import Target, load_target
from topo_search.target.packing import PackedLinear
from topo_search.timed_steps import timed_ms, timed_tree
from topo_search.tree import Tree

RESULTS = Path(__file__).parent / "results"
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
Call = Callable[[], object]


def main() -> int:
    options = _options()
    keep_freed_memory()
    target = load_target(options.target, dtype=options.dtype, device=options.device)
    target = in_mode(target, ready_mode(options.mode, options.device), say=partial(print, file=sys.stderr))
    heads = load_heads(options.heads, target)
    with torch.inference_mode():
        calls = _calls(target, heads, options.context)
        times = interleaved(calls, rounds=options.rounds, device=target.device, seed=options.seed)
    rows = [_row(width, times) for width in WIDTHS]
    document = {
        "target": asdict(target.identity),
        "heads": asdict(heads.identity),
        "device": device_record(target),
        "attention": target.attention,
        "mode": target.mode,
        "context": options.context,
        "rounds": options.rounds,
        "bandwidth_floor_ms": _bandwidth_floor_ms(target),
        "provenance": provenance(),
        "rows": rows,
    }
    write_text(options.out, json.dumps(document, indent=2) + "\n")
    print(markdown(rows))
    return 0


def interleaved(calls: dict[str, Call], *, rounds: int, device: torch.device, seed: int) -> dict[str, list[float]]:
    """Milliseconds of every call, `rounds` times, each round in another order, after two calls to warm up."""
    for call in calls.values():
        call()
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        order = list(calls)
        random.Random(seed * 1009 + number).shuffle(order)
        for name in order:
            times[name].append(timed_ms(calls[name], device))
    return times


def _calls(target: Target, heads: DraftHeads, context: int) -> dict[str, Call]:
    depth = heads.identity.num_heads
    cache = target.new_cache(context + max(WIDTHS))
    ids = (torch.arange(context + 1, device=target.device) * 7919 + 11) % target.known_ids
    states = target.hidden_states(ids[None, :-1], cache=cache)[0]
    draft_context = heads.new_context(context + depth + 1)
    draft_context.extend(states[None], ids[None, 1:])

    def at_context() -> DecodeState:
        cache.length = context
        draft_context.rewind(context - 1)
        root = ids[-1:]
        return DecodeState(root=root, fresh=states[-1:], following=root, cache=cache, context=draft_context)

    calls: dict[str, Call] = {}
    for width in WIDTHS:
        tree = timed_tree(width - 1, depth)
        step = _step(target, heads, tree, context, cache)
        calls[f"step {width}"] = partial(_verified, step, at_context)
        calls[f"floor {width}"] = _products([*_linears(target.body), target.output_layer], width, target)
        if width > 1:
            calls[f"draft {width}"] = partial(_drafted, step, at_context)
            step.draft(at_context())
    return calls


def _verified(step: TreeStep, state: Callable[[], DecodeState]) -> list[int]:
    tokens: list[int] = step.verify(state()).tolist()
    return tokens


def _drafted(step: TreeStep, state: Callable[[], DecodeState]) -> None:
    step.draft(state())


def _step(target: Target, heads: DraftHeads, tree: Tree, capacity: int, cache: SlotCache) -> TreeStep:
    plan = plan_tree(tree, capacity=capacity, window=target.window, dtype=target.dtype, device=target.device)
    step = new_step(target, heads, plan)
    step.prepare(cache)
    return step


def _linears(module: nn.Module) -> list[nn.Module]:
    return [found for found in module.modules() if isinstance(found, nn.Linear | PackedLinear)]


def _products(linears: list[nn.Module], width: int, target: Target) -> Call:
    """All products of one step; inputs of one size share a tensor, as activations in a cache would."""
    sizes = {int(linear.in_features) for linear in linears}  # type: ignore[arg-type]
    inputs: dict[int, Tensor] = {
        size: torch.randn(1, width, size, dtype=target.dtype, device=target.device) for size in sizes
    }
    pairs = [(linear, inputs[int(linear.in_features)]) for linear in linears]  # type: ignore[arg-type]

    def run() -> None:
        for linear, vector in pairs:
            linear(vector)

    return run


def _bandwidth_floor_ms(target: Target) -> float | None:
    """Milliseconds to read every weight of a step once at the device's copy bandwidth; None on a CPU."""
    if target.device.type != "cuda":
        return None
    weights = sum(p.numel() * p.element_size() for p in target.model.parameters())
    block = torch.empty(1 << 30, dtype=torch.uint8, device=target.device)
    copy = torch.empty_like(block)
    times = interleaved({"copy": lambda: copy.copy_(block)}, rounds=9, device=target.device, seed=0)["copy"]
    bytes_per_ms = 2 * block.numel() / float(np.median(times))
    return weights / bytes_per_ms


def _row(width: int, times: dict[str, list[float]]) -> dict[str, Any]:
    step, floor = (np.array(times[f"{what} {width}"]) for what in ("step", "floor"))
    draft = times.get(f"draft {width}")
    ratios = np.percentile(step / floor, (10, 50, 90))
    return {
        "width": width,
        "step_ms": round(float(np.median(step)), 2),
        "floor_ms": round(float(np.median(floor)), 2),
        "step_over_floor": round(float(np.median(step) / np.median(floor)), 3),
        "step_over_floor_p10_p90": [round(float(ratios[0]), 3), round(float(ratios[2]), 3)],
        "draft_ms": None if draft is None else round(float(np.median(draft)), 2),
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of the docs."""
    lines = ["| width | step_ms | floor_ms | step over floor (p10-p90) | draft_ms |", "|" + " --- |" * 5]
    for row in rows:
        low, high = row["step_over_floor_p10_p90"]
        lines.append(
            f"| {row['width']} | {row['step_ms']:.1f} | {row['floor_ms']:.1f} | {row['step_over_floor']:.2f} "
            f"({low:.2f}-{high:.2f}) | {'-' if row['draft_ms'] is None else row['draft_ms']} |"
        )
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--heads", default="demo-medusa")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mode", choices=MODES, default="auto")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "step.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
