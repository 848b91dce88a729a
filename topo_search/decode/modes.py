"""Execution modes of the step: `eager`, `compiled`, and `graph` for CUDA graphs that are captured once and replayed.

`compiled` runs the target's pass as one call of C++ on a CPU (`target.compiled`). Heads stay outside: most of
what they cost is a product with the vocabulary, and their ranking reads back whether a tie matters. A step compiles
nothing unless it was prepared; one that was not runs as `eager`.

A graph replays kernels at the addresses and shapes of its capture, so its step works on fixed buffers: keys are written
at slots read from a tensor, and attention covers a context rounded up to a bucket, whose surplus the mask hides. Each
(cache, bucket) is captured once, before anything is timed. What a sequence decides (which path was accepted, the state
that heads keep) stays outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from topo_search.decode.cache import SlotCache
from topo_search.decode.plan import TreePlan
from topo_search.decode.step import DecodeState, TreeStep
from topo_search.errors import InputError
from topo_search.heads.base import DraftHeads
from topo_search.target.adapter import COMPILED, EAGER, GRAPH, Target
from topo_search.target.compiled import LANES, compiled_pass
from topo_search.target.native import require_compiler

AUTO = "auto"
MODES = (AUTO, EAGER, COMPILED, GRAPH)
COMPILING_COSTS = (
    "a C++ compiler makes the pass of a step before anything is timed or written, which takes some seconds the first "
    "time on a machine and is kept in the user's cache folder; the layers' weights then lie in memory twice"
)
CONTEXT_BUCKET = 256  # tokens; attention over the surplus costs less than a capture per length would
_WARM_UPS = 3

Replay = Callable[[], object]
Capture = Callable[[Callable[[], Sequence[Tensor]]], tuple[Replay, Sequence[Tensor]]]


def ready_mode(asked: str, device: str) -> str:
    """The mode that `asked` means on a device; `auto` takes the fastest that needs no compilation.

    Raises:
        InputError: there is no such mode, or it cannot run on the device.
    """
    kind = device.split(":", 1)[0]
    if asked == AUTO:
        return GRAPH if kind == "cuda" else EAGER
    if asked not in MODES:
        raise InputError(f"Unknown mode {asked!r}; choose one of {', '.join(MODES)}.")
    if asked == GRAPH and kind != "cuda":
        raise InputError(f"Mode graph replays CUDA graphs, which device {device} has not; use --mode eager or auto.")
    if asked == COMPILED:
        if kind != "cpu":
            raise InputError(f"Mode compiled is for a CPU, not for device {device}; use --mode graph, eager or auto.")
        require_compiler()
    return asked


def in_mode(target: Target, mode: str, *, say: Callable[[str], object]) -> Target:
    """The target, decoding in a mode that `ready_mode` gave; `say` is told beforehand what a compilation costs.

    Raises:
        InputError: it cannot be compiled.
    """
    if mode == COMPILED:
        _require_compilable(target)
        say(f"Mode compiled: {COMPILING_COSTS}.")
    return replace(target, mode=mode)


def _require_compilable(target: Target) -> None:
    """Refuse a target whose layers are not `FusedLayer`s, or not such as the compiled pass knows.

    Raises:
        InputError: says what can be compiled.
    """
    head_dim = target.kv_shape[2]
    why = None
    if not target.is_fused:
        why = "for Llama-like models in fp32 on a CPU, whose layers are fused"
    elif target.mixes_layer_types:
        why = "for models whose layers all see the same, and some layers of this one have a window"
    elif head_dim % LANES:
        why = f"for heads of a multiple of {LANES} numbers, not of {head_dim}"
    if why is not None:
        raise InputError(
            f"Mode compiled is {why}; {target.identity.name} in {target.identity.dtype} is no such target. Use "
            "--mode eager or auto."
        )


def new_step(target: Target, heads: DraftHeads | None, plan: TreePlan) -> TreeStep:
    """The step of a plan in the target's mode."""
    if target.mode == GRAPH:
        return GraphStep(target, heads, plan)
    return CompiledStep(target, heads, plan) if target.mode == COMPILED else TreeStep(target, heads, plan)


class CompiledStep(TreeStep):
    """The step of one tree, its pass compiled once that is prepared."""

    def __init__(self, target: Target, heads: DraftHeads | None, plan: TreePlan) -> None:
        super().__init__(target, heads, plan)
        self._compiled = compiled_pass(target)

    def prepare(self, cache: SlotCache) -> None:
        """Compile the pass, if no step has yet.

        Raises:
            InputError: the compiler failed.
            CheckError: the compiled pass computes something else.
        """
        del cache
        self._compiled.prepare(self.target)

    def tree_scores(self, cache: SlotCache) -> tuple[Float[Tensor, "width hidden"], Float[Tensor, "width vocab"]]:
        """See `TreeStep`."""
        if not self._compiled.is_ready:
            return super().tree_scores(cache)
        torch.add(self.plan.offsets, cache.length, out=self.positions)
        mask = self.plan.mask_at(cache.length, windowed=True)
        states, scores = self._compiled(self.input_ids, self.positions, mask, cache)
        return states[0], self.target.logits_of(scores[0])


def cuda_capture(call: Callable[[], Sequence[Tensor]]) -> tuple[Replay, Sequence[Tensor]]:
    """Capture a call as a CUDA graph: what replays it, and the tensors that then hold its results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph.replay, results


class GraphStep(TreeStep):
    """The step of one tree, replayed from graphs; `capture` may be replaced where there is no GPU."""

    def __init__(
        self, target: Target, heads: DraftHeads | None, plan: TreePlan, *, capture: Capture = cuda_capture
    ) -> None:
        super().__init__(target, heads, plan)
        self._capture = capture
        self._verified: dict[tuple[int, int], _Verified] = {}
        self._drafted: _Drafted | None = None

    def prepare(self, cache: SlotCache) -> None:
        """Capture every bucket of `cache`, so that no answer waits for one."""
        seen = self.plan.verify_width
        while seen <= cache.capacity:
            self._bucket(cache, seen)
            seen = self._rounded(cache, seen) + 1

    def draft(self, state: DecodeState) -> None:
        """See `TreeStep`; noise is drawn anew each step, so with noise candidates are drafted eagerly."""
        if not self.plan.tree.paths or self._noise(state) is not None:
            super().draft(state)
            return
        assert self.heads is not None and state.context is not None
        features = state.context.extend(state.fresh[None], state.following[None])
        if self._drafted is None:
            self._drafted = _Drafted.captured(self.heads, self.plan, features, state.root, self._capture)
        self.input_ids[0, :1] = state.root
        self.input_ids[:, 1:] = self._drafted.at(features, state.root)

    def tree_scores(self, cache: SlotCache) -> tuple[Float[Tensor, "width hidden"], Float[Tensor, "width vocab"]]:
        """See `TreeStep`; the results are overwritten by the next step."""
        verified = self._bucket(cache, cache.length + self.plan.verify_width)
        self._fill(verified.buffers, cache.length)
        verified.replay()
        return verified.hidden, verified.scores

    def _rounded(self, cache: SlotCache, seen: int) -> int:
        return min(math.ceil(seen / CONTEXT_BUCKET) * CONTEXT_BUCKET, cache.capacity)

    def _bucket(self, cache: SlotCache, seen: int) -> _Verified:
        key = (cache.storage.data_ptr(), self._rounded(cache, seen))
        if key not in self._verified:
            buffers = _Buffers.of(self, cache, key[1])
            self._fill(buffers, max(0, min(cache.length, key[1] - self.plan.verify_width)))
            replay, (hidden, scores) = self._capture(lambda: self._run(buffers))
            self._verified[key] = _Verified(buffers=buffers, replay=replay, hidden=hidden, scores=scores)
        return self._verified[key]

    def _fill(self, buffers: _Buffers, length: int) -> None:
        """Set positions, slots and masks to `length` committed tokens, in place."""
        width = self.plan.verify_width
        torch.add(self.plan.offsets, length, out=self.positions)
        torch.add(buffers.order, length, out=buffers.cache.slots)
        for mask, windowed in ((buffers.full, False), (buffers.windowed, True)):
            mask.fill_(torch.finfo(mask.dtype).min)
            mask[..., : length + width] = self.plan.mask_at(length, windowed=windowed)

    def _run(self, buffers: _Buffers) -> tuple[Tensor, Tensor]:
        mask: Any = buffers.windowed
        if self.target.mixes_layer_types:
            mask = {"full_attention": buffers.full, "sliding_attention": buffers.windowed}
        states = self.target.hidden_states(
            self.input_ids, cache=buffers.cache, position_ids=self.positions, attention_mask=mask
        )
        return states[0], self.target.logits(states[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffers:
    """What a captured forward pass reads beside the step's own tokens and positions."""

    cache: FixedCache
    order: Int[Tensor, " width"]
    full: Float[Tensor, "1 1 width seen"]
    windowed: Float[Tensor, "1 1 width seen"]

    @classmethod
    def of(cls, step: GraphStep, cache: SlotCache, seen: int) -> _Buffers:
        width = step.plan.verify_width
        order = torch.arange(width, device=cache.storage.device)
        full, windowed = (torch.empty(1, 1, width, seen, dtype=step.plan.full_mask.dtype, device=order.device),) * 2
        if step.target.mixes_layer_types:
            windowed = torch.empty_like(full)
        return cls(cache=FixedCache(cache.storage, order.clone(), seen), order=order, full=full, windowed=windowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verified:
    """A captured forward pass over the tree, with where it leaves its results."""

    buffers: _Buffers
    replay: Replay
    hidden: Float[Tensor, "width hidden"]
    scores: Float[Tensor, "width vocab"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drafted:
    """A captured draft, with what it reads and where it leaves its tokens."""

    features: Float[Tensor, "1 hidden"]
    root: Int[Tensor, " one"]
    replay: Replay
    tokens: Int[Tensor, "1 nodes"]

    @classmethod
    def captured(cls, heads: DraftHeads, plan: TreePlan, features: Tensor, root: Tensor, capture: Capture) -> _Drafted:
        kept_features, kept_root = features.clone(), root.clone()
        replay, (tokens,) = capture(lambda: (heads.propose(kept_features, kept_root, plan),))
        return cls(features=kept_features, root=kept_root, replay=replay, tokens=tokens)

    def at(self, features: Tensor, root: Tensor) -> Tensor:
        """The tokens drafted after `root`."""
        self.features.copy_(features)
        self.root.copy_(root)
        self.replay()
        return self.tokens


class FixedCache(Cache):
    """A `SlotCache`'s storage, written at the slots that a tensor holds and read up to a fixed length."""

    def __init__(self, storage: Tensor, slots: Int[Tensor, " width"], seen: int) -> None:
        self.slots, self.seen = slots, seen
        super().__init__(layers=[_FixedLayer(storage[index], slots, seen) for index in range(storage.shape[0])])


class _FixedLayer(CacheLayerMixin):
    """One layer's view of a `FixedCache`, in the form transformers' attention modules call."""

    is_sliding = False

    def __init__(self, storage: Tensor, slots: Tensor, seen: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values = storage[0], storage[1]
        self._slots, self._seen = slots, seen
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the storage exists from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new tokens at the slots and return views of all."""
        assert self.keys is not None and self.values is not None
        self.keys.index_copy_(2, self._slots, key_states)
        self.values.index_copy_(2, self._slots, value_states)
        return self.keys[:, :, : self._seen], self.values[:, :, : self._seen]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask must cover."""
        del query_length
        return self._seen, 0

    def get_seq_length(self) -> int:
        """Tokens before the ones being written; the mask, not this number, says what is seen."""
        return self._seen - len(self._slots)

    def get_max_length(self) -> int:
        """Slots that are read."""
        return self._seen

    get_max_cache_shape = get_max_length  # the name before transformers 5.20
