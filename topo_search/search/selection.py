"""Honest figures: choose on some prompts, score on others.

The winner's own score is too high, by as much as choosing has fitted noise. Cross-fitting runs everything that
chooses on all folds of prompts but one and scores that choice on the fold left out; the pooled score, sum of tokens
over sum of steps, is that of the procedure on slightly fewer prompts, so slightly low for the final tree
(Chernozhukov et al. 2018, "Double/debiased machine learning", section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from topo_search.cost import LatencyTable
from topo_search.search.choose import Settings, choose
from topo_search.search.intervals import (
    Cell,
    Figure,
    confidence,
    latency_variance,
    ratio,
    time_shares,
)
from topo_search.search.judge import ReplayJudge
from topo_search.trace import TracePrompt
from topo_search.tree import Tree

Procedure = Callable[[ReplayJudge], tuple[Tree, ...]]  # of the prompts to choose on -> one tree per alternative


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """What each alternative cost on prompts that did not choose it.

    Attributes:
        prompts: the prompts scored, repetitions of one text counted as one.
        units: which of them each scored prompt is.
        tokens: `[units]`.
        steps: `[alternatives, units]`.
        ms: `[alternatives, units]`; NaN without a time.
        shares: per alternative, how much its time rests on each timing.
        answer_steps: `[alternatives, prompts]`, of every single answer with at least one step.
        workloads: of each unit.
    """

    prompts: tuple[TracePrompt, ...]
    units: Int[np.ndarray, " prompts"]
    tokens: Float[np.ndarray, " units"]
    steps: Float[np.ndarray, "alternatives units"]
    ms: Float[np.ndarray, "alternatives units"]
    shares: tuple[Mapping[Cell, float], ...]
    answer_steps: Float[np.ndarray, "alternatives answers"]
    workloads: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutFigures:
    """One alternative's figures on prompts that did not choose it.

    Attributes:
        tokens_per_step, tokens_per_s, speedup: with their intervals; null where there is no time.
        step_ms: mean over steps.
        faster_than_plain: probability that it is; null without a time or for a single prompt.
        break_even_tokens_per_step: tokens per step at which it is as fast as plain decoding.
        steps_per_answer_p50, steps_per_answer_p95: percentiles over answers.
    """

    tokens_per_step: Figure | None
    tokens_per_s: Figure | None
    speedup: Figure | None
    step_ms: float | None
    faster_than_plain: float | None
    break_even_tokens_per_step: float | None
    steps_per_answer_p50: float | None
    steps_per_answer_p95: float | None


def text_units(prompts: Sequence[TracePrompt]) -> Int[np.ndarray, " prompts"]:
    """A number per distinct prompt text: a prompt recorded twice is one observation, not two."""
    first: dict[str, int] = {}
    names = [prompt.digest or f"id {prompt.id}" for prompt in prompts]
    return np.array([first.setdefault(name, len(first)) for name in names], dtype=np.int64)


def fold_of_prompts(prompts: Sequence[TracePrompt], folds: int, seed: int) -> Int[np.ndarray, " prompts"]:
    """The fold of each prompt: every workload dealt evenly, repetitions of one text together."""
    units = text_units(prompts)
    count = int(units.max(initial=-1)) + 1
    shuffled = np.random.default_rng(seed).permutation(count)
    workload = {int(unit): prompt.workload for unit, prompt in zip(units, prompts, strict=True)}
    dealt = sorted(range(count), key=lambda unit: (workload[unit], shuffled[unit]))
    fold = np.empty(count, dtype=np.int64)
    fold[dealt] = np.arange(count) % min(folds, max(count, 1))
    found: np.ndarray = fold[units]
    return found


def chosen_trees(settings: Settings) -> Procedure:
    """The search as a procedure: plain decoding, best chain and best tree of the prompts given."""
    return lambda judge: choose(judge, settings, shortlist=True).trees


def hold_out(
    judge: ReplayJudge,
    procedure: Procedure,
    fold: Int[np.ndarray, " prompts"],
    *,
    scored_folds: Sequence[int] | None = None,
) -> HeldOut | None:
    """Score `procedure` on each fold after choosing on all others; None where one side of every split is empty.

    Args:
        judge: of all prompts.
        procedure: everything that chooses.
        fold: of each prompt.
        scored_folds: the folds to leave out in turn; all by default.
    """
    rows = np.array([prompt.rows for prompt in judge.trace.prompts])
    wanted = range(int(fold.max(initial=-1)) + 1) if scored_folds is None else scored_folds
    numbers = [number for number in wanted if rows[fold == number].any() and rows[fold != number].any()]
    if not numbers:
        return None
    chosen = [procedure(judge.among(fold != number)) for number in numbers]
    scores = judge.score([tree for trees in chosen for tree in trees])
    places = [np.flatnonzero(fold == number) for number in numbers]
    counts = scores.counts.reshape(len(numbers), len(chosen[0]), *scores.counts.shape[1:])
    ms = scores.ms.reshape(counts.shape[:3])
    scored = list(zip(counts, ms, places, strict=True))
    steps = np.concatenate([of_fold[:, place].sum(axis=2) for of_fold, _, place in scored], axis=1)
    times = np.concatenate([of_fold[:, place] for _, of_fold, place in scored], axis=1)
    pooled: list[dict[Cell, float]] = [{} for _ in times]
    for trees, of_fold, place in zip(chosen, counts, places, strict=True):
        for tree, of_tree, total, shares in zip(trees, of_fold, times.sum(axis=1), pooled, strict=True):
            used = time_shares(tree, of_tree[place].sum(axis=0), float(total), judge.times)
            shares.update({cell: shares.get(cell, 0.0) + share for cell, share in used.items()})
    order = np.concatenate(places)
    prompts = tuple(judge.trace.prompts[index] for index in order)
    units = text_units(prompts)
    return HeldOut(
        prompts=prompts,
        units=units,
        tokens=_per_unit(scores.tokens[order][None], units)[0],
        steps=_per_unit(steps, units),
        ms=_per_unit(times, units),
        shares=tuple(pooled),
        answer_steps=steps[:, steps[0] > 0],
        workloads=tuple(_workload_of_unit(prompts, units)),
    )


def figures(
    held: HeldOut, latency: LatencyTable | None, settings: Settings, weights: Float[np.ndarray, "resamples units"]
) -> list[HeldOutFigures]:
    """Every alternative's figures, by the resamples given; alternative 0 is plain decoding."""
    return [_figures_of(held, index, latency, settings, weights) for index in range(len(held.steps))]


def faster(
    held: HeldOut,
    one: int,
    other: int,
    latency: LatencyTable | None,
    settings: Settings,
    weights: Float[np.ndarray, "resamples units"],
) -> Figure | None:
    """How many times as fast alternative `one` is as `other`, paired by prompt; None without times."""
    if latency is None or not np.isfinite(held.ms[[one, other]]).all():
        return None
    variance = latency_variance(latency, held.shares[one], held.shares[other], batches=settings.batches)
    return ratio(held.ms[other], held.ms[one], weights, latency_variance=variance)


def certainty(figure: Figure | None, prompts: int) -> float | None:
    """Probability that a ratio is above 1; None where it has no interval."""
    if figure is None or figure.log_se is None:
        return None
    return confidence(float(np.log(figure.value)), figure.log_se, prompts - 1)


def _figures_of(
    held: HeldOut, index: int, latency: LatencyTable | None, settings: Settings, weights: np.ndarray
) -> HeldOutFigures:
    steps, ms = held.steps[index], held.ms[index]
    timed = latency is not None and bool(np.isfinite(ms).all())
    speedup = faster(held, index, 0, latency, settings, weights)
    step_ms = float(ms.sum() / steps.sum()) if timed else None
    plain_ms = float(held.ms[0].sum() / held.steps[0].sum())
    rate = None
    if latency is not None and timed:
        variance = latency_variance(latency, held.shares[index], batches=settings.batches)
        rate = ratio(1000.0 * settings.sequences * held.tokens, ms, weights, latency_variance=variance)
    answers = held.answer_steps[index]
    return HeldOutFigures(
        tokens_per_step=ratio(held.tokens, steps, weights),
        tokens_per_s=rate,
        speedup=speedup,
        step_ms=step_ms,
        faster_than_plain=None if index == 0 else certainty(speedup, len(held.tokens)),
        break_even_tokens_per_step=None if step_ms is None else step_ms / plain_ms,
        steps_per_answer_p50=float(np.percentile(answers, 50)) if len(answers) else None,
        steps_per_answer_p95=float(np.percentile(answers, 95)) if len(answers) else None,
    )


def _per_unit(values: np.ndarray, units: np.ndarray) -> np.ndarray:
    return np.stack([np.bincount(units, weights=row) for row in values])


def _workload_of_unit(prompts: Sequence[TracePrompt], units: np.ndarray) -> list[str]:
    found = {int(unit): prompt.workload for unit, prompt in zip(units, prompts, strict=True)}
    return [found[unit] for unit in range(len(found))]
