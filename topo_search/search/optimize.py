"""Pick the fastest of plain decoding, the best chain and the best tree, by replay over measured step times.

Judged as sum of tokens over sum of milliseconds of the replayed steps, each at its own width, depth and context.
Every measured width is tried: replayed curves are neither monotone nor concave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from topo_search.cost import LatencyTable
from topo_search.errors import InputError
from topo_search.estimates import PathProbabilities, joint
from topo_search.prefixes import PrefixTable
from topo_search.replay import Replay, replay, replay_nested
from topo_search.search.frontier import Frontier, frontier
from topo_search.trace import RankTrace
from topo_search.tree import Tree

Objective = Literal["throughput", "tokens-per-step"]
PLAIN, CHAIN, TREE = "plain", "best chain", "best tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One way to decode, with what it is expected to bring on the trace's prompts.

    Attributes:
        name: `plain`, `best chain` or `best tree`.
        tree: empty for plain decoding.
        probabilities: of each path of the tree, in its order.
        tokens_per_step: replayed; `tokens_per_step_all_positions` counts every row and is usually too high.
        step_ms: mean over the replayed steps; null without a latency table, as are the next two.
        tokens_per_s: tokens after the first over decode time.
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
    """The three alternatives, which of them to use, and every size tried on the way.

    Attributes:
        alternatives: plain, best chain, best tree.
        recommended: name of the fastest (the simpler one on a tie); the best tree for `tokens-per-step`.
        sizes: the frontier: each size's best tree.
    """

    alternatives: tuple[Alternative, ...]
    recommended: str
    sizes: tuple[Alternative, ...]

    def __getitem__(self, name: str) -> Alternative:
        """The alternative of that name."""
        return next(alternative for alternative in self.alternatives if alternative.name == name)


def optimize(
    trace: RankTrace, latency: LatencyTable | None, *, budget: int, objective: Objective = "throughput"
) -> SearchResult:
    """The best tree within `budget` verified tokens per step, beside plain decoding and the best chain.

    Args:
        trace: ranks of the prompts to optimise for, at least one row.
        latency: measured step times; needed unless `objective` is `tokens-per-step`.
        budget: the most tokens verified per step, root included, at least 1.
        objective: `throughput` picks the fastest, `tokens-per-step` fills the budget.

    Raises:
        InputError: the budget is below 1, the trace is empty, or no time is at hand.
    """
    if budget < 1:
        raise InputError(f"The budget is {budget}; it counts tokens verified per step, root included, so at least 1.")
    if not len(trace.ranks):
        raise InputError("The trace has no rows: every answer is one token long. Calibrate on other prompts.")
    if latency is None and objective == "throughput":
        raise InputError(
            "No latency table: run topo-search measure on the device that will serve, or pass "
            "--objective tokens-per-step, which needs none."
        )
    judge = _Judge.of(trace, latency)
    widths = set(range(1, budget + 1))
    if latency is not None and objective == "throughput":
        widths &= set(latency.widths())
        if 1 not in widths:
            raise InputError(
                "The latency table has no time for width 1, plain decoding; run topo-search measure again."
            )
    plain = judge.score([Tree(())])[0]
    chains = judge.score([Tree.chain(n) for n in range(1, trace.depth + 1) if n + 1 in widths] or [Tree(())])
    wanted = sorted(width - 1 for width in widths if width > 1)
    sizes = _best_of_each_size(judge, wanted, objective) or [plain]
    best = max(sizes, key=_filled if objective == "tokens-per-step" else _speed)
    chain = max(chains, key=_tokens if objective == "tokens-per-step" else _speed)
    named = tuple(_named(a, name, plain) for a, name in ((plain, PLAIN), (chain, CHAIN), (best, TREE)))
    fastest = TREE if objective == "tokens-per-step" else max(named, key=_speed).name
    return SearchResult(
        alternatives=named, recommended=fastest, sizes=tuple(_named(size, TREE, plain) for size in sizes)
    )


def _speed(alternative: Alternative) -> float:
    return alternative.tokens_per_s or 0.0


def _tokens(alternative: Alternative) -> float:
    return alternative.tokens_per_step


def _filled(alternative: Alternative) -> tuple[int, float]:
    return alternative.tree.num_draft_nodes, alternative.tokens_per_step


def _named(alternative: Alternative, name: str, plain: Alternative) -> Alternative:
    speedup = None
    if alternative.tokens_per_s is not None and plain.tokens_per_s is not None:
        speedup = alternative.tokens_per_s / plain.tokens_per_s
    return replace(alternative, name=name, speedup=speedup)


def _best_of_each_size(judge: _Judge, sizes: list[int], objective: Objective) -> list[Alternative]:
    """The best tree of each size; for throughput over every depth cap, since a shallower tree drafts for less."""
    if not sizes:
        return []
    best: dict[int, Alternative] = {}
    shallowest = 1 if objective == "throughput" else judge.trace.depth
    for max_depth in range(judge.trace.depth, shallowest - 1, -1):
        family = frontier(judge.estimate, num_draft_nodes=sizes[-1], max_depth=max_depth)
        for scored in judge.score_family(family, [size for size in sizes if size <= len(family.order)]):
            size = scored.tree.num_draft_nodes
            if size not in best or _better(scored, best[size]):
                best[size] = scored
    return [best[size] for size in sorted(best)]


def _better(one: Alternative, other: Alternative) -> bool:
    return (_speed(one), one.tokens_per_step) > (_speed(other), other.tokens_per_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judge:
    """Scores trees by replay and measured times."""

    trace: RankTrace
    latency: LatencyTable | None
    table: PrefixTable
    estimate: PathProbabilities
    context_of_row: np.ndarray | None

    @classmethod
    def of(cls, trace: RankTrace, latency: LatencyTable | None) -> _Judge:
        table = PrefixTable.of(trace)
        contexts = None if latency is None else latency.nearest_context(trace.contexts)
        return cls(trace=trace, latency=latency, table=table, estimate=joint(table), context_of_row=contexts)

    def score(self, trees: Sequence[Tree]) -> list[Alternative]:
        return self._alternatives(replay(self.trace, trees, table=self.table), trees)

    def score_family(self, family: Frontier, sizes: Sequence[int]) -> list[Alternative]:
        if not sizes:
            return []
        walks = replay_nested(self.trace, list(family.order), sizes, table=self.table)
        return self._alternatives(walks, [family.tree(size) for size in sizes])

    def _alternatives(self, walks: Replay, trees: Sequence[Tree]) -> list[Alternative]:
        tokens = int(walks.tokens.sum())
        total_ms = self._total_ms(walks, trees)
        figures = zip(trees, walks.steps, walks.tokens_per_step, walks.all_positions, total_ms, strict=True)
        return [
            Alternative(
                name=TREE,
                tree=tree,
                probabilities=self._probabilities(tree),
                tokens_per_step=float(per_step),
                tokens_per_step_all_positions=float(all_positions),
                step_ms=None if ms is None else ms / int(steps),
                tokens_per_s=None if ms is None else 1000.0 * tokens / ms,
                speedup=None,
            )
            for tree, steps, per_step, all_positions, ms in figures
        ]

    def _total_ms(self, walks: Replay, trees: Sequence[Tree]) -> list[float | None]:
        """Milliseconds of all steps of each tree; null where its width has no time."""
        if self.latency is None or self.context_of_row is None:
            return [None] * len(trees)
        one_hot = self.context_of_row[:, None] == np.arange(len(self.latency.contexts()))
        counts = walks.visited.astype(np.float32) @ one_hot.astype(np.float32)  # exact below 2^24 rows
        known = set(self.latency.widths())
        return [
            float(steps @ self.latency.step_ms(verify_width=tree.verify_width, depth=tree.depth))
            if tree.verify_width in known
            else None
            for tree, steps in zip(trees, counts.astype(np.float64), strict=True)
        ]

    def _probabilities(self, tree: Tree) -> tuple[float, ...]:
        numbers = self.table.numbers
        known = self.estimate.probabilities
        return tuple(float(known[numbers[path]]) if path in numbers else 0.0 for path in tree.paths)
