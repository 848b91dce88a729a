"""What paths that no prompt has shown could still add (Good 1953, "The population frequencies of species").

By prompt, not by position: rows of one answer repeat each other, so nodes seen once by position are too few.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from topo_search.prefixes import NO_NODE, PrefixTable
from topo_search.trace import PAST_END, RankTrace


def unseen_shares(
    trace: RankTrace, table: PrefixTable, units: Int[np.ndarray, " prompts"]
) -> Float[np.ndarray, " depths"]:
    """Per depth, the estimated share of a new prompt's rows whose node (resolved ranks only) was never seen.

    The share of rows, among those that observe the depth, whose node occurs in no other prompt. One more node at a
    depth adds at most that many tokens per step, all unseen nodes together at most the sum over depths. An estimate,
    biased upward by at most about 1 / prompts; it holds for the law over rows, not for replay.

    Args:
        trace: the prompts.
        table: their prefixes.
        units: which distinct text each prompt is.
    """
    unit_of_row = units[trace.prompt_of_row]
    by_unit = np.argsort(unit_of_row, kind="stable")
    shares = np.zeros(trace.depth)
    for depth in range(trace.depth):
        nodes, of = table.node_of_row[by_unit, depth], unit_of_row[by_unit]
        passing = nodes != NO_NODE
        nodes, of = nodes[passing], of[passing]
        last = np.zeros(len(table.depths), dtype=np.int64)
        first = last.copy()
        last[nodes] = of  # of repeated indices the last assignment stays, and units come in order
        first[nodes[::-1]] = of[::-1]
        observed = int((trace.ranks[:, depth] != PAST_END).sum())
        shares[depth] = (first == last)[nodes].sum() / max(observed, 1)
    return shares
