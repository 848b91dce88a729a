"""How sure a figure is: against closed forms, and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from factories import latency_table

from topo_search.cost import WHATEVER_EXPANDED, LatencyTable, Timing
from topo_search.search.intervals import (
    confidence,
    latency_variance,
    paired_log_se,
    prompts_to_halve,
    ratio,
    resampling_weights,
    t_quantile,
    time_shares,
)
from topo_search.search.times import StepTimes
from topo_search.tree import Tree

TOKENS = np.array([90.0, 100.0, 40.0, 60.0, 120.0, 80.0, 77.0, 51.0])
STEPS = np.array([50.0, 48.0, 25.0, 33.0, 70.0, 37.0, 41.0, 30.0])


def test_the_bootstrap_is_the_closed_form() -> None:
    """MATH 6: residual (tokens - ratio x steps) / mean steps, SE = sd / sqrt(P), t quantile."""
    figure = ratio(TOKENS, STEPS, resampling_weights(8, 20_000, 0))
    assert figure is not None
    assert figure.value == TOKENS.sum() / STEPS.sum()
    residual = (TOKENS - figure.value * STEPS) / STEPS.mean()
    closed = residual.std(ddof=1) / math.sqrt(8)
    assert figure.log_se == pytest.approx(closed / figure.value, rel=0.05)
    assert figure.interval is not None
    half = t_quantile(7) * closed
    assert [figure.interval.low, figure.interval.high] == pytest.approx(
        [figure.value - half, figure.value + half], rel=0.01
    )


def test_a_prediction_is_wider_than_a_confidence_interval_and_narrows_with_the_prompts_predicted() -> None:
    weights = resampling_weights(8, 2000, 0)
    few, many = (ratio(TOKENS, STEPS, weights, new_prompts=count) for count in (2, 10_000))
    assert few is not None
    assert many is not None
    assert few.interval == many.interval
    assert few.prediction.high > many.prediction.high > many.interval.high  # type: ignore[union-attr]
    assert many.prediction.high == pytest.approx(many.interval.high, rel=1e-3)  # type: ignore[union-attr]


def test_one_prompt_has_a_figure_and_no_interval() -> None:
    found = ratio(TOKENS[:1], STEPS[:1], resampling_weights(1, 10, 0))
    assert found is not None
    assert (found.value, found.interval, found.prediction, found.log_se) == (1.8, None, None, None)


@pytest.mark.parametrize("steps", [np.zeros(8), np.full(8, np.nan)])
def test_no_step_or_no_time_is_no_figure(steps: np.ndarray) -> None:
    assert ratio(TOKENS, steps, resampling_weights(8, 10, 0)) is None


def test_equal_prompts_leave_nothing_unsure_but_the_clock() -> None:
    same = np.full(5, 10.0)
    sure = ratio(same, same, resampling_weights(5, 100, 0))
    assert sure is not None
    assert sure.log_se == pytest.approx(0, abs=1e-12)
    timed = ratio(same, same, resampling_weights(5, 100, 0), latency_variance=0.04)
    assert timed is not None
    assert timed.log_se == pytest.approx(0.2)


def test_the_prediction_interval_holds_the_figure_of_other_prompts() -> None:
    """FIELD-CASES and MATH 6: 90 to 99 % of 200 splits; the confidence interval holds it in fewer."""
    rng = np.random.default_rng(5)
    inside = {"prediction": 0, "interval": 0}
    for split in range(200):
        steps = rng.integers(20, 90, size=80).astype(float)
        tokens = steps * rng.normal(1.8, 0.25, size=80)
        here, there = slice(0, 40), slice(40, 80)
        figure = ratio(tokens[here], steps[here], resampling_weights(40, 400, split), new_prompts=40)
        assert figure is not None
        measured = tokens[there].sum() / steps[there].sum()
        for name in inside:
            found = getattr(figure, name)
            inside[name] += found.low <= measured <= found.high
    assert 180 <= inside["prediction"] <= 198
    assert inside["interval"] < 180


def test_a_paired_error_forgets_what_prompts_share() -> None:
    """MATH 6: two trees that are slow on the same prompts differ by far less than each varies."""
    rng = np.random.default_rng(1)
    hard = rng.lognormal(0, 0.5, size=60)
    one, other = 100 * hard, 103 * hard + rng.normal(0, 0.5, size=60)
    alone = ratio(np.ones(60), one, resampling_weights(60, 500, 0))
    assert alone is not None
    assert paired_log_se(one, other[None])[0] < alone.log_se / 10  # type: ignore[operator]
    assert paired_log_se(one, one[None])[0] == 0


def test_prompts_that_halve_an_interval() -> None:
    """Four times as many for many; fewer for few, whose t quantile falls too."""
    assert prompts_to_halve(1000) == pytest.approx(4000, rel=0.01)
    assert prompts_to_halve(3) < 12
    for count in (2, 5, 40):
        wanted = t_quantile(count - 1) / math.sqrt(count) / 2
        found = prompts_to_halve(count)
        assert t_quantile(found - 1) / math.sqrt(found) <= wanted
        assert t_quantile(found - 2) / math.sqrt(found - 1) > wanted


def spread(median: float, width: float) -> Timing:
    return Timing(median_ms=median, p10_ms=median - width / 2, p90_ms=median + width / 2, count=4)


def noisy_table() -> LatencyTable:
    table = latency_table({1: 10.0, 3: 15.0, 4: 16.0}, [2.0, 3.0])
    table.verify.update({key: spread(found.median_ms or 0, 2.5631) for key, found in table.verify.items()})
    return table


def test_the_spread_of_timings_enters_as_variance_of_the_log() -> None:
    """Width 3, 10 steps, 150 of 170 ms in verify: the median of 4 timings with sigma 1 has error 1.2533 / 2."""
    table, tree = noisy_table(), Tree(((0,), (0, 0)))
    shares = time_shares(tree, np.array([10.0]), 180.0, StepTimes.of(table))
    assert shares == {("verify", 0, 3): 10 / 180, ("draft", 2, WHATEVER_EXPANDED): 10 / 180}
    assert latency_variance(table, shares) == pytest.approx((10 / 180 * 1.2533 / 2) ** 2)


def test_what_two_trees_have_in_common_cancels() -> None:
    table = noisy_table()
    times = StepTimes.of(table)
    one, same = (time_shares(Tree(((0,), (1,))), np.array([10.0]), 170.0, times) for _ in range(2))
    assert latency_variance(table, one, same) == 0
    plain = time_shares(Tree(()), np.array([20.0]), 200.0, times)
    both = latency_variance(table, one) + latency_variance(table, plain)
    assert latency_variance(table, one, plain) == pytest.approx(both)


def test_confidence_is_a_half_where_nothing_differs() -> None:
    assert confidence(0.0, 0.1, 9) == 0.5
    assert confidence(0.0, 0.0, 9) == 0.5
    assert confidence(0.1, 0.0, 9) == 1.0
    assert confidence(0.3, 0.1, 9) > 0.98
