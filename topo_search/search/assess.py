"""The whole answer: the search on all prompts, its honest figures, what is still unknown, and for what it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float, Int

from topo_search.cost import LatencyTable
from topo_search.estimates import PathProbabilities
from topo_search.identity import RuleIdentity
from topo_search.search.choose import Choice, Settings, choose, joined
from topo_search.search.intervals import Figure, prompts_to_halve, resampling_weights
from topo_search.search.judge import ExpectedJudge, ReplayJudge
from topo_search.search.optimize import (
    CHAIN,
    NAMES,
    PLAIN,
    TREE,
    SearchResult,
    optimize_by,
    require_rows,
    result_of,
)
from topo_search.search.selection import (
    HeldOut,
    HeldOutFigures,
    certainty,
    chosen_trees,
    faster,
    figures,
    fold_of_prompts,
    hold_out,
    text_units,
)
from topo_search.search.unseen import unseen_shares
from topo_search.search.workloads import WorkloadRow, workload_rows
from topo_search.trace import RankTrace
from topo_search.tree import Tree

_WIDE = 0.03  # half an interval over its figure, from which on more prompts are asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What every figure rests on.

    Attributes:
        estimator: path probabilities.
        law: how positions are weighted.
        prompts, positions: recorded; null without a trace, as are contexts and rule.
        split: how choosing and scoring were kept apart.
        seed, resamples: of folds and bootstrap.
        batch: sequences per step; null where `batch_weights` say.
        contexts: the range of committed tokens that steps started at.
        measured_contexts: those of the latency table that steps were timed at; null without a table.
        rule: acceptance rule and temperature.
        pick: rule that chose the size.
        context_weights: (measured context, weight) pairs that step times were averaged by; null for each step's own.
        batch_weights: (batch, weight) pairs, by tokens, that step times were averaged by; null for one batch.
    """

    estimator: str
    law: str
    prompts: int | None
    positions: int | None
    split: str
    seed: int
    resamples: int
    batch: int | None
    contexts: tuple[int, int] | None
    measured_contexts: tuple[int, ...] | None
    rule: RuleIdentity | None
    pick: str
    context_weights: tuple[tuple[int, float], ...] | None = None
    batch_weights: tuple[tuple[int, float], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """The alternatives with their honest figures.

    Attributes:
        result: the search on all prompts, with the winners' own scores.
        recommended: by the figures on prompts that did not choose; by the own scores for a single prompt.
        held_out: per alternative, in the order of `result.alternatives`; null where nothing could be held out.
        over_plain: the recommended alternative over plain decoding, paired by prompt; null without times.
        over_runner_up: over the next best of the three, with its name; null likewise.
        sure: probability that the recommended one is faster than the runner-up; null likewise.
        unseen: per depth, the share of rows whose node no other prompt has; null without a trace.
        prompts_to_halve: prompts in all that would make the intervals half as wide; null for a single prompt.
        workloads: what each workload's own tree loses on the others.
        warnings: in words.
        assumptions: what all of it rests on.
        held: what the alternatives cost on prompts that did not choose them; null likewise.
    """

    result: SearchResult
    recommended: str
    held_out: tuple[HeldOutFigures, ...] | None
    over_plain: Figure | None
    over_runner_up: tuple[str, Figure] | None
    sure: float | None
    unseen: tuple[float, ...] | None
    prompts_to_halve: int | None
    workloads: tuple[WorkloadRow, ...]
    warnings: tuple[str, ...]
    assumptions: Assumptions
    held: HeldOut | None = field(default=None, compare=False)

    def figures(self, name: str) -> HeldOutFigures | None:
        """The held-out figures of one alternative."""
        return None if self.held_out is None else self.held_out[NAMES.index(name)]


def assess(trace: RankTrace, latency: LatencyTable | None, settings: Settings) -> Assessment:
    """Search on all prompts, and cross-fit the search to say what it brings on others.

    Raises:
        InputError: see `optimize`.
    """
    require_rows(trace)
    judge = ReplayJudge.of(trace, latency, batches=settings.batches, context_weights=settings.context_weights)
    result = optimize_by(judge, settings)
    fold = fold_of_prompts(trace.prompts, settings.folds, settings.seed)
    held = hold_out(judge, chosen_trees(settings), fold)
    folds = int(fold.max()) + 1
    split = f"cross-fitted over {folds} folds by prompt" if held is not None else "none: a single prompt"
    rows = tuple(workload_rows(judge, settings))
    return assessment_of(judge, result, held, split=split, workloads=rows)


def assess_improved(
    trace: RankTrace,
    latency: LatencyTable | None,
    settings: Settings,
    improve: Callable[[ReplayJudge, Choice], Tree],
) -> Assessment:
    """Search on all folds of prompts but one, let `improve` replace the best tree, and score it on the fold left out.

    For what is too slow to run on every fold: a study, a race. With a single prompt nothing is left out.

    Args:
        trace, latency, settings: as for `assess`.
        improve: from the judge of the prompts to choose on and the exact search's choice there, a tree.

    Raises:
        InputError: see `optimize`.
    """
    part = chosen_on_most(trace, latency, settings)
    return assessed_with(improve(part.chosen_on, part.choice), part, settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenOnMost:
    """The exact search's choice on all folds of prompts but the first.

    Attributes:
        judge: of all prompts.
        fold: of each prompt.
        chosen_on: the judge of the prompts that chose; of all of them where the others have no row.
        choice: what it chose.
    """

    judge: ReplayJudge
    fold: Int[np.ndarray, " prompts"]
    chosen_on: ReplayJudge
    choice: Choice


def chosen_on_most(trace: RankTrace, latency: LatencyTable | None, settings: Settings) -> ChosenOnMost:
    """Search on all folds of prompts but the first.

    Raises:
        InputError: see `optimize`.
    """
    require_rows(trace)
    fold = fold_of_prompts(trace.prompts, settings.folds, settings.seed)
    judge = ReplayJudge.of(trace, latency, batches=settings.batches, context_weights=settings.context_weights)
    kept = fold != 0
    chosen_on = judge.among(kept) if kept[trace.prompt_of_row].any() else judge
    return ChosenOnMost(judge=judge, fold=fold, chosen_on=chosen_on, choice=choose(chosen_on, settings))


def assessed_with(tree: Tree, part: ChosenOnMost, settings: Settings) -> Assessment:
    """The answer with `tree` in the place of the best one, scored on the fold left out."""
    alternatives = joined([part.choice.alternatives.take([0, 1]), part.chosen_on.score([tree])])
    result = result_of(replace(part.choice, alternatives=alternatives), settings)
    held = hold_out(part.judge, lambda _: alternatives.trees, part.fold, scored_folds=[0])
    left_out = int((part.fold == 0).sum())
    texts = "none: a single prompt" if held is None else f"{left_out} prompts held out from choosing"
    return assessment_of(part.judge, result, held, split=texts)


def assess_accuracies(probabilities: PathProbabilities, latency: LatencyTable | None, settings: Settings) -> Assessment:
    """Search on path probabilities alone: an expectation under the table's own assumption, with no interval.

    Raises:
        InputError: see `optimize`.
    """
    judge = ExpectedJudge(
        probabilities=probabilities,
        latency=latency,
        batches=settings.batches,
        given_weights=settings.context_weights,
    )
    result = optimize_by(judge, settings)
    return Assessment(
        result=result,
        recommended=result.recommended,
        held_out=None,
        over_plain=None,
        over_runner_up=None,
        sure=None,
        unseen=None,
        prompts_to_halve=None,
        workloads=(),
        warnings=("From a table of accuracies: expected tokens per step, not replayed; no interval can be given.",),
        assumptions=Assumptions(
            estimator="independent",
            law="every position alike, each depth independent of the path",
            prompts=None,
            positions=None,
            split="none: no prompts",
            seed=settings.seed,
            resamples=settings.resamples,
            batch=_batch(settings),
            contexts=None,
            measured_contexts=None if latency is None else tuple(latency.contexts(*_served(settings))),
            rule=None,
            pick="best",
            context_weights=settings.context_weights,
            batch_weights=settings.batch_weights,
        ),
    )


def assessment_of(
    judge: ReplayJudge,
    result: SearchResult,
    held: HeldOut | None,
    *,
    split: str,
    workloads: tuple[WorkloadRow, ...] = (),
) -> Assessment:
    """Put a search and the scores of its held-out prompts together."""
    trace, latency, settings = judge.trace, judge.latency, result.settings
    units = text_units(trace.prompts)
    count = 0 if held is None else len(held.tokens)
    weights = resampling_weights(max(count, 1), settings.resamples, settings.seed)
    scored = None if held is None else tuple(figures(held, latency, settings, weights))
    recommended = _recommended(result, scored)
    at = NAMES.index(recommended)
    runner_up = None if held is None or scored is None else _runner_up(result, held, scored, at, latency, weights)
    found = Assessment(
        result=result,
        recommended=recommended,
        held_out=scored,
        over_plain=None if held is None or at == 0 else faster(held, at, 0, latency, settings, weights),
        over_runner_up=runner_up,
        sure=None if runner_up is None else certainty(runner_up[1], count),
        unseen=tuple(map(float, unseen_shares(trace, judge.table, units))),
        prompts_to_halve=prompts_to_halve(count) if count > 1 else None,
        workloads=workloads,
        warnings=(),
        assumptions=_assumptions(trace, latency, settings, split),
        held=held,
    )
    return replace(found, warnings=tuple(_warnings(found, trace, int(units.max()) + 1)))


def _recommended(result: SearchResult, scored: tuple[HeldOutFigures, ...] | None) -> str:
    """The fastest on prompts that did not choose it, of equals the simpler; of equal trees the first name."""
    if result.settings.objective == "tokens-per-step":
        return TREE
    if scored is None or any(found.tokens_per_s is None for found in scored):
        return result.recommended
    best = PLAIN
    for name, found in zip(NAMES, scored, strict=True):
        if result[name].tree != result[best].tree and _rate(found) > _rate(scored[NAMES.index(best)]):
            best = name
    return best


def _rate(found: HeldOutFigures) -> float:
    return 0.0 if found.tokens_per_s is None else found.tokens_per_s.value


def _runner_up(
    result: SearchResult,
    held: HeldOut,
    scored: tuple[HeldOutFigures, ...],
    at: int,
    latency: LatencyTable | None,
    weights: Float[np.ndarray, "resamples units"],
) -> tuple[str, Figure] | None:
    """The fastest alternative with another tree than the recommended one's, and how much slower it is."""
    mine = result.alternatives[at].tree
    others = [index for index, found in enumerate(result.alternatives) if found.tree != mine]
    if not others:
        return None
    next_best = max(others, key=lambda index: _rate(scored[index]))
    figure = faster(held, at, next_best, latency, result.settings, weights)
    return None if figure is None else (NAMES[next_best], figure)


def _assumptions(trace: RankTrace, latency: LatencyTable | None, settings: Settings, split: str) -> Assumptions:
    contexts = trace.contexts
    measured = None
    if latency is not None:
        used = np.unique(latency.nearest_context(contexts, batches=_served(settings)))
        measured = tuple(latency.contexts(*_served(settings))[index] for index in used)
    if settings.context_weights is not None:
        measured = tuple(sorted(context for context, weight in settings.context_weights if weight))
    return Assumptions(
        estimator=settings.estimator,
        law="steps start where the replayed walk puts them",
        prompts=len(trace.prompts),
        positions=len(trace.ranks),
        split=split,
        seed=settings.seed,
        resamples=settings.resamples,
        batch=_batch(settings),
        contexts=(int(contexts.min()), int(contexts.max())),
        measured_contexts=measured,
        rule=trace.rule,
        pick="best" if settings.objective == "tokens-per-step" else settings.pick,
        context_weights=settings.context_weights,
        batch_weights=settings.batch_weights,
    )


def _batch(settings: Settings) -> int | None:
    return settings.batch if settings.batch_weights is None else None


def _served(settings: Settings) -> list[int]:
    return [batch for batch, _ in settings.batches]


def _warnings(found: Assessment, trace: RankTrace, texts: int) -> list[str]:
    words = []
    if found.held_out is None:
        words.append(
            "One prompt: no interval can be given, and no figure on prompts that did not choose the tree. "
            "Calibrate on more prompts."
        )
    if texts < len(trace.prompts):
        words.append(f"{len(trace.prompts)} prompts are {texts} distinct texts; a repeated text counts once.")
    needed = [figures.break_even_tokens_per_step for figures in map(found.figures, (CHAIN, TREE)) if figures]
    if any(least is not None and least < 1 for least in needed):
        words.append(
            "By the latency table a wider step takes less time than plain decoding's, so something disturbed one of "
            "the two timings; measure again before trusting speeds."
        )
    best = found.figures(found.recommended if found.recommended != PLAIN else CHAIN)
    per_step = None if best is None else best.tokens_per_step
    if per_step is not None and per_step.interval is not None and found.prompts_to_halve is not None:
        half = (per_step.interval.high - per_step.interval.low) / 2 / per_step.value
        if half > _WIDE:
            words.append(
                f"The interval of tokens per step is {100 * half:.1f} % to either side; {found.prompts_to_halve} "
                "scored prompts would halve it."
            )
    return words
