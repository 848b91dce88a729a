"""A step's forward pass as one call of compiled C++: `compiled.cpp`, from embeddings to the output layer's scores.

An eager pass calls some twenty operations a layer between its products, and the products themselves, oneDNN's, do not
fetch weights while they multiply; the C++ does both better for up to 32 rows. It reads weights as plain matrices, so
the layers' weights lie in memory twice, packed for wider and eager passes and plain. One library serves every width
and model. Nothing of torch is compiled along: its stable C interface is handed over as addresses.

Made from `FusedLayer`s, hence Llama-like models in fp32 on a CPU only.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from topo_search.decode.cache import SlotCache
from topo_search.errors import CheckError, InputError
from topo_search.target.adapter import Target
from topo_search.target.fused import FusedLayer, FusedNorm
from topo_search.target.native import loaded_library
from topo_search.target.packing import PackedLinear

SOURCE = Path(__file__).with_name("compiled.cpp")
LANES = 8  # numbers at once in `compiled.cpp`, of which heads must be made
_CHECKED_WIDTHS = (1, 7)
_CHECKED_CONTEXT = 150  # beyond a block of keys
_TOLERANCE = 1e-4  # of the hidden states, relative to the largest
_TORCH_FUNCTIONS = (
    "aoti_torch_cpu__linear_pointwise",
    "aoti_torch_create_tensor_from_blob",
    "aoti_torch_get_data_ptr",
    "aoti_torch_delete_tensor_object",
    "torch_parallel_for",
)

Run = Callable[[Any, Any], int]

_passes: WeakKeyDictionary[nn.Module, CompiledPass] = WeakKeyDictionary()


class _Torch(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_void_p) for name in _TORCH_FUNCTIONS), ("float32", ctypes.c_int32))


class _Linear(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "packed_bias", "weight", "bias")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Linear) for name in ("qkv", "output", "gate_up", "down")),
        *((f"{name}_norm", ctypes.c_void_p) for name in ("input", "output", "query", "key")),
        *((f"{name}_epsilon", ctypes.c_float) for name in ("input", "output", "query", "key")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("torch", _Torch),
        ("layers", ctypes.POINTER(_Layer)),
        ("output", _Linear),
        ("norm", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "hidden", "heads", "kv_heads", "head_dim", "inner")),
        ("epsilon", ctypes.c_float),
        ("scaling", ctypes.c_float),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("width", "length", "capacity", "mask_stride")),
        *((name, ctypes.c_void_p) for name in ("embedded", "cos", "sin", "mask", "cache", "states", "scores")),
    )


class CompiledPass:
    """The compiled pass of one target; `prepare` compiles, nothing else does."""

    def __init__(self, target: Target) -> None:
        body: Any = target.body
        self._layers: list[FusedLayer] = list(body.layers)
        self._norm: FusedNorm = body.norm
        self._embeddings: Tensor = target.input_embeddings.weight  # type: ignore[assignment]
        self._output: PackedLinear = target.output_layer  # type: ignore[assignment]
        self._rotary: nn.Module = body.rotary_emb.rotary
        self._run: Run | None = None
        self._model: _Model | None = None
        self.is_ready = False  # whether it is compiled and was compared with the target's own pass

    def prepare(self, target: Target, *, run: Run | None = None) -> None:
        """Compile the pass, if it is not yet, and compare it with the target's own; `run` may stand in for it.

        Raises:
            InputError: the compiler failed, or this torch lacks what the pass calls.
            CheckError: the compiled pass computes something else.
        """
        if self.is_ready:
            return
        self._run = run or loaded_library(SOURCE).topo_search_pass
        self._model = self._model or _described(self, self._layers, self._norm, self._output)
        for width in _CHECKED_WIDTHS:
            self._check(target, width)
        self.is_ready = True

    def __call__(
        self,
        input_ids: Int[Tensor, "1 width"],
        positions: Int[Tensor, "1 width"],
        mask: Float[Tensor, "1 1 width seen"],
        cache: SlotCache,
    ) -> tuple[Float[Tensor, "1 width hidden"], Float[Tensor, "1 width vocab"]]:
        """Final hidden states and the output layer's scores of a step's tokens, written behind the committed ones.

        Raises:
            CheckError: torch refused an operation.
        """
        assert self._run is not None and self._model is not None
        width = input_ids.shape[1]
        if cache.length + width > cache.capacity or mask.stride(3) != 1:
            raise CheckError(f"A cache of {cache.capacity} tokens cannot take {width} behind {cache.length}.")
        embedded = functional.embedding(input_ids, self._embeddings)
        cos, sin = self._rotary(embedded, position_ids=positions)  # of the first it reads the type only
        half = cos.shape[-1] // 2
        cos, sin = cos[..., :half].contiguous(), sin[..., :half].contiguous()
        states, scores = torch.empty_like(embedded), embedded.new_empty(1, width, self._output.out_features)
        tensors = (embedded, cos, sin, mask, cache.storage, states, scores)
        addresses = (tensor.data_ptr() for tensor in tensors)
        step = _Step(width, cache.length, cache.capacity, mask.stride(2), *addresses)
        if not self._run(ctypes.byref(self._model), ctypes.byref(step)):
            raise CheckError("torch refused an operation of the compiled step; use --mode eager or auto.")
        return states, scores

    def _check(self, target: Target, width: int) -> None:
        """One step of a chain behind some context, by both passes.

        Raises:
            CheckError: the compiled pass computes something else.
        """
        context = min(_CHECKED_CONTEXT, (target.position_limit or _CHECKED_CONTEXT + width) - width)
        cache = target.new_cache(context + width)
        ids = (torch.arange(context + width) * 7919 + 11) % target.known_ids
        positions = torch.arange(context, context + width)[None]
        mask = torch.full((width, context + width), torch.finfo(target.dtype).min).triu(context + 1)[None, None]
        with torch.inference_mode():
            target.hidden_states(ids[None, :context], cache=cache)
            cache.commit(context)
            last = ids[None, context:]
            expected = target.hidden_states(last, cache=cache, position_ids=positions, attention_mask=mask)
            found, _ = self(last, positions, mask, cache)
        if not bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max()):
            raise CheckError("The compiled step computes something else than the eager one; use --mode eager or auto.")


def compiled_pass(target: Target) -> CompiledPass:
    """The one pass of a target's model, whether it is compiled yet or not."""
    found = _passes.get(target.model)
    if found is None:
        found = _passes[target.model] = CompiledPass(target)
    return found


def _described(owner: object, layers: Sequence[FusedLayer], norm: FusedNorm, output: PackedLinear) -> _Model:
    """The model as the library reads it; what is made of torch's tensors for it is given back with `owner`."""
    torch_functions = _torch_functions()
    handles = _Handles(torch_functions.aoti_torch_delete_tensor_object)
    first = layers[0]
    described = (_Layer * len(layers))()
    for layer, place in zip(layers, described, strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            setattr(place, name, handles.linear(getattr(layer, name)))
        norms = {"input": layer.input_norm, "output": layer.post_attention_norm}
        if layer.head_norms is not None:
            norms |= dict(zip(("query", "key"), layer.head_norms, strict=True))  # type: ignore[arg-type]
        for name, found in norms.items():
            setattr(place, f"{name}_norm", found.weight.data_ptr())
            setattr(place, f"{name}_epsilon", found.epsilon)
    weakref.finalize(owner, handles.release)
    return _Model(
        torch=torch_functions,
        layers=described,
        output=handles.linear(output),
        norm=norm.weight.data_ptr(),
        count=len(layers),
        hidden=norm.weight.numel(),
        heads=first.heads,
        kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        inner=first.down.in_features,
        epsilon=norm.epsilon,
        scaling=first.scaling,
    )


def _torch_functions() -> _Torch:
    """Addresses of torch's stable C interface.

    Raises:
        InputError: this build lacks some of it.
    """
    functions = _Torch()
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        for name in _TORCH_FUNCTIONS:
            setattr(functions, name, ctypes.cast(getattr(library, name), ctypes.c_void_p))
        functions.float32 = library.aoti_torch_dtype_float32()
    except (OSError, AttributeError) as error:
        raise InputError(
            f"Mode compiled calls what torch {torch.__version__} lacks ({error}); use --mode eager or auto."
        ) from None
    return functions


class _Handles:
    """What the library reads of tensors, which are kept alive until it is released."""

    def __init__(self, release: int) -> None:
        self._release = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(release)
        self._handles: list[int] = []
        self._plain: list[Tensor] = []

    def linear(self, linear: PackedLinear) -> _Linear:
        """A product's weight and bias, packed and plain."""
        weight = linear.packed.to_dense() if linear.weight is None else linear.weight.detach().contiguous()
        self._plain.append(weight)
        bias = linear.bias
        return _Linear(
            packed=self._handle(linear.packed),
            packed_bias=None if bias is None else self._handle(bias),
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            inputs=linear.in_features,
            outputs=linear.out_features,
        )

    def release(self) -> None:
        """Give all back."""
        while self._handles:
            self._release(self._handles.pop())
        self._plain.clear()

    def _handle(self, tensor: Tensor) -> int:
        """The tensor as torch's C interface names it."""
        found: int = _address(torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([tensor])[0], None)
        self._handles.append(found)
        return found


_address: Any = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
