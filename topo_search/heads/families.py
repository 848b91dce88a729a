"""The families of draft heads, in one table: a new one is a file beside this one and an entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from topo_search.heads.base import DraftHeads
from topo_search.heads.hydra import HydraBlocks, HydraHeads, HydraShape
from topo_search.heads.medusa import MedusaBlocks, MedusaHeads, MedusaShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the checkpoint layer asks of a family.

    Attributes:
        kind: its name in checkpoints and artefacts.
        shape: the dataclass that decides the tensors of its blocks, own projections excepted.
        blocks: untrained blocks of a shape; their `shape` gives it back, `projection` and, where the family has
            one, `projection_bias` are parameters or None.
        heads: binds blocks to a target: `heads(blocks, target, identity, token_map=..., dtype=...)`.
    """

    kind: str
    shape: type[Any]
    blocks: Callable[[Any], nn.Module]
    heads: Callable[..., DraftHeads]


FAMILIES = (
    Family(kind="medusa", shape=MedusaShape, blocks=lambda s: MedusaBlocks(**asdict(s)), heads=MedusaHeads),
    Family(kind="hydra", shape=HydraShape, blocks=HydraBlocks, heads=HydraHeads),
)


def family_of(blocks: nn.Module) -> Family:
    """The family that blocks belong to.

    Raises:
        ValueError: their shape is of none.
    """
    for family in FAMILIES:
        if isinstance(getattr(blocks, "shape", None), family.shape):
            return family
    raise ValueError(f"{type(blocks).__name__} belong to no family of draft heads.")
