"""Score trees on a trace: steps per prompt by replay, milliseconds per prompt by the latency table.

Everything later (choice, held-out figures, intervals) is a sum over prompts of what is counted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int

from topo_search.cost import ALONE, Batches, LatencyTable
from topo_search.estimates import PathProbabilities, estimate
from topo_search.prefixes import PrefixTable
from topo_search.replay import Replay, replay, replay_nested
from topo_search.search.refine import refine
from topo_search.search.times import StepTimes
from topo_search.trace import RankTrace
from topo_search.tree import Path, Tree

Family = tuple[Sequence[Path], Sequence[int]]  # an order of paths, and how many of the first ones make a tree

_SWAPS = 64  # single nodes exchanged at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What several trees cost on the same prompts.

    Attributes:
        trees: the trees, one per row of the arrays.
        tokens: `[prompts]`, N - 1 of each prompt: what its steps emit, whatever the tree.
        counts: `[trees, prompts, contexts]`, steps by the measured context nearest to each; one context without a
            table. A fraction where a step is expected rather than counted (`ExpectedJudge`), or where given weights
            spread it over contexts.
        ms: `[trees, prompts]`, time of those steps; NaN where the tree's width or depth has no time.
        all_positions: `[trees]`, mean emitted over every row, as if steps started everywhere.
    """

    trees: tuple[Tree, ...]
    tokens: Int[np.ndarray, " prompts"]
    counts: Float[np.ndarray, "trees prompts contexts"]
    ms: Float[np.ndarray, "trees prompts"]
    all_positions: Float[np.ndarray, " trees"]

    @property
    def steps(self) -> Float[np.ndarray, "trees prompts"]:
        """Steps of each prompt."""
        steps: np.ndarray = self.counts.sum(axis=2)
        return steps

    @property
    def tokens_per_step(self) -> Float[np.ndarray, " trees"]:
        """All tokens over all steps; 1.0 where no step is taken."""
        steps = self.steps.sum(axis=1)
        per_step: np.ndarray = np.divide(self.tokens.sum(), steps, out=np.ones(len(steps)), where=steps > 0)
        return per_step

    @property
    def tokens_per_ms(self) -> Float[np.ndarray, " trees"]:
        """All tokens over all milliseconds, per sequence; NaN without a time."""
        rate: np.ndarray = self.tokens.sum() / self.ms.sum(axis=1)
        return rate

    def take(self, trees: Sequence[int]) -> Scores:
        """The scores of some of the trees, in the order given."""
        chosen = list(trees)
        return Scores(
            trees=tuple(self.trees[index] for index in chosen),
            tokens=self.tokens,
            counts=self.counts[chosen],
            ms=self.ms[chosen],
            all_positions=self.all_positions[chosen],
        )


@runtime_checkable
class Timed(Protocol):
    """Knows step times."""

    @property
    def latency(self) -> LatencyTable | None:
        """Step times; null where only steps count."""

    @property
    def times(self) -> StepTimes:
        """The table as arrays."""


@runtime_checkable
class Judge(Timed, Protocol):
    """Scores trees on one set of prompts, and estimates their path probabilities."""

    @property
    def depth(self) -> int:
        """The deepest tree that can be scored."""

    def estimate(self, estimator: str) -> PathProbabilities:
        """Path probabilities by the estimator of that name."""

    @property
    def context_weights(self) -> Float[np.ndarray, " contexts"]:
        """How much each measured context counts."""

    def refined(self, tree: Tree, estimator: str, *, swaps: bool) -> Tree:
        """A tree of the same size that takes no more steps."""

    def score(self, trees: Sequence[Tree]) -> Scores:
        """What each tree costs."""

    def score_families(self, families: Sequence[Family]) -> Scores:
        """What the trees of several sizes of nested families cost, family after family."""


@dataclass(frozen=True, kw_only=True)
class ReplayJudge:
    """A trace made ready to score trees.

    Attributes:
        trace: the rows, at least one.
        latency: step times; null where only steps count.
        batches: sequences that steps serve, with their shares of the steps.
        table: the trace's prefixes.
        times: the latency table at these batches.
        segment_starts: first row of each run of rows with the same prompt and the same nearest measured context.
        segment_keys: prompt times contexts plus context of each run.
    """

    trace: RankTrace
    latency: LatencyTable | None
    batches: Batches
    table: PrefixTable
    times: StepTimes
    segment_starts: Int[np.ndarray, " segments"]
    segment_keys: Int[np.ndarray, " segments"]

    @classmethod
    def of(
        cls,
        trace: RankTrace,
        latency: LatencyTable | None,
        *,
        batches: Batches = ALONE,
        context_weights: Sequence[tuple[int, float]] | None = None,
    ) -> ReplayJudge:
        """Number the trace's prefixes and look up each row's context, unless weights say what contexts count.

        Raises:
            InputError: a context that has a weight was not measured.
        """
        return cls._of(trace, latency, batches, PrefixTable.of(trace), StepTimes.of(latency, batches, context_weights))

    def among(self, prompts: Bool[np.ndarray, " prompts"]) -> ReplayJudge:
        """The judge of the prompts marked, by the numbers that all paths have already."""
        rows = np.flatnonzero(prompts[self.trace.prompt_of_row])
        return self._of(self.trace.of_prompts(prompts), self.latency, self.batches, self.table.among(rows), self.times)

    @classmethod
    def _of(
        cls, trace: RankTrace, latency: LatencyTable | None, batches: Batches, table: PrefixTable, times: StepTimes
    ) -> ReplayJudge:
        context: Int[np.ndarray, " rows"] | int = 0
        if times.verify_ms and latency is not None:
            context = latency.nearest_context(trace.contexts, batches=[batch for batch, _ in batches])
        keys = trace.prompt_of_row * len(times.contexts) + context  # rises: contexts grow within a prompt
        starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        return cls(
            trace=trace,
            latency=latency,
            batches=batches,
            table=table,
            times=times,
            segment_starts=starts,
            segment_keys=keys[starts],
        )

    @property
    def depth(self) -> int:
        """The deepest tree that can be scored."""
        return self.trace.depth

    def estimate(self, estimator: str) -> PathProbabilities:
        """Path probabilities of the trace by the estimator of that name."""
        return estimate(estimator, self.table)

    @cached_property
    def context_weights(self) -> Float[np.ndarray, " contexts"]:
        """The weights given, else the share of rows at each measured context."""
        if self.times.weights is not None:
            return self.times.weights
        rows = np.diff(self.segment_starts, append=len(self.trace.ranks))
        contexts = len(self.times.contexts)
        weights: np.ndarray = np.bincount(self.segment_keys % contexts, weights=rows, minlength=contexts) / rows.sum()
        return weights

    def refined(self, tree: Tree, estimator: str, *, swaps: bool) -> Tree:
        """Recounted at its own step starts and, where asked for, with single nodes swapped."""
        return refine(
            self.trace,
            self.table,
            tree,
            estimator=lambda table: estimate(estimator, table),
            max_swaps=_SWAPS if swaps else 0,
        )

    def score(self, trees: Sequence[Tree]) -> Scores:
        """Walk each tree.

        Raises:
            MismatchError: a tree is deeper, or uses higher ranks, than the trace resolves.
        """
        return self._scores(replay(self.trace, trees, table=self.table), trees)

    def score_families(self, families: Sequence[Family]) -> Scores:
        """Walk the trees of several sizes of nested families, all at once."""
        return self._scores(replay_nested(self.trace, families, table=self.table), _trees(families))

    def _scores(self, walks: Replay, trees: Sequence[Tree]) -> Scores:
        contexts = len(self.times.contexts)
        per_segment = np.add.reduceat(walks.visited, self.segment_starts, axis=1, dtype=np.int32)
        flat = np.zeros((len(trees), len(self.trace.prompts) * contexts))
        flat[:, self.segment_keys] = per_segment
        counts = flat.reshape(len(trees), len(self.trace.prompts), contexts)
        if self.times.weights is not None:
            counts = counts.sum(axis=2, keepdims=True) * self.times.weights
        times = np.array([self.times.tree_ms(tree) for tree in trees])
        return Scores(
            trees=tuple(trees),
            tokens=walks.tokens,
            counts=counts,
            ms=np.einsum("tpc,tc->tp", counts, times.reshape(len(trees), contexts)),
            all_positions=walks.all_positions,
        )


@dataclass(frozen=True, kw_only=True)
class ExpectedJudge:
    """Scores trees by their path probabilities alone, where there is a table of accuracies and no trace.

    One prompt that one token is asked of: its expected steps are 1 / (1 + sum of probabilities), for a law over
    positions that does not depend on the tree. Step times are averaged over the measured contexts.

    Attributes:
        probabilities: of every path that may be used.
        latency, batches: as in `ReplayJudge`.
        given_weights: (context, weight) pairs; null for every measured context alike.
    """

    probabilities: PathProbabilities
    latency: LatencyTable | None
    batches: Batches = ALONE
    given_weights: tuple[tuple[int, float], ...] | None = None

    @property
    def depth(self) -> int:
        """The deepest path listed."""
        return int(self.probabilities.depths.max(initial=0))

    def estimate(self, estimator: str) -> PathProbabilities:
        """The probabilities given; no other estimator can be applied to them."""
        del estimator
        return self.probabilities

    @cached_property
    def times(self) -> StepTimes:
        """The table at these batches."""
        return StepTimes.of(self.latency, self.batches, self.given_weights)

    @property
    def context_weights(self) -> Float[np.ndarray, " contexts"]:
        """The weights given, else every measured context alike."""
        if self.times.weights is not None:
            return self.times.weights
        return np.full(len(self.times.contexts), 1 / len(self.times.contexts))

    def refined(self, tree: Tree, estimator: str, *, swaps: bool) -> Tree:
        """The same tree: without prompts there are no step starts to count at."""
        del estimator, swaps
        return tree

    def score(self, trees: Sequence[Tree]) -> Scores:
        """Expected steps and milliseconds per token of each tree."""
        known, weights = self._known, self.context_weights
        expected = np.array([1.0 + sum(known.get(path, 0.0) for path in tree.paths) for tree in trees])
        times = np.array([self.times.tree_ms(tree) @ weights for tree in trees])
        return Scores(
            trees=tuple(trees),
            tokens=np.ones(1, dtype=np.int64),
            counts=weights[None, None, :] / expected[:, None, None],
            ms=(times / expected)[:, None],
            all_positions=expected,
        )

    def score_families(self, families: Sequence[Family]) -> Scores:
        """The same for several sizes of nested families."""
        return self.score(_trees(families))

    @cached_property
    def _known(self) -> dict[Path, float]:
        return dict(zip(self.probabilities.paths, self.probabilities.probabilities.tolist(), strict=True))


def _trees(families: Sequence[Family]) -> list[Tree]:
    return [Tree(tuple(order[:size])) for order, sizes in families for size in sizes]
