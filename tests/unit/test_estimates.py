from __future__ import annotations

import numpy as np
import pytest
from factories import TABLE_A, all_subtrees, goldens, repeatable, trace_of, traces
from hypothesis import given
from hypothesis import strategies as st

from topo_search.errors import InputError
from topo_search.estimates import (
    ESTIMATORS,
    PathProbabilities,
    estimate,
    independent,
    joint,
    rank_table_of,
)
from topo_search.prefixes import PrefixTable
from topo_search.replay import replay
from topo_search.trace import RankTrace
from topo_search.tree import Path, Tree

GOLDENS = goldens()


def by_path(found: PathProbabilities) -> dict[Path, float]:
    return dict(zip(found.paths, found.probabilities.tolist(), strict=True))


def test_product_limit_in_closed_form() -> None:
    """MATH 3: a child keeps its parent's share when the other rows end before its depth."""
    trace = trace_of([[0, 0], [1, 0], [0, 3]], [[0, 2], [0, 0]], [[3, 0]])
    assert by_path(joint(PrefixTable.of(trace))) == pytest.approx(
        {
            (0,): 4 / 6,  # six rows observe depth 1
            (1,): 1 / 6,
            (0, 0): 4 / 6 * 1 / 2,  # of the rows that start with 0, two observe depth 2
            (0, 2): 4 / 6 * 1 / 2,
            (1, 0): 1 / 6,
        }
    )


def test_counts_over_per_depth_denominators_would_pass_the_parent() -> None:
    """MATH 3: (0, 0) starts 1 of the 1 rows that observe depth 2, (0) only 2 of 3."""
    probabilities = by_path(joint(PrefixTable.of(trace_of([[0, 0], [0, 0]], [[1, 0]]))))
    assert probabilities[0, 0] == probabilities[(0,)] == 2 / 3


@pytest.mark.parametrize("name", ESTIMATORS)
@repeatable
@given(trace=traces())
def test_a_child_never_exceeds_its_parent(name: str, trace: RankTrace) -> None:
    probabilities = {(): 1.0} | by_path(estimate(name, PrefixTable.of(trace)))
    assert all(0 < p <= probabilities[path[:-1]] for path, p in probabilities.items() if path)


def test_an_unknown_estimator_is_refused_with_the_choices() -> None:
    with pytest.raises(InputError, match="no estimator 'marginal'; choose one of backoff, joint, independent"):
        estimate("marginal", PrefixTable.of(trace_of([[0]])))


@pytest.mark.parametrize(("ranks", "depth"), [(3, 2), (2, 3)])
@repeatable
@given(data=st.data())
def test_expected_tokens_add_up_over_the_nodes(ranks: int, depth: int, data: st.DataObject) -> None:
    """MATH 3: mean emitted = 1 + sum of P where no row is cut short, for every sub-tree."""
    trace = data.draw(traces(resolved=ranks, depth=depth))
    uncut = np.flatnonzero(trace.remaining > depth)
    if not len(uncut):
        return
    probabilities = by_path(joint(PrefixTable.of(trace, rows=uncut)))
    subtrees = data.draw(st.lists(st.sampled_from(all_subtrees(ranks, depth)), min_size=1, max_size=20))
    walks = replay(trace, [Tree(paths) for paths in subtrees])
    sums = [1 + sum(probabilities.get(path, 0.0) for path in paths) for paths in subtrees]
    assert walks.emitted[:, uncut].mean(axis=1) == pytest.approx(sums)


@repeatable
@given(trace=traces(), data=st.data())
def test_all_positions_add_up_over_the_nodes_that_the_end_leaves(trace: RankTrace, data: st.DataObject) -> None:
    """MATH 3: a node counts on the rows with more remaining than it is deep."""
    paths = data.draw(st.sampled_from(all_subtrees(2, 3)))
    rows = [(tuple(row), remaining) for row, remaining in zip(trace.ranks.tolist(), trace.remaining, strict=True)]
    if not rows:
        return
    counted = [sum(left > len(path) and row[: len(path)] == path for row, left in rows) for path in paths]
    assert replay(trace, [Tree(paths)]).all_positions[0] == pytest.approx(1 + sum(counted) / len(rows))


def test_independent_from_a_trace_multiplies_each_heads_own_rates() -> None:
    """MATH 3: each depth has its own denominator, and rows behind a miss count too."""
    table = PrefixTable.of(trace_of([[0, 0], [1, 0], [3, 1]], [[0, 2], [0, 0]]))
    assert rank_table_of(table) == [[3 / 5, 1 / 5, 0.0], [2 / 3, 0.0, 1 / 3]]
    assert by_path(estimate("independent", table)) == pytest.approx(
        {(0,): 3 / 5, (1,): 1 / 5, (0, 0): 2 / 5, (0, 2): 1 / 5, (1, 0): 2 / 15, (1, 2): 1 / 15}
    )


def test_independent_lists_the_likeliest_paths_first() -> None:
    """FIELD-CASES, table A: tied at .06, the shallower first, then by rank."""
    probabilities = by_path(independent(TABLE_A, 9))
    order = [(0,), (0, 0), (1,), (0, 1), (1, 0), (0, 0, 0), (2,), (0, 2), (0, 0, 1)]
    assert list(probabilities) == order
    assert list(probabilities.values()) == pytest.approx([0.6, 0.24, 0.15, 0.06, 0.06, 0.06, 0.05, 0.03, 0.024])


def test_independent_breaks_ties_beyond_the_rounding_of_products() -> None:
    """MATH 3: .05 x .45 is larger than .15 x .15 in its last digit only."""
    order = list(by_path(independent([[0.15, 0.05], [0.45, 0.15]], 9)))
    assert order == [(0,), (0, 0), (1,), (0, 1), (1, 0), (1, 1)]


def test_independent_leaves_out_what_never_happens() -> None:
    assert by_path(independent([[0.0, 0.5], [0.0, 0.0, 1.0]], 10)) == {(1,): 0.5, (1, 2): 0.5}
    assert by_path(independent([[0.5, 0.0]], 3, repeat_last=True)) == {(0,): 0.5, (0, 0): 0.25, (0, 0, 0): 0.125}
    assert by_path(independent([], 3)) == {}
    assert by_path(independent(TABLE_A, 0)) == {}


def tokens(found: PathProbabilities, num_draft_nodes: int) -> float:
    assert len(found.probabilities) == num_draft_nodes
    return 1 + float(found.probabilities.sum())


@pytest.mark.parametrize("source", ["medusa_csv", "ppd"])
def test_published_rank_tables_give_the_golden_tokens_per_step(source: str) -> None:
    for model in GOLDENS[source].values():
        best = model["best_tokens_per_step_by_num_draft_nodes"]
        found = {size: tokens(independent(model["rank_table"], int(size)), int(size)) for size in best}
        assert found == pytest.approx(best, abs=5e-5)


def test_sequoia_vector_gives_the_golden_tokens_per_step() -> None:
    """Sizes include the root; one vector serves every depth, without bound or at most nine levels."""
    golden = GOLDENS["sequoia"]
    counts = golden["event_counts_rank_1_to_32"]
    shares = [count / (sum(counts) + golden["events_none"]) for count in counts]
    unbounded = golden["best_tokens_per_step_by_size_including_root_any_rank_order_unbounded_depth"]
    nine = golden["same_at_most_9_draft_levels"]
    found = {size: tokens(independent([shares], int(size) - 1, repeat_last=True), int(size) - 1) for size in unbounded}
    assert found == pytest.approx(unbounded, abs=5e-5)
    found = {size: tokens(independent([shares] * 9, int(size) - 1), int(size) - 1) for size in nine}
    assert found == pytest.approx(nine, abs=5e-5)


def test_the_published_63_node_tree_is_the_best_of_its_rank_table() -> None:
    golden = GOLDENS["medusa_63"]
    tree = Tree(tuple(by_path(independent(golden["rank_table"], 63))))
    assert [int((tree.depths == depth).sum()) for depth in range(1, 5)] == golden["nodes_per_depth"]
    assert len(tree.leaves) == 42
