"""`DecodeStats`: what a run of decode steps accepted, counted in one way everywhere.

`accepted_tokens` are drafted tokens kept by a step; `tokens_per_step` adds the target's own token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStats:
    """Accepted drafted tokens of every step of a run.

    Attributes:
        histogram: steps by accepted tokens, from 0 up.
    """

    histogram: tuple[int, ...]

    @classmethod
    def of(cls, accepted: Iterable[int]) -> DecodeStats:
        """Stats of steps that accepted the given numbers of drafted tokens."""
        counts: list[int] = []
        for length in accepted:
            counts.extend([0] * (length + 1 - len(counts)))
            counts[length] += 1
        return cls(histogram=tuple(counts))

    def __add__(self, other: DecodeStats) -> DecodeStats:
        width = max(len(self.histogram), len(other.histogram))
        mine, theirs = (h + (0,) * (width - len(h)) for h in (self.histogram, other.histogram))
        return DecodeStats(histogram=tuple(a + b for a, b in zip(mine, theirs, strict=True)))

    @property
    def steps(self) -> int:
        """Target passes, prefill aside."""
        return sum(self.histogram)

    @property
    def accepted_tokens(self) -> int:
        """Drafted tokens kept, over all steps."""
        return sum(length * count for length, count in enumerate(self.histogram))

    @property
    def tokens(self) -> int:
        """Tokens emitted by all steps: accepted ones and one of the target's own per step."""
        return self.accepted_tokens + self.steps

    @property
    def accepted_per_step(self) -> float:
        """Mean accepted drafted tokens; 0 without steps."""
        return self.accepted_tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Mean emitted tokens per target pass; 1 without steps, as plain decoding."""
        return 1.0 + self.accepted_per_step

    @property
    def accepted_spread(self) -> float:
        """Standard deviation of the accepted tokens over steps."""
        if not self.steps:
            return 0.0
        mean = self.accepted_per_step
        return math.sqrt(sum(c * (length - mean) ** 2 for length, c in enumerate(self.histogram)) / self.steps)

    def utilisation(self, num_draft_nodes: int) -> float:
        """Accepted tokens over all nodes that were drafted and verified; 0 where there were none.

        With a tree this is far below `accepted_per_step` over its depth, the figure of engines that draft chains.
        """
        drafted = num_draft_nodes * self.steps
        return self.accepted_tokens / drafted if drafted else 0.0

    def reached(self, depth: int) -> int:
        """Steps whose walk arrived at `depth`: all shallower depths were accepted."""
        return sum(self.histogram[depth - 1 :])

    def passed(self, depth: int) -> int:
        """Steps that accepted a token at `depth`."""
        return sum(self.histogram[depth:])
