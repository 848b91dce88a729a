"""One level of a best-first expansion: the likeliest children of the nodes above."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from topo_search.estimates.probabilities import rounded_probabilities

_TIED = 1 - 1e-10  # looser than the rounding by which ties are told


def best_children(
    above: Float[np.ndarray, " parents"], shares: Float[np.ndarray, "parents ranks"], count: int
) -> tuple[Int[np.ndarray, " children"], Int[np.ndarray, " children"], Float[np.ndarray, " children"], float]:
    """The `count` likeliest nodes of one depth, ties to the lower path.

    A node among the `count` likeliest of a tree has its ancestors among them too, since no child exceeds its parent
    and a tie goes to the shallower. So level by level nothing is lost, whatever the depth at which a search stops.

    Args:
        above: probabilities of the nodes kept one depth above, in order of their paths.
        shares: conditional share of each of their ranks, at most 1.
        count: nodes wanted; fewer where fewer have a positive probability.

    Returns:
        Parent (index into `above`), rank and probability of each child, in order of their paths, and the largest
        probability left out at this depth.
    """
    products = (above[:, None] * shares).ravel()
    kept = np.flatnonzero(products > 0)
    if 0 < count < len(kept):
        least = np.partition(products[kept], -count)[-count]
        kept = kept[products[kept] >= least * _TIED]
        order = np.argsort(-rounded_probabilities(products[kept]), kind="stable")
        kept = np.sort(kept[order[:count]])
    kept = kept[:count]
    left_out = float(np.delete(products, kept).max(initial=0.0))
    return kept // shares.shape[1], kept % shares.shape[1], products[kept], left_out
