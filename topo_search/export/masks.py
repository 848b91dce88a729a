"""The arrays of one verification step, for decoders and kernels that take them ready-made.

Slot 0 is the root. Candidates are drawn from one flat list: the root token, then the first `ranks_per_depth` tokens
of every depth in turn.
"""

from __future__ import annotations

import json

import numpy as np
from jaxtyping import Int

from topo_search.files.tensors import safetensors_bytes
from topo_search.files.tree_file import TreeFile
from topo_search.tree import Path, Tree

PADDING = -1


def masks(tree: Tree) -> dict[str, np.ndarray]:
    """The arrays by name.

    Returns:
        `attention_mask` bool `[width, width]`, True where the row's slot sees the column's; `position_offsets` int64
        `[width]`, to be added to the root's position; `token_indices` int64 `[width]`, into the flat candidate list;
        `retrieve_indices` int64 `[leaves, depth + 1]`, the slots from the root to each leaf, padded with -1;
        `path_lengths` int64 `[leaves]`, draft nodes of each leaf's path, beyond which nothing may be accepted.
    """
    leaves = tree.leaves or ((),)
    return {
        "attention_mask": tree.mask,
        "position_offsets": tree.depths,
        "token_indices": token_indices(tree, ranks_per_depth=tree.max_rank + 1),
        "retrieve_indices": retrieve_indices(tree, leaves),
        "path_lengths": np.array([len(leaf) for leaf in leaves], dtype=np.int64),
    }


def token_indices(tree: Tree, *, ranks_per_depth: int) -> Int[np.ndarray, " width"]:
    """Place of each slot's token in the flat candidate list: 0 for the root, else by depth, then rank."""
    indices = [1 + (len(path) - 1) * ranks_per_depth + path[-1] for path in tree.paths]
    return np.array([0, *indices], dtype=np.int64)


def retrieve_indices(tree: Tree, leaves: tuple[Path, ...]) -> Int[np.ndarray, "leaves levels"]:
    """Slots from the root to each of `leaves`, one row each, padded with -1."""
    rows = np.full((len(leaves), tree.depth + 1), PADDING, dtype=np.int64)
    for row, leaf in zip(rows, leaves, strict=True):
        row[: len(leaf) + 1] = tree.ancestors[tree.slots[leaf]]
    return rows


def masks_bytes(tree_file: TreeFile) -> bytes:
    """The arrays as a safetensors file; its header names the tree, its sizes and its nodes."""
    tree = tree_file.tree
    metadata = {
        "format": "topo-search/masks",
        "version": "1",
        "name": tree_file.name,
        "num_draft_nodes": str(tree.num_draft_nodes),
        "verify_width": str(tree.verify_width),
        "ranks_per_depth": str(tree.max_rank + 1),
        "nodes": json.dumps(tree.paths),
    }
    return safetensors_bytes(masks(tree), metadata)
