"""Several batch sizes served in turn: every step time is a weighted one, so the search stays exact."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from factories import TABLE_A, all_subtrees, drawn_trace, latency_table, repeatable, timing, trace_of
from hypothesis import given, settings
from hypothesis import strategies as st

from topo_search.cli.optimized import answer_json
from topo_search.cost import LatencyTable, Timing
from topo_search.errors import InputError
from topo_search.estimates import independent
from topo_search.replay import replay
from topo_search.search.assess import assess, assess_accuracies
from topo_search.search.choose import Settings
from topo_search.search.intervals import latency_variance, time_shares
from topo_search.search.optimize import CHAIN, PLAIN, TREE, optimize
from topo_search.search.times import StepTimes
from topo_search.search.verdict import verdict
from topo_search.tree import Tree

RANK_TABLE = ((0.6, 0.25), (0.5, 0.3), (0.4, 0.2))
SMALL_TREES = [Tree(paths) for paths in all_subtrees(2, 3) if len(paths) < 5]
TRACE = drawn_trace(TABLE_A, prompts=8, rows=20)


def batched(tables: Mapping[int, LatencyTable]) -> LatencyTable:
    """One table of several batches, each as the batch 1 of its own."""
    return replace(
        tables[min(tables)],
        verify={(batch, *cell[1:]): ms for batch, table in tables.items() for cell, ms in table.verify.items()},
        draft={(batch, *cell[1:]): ms for batch, table in tables.items() for cell, ms in table.draft.items()},
    )


def asked(budget: int = 8, **changes: Any) -> Settings:
    return Settings(budget=budget, **({"estimator": "joint", "pick": "best", "resamples": 100} | changes))


def ms_per_sequence(table: LatencyTable, tree: Tree, weights: Mapping[int, float]) -> float:
    """By the definition: of the tokens, the share w_b costs step_ms_b / b each step."""
    whole = math.fsum(weights.values())
    return math.fsum(w / whole * float(table.step_ms(tree, batch=b)[0]) / b for b, w in weights.items())


SMALL = latency_table({width: 10 + 0.2 * width for width in range(1, 9)}, [0.5, 0.8, 1.0])
LARGE = latency_table({width: 12 + 6.0 * width for width in range(1, 9)}, [1.0, 1.5, 2.0])
BOTH = batched({1: SMALL, 4: LARGE})


def drafts(per_node: tuple[float, float, float]) -> dict[tuple[int, int, int], Timing]:
    """Of heads that pay for each expanded node: D(depth, n), each call affine in its nodes."""
    root, *deeper = per_node
    cells = {(1, 1, 1): timing(root)}
    for depth in (2, 3):
        cells |= {(1, depth, n): timing(root + n * sum(deeper[: depth - 1])) for n in (1, 2, 4)}
    return cells


@st.composite
def tables(draw: st.DrawFn) -> tuple[LatencyTable, dict[int, float]]:
    ms, count = st.floats(1, 60), draw(st.integers(1, 3))
    batches = draw(st.lists(st.sampled_from([1, 2, 3, 8]), min_size=count, max_size=count, unique=True))
    per_node = draw(st.booleans())
    found = {}
    for batch in batches:
        verify = {width: draw(ms) for width in [1, *sorted(draw(st.sets(st.integers(2, 8), min_size=4)))]}
        found[batch] = latency_table(verify, sorted(draw(st.lists(ms, min_size=3, max_size=3))))
        if per_node:
            cost = draw(st.tuples(*[st.floats(0.1, 9)] * 3))
            found[batch] = replace(found[batch], draft=drafts(cost))
    return batched(found), {batch: draw(st.floats(0.05, 1)) for batch in batches}


@settings(repeatable, max_examples=40)
@given(case=tables())
def test_no_tree_is_faster_by_the_definition(case: tuple[LatencyTable, dict[int, float]]) -> None:
    """Random tables of up to three batches, drafts by depth and by expanded node, widths missing at some batch."""
    table, weights = case
    probabilities = independent(RANK_TABLE, 64)
    known = dict(zip(probabilities.paths, probabilities.probabilities.tolist(), strict=True))
    widths = [set(table.widths(batch)) for batch in weights]
    rates = {
        tree: 1000 * (1 + sum(known[path] for path in tree.paths)) / ms_per_sequence(table, tree, weights)
        for tree in SMALL_TREES
        if tree.verify_width in set.intersection(*widths)
    }
    found = assess_accuracies(probabilities, table, asked(5, batch_weights=tuple(weights.items()))).result
    for own in found.alternatives:
        assert own.tokens_per_s == pytest.approx(rates[own.tree])
    assert found[found.recommended].tokens_per_s == pytest.approx(max(rates.values()))


def test_figures_are_all_tokens_over_all_device_time() -> None:
    """Of 1000 tokens 700 are decoded alone and 300 in fours: their steps, counted and added up."""
    found = optimize(TRACE, BOTH, asked(batch_weights=((1, 0.7), (4, 0.3))))
    for own in found.alternatives:
        sequence_steps = 1000 / own.tokens_per_step
        alone, fours = 0.7 * sequence_steps, 0.3 * sequence_steps / 4
        total_ms = alone * SMALL.step_ms(own.tree)[0] + fours * LARGE.step_ms(own.tree)[0]
        assert own.tokens_per_s == pytest.approx(1000 * 1000 / total_ms)
        assert own.step_ms == pytest.approx(total_ms / (alone + fours))
    assert found[TREE].tokens_per_step == pytest.approx(replay(TRACE, [found[TREE].tree]).tokens_per_step[0])


@pytest.mark.parametrize("weights", [((4, 2.0),), ((1, 0.0), (4, 0.5))])
@pytest.mark.parametrize("changes", [{}, {"pick": "one-se"}, {"refine": "swaps"}])
def test_all_weight_on_one_batch_is_that_batch(weights: tuple[tuple[int, float], ...], changes: dict[str, Any]) -> None:
    alone = assess(TRACE, BOTH, asked(batch=4, **changes))
    found = assess(TRACE, BOTH, asked(batch_weights=weights, **changes))
    assert found.result.alternatives == alone.result.alternatives
    assert (found.held_out, found.over_plain, found.over_runner_up) == (
        alone.held_out,
        alone.over_plain,
        alone.over_runner_up,
    )


def test_weights_decide_the_size() -> None:
    """Width is nearly free alone and dear in fours; a mix takes a size between."""
    sizes = [
        optimize(TRACE, BOTH, asked(batch_weights=weights))[TREE].tree.num_draft_nodes
        for weights in (((1, 1.0),), ((1, 0.8), (4, 0.2)), ((4, 1.0),))
    ]
    assert sizes[0] > sizes[1] > sizes[2]


def test_context_weights_hold_at_every_batch() -> None:
    both = {16: 1.0, 500: 2.0}
    table = batched(
        {1: latency_table({1: 10.0, 2: 11.0}, contexts=both), 2: latency_table({1: 14.0, 2: 18.0}, contexts=both)}
    )
    found = optimize(
        TRACE, table, asked(2, batch_weights=((1, 0.5), (2, 0.5)), context_weights=((16, 0.25), (500, 0.75)))
    )
    by_context = 0.25 * 1 + 0.75 * 2
    plain_ms, chain_ms = (by_context * (0.5 * alone + 0.5 * pair / 2) for alone, pair in ((10.0, 14.0), (11.0, 18.0)))
    assert found[PLAIN].tokens_per_s == pytest.approx(1000 / plain_ms)
    assert found[CHAIN].tokens_per_s == pytest.approx(1000 * found[CHAIN].tokens_per_step / chain_ms)


def test_only_widths_and_contexts_timed_at_every_batch_count() -> None:
    wide = latency_table(dict.fromkeys(range(1, 9), 10.0), contexts={16: 1.0, 500: 1.0})
    narrow = latency_table(dict.fromkeys((1, 2, 4), 10.0), contexts={16: 1.0, 90: 3.0})
    table = batched({1: wide, 2: narrow})
    mix = ((1, 0.5), (2, 0.5))
    found = assess(TRACE, table, asked(batch_weights=mix))
    assert {size.tree.verify_width for size in found.result.sizes} == {2, 4}
    assert found.assumptions.measured_contexts == (16,)
    apart = batched({1: wide, 2: latency_table({1: 10.0, 2: 10.0}, contexts={90: 1.0})})
    with pytest.raises(InputError, match=r"no context that was timed at each of batches 1, 2.*--batches"):
        assess(TRACE, apart, asked(batch_weights=mix))


def test_the_spread_of_timings_at_every_batch_counts() -> None:
    """Half of the tokens in pairs is a third of the steps: the variance adds (1/3 of sigma 3)^2 and (2/3 of 1)^2."""

    def noisy(width: int, sigma: float) -> dict[tuple[int, int, int], Timing]:
        spread = Timing(median_ms=10.0, p10_ms=10 - 1.28155 * sigma, p90_ms=10 + 1.28155 * sigma, count=4)
        return {(1, 16, width): spread}

    tables_ = {b: replace(latency_table({1: 10.0}, []), verify=noisy(1, s)) for b, s in ((1, 1.0), (2, 3.0))}
    table, ask = batched(tables_), asked(batch_weights=((1, 0.5), (2, 0.5)))
    times = StepTimes.of(table, ask.batches)
    shares = time_shares(Tree(()), np.array([10.0]), 100.0, times)
    expected = (10 / 100 * 1.2533 / 2) ** 2 * ((2 / 3 * 1.0) ** 2 + (1 / 3 * 3.0) ** 2)
    assert latency_variance(table, shares, batches=ask.batches) == pytest.approx(expected, rel=1e-4)


def test_the_verdict_and_the_json_say_which_batches() -> None:
    found = assess(TRACE, BOTH, asked(batch_weights=((1, 7.0), (4, 3.0))))
    said = "batch 1 for 70 % of the tokens and batch 4 for 30 % of the tokens, every row still being written"
    assert said in verdict(found)
    held = json.loads(json.dumps(answer_json(found, {}, None)))["assumptions"]
    assert (held["batch"], held["batch_weights"]) == (None, [[1, 7.0], [4, 3.0]])
    alone = answer_json(assess(TRACE, BOTH, asked()), {}, None)["assumptions"]
    assert (alone["batch"], alone["batch_weights"]) == (1, None)


@pytest.mark.parametrize("weights", [((1, -1.0), (4, 2.0)), ((1, 0.0),), ((1, float("nan")),), ((1, math.inf),), ()])
def test_weights_that_weigh_nothing_are_refused(weights: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(InputError, match="batch weights"):
        asked(batch_weights=weights)


def test_a_batch_must_be_possible_timed_and_given_once() -> None:
    with pytest.raises(InputError, match="below 1"):
        asked(batch_weights=((0, 1.0),))
    with pytest.raises(InputError, match="Batch 4 and batch weights"):
        asked(batch=4, batch_weights=((1, 1.0),))
    with pytest.raises(InputError, match=r"no time at batch 3, only at 1, 4; give --batch-weights"):
        optimize(TRACE, BOTH, asked(batch_weights=((1, 0.5), (3, 0.5))))
    with pytest.raises(InputError, match="No latency table"):
        optimize(trace_of([[0, 0]] * 4), None, asked(batch_weights=((1, 1.0),)))
