"""`Fastest`: what a ratio solver returns."""

from __future__ import annotations

import math
from dataclasses import dataclass

from topo_search.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """A tree, what it is expected to emit and what its step costs.

    Attributes:
        tree: empty where plain decoding is fastest.
        tokens_per_step: expected, 1 + the sum of its path probabilities.
        step_ms: its true step time, at its own depth.
        tokens_at_most_lost: what nodes that the estimate does not list could still add to a tree of the same width;
            0 where the tree is the exact optimum.
    """

    tree: Tree
    tokens_per_step: float
    step_ms: float
    tokens_at_most_lost: float

    @property
    def tokens_per_s(self) -> float:
        """Expected tokens per second."""
        return 1000.0 * self.tokens_per_step / self.step_ms


RISES = 1 + 1e-12  # Dinkelbach ends when the ratio rises by less than this factor


def plain(step_ms: float) -> Fastest:
    """Plain decoding: one token per step and no draft."""
    return Fastest(tree=Tree(()), tokens_per_step=1.0, step_ms=step_ms, tokens_at_most_lost=0.0)


def expected_tokens(probabilities: list[float]) -> float:
    """1 + the sum, free of rounding in the sum."""
    return math.fsum([1.0, *probabilities])
