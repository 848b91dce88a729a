"""Head accuracies of a trace, for people: `accuracy` over all observed rows, `accuracy_given_path` on the true path.

Printed only. The search never multiplies them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from topo_search.trace import PAST_END, RankTrace

SHOWN_RANKS = (1, 2, 3, 5, 10)
_CHANCE_FACTOR = 3.0  # a head is near chance when its first ten ranks hold less than this times their chance


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthAccuracy:
    """How often the true token is among the first ranks of one head's list.

    Attributes:
        depth: 1 for the first head.
        observed: rows that observe this depth.
        accuracy: by rank count in `SHOWN_RANKS`, over all observed rows.
        on_path: observed rows whose shallower ranks are all 0.
        accuracy_given_path: the same over those; null where there are none.
    """

    depth: int
    observed: int
    accuracy: tuple[float | None, ...]
    on_path: int
    accuracy_given_path: tuple[float | None, ...]


def depth_accuracies(trace: RankTrace) -> list[DepthAccuracy]:
    """Accuracy of every head, shallow to deep."""
    found = []
    on_path = np.ones(len(trace.ranks), dtype=np.bool_)
    for depth in range(1, trace.depth + 1):
        column = trace.ranks[:, depth - 1]
        observed = column != PAST_END
        found.append(
            DepthAccuracy(
                depth=depth,
                observed=int(observed.sum()),
                accuracy=_within(column[observed]),
                on_path=int((observed & on_path).sum()),
                accuracy_given_path=_within(column[observed & on_path]),
            )
        )
        on_path &= column == 0
    return found


def near_chance_heads(trace: RankTrace, vocabulary: int) -> list[int]:
    """Depths whose head finds the true token among its first ten about as often as guessing would."""
    chance = 10 / vocabulary
    return [
        found.depth
        for found in depth_accuracies(trace)
        if found.accuracy[-1] is not None and found.accuracy[-1] < _CHANCE_FACTOR * chance
    ]


def _within(ranks: np.ndarray) -> tuple[float | None, ...]:
    if not len(ranks):
        return (None,) * len(SHOWN_RANKS)
    return tuple(float((ranks < count).mean()) for count in SHOWN_RANKS)
