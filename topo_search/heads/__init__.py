"""Draft heads: what calibration, measuring and decoding ask of them, and the families that answer."""

from topo_search.heads.base import DraftHeads
from topo_search.heads.checkpoints import load_heads, save_heads

__all__ = ["DraftHeads", "load_heads", "save_heads"]
