"""`joint`: plain counts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from topo_search.estimates.probabilities import PathProbabilities
from topo_search.prefixes import PrefixTable


def joint(table: PrefixTable) -> PathProbabilities:
    """Product-limit counts: each node's share of the rows that reached its parent and observe its depth.

    This is the Kaplan-Meier form, which takes an answer's end as no news about acceptance. Nodes that no counted row
    passes keep their place, with probability 0.
    """
    probabilities = np.ones(len(table.depths) + 1)  # last: the root, which NO_NODE = -1 picks
    shares, starts = table.shares, table.level_starts
    for first, end in pairwise(starts):
        probabilities[first:end] = probabilities[table.parents[first:end]] * shares[first:end]
    return PathProbabilities(ranks=table.ranks, depths=table.depths, probabilities=probabilities[:-1])
