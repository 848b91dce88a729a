"""Choice among heads: the whole search for each, then their answers compared on prompts that did not choose the trees.

Decoding is lossless, so heads do not change the text: the same prompts are replayed under each heads' ranks, and every
difference is paired by prompt. Rates are by each heads' own latency table, timed on the same device. Plain decoding is
the same for all of them, so heads that do not beat it are compared by the other heads' own table.

The chosen heads' figure is the best of a few held-out figures, so a little too high where heads are nearly equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from topo_search.cost import LatencyTable
from topo_search.errors import MismatchError
from topo_search.identity import differing_fields
from topo_search.search.assess import Assessment, assess, assessed_with, chosen_on_most
from topo_search.search.choose import Choice, Settings
from topo_search.search.intervals import Figure, latency_variance, ratio, resampling_weights
from topo_search.search.judge import ReplayJudge
from topo_search.search.optimize import NAMES, PLAIN
from topo_search.search.selection import certainty
from topo_search.trace import RankTrace
from topo_search.tree import Tree

_DRIFT = 0.03  # of plain decoding between two tables, from which on the device is said to have changed

Improve = Callable[[Sequence[tuple[ReplayJudge, Choice]]], Sequence[Tree]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """One heads' files.

    Attributes:
        name: of the heads, unlike the others'.
        trace: ranks on the prompts that all entrants have.
        latency: step times with these heads; null where only steps count.
    """

    name: str
    trace: RankTrace
    latency: LatencyTable | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One heads' answer beside that of the chosen heads.

    Attributes:
        name: of the heads.
        found: their own answer.
        chosen_over: how many times as fast the chosen heads' recommended alternative is as theirs, paired by prompt
            (how many times the tokens per step, where these are asked for); null for the chosen heads themselves,
            where nothing could be held out, and where both recommend plain decoding.
        sure: probability that it is faster; null likewise.
    """

    name: str
    found: Assessment
    chosen_over: Figure | None
    sure: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Among:
    """Several heads' answers in the order given, which of them to use, and what speaks against comparing them."""

    standings: tuple[Standing, ...]
    chosen: int
    warnings: tuple[str, ...]

    @property
    def best(self) -> Standing:
        """The chosen heads."""
        return self.standings[self.chosen]


def comparable(entrants: Sequence[Entrant]) -> list[Entrant]:
    """The entrants with all prompts in the order of the first one's.

    Raises:
        MismatchError: traces are of different targets, rules, answer caps or prompts; names what differs.
    """
    first = entrants[0]
    return [first, *(replace(other, trace=_in_order_of(first, other)) for other in entrants[1:])]


def differing_devices(entrants: Sequence[Entrant]) -> list[str]:
    """In what the tables' devices, modes and attention backends differ from the first one's, if in anything."""
    tables = [(entrant.name, entrant.latency) for entrant in entrants if entrant.latency is not None]
    return [f"{name}: {words}" for name, table in tables[1:] for words in _device_differences(table, tables[0][1])]


def assess_among(entrants: Sequence[Entrant], settings: Settings) -> Among:
    """Search and cross-fit for each heads, and compare what is recommended for each.

    Raises:
        MismatchError: see `comparable`.
        InputError: see `optimize`.
    """
    aligned = comparable(entrants)
    return _compared(aligned, [assess(entrant.trace, entrant.latency, settings) for entrant in aligned], settings)


def assess_among_improved(entrants: Sequence[Entrant], settings: Settings, improve: Improve) -> Among:
    """Search for each heads on all folds of prompts but one, let `improve` replace the trees, compare on that fold.

    Args:
        entrants, settings: as for `assess_among`.
        improve: from every heads' judge of the prompts to choose on and the exact choice there, a tree for each.

    Raises:
        MismatchError: see `comparable`.
        InputError: see `optimize`.
    """
    aligned = comparable(entrants)
    parts = [chosen_on_most(entrant.trace, entrant.latency, settings) for entrant in aligned]
    trees = improve([(part.chosen_on, part.choice) for part in parts])
    return _compared(
        aligned, [assessed_with(tree, part, settings) for tree, part in zip(trees, parts, strict=True)], settings
    )


def _compared(entrants: Sequence[Entrant], found: Sequence[Assessment], settings: Settings) -> Among:
    chosen = max(range(len(found)), key=lambda index: (*_worth(found[index]), -index))
    held = found[0].held
    weights = resampling_weights(1 if held is None else len(held.tokens), settings.resamples, settings.seed)
    standings = []
    for index, (entrant, own) in enumerate(zip(entrants, found, strict=True)):
        over = None
        if index != chosen:
            over = _over((entrants[chosen], found[chosen]), (entrant, own), settings, weights)
        sure = certainty(over, len(weights[0]))
        standings.append(Standing(name=entrant.name, found=own, chosen_over=over, sure=sure))
    return Among(standings=tuple(standings), chosen=chosen, warnings=tuple(_drift(standings)))


def _worth(found: Assessment) -> tuple[bool, float]:
    """Whether plain decoding is beaten, and the rate of what is recommended, held out where that is possible."""
    steps = found.result.settings.objective == "tokens-per-step"
    honest, own = found.figures(found.recommended), found.result[found.recommended]
    figure = None if honest is None else honest.tokens_per_step if steps else honest.tokens_per_s
    by_own_score = own.tokens_per_step if steps else own.tokens_per_s
    return found.recommended != PLAIN, figure.value if figure is not None else by_own_score or 0.0


def _over(
    one: tuple[Entrant, Assessment],
    other: tuple[Entrant, Assessment],
    settings: Settings,
    weights: Float[np.ndarray, "resamples units"],
) -> Figure | None:
    """How many times as fast the first one's recommended alternative is as the second one's, paired by prompt."""
    (fast, mine), (slow, theirs) = one, other
    if mine.held is None or theirs.held is None or mine.recommended == PLAIN:
        return None
    at, beside = NAMES.index(mine.recommended), NAMES.index(theirs.recommended)
    if settings.objective == "tokens-per-step":
        return ratio(theirs.held.steps[beside], mine.held.steps[at], weights)
    if theirs.recommended == PLAIN:
        return mine.over_plain
    if fast.latency is None or slow.latency is None:
        return None
    pairs = ((fast.latency, mine.held.shares[at]), (slow.latency, theirs.held.shares[beside]))
    spread = sum(latency_variance(table, shares, batches=settings.batches) for table, shares in pairs)
    return ratio(theirs.held.ms[beside], mine.held.ms[at], weights, latency_variance=spread)


def _drift(standings: Sequence[Standing]) -> list[str]:
    """A warning where plain decoding, the same for all heads, takes another time by another table."""
    plain = [(standing.found.result[PLAIN].step_ms, standing.name) for standing in standings]
    timed = sorted((ms, name) for ms, name in plain if ms is not None)
    if not timed or timed[-1][0] <= timed[0][0] * (1 + _DRIFT):
        return []
    (least, quick), (most, slow) = timed[0], timed[-1]
    return [
        f"Plain decoding takes {least:.1f} ms by the table of {quick} and {most:.1f} ms by that of {slow}, so the "
        "device was not equally fast; measure both again, one after the other, before trusting the difference."
    ]


def _device_differences(given: LatencyTable, expected: LatencyTable) -> list[str]:
    one, other = (
        {"mode": table.mode, "attention": table.attention, **{f"device {k}": v for k, v in table.device.items()}}
        for table in (given, expected)
    )
    names = dict.fromkeys([*other, *one])
    return [
        f"{name} is {one.get(name)!r}, not {other.get(name)!r}" for name in names if one.get(name) != other.get(name)
    ]


def _in_order_of(first: Entrant, other: Entrant) -> RankTrace:
    """The other's trace with its prompts in the first one's order."""
    given, expected = other.trace, first.trace
    if differing := [
        *differing_fields(given.target, expected.target),
        *differing_fields(given.rule, expected.rule),
        *_different_caps(given, expected),
    ]:
        raise _incomparable(first, other, f"{'; '.join(differing)}")
    at = {prompt.id: index for index, prompt in enumerate(given.prompts)}
    ids = {prompt.id for prompt in expected.prompts}
    if missing := [prompt.id for prompt in expected.prompts if prompt.id not in at]:
        raise _incomparable(first, other, f"prompt {missing[0]!r} ({len(missing)} in all) is missing")
    if extra := [prompt_id for prompt_id in at if prompt_id not in ids]:
        raise _incomparable(first, other, f"prompt {extra[0]!r} ({len(extra)} in all) is only there")
    for prompt in expected.prompts:
        if differs := differing_fields(given.prompts[at[prompt.id]], prompt, ignore=("workload",)):
            raise _incomparable(first, other, f"of prompt {prompt.id!r}, {'; '.join(differs)}")
    return given.in_order([at[prompt.id] for prompt in expected.prompts])


def _different_caps(given: RankTrace, expected: RankTrace) -> list[str]:
    if given.max_new_tokens == expected.max_new_tokens:
        return []
    return [f"max_new_tokens is {given.max_new_tokens}, not {expected.max_new_tokens}"]


def _incomparable(first: Entrant, other: Entrant, differs: str) -> MismatchError:
    return MismatchError(
        f"The traces of {other.name} and {first.name} cannot be compared: in that of {other.name}, {differs}. "
        "Calibrate both on the same target, prompts and rule."
    )
