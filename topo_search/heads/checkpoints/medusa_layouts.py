"""Medusa's layouts: A (a projection per head), B (the target's), C (inside a whole model), D (vLLM's).

Heads and layers are counted from the names of the tensors: published configurations are wrong in both directions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from topo_search.errors import InputError
from topo_search.files.atomic import write_bytes, write_text
from topo_search.files.documents import json_text
from topo_search.heads.checkpoints.layout import Config, Layout, Read, Tensors, stored_dtype
from topo_search.heads.checkpoints.tensors import require_copy, require_tensors
from topo_search.heads.medusa import MedusaBlocks
from topo_search.target.adapter import Target

WEIGHTS_FILE, CONFIG_FILE = "medusa_lm_head.safetensors", "config.json"
_PREFIX = re.compile(r"medusa_heads?\.")
_LINEAR = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_PROJECTION = re.compile(r"\d+\.\d+\.weight")
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")


def write_medusa(
    folder: Path, blocks: MedusaBlocks, config: Mapping[str, Any], *, output_weight: Tensor | None = None
) -> None:
    """Write heads as other engines read them: layout A where each has a projection, else B.

    Args:
        folder: where to; made if missing.
        blocks: the heads.
        config: written into config.json beside the counts, `base_model_name_or_path` among it.
        output_weight: the target's `[vocab, hidden]` output layer, which every head without a projection of its own
            gets a copy of; without it such heads become layout B.

    Raises:
        InputError: the folder cannot be written.
    """
    named = _named(blocks, blocks.weight, blocks.bias)
    if blocks.projection is not None:
        named |= {f"{head}.{blocks.num_layers}.weight": blocks.projection[head] for head in range(blocks.num_heads)}
    elif output_weight is not None:
        copies = {f"{head}.{blocks.num_layers}.weight": output_weight for head in range(blocks.num_heads)}
        named |= {name: copy.to(blocks.weight.dtype) for name, copy in copies.items()}
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in named.items()}
    write_bytes(folder / WEIGHTS_FILE, save(tensors))
    write_text(folder / CONFIG_FILE, json_text(_counts(blocks) | {"version": "2"} | dict(config)) + "\n")


def _names(tensors: Tensors) -> set[str]:
    return {_PREFIX.sub("", key, count=1) for key in tensors}


def _is_medusa(tensors: Tensors) -> bool:
    return any(_LINEAR.fullmatch(name) for name in _names(tensors))


def _is_vllm(tensors: Tensors) -> bool:
    return any(_BLOCK.fullmatch(name) for name in _names(tensors))


def _read_medusa(tensors: Tensors, config: Config, target: Target, name: str) -> Read:
    """Layouts A, B and C."""
    del config
    tensors = _without_model(tensors, target, name)
    found = [match for key in tensors if (match := _LINEAR.fullmatch(key))]
    heads, layers = 1 + max(int(match[1]) for match in found), 1 + max(int(match[2]) for match in found)
    hidden = _width(tensors, found[0][0])
    wanted: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for layer in range(layers):
            wanted[f"{head}.{layer}.linear.weight"] = (hidden, hidden)
            wanted[f"{head}.{layer}.linear.bias"] = (hidden,)
    own = sorted(key for key in tensors if _PROJECTION.fullmatch(key))
    if own:
        vocab = tensors[own[0]].shape[0]
        wanted |= {f"{head}.{layers}.weight": (vocab, hidden) for head in range(heads)}
    require_tensors(tensors, wanted, name)
    projections = [tensors[f"{head}.{layers}.weight"] for head in range(heads)] if own else []
    return _filled(tensors, "{head}.{layer}.linear.{part}", (heads, layers, hidden), projections), None


def _read_vllm(tensors: Tensors, config: Config, target: Target, name: str) -> Read:
    """Layout D. A shared original output layer is the target's own; a token map is put in ascending order."""
    if config.get("logit_scale", 1) != 1:
        raise InputError(
            f"Heads {name} scale their scores (logit_scale = {config['logit_scale']}); only 1 is supported."
        )
    tensors = {_PREFIX.sub("", key, count=1): tensor for key, tensor in tensors.items()}
    token_map = tensors.pop("token_map", None)
    found = [match for key in tensors if (match := _BLOCK.fullmatch(key))]
    heads, layers = 1 + max(int(match[1]) for match in found), 1 + max(int(match[2]) for match in found)
    hidden, biased = _width(tensors, found[0][0]), any(match[3] == "bias" for match in found)
    wanted: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for layer in range(layers):
            wanted[f"blocks.{head}.layers.{layer}.weight"] = (hidden, hidden)
            if biased:
                wanted[f"blocks.{head}.layers.{layer}.bias"] = (hidden,)
    scored = range(1) if config.get("original_lm_head", False) else range(heads)
    rows = tensors["lm_heads.0.weight"].shape[0] if "lm_heads.0.weight" in tensors else 0
    wanted |= {f"lm_heads.{head}.weight": (rows, hidden) for head in scored}
    require_tensors(tensors, wanted, name)
    token_map, projections = _mapped(token_map, [tensors[f"lm_heads.{head}.weight"] for head in scored])
    if config.get("original_lm_head", False):
        own = target.output_weight
        require_copy("the output layer", projections[0], own if token_map is None else own[token_map], name)
        projections = []
    return _filled(tensors, "blocks.{head}.layers.{layer}.{part}", (heads, layers, hidden), projections), token_map


def _without_model(tensors: Tensors, target: Target, name: str) -> dict[str, Tensor]:
    """Layout C's heads without their prefix; the model's output layer beside them must be the target's."""
    if not any(_PREFIX.match(key) for key in tensors):
        return dict(tensors)
    heads = {_PREFIX.sub("", key, count=1): tensor for key, tensor in tensors.items() if key != "lm_head.weight"}
    if "lm_head.weight" in tensors:
        require_copy("the output layer", tensors["lm_head.weight"], target.output_weight, name)
    return heads


def _mapped(token_map: Tensor | None, projections: list[Tensor]) -> tuple[Tensor | None, list[Tensor]]:
    """An ascending token map, and the matrices' rows in its order; whole matrices are cut to it, as vLLM does."""
    if token_map is None:
        return None, projections
    token_map, order = torch.sort(token_map.long().flatten())
    columns = token_map.shape[0]
    taken = [token_map if matrix.shape[0] > columns else order for matrix in projections]
    return token_map, [matrix[rows] for matrix, rows in zip(projections, taken, strict=True)]


def _filled(tensors: Tensors, name: str, sizes: tuple[int, int, int], projections: list[Tensor]) -> MedusaBlocks:
    """Blocks with the weights of the tensors named so; where no bias is stored it stays zero."""
    heads, layers, hidden = sizes
    blocks = MedusaBlocks(num_heads=heads, num_layers=layers, hidden=hidden)
    if projections:
        blocks.projection = torch.nn.Parameter(torch.stack(projections))
    blocks.to(stored_dtype(tensors))
    with torch.no_grad():
        for head in range(heads):
            for layer in range(layers):
                for part, parameter in (("weight", blocks.weight), ("bias", blocks.bias)):
                    stored = tensors.get(name.format(head=head, layer=layer, part=part))
                    if stored is not None:
                        parameter[head, layer] = stored
    return blocks


def _named(blocks: MedusaBlocks, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for head in range(blocks.num_heads):
        for layer in range(blocks.num_layers):
            named[f"{head}.{layer}.linear.weight"] = weight[head, layer]
            named[f"{head}.{layer}.linear.bias"] = bias[head, layer]
    return named


def _width(tensors: Tensors, key: str) -> int:
    return tensors[key].shape[-1]


def _counts(blocks: MedusaBlocks) -> dict[str, Any]:
    return {"medusa_num_heads": blocks.num_heads, "medusa_num_layers": blocks.num_layers}


def _vllm_counts(blocks: MedusaBlocks) -> dict[str, Any]:
    return {"num_heads": blocks.num_heads, "num_hidden_layers": blocks.num_layers, "hidden_size": blocks.shape.hidden}


MEDUSA_LAYOUTS = (
    Layout(name="Medusa A, B or C", recognises=_is_medusa, read=_read_medusa, stated=_counts),
    Layout(name="Medusa D (vLLM)", recognises=_is_vllm, read=_read_vllm, stated=_vllm_counts),
)
