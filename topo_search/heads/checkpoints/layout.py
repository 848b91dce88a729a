"""What a layout of another project is to us: how it is recognised, and how it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from topo_search.target.adapter import Target

Tensors = Mapping[str, Tensor]
Config = Mapping[str, Any]
Read = tuple[nn.Module, Tensor | None]  # blocks, token map


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way in which another project stores draft heads.

    Attributes:
        name: in words.
        recognises: whether tensors of these names are in it.
        read: blocks and token map from tensors, configuration, target and the checkpoint's name; strict.
        stated: what its configuration should say of given blocks.
    """

    name: str
    recognises: Callable[[Tensors], bool]
    read: Callable[[Tensors, Config, Target, str], Read]
    stated: Callable[[Any], dict[str, Any]]


def stored_dtype(tensors: Tensors) -> torch.dtype:
    """The precision that weights are stored in."""
    return next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
