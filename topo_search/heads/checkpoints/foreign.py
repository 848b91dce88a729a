"""Which project's layout a checkpoint has, told from its keys and shapes alone."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from topo_search.errors import InputError
from topo_search.heads.checkpoints.hydra_layouts import HYDRA_LAYOUTS
from topo_search.heads.checkpoints.layout import Layout
from topo_search.heads.checkpoints.medusa_layouts import MEDUSA_LAYOUTS
from topo_search.heads.checkpoints.tensors import listed
from topo_search.target.adapter import Target

LAYOUTS: tuple[Layout, ...] = (*MEDUSA_LAYOUTS, *HYDRA_LAYOUTS)


def read_foreign(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], target: Target, name: str
) -> tuple[str, nn.Module, Tensor | None]:
    """Layout in words, blocks in the precision they are stored in, and token map.

    A configuration that disagrees with the weights is warned about; the weights count.

    Raises:
        InputError: the layout is unknown, or tensors are missing, unexpected or of another shape.
        MismatchError: copies of the target's tables are another model's.
    """
    for layout in LAYOUTS:
        if layout.recognises(tensors):
            blocks, token_map = layout.read(tensors, config, target, name)
            _warn_on_disagreement(layout.stated(blocks), config, name)
            return layout.name, blocks, token_map
    raise InputError(
        f"Heads {name} have an unknown layout; known are {', '.join(layout.name for layout in LAYOUTS)}. "
        f"Their tensors: {listed(sorted(tensors))}."
    )


def _warn_on_disagreement(counted: Mapping[str, Any], config: Mapping[str, Any], name: str) -> None:
    for key, found in counted.items():
        if key in config and config[key] != found:
            warnings.warn(
                f"Heads {name}: config.json says {key} = {config[key]}, the weights hold {found}; the weights count.",
                stacklevel=4,
            )
