"""Strict checks of a checkpoint's tensors: what is missing, unexpected or of another shape is named."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from topo_search.errors import InputError, MismatchError

_NAMED = 8  # tensors that a message lists
_ANOTHER_MODEL = 0.3  # relative distance of two tables; 4-bit rounding stays near 0.1, unrelated ones reach 1.4


def require_tensors(tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]], name: str) -> None:
    """Refuse tensors other than `wanted`, which gives their shapes.

    Raises:
        InputError: names missing and unexpected tensors, or the first of another shape.
    """
    missing, extra = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    if missing or extra:
        raise InputError(
            f"Heads {name} are incomplete: missing tensors {listed(missing)}, unexpected tensors {listed(extra)}. "
            "A head without its weights would draft at random."
        )
    for key, shape in sorted(wanted.items()):
        if tuple(tensors[key].shape) != shape:
            raise InputError(f"Heads {name}: tensor {key} has shape {tuple(tensors[key].shape)}, not {shape}.")


def require_copy(what: str, tensor: Tensor, own: Tensor, name: str) -> None:
    """Refuse a stored copy of the target's table that is another model's; rounding and quantisation pass.

    Raises:
        MismatchError: shapes or numbers differ.
    """
    if tensor.shape == own.shape:
        own = own.to(device="cpu", dtype=torch.float32)
        distance = torch.linalg.vector_norm(tensor.float() - own) / torch.linalg.vector_norm(own).clamp(min=1e-12)
        if distance < _ANOTHER_MODEL:
            return
    raise MismatchError(
        f"Heads {name} carry {what} of another model than this target; load the target that they were trained for."
    )


def listed(names: list[str]) -> str:
    """A list of names as it may stand in a message."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{names[:_NAMED]}{more}"
