"""Load a target from a hub name, a folder, a `.gguf` file or `demo`, and refuse by name what trees cannot serve."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from topo_search.errors import InputError
from topo_search.identity import TargetIdentity
from topo_search.target.adapter import Target, cache_argument
from topo_search.target.attention import GROUPED, suited_attention
from topo_search.target.fingerprint import weights_fingerprint
from topo_search.target.fused import fuse_layers
from topo_search.target.gguf import converted_folder, demo_gguf
from topo_search.target.packing import pack_linears
from topo_search.target.quantization import known_quantization, quantization_of, torchao_settings

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_MASKED_ATTENTION = (GROUPED, "sdpa", "eager")
_SANE_TEXT = "The capital of France is Paris. The sun rises in the east and sets in the west."
_SANE_LOSS_SHARE = 0.6  # of log(vocabulary); a trained model stays below half, uniform logits reach 1


def load_target(
    spec: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    attention: str = "auto",
    tokenizer: str | None = None,
    quantize: str | None = None,
    pack: bool = True,
) -> Target:
    """The target that `spec` names, ready for tree decoding.

    Args:
        spec: a hub name, a folder, a `.gguf` file, or `demo`.
        dtype: one of `DTYPES`.
        device: a torch device, e.g. `cpu` or `cuda`.
        attention: `grouped`, `sdpa` or `eager`; the others take no 4-D mask. `auto` takes `eager` where attention
            scores are soft-capped, `grouped` where queries share key-value heads, else `sdpa`.
        tokenizer: a hub name or folder whose tokenizer replaces the model's own.
        quantize: `int8` or `int4` weights by torchao, output layer and embeddings excepted; the unquantised model is
            loaded first, in bf16, since its fingerprint and shape are needed.
        pack: pack fp32 linear weights for oneDNN on a CPU.

    Raises:
        InputError: the model is missing, unreadable, not decoder-only, cannot take a 4-D mask, or cannot be quantised.
    """
    torch_dtype, torch_device = known_dtype(dtype), _usable_device(device)
    quantize = known_quantization(quantize, dtype=dtype, device=device)
    if attention != "auto":
        _require_masked(attention)
    source, note = _resolve(spec)
    fingerprint, settings = None, None
    if quantize is not None:
        whole = _load_model(source, spec, torch.bfloat16, attention, torch.device("cpu"))
        fingerprint, settings = weights_fingerprint(whole), torchao_settings(quantize, whole, spec)
        del whole
    model = _load_model(source, spec, torch_dtype, attention, torch_device, settings)
    text_tokenizer = _load_tokenizer(tokenizer or source, tokenizer or spec)
    if note is not None:
        require_sane(model, text_tokenizer, spec)
    if quantize is not None:
        note = f"{quantize} weights made by torchao" + (" from a dense copy of the GGUF" if note else "")
    return make_target(model, text_tokenizer, name=spec, dtype=dtype, note=note, fingerprint=fingerprint, pack=pack)


def make_target(
    model: Any,
    tokenizer: Any,
    *,
    name: str,
    dtype: str,
    note: str | None = None,
    fingerprint: str | None = None,
    pack: bool = True,
) -> Target:
    """Wrap a model that is already in memory; `fingerprint` is of the weights before they were quantised, if they were.

    Raises:
        InputError: the model is not decoder-only, or its cache or mask cannot serve trees.
    """
    _require_masked(model.config._attn_implementation)
    model.eval().requires_grad_(False)
    kv_shape = _kv_shape(model, name)
    config = model.config.get_text_config()
    identity = TargetIdentity(
        name=name,
        fingerprint=fingerprint or weights_fingerprint(model),
        dtype=dtype,
        quantization=quantization_of(model.config),
    )
    if pack:
        fuse_layers(model)
    packed = pack and pack_linears(model, output_layer=model.get_output_embeddings()) > 0
    return Target(
        model=model,
        tokenizer=tokenizer,
        identity=identity,
        eos_token_ids=eos_token_ids(model),
        window=_window(config),
        mixes_layer_types=_mixes_layer_types(config),
        position_limit=_position_limit(config),
        known_ids=_known_ids(config, tokenizer),
        kv_shape=kv_shape,
        packed=packed,
        note=note,
        logit_scale=_logit_scale(config),
        logit_cap=getattr(config, "final_logit_softcapping", None),
    )


def eos_token_ids(model: Any) -> tuple[int, ...]:
    """Every end-of-text id that the model's generation settings name."""
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    if ids is None:
        return ()
    return tuple(int(i) for i in ids) if isinstance(ids, list | tuple) else (int(ids),)


def known_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of that name.

    Raises:
        InputError: it is none of `DTYPES`.
    """
    if dtype not in DTYPES:
        raise InputError(f"Unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}.")
    return DTYPES[dtype]


def require_sane(model: nn.Module, tokenizer: Any, name: str) -> None:
    """Refuse weights that lost something on the way: their loss on plain text is near that of guessing.

    Raises:
        InputError: the loss is above 0.6 of log(vocabulary).
    """
    ids = tokenizer(_SANE_TEXT, return_tensors="pt").input_ids.to(next(model.parameters()).device)
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, :-1].float()
    loss = nn.functional.cross_entropy(logits, ids[0, 1:]).item()
    guess = math.log(logits.shape[-1])
    if not loss < _SANE_LOSS_SHARE * guess:
        raise InputError(
            f"{name} predicts plain English no better than chance (loss {loss:.2f}, guessing gives {guess:.2f}): "
            "tensors were dropped or misread. Use another file of this model."
        )


def _usable_device(device: str) -> torch.device:
    try:
        torch.empty(0, device=device)
        return torch.device(device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"Device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None


def _require_masked(attention: str) -> None:
    if attention not in _MASKED_ATTENTION:
        raise InputError(
            f"Attention {attention!r} takes no 4-D tree mask; choose one of auto, {', '.join(_MASKED_ATTENTION)}."
        )


def _resolve(spec: str) -> tuple[str, str | None]:
    """Where transformers finds the model, and what to note about its weights."""
    dense = "de-quantised from GGUF: a dense fp32 copy, so its latency is not the quantised model's"
    if spec == "demo":
        return str(converted_folder(demo_gguf())), dense
    path = Path(spec)
    if spec.endswith(".gguf"):
        if not path.is_file():
            raise InputError(f"Target file {spec} does not exist.")
        return str(converted_folder(path)), dense
    if path.exists() or spec.startswith((".", "/", "~")) or spec.count("/") > 1:
        if not path.is_dir():
            raise InputError(f"Target folder {spec} does not exist; give a folder, a .gguf file, a hub name or demo.")
        if not (path / "config.json").is_file():
            raise InputError(f"Target folder {spec} has no config.json, so it holds no transformers model.")
    return spec, None


def _load_model(
    source: str, spec: str, dtype: torch.dtype, attention: str, device: torch.device, quantization: Any = None
) -> Any:
    """The model on its device; a quantised one cannot be moved there later, so that transformers places it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(source)
        if getattr(config, "is_encoder_decoder", False):
            raise InputError(f"{spec} is an encoder-decoder ({config.model_type}); trees need a decoder-only model.")
        chosen = suited_attention(config.get_text_config()) if attention == "auto" else attention
        placed: dict[str, Any] = {}
        if quantization is not None or quantization_of(config) is not None:
            placed = {"device_map": {"": device}}
            if quantization is not None:
                placed["quantization_config"] = quantization
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, attn_implementation=chosen, use_safetensors=True, **placed
        )
        return model if placed else model.to(device)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"Target {spec} cannot be loaded as a decoder-only model: {first_line}") from None


def _load_tokenizer(source: str, spec: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise InputError(f"No tokenizer in {spec}: {first_line} Name one with --tokenizer.") from None


def _kv_shape(model: Any, name: str) -> tuple[int, int, int]:
    """Layers, key-value heads and head dimension, read from the cache that the model itself fills."""
    from transformers.cache_utils import DynamicCache

    body = model.base_model
    cache = DynamicCache(config=model.config)
    ids = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    try:
        with torch.inference_mode():
            body(input_ids=ids, use_cache=True, **{cache_argument(body): cache})
        layers: list[Any] = list(cache.layers)
        shapes = {tuple(part.shape) for layer in layers for part in (layer.keys, layer.values)}
    except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
        raise InputError(
            f"{name} ({model.config.model_type}) fills no key-value cache that trees can use: {error}"
        ) from None
    if len(shapes) != 1 or len(next(iter(shapes))) != 4:
        raise InputError(
            f"{name} ({model.config.model_type}) has layers whose caches differ ({sorted(shapes)}); "
            "trees need the same key-value shape in every layer."
        )
    _, kv_heads, _, head_dim = next(iter(shapes))
    return len(cache.layers), kv_heads, head_dim


def _known_ids(config: Any, tokenizer: Any) -> int:
    """One more than the largest id that the tokenizer knows; it may leave ids below that out."""
    if tokenizer is None:
        return int(config.vocab_size)
    largest: int = max(tokenizer.get_vocab().values())
    return min(int(config.vocab_size), 1 + largest)


def _logit_scale(config: Any) -> float:
    """What the model multiplies its output layer's scores by (Cohere), or divides by (Granite)."""
    factor, divisor = (getattr(config, name, None) for name in ("logit_scale", "logits_scaling"))
    scale = float(factor) if isinstance(factor, int | float) and factor else 1.0
    return scale / float(divisor) if isinstance(divisor, int | float) and divisor else scale


def _position_limit(config: Any) -> int | None:
    """Positions the model has, or those before `longrope` turns every angle anew, the cached ones excepted."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict)]  # one, or one per layer type
    switches = [k["original_max_position_embeddings"] for k in kinds if k.get("rope_type") == "longrope"]
    limit = getattr(config, "max_position_embeddings", None)
    return min([*switches, *([] if limit is None else [limit])], default=None)


def _window(config: Any) -> int | None:
    """The sliding window of the layers that have one; None where the positions end before it hides anything."""
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    limit = getattr(config, "max_position_embeddings", None)
    if window is None or (types is not None and "sliding_attention" not in types):
        return None
    return None if limit is not None and window >= limit else int(window)


def _mixes_layer_types(config: Any) -> bool:
    return len(set(getattr(config, "layer_types", None) or ())) > 1
