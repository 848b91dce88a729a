"""What a checkpoint holds, for people: shape, size beside the target's, how it was trained."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from topo_search.heads.checkpoints.load import Checkpoint
from topo_search.target.adapter import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsDescription:
    """A checkpoint in figures.

    Attributes:
        name, layout, kind, fingerprint: who they are and how they are stored.
        shape: what decides their tensors, `num_heads` and `num_layers` among it.
        projection: `own`, a matrix per head, or `target`, the target's output layer.
        shortlist: tokens that they draft from, or None for the whole vocabulary.
        dtype: precision they are stored in.
        num_parameters, target_parameters: trained numbers of the heads, all numbers of the target.
        record: the rest of config.json: how they were trained.
    """

    name: str
    layout: str
    kind: str
    fingerprint: str
    shape: dict[str, Any]
    projection: str
    shortlist: int | None
    dtype: str
    num_parameters: int
    target_parameters: int
    record: dict[str, Any]

    @property
    def share(self) -> float:
        """Parameters of the heads over those of the target."""
        return self.num_parameters / self.target_parameters


def describe(checkpoint: Checkpoint, target: Target) -> HeadsDescription:
    """The description of a checkpoint; `target` must be loaded unpacked, since packed weights cannot be counted."""
    if target.packed:
        raise ValueError("Parameters are counted on an unpacked target.")
    blocks, header = checkpoint.blocks, ("format", "version", "kind", "shape")
    return HeadsDescription(
        name=checkpoint.name,
        layout=checkpoint.layout,
        kind=checkpoint.kind,
        fingerprint=checkpoint.fingerprint,
        shape=asdict(blocks.shape),
        projection="target" if blocks.projection is None else "own",
        shortlist=None if checkpoint.token_map is None else len(checkpoint.token_map),
        dtype=str(next(blocks.parameters()).dtype).removeprefix("torch."),
        num_parameters=sum(parameter.numel() for parameter in blocks.parameters()),
        target_parameters=sum(parameter.numel() for parameter in target.model.parameters()),
        record={key: value for key, value in checkpoint.config.items() if key not in header},
    )
