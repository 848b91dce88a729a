"""Step-start refinement: MATH 5."""

from __future__ import annotations

import numpy as np
import pytest
from factories import all_subtrees, repeatable, trace_of, traces
from hypothesis import given
from hypothesis import strategies as st

from topo_search.estimates import backoff, joint
from topo_search.prefixes import PrefixTable
from topo_search.replay import replay
from topo_search.search.frontier import frontier
from topo_search.search.refine import refine
from topo_search.search.swaps import steps_left
from topo_search.trace import RankTrace
from topo_search.tree import Tree

# Period 3; the answer of 61 tokens starts in the third phase.
THREE_PHASES = trace_of([((0, 1), (1, 2), (1, 2))[j % 3] for j in range(60)], resolved=2)


@pytest.mark.parametrize("estimator", [joint, backoff])
def test_three_phases_need_a_swap(estimator: object) -> None:
    """The all-position choice delivers exactly 2.0, recounting stays there, a single swap finds 3.0."""
    table = PrefixTable.of(THREE_PHASES)
    tree = frontier(estimator(table), num_draft_nodes=2).tree(2)
    assert tree.paths == ((0,), (1,))
    recounted = refine(THREE_PHASES, table, tree, estimator=estimator, max_depth=2, max_swaps=0)
    swapped = refine(THREE_PHASES, table, tree, estimator=estimator, max_depth=2, max_swaps=1)
    assert replay(THREE_PHASES, [tree, recounted, swapped]).tokens_per_step.tolist() == [2.0, 2.0, 3.0]
    assert swapped.paths == ((0,), (0, 1))


def test_the_result_is_no_deeper_than_asked() -> None:
    """A deeper tree drafts for longer, so by default the depth stays."""
    table = PrefixTable.of(THREE_PHASES)
    assert refine(THREE_PHASES, table, Tree(((0,), (1,)))).depth == 1


@repeatable
@given(trace=traces(resolved=2, rows=12), data=st.data())
def test_never_worse_of_the_same_size_and_no_single_swap_is_better(trace: RankTrace, data: st.DataObject) -> None:
    tree = Tree(data.draw(st.sampled_from(all_subtrees(2, 3))))
    table = PrefixTable.of(trace)
    refined = refine(trace, table, tree, max_depth=3)
    before, after = replay(trace, [tree, refined], table=table).steps
    assert (refined.num_draft_nodes, after <= before) == (tree.num_draft_nodes, True)
    neighbours = [
        Tree((*(path for path in refined.paths if path != leaf), path))
        for leaf in refined.leaves
        for path in table.numbers
        if path not in refined.paths and path[:-1] != leaf and path[:-1] in {(), *refined.paths}
    ]
    assert all(steps >= after for steps in replay(trace, neighbours, table=table).steps)


def test_recounting_at_step_starts_finds_what_every_position_hides() -> None:
    """All three nodes are as likely over all positions, but no step of {(0), (1)} starts where (1) is right."""
    trace = trace_of([((0, 1), (1, 2), (2, 2))[j % 3] for j in range(60)], resolved=2)
    table = PrefixTable.of(trace)
    tree = frontier(joint(table), num_draft_nodes=2).tree(2)
    better = refine(trace, table, tree, estimator=joint, max_depth=2, max_swaps=0)
    assert (tree.paths, better.paths) == (((0,), (1,)), ((0,), (0, 1)))
    assert replay(trace, [tree, better]).tokens_per_step.tolist() == [1.5, 3.0]


@repeatable
@given(trace=traces(), data=st.data())
def test_steps_left_and_the_exact_difference_of_two_walks(trace: RankTrace, data: st.DataObject) -> None:
    """MATH 5: over the starts of the new walk, what the old tree needs from its next start less from the old next."""
    draw = st.sampled_from(all_subtrees(2, 3))
    walks = replay(trace, [Tree(data.draw(draw)), Tree(data.draw(draw))])
    old, new = walks.emitted.astype(np.int64)
    left = steps_left(old, trace.remaining)
    firsts = trace.starts[:-1][np.diff(trace.starts) > 0]
    assert left[firsts].sum() == walks.steps[0]
    starts, end = np.flatnonzero(walks.visited[1]), len(old)
    rest = trace.remaining[starts]
    after_new = np.where(new[starts] == rest, end, starts + new[starts])
    after_old = np.where(old[starts] == rest, end, starts + old[starts])
    assert walks.steps[1] - walks.steps[0] == (left[after_new] - left[after_old]).sum()


def test_adding_a_node_can_take_more_steps() -> None:
    """MATH 5: so no size is skipped. With (0, 0) the first step ends behind the row where (1, 0) is right."""
    trace = trace_of([(0, 0), (2, 2), (1, 0), (2, 2), (2, 2)], resolved=2)
    assert replay(trace, [Tree(((0,), (1,), (1, 0))), Tree(((0,), (1,), (0, 0), (1, 0)))]).steps.tolist() == [2, 3]
