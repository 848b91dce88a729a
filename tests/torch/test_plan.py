"""A tree as tensors: positions, masks as views, and the acceptance of paths."""

from __future__ import annotations

import random

import pytest
import torch
from factories import closed, repeatable, trees
from hypothesis import given
from hypothesis import strategies as st
from models import MEDUSA_63, SPARSE, TREES, target_of

from topo_search.decode.plan import TreePlan, plan_tree
from topo_search.decode.step import TreeStep, accepted_slots
from topo_search.tree import Tree

CAPACITY = 20


def plan_of(tree: Tree, *, window: int | None = None, capacity: int = CAPACITY) -> TreePlan:
    return plan_tree(tree, capacity=capacity, window=window, dtype=torch.float64, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("tree", "positions"),
    [
        (Tree(((0,), (1,), (0, 0))), [10, 11, 11, 12]),
        (Tree(()), [10]),
        (Tree.chain(3), [10, 11, 12, 13]),
        (Tree.dense([2, 2]), [10, 11, 11, 12, 12, 12, 12]),
    ],
)
def test_positions_are_the_roots_plus_depth(tree: Tree, positions: list[int]) -> None:
    """FIELD-CASES 1: never the slot in the flat list, which is the depth of a chain only."""
    target = target_of("llama")
    cache = target.new_cache(10 + tree.verify_width)
    target.hidden_states(torch.arange(10)[None], cache=cache)
    cache.commit(10)
    step = TreeStep(target, None, plan_of(tree))
    step.tree_states(cache)
    assert step.positions.tolist() == [positions]


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("length", [0, 1, 7, CAPACITY])
def test_a_node_sees_the_committed_text_and_its_own_path(tree: Tree, length: int) -> None:
    mask = plan_of(tree).mask_at(length)
    hidden = torch.finfo(torch.float64).min
    assert mask.shape == (1, 1, tree.verify_width, length + tree.verify_width)
    assert not mask[..., :length].any()
    assert torch.equal(mask[0, 0, :, length:] == 0, torch.from_numpy(tree.mask))
    assert set(mask.unique().tolist()) <= {0.0, hidden}


def test_siblings_branches_are_hidden_from_each_other() -> None:
    """FIELD-CASES 67: root to 1 and 2, 1 to 3, 2 to 4."""
    mask = plan_of(Tree(((0,), (1,), (0, 0), (1, 0)))).mask_at(0)[0, 0]
    assert [torch.nonzero(row == 0).flatten().tolist() for row in mask] == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]


@pytest.mark.parametrize("window", [1, 2, 4, 9])
@pytest.mark.parametrize("length", [0, 3, CAPACITY])
def test_a_window_hides_what_lies_too_far_back(window: int, length: int) -> None:
    """FIELD-CASES 9: transformers passes a 4-D mask on as given, so the window is ours to apply."""
    mask = plan_of(SPARSE, window=window).mask_at(length, windowed=True)[0, 0]
    positions = [*range(length), *(length + int(depth) for depth in SPARSE.depths)]
    for slot, seen in enumerate(SPARSE.ancestors):
        near = {key for key, at in enumerate(positions) if positions[length + slot] - at < window}
        expected = near & {*range(length), *(length + other for other in seen)}
        assert set(torch.nonzero(mask[slot] == 0).flatten().tolist()) == expected


def test_a_windowed_plan_still_has_the_full_mask() -> None:
    """Models whose layers differ take one mask each."""
    windowed, plain = plan_of(SPARSE, window=2), plan_of(SPARSE)
    assert torch.equal(windowed.mask_at(9), plain.mask_at(9))
    assert not torch.equal(windowed.mask_at(9, windowed=True), plain.mask_at(9))
    assert torch.equal(plain.mask_at(9, windowed=True), plain.mask_at(9))


def test_masks_are_views_of_one_buffer() -> None:
    """FIELD-CASES 49: no mask is built in a step."""
    plan = plan_of(MEDUSA_63, window=4)
    for length in (0, 5, CAPACITY):
        for windowed, buffer in ((False, plan.full_mask), (True, plan.window_mask)):
            assert buffer is not None
            view = plan.mask_at(length, windowed=windowed)
            assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def test_indices_of_a_small_tree() -> None:
    plan = plan_of(Tree(((0,), (2,), (0, 1), (2, 0), (0, 1, 3))))
    assert plan.ranks == 4
    assert plan.depth_index.tolist() == [0, 0, 1, 1, 2]
    assert plan.rank_index.tolist() == [0, 2, 1, 0, 3]
    assert plan.parents.tolist() == [0, 0, 1, 2, 3]


def walked(tree: Tree, tokens: list[int], choices: list[int]) -> list[int]:
    """Accepted slots, node by node: go to the child that carries the target's choice."""
    path: tuple[int, ...] | None = ()
    slots: list[int] = []
    while path is not None:
        slot = tree.slots[path]
        slots.append(slot)
        children = [child for child in tree.paths if child[:-1] == path]
        path = next((child for child in children if tokens[tree.slots[child]] == choices[slot]), None)
    return slots


@repeatable
@given(tree=trees(ranks=3, depth=4), seed=st.integers(0, 1000))
def test_the_accepted_slots_are_the_walk_of_the_targets_choices(tree: Tree, seed: int) -> None:
    """Ids from 0 up are drawn, so a path that padded shorter ones with token 0 would accept too much."""
    draw = random.Random(seed)
    tokens = [draw.randrange(4)] + [path[-1] for path in tree.paths]  # siblings differ
    choices = [draw.randrange(4) for _ in tokens]
    found = accepted_slots(torch.tensor(tokens), torch.tensor(choices), plan_of(tree))
    assert found.tolist() == walked(tree, tokens, choices)


def test_nothing_after_the_first_mismatch_is_accepted() -> None:
    """FIELD-CASES 19: matches 1, 0, 1, 0 accept one token."""
    tokens, choices = torch.tensor([9, 1, 2, 3, 4]), torch.tensor([1, 8, 3, 8, 5])
    found = accepted_slots(tokens, choices, plan_of(Tree.chain(4)))
    assert found.tolist() == [0, 1]


def test_a_short_path_beside_a_long_one_accepts_no_more_than_its_length() -> None:
    tree = closed([(0, 0, 0), (1,)])
    tokens = torch.tensor([5, 7, 0, 0, 0])  # slots: root, (0), (1), (0, 0), (0, 0, 0)
    choices = torch.tensor([0, 0, 0, 0, 0])
    assert accepted_slots(tokens, choices, plan_of(tree)).tolist() == [0, 2]
