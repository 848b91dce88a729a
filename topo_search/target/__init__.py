"""The target: loading it, identifying it, and one adapter over what differs between transformers versions."""

from topo_search.target.adapter import Target
from topo_search.target.load import load_target

__all__ = ["Target", "load_target"]
