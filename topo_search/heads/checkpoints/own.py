"""Our own layout, one for every family: `config.json` and `heads.safetensors`.

The configuration names family and shape; whether heads have projections of their own, and for which tokens, the
tensors say. Nothing of the target's configuration is copied, its tied-embedding flag least of all.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors.torch import save
from torch import Tensor, nn

from topo_search.errors import InputError
from topo_search.files.atomic import write_bytes, write_text
from topo_search.files.documents import as_dataclass, json_text, require_format
from topo_search.heads.checkpoints.tensors import require_tensors
from topo_search.heads.families import FAMILIES, family_of

WEIGHTS_FILE, CONFIG_FILE = "heads.safetensors", "config.json"
TOKEN_MAP = "token_map"
_HEADER = ("format", "version", "kind", "shape")
_PROJECTIONS = ("projection", "projection_bias")


def save_heads(
    folder: Path,
    blocks: nn.Module,
    record: dict[str, Any],
    *,
    token_map: Int[Tensor, " columns"] | None = None,
    dtype: torch.dtype,
) -> None:
    """Write heads of any family.

    Args:
        folder: where to; made if missing.
        blocks: the trained part, not bound to a target.
        record: written into config.json beside kind and shape: `target_fingerprint`, `base_model_name_or_path`,
            training text, settings, seed.
        token_map: `[columns]` target ids of the shortlist that the heads draft from, ascending.
        dtype: precision of the stored weights.

    Raises:
        InputError: the folder cannot be written.
        ValueError: the blocks are of no family, or `record` has a key of the layout's own.
    """
    if taken := set(record) & set(_HEADER):
        raise ValueError(f"The record has the layout's own keys {sorted(taken)}.")
    family = family_of(blocks)
    tensors = {name: tensor.detach().to(dtype).cpu().contiguous() for name, tensor in blocks.state_dict().items()}
    if token_map is not None:
        tensors[TOKEN_MAP] = token_map.to(device="cpu", dtype=torch.int32)
    header = {"format": "topo-search/heads", "version": 1, "kind": family.kind, "shape": asdict(blocks.shape)}  # type: ignore[call-overload]
    write_bytes(folder / WEIGHTS_FILE, save(tensors))
    write_text(folder / CONFIG_FILE, json_text(header | record) + "\n")


def read_own(tensors: dict[str, Tensor], config: dict[str, Any], name: str) -> tuple[nn.Module, Tensor | None]:
    """Blocks, in the precision they are stored in, and token map of our own layout.

    Raises:
        InputError: kind or shape is unknown, or tensors are missing, unexpected or of another shape.
    """
    require_format(f"{name}: {CONFIG_FILE}", config, "heads")
    kinds = {family.kind: family for family in FAMILIES}
    if config.get("kind") not in kinds:
        raise InputError(f"Heads {name} are of kind {config.get('kind')!r}; known are {', '.join(kinds)}.")
    family = kinds[config["kind"]]
    blocks = family.blocks(as_dataclass(f"{name}: {CONFIG_FILE}: shape", config.get("shape"), family.shape))
    tensors = dict(tensors)
    token_map = tensors.pop(TOKEN_MAP, None)
    wanted = {key: tuple(tensor.shape) for key, tensor in blocks.state_dict().items()}
    own = {key: tensors[key] for key in _PROJECTIONS if key in tensors}
    require_tensors(tensors, wanted | own_shapes(blocks, own), name)
    for key, tensor in own.items():
        setattr(blocks, key, nn.Parameter(torch.empty_like(tensor)))
    blocks.to(next(iter(tensors.values())).dtype).load_state_dict(tensors)
    return blocks, token_map


def own_shapes(blocks: nn.Module, own: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shapes that stored projections must have, for the number of tokens that they score."""
    if "projection" not in own:
        return {}
    shape: Any = blocks.shape
    columns = own["projection"].shape[1] if own["projection"].ndim == 3 else 0
    wanted: dict[str, tuple[int, ...]] = {"projection": (shape.num_heads, columns, shape.hidden)}
    if "projection_bias" in own and hasattr(blocks, "projection_bias"):
        wanted["projection_bias"] = (shape.num_heads, columns)
    return wanted
