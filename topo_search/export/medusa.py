"""Medusa's list of choices: JSON rank paths without the root, which is also a Python literal.

Medusa ranks ten candidates per head; a larger rank would read the next head's list.
"""

from __future__ import annotations

import json

import numpy as np

from topo_search.errors import InputError
from topo_search.export.masks import retrieve_indices, token_indices
from topo_search.files.tree_file import TreeFile
from topo_search.tree import Tree

RANKS_PER_HEAD = 10


def medusa_bytes(tree_file: TreeFile) -> bytes:
    """The choices as one line of JSON.

    Raises:
        InputError: the tree has no node, or a rank above 9; the message names the path.
    """
    check_medusa(tree_file.tree)
    return (json.dumps(tree_file.tree.paths) + "\n").encode()


def check_medusa(tree: Tree) -> None:
    """Refuse a tree that Medusa would read wrongly.

    Raises:
        InputError: see `medusa_bytes`.
    """
    if not tree.paths:
        raise InputError("Medusa takes no empty list of choices; for plain decoding, decode without its heads.")
    for path in tree.paths:
        if path[-1] >= RANKS_PER_HEAD:
            raise InputError(
                f"Node {list(path)} has rank {path[-1]}; Medusa ranks {RANKS_PER_HEAD} candidates per head, 0 to "
                f"{RANKS_PER_HEAD - 1}. Optimize with --max-rank {RANKS_PER_HEAD - 1}, or export --to masks."
            )


def medusa_buffers(tree: Tree) -> dict[str, np.ndarray]:
    """The buffers that Medusa derives from its choices, under its own names.

    Returns:
        `medusa_attn_mask` float32 `[1, 1, width, width]`; `tree_indices` int64 `[width]`, into the root token and ten
        tokens per head; `medusa_position_ids` int64 `[width]`; `retrieve_indices` int64 `[leaves, depth + 1]`, last
        leaf first, padded with -1.

    Raises:
        InputError: see `medusa_bytes`.
    """
    check_medusa(tree)
    return {
        "medusa_attn_mask": tree.mask[None, None].astype(np.float32),
        "tree_indices": token_indices(tree, ranks_per_depth=RANKS_PER_HEAD),
        "medusa_position_ids": tree.depths,
        "retrieve_indices": retrieve_indices(tree, tree.leaves[::-1]),
    }
