"""Race contenders on the same prompts with the same settings, interleaved and repeated.

Times and rates cover what follows the first token, for `generate` too; prefill stands apart. *Predicted* is the replay
of a trace of the raced prompts, made from the plain run's text; a predicted count that differs from the measured one
is a failure, not a footnote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from topo_search.answers import Answer
from topo_search.calibrate import EncodedPrompt, empty_trace, trace_of_answers
from topo_search.compare import Divergence, StepMismatch, divergence, step_mismatch, teacher_forced
from topo_search.cost import LatencyTable
from topo_search.decode.decoder import Decoded, TreeDecoder
from topo_search.heads.base import DraftHeads
from topo_search.identity import GREEDY, RuleIdentity
from topo_search.reference import generate_plain
from topo_search.replay import Replay, replay
from topo_search.search.times import StepTimes
from topo_search.stats import DecodeStats
from topo_search.target.adapter import Target
from topo_search.trace import RankTrace
from topo_search.tree import Tree

GENERATE, PLAIN = "generate", "plain"

Progress = Callable[[int, int], None]  # answers done, answers in all

_WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to decode; `tree` is None for transformers' `generate` and empty for our plain decoding."""

    name: str
    tree: Tree | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One contender's figures.

    Attributes:
        name: of the contender.
        stats: accepted tokens of every step of one pass over the prompts.
        tokens_per_step: measured.
        prefill_ms: median time to the first token.
        step_ms: decode time over steps.
        tokens_per_s: median over repeats of tokens after the first over decode time.
        tokens_per_s_spread: smallest and largest repeat.
        text_equal: whether every text equals that of `generate`.
        changes_text: whether its rule changes the text; then divergences are not looked for and nothing is predicted.
        divergences: where it does not.
        mismatches: steps at which replay and decoder disagree.
        predicted_tokens_per_step, predicted_tokens_per_s: by replay of the raced prompts.
        forecast_tokens_per_step: by replay of the calibration trace.
    """

    name: str
    stats: DecodeStats
    tokens_per_step: float
    prefill_ms: float
    step_ms: float
    tokens_per_s: float
    tokens_per_s_spread: tuple[float, float]
    text_equal: bool
    changes_text: bool
    divergences: tuple[Divergence, ...]
    mismatches: tuple[StepMismatch, ...]
    predicted_tokens_per_step: float | None
    predicted_tokens_per_s: float | None
    forecast_tokens_per_step: float | None

    @property
    def measured_over_predicted(self) -> float | None:
        """Measured tokens per second over those that the latency table lets expect; None where it has no time."""
        return None if self.predicted_tokens_per_s is None else self.tokens_per_s / self.predicted_tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many times as fast one contender is as another: paired by repeat, median and range."""

    of: str
    over: str
    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceResult:
    """All standings, and the ratios that matter, of one race under one rule."""

    standings: tuple[Standing, ...]
    ratios: tuple[Ratio, ...]
    prompts: int
    repeats: int
    rule: RuleIdentity = GREEDY

    @property
    def failures(self) -> list[str]:
        """Differences that no near-tie explains, in words."""
        found = []
        for standing in self.standings:
            found += [
                f"{standing.name}: text of {d.prompt} differs at token {d.position}, {d.found} and not {d.expected} "
                f"(two best logits {d.gap:.2g} apart, rounding explains {d.bound:.2g})"
                for d in standing.divergences
                if not d.explained
            ]
            found += [
                f"{standing.name}: {m.prompt} accepted {m.decoded} tokens at row {m.row}, replay said {m.replayed}"
                for m in standing.mismatches
                if not m.near_tie
            ]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What is raced on, the same for every contender.

    Attributes:
        target, heads: ours.
        reference: the same target as a transformers user runs it, for `generate`.
        prompts: at least one.
        max_new_tokens: cap of every answer.
        repeats: passes over all prompts.
        rule: greedy, or sampling; every prompt keeps its own noise in every contender and repeat. Under a rule that
            changes the text only trees follow it; `generate` and plain decoding follow the exact rule beside it.
        latency, calibration: for predicted rates and the forecast; null where there are none.
    """

    target: Target
    reference: Target
    heads: DraftHeads
    prompts: Sequence[EncodedPrompt]
    max_new_tokens: int
    repeats: int
    rule: RuleIdentity = GREEDY
    latency: LatencyTable | None = None
    calibration: RankTrace | None = None


Runs = dict[str, list[list[Decoded]]]  # contender -> repeat -> prompt


def race(course: Course, contenders: Sequence[Contender], *, progress: Progress | None = None) -> RaceResult:
    """Race the contenders, `generate` and `plain` among them.

    Raises:
        InputError: a tree is deeper than the heads.
        CheckError: the start-up probe failed.
    """
    decoders = _decoders(course, contenders)
    runs = _run_all(course, contenders, decoders, progress)
    answers = [
        teacher_forced(course.target, p.tokens, run.tokens, index=i, end="eos" if run.end == "eos" else "cap")
        for i, (p, run) in enumerate(zip(course.prompts, runs[PLAIN][0], strict=True))
    ]
    exact = course.rule.of_plain_decoding
    identity = empty_trace(course.target, course.heads, max_new_tokens=course.max_new_tokens, rule=exact)
    trace = trace_of_answers(identity, course.heads, course.prompts, answers)
    return RaceResult(
        standings=tuple(_standing(course, contender, runs, trace, answers, decoders) for contender in contenders),
        ratios=tuple(_ratios(runs, [contender.name for contender in contenders])),
        prompts=len(course.prompts),
        repeats=course.repeats,
        rule=course.rule,
    )


def _answer(
    course: Course,
    decoders: dict[str, TreeDecoder],
    name: str,
    prompt: EncodedPrompt,
    cap: int,
    processor: Any = None,
) -> Decoded:
    """One contender's answer; the processor sees the logits of every token."""
    trees = name in decoders and bool(decoders[name].tree.paths)
    drawn: dict[str, Any] = {
        "rule": course.rule if trees else course.rule.of_plain_decoding,
        "request": prompt.request,
        "processors": [] if processor is None else [processor],
    }
    if name in decoders:
        return decoders[name].generate(prompt.tokens, max_new_tokens=cap, **drawn)
    return generate_plain(course.reference, prompt.tokens, max_new_tokens=cap, **drawn)


def _run_all(
    course: Course, contenders: Sequence[Contender], decoders: dict[str, TreeDecoder], progress: Progress | None
) -> Runs:
    """Every contender answers a prompt before any answers the next; who starts rotates."""
    answer = partial(_answer, course, decoders)
    names = [contender.name for contender in contenders]
    for name in names:
        answer(name, course.prompts[0], min(_WARM_UP_TOKENS, course.max_new_tokens))
    runs: Runs = {name: [[] for _ in range(course.repeats)] for name in names}
    total = course.repeats * len(course.prompts) * len(names)
    for repeat in range(course.repeats):
        for index, prompt in enumerate(course.prompts):
            turn = (index + repeat) % len(names)
            for name in names[turn:] + names[:turn]:
                runs[name][repeat].append(answer(name, prompt, course.max_new_tokens))
            if progress:
                progress((repeat * len(course.prompts) + index + 1) * len(names), total)
    return runs


def _decoders(course: Course, contenders: Sequence[Contender]) -> dict[str, TreeDecoder]:
    """A decoder per tree; one probe serves all, since it does not depend on the tree."""
    capacity = max(len(prompt.tokens) for prompt in course.prompts) + course.max_new_tokens
    found: dict[str, TreeDecoder] = {}
    for contender in contenders:
        if contender.tree is not None:
            found[contender.name] = TreeDecoder(
                course.target, course.heads, contender.tree, capacity=capacity, run_probe=not found
            )
    return found


def _standing(
    course: Course,
    contender: Contender,
    runs: Runs,
    trace: RankTrace,
    answers: Sequence[Answer],
    decoders: dict[str, TreeDecoder],
) -> Standing:
    repeats, tree = runs[contender.name], contender.tree
    stats = DecodeStats.of(length for run in repeats[0] for length in run.accepted)
    rates = [_tokens_per_s(passed) for passed in repeats]
    decode_ms = [sum(run.decode_ms for run in passed) for passed in repeats]
    changes = course.rule.changes_text and tree is not None and bool(tree.paths)
    walks = None if tree is None or changes else replay(trace, [tree])
    expected = runs[GENERATE][0]
    divergences = () if changes else tuple(_divergences(course, decoders, contender.name, expected, repeats[0]))
    return Standing(
        name=contender.name,
        stats=stats,
        tokens_per_step=stats.tokens_per_step,
        prefill_ms=float(np.median([run.prefill_ms for passed in repeats for run in passed])),
        step_ms=float(np.median(decode_ms)) / max(stats.steps, 1),
        tokens_per_s=float(np.median(rates)),
        tokens_per_s_spread=(min(rates), max(rates)),
        text_equal=all(e.tokens == f.tokens for e, f in zip(expected, repeats[0], strict=True)),
        changes_text=changes,
        divergences=divergences,
        mismatches=() if walks is None else tuple(_mismatches(course, answers, walks, repeats[0])),
        predicted_tokens_per_step=None if walks is None else float(walks.tokens_per_step[0]),
        predicted_tokens_per_s=None if walks is None else predicted_rate(course.latency, trace, walks, tree),
        forecast_tokens_per_step=None if changes else _forecast(course.calibration, tree),
    )


def _divergences(
    course: Course, decoders: dict[str, TreeDecoder], name: str, expected: Sequence[Decoded], found: Sequence[Decoded]
) -> list[Divergence]:
    parted = (
        divergence(
            course.target,
            p.id,
            p.tokens,
            e.tokens,
            f.tokens,
            rule=course.rule.of_plain_decoding,
            request=p.request,
            reruns=(
                partial(_answer, course, decoders, GENERATE, p),
                partial(_answer, course, decoders, name, p),
            ),
        )
        for p, e, f in zip(course.prompts, expected, found, strict=True)
    )
    return [point for point in parted if point]


def _mismatches(
    course: Course, answers: Sequence[Answer], walks: Replay, found: Sequence[Decoded]
) -> list[StepMismatch]:
    """Steps that replay counts otherwise, where the text is the plain one; other text is a divergence already."""
    rows = zip(course.prompts, answers, walks.accepted(0), found, strict=True)
    parted = (
        step_mismatch(course.heads, p.id, a, steps, run.accepted) for p, a, steps, run in rows if run.tokens == a.tokens
    )
    return [step for step in parted if step]


def _forecast(calibration: RankTrace | None, tree: Tree | None) -> float | None:
    if calibration is None or tree is None:
        return None
    return float(replay(calibration, [tree]).tokens_per_step[0])


def _tokens_per_s(runs: Sequence[Decoded]) -> float:
    tokens = sum(len(run.tokens) - 1 for run in runs)
    return 1000.0 * tokens / max(sum(run.decode_ms for run in runs), 1e-9)


def predicted_rate(latency: LatencyTable | None, trace: RankTrace, walks: Replay, tree: Tree | None) -> float | None:
    """Tokens after the first per second: one tree's replayed steps, each at its own time in the table."""
    if latency is None or tree is None or not walks.steps[0]:
        return None
    times = StepTimes.of(latency).tree_ms(tree)
    if np.isnan(times).any():
        return None
    visited = walks.visited[0]
    total_ms = float(times[latency.nearest_context(trace.contexts[visited])].sum())
    return 1000.0 * int(walks.tokens.sum()) / total_ms


def _ratios(runs: Runs, names: Sequence[str]) -> list[Ratio]:
    wanted = [(PLAIN, GENERATE), *((name, PLAIN) for name in names if name not in (PLAIN, GENERATE))]
    if "best tree" in names:
        wanted += [("best tree", name) for name in names if name not in (PLAIN, GENERATE, "best tree")]
    found = []
    for of, over in wanted:
        if of in runs and over in runs and all(_tokens_per_s(theirs) for theirs in runs[over]):
            pairs = zip(runs[of], runs[over], strict=True)
            ratios = [_tokens_per_s(mine) / _tokens_per_s(theirs) for mine, theirs in pairs]
            found.append(Ratio(of=of, over=over, median=float(np.median(ratios)), low=min(ratios), high=max(ratios)))
    return found
