"""Draft heads on disk: our own layout for every family, and the layouts of other projects."""

from topo_search.heads.checkpoints.load import PACKAGED_HEADS, Checkpoint, load_heads, read_checkpoint
from topo_search.heads.checkpoints.own import save_heads

__all__ = ["PACKAGED_HEADS", "Checkpoint", "load_heads", "read_checkpoint", "save_heads"]
