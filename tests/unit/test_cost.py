from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from factories import latency_table, timing

from topo_search.cost import OUT_OF_MEMORY, WHATEVER_EXPANDED, DraftTimes, Timing, expanded_by_depth
from topo_search.errors import InputError
from topo_search.search.times import StepTimes
from topo_search.tree import Tree

TWO_DEEP = Tree(((0,), (0, 0)))


def test_a_step_is_its_verify_and_its_draft_time_at_every_context() -> None:
    table = latency_table({1: 10.0, 3: 12.0}, [0.5, 0.75], contexts={100: 1.0, 900: 2.0})
    assert table.contexts() == [100, 900]
    assert table.widths() == [1, 3]
    assert table.step_ms(TWO_DEEP).tolist() == [12.75, 24.75]


def test_plain_decoding_runs_no_head() -> None:
    assert latency_table({1: 10.0}, [0.5]).step_ms(Tree(())).tolist() == [10.0]
    assert latency_table({1: 10.0}, []).draft_times().of(Tree(())) == 0.0


def test_a_width_counts_only_when_every_context_has_it() -> None:
    table = latency_table({1: 10.0, 2: 11.0, 3: 12.0, 4: 13.0}, contexts={100: 1.0, 900: 2.0})
    del table.verify[1, 900, 2]
    table.verify[1, 100, 4] = Timing(median_ms=None, p10_ms=None, p90_ms=None, count=0, status=OUT_OF_MEMORY)
    assert table.widths() == [1, 3]
    for width in (2, 4, 5):
        with pytest.raises(InputError, match=f"no time for verify width {width} at batch 1; measured: 1, 3"):
            table.step_ms(Tree(tuple((rank,) for rank in range(width - 1))))


def test_a_draft_depth_without_a_time_is_refused() -> None:
    table = latency_table({1: 10.0, 3: 11.0, 4: 11.0}, [0.5])
    table.draft[1, 2, WHATEVER_EXPANDED] = Timing(
        median_ms=None, p10_ms=None, p90_ms=None, count=0, status=OUT_OF_MEMORY
    )
    for tree in (TWO_DEEP, Tree.chain(3)):
        with pytest.raises(InputError, match=f"no draft time for depth {tree.depth}"):
            table.step_ms(tree)


def test_batches_never_mix() -> None:
    """FIELD-CASES 28: a time holds for the batch it was measured at."""
    table = latency_table({1: 10.0, 2: 11.0}, [0.5])
    table.verify[4, 32, 2], table.draft[4, 1, WHATEVER_EXPANDED] = timing(40.0), timing(3.0)
    assert (table.contexts(), table.widths()) == ([16], [1, 2])
    assert (table.contexts(4), table.widths(4)) == ([32], [2])
    assert table.step_ms(Tree.chain(1), batch=4).tolist() == [43.0]
    with pytest.raises(InputError, match="width 1 at batch 4; measured: 2"):
        table.step_ms(Tree(()), batch=4)
    with pytest.raises(InputError, match="at batch 2; measured: none"):
        table.step_ms(Tree(()), batch=2)


# Drafts that cost by expanded nodes


def spread_tree(*expanded: int) -> Tree:
    """A tree that expands so many nodes at each depth: every one of them has a child, the first ones the rest."""
    level: list[tuple[int, ...]] = [()]
    paths: list[tuple[int, ...]] = []
    for now, wanted in itertools.pairwise((*expanded, 1)):
        children = [(*node, 0) for node in level[:now]]
        children += [(*level[0], rank) for rank in range(1, 1 + max(0, wanted - len(children)))]
        paths += children
        level = children
    return Tree(tuple(paths))


def priced(call_ms: Callable[[int, int], float], counts: Sequence[int] = (1, 2, 4, 8), depths: int = 4) -> DraftTimes:
    """What `measure` finds where the call at a depth over n nodes takes `call_ms(depth, n)`."""
    return DraftTimes(
        ms={
            (depth, n): call_ms(0, 1) + sum(call_ms(at, n) for at in range(1, depth))
            for depth in range(1, depths + 1)
            for n in (counts if depth > 1 else (1,))
        }
    )


def test_expanded_nodes_are_counted_by_depth() -> None:
    assert expanded_by_depth(Tree(())) == []
    assert expanded_by_depth(spread_tree(1, 3, 2)) == [1, 3, 2]
    assert expanded_by_depth(Tree(((0,), (1,), (2,), (1, 0), (1, 1)))) == [1, 1]


@pytest.mark.parametrize("expanded", [(1,), (1, 1), (1, 2, 4), (1, 8, 1, 2), (1, 3, 5, 7), (1, 6, 6, 6)])
def test_a_draft_costs_the_calls_of_its_depths(expanded: tuple[int, ...]) -> None:
    """Linear calls are priced exactly, whatever a tree expands, though only trees of equal counts are timed."""

    def call_ms(depth: int, n: int) -> float:
        return 2.0 + depth + 0.5 * n * (depth + 1)

    expected = sum(call_ms(depth, n) for depth, n in enumerate(expanded))
    assert priced(call_ms).of(spread_tree(*expanded)) == pytest.approx(expected)


def test_a_timed_tree_costs_exactly_what_it_was_timed_at() -> None:
    times = priced(lambda depth, n: 1.0 + 0.3 * n**1.5 * (1 + depth % 2))
    for (depth, n), ms in times.ms.items():
        tree = spread_tree(1, *[n] * (depth - 1))
        assert times.weights(tree) == {(depth, n): 1.0}
        assert times.of(tree) == ms


def test_counts_between_measured_ones_lie_on_the_line_between_them() -> None:
    times = priced(lambda depth, n: float(n * n))  # calls of 1, 4, 16, 64 ms
    assert times.of(spread_tree(1, 3)) == pytest.approx(1 + (4 + 16) / 2)
    assert times.of(spread_tree(1, 5, 2)) == pytest.approx(1 + 0.75 * 16 + 0.25 * 64 + 4)


def test_nothing_is_extrapolated() -> None:
    times = priced(lambda depth, n: float(n), counts=(2, 4))
    for tree in (spread_tree(1, 5), spread_tree(1, 1), spread_tree(1, 2, 2, 2, 2)):
        assert times.weights(tree) is None
        assert math.isnan(times.of(tree))
    table = latency_table({1: 10.0, 11: 12.0})
    table.draft.clear()
    table.draft.update({(1, *cell): timing(ms) for cell, ms in times.ms.items()})
    with pytest.raises(InputError, match="depth 2 with 1, 5 expanded nodes by depth at batch 1; run topo-"):
        table.step_ms(spread_tree(1, 5))


def test_blind_heads_pay_for_depth_alone() -> None:
    times = latency_table({1: 10.0}, [0.5, 0.75]).draft_times()
    assert not times.by_expanded
    assert times.of(spread_tree(1, 7)) == times.of(Tree.chain(2)) == 0.75


def test_steps_are_paid_for_by_their_mean() -> None:
    """Skewed times: every median is 10 ms, every mean 11; a decode of many steps takes 11 ms each."""
    skewed = Timing(median_ms=10.0, mean_ms=11.0, p10_ms=9.0, p90_ms=20.0, count=9)
    table = latency_table({1: 1.0, 2: 1.0}, [])
    table.verify.update(dict.fromkeys(table.verify, skewed))
    table.draft[1, 1, WHATEVER_EXPANDED] = skewed
    assert table.mean_over_median == pytest.approx(1.1)
    assert table.step_ms(Tree.chain(1)) == pytest.approx(22.0)
    times = StepTimes.of(table)
    assert times.tree_ms(Tree.chain(1)) == pytest.approx(22.0)
    assert times.costs(np.ones(1), 1).step_ms(Tree.chain(1)) == pytest.approx(22.0)
    assert latency_table({1: 10.0}).mean_over_median == 1.0  # where only medians are known


def test_a_familys_times_are_those_of_its_trees() -> None:
    order = spread_tree(1, 3, 5).paths
    table = latency_table({width: 10.0 + width for width in range(1, 12) if width != 4}, contexts={16: 1.0, 99: 1.5})
    for draft in (priced(lambda depth, n: 1.0 + n**1.5 + depth), table.draft_times(), priced(lambda d, n: 1.0, (1, 2))):
        times = replace(StepTimes.of(table), draft=draft, scale=1.25)
        sizes = [1, 2, 3, 6, len(order)]
        expected = [times.tree_ms(Tree(order[:size])) for size in sizes]
        np.testing.assert_allclose(times.family_ms(order, sizes), expected)
    assert times.family_ms(order, []).shape == (0, 2)


# The solvers' affine model


def test_affine_calls_are_found_exactly() -> None:
    """Then what the ratio solver adds up node by node is what the judge prices."""
    table = latency_table({1: 10.0, 8: 12.0, 12: 12.0})
    table.draft.clear()
    table.draft.update({(1, *c): timing(ms) for c, ms in priced(lambda d, n: 1.0 + d + 0.5 * n).ms.items()})
    times = StepTimes.of(table)
    costs = times.costs(np.ones(1), 4)
    for tree in (Tree(()), spread_tree(1, 3, 3), spread_tree(1, 2, 4, 4)):
        if tree.verify_width in times.verify_ms:
            assert costs.step_ms(tree) == pytest.approx(float(times.tree_ms(tree)[0]))
    assert costs.draft.per_expanded == pytest.approx((0.0, 0.5, 0.5, 0.5))
    assert costs.draft.by_depth == pytest.approx((0.0, 1.5, 3.5, 6.5, 10.5))


@pytest.mark.parametrize(
    ("call_ms", "fixed", "per_node"),
    [
        (lambda depth, n: 5.0 - 0.5 * n, 5.0 - 0.5 * 4 / 1.875, 0.0),  # falls: noise, so a flat mean by weight 1 / n
        (lambda depth, n: n - 0.5, 0.0, (15 - 0.5 * 4) / 15),  # less than nothing at zero nodes
        (lambda depth, n: -1.0, 0.0, 0.0),
    ],
)
def test_no_affine_call_is_negative(call_ms: Callable[[int, int], float], fixed: float, per_node: float) -> None:
    costs = StepTimes(
        contexts=(1,),
        verify_ms={1: np.ones(1)},
        draft=DraftTimes(ms={(1, 1): 1.0} | {(2, n): 1.0 + call_ms(1, n) for n in (1, 2, 4, 8)}),
    ).costs(np.ones(1), 2)
    assert costs.draft.per_expanded[1] == pytest.approx(per_node)
    assert costs.draft.by_depth == pytest.approx((0.0, 1.0, 1.0 + fixed))


def test_the_nearest_context_is_the_smaller_one_between_two() -> None:
    table = latency_table({1: 10.0}, contexts={300: 1.0, 100: 1.0, 200: 1.0})
    found = table.nearest_context(np.array([0, 149, 150, 151, 250, 251, 9999]))
    assert found.tolist() == [0, 0, 0, 1, 1, 2, 2]
