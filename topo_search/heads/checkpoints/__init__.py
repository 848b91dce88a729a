"""Draft heads on disk: our own layout for every family, and the layouts of other projects."""

from topo_search.heads.checkpoints.describe import HeadsDescription, describe
from topo_search.heads.checkpoints.export import export_heads
from topo_search.heads.checkpoints.load import PACKAGED_HEADS, Checkpoint, heads_folder, load_heads, read_checkpoint
from topo_search.heads.checkpoints.own import save_heads

__all__ = [
    "PACKAGED_HEADS",
    "Checkpoint",
    "HeadsDescription",
    "describe",
    "export_heads",
    "heads_folder",
    "load_heads",
    "read_checkpoint",
    "save_heads",
]
