"""Pick the fastest of plain decoding, the best chain and the best tree, by replay over measured step times.

Judged as sum of tokens over sum of milliseconds of the replayed steps, each at its own width, depth and context.
Every measured width is tried: replayed curves are neither monotone nor concave. The figures here are the winners' own
scores, on the prompts that chose them; `assess` gives those on other prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from topo_search.cost import LatencyTable
from topo_search.errors import InputError
from topo_search.search.choose import Choice, Settings, choose, merit
from topo_search.search.judge import Judge, ReplayJudge, Scores
from topo_search.trace import RankTrace
from topo_search.tree import Tree

PLAIN, CHAIN, TREE = "plain", "best chain", "best tree"
NAMES = (PLAIN, CHAIN, TREE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One way to decode, with what it brings on the prompts that chose it.

    Attributes:
        name: `plain`, `best chain` or `best tree`.
        tree: empty for plain decoding.
        probabilities: of each path of the tree, in its order.
        tokens_per_step: replayed; `tokens_per_step_all_positions` counts every row and is usually too high.
        step_ms: mean over the replayed steps, of all batches; null without a latency table, as are the next two.
        tokens_per_s: tokens after the first over decode time, of all sequences of the batch together.
        speedup: tokens_per_s over that of plain decoding by the same table.
    """

    name: str
    tree: Tree
    probabilities: tuple[float, ...]
    tokens_per_step: float
    tokens_per_step_all_positions: float
    step_ms: float | None
    tokens_per_s: float | None
    speedup: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The three alternatives, which of them wins on these prompts, and every size tried on the way.

    Attributes:
        alternatives: plain, best chain, best tree.
        recommended: name of the fastest (the simpler one on a tie); the best tree for `tokens-per-step`.
        sizes: the frontier: each size's best tree.
        choice: the trees and their scores.
        settings: what was asked.
    """

    alternatives: tuple[Alternative, ...]
    recommended: str
    sizes: tuple[Alternative, ...]
    choice: Choice = field(compare=False)
    settings: Settings

    def __getitem__(self, name: str) -> Alternative:
        """The alternative of that name."""
        return next(alternative for alternative in self.alternatives if alternative.name == name)


def optimize(trace: RankTrace, latency: LatencyTable | None, settings: Settings) -> SearchResult:
    """The best tree within the budget, beside plain decoding and the best chain.

    Args:
        trace: ranks of the prompts to optimise for, at least one row.
        latency: measured step times; needed unless the objective is `tokens-per-step`.
        settings: the question.

    Raises:
        InputError: the trace is empty, or no time is at hand.
    """
    require_rows(trace)
    return optimize_by(
        ReplayJudge.of(trace, latency, batches=settings.batches, context_weights=settings.context_weights), settings
    )


def optimize_by(judge: Judge, settings: Settings) -> SearchResult:
    """`optimize` with trees scored by any judge.

    Raises:
        InputError: no time is at hand.
    """
    choice = choose(judge, settings)
    return result_of(choice, settings)


def result_of(choice: Choice, settings: Settings) -> SearchResult:
    """A choice with its figures, named and compared."""
    return SearchResult(
        alternatives=tuple(_rows(choice, choice.alternatives, NAMES, settings)),
        recommended=NAMES[fastest(choice.alternatives, settings)],
        sizes=tuple(_rows(choice, choice.sizes, (TREE,) * len(choice.sizes.trees), settings)),
        choice=choice,
        settings=settings,
    )


def require_rows(trace: RankTrace) -> None:
    """Refuse a trace in which no step is ever taken.

    Raises:
        InputError: every answer is one token long.
    """
    if not len(trace.ranks):
        raise InputError("The trace has no rows: every answer is one token long. Calibrate on other prompts.")


def fastest(alternatives: Scores, settings: Settings) -> int:
    """Which of plain, chain and tree to recommend: the fastest, of equals the simpler; the tree to fill a budget."""
    if settings.objective == "tokens-per-step":
        return NAMES.index(TREE)
    return int(merit(alternatives, settings).argmax())


def _rows(choice: Choice, scores: Scores, names: tuple[str, ...], settings: Settings) -> list[Alternative]:
    plain = float(choice.alternatives.tokens_per_ms[0])
    known = dict(zip(choice.estimate.paths, choice.estimate.probabilities.tolist(), strict=True))
    figures = zip(names, scores.trees, scores.tokens_per_step, scores.all_positions, scores.tokens_per_ms, strict=True)
    return [
        Alternative(
            name=name,
            tree=tree,
            probabilities=tuple(known.get(path, 0.0) for path in tree.paths),
            tokens_per_step=float(per_step),
            tokens_per_step_all_positions=float(everywhere),
            step_ms=_known(per_step / per_ms),
            tokens_per_s=_known(1000.0 * settings.sequences * per_ms),
            speedup=_known(per_ms / plain),
        )
        for name, tree, per_step, everywhere, per_ms in figures
    ]


def _known(value: float) -> float | None:
    return None if value != value else float(value)
