"""topo-search: the verification tree that is fastest for your target, draft heads, prompts and device.

The names below are loaded when first used, so importing the package stays cheap and `optimize` never loads torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topo_search.cost import LatencyTable
    from topo_search.decode.batch import decode_batch
    from topo_search.decode.decoder import Decoded, TreeDecoder
    from topo_search.decode.habits import TreeGenerator
    from topo_search.errors import CheckError, InputError, MismatchError, TopoSearchError
    from topo_search.files.tree_file import TreeFile, read_tree, write_tree
    from topo_search.heads import load_heads
    from topo_search.identity import sampling_rule
    from topo_search.search.assess import Assessment, assess
    from topo_search.search.choose import Settings
    from topo_search.search.optimize import SearchResult, optimize
    from topo_search.stats import DecodeStats
    from topo_search.target import Target, load_target
    from topo_search.trace import RankTrace
    from topo_search.tree import Tree

_HOME = {
    "Assessment": "search.assess",
    "CheckError": "errors",
    "DecodeStats": "stats",
    "Decoded": "decode.decoder",
    "InputError": "errors",
    "LatencyTable": "cost",
    "MismatchError": "errors",
    "RankTrace": "trace",
    "SearchResult": "search.optimize",
    "Settings": "search.choose",
    "Target": "target",
    "TopoSearchError": "errors",
    "Tree": "tree",
    "TreeDecoder": "decode.decoder",
    "TreeFile": "files.tree_file",
    "TreeGenerator": "decode.habits",
    "assess": "search.assess",
    "decode_batch": "decode.batch",
    "load_heads": "heads",
    "load_target": "target",
    "optimize": "search.optimize",
    "read_tree": "files.tree_file",
    "sampling_rule": "identity",
    "write_tree": "files.tree_file",
}

__all__ = [
    "Assessment",
    "CheckError",
    "DecodeStats",
    "Decoded",
    "InputError",
    "LatencyTable",
    "MismatchError",
    "RankTrace",
    "SearchResult",
    "Settings",
    "Target",
    "TopoSearchError",
    "Tree",
    "TreeDecoder",
    "TreeFile",
    "TreeGenerator",
    "assess",
    "decode_batch",
    "load_heads",
    "load_target",
    "optimize",
    "read_tree",
    "sampling_rule",
    "write_tree",
]


NOISY_LOGGERS = ("torchao", "torch.utils._pytree")  # transformers imports torchao wherever it is installed


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _quiet_imports():
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


@contextmanager
def _quiet_imports() -> Iterator[None]:
    """Without torchao's warnings about kernels for other devices; the loggers are left as they were."""
    loggers = [logging.getLogger(name) for name in NOISY_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
