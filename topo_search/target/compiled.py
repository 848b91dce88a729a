"""A step's forward pass through `torch.compile`: one graph from token ids to the output layer's scores.

The packed products and attention over the cache are opaque calls in it, so weights stay packed once for all modes, no
cache is traced, and a graph depends on nothing but its width: one serves every width from 2 on, a second width 1, which
torch specialises (plain decoding padded to two rows would pay for a step of width 2, always). What lies between the
calls (norms, rotary angles, the gate) becomes one kernel each. Without inductor's freezing torch keeps what it
compiled on disk, so only the first process on a machine pays for the kernels.

Made from `FusedLayer`s, hence Llama-like models in fp32 on a CPU only. Functions that torch traces carry
`no_type_check`: shape checks, which tests switch on, cannot be traced.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, no_type_check
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache

from topo_search.errors import CheckError, InputError
from topo_search.target.adapter import Target
from topo_search.target.attention import folded_mask
from topo_search.target.fused import FusedLayer, FusedNorm

_TRACED_WIDTH = 4  # any from 2 on; the graph's width is symbolic
_CHECKED_CONTEXT = 6
_TOLERANCE = 1e-4  # of the hidden states, relative to the largest

Backend = str | Callable[..., Any]

_library = torch.library.Library("topo_search", "DEF")
_library.define("product(Tensor inputs, int module) -> Tensor")
_library.define("product_plus(Tensor inputs, Tensor residual, int module) -> Tensor")
_library.define("attend(Tensor turned, Tensor values, Tensor residual, int layer) -> Tensor")
_modules: dict[int, Any] = {}  # a graph names modules by number; weak values would cost every call microseconds
_counter = itertools.count()
_numbers: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_passes: WeakKeyDictionary[nn.Module, CompiledPass] = WeakKeyDictionary()


@dataclass(slots=True)
class _Step:
    """What attention reads in the pass that runs and a graph does not name."""

    cache: Cache | None = None
    mask: Tensor | None = None


_step = _Step()


class CompiledPass:
    """The compiled pass of one target; `prepare` compiles, nothing else does."""

    def __init__(self, target: Target, *, backend: Backend = "inductor") -> None:
        body: Any = target.body
        self._layers: list[FusedLayer] = list(body.layers)
        self._embeddings: Tensor = target.input_embeddings.weight  # type: ignore[assignment]
        self._norm: FusedNorm = body.norm
        self._output = target.output_layer
        self._rotary: nn.Module = body.rotary_emb.rotary
        self._call = torch.compile(self._states_and_scores, fullgraph=True, backend=backend)
        self._ready: set[bool] = set()  # whether width 1 and whether widths above it are compiled

    def is_ready(self, width: int) -> bool:
        """Whether a pass of that width is compiled."""
        return (width == 1) in self._ready

    def prepare(self, target: Target, width: int) -> None:
        """Compile the pass for `width`, if it is not yet, and compare it with the target's own.

        Raises:
            InputError: the compiler failed.
            CheckError: the compiled pass computes something else.
        """
        if self.is_ready(width):
            return
        width = min(width, _TRACED_WIDTH)
        cache = target.new_cache(_CHECKED_CONTEXT + width)
        ids = (torch.arange(_CHECKED_CONTEXT + width, device=target.device) * 7919 + 11) % target.known_ids
        with torch.inference_mode(mode=False):  # as the buffers of steps: torch would compile again for another kind
            last = torch.zeros(1, width, dtype=torch.long, device=target.device)
            last[0] = ids[_CHECKED_CONTEXT:]
        positions = torch.arange(_CHECKED_CONTEXT, _CHECKED_CONTEXT + width, device=target.device)[None]
        mask = torch.zeros(1, 1, width, _CHECKED_CONTEXT + width, dtype=target.dtype, device=target.device)
        with torch.inference_mode():
            target.hidden_states(ids[None, :_CHECKED_CONTEXT], cache=cache)
            cache.commit(_CHECKED_CONTEXT)
            expected = target.hidden_states(last, cache=cache, position_ids=positions, attention_mask=mask)
            try:
                found, _ = self(last, positions, mask, cache)
            except RuntimeError as error:  # torch wraps whatever the compiler said
                said = " ".join(str(error).split()[:30])
                raise InputError(f"torch.compile failed here: {said}. Use --mode eager or auto.") from error
        if not bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max()):
            raise CheckError("The compiled step computes something else than the eager one; use --mode eager or auto.")
        self._ready.add(width == 1)

    def __call__(
        self,
        input_ids: Int[Tensor, "1 width"],
        positions: Int[Tensor, "1 width"],
        mask: Float[Tensor, "1 1 width seen"],
        cache: Cache,
    ) -> tuple[Float[Tensor, "1 width hidden"], Float[Tensor, "1 width vocab"]]:
        """Final hidden states and the output layer's scores of a step's tokens."""
        cos, sin = self._rotary(self._embeddings, position_ids=positions)  # of the first it reads the type only
        half = cos.shape[-1] // 2
        angles = torch.stack([cos[..., None, :half], sin[..., None, :half]])
        if input_ids.shape[1] > 1:
            torch._dynamo.mark_dynamic(input_ids, 1)
            torch._dynamo.mark_dynamic(angles, 2)
        with _reading(cache, folded_mask(mask, self._layers[0].num_key_value_groups)):
            states, scores = self._call(input_ids, angles)
        return states, scores

    @no_type_check
    def _states_and_scores(
        self, input_ids: Int[Tensor, "1 width"], angles: Float[Tensor, "2 1 width 1 half"]
    ) -> tuple[Tensor, Tensor]:
        hidden = functional.embedding(input_ids, self._embeddings)
        for layer in self._layers:
            hidden = _through(layer, hidden, angles)
        hidden = _normed(self._norm, hidden)
        return hidden, _product(self._output, hidden)


def compiled_pass(target: Target, *, backend: Backend = "inductor") -> CompiledPass:
    """The one pass of a target's model, whatever is compiled of it so far."""
    found = _passes.get(target.model)
    if found is None:
        found = _passes[target.model] = CompiledPass(target, backend=backend)
    return found


@no_type_check
def _through(layer: FusedLayer, hidden: Tensor, angles: Tensor) -> Tensor:
    """`FusedLayer.forward`, in real numbers."""
    batch, width, _ = hidden.shape
    rotated = layer.heads + layer.kv_heads
    projected = _product(layer.qkv, _normed(layer.input_norm, hidden)).view(batch, width, -1, layer.head_dim)
    turned = projected[:, :, :rotated]
    if layer.head_norms is not None:
        parts = (turned[:, :, : layer.heads], turned[:, :, layer.heads :])
        turned = torch.cat([_normed(norm, part) for norm, part in zip(layer.head_norms, parts, strict=True)], dim=2)
    pairs = turned.unflatten(-1, (-1, 2))
    first, second = pairs[..., 0], pairs[..., 1]
    cos, sin = angles[0], angles[1]
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2)
    hidden = torch.ops.topo_search.attend(turned, projected[:, :, rotated:], hidden, _number(layer))
    gate, up = _product(layer.gate_up, _normed(layer.post_attention_norm, hidden)).chunk(2, dim=-1)
    result: Tensor = torch.ops.topo_search.product_plus(functional.silu(gate) * up, hidden, _number(layer.down))
    return result


@no_type_check
def _normed(norm: Any, inputs: Tensor) -> Tensor:
    scale = torch.rsqrt(inputs.square().mean(-1, keepdim=True) + norm.epsilon)
    scaled: Tensor = inputs * scale * norm.weight
    return scaled


@no_type_check
def _product(linear: Any, inputs: Tensor) -> Tensor:
    result: Tensor = torch.ops.topo_search.product(inputs, _number(linear))
    return result


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _number(module: nn.Module) -> int:
    if module not in _numbers:
        number = next(_counter)
        _numbers[module], _modules[number] = number, weakref.proxy(module)
        weakref.finalize(module, _modules.pop, number)
    return _numbers[module]


@contextmanager
def _reading(cache: Cache, mask: Tensor) -> Iterator[None]:
    _step.cache, _step.mask = cache, mask
    try:
        yield
    finally:
        _step.cache = _step.mask = None


def _run_product(inputs: Tensor, module: int) -> Tensor:
    result: Tensor = _modules[module](inputs)
    return result


def _run_product_plus(inputs: Tensor, residual: Tensor, module: int) -> Tensor:
    result: Tensor = _modules[module].plus(inputs, residual)
    return result


def _run_attend(turned: Tensor, values: Tensor, residual: Tensor, layer: int) -> Tensor:
    """Write keys and values, attend, and project; `turned` holds queries and keys."""
    assert _step.cache is not None
    attending: FusedLayer = _modules[layer]
    return attending.attend(turned, values, residual, _step.mask, _step.cache)


def _like_product(inputs: Tensor, module: int) -> Tensor:
    return inputs.new_empty(*inputs.shape[:-1], _modules[module].out_features)


def _like_residual(_first: Tensor, *rest: Any) -> Tensor:
    residual: Tensor = rest[-2]
    return torch.empty_like(residual, memory_format=torch.contiguous_format)


for _name, _run, _shape in (
    ("product", _run_product, _like_product),
    ("product_plus", _run_product_plus, _like_residual),
    ("attend", _run_attend, _like_residual),
):
    _library.impl(_name, _run, "CPU")
    torch.library.register_fake(f"topo_search::{_name}", _shape)
