"""Choose a tree from one set of prompts: every candidate size, then the smallest that is as good as the best.

This is the whole of what chooses: estimates, sizes, depth caps, refinement and the one-standard-error rule. Honest
figures come from running it on some prompts and scoring on others (`selection`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Float

from topo_search.cost import Batches, LatencyTable
from topo_search.errors import InputError
from topo_search.estimates import PathProbabilities
from topo_search.search.frontier import Frontier, allowed, frontier
from topo_search.search.intervals import Cell, latency_variance, paired_log_se, time_shares
from topo_search.search.judge import Family, Judge, Scores, Timed
from topo_search.search.ratio import fastest
from topo_search.search.rules import best_trees
from topo_search.tree import Tree

Objective = Literal["throughput", "tokens-per-step"]
Pick = Literal["one-se", "best"]
Refine = Literal["none", "recount", "swaps"]
Rule = Literal["any", "contiguous", "expanded-first", "uniform"]

_SHORTLIST = 0.9  # of the best counted speed: what a shortlist replays


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to search for and how.

    Attributes:
        budget: the most tokens verified per step, root included, at least 1.
        objective: `throughput` picks the fastest, `tokens-per-step` fills the budget.
        estimator: path probabilities: `joint`, `backoff` or `independent`.
        pick: `one-se` takes the smallest tree within one standard error of the difference to the best, `best` the
            best; `tokens-per-step` always takes the best.
        rule: what the engine that will load the tree demands: `any`, `contiguous`, `expanded-first` or `uniform`, see
            `rules.best_trees`.
        refine: after the sort, `recount` at the tree's own step starts, or recount and `swaps` of single nodes; both
            keep the size and are judged by replay.
        max_depth, max_rank: leave out deeper nodes and higher ranks (0 = most likely).
        batch: sequences that one step serves, where `batch_weights` do not say.
        batch_weights: (batch, weight) pairs: the share of the tokens that is decoded with so many sequences in flight.
            A sequence's token then costs the weighted mean over batches of step time / batch. Null: `batch` alone.
        context_weights: (measured context, weight) pairs; a step then costs the weighted mean of its times there,
            wherever it starts. Null: each step costs its time at the measured context nearest to its own.
        folds: parts that the prompts are split into for cross-fitting, at least 2.
        resamples: of the prompts, for intervals.
        seed: of folds and resamples.

    Raises:
        InputError: a number is out of range.
    """

    budget: int
    objective: Objective = "throughput"
    estimator: str = "backoff"
    pick: Pick = "one-se"
    rule: Rule = "any"
    refine: Refine = "none"
    max_depth: int | None = None
    max_rank: int | None = None
    batch: int = 1
    batch_weights: tuple[tuple[int, float], ...] | None = None
    context_weights: tuple[tuple[int, float], ...] | None = None
    folds: int = 5
    resamples: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise InputError(
                f"The budget is {self.budget}; it counts tokens verified per step, root included, so at least 1."
            )
        least = {"max_depth": 1, "max_rank": 0, "batch": 1, "folds": 2, "resamples": 2, "seed": 0}
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise InputError(f"{name.replace('_', ' ')} is {value}; it must be at least {minimum}.")
        _require_weights("context", self.context_weights)
        _require_weights("batch", self.batch_weights)
        if any(batch < 1 for batch, _ in self.batch_weights or ()):
            raise InputError("A batch weight is given to a batch below 1; a step serves at least one sequence.")
        if self.batch_weights is not None and self.batch != 1:
            raise InputError(
                f"Batch {self.batch} and batch weights are both given; put all weight on it, or leave it out."
            )
        if self.refine != "none" and (self.max_rank is not None or self.rule != "any"):
            raise InputError("Refinement knows no largest rank and no engine's rule; leave out --refine, or those.")

    @property
    def batches(self) -> Batches:
        """The batches served, ascending, with their shares of the steps.

        A step at batch b serves b sequences, so a share w of the tokens takes w / b of the steps.
        """
        if self.batch_weights is None:
            return ((self.batch, 1.0),)
        steps = {batch: weight / batch for batch, weight in sorted(self.batch_weights) if weight}
        return tuple((batch, count / math.fsum(steps.values())) for batch, count in steps.items())

    @property
    def sequences(self) -> float:
        """Sequences that a step serves in the mean over steps."""
        return math.fsum(batch * share for batch, share in self.batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Plain decoding, best chain and best tree of one set of prompts, and the best tree of every size tried.

    Attributes:
        alternatives: scores of those three, in that order.
        sizes: scores of the best tree of every size, ascending.
        estimate: the path probabilities that the trees were sorted by.
    """

    alternatives: Scores
    sizes: Scores
    estimate: PathProbabilities

    @property
    def trees(self) -> tuple[Tree, Tree, Tree]:
        """Plain decoding, best chain, best tree."""
        plain, chain, tree = self.alternatives.trees
        return plain, chain, tree


def choose(judge: Judge, settings: Settings, *, shortlist: bool = False) -> Choice:
    """Choose on the judge's prompts.

    Args:
        judge: scores trees.
        settings: the question.
        shortlist: replay only sizes whose counted speed is within a tenth of the best one's, where replaying every
            size on every fold would take too long.

    Raises:
        InputError: no time for plain decoding is at hand.
    """
    widths = allowed_widths(judge, settings)
    depth = min(settings.max_depth or judge.depth, judge.depth)
    estimate = judge.estimate(settings.estimator)
    lengths = [n for n in range(depth + 1) if n == 0 or n + 1 in widths]
    families = _families(judge, estimate, widths, depth, settings, shortlist=shortlist)
    walked = judge.score_families([(Tree.chain(depth).paths, lengths), *families])
    chains, sorted_trees = walked.take(range(len(lengths))), walked.take(range(len(lengths), len(walked.trees)))
    scored = [sorted_trees] if sorted_trees.trees else []
    if max(widths) > 1:
        scored += _scored_by_rule(judge, estimate, widths, depth, settings)
        scored += _by_ratio(judge, estimate, max(widths) - 1, depth, settings)
    sizes = _best_of_each_size(joined(scored), settings) if scored else chains.take([0])
    chain = 0 if len(chains.trees) == 1 else 1 + int(np.argmax(merit(chains, settings)[1:]))
    picked = _refined(judge, sizes.take([_picked(judge, sizes, settings)]), settings)
    return Choice(alternatives=joined([chains.take([0, chain]), picked]), sizes=sizes, estimate=estimate)


def allowed_widths(judge: Timed, settings: Settings) -> set[int]:
    """Verify widths within the budget that may win: measured ones, for throughput.

    Raises:
        InputError: throughput is asked for without a table, or the table lacks the batch or plain decoding.
    """
    widths = set(range(1, settings.budget + 1))
    if settings.objective == "tokens-per-step":
        return widths
    if judge.latency is None:
        raise InputError(
            "No latency table: run topo-search measure on the device that will serve and pass --latency FILE, or pass "
            "--objective tokens-per-step, which needs none."
        )
    _require_batches(judge.latency, settings)
    widths &= set(judge.times.verify_ms)
    if 1 not in widths:
        raise InputError("The latency table has no time for width 1, plain decoding; run topo-search measure again.")
    return widths


def _require_weights(what: str, given: tuple[tuple[int, float], ...] | None) -> None:
    weights = [1.0] if given is None else [weight for _, weight in given]
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not sum(weights) > 0:
        raise InputError(
            f"The {what} weights are {', '.join(f'{weight:g}' for weight in weights)}; they must be finite, none "
            "negative, and not all 0."
        )


def _require_batches(latency: LatencyTable, settings: Settings) -> None:
    measured = sorted({batch for batch, _, _ in latency.verify})
    wanted = [batch for batch, _ in settings.batches]
    option = "--batch" if settings.batch_weights is None else "--batch-weights"
    if unknown := [batch for batch in wanted if batch not in measured]:
        raise InputError(
            f"The latency table has no time at batch {unknown[0]}, only at {', '.join(map(str, measured))}; give "
            f"{option} one of these, or a table that was timed at yours."
        )
    if not latency.contexts(*wanted):
        raise InputError(
            f"The latency table has no context that was timed at each of batches {', '.join(map(str, wanted))}; run "
            "topo-search measure with all of them in --batches."
        )


def merit(scores: Scores, settings: Settings) -> Float[np.ndarray, " trees"]:
    """What the objective makes best, per tree; a tree without a time is worth nothing for throughput."""
    rate = scores.tokens_per_step if settings.objective == "tokens-per-step" else scores.tokens_per_ms
    worth: np.ndarray = np.nan_to_num(rate, nan=0.0)
    return worth


def joined(parts: Iterable[Scores]) -> Scores:
    """The scores of several lists of trees on the same prompts as one."""
    found = list(parts)
    return Scores(
        trees=tuple(tree for part in found for tree in part.trees),
        tokens=found[0].tokens,
        counts=np.concatenate([part.counts for part in found]),
        ms=np.concatenate([part.ms for part in found]),
        all_positions=np.concatenate([part.all_positions for part in found]),
    )


def _families(
    judge: Judge,
    estimate: PathProbabilities,
    widths: set[int],
    depth: int,
    settings: Settings,
    *,
    shortlist: bool,
) -> list[Family]:
    """The nested family of every depth cap, at every allowed size; none under an engine's rule."""
    if settings.rule != "any" or max(widths) == 1:
        return []
    ranks, largest = _ranks(settings, depth), max(widths) - 1
    families = [
        frontier(estimate, num_draft_nodes=largest, max_depth=cap, ranks_per_depth=ranks)
        for cap in _depth_caps(depth, settings)
    ]
    wanted = [_sizes(family, widths, families[:index]) for index, family in enumerate(families)]
    if shortlist:
        wanted = _shortlisted(judge, families, wanted, settings)
    return [(family.order, sizes) for family, sizes in zip(families, wanted, strict=True) if sizes]


def _scored_by_rule(
    judge: Judge,
    estimate: PathProbabilities,
    widths: set[int],
    depth: int,
    settings: Settings,
) -> list[Scores]:
    """The best trees that the target engine takes, which are not nested; all are replayed, there are few."""
    if settings.rule == "any":
        return []
    ranks, largest = _ranks(settings, depth), max(widths) - 1
    found: dict[Tree, None] = {}
    for cap in _depth_caps(depth, settings):
        family = best_trees(estimate, num_draft_nodes=largest, rule=settings.rule, max_depth=cap, ranks_per_depth=ranks)
        found |= dict.fromkeys(family.tree(width - 1) for width in sorted(widths))
    trees = [tree for tree in found if tree.paths and tree.verify_width in widths]
    return [judge.score(trees)] if trees else []


def _depth_caps(depth: int, settings: Settings) -> range:
    """The deepest first: a shallower tree drafts for less, which only throughput minds."""
    shallowest = depth if settings.objective == "tokens-per-step" else 1
    return range(depth, shallowest - 1, -1)


def _by_ratio(judge: Judge, estimate: PathProbabilities, largest: int, depth: int, settings: Settings) -> list[Scores]:
    """The ratio solver's tree, where heads pay per expanded node and the sort is not exact."""
    if not judge.times.draft.by_expanded or settings.objective == "tokens-per-step" or settings.rule != "any":
        return []
    kept = allowed(estimate, max_depth=depth, ranks_per_depth=_ranks(settings, depth))
    within = replace(
        estimate, ranks=estimate.ranks[kept], depths=estimate.depths[kept], probabilities=estimate.probabilities[kept]
    )
    costs = judge.times.costs(judge.context_weights, depth)
    tree = fastest(within, costs, num_draft_nodes=largest).tree
    return [judge.score([tree])] if tree.paths else []


def _ranks(settings: Settings, depth: int) -> list[int] | None:
    return None if settings.max_rank is None else [settings.max_rank + 1] * depth


def _sizes(family: Frontier, widths: set[int], deeper: list[Frontier]) -> list[int]:
    """Sizes of a family at which it differs from every deeper cap's: where it is equal, it is the same tree."""
    same = 0
    for other in deeper:
        pairs = zip(family.order, other.order, strict=False)
        same = max(
            same, next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(family.order), len(other.order)))
        )
    return [width - 1 for width in sorted(widths) if same < width - 1 <= len(family.order)]


def _shortlisted(
    judge: Judge, families: list[Frontier], wanted: list[list[int]], settings: Settings
) -> list[list[int]]:
    """The sizes whose counted speed comes within `_SHORTLIST` of the best; the largest size for tokens per step."""
    if settings.objective == "tokens-per-step":
        largest = max((size for sizes in wanted for size in sizes), default=0)
        return [[size for size in sizes if size == largest] for sizes in wanted]
    speeds = []
    for family, sizes in zip(families, wanted, strict=True):
        expected = family.expected_tokens()
        typical = judge.times.family_ms(family.order, sizes) @ judge.context_weights
        speeds.append(np.nan_to_num(expected[sizes] / typical).tolist())
    bar = _SHORTLIST * max((speed for rates in speeds for speed in rates), default=0.0)
    return [
        [size for size, speed in zip(sizes, rates, strict=True) if speed >= bar]
        for sizes, rates in zip(wanted, speeds, strict=True)
    ]


def _best_of_each_size(scores: Scores, settings: Settings) -> Scores:
    """Per size the tree of greatest merit; of equals the one of more tokens per step, then of the deeper cap."""
    worth, per_step = merit(scores, settings), scores.tokens_per_step
    best: dict[int, int] = {}
    for index, tree in enumerate(scores.trees):
        size = tree.num_draft_nodes
        if size not in best or (worth[index], per_step[index]) > (worth[best[size]], per_step[best[size]]):
            best[size] = index
    return scores.take([best[size] for size in sorted(best)])


def _picked(judge: Judge, sizes: Scores, settings: Settings) -> int:
    """The best size, or the smallest within one standard error of the paired difference to it."""
    if settings.objective == "tokens-per-step":
        return len(sizes.trees) - 1
    worth = merit(sizes, settings)
    best = int(np.argmax(worth))
    if settings.pick == "best" or len(sizes.tokens) < 2 or judge.latency is None or not worth[best] > 0:
        return best
    from_prompts = paired_log_se(sizes.ms[best], sizes.ms)
    shares = [_shares(judge, sizes, index) for index in range(best + 1)]
    for index in range(best):
        if not worth[index] > 0:
            continue
        spread = latency_variance(judge.latency, shares[best], shares[index], batches=settings.batches)
        if np.log(worth[best] / worth[index]) <= np.sqrt(from_prompts[index] ** 2 + spread):
            return index
    return best


def _refined(judge: Judge, picked: Scores, settings: Settings) -> Scores:
    """The picked tree, or a refined one of its size where that is better by the objective."""
    if settings.refine == "none" or not picked.trees[0].paths:
        return picked
    tree = judge.refined(picked.trees[0], settings.estimator, swaps=settings.refine == "swaps")
    both = joined([picked, judge.score([tree])])
    return both.take([int(np.argmax(merit(both, settings)))])


def _shares(judge: Judge, sizes: Scores, index: int) -> dict[Cell, float]:
    total_ms = float(sizes.ms[index].sum())
    steps = sizes.counts[index].sum(axis=0)
    return time_shares(sizes.trees[index], steps, total_ms, judge.times) if total_ms > 0 else {}
