"""Time the decoder's own step on the device: every shape warmed up, in shuffled order, synchronised, median and spread.

Each timed step drafts, verifies and commits exactly as decoding does, from real text in the cache. Its two halves are
recorded apart, since the verify half depends on width and context, the draft half on the tree's depth. The order of
shapes is reshuffled every round, so a machine that drifts slows all shapes alike.
"""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from topo_search.cost import OK, OUT_OF_MEMORY, LatencyTable, Timing
from topo_search.decode.cache import SlotCache
from topo_search.decode.modes import new_step
from topo_search.decode.plan import plan_tree
from topo_search.decode.step import DecodeState, TreeStep
from topo_search.device import device_record
from topo_search.errors import InputError
from topo_search.estimates import independent
from topo_search.files.atomic import write_text
from topo_search.heads.base import DraftContext, DraftHeads
from topo_search.search.frontier import frontier
from topo_search.target.adapter import Target
from topo_search.tree import Tree

EDGE_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 16, 17, 20, 24, 31, 32, 33, 48, 63, 64, 65)
_RANKS_TIMED = 10  # ranks per depth in the timed draft; ranking more of them costs next to nothing
# Any falling rank table spreads the timed trees over ranks and depths; only their width and depth cost time.
_SPREAD = (0.5, 0.2, 0.1, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01, 0.008)
_WARM_UPS = 2

Progress = Callable[[int, int], None]  # rounds done, rounds in all
Cell = tuple[str, int, int]  # ("verify", context, width) or ("draft", 0, depth)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureGrid:
    """What is timed.

    Attributes:
        widths: verify widths, 1 (plain decoding) always among them.
        contexts: committed tokens in the cache.
        rounds: timings per shape.
        seed: order of shapes.
    """

    widths: tuple[int, ...]
    contexts: tuple[int, ...]
    rounds: int
    seed: int = 0

    @classmethod
    def full(
        cls, *, max_width: int, rounds: int = 9, contexts: tuple[int, ...] = (128, 512), seed: int = 0
    ) -> MeasureGrid:
        """Every width up to the bound."""
        return cls(widths=tuple(range(1, max_width + 1)), contexts=contexts, rounds=rounds, seed=seed)

    @classmethod
    def quick(
        cls, *, max_width: int, rounds: int = 5, contexts: tuple[int, ...] = (64, 256), seed: int = 0
    ) -> MeasureGrid:
        """The widths at which kernels change, and their neighbours."""
        widths = {width for width in EDGE_WIDTHS if width <= max_width} | {1, max_width}
        return cls(widths=tuple(sorted(widths)), contexts=contexts, rounds=rounds, seed=seed)


def measure(
    target: Target,
    heads: DraftHeads,
    grid: MeasureGrid,
    text: Sequence[int],
    *,
    partial: Path | None = None,
    provenance: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> LatencyTable:
    """The latency table of `grid`.

    Args:
        target, heads: as they will serve.
        grid: what to time.
        text: token ids of real text that fill the cache, at least the longest context plus one; repeated if shorter.
        partial: file that keeps finished rounds, so that a killed run continues.
        provenance: recorded in the table.
        progress: called after every round.

    Raises:
        InputError: a context does not fit the target's positions, or `partial` is of another run.
    """
    _require_fit(target, grid)
    bench = _Bench.build(target, heads, grid, text)
    samples = _load_partial(partial, bench.key)
    cells = bench.cells()
    with torch.inference_mode():
        for cell in cells:
            for _ in range(_WARM_UPS):
                bench.time(cell)
        done = min((len(samples.get(_name(cell), ())) for cell in cells if cell not in bench.failed), default=0)
        for number in range(done, grid.rounds):
            order = [cell for cell in cells if cell not in bench.failed]
            random.Random(grid.seed * 1009 + number).shuffle(order)
            for cell in order:
                samples.setdefault(_name(cell), []).append(bench.time(cell))
            if partial:
                write_text(partial, json.dumps({"key": bench.key, "samples": samples}))
            if progress:
                progress(number + 1, grid.rounds)
    if partial:
        partial.unlink(missing_ok=True)
    return _table(bench, samples, provenance or {})


def _table(bench: _Bench, samples: dict[str, list[float | None]], provenance: dict[str, Any]) -> LatencyTable:
    verify: dict[tuple[int, int, int], Timing] = {}
    draft: dict[tuple[int, int], Timing] = {}
    for cell in bench.cells():
        kind, context, size = cell
        timing = _timing([t for t in samples.get(_name(cell), []) if t is not None], failed=cell in bench.failed)
        if kind == "verify":
            verify[1, context, size] = timing
        else:
            draft[1, size] = timing
    return LatencyTable(
        verify=verify,
        draft=draft,
        target=bench.target.identity,
        heads=bench.heads.identity,
        device=device_record(bench.target),
        mode=bench.target.mode,
        attention=bench.target.attention,
        provenance=provenance,
    )


def _timing(times_ms: Sequence[float], *, failed: bool) -> Timing:
    if failed or not times_ms:
        return Timing(median_ms=None, p10_ms=None, p90_ms=None, count=0, status=OUT_OF_MEMORY)
    p10, median, p90 = (round(float(v), 4) for v in np.percentile(times_ms, (10, 50, 90)))
    return Timing(median_ms=median, p10_ms=p10, p90_ms=p90, count=len(times_ms), status=OK)


@dataclass(slots=True)
class _Bench:
    """The decode state at each context and the step of each width, ready to be timed again and again."""

    target: Target
    heads: DraftHeads
    grid: MeasureGrid
    cache: SlotCache
    context: DraftContext
    states: torch.Tensor
    text: torch.Tensor
    steps: dict[int, TreeStep]
    draft_steps: dict[int, TreeStep]
    failed: set[Cell]
    key: str

    @classmethod
    def build(cls, target: Target, heads: DraftHeads, grid: MeasureGrid, text: Sequence[int]) -> _Bench:
        longest = max(grid.contexts)
        filled = torch.tensor((list(text) * (longest // max(len(text), 1) + 2))[: longest + 1], device=target.device)
        cache = target.new_cache(longest + max(grid.widths))
        with torch.inference_mode():
            states = target.hidden_states(filled[None, :-1], cache=cache)[0]
            context = heads.new_context(longest + heads.identity.num_heads)
            context.extend(states[None])
        depth = heads.identity.num_heads
        return cls(
            target=target,
            heads=heads,
            grid=grid,
            cache=cache,
            context=context,
            states=states,
            text=filled,
            steps={width: _step(target, heads, timed_tree(width - 1, depth), longest) for width in grid.widths},
            draft_steps={d: _step(target, heads, _deep_tree(d), longest) for d in range(1, depth + 1)},
            failed=set(),
            key=repr((target.identity, heads.identity, grid, target.attention, target.mode, device_record(target))),
        )

    def cells(self) -> list[Cell]:
        """Every shape, in a fixed order."""
        verify: list[Cell] = [("verify", c, w) for c in self.grid.contexts for w in self.grid.widths]
        return verify + [("draft", 0, depth) for depth in self.draft_steps]

    def time(self, cell: Cell) -> float | None:
        """Milliseconds of one shape, or None where it ran out of memory."""
        kind, context, size = cell
        try:
            if kind == "verify":
                return self._time_verify(self.steps[size], context)
            return self._time_draft(self.draft_steps[size])
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.failed.add(cell)
            gc.collect()
            return None

    def _state(self, context: int) -> DecodeState:
        self.cache.length = context
        self.context.rewind(context - 1)
        return DecodeState(
            root=self.text[context : context + 1],
            fresh=self.states[context - 1 : context],
            cache=self.cache,
            context=self.context,
        )

    def _time_verify(self, step: TreeStep, context: int) -> float:
        state = self._state(context)
        step.draft(state)
        kept = self.cache.storage[..., context : context + step.plan.verify_width, :].clone()
        elapsed = timed_ms(lambda: step.verify(state).tolist(), self.target.device)
        # Put back what the step wrote, so that longer contexts keep their text.
        self.cache.storage[..., context : context + step.plan.verify_width, :] = kept
        return elapsed

    def _time_draft(self, step: TreeStep) -> float:
        state = self._state(max(self.grid.contexts))
        return timed_ms(lambda: step.draft(state), self.target.device)


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device, or torch's allocator on a CPU (which raises a plain RuntimeError), ran out of memory."""
    named = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return named or "can't allocate memory" in str(error)


def timed_ms(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call: device events on a GPU, a monotonic clock elsewhere; synchronised on both ends."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        elapsed: float = start.elapsed_time(end)
        return elapsed
    clock = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - clock)


def timed_tree(num_draft_nodes: int, depth: int) -> Tree:
    """A tree of that many nodes, at most `depth` deep, spread over ranks as a real one is."""
    # Ranks beyond the table come last: without them few heads could not fill a wide tree.
    spread = (*_SPREAD, *(1e-6 * 0.99**rank for rank in range(num_draft_nodes)))
    estimate = independent([spread] * depth, num_draft_nodes)
    return frontier(estimate, num_draft_nodes=num_draft_nodes).tree(num_draft_nodes)


def _deep_tree(depth: int) -> Tree:
    """The smallest tree of that depth that ranks as many candidates as a real one does."""
    wide = tuple((rank,) for rank in range(1, _RANKS_TIMED))
    return Tree(Tree.chain(depth).paths + wide)


def _step(target: Target, heads: DraftHeads, tree: Tree, capacity: int) -> TreeStep:
    plan = plan_tree(tree, capacity=capacity, window=target.window, dtype=target.dtype, device=target.device)
    return new_step(target, heads, plan)


def _require_fit(target: Target, grid: MeasureGrid) -> None:
    limit = target.position_limit
    if 1 not in grid.widths or min(grid.widths) < 1:
        raise InputError("The measured widths must start at 1: width 1 is plain decoding, which every figure needs.")
    if min(grid.contexts) < 1 or (limit is not None and max(grid.contexts) + 16 > limit):
        raise InputError(
            f"The contexts {grid.contexts} must lie between 1 and the target's positions ({limit}) less 16."
        )


def _load_partial(path: Path | None, key: str) -> dict[str, list[float | None]]:
    if path is None or not path.exists():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] != key:
            raise InputError(f"{path} is of a measurement with other settings; delete it or give another --out.")
        samples: dict[str, list[float | None]] = stored["samples"]
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path} is no unfinished measurement; delete it.") from None
    return samples


def _name(cell: Cell) -> str:
    return "-".join(str(part) for part in cell)
