from __future__ import annotations

import numpy as np
import pytest
from factories import TABLE_A, all_subtrees, goldens, repeatable, traces
from hypothesis import given
from hypothesis import strategies as st

from topo_search.estimates import PathProbabilities, independent, joint
from topo_search.prefixes import PrefixTable
from topo_search.search.frontier import Frontier, frontier
from topo_search.trace import RankTrace
from topo_search.tree import Tree, canonical_key

TABLE_A_TOKENS = [1.0, 1.6, 1.84, 1.99, 2.05, 2.11, 2.17, 2.22, 2.25, 2.274]


def assert_best_at_every_size(family: Frontier, ranks: int, depth: int) -> None:
    """Compare with every prefix-closed set of so many ranks and so deep."""
    probability = dict(zip(family.order, family.probabilities.tolist(), strict=True))
    best = [0.0] * (len(family.order) + 1)
    for paths in all_subtrees(ranks, depth):
        size = min(len(paths), len(best) - 1)
        best[size] = max(best[size], sum(probability.get(path, 0.0) for path in paths))
    assert family.expected_tokens() == pytest.approx(1 + np.array(best))


SHAPES = pytest.mark.parametrize(("ranks", "depth"), [(3, 2), (2, 3)])


@SHAPES
@repeatable
@given(data=st.data())
def test_no_tree_of_its_size_beats_the_sort(ranks: int, depth: int, data: st.DataObject) -> None:
    """MATH 3: closed and optimal at every size, on traces with short answers, ties and absent nodes."""
    trace = data.draw(traces(resolved=ranks, depth=depth, rows=5))
    family = frontier(joint(PrefixTable.of(trace)), num_draft_nodes=99)
    assert all(family.tree(size).num_draft_nodes == size for size in range(len(family.order) + 1))
    assert_best_at_every_size(family, ranks, depth)


@SHAPES
@pytest.mark.parametrize("row", [(0.5, 0.25, 0.25), (0.0, 0.5, 0.5), (0.3, 0.4, 0.0), (1.0, 0.0, 0.0)])
def test_tied_zero_and_unordered_weights(ranks: int, depth: int, row: tuple[float, ...]) -> None:
    family = frontier(independent([row[:ranks]] * depth, 99), num_draft_nodes=99)
    assert min(family.probabilities) > 0
    assert_best_at_every_size(family, ranks, depth)


@repeatable
@given(trace=traces(rows=12), size=st.integers(0, 12), max_depth=st.sampled_from([None, 1, 2, 3]))
def test_order_is_by_probability_then_depth_then_ranks(trace: RankTrace, size: int, max_depth: int | None) -> None:
    estimate = joint(PrefixTable.of(trace))
    paths = [tuple(row[:depth]) for row, depth in zip(estimate.ranks.tolist(), estimate.depths, strict=True)]
    allowed = [
        (p, path) for p, path in zip(estimate.probabilities, paths, strict=True) if len(path) <= (max_depth or 3)
    ]
    allowed.sort(key=lambda pair: (-float(f"{pair[0]:.11e}"), canonical_key(pair[1])))
    family = frontier(estimate, num_draft_nodes=size, max_depth=max_depth)
    assert family.order == tuple(path for _, path in allowed[:size])
    assert family.probabilities.tolist() == [p for p, _ in allowed[:size]]


def test_table_a_and_its_ties() -> None:
    """FIELD-CASES, table A: three nodes tie at .06; the order given does not matter."""
    estimate = independent(TABLE_A, 30)
    backwards = PathProbabilities(
        ranks=estimate.ranks[::-1], depths=estimate.depths[::-1], probabilities=estimate.probabilities[::-1]
    )
    for given_order in (estimate, backwards):
        family = frontier(given_order, num_draft_nodes=9)
        assert family.order[3:6] == ((0, 1), (1, 0), (0, 0, 0))
        assert family.expected_tokens() == pytest.approx(TABLE_A_TOKENS)


def test_floats_that_differ_in_their_last_digits_tie() -> None:
    """MATH 3: .1 + .2 is larger than .3 by its rounding only, so depth and ranks decide."""
    estimate = PathProbabilities(
        ranks=np.array([[0, -1], [1, -1], [2, -1], [0, 0], [0, 1]]),
        depths=np.array([1, 1, 1, 2, 2]),
        probabilities=np.array([0.7, 0.3, 0.1 + 0.2, 0.1 + 0.2, 0.3]),
    )
    for size, order in enumerate([(0,), (1,), (2,), (0, 0), (0, 1)], start=1):
        assert frontier(estimate, num_draft_nodes=size).order[-1] == order


def test_a_node_that_never_happens_is_never_added() -> None:
    estimate = PathProbabilities(
        ranks=np.array([[0], [1], [2]]), depths=np.array([1, 1, 1]), probabilities=np.array([0.0, 0.4, 0.0])
    )
    assert frontier(estimate, num_draft_nodes=3).order == ((1,),)


def test_every_prefix_of_the_add_order_is_the_best_tree_of_its_size() -> None:
    """FIELD-CASES 44: a 63-node tree cut to k rows of its add-order stays closed and best."""
    rank_table = goldens()["medusa_63"]["rank_table"]
    family = frontier(independent(rank_table, 200), num_draft_nodes=63)
    for size in range(64):
        alone = independent(rank_table, size)
        paths = [tuple(row[:depth]) for row, depth in zip(alone.ranks.tolist(), alone.depths, strict=True)]
        assert family.tree(size) == Tree(tuple(paths))
    assert family.tree(999) == family.tree(63)
    assert np.all(np.diff(family.probabilities) <= 1e-12)


def test_table_a_over_jagged_times() -> None:
    """FIELD-CASES 25: tokens per second at the measured widths; stopping at the first drop would miss n = 4."""
    ms = np.array([28.8, 30.9, 32.3, 36.9, 37.0, 44.5, 46.4, 49.7, 112.0])
    per_second = 1000 * frontier(independent(TABLE_A, 9), num_draft_nodes=8).expected_tokens() / ms
    assert per_second[[2, 3, 4, 8]] == pytest.approx([57.0, 53.9, 55.4, 20.1], abs=0.05)
    assert per_second.argmax() == 2


@pytest.mark.parametrize(
    ("slope", "size", "speedup", "paths"),
    [(0.24, 1, 1.290, ((0,),)), (0.04, 3, 1.777, ((0,), (1,), (0, 0)))],
)
def test_table_a_over_costs_that_rise_with_width(
    slope: float, size: int, speedup: float, paths: tuple[tuple[int, ...], ...]
) -> None:
    """FIELD-CASES 26: a dear position leaves one node, a cheap one three."""
    family = frontier(independent(TABLE_A, 9), num_draft_nodes=9)
    gain = family.expected_tokens() / (1 + slope * np.arange(10))
    assert (gain.argmax(), gain.max()) == (size, pytest.approx(speedup, abs=5e-4))
    assert family.tree(size).paths == paths
