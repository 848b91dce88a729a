"""From a name to draft heads: find the folder, tell the layout, check that it fits the target, bind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from topo_search.errors import InputError, MismatchError
from topo_search.heads.base import DraftHeads
from topo_search.heads.checkpoints.folder import read_config, read_tensors
from topo_search.heads.checkpoints.foreign import read_foreign
from topo_search.heads.checkpoints.own import read_own
from topo_search.heads.families import family_of
from topo_search.identity import HeadsIdentity
from topo_search.resources import packaged
from topo_search.target.adapter import Target

PACKAGED_HEADS = {name: f"heads/{name}" for name in ("demo-medusa", "demo-hydra", "demo-hydra++")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Heads as stored, checked against their target but not bound to it.

    Attributes:
        name: what the user called them.
        layout: in words.
        blocks: the trained part, in the precision it is stored in.
        token_map: `[columns]` target ids of their shortlist, ascending, or None.
        config: the whole of config.json, the training record among it.
        fingerprint: hash of tensors and shape.
    """

    name: str
    layout: str
    blocks: Any
    token_map: Int[Tensor, " columns"] | None
    config: dict[str, Any]
    fingerprint: str

    @property
    def kind(self) -> str:
        """Their family."""
        return family_of(self.blocks).kind


def load_heads(spec: str, target: Target, *, dtype: torch.dtype | None = None) -> DraftHeads:
    """The draft heads that `spec` names, bound to `target`.

    Args:
        spec: a packaged name such as `demo-medusa`, or a folder in our layout, in one of Medusa's (A, B, C, D) or in
            Hydra's (`mlp`, `prefix-mlp`).
        target: what they draft for.
        dtype: precision of the heads, the target's own by default; a smaller one saves memory beside an fp32 target.

    Raises:
        InputError: the folder, its weights or a tensor is missing, or the layout is unknown.
        MismatchError: the heads were made for another hidden size, vocabulary or target.
    """
    checkpoint = read_checkpoint(spec, target)
    family = family_of(checkpoint.blocks)
    # Rounded heads rank otherwise, so they are others.
    rounded = dtype is not None and dtype != target.dtype
    identity = HeadsIdentity(
        name=spec,
        kind=family.kind,
        fingerprint=checkpoint.fingerprint + (f"-{str(dtype).removeprefix('torch.')}" if rounded else ""),
        num_heads=checkpoint.blocks.shape.num_heads,
    )
    return family.heads(checkpoint.blocks, target, identity, token_map=checkpoint.token_map, dtype=dtype)


def read_checkpoint(spec: str, target: Target) -> Checkpoint:
    """What `load_heads` binds; raises what it raises."""
    folder = heads_folder(spec)
    tensors, config = read_tensors(folder), read_config(folder)
    if "format" in config:
        layout, shape = "topo-search", config.get("shape")
        blocks, token_map = read_own(tensors, config, spec)
    else:
        shape = None
        layout, blocks, token_map = read_foreign(tensors, config, target, spec)
    _require_fit(blocks, token_map, target, spec)
    _require_trained_for(config, target, spec)
    return Checkpoint(
        name=spec,
        layout=layout,
        blocks=blocks,
        token_map=None if token_map is None else token_map.long(),
        config=config,
        fingerprint=_fingerprint(tensors, shape),
    )


def heads_folder(spec: str) -> Path:
    """Where the heads lie that `spec` names.

    Raises:
        InputError: there is no such folder.
    """
    folder = packaged(PACKAGED_HEADS[spec]) if spec in PACKAGED_HEADS else Path(spec)
    if folder.is_file():
        raise InputError(f"Heads {spec} are given as a file; give its folder, {folder.parent}.")
    if not folder.is_dir():
        raise InputError(f"Heads folder {spec} does not exist; give a folder or one of {', '.join(PACKAGED_HEADS)}.")
    return folder


def _require_fit(blocks: nn.Module, token_map: Tensor | None, target: Target, spec: str) -> None:
    """Refuse what cannot work with the target, on the CPU, before any device work."""
    shape: Any = blocks.shape
    vocab, hidden = target.vocab_size, target.hidden_size
    if shape.hidden != hidden:
        raise MismatchError(
            f"Heads {spec} are for hidden size {shape.hidden}, but target {target.identity.name} has {hidden}."
        )
    if token_map is not None:
        _require_shortlist(token_map, target, spec)
    columns = vocab if token_map is None else token_map.shape[0]
    projection: Any = blocks.projection
    if projection is not None and projection.shape[1] != columns:
        what = f"target {target.identity.name} has {vocab}" if token_map is None else f"their token_map names {columns}"
        raise MismatchError(f"Heads {spec} score {projection.shape[1]} tokens, but {what}.")


def _require_shortlist(token_map: Tensor, target: Target, spec: str) -> None:
    if token_map.ndim != 1 or token_map.dtype not in (torch.int32, torch.int64) or not token_map.shape[0]:
        raise InputError(f"Heads {spec}: token_map must be a list of token ids, not {tuple(token_map.shape)}.")
    if not bool((token_map[1:] > token_map[:-1]).all()):
        raise InputError(f"Heads {spec}: token_map must name every id once, in ascending order.")
    least, greatest = int(token_map[0]), int(token_map[-1])
    if least < 0 or greatest >= target.known_ids:
        outside = least if least < 0 else greatest
        raise MismatchError(
            f"Heads {spec}: token_map names token id {outside}, outside the target's vocabulary of {target.known_ids}; "
            "the heads were made for another tokenizer."
        )


def _require_trained_for(config: Mapping[str, Any], target: Target, spec: str) -> None:
    """Heads that name the target they were trained for are refused beside another one."""
    trained_for = config.get("target_fingerprint")
    if trained_for is not None and trained_for != target.identity.fingerprint:
        raise MismatchError(
            f"Heads {spec} were trained for target {config.get('base_model_name_or_path')} ({trained_for}), "
            f"not for {target.identity.name} ({target.identity.fingerprint}); train heads for this target."
        )


def _fingerprint(tensors: Mapping[str, Tensor], shape: Any) -> str:
    digest = hashlib.sha256(b"" if shape is None else json.dumps(shape, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
