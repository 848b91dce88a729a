"""`TreePlan`: a tree as the tensors one decode step needs, built once.

The mask buffer holds the visibility of every committed position and every slot of the tree. A step with `length`
committed tokens takes the view that starts at `capacity - length`: nothing is written or allocated per step, and a
sliding window needs no care, since the distance from a slot to a committed position depends on the view's column only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from topo_search.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLevel:
    """The expanded nodes of one depth, for heads whose lists depend on the path.

    Attributes:
        paths: `[expanded, depth + 1]`, slots from the root to each expanded node.
        children: `[children]`, slots of all their children.
        parent_rows: `[children]`, each child's parent as a row of `paths`.
        child_ranks: `[children]`, each child's rank in its parent's list.
        ranks: candidates that must be ranked: the largest of them plus one.
    """

    paths: Int[Tensor, "expanded depth_plus_one"]
    children: Int[Tensor, " children"]
    parent_rows: Int[Tensor, " children"]
    child_ranks: Int[Tensor, " children"]
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePlan:
    """Tensors of one tree on one device, for caches of up to `capacity` committed tokens.

    Attributes:
        tree: the tree; slot 0 is the root, slot i + 1 its node i.
        ranks: candidates that must be ranked per depth: the largest rank used, plus one.
        depth_index: `[nodes]`, depth - 1 of each node: which draft head proposes it.
        rank_index: `[nodes]`, rank of each node in its head's list.
        parents: `[nodes]`, parent slot of each node.
        children: per slot, the slots of its children.
        offsets: `[1, width]`, depth of each slot: its position relative to the root's.
        visible: `[width, width]`, True where a slot sees another.
        levels: the expanded nodes of each depth from the root's, 0, on.
        capacity: most committed tokens.
        full_mask: `[width, capacity + width]`, additive mask of full-attention layers.
        window_mask: the same for layers with a sliding window, or None.
    """

    tree: Tree
    ranks: int
    depth_index: Int[Tensor, " nodes"]
    rank_index: Int[Tensor, " nodes"]
    parents: Int[Tensor, " nodes"]
    children: tuple[tuple[int, ...], ...]
    offsets: Int[Tensor, "1 width"]
    visible: Bool[Tensor, "width width"]
    levels: tuple[TreeLevel, ...]
    capacity: int
    full_mask: Float[Tensor, "width slots"]
    window_mask: Float[Tensor, "width slots"] | None

    @property
    def verify_width(self) -> int:
        """Tokens the target runs per step."""
        return self.tree.verify_width

    def mask_at(self, length: int, *, windowed: bool = False) -> Float[Tensor, "1 1 width seen"]:
        """The additive mask over `length` committed tokens and the tree: a view, no copy."""
        mask = self.window_mask if windowed and self.window_mask is not None else self.full_mask
        return mask[None, None, :, self.capacity - length :]

    def masks_at(
        self, lengths: Int[Tensor, " batch"], *, windowed: bool = False
    ) -> Float[Tensor, "batch 1 width seen"]:
        """Masks of rows with committed lengths of their own, each row's tree right behind its text.

        Columns behind a row's tree hold what longer rows wrote, and are hidden.
        """
        mask = self.window_mask if windowed and self.window_mask is not None else self.full_mask
        seen = int(lengths.max()) + self.verify_width
        columns = torch.arange(seen, device=mask.device) - lengths[:, None] + self.capacity
        behind = columns >= mask.shape[1]
        rows = mask[:, columns.clamp(max=mask.shape[1] - 1)].transpose(0, 1)
        return rows.masked_fill(behind[:, None], torch.finfo(mask.dtype).min)[:, None]


def plan_tree(tree: Tree, *, capacity: int, window: int | None, dtype: torch.dtype, device: torch.device) -> TreePlan:
    """The plan of `tree` for a target with the given sliding window (in tokens), precision and device."""
    depths = torch.from_numpy(tree.depths).to(device)
    visible = torch.from_numpy(tree.mask).to(device)
    full = torch.cat([torch.ones(tree.verify_width, capacity, dtype=torch.bool, device=device), visible], dim=1)
    windowed = None
    if window is not None:
        # Columns' positions relative to the root's: committed tokens at -capacity .. -1, tree slots at their depth.
        columns = torch.cat([torch.arange(-capacity, 0, device=device), depths])
        near = depths[:, None] - columns[None, :] < window
        windowed = _additive(full & near, dtype)
    return TreePlan(
        tree=tree,
        ranks=tree.max_rank + 1,
        depth_index=depths[1:] - 1,
        rank_index=torch.tensor([path[-1] for path in tree.paths], dtype=torch.long, device=device),
        parents=torch.from_numpy(tree.parents[1:]).to(device),
        children=_children(tree),
        offsets=depths[None, :],
        visible=visible,
        levels=tuple(_level(tree, depth, device) for depth in range(tree.depth)),
        capacity=capacity,
        full_mask=_additive(full, dtype),
        window_mask=windowed,
    )


def _children(tree: Tree) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(tree.verify_width)]
    for slot, parent in enumerate(tree.parents.tolist()[1:], start=1):
        found[parent].append(slot)
    return tuple(tuple(slots) for slots in found)


def _level(tree: Tree, depth: int, device: torch.device) -> TreeLevel:
    children = [path for path in tree.paths if len(path) == depth + 1]
    expanded = sorted({path[:-1] for path in children})
    slots = tree.slots
    return TreeLevel(
        paths=torch.tensor([[slots[path[:n]] for n in range(depth + 1)] for path in expanded], device=device),
        children=torch.tensor([slots[path] for path in children], device=device),
        parent_rows=torch.tensor([expanded.index(path[:-1]) for path in children], device=device),
        child_ranks=torch.tensor([path[-1] for path in children], device=device),
        ranks=1 + max(path[-1] for path in children),
    )


def _additive(visible: Bool[Tensor, "width slots"], dtype: torch.dtype) -> Float[Tensor, "width slots"]:
    hidden = torch.full_like(visible, torch.finfo(dtype).min, dtype=dtype)
    return hidden.masked_fill(visible, 0.0)
