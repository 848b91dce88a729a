"""`PathProbabilities`: nodes with the probability of a step passing them, and the one order among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from topo_search.tree import Path

_SIGNIFICANT_DIGITS = 12  # ties are compared after rounding, which is monotone, so closure survives


@dataclass(frozen=True, slots=True, kw_only=True)
class PathProbabilities:
    """Nodes with their probability, every parent among them and no less likely than its children.

    Attributes:
        ranks: `[nodes, depth]`, each path padded with -1.
        depths: `[nodes]`.
        probabilities: `[nodes]`, of a row starting with the node.
        left_out: no node that is not listed has a larger probability; 0 where every possible node is listed.
    """

    ranks: Int[np.ndarray, "nodes depth"]
    depths: Int[np.ndarray, " nodes"]
    probabilities: Float[np.ndarray, " nodes"]
    left_out: float = 0.0

    @property
    def paths(self) -> list[Path]:
        """Every node's path, in the order listed."""
        pairs = zip(self.ranks.tolist(), self.depths.tolist(), strict=True)
        return [tuple(ranks[:depth]) for ranks, depth in pairs]

    def of(self, paths: Sequence[Path]) -> tuple[float, ...]:
        """The probability of each path; 0 for one that is not listed."""
        known = dict(zip(self.paths, self.probabilities.tolist(), strict=True))
        return tuple(known.get(path, 0.0) for path in paths)

    def first(self, count: int) -> PathProbabilities:
        """The `count` likeliest nodes, likeliest first; ties go to the shallower, then to the lower ranks."""
        order = best_order(self.ranks, self.depths, self.probabilities, count)
        dropped = np.delete(self.probabilities, order)
        return PathProbabilities(
            ranks=self.ranks[order],
            depths=self.depths[order],
            probabilities=self.probabilities[order],
            left_out=max(self.left_out, float(dropped.max(initial=0.0))),
        )


def best_order(
    ranks: Int[np.ndarray, "nodes depth"],
    depths: Int[np.ndarray, " nodes"],
    probabilities: Float[np.ndarray, " nodes"],
    count: int,
) -> Int[np.ndarray, " kept"]:
    """Indices of the `count` first nodes by (falling probability, depth, ranks); those of probability 0 never count."""
    nodes = np.flatnonzero(probabilities > 0)
    rounded = rounded_probabilities(probabilities[nodes])
    if 0 < count < len(nodes):  # sort only what can be among the first, ties of the last one included
        contenders = rounded >= np.partition(rounded, -count)[-count]
        nodes, rounded = nodes[contenders], rounded[contenders]
    rank_keys = tuple(ranks[nodes, column] for column in reversed(range(ranks.shape[1])))
    order: np.ndarray = nodes[np.lexsort((*rank_keys, depths[nodes], -rounded))][:count]
    return order


def rounded_probabilities(values: Float[np.ndarray, " nodes"]) -> Float[np.ndarray, " nodes"]:
    """Positive values to twelve significant digits, so that products that are equal but for rounding tie."""
    exponents = np.floor(np.log10(values))
    scale = 10.0 ** (_SIGNIFICANT_DIGITS - 1 - exponents)
    rounded: np.ndarray = np.round(values * scale) / scale
    return rounded
