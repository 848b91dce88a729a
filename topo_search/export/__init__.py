"""A tree in the forms that other programs load. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from topo_search.export.graph import dot_bytes, graphml_bytes
from topo_search.export.masks import masks_bytes
from topo_search.export.medusa import medusa_bytes
from topo_search.files.tree_file import TreeFile


class Exporter(NamedTuple):
    """One form: the suffix of its files and the function that makes their bytes."""

    suffix: str
    to_bytes: Callable[[TreeFile], bytes]


EXPORTERS: dict[str, Exporter] = {
    "masks": Exporter(".masks.safetensors", masks_bytes),
    "medusa": Exporter(".medusa.json", medusa_bytes),
    "dot": Exporter(".dot", dot_bytes),
    "graphml": Exporter(".graphml", graphml_bytes),
}
