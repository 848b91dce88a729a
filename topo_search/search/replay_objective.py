"""The computed objective of a study: replay over the latency table, as the exact search judges its own trees."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from topo_search.search.choose import Settings, merit
from topo_search.search.judge import Judge
from topo_search.search.study import Report
from topo_search.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayObjective:
    """Tokens per second (tokens per step, where that is asked for) on the judge's prompts."""

    judge: Judge
    settings: Settings

    def __call__(self, tree: Tree, report: Report) -> float:
        """The value of a tree; one look-up, so there is nothing to stop."""
        del report
        return self._scale * float(merit(self.judge.score([tree]), self.settings)[0])

    def ceiling(self, tree: Tree) -> float | None:
        """A step emits at most depth + 1 tokens, whatever the prompts."""
        if self.settings.objective == "tokens-per-step":
            return tree.depth + 1.0
        fastest_ms = float(np.min(self.judge.times.tree_ms(tree)))
        return self._scale * (tree.depth + 1) / fastest_ms if fastest_ms > 0 else None

    @property
    def _scale(self) -> float:
        return 1.0 if self.settings.objective == "tokens-per-step" else 1000.0 * self.settings.sequences
