from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from factories import TABLE_A, drawn_trace, latency_table, repeatable, trace_of, traces
from hypothesis import assume, given
from hypothesis import strategies as st

from topo_search.cost import LatencyTable
from topo_search.errors import InputError
from topo_search.estimates import joint
from topo_search.prefixes import PrefixTable
from topo_search.replay import replay
from topo_search.search.choose import Settings
from topo_search.search.frontier import frontier
from topo_search.search.optimize import CHAIN, PLAIN, TREE, optimize
from topo_search.trace import RankTrace
from topo_search.tree import Tree

JAGGED = dict(enumerate([28.8, 30.9, 32.3, 36.9, 37.0, 44.5, 46.4, 49.7, 112.0], start=1))


def asked(budget: int, **changes: Any) -> Settings:
    """Plain counts and the best size: what can be checked by hand."""
    return Settings(budget=budget, **({"estimator": "joint", "pick": "best"} | changes))


@pytest.fixture(scope="module")
def table_a() -> RankTrace:
    """Independent rows drawn from table A of FIELD-CASES."""
    return drawn_trace(TABLE_A, prompts=100, rows=300)


def ms_by_hand(trace: RankTrace, tree: Tree, latency: LatencyTable) -> float:
    """Step after step, each at the measured context nearest to its own."""
    measured, contexts = latency.contexts(), trace.contexts.tolist()
    step_ms = latency.step_ms(tree)
    total = 0.0
    for row in np.flatnonzero(replay(trace, [tree]).visited[0]):
        total += step_ms[min(range(len(measured)), key=lambda c: (abs(measured[c] - contexts[row]), measured[c]))]
    return total


def test_jagged_times_are_evaluated_at_every_width(table_a: RankTrace) -> None:
    """FIELD-CASES 25: n = 2 wins with 57.0 tokens/s, which is the chain; the frontier goes on to n = 8."""
    result = optimize(table_a, latency_table(JAGGED), asked(64))
    per_second = {size.tree.num_draft_nodes: size.tokens_per_s for size in result.sizes}
    assert list(per_second) == list(range(1, 9))
    assert [per_second[n] for n in (2, 3, 4, 8)] == pytest.approx([57.0, 53.9, 55.4, 20.1], rel=0.01)
    assert result[TREE].tree == Tree.chain(2)
    assert result.recommended == CHAIN


def test_the_search_goes_on_after_a_drop(table_a: RankTrace) -> None:
    """FIELD-CASES 25: faster at n = 2 than at n = 3, and fastest at n = 6."""
    result = optimize(table_a, latency_table({**JAGGED, 5: 50.0, 6: 50.0, 7: 33.0, 8: 90.0}), asked(9))
    speeds = [size.tokens_per_s for size in result.sizes]
    assert speeds[1] > speeds[2] > speeds[3]
    assert result[TREE].tree == Tree.parse([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    assert result.recommended == TREE


@pytest.mark.parametrize(("slope", "paths"), [(0.24, [[0]]), (0.04, [[0], [0, 0], [1]])])
def test_plain_chain_and_tree_stand_side_by_side(table_a: RankTrace, slope: float, paths: list[list[int]]) -> None:
    """FIELD-CASES 26."""
    result = optimize(table_a, latency_table({m: 1 + slope * (m - 1) for m in range(1, 17)}), asked(16))
    assert [alternative.name for alternative in result.alternatives] == [PLAIN, CHAIN, TREE]
    assert result[TREE].tree == Tree.parse(paths)
    assert result[TREE].speedup == pytest.approx({0.24: 1.290, 0.04: 1.777}[slope], rel=0.01)
    assert (result[PLAIN].tree, result[PLAIN].speedup, result[PLAIN].tokens_per_step) == (Tree(()), 1.0, 1.0)
    assert result[CHAIN].tree.is_chain


@pytest.mark.parametrize("budget", [0, -3])
def test_a_budget_below_one_is_refused(budget: int) -> None:
    with pytest.raises(InputError, match=f"budget is {budget}; it counts tokens verified per step, root included"):
        optimize(trace_of([[0, 0]] * 4), latency_table(JAGGED), asked(budget))


def test_a_budget_of_one_is_plain_decoding(table_a: RankTrace) -> None:
    result = optimize(table_a, latency_table(JAGGED), asked(1))
    assert {alternative.tree for alternative in result.alternatives} == {Tree(())}
    assert (result.recommended, len(result.sizes)) == (PLAIN, 1)


@pytest.mark.parametrize("budget", range(2, 10))
def test_no_tree_is_wider_than_the_budget(table_a: RankTrace, budget: int) -> None:
    flat = latency_table(dict.fromkeys(range(1, 17), 10.0))
    result = optimize(table_a, flat, asked(budget))
    assert result[TREE].tree.verify_width == budget
    assert result[CHAIN].tree == Tree.chain(min(budget - 1, 3))


def test_a_trace_without_rows_is_refused() -> None:
    with pytest.raises(InputError, match="no rows: every answer is one token long"):
        optimize(trace_of([], [], depth=3), latency_table(JAGGED), asked(4))


def test_throughput_needs_times_and_plain_decodings_among_them() -> None:
    trace = trace_of([[0, 0]] * 4)
    with pytest.raises(InputError, match=r"No latency table.*--objective tokens-per-step"):
        optimize(trace, None, asked(4))
    with pytest.raises(InputError, match="no time for width 1"):
        optimize(trace, latency_table({2: 3.0, 3: 3.0}), asked(4))


def test_a_width_that_was_not_measured_may_not_win(table_a: RankTrace) -> None:
    """MATH 4: with n = 2 missing, the next best measured one wins, not an interpolation."""
    times = {width: ms for width, ms in JAGGED.items() if width not in (3, 6)}
    result = optimize(table_a, latency_table(times), asked(64))
    assert [size.tree.num_draft_nodes for size in result.sizes] == [1, 3, 4, 6, 7, 8]
    assert result[TREE].tree.num_draft_nodes == 4
    assert result[CHAIN].tree.num_draft_nodes in (1, 3)


def test_a_width_missing_at_one_context_may_not_win(table_a: RankTrace) -> None:
    latency = latency_table(JAGGED, contexts={16: 1.0, 500: 2.0})
    del latency.verify[1, 500, 3]
    assert 2 not in {size.tree.num_draft_nodes for size in optimize(table_a, latency, asked(64)).sizes}


def test_plain_decoding_wins_when_drafting_is_dear(table_a: RankTrace) -> None:
    result = optimize(table_a, latency_table(JAGGED, [100.0, 100.0, 100.0]), asked(64))
    assert result.recommended == PLAIN
    assert result[PLAIN].step_ms == pytest.approx(28.8)
    assert max(result[CHAIN].speedup, result[TREE].speedup) < 1


def test_the_chain_wins_where_replay_prefers_it() -> None:
    """MATH 5, three phases: (0), (1) counts most, the chain delivers 3 tokens per step."""
    phases = [(0, 0), (1, 2), (1, 2)]
    trace = trace_of([phases[j % 3] for j in range(60)], resolved=2)
    result = optimize(trace, latency_table({1: 10.0, 2: 11.0, 3: 12.0}), asked(3))
    assert result[TREE].tree == Tree(((0,), (1,)))
    assert (result.recommended, result[CHAIN].tree, result[CHAIN].tokens_per_step) == (CHAIN, Tree.chain(2), 3.0)
    assert result[TREE].tokens_per_step == 2.0


def test_a_dear_deep_draft_makes_the_tree_shallow(table_a: RankTrace) -> None:
    flat = dict.fromkeys(range(1, 5), 30.0)
    deep = optimize(table_a, latency_table(flat, [1.0, 1.0, 1.0]), asked(4))
    shallow = optimize(table_a, latency_table(flat, [1.0, 60.0, 60.0]), asked(4))
    assert deep[TREE].tree == Tree(((0,), (1,), (0, 0)))
    assert shallow[TREE].tree == Tree(((0,), (1,), (2,)))
    assert shallow[TREE].step_ms == pytest.approx(31.0)


def test_tokens_per_step_needs_no_times_and_fills_the_budget(table_a: RankTrace) -> None:
    result = optimize(table_a, None, asked(10, objective="tokens-per-step"))
    best = result[TREE]
    assert (result.recommended, best.tree.verify_width) == (TREE, 10)
    assert (best.step_ms, best.tokens_per_s, best.speedup) == (None, None, None)
    assert best.tokens_per_step == pytest.approx(2.274, rel=0.01)
    assert result[CHAIN].tree == Tree.chain(3)
    assert [size.tree.num_draft_nodes for size in result.sizes] == list(range(1, 10))


def test_tokens_per_step_ignores_what_a_tree_costs(table_a: RankTrace) -> None:
    """A table adds figures where a width was measured and changes no tree."""
    dear = latency_table({1: 10.0, 2: 90.0, 4: 90.0}, [1.0, 500.0, 500.0])
    with_times = optimize(table_a, dear, asked(10, objective="tokens-per-step"))
    without = optimize(table_a, None, asked(10, objective="tokens-per-step"))
    assert [size.tree for size in with_times.sizes] == [size.tree for size in without.sizes]
    assert with_times[TREE].tree == without[TREE].tree
    timed = [size.tree.verify_width for size in with_times.sizes if size.tokens_per_s is not None]
    assert timed == [2, 4]


def test_sizes_end_where_the_trace_knows_no_more_paths() -> None:
    result = optimize(trace_of([[0, 0]] * 9), latency_table(dict.fromkeys(range(1, 9), 10.0)), asked(8))
    assert [size.tree for size in result.sizes] == [Tree.chain(1), Tree.chain(2)]


def test_ties_go_to_the_simpler_one() -> None:
    trace = trace_of([[0, 3]] * 12)
    result = optimize(trace, latency_table({1: 10.0, 2: 20.0}), asked(2))
    assert [alternative.tokens_per_s for alternative in result.alternatives] == [100.0] * 3
    assert result.recommended == PLAIN


def test_equal_paths_are_taken_in_rank_order_every_time() -> None:
    trace = trace_of([[rank, 3] for rank in (2, 0, 1, 2, 1, 0)] * 4)
    latency = latency_table(dict.fromkeys(range(1, 4), 10.0))
    result = optimize(trace, latency, asked(3))
    assert result[TREE].tree == Tree(((0,), (1,)))
    assert optimize(trace, latency, asked(3)) == result


def test_each_step_costs_what_its_nearest_context_costs() -> None:
    """Steps of the chain (0) start at contexts 8, 10 and 100; measured are 8, 12 and 40, and 10 goes to 8."""
    trace = trace_of([[0], [0], [0], [0]], [[0], [0]], resolved=1, prompt_tokens=[8, 100])
    latency = latency_table({1: 1.0, 2: 2.0}, [0.5], contexts={8: 1.0, 12: 10.0, 40: 100.0})
    result = optimize(trace, latency, asked(2))
    assert result[CHAIN].tokens_per_s == pytest.approx(1000 * 6 / (2.5 + 2.5 + 200.5))
    assert result[CHAIN].step_ms == pytest.approx(205.5 / 3)
    assert result[PLAIN].tokens_per_s == pytest.approx(1000 * 6 / (1 + 1 + 1 + 10 + 100 + 100))
    assert result[CHAIN].speedup == pytest.approx(213 / 205.5)


def test_given_context_weights_stand_for_where_steps_start() -> None:
    """The same steps, each at 3/4 of the time at 8 and 1/4 of that at 40: weights count by their shares."""
    trace = trace_of([[0], [0], [0], [0]], [[0], [0]], resolved=1, prompt_tokens=[8, 100])
    latency = latency_table({1: 1.0, 2: 2.0}, [0.5], contexts={8: 1.0, 12: 10.0, 40: 100.0})
    result = optimize(trace, latency, asked(2, context_weights=((8, 3.0), (40, 1.0))))
    chain_ms, plain_ms = 0.75 * 2.5 + 0.25 * 200.5, 0.75 * 1 + 0.25 * 100
    assert result[CHAIN].step_ms == pytest.approx(chain_ms)
    assert result[CHAIN].tokens_per_s == pytest.approx(1000 * 6 / (3 * chain_ms))
    assert result[PLAIN].tokens_per_s == pytest.approx(1000 / plain_ms)


def test_context_weights_decide_the_size() -> None:
    """At context 8 width 2 is free and at 40 it is dear, whatever the trace's own contexts are."""
    trace = trace_of([[0]] * 8, resolved=1, prompt_tokens=[8])
    latency = latency_table({1: 10.0, 2: 10.0}, [0.0], contexts={8: 1.0, 40: 1.0})
    verify = latency.verify | {(1, 40, 2): replace(latency.verify[1, 40, 2], median_ms=100.0)}
    dear = replace(latency, verify=verify)
    assert optimize(trace, dear, asked(2, context_weights=((8, 1.0), (40, 0.0)))).recommended == CHAIN
    assert optimize(trace, dear, asked(2, context_weights=((8, 0.5), (40, 0.5)))).recommended == PLAIN


@pytest.mark.parametrize("weights", [((8, -1.0), (40, 2.0)), ((8, 0.0),), ((8, float("nan")),), ()])
def test_context_weights_that_weigh_nothing_are_refused(weights: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(InputError, match="context weights"):
        asked(2, context_weights=weights)


def test_a_weight_needs_a_measured_context() -> None:
    trace = trace_of([[0]] * 4, resolved=1)
    latency = latency_table({1: 1.0, 2: 2.0}, [0.5], contexts={8: 1.0, 40: 1.0})
    with pytest.raises(InputError, match=r"context 16 .*only at 8, 40"):
        optimize(trace, latency, asked(2, context_weights=((16, 1.0),)))
    with pytest.raises(InputError, match="--latency"):
        optimize(trace, None, asked(2, objective="tokens-per-step", context_weights=((8, 1.0),)))


def test_an_alternative_lists_its_nodes_probabilities_in_their_order(table_a: RankTrace) -> None:
    result = optimize(table_a, latency_table({m: 1 + 0.04 * m for m in range(1, 17)}), asked(16))
    assert result[TREE].tree.paths == ((0,), (1,), (0, 0))
    assert result[TREE].probabilities == pytest.approx([0.6, 0.15, 0.24], abs=0.01)
    never_deep = optimize(trace_of([[0, 3]] * 8), latency_table({1: 10.0, 3: 10.0}), asked(3))
    assert (never_deep[CHAIN].tree, never_deep[CHAIN].probabilities) == (Tree.chain(2), (1.0, 0.0))


@repeatable
@given(trace=traces(rows=10), data=st.data())
def test_every_figure_is_what_the_walk_by_hand_costs(trace: RankTrace, data: st.DataObject) -> None:
    """Against every measured width of every depth cap's family, with random times and contexts."""
    assume(len(trace.ranks))
    ms = st.floats(1, 100)
    widths = [1, *sorted(data.draw(st.sets(st.integers(2, 8))))]
    verify = {width: data.draw(ms) for width in widths}
    draft = sorted(data.draw(st.lists(ms, min_size=3, max_size=3)))
    latency = latency_table(verify, draft, contexts={11: 1.0, 14: data.draw(ms)})
    result = optimize(trace, latency, asked(8))
    for alternative in (*result.alternatives, *result.sizes):
        total = ms_by_hand(trace, alternative.tree, latency)
        assert alternative.tokens_per_s == pytest.approx(1000 * len(trace.ranks) / total)
        assert alternative.step_ms == pytest.approx(total / replay(trace, [alternative.tree]).steps[0])
    estimate = joint(PrefixTable.of(trace))
    families = [frontier(estimate, num_draft_nodes=7, max_depth=depth) for depth in (1, 2, 3)]
    rivals = {f.tree(w - 1) for f, w in itertools.product(families, widths[1:]) if w - 1 <= len(f.order)}
    if rivals:
        least = min(ms_by_hand(trace, tree, latency) for tree in rivals)
        assert result[TREE].tokens_per_s == pytest.approx(1000 * len(trace.ranks) / least)
    assert result[result.recommended].tokens_per_s == max(a.tokens_per_s for a in result.alternatives)
