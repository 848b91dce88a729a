"""Race contenders on the same prompts with the same settings, interleaved and repeated.

Times and rates cover what follows the first token, for `generate` too; prefill stands apart. *Predicted* is the replay
of a trace of the raced prompts, made from the plain run's text; a predicted count that differs from the measured one
is a failure, not a footnote (FIELD-CASES 36).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from topo_search.calibrate import EncodedPrompt, empty_trace, trace_of_answers
from topo_search.compare import Divergence, StepMismatch, divergence, step_mismatch, teacher_forced
from topo_search.cost import LatencyTable
from topo_search.decode.decoder import Decoded, TreeDecoder
from topo_search.heads.base import DraftHeads
from topo_search.reference import generate_plain
from topo_search.replay import Replay, replay
from topo_search.stats import DecodeStats
from topo_search.target.adapter import Target
from topo_search.trace import RankTrace
from topo_search.tree import Tree

GENERATE, PLAIN = "generate", "plain"

Progress = Callable[[int, int], None]  # runs done, runs in all


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
    divergences: tuple[Divergence, ...]
    mismatches: tuple[StepMismatch, ...]
    predicted_tokens_per_step: float | None
    predicted_tokens_per_s: float | None
    forecast_tokens_per_step: float | None


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
    """All standings, and the ratios that matter, of one race."""

    standings: tuple[Standing, ...]
    ratios: tuple[Ratio, ...]
    prompts: int
    repeats: int

    @property
    def failures(self) -> list[str]:
        """Differences that no near-tie explains, in words."""
        found = []
        for standing in self.standings:
            found += [
                f"{standing.name}: text of {d.prompt} differs at token {d.position} (two best logits {d.gap:.2g} apart)"
                for d in standing.divergences
                if not d.near_tie
            ]
            found += [
                f"{standing.name}: {m.prompt} accepted {m.decoded} tokens at row {m.row}, replay said {m.replayed}"
                for m in standing.mismatches
                if not m.near_tie
            ]
        return found


Runs = dict[str, list[list[Decoded]]]  # contender -> repeat -> prompt


def race(
    target: Target,
    reference: Target,
    heads: DraftHeads,
    contenders: Sequence[Contender],
    prompts: Sequence[EncodedPrompt],
    *,
    max_new_tokens: int,
    repeats: int,
    latency: LatencyTable | None = None,
    calibration: RankTrace | None = None,
    progress: Progress | None = None,
) -> RaceResult:
    """Race the contenders.

    Args:
        target, heads: ours.
        reference: the same target as a transformers user runs it, for `generate`.
        contenders: `generate` and `plain` among them.
        prompts: at least one.
        max_new_tokens: cap of every answer.
        repeats: passes over all prompts.
        latency, calibration: for predicted times and the forecast.
        progress: called after every answer.

    Raises:
        InputError: a tree is deeper than the heads.
        CheckError: the start-up probe failed.
    """
    runs = _run_all(target, reference, heads, contenders, prompts, max_new_tokens, repeats, progress)
    plain = runs[PLAIN][0]
    answers = [
        teacher_forced(target, p.tokens, run.tokens, index=i, end="eos" if run.end == "eos" else "cap")
        for i, (p, run) in enumerate(zip(prompts, plain, strict=True))
    ]
    trace = trace_of_answers(empty_trace(target, heads, max_new_tokens=max_new_tokens), heads, prompts, answers)
    standings = []
    for contender in contenders:
        walks = None if contender.tree is None else replay(trace, [contender.tree])
        mismatches: list[StepMismatch] = []
        if walks is not None:
            pairs = zip(prompts, answers, walks.accepted(0), runs[contender.name][0], strict=True)
            found = (step_mismatch(heads, p.id, a, steps, run.accepted) for p, a, steps, run in pairs)
            mismatches = [mismatch for mismatch in found if mismatch]
        differing = _divergences(target, prompts, runs[GENERATE][0], runs[contender.name][0])
        standings.append(
            _standing(contender, runs[contender.name], walks, trace, latency, calibration, differing, mismatches)
        )
    return RaceResult(
        standings=tuple(standings),
        ratios=tuple(_ratios(runs, [contender.name for contender in contenders])),
        prompts=len(prompts),
        repeats=repeats,
    )


def _run_all(
    target: Target,
    reference: Target,
    heads: DraftHeads,
    contenders: Sequence[Contender],
    prompts: Sequence[EncodedPrompt],
    max_new_tokens: int,
    repeats: int,
    progress: Progress | None,
) -> Runs:
    """Every contender answers a prompt before any answers the next; who starts rotates."""
    longest = max(len(prompt.tokens) for prompt in prompts) + max_new_tokens
    decoders = {
        c.name: TreeDecoder(target, heads, c.tree, capacity=longest, run_probe=index == 0)
        for index, c in enumerate(c for c in contenders if c.tree is not None)
        if c.tree is not None
    }

    def answer(name: str, prompt: EncodedPrompt, cap: int) -> Decoded:
        if name in decoders:
            return decoders[name].generate(prompt.tokens, max_new_tokens=cap)
        return generate_plain(reference, prompt.tokens, max_new_tokens=cap)

    names = [contender.name for contender in contenders]
    for name in names:
        answer(name, prompts[0], min(4, max_new_tokens))  # warm-up
    runs: Runs = {name: [[] for _ in range(repeats)] for name in names}
    done = 0
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            turn = (index + repeat) % len(names)
            for name in names[turn:] + names[:turn]:
                runs[name][repeat].append(answer(name, prompt, max_new_tokens))
                done += 1
                if progress:
                    progress(done, repeats * len(prompts) * len(names))
    return runs


def _divergences(
    target: Target, prompts: Sequence[EncodedPrompt], expected: Sequence[Decoded], found: Sequence[Decoded]
) -> list[Divergence]:
    pairs = zip(prompts, expected, found, strict=True)
    parted = (divergence(target, p.id, p.tokens, e.tokens, f.tokens) for p, e, f in pairs)
    return [point for point in parted if point]


def _standing(
    contender: Contender,
    repeats: list[list[Decoded]],
    walks: Replay | None,
    trace: RankTrace,
    latency: LatencyTable | None,
    calibration: RankTrace | None,
    differing: list[Divergence],
    mismatches: list[StepMismatch],
) -> Standing:
    stats = DecodeStats.of(length for run in repeats[0] for length in run.accepted)
    rates = [_tokens_per_s(runs) for runs in repeats]
    decode_ms = [sum(run.decode_ms for run in runs) for runs in repeats]
    tree = contender.tree
    forecast = None if tree is None or calibration is None else float(replay(calibration, [tree]).tokens_per_step[0])
    return Standing(
        name=contender.name,
        stats=stats,
        tokens_per_step=stats.tokens_per_step,
        prefill_ms=float(np.median([run.prefill_ms for runs in repeats for run in runs])),
        step_ms=float(np.median(decode_ms)) / max(stats.steps, 1),
        tokens_per_s=float(np.median(rates)),
        tokens_per_s_spread=(min(rates), max(rates)),
        text_equal=not differing,
        divergences=tuple(differing),
        mismatches=tuple(mismatches),
        predicted_tokens_per_step=None if walks is None else float(walks.tokens_per_step[0]),
        predicted_tokens_per_s=None if walks is None or tree is None else _predicted_rate(walks, tree, trace, latency),
        forecast_tokens_per_step=forecast,
    )


def _tokens_per_s(runs: Sequence[Decoded]) -> float:
    tokens = sum(len(run.tokens) - 1 for run in runs)
    return 1000.0 * tokens / max(sum(run.decode_ms for run in runs), 1e-9)


def _predicted_rate(walks: Replay, tree: Tree, trace: RankTrace, latency: LatencyTable | None) -> float | None:
    if latency is None or tree.verify_width not in latency.widths() or not walks.steps[0]:
        return None
    times = latency.step_ms(verify_width=tree.verify_width, depth=tree.depth)
    visited = walks.visited[0]
    total_ms = float(times[latency.nearest_context(trace.contexts[visited])].sum())
    return 1000.0 * int(walks.tokens.sum()) / total_ms


def _ratios(runs: Runs, names: Sequence[str]) -> list[Ratio]:
    wanted = [(PLAIN, GENERATE), *((name, PLAIN) for name in names if name not in (PLAIN, GENERATE))]
    if "best tree" in names:
        wanted += [("best tree", name) for name in names if name not in (PLAIN, GENERATE, "best tree")]
    found = []
    for of, over in wanted:
        if of in runs and over in runs:
            pairs = zip(runs[of], runs[over], strict=True)
            ratios = [_tokens_per_s(mine) / _tokens_per_s(theirs) for mine, theirs in pairs]
            found.append(Ratio(of=of, over=over, median=float(np.median(ratios)), low=min(ratios), high=max(ratios)))
    return found
