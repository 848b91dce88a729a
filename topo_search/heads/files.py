"""Read and write draft-head checkpoints: `config.json` and `medusa_lm_head.safetensors`.

Two of Medusa's own layouts: A, a projection per head, and B, the target's output layer shared. Heads and layers are
counted from the weights, never from the configuration; a missing tensor is an error that lists names. Pickled
checkpoints are refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from topo_search.errors import InputError, MismatchError
from topo_search.files.atomic import write_bytes, write_text
from topo_search.heads.medusa import MedusaBlocks, MedusaHeads
from topo_search.identity import HeadsIdentity
from topo_search.resources import packaged
from topo_search.target.adapter import Target

PACKAGED_HEADS = {"demo-medusa": "heads/demo-medusa"}
WEIGHTS_FILE, CONFIG_FILE = "medusa_lm_head.safetensors", "config.json"
_LINEAR = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_PROJECTION = re.compile(r"(\d+)\.(\d+)\.weight")


def load_heads(spec: str, target: Target) -> MedusaHeads:
    """The draft heads that `spec` names (`demo-medusa` or a folder), bound to `target`.

    Raises:
        InputError: the folder, its weights or a tensor is missing, or the layout is unknown.
        MismatchError: the heads were trained for another hidden size, vocabulary or target.
    """
    folder = packaged(PACKAGED_HEADS[spec]) if spec in PACKAGED_HEADS else Path(spec)
    tensors = _read_weights(folder, spec)
    config = _read_config(folder)
    blocks = blocks_from_tensors(tensors, spec)
    _require_fit(blocks, target, spec)
    _warn_on_disagreement(blocks, config, spec)
    _require_trained_for(config, target, spec)
    identity = HeadsIdentity(name=spec, kind="medusa", fingerprint=_fingerprint(tensors), num_heads=blocks.num_heads)
    return MedusaHeads(blocks, target, identity)


def save_medusa(folder: Path, blocks: MedusaBlocks, record: dict[str, Any], *, dtype: torch.dtype) -> None:
    """Write the heads in Medusa's own layout, `record` beside them.

    Args:
        folder: where to; made if missing.
        blocks: the heads.
        record: written into config.json: the target, training text, settings and seed.
        dtype: precision of the stored weights.
    """
    tensors = {name: tensor.detach().to(dtype).contiguous() for name, tensor in _named_tensors(blocks)}
    config = {
        "medusa_num_heads": blocks.num_heads,
        "medusa_num_layers": blocks.num_layers,
        "version": "2",
        **record,
    }
    write_bytes(folder / WEIGHTS_FILE, save(tensors))
    write_text(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def blocks_from_tensors(tensors: dict[str, Tensor], name: str) -> MedusaBlocks:
    """Heads from a state dict of layout A (own projections) or B (the target's output layer is shared).

    Raises:
        InputError: the keys are of no known layout, or some are missing.
    """
    heads, layers = _count(tensors, name)
    wanted = {
        f"{h}.{layer}.linear.{part}" for h in range(heads) for layer in range(layers) for part in ("weight", "bias")
    }
    projections = {f"{h}.{layers}.weight" for h in range(heads)}
    if any(_PROJECTION.fullmatch(key) for key in tensors):
        wanted |= projections
    missing, extra = sorted(wanted - set(tensors)), sorted(set(tensors) - wanted)
    if missing or extra:
        raise InputError(f"Heads {name} are incomplete: missing tensors {missing}, unexpected tensors {extra}.")
    hidden = tensors["0.0.linear.weight"].shape[0]
    vocab = tensors[f"0.{layers}.weight"].shape[0] if projections <= wanted else 0
    for key in sorted(wanted):
        shape = (
            (hidden, hidden)
            if key.endswith("linear.weight")
            else (hidden,)
            if key.endswith("bias")
            else (vocab, hidden)
        )
        if tuple(tensors[key].shape) != shape:
            raise InputError(f"Heads {name}: tensor {key} has shape {tuple(tensors[key].shape)}, not {shape}.")
    first = tensors[f"0.{layers}.weight"] if vocab else None
    blocks = MedusaBlocks(num_heads=heads, num_layers=layers, hidden=hidden, projection=first)
    with torch.no_grad():
        for key, parameter in _named_tensors(blocks):
            parameter.copy_(tensors[key])
    return blocks


def _named_tensors(blocks: MedusaBlocks) -> list[tuple[str, Tensor]]:
    named: list[tuple[str, Tensor]] = []
    for head in range(blocks.num_heads):
        for layer in range(blocks.num_layers):
            named.append((f"{head}.{layer}.linear.weight", blocks.weight[head, layer]))
            named.append((f"{head}.{layer}.linear.bias", blocks.bias[head, layer]))
        if blocks.projection is not None:
            named.append((f"{head}.{blocks.num_layers}.weight", blocks.projection[head]))
    return named


def _count(tensors: dict[str, Tensor], name: str) -> tuple[int, int]:
    found = [match for key in tensors if (match := _LINEAR.fullmatch(key))]
    if not found:
        keys = ", ".join(sorted(tensors)[:8])
        raise InputError(
            f"Heads {name} have an unknown layout; expected tensors such as 0.0.linear.weight, found {keys or 'none'}."
        )
    return 1 + max(int(match[1]) for match in found), 1 + max(int(match[2]) for match in found)


def _read_weights(folder: Path, spec: str) -> dict[str, Tensor]:
    path = folder / WEIGHTS_FILE
    if not folder.is_dir():
        raise InputError(f"Heads folder {spec} does not exist; give a folder or one of {', '.join(PACKAGED_HEADS)}.")
    if not path.is_file():
        pickled = sorted(found.name for found in folder.glob("*.pt"))
        reason = f" It holds {pickled}, which are pickles: convert them to safetensors first." if pickled else ""
        raise InputError(f"Heads folder {spec} has no {WEIGHTS_FILE}.{reason}")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path} is no whole safetensors file ({error}); copy it again.") from None


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not JSON: {error}.") from None
    if not isinstance(config, dict):
        raise InputError(f"{path} must hold a JSON object.")
    return config


def _require_fit(blocks: MedusaBlocks, target: Target, spec: str) -> None:
    hidden = blocks.weight.shape[-1]
    if hidden != target.hidden_size:
        raise MismatchError(
            f"Heads {spec} are for hidden size {hidden}, but target {target.identity.name} has {target.hidden_size}."
        )
    vocab = target.output_weight.shape[0]
    if blocks.projection is not None and blocks.projection.shape[1] != vocab:
        raise MismatchError(
            f"Heads {spec} score {blocks.projection.shape[1]} tokens, but target {target.identity.name} has {vocab}."
        )


def _require_trained_for(config: dict[str, Any], target: Target, spec: str) -> None:
    """Heads that name the target they were trained for are refused beside another one."""
    trained_for = config.get("target_fingerprint")
    if trained_for is not None and trained_for != target.identity.fingerprint:
        raise MismatchError(
            f"Heads {spec} were trained for target {config.get('base_model_name_or_path')} ({trained_for}), "
            f"not for {target.identity.name} ({target.identity.fingerprint}); train heads for this target."
        )


def _warn_on_disagreement(blocks: MedusaBlocks, config: dict[str, Any], spec: str) -> None:
    for key, counted in (("medusa_num_heads", blocks.num_heads), ("medusa_num_layers", blocks.num_layers)):
        if key in config and config[key] != counted:
            warnings.warn(
                f"Heads {spec}: config.json says {key} = {config[key]}, the weights hold {counted}; the weights count.",
                stacklevel=3,
            )


def _fingerprint(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
