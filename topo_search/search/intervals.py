"""How sure a figure is: prompts are the sample, so resample prompts; step times add their own spread.

All intervals live on the log scale, where the variances of tokens per step and of step times add. A confidence
interval holds the figure of the law that the prompts come from; a prediction interval holds the figure of other
prompts, and is the wider one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from topo_search import special
from topo_search.cost import ALONE, Batches, LatencyTable, Timing
from topo_search.search.times import StepTimes
from topo_search.tree import Tree

LEVEL = 0.95
_TAIL_SIGMAS = 2.5631  # between the 10th and the 90th percentile of a normal law
_MEDIAN_LOSS = 1.2533  # standard error of a median over that of a mean

Cell = tuple[str, int, int]  # ("verify", context index, width) or ("draft", depth, expanded): one timing per batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A range that holds the figure with probability `LEVEL`."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A ratio with how sure it is.

    Attributes:
        value: the pooled figure.
        interval: confidence interval; null for a single prompt.
        prediction: interval for the figure of as many other prompts; null for a single prompt.
        log_se: standard error on the log scale, prompts and step times together; null for a single prompt.
    """

    value: float
    interval: Interval | None
    prediction: Interval | None
    log_se: float | None


def resampling_weights(prompts: int, resamples: int, seed: int) -> Float[np.ndarray, "resamples prompts"]:
    """How often each prompt is drawn in each bootstrap resample."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples).astype(np.float64)


def ratio(
    numerator: Float[np.ndarray, " prompts"],
    denominator: Float[np.ndarray, " prompts"],
    weights: Float[np.ndarray, "resamples prompts"],
    *,
    latency_variance: float = 0.0,
    new_prompts: int | None = None,
) -> Figure | None:
    """Sum over sum with its intervals, or None where the denominator is unknown (NaN) or nothing.

    Args:
        numerator, denominator: per prompt, e.g. tokens and steps.
        weights: from `resampling_weights`.
        latency_variance: of the log of the denominator, from step times.
        new_prompts: how many prompts the prediction is for; as many as there are by default.
    """
    prompts, total = len(numerator), float(denominator.sum())
    if not total > 0 or not numerator.sum() > 0:
        return None
    value = float(numerator.sum()) / total
    if prompts < 2:
        return Figure(value=value, interval=None, prediction=None, log_se=None)
    sampled = _log_spread(weights, numerator, denominator) ** 2
    quantile = t_quantile(prompts - 1)
    log_se = math.sqrt(sampled + latency_variance)
    other = math.sqrt(sampled * (1 + prompts / (new_prompts or prompts)) + latency_variance)
    return Figure(
        value=value,
        interval=_around(value, quantile * log_se),
        prediction=_around(value, quantile * other),
        log_se=log_se,
    )


def paired_log_se(one: Float[np.ndarray, " prompts"], other: Float[np.ndarray, "trees prompts"]) -> np.ndarray:
    """Standard error of log(sum one / sum other) for each row of `other`, prompt by prompt, in closed form.

    The linearised jackknife of a ratio of sums: the spread of what each prompt adds to the difference of the logs.
    """
    prompts = len(one)
    residual = one / one.mean() - other / other.mean(axis=1, keepdims=True)
    spread: np.ndarray = residual.std(axis=1, ddof=1) / math.sqrt(prompts)
    return spread


def t_quantile(degrees: int) -> float:
    """Half-width of the central `LEVEL` of Student's t law."""
    return special.t_quantile(degrees, 0.5 + LEVEL / 2)


def confidence(log_difference: float, log_se: float, degrees: int) -> float:
    """Probability that a difference estimated as `log_difference` is above 0."""
    if log_se == 0:
        return 0.5 if log_difference == 0 else float(log_difference > 0)
    return special.t_cdf(degrees, log_difference / log_se)


def prompts_to_halve(prompts: int) -> int:
    """Prompts in all that make an interval half as wide, all else equal."""
    wanted = t_quantile(prompts - 1) / math.sqrt(prompts) / 2
    found = 4 * prompts
    while found > 2 and t_quantile(found - 2) / math.sqrt(found - 1) <= wanted:
        found -= 1
    return found


def time_shares(
    tree: Tree, steps: Float[np.ndarray, " contexts"], total_ms: float, times: StepTimes
) -> dict[Cell, float]:
    """Derivative of the log of `total_ms` by each timing it rests on: the steps that use it over the total."""
    shares: dict[Cell, float] = {
        ("verify", context, tree.verify_width): times.scale * float(count) / total_ms
        for context, count in enumerate(steps)
        if count
    }
    for (depth, expanded), weight in (times.draft.weights(tree) or {}).items():
        shares["draft", depth, expanded] = times.scale * weight * float(steps.sum()) / total_ms
    return shares


def latency_variance(
    latency: LatencyTable,
    shares: Mapping[Cell, float],
    against: Mapping[Cell, float] | None = None,
    *,
    batches: Batches = ALONE,
) -> float:
    """Variance that the spread of the timings gives to a log time, or to the difference of two.

    A timing that both sides rest on counts by the difference of its shares, so what two trees have in common cancels.
    A time that is a mean over batches rests on the timing at each of them, by its share.
    """
    other = against or {}
    contexts = latency.contexts(*(batch for batch, _ in batches))
    variance = 0.0
    for cell in sorted({*shares, *other}):
        kind, *key = cell
        differs = shares.get(cell, 0.0) - other.get(cell, 0.0)
        for batch, share in batches:
            if kind == "verify":
                found = latency.verify.get((batch, contexts[key[0]], key[1]))
            else:
                found = latency.draft[batch, key[0], key[1]]
            variance += (share * differs * _median_se_ms(found)) ** 2
    return variance


def _median_se_ms(timing: Timing | None) -> float:
    """Standard error of a timing's median, from its 10th and 90th percentile."""
    if timing is None or timing.p10_ms is None or timing.p90_ms is None:
        return 0.0
    sigma = max(timing.p90_ms - timing.p10_ms, 0.0) / _TAIL_SIGMAS
    return _MEDIAN_LOSS * sigma / math.sqrt(max(timing.count, 1))


def _log_spread(weights: np.ndarray, numerator: np.ndarray, denominator: np.ndarray) -> float:
    """Standard deviation of the log ratio over resamples, corrected for the sample's own mean."""
    prompts = len(numerator)
    above, below = weights @ numerator, weights @ denominator
    drawn = (above > 0) & (below > 0)  # a resample of answers of one token has no step
    logs = np.log(above[drawn]) - np.log(below[drawn])
    return float(logs.std(ddof=1)) * math.sqrt(prompts / (prompts - 1)) if len(logs) > 1 else 0.0


def _around(value: float, half_width: float) -> Interval:
    return Interval(low=value * math.exp(-half_width), high=value * math.exp(half_width))
