"""Draft heads for other engines: Medusa's layouts A and B."""

from __future__ import annotations

import warnings
from pathlib import Path

from topo_search.errors import InputError
from topo_search.heads.checkpoints.load import Checkpoint
from topo_search.heads.checkpoints.medusa_layouts import write_medusa
from topo_search.heads.medusa import MedusaBlocks
from topo_search.target.adapter import Target

LAYOUT_A, LAYOUT_B = "medusa-a", "medusa-b"


def export_heads(
    checkpoint: Checkpoint, target: Target, folder: Path, *, to: str, drop_shortlist: bool = False
) -> None:
    """Write heads as other engines read them.

    Args:
        checkpoint: Medusa heads.
        target: their target; where heads share its output layer, layout A gets copies of it.
        folder: where to; made if missing.
        to: `medusa-a`, a projection per head, or `medusa-b`, none.
        drop_shortlist: write heads that draft from a shortlist without it: they then score the whole vocabulary.

    Raises:
        InputError: the layout is unknown or cannot hold these heads; says what can.
    """
    if to not in (LAYOUT_A, LAYOUT_B):
        raise InputError(f"Unknown layout {to!r}; choose {LAYOUT_A} or {LAYOUT_B}.")
    blocks = checkpoint.blocks
    if not isinstance(blocks, MedusaBlocks):
        raise InputError(
            f"Heads {checkpoint.name} are {checkpoint.kind} heads, whose lists depend on the path; a Medusa checkpoint "
            "cannot hold them. Serve them with topo-search, or train Medusa heads: topo-search train medusa."
        )
    _require_whole(checkpoint, blocks, drop_shortlist=drop_shortlist)
    if to == LAYOUT_B and blocks.projection is not None:
        raise InputError(
            f"Each of the heads {checkpoint.name} has a projection; layout B has none. Use --to {LAYOUT_A}."
        )
    if to == LAYOUT_B and blocks.num_layers > 1:
        warnings.warn(
            f"Heads {checkpoint.name} have {blocks.num_layers} layers; text-generation-inference reads layout B with "
            f"one layer only. For it use --to {LAYOUT_A}.",
            stacklevel=2,
        )
    base = checkpoint.config.get("base_model_name_or_path", target.identity.name)
    weight = target.output_weight if to == LAYOUT_A and blocks.projection is None else None
    write_medusa(folder, blocks, {"base_model_name_or_path": base}, output_weight=weight)


def _require_whole(checkpoint: Checkpoint, blocks: MedusaBlocks, *, drop_shortlist: bool) -> None:
    if checkpoint.token_map is None or (drop_shortlist and blocks.projection is None):
        return
    way_out = (
        "Train them without a shortlist."
        if blocks.projection is not None
        else "Write them without it (--drop-shortlist): other engines then score the whole vocabulary."
    )
    raise InputError(
        f"Heads {checkpoint.name} draft from a shortlist of {len(checkpoint.token_map)} tokens, which Medusa's layouts "
        f"cannot hold. {way_out}"
    )
