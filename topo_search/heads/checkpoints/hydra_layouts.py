"""Hydra's own layouts, grounded: `mlp` and `prefix-mlp` (Hydra++), with or without dropout between the layers.

Head i: y = R x + r + SiLU(W x + b) with x = concat(h, e(t0), .., e(ti)), then z + SiLU(W z + b) for every further
layer (one module repeated there, so the same tensors under several names), then a projection with bias.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from topo_search.errors import InputError
from topo_search.heads.attention import LayerShape
from topo_search.heads.checkpoints.layout import Config, Layout, Read, Tensors, stored_dtype
from topo_search.heads.checkpoints.tensors import require_copy, require_tensors
from topo_search.heads.hydra import HydraBlocks, HydraShape
from topo_search.target.adapter import Target

_LINEAR = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")
_PREFIX = "prefix_embeding_layer."  # their spelling
_EMBEDDINGS = "input_embed_fn.weight"
_UNUSED = f"{_PREFIX}embed_tokens.weight"


def _recognises(tensors: Tensors) -> bool:
    return any(_LINEAR.fullmatch(key) for key in tensors)


def _read_hydra(tensors: Tensors, config: Config, target: Target, name: str) -> Read:
    _require_supported(tensors, config, name)
    tensors = _without_copies(tensors, target, name)
    shape, spaced = _shape_of(tensors, target, name)
    blocks = HydraBlocks(shape)
    blocks.projection = nn.Parameter(torch.empty(shape.num_heads, *_head_shape(tensors, spaced)))
    blocks.projection_bias = nn.Parameter(torch.empty(blocks.projection.shape[:2]))
    # Their name of every tensor of ours.
    theirs = {key: _their_name(key, spaced) for key in blocks.state_dict() if not key.startswith("projection")}
    wanted = {theirs[key]: tuple(blocks.state_dict()[key].shape) for key in theirs}
    projected = {part: _projection_names(shape.num_heads, spaced, part) for part in ("weight", "bias")}
    wanted |= dict.fromkeys(projected["weight"], tuple(blocks.projection.shape[1:]))
    wanted |= dict.fromkeys(projected["bias"], tuple(blocks.projection_bias.shape[1:]))
    require_tensors(tensors, wanted, name)
    found = {key: tensors[theirs[key]] for key in theirs}
    found["projection"] = torch.stack([tensors[key] for key in projected["weight"]])
    found["projection_bias"] = torch.stack([tensors[key] for key in projected["bias"]])
    blocks.to(stored_dtype(tensors)).load_state_dict(found)
    return blocks, None


def _require_supported(tensors: Tensors, config: Config, name: str) -> None:
    offset = config.get("hidden_state_offset", 0)
    if offset != 0:
        raise InputError(
            f"Heads {name} read the hidden state {offset} layers before the last (hidden_state_offset); only the last "
            "one's, offset 0, is supported."
        )
    grounded = any(".res_connection." in key for key in tensors)
    if not grounded or config.get("grounded_heads", True) is False:
        raise InputError(
            f"Heads {name} are not grounded: they see no drafted token. Such heads are Medusa heads with another "
            "projection; only grounded Hydra heads are supported."
        )


def _without_copies(tensors: Tensors, target: Target, name: str) -> dict[str, Tensor]:
    """Without what repeats the target (its input embeddings) or follows from the configuration (rotary angles).

    Embeddings must be the target's, since heads read those; the prefix layer's own table is never read, by them
    neither, and only its shape is checked.
    """
    kept = {key: tensor for key, tensor in tensors.items() if not key.endswith("inv_freq")}
    own: Tensor = target.model.get_input_embeddings().weight  # type: ignore[operator]
    if (copy := kept.pop(_EMBEDDINGS, None)) is not None:
        require_copy("the input embeddings", copy, own, name)
    if _UNUSED in kept:
        require_tensors({_UNUSED: kept.pop(_UNUSED)}, {_UNUSED: tuple(own.shape)}, name)
    return kept


def _shape_of(tensors: Tensors, target: Target, name: str) -> tuple[HydraShape, bool]:
    """The shape that the names of the tensors tell, and whether dropout modules are numbered between the layers."""
    found = [match for key in tensors if (match := _LINEAR.fullmatch(key))]
    spaced = not any(match[2] == "0" for match in found)
    last = max(int(match[2]) for match in found)
    prefix = any(key.startswith(_PREFIX) for key in tensors)
    if prefix and _turned_anew(target):
        raise InputError(
            f"Heads {name} have a prefix layer, which would need the rotary scaling of {target.identity.name}; only "
            "plain rotary embeddings are supported there. Train Hydra++ heads for this target."
        )
    shape = HydraShape(
        hidden=tensors[found[0][0]].shape[0],
        num_heads=1 + max(int(match[1]) for match in found),
        num_layers=(last + 1) // 2 if spaced else last + 1,
        prefix_attention=prefix,
        layer=LayerShape.of(target) if prefix else None,
    )
    return shape, spaced


def _their_name(key: str, spaced: bool) -> str:
    if key.startswith("prefix.model."):
        return _PREFIX + key.removeprefix("prefix.model.")
    _, head, part, *rest = key.split(".")
    first, step = (1, 2) if spaced else (0, 1)
    if part == "layers":
        return f"hydra_mlp.{head}.{first + step * (1 + int(rest[0]))}.linear.{rest[1]}"
    module = {"linear": "linear", "shortcut": "res_connection"}[part]
    return f"hydra_mlp.{head}.{first}.{module}.{rest[0]}"


def _projection_names(heads: int, spaced: bool, part: str) -> list[str]:
    return [f"hydra_lm_head.{head}.{'1.' if spaced else ''}{part}" for head in range(heads)]


def _head_shape(tensors: Tensors, spaced: bool) -> tuple[int, int]:
    first = tensors.get(_projection_names(1, spaced, "weight")[0])
    return (0, 0) if first is None or first.ndim != 2 else (first.shape[0], first.shape[1])


def _turned_anew(target: Target) -> bool:
    config: Any = target.model.config.get_text_config()  # type: ignore[union-attr,operator]
    rope = getattr(config, "rope_parameters", None) or {}
    return bool(rope.get("rope_type", "default") != "default")


def _stated(blocks: HydraBlocks) -> dict[str, Any]:
    arch = "prefix-mlp" if blocks.shape.prefix_attention else "mlp"
    return {
        "hydra_num_heads": blocks.shape.num_heads,
        "hydra_num_layers": blocks.shape.num_layers,
        "hydra_head_arch": arch,
    }


HYDRA_LAYOUTS = (Layout(name="Hydra mlp or prefix-mlp", recognises=_recognises, read=_read_hydra, stated=_stated),)
