from __future__ import annotations

import numpy as np
import pytest
from factories import closed, repeatable, trees
from hypothesis import given
from hypothesis import strategies as st

from topo_search.errors import InputError
from topo_search.tree import Tree


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([[0], [0], [0, 0]], r"entry 1 repeats \[0\], already entry 0"),
        ([[0], [1, 0]], r"entry 1 is \[1, 0\], but its prefix \[1\] is missing"),
        ([[0, 0, 0]], r"entry 0 is \[0, 0, 0\], but its prefix \[0, 0\] is missing"),
        ([[0], [-1]], r"entry 1 is \[-1\]: rank -1 is negative"),
        ([[0], [0, 1.0]], r"entry 1 is \[0, 1.0\]: rank 1.0 is not an integer"),
        ([[True]], r"entry 0 is \[True\]: rank True is not an integer"),
        ([[0], []], r"entry 1 is empty"),
        ([[0], 1], r"entry 1 is 1; a node is a list of ranks"),
        ([[0], "00"], r"entry 1 is '00'; a node is a list of ranks"),
        ("[[0]]", r"list of rank paths .* not '\[\[0\]\]'"),
        (None, r"list of rank paths .* not None"),
    ],
)
def test_every_fault_has_one_message_with_the_entry(entries: object, message: str) -> None:
    """FIELD-CASES 60, 61."""
    with pytest.raises(InputError, match=message):
        Tree.parse(entries)


def test_tuples_lists_and_any_order_make_the_same_tree() -> None:
    """FIELD-CASES 61: a mix is no fault, and the canonical order is by depth, then ranks."""
    tree = Tree.parse([(1, 0), [0], [np.int64(1)], (0, 2), [10], [2]])
    assert tree.paths == ((0,), (1,), (2,), (10,), (0, 2), (1, 0))
    assert tree == Tree(((2,), (10,), (0,), (0, 2), (1,), (1, 0)))
    assert {type(rank) for path in tree.paths for rank in path} == {int}


def test_mask_shows_each_node_its_ancestors_only() -> None:
    """FIELD-CASES 67: root -> 1, 2; 1 -> 3; 2 -> 4."""
    tree = Tree.parse([[0], [1], [0, 0], [1, 0]])
    seen = ((0,), (0, 1), (0, 2), (0, 1, 3), (0, 2, 4))
    assert tree.ancestors == seen
    assert [tuple(np.flatnonzero(row)) for row in tree.mask] == list(seen)


def test_depths_and_parents_follow_the_nodes_not_their_slots() -> None:
    """FIELD-CASES 1: ten cached tokens give positions 10, 11, 11, 12."""
    tree = Tree.parse([[0], [1], [0, 0]])
    assert (10 + tree.depths).tolist() == [10, 11, 11, 12]
    assert tree.parents.tolist() == [-1, 0, 0, 1]
    assert tree.slots == {(): 0, (0,): 1, (1,): 2, (0, 0): 3}


@pytest.mark.parametrize(
    ("entries", "depths", "parents", "is_chain"),
    [
        ([], [0], [-1], True),
        ([[0]], [0, 1], [-1, 0], True),
        ([[1]], [0, 1], [-1, 0], False),
        ([[0], [1], [2], [3]], [0, 1, 1, 1, 1], [-1, 0, 0, 0, 0], False),
        ([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], [0, 1, 2, 3, 4], [-1, 0, 1, 2, 3], True),
    ],
)
def test_flat_chain_single_and_empty_trees(
    entries: list[list[int]], depths: list[int], parents: list[int], is_chain: bool
) -> None:
    """FIELD-CASES 68, 69: the shapes."""
    tree = Tree.parse(entries)
    assert tree.depths.tolist() == depths
    assert tree.parents.tolist() == parents
    assert tree.is_chain == is_chain
    assert (tree.num_draft_nodes, tree.verify_width) == (len(entries), len(entries) + 1)
    assert tree.mask.shape == (tree.verify_width, tree.verify_width)
    assert tree.mask.sum() == sum(depths) + len(depths)


def test_chain_and_dense() -> None:
    assert Tree.chain(0) == Tree(())
    assert Tree.chain(3).paths == ((0,), (0, 0), (0, 0, 0))
    dense = Tree.dense([3, 2, 2])
    assert (dense.num_draft_nodes, dense.depth, dense.max_rank) == (21, 3, 2)
    assert dense.paths[:5] == ((0,), (1,), (2,), (0, 0), (0, 1))
    assert (Tree(()).depth, Tree(()).max_rank) == (0, -1)


@pytest.mark.parametrize(("branching", "entry"), [([0], 0), ([-1], 0), ([2, 0], 1), ([True], 0)])
def test_a_depth_without_candidates_is_refused(branching: list[int], entry: int) -> None:
    """It would be another tree than the one asked for, the empty one first of all."""
    with pytest.raises(
        InputError, match=f"Entry {entry} of a dense tree is {branching[entry]}; each depth has at least"
    ):
        Tree.dense(branching)


@pytest.mark.parametrize("length", [-1, True])
def test_a_chain_has_a_length(length: int) -> None:
    with pytest.raises(InputError, match=f"A chain's length is {length}; it counts nodes"):
        Tree.chain(length)


def test_leaves_are_the_paths_without_children() -> None:
    assert Tree.parse([[0], [1], [0, 0], [0, 2], [0, 2, 1]]).leaves == ((1,), (0, 0), (0, 2, 1))


def test_pruned_keeps_the_shallow_nodes() -> None:
    """FIELD-CASES 16: a tree deeper than the heads is offered cut to their number."""
    tree = closed([(0, 0, 0, 0), (2, 1)])
    assert tree.pruned(3) == closed([(0, 0, 0), (2, 1)])
    assert tree.pruned(9) == tree
    assert tree.pruned(0) == Tree(())


def test_networkx_has_the_root_the_edges_and_the_ranks() -> None:
    graph = Tree.parse([[0], [2], [2, 1]]).to_networkx()
    assert set(graph.edges) == {((), (0,)), ((), (2,)), ((2,), (2, 1))}
    assert graph.nodes[2, 1] == {"rank": 1, "depth": 2}


@repeatable
@given(tree=trees(ranks=3, depth=4), data=st.data())
def test_arrays_agree_with_the_paths(tree: Tree, data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(tree.paths))
    assert Tree.parse([list(path) for path in shuffled]) == tree
    nodes = [(), *tree.paths]
    for slot, path in enumerate(nodes):
        assert tree.depths[slot] == len(path)
        assert tree.parents[slot] == (nodes.index(path[:-1]) if path else -1)
        assert [nodes[seen] for seen in tree.ancestors[slot]] == [path[:k] for k in range(len(path) + 1)]
        assert tree.mask[slot].tolist() == [path[: len(other)] == other for other in nodes]
