"""Path probabilities: how often a step would pass each node, by an estimator chosen by name.

Every estimator is a product of conditional shares, so a child never exceeds its parent and one sort of the result is
prefix-closed at every size.
"""

from __future__ import annotations

from collections.abc import Callable

from topo_search.errors import InputError
from topo_search.estimates.backing_off import backoff, prior_strength
from topo_search.estimates.counting import joint
from topo_search.estimates.probabilities import PathProbabilities
from topo_search.estimates.rank_table import independent, rank_table_of
from topo_search.prefixes import PrefixTable

__all__ = [
    "DEFAULT_ESTIMATOR",
    "ESTIMATORS",
    "PathProbabilities",
    "backoff",
    "estimate",
    "independent",
    "joint",
    "prior_strength",
    "rank_table_of",
]

_LISTED = 4096  # nodes an independent estimate lists; every larger tree is out of reach of any device timed so far

ESTIMATORS: dict[str, Callable[[PrefixTable], PathProbabilities]] = {
    "backoff": backoff,
    "joint": joint,
    "independent": lambda table: independent(rank_table_of(table), _LISTED),
}
DEFAULT_ESTIMATOR = "backoff"


def estimate(name: str, table: PrefixTable) -> PathProbabilities:
    """Path probabilities from a trace's counts.

    Args:
        name: `backoff` (shrunken counts, the default), `joint` (plain product-limit counts) or `independent`
            (Medusa's assumption: one rank table per depth, for comparison).
        table: the trace's prefixes, counted over the rows to learn from.

    Raises:
        InputError: no such estimator; the message names the choices.
    """
    if name not in ESTIMATORS:
        raise InputError(f"There is no estimator {name!r}; choose one of {', '.join(ESTIMATORS)}.")
    return ESTIMATORS[name](table)
