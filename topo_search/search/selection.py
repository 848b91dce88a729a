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
from topo_search.trace import RankTrace, TracePrompt
from topo_search.tree import Tree

Procedure = Callable[[RankTrace], tuple[Tree, ...]]  # prompts to choose on -> one tree per alternative


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


def chosen_trees(latency: LatencyTable | None, settings: Settings) -> Procedure:
    """The search as a procedure: plain decoding, best chain and best tree of the prompts given."""

    def procedure(trace: RankTrace) -> tuple[Tree, ...]:
        judge = ReplayJudge.of(trace, latency, batch=settings.batch)
        return choose(judge, settings, shortlist=True).trees

    return procedure


def hold_out(
    trace: RankTrace,
    latency: LatencyTable | None,
    procedure: Procedure,
    fold: Int[np.ndarray, " prompts"],
    *,
    batch: int = 1,
    scored_folds: Sequence[int] | None = None,
) -> HeldOut | None:
    """Score `procedure` on each fold after choosing on all others; None where one side of every split is empty.

    Args:
        trace: all prompts.
        latency: step times; null where only steps count.
        procedure: everything that chooses.
        fold: of each prompt.
        batch: at which the table is read.
        scored_folds: the folds to leave out in turn; all by default.
    """
    parts = []
    for number in range(int(fold.max(initial=-1)) + 1) if scored_folds is None else scored_folds:
        ids = {prompt.id for prompt, of in zip(trace.prompts, fold, strict=True) if of == number}
        others = trace.select(lambda prompt, ids=ids: prompt.id not in ids)  # type: ignore[misc]
        left_out = trace.select(lambda prompt, ids=ids: prompt.id in ids)  # type: ignore[misc]
        if len(others.ranks) and len(left_out.ranks):
            judge = ReplayJudge.of(left_out, latency, batch=batch)
            parts.append((left_out.prompts, judge.score(procedure(others))))
    if not parts:
        return None
    prompts = tuple(prompt for some, _ in parts for prompt in some)
    units = text_units(prompts)
    steps = np.concatenate([scores.steps for _, scores in parts], axis=1)
    ms = np.concatenate([scores.ms for _, scores in parts], axis=1)
    pooled: list[dict[Cell, float]] = [{} for _ in ms]
    for _, scores in parts:
        for index, (tree, shares) in enumerate(zip(scores.trees, pooled, strict=True)):
            used = time_shares(tree, scores.counts[index].sum(axis=0), float(ms[index].sum()))
            shares.update({cell: shares.get(cell, 0.0) + share for cell, share in used.items()})
    return HeldOut(
        prompts=prompts,
        units=units,
        tokens=_per_unit(np.concatenate([scores.tokens for _, scores in parts])[None], units)[0],
        steps=_per_unit(steps, units),
        ms=_per_unit(ms, units),
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
    variance = latency_variance(latency, held.shares[one], held.shares[other], batch=settings.batch)
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
        variance = latency_variance(latency, held.shares[index], batch=settings.batch)
        rate = ratio(1000.0 * settings.batch * held.tokens, ms, weights, latency_variance=variance)
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
