"""The tree to serve under typical acceptance, from accept masks: a heuristic search, with figures on other prompts.

The figures say what subtrees would have emitted at the steps of the tree that recorded the masks. With the tree itself
the text is another one, so they are an approximation: decode with it for its true figure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int

from topo_search.accepts import AcceptTrace
from topo_search.cost import LatencyTable
from topo_search.errors import InputError
from topo_search.search.choose import Settings, allowed_widths
from topo_search.search.coverage import Coverage, covering_trees, exchanged
from topo_search.search.intervals import (
    Cell,
    Figure,
    latency_variance,
    ratio,
    resampling_weights,
    time_shares,
)
from topo_search.search.optimize import CHAIN, NAMES, PLAIN, TREE
from topo_search.search.selection import fold_of_prompts, text_units
from topo_search.search.times import StepTimes
from topo_search.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class TypicalFigures:
    """One alternative, by masks: its own score, and that on prompts that did not choose it.

    Attributes:
        name: `plain`, `best chain` or `best tree`.
        tree: empty for plain decoding.
        tokens_per_step_own: on the prompts that chose it, usually too high.
        tokens_per_step, tokens_per_s, speedup: cross-fitted, with intervals; null where nothing could be held out, the
            last two also without a latency table.
        step_ms: mean over the recorded steps; null without a table.
    """

    name: str
    tree: Tree
    tokens_per_step_own: float
    tokens_per_step: Figure | None
    tokens_per_s: Figure | None
    speedup: Figure | None
    step_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TypicalAssessment:
    """The three alternatives and which one to take; every text but plain decoding's is a changed one."""

    alternatives: tuple[TypicalFigures, ...]
    recommended: str
    prompts: int
    steps: int

    def __getitem__(self, name: str) -> TypicalFigures:
        """The alternative of that name."""
        return self.alternatives[NAMES.index(name)]


def assess_typical(masks: AcceptTrace, latency: LatencyTable | None, settings: Settings) -> TypicalAssessment:
    """Search on all prompts, and cross-fit the search to say what it brings on others.

    Args:
        masks: of the prompts to serve, with at least one step.
        latency: measured step times; needed unless the objective is `tokens-per-step`.
        settings: the question; rule, pick, refinement and estimator play no part.

    Raises:
        InputError: there is no step, or no time is at hand.
    """
    if not len(masks.prompt_of_step):
        raise InputError("The accept masks have no step: every answer is one token long. Record other prompts.")
    trees = chosen_typical(masks, latency, settings)
    held = _held_out(masks, latency, settings)
    weights = resampling_weights(max(len(held.steps), 1), settings.resamples, settings.seed)
    alternatives = tuple(
        _figures(index, tree, masks, latency, settings, held, weights) for index, tree in enumerate(trees)
    )
    return TypicalAssessment(
        alternatives=alternatives,
        recommended=_recommended(alternatives, settings),
        prompts=len(masks.prompts),
        steps=len(masks.prompt_of_step),
    )


def chosen_typical(masks: AcceptTrace, latency: LatencyTable | None, settings: Settings) -> tuple[Tree, Tree, Tree]:
    """Plain decoding, the best chain and the best tree of these prompts: paths by coverage at every size, then swaps.

    Raises:
        InputError: no time is at hand.
    """
    score = _Score.of(masks, latency, settings)
    widths = allowed_widths(score, settings)
    depth = min(settings.max_depth or masks.tree.depth, masks.tree.depth)
    lengths = [n for n in range(1, depth + 1) if n + 1 in widths and (0,) * n in masks.tree.slots]
    chain = max((Tree.chain(n) for n in lengths), key=score.merit, default=Tree(()))
    found: dict[Tree, None] = {}
    caps = range(depth, 0, -1) if settings.objective == "throughput" else [depth]
    for cap in caps:
        coverage = Coverage.of(masks, max_depth=cap, max_rank=settings.max_rank)
        sizes = {width - 1 for width in widths if 1 < width <= masks.tree.verify_width}
        candidates = covering_trees(coverage, sizes).values() if sizes else ()
        found |= {tree: None for tree in candidates if tree.paths and tree.verify_width in widths}
    best = max(found, key=score.merit, default=Tree(()))
    if best.paths:
        swapped = exchanged(Coverage.of(masks, max_depth=best.depth, max_rank=settings.max_rank), best)
        best = max((best, swapped), key=score.merit)
    return Tree(()), chain, best


@dataclass(frozen=True, slots=True, kw_only=True)
class _Score:
    """Scores subtrees on one set of prompts."""

    masks: AcceptTrace
    latency: LatencyTable | None
    times: StepTimes
    context_of_step: Int[np.ndarray, " steps"]
    settings: Settings

    @classmethod
    def of(cls, masks: AcceptTrace, latency: LatencyTable | None, settings: Settings) -> _Score:
        times = StepTimes.of(latency, settings.batches)
        steps = len(masks.prompt_of_step)
        nearest = np.zeros(steps, dtype=np.int64)
        if latency is not None and times.verify_ms:
            nearest = latency.nearest_context(masks.contexts, batches=[batch for batch, _ in settings.batches])
        return cls(masks=masks, latency=latency, times=times, context_of_step=nearest, settings=settings)

    def merit(self, tree: Tree) -> float:
        """Tokens per step, or per millisecond; a tree without a time is worth nothing."""
        emitted = float(self.masks.emitted(tree).sum())
        if self.settings.objective == "tokens-per-step":
            return emitted
        return float(np.nan_to_num(emitted / self.step_ms(tree).sum()))

    def step_ms(self, tree: Tree) -> Float[np.ndarray, " steps"]:
        """Time of every recorded step with this tree."""
        times: np.ndarray = self.times.tree_ms(tree)[self.context_of_step]
        return times


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Sums per distinct prompt text, over trees chosen without it: `[alternatives, units]`, steps `[units]`."""

    steps: Float[np.ndarray, " units"]
    emitted: Float[np.ndarray, "alternatives units"]
    ms: Float[np.ndarray, "alternatives units"]
    shares: tuple[dict[Cell, float], ...] = field(default=({}, {}, {}))


def _held_out(masks: AcceptTrace, latency: LatencyTable | None, settings: Settings) -> _Held:
    units = text_units(masks.prompts)
    fold = fold_of_prompts(masks.prompts, settings.folds, settings.seed)
    count = int(units.max(initial=-1)) + 1
    steps, emitted, ms = np.zeros(count), np.zeros((3, count)), np.zeros((3, count))
    shares: tuple[dict[Cell, float], ...] = ({}, {}, {})
    for number in range(int(fold.max(initial=0)) + 1):
        ids = {prompt.id for prompt, of in zip(masks.prompts, fold, strict=True) if of == number}
        others = masks.select(lambda prompt, ids=ids: prompt.id not in ids)  # type: ignore[misc]
        left_out = masks.select(lambda prompt, ids=ids: prompt.id in ids)  # type: ignore[misc]
        if not len(others.prompt_of_step) or not len(left_out.prompt_of_step):
            continue
        score = _Score.of(left_out, latency, settings)
        unit = units[fold == number][left_out.prompt_of_step]
        steps += np.bincount(unit, minlength=count)
        for index, tree in enumerate(chosen_typical(others, latency, settings)):
            emitted[index] += np.bincount(unit, weights=left_out.emitted(tree), minlength=count)
            times = score.step_ms(tree)
            ms[index] += np.bincount(unit, weights=times, minlength=count)
            at = np.bincount(score.context_of_step, minlength=len(score.times.contexts)).astype(np.float64)
            if np.isfinite(times).all():
                _add(shares[index], time_shares(tree, at, 1.0, score.times))
    scored = steps > 0
    return _Held(steps=steps[scored], emitted=emitted[:, scored], ms=ms[:, scored], shares=shares)


def _add(into: dict[Cell, float], more: Mapping[Cell, float]) -> None:
    into.update({cell: into.get(cell, 0.0) + count for cell, count in more.items()})


def _figures(
    index: int,
    tree: Tree,
    masks: AcceptTrace,
    latency: LatencyTable | None,
    settings: Settings,
    held: _Held,
    weights: Float[np.ndarray, "resamples units"],
) -> TypicalFigures:
    own = masks.tokens_per_step(tree)
    times = _Score.of(masks, latency, settings).step_ms(tree)
    step_ms = float(times.mean()) if np.isfinite(times).all() else None
    emitted, ms, plain_ms = held.emitted[index], held.ms[index], held.ms[0]
    per_step = ratio(emitted, held.steps, weights) if len(held.steps) else None
    rate = speedup = None
    if per_step is not None and latency is not None and np.isfinite([ms, plain_ms]).all():
        shares = {cell: steps / ms.sum() for cell, steps in held.shares[index].items()}
        plain = {cell: steps / plain_ms.sum() for cell, steps in held.shares[0].items()}
        spread = latency_variance(latency, shares, batches=settings.batches)
        rate = ratio(1000.0 * settings.sequences * emitted, ms, weights, latency_variance=spread)
        against = latency_variance(latency, shares, plain, batches=settings.batches)
        # Plain decoding would take its own step time for each of the tokens.
        speedup = ratio(emitted * plain_ms / held.steps, ms, weights, latency_variance=against)
    return TypicalFigures(
        name=NAMES[index],
        tree=tree,
        tokens_per_step_own=own,
        tokens_per_step=per_step,
        tokens_per_s=rate,
        speedup=speedup,
        step_ms=step_ms,
    )


def _recommended(alternatives: tuple[TypicalFigures, ...], settings: Settings) -> str:
    """The fastest on prompts that did not choose it, of equals the simpler; the tree to fill a budget."""
    if settings.objective == "tokens-per-step":
        return TREE
    best = PLAIN
    rates = {found.name: found.tokens_per_s.value if found.tokens_per_s else 0.0 for found in alternatives}
    for name in (CHAIN, TREE):
        if rates[name] > rates[best]:
            best = name
    return best
