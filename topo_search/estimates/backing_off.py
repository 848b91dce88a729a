"""`backoff`: counts shrunken towards what longer experience says, for traces of few positions.

A hierarchical Dirichlet-multinomial model over K + 1 outcomes per step down the path, the ranks and "beyond K":

    depth 1    counts, and one row spread evenly
    depth 2    after rank r_1, backing off to the depth's own shares
    depth 3+   after the path, backing off to (last rank, depth), backing off to the depth

share(r | context) = (c(context, r) + s m(r)) / (c(context) + s), the posterior mean under prior strength s and the
coarser level's shares m (MacKay and Peto 1995, "A hierarchical Dirichlet language model"). s maximises the marginal
likelihood, per level and depth. Counts at a depth are of rows whose shallower ranks were all resolved: others are on
no path.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from topo_search.estimates.best_children import best_children
from topo_search.estimates.probabilities import PathProbabilities
from topo_search.prefixes import NO_NODE, PrefixTable
from topo_search.special import log_gamma

_STRENGTHS = np.logspace(-2, 5, 57)  # 8 per decade; the last one stands for infinity: back off fully
_PSEUDO_ROWS = 1.0  # of a depth's own shares, spread evenly over the outcomes
_PER_DEPTH = 1024
_FLAT = 1e-12  # likelihoods this close, relatively, differ by rounding only: the larger strength is taken


def backoff(table: PrefixTable, *, count: int = _PER_DEPTH) -> PathProbabilities:
    """Shrunken path probabilities, nodes that never occurred included.

    Args:
        table: the trace's prefixes, counted over the rows to learn from.
        count: the likeliest nodes listed per depth, so that the best trees of up to so many nodes are exact under
            every cap on depth; what lies below is bounded by `left_out`.
    """
    max_depth = table.ranks.shape[1]
    level_ranks, level = np.zeros((1, 0), dtype=np.int64), np.ones(1)
    numbers = np.full(1, NO_NODE, dtype=np.int64)  # of the nodes kept, in the table; here the root
    blocks, probabilities, left_out = [], [], 0.0
    for depth in range(1, max_depth + 1):
        contexts = _Contexts.of(table, depth)
        if not contexts.sizes.any():
            break  # no row tells anything about this depth
        shares, children = _shares_below(contexts, numbers, level_ranks)
        parents, added, level, missed = best_children(level, shares[:, :-1], count)
        numbers = children[parents, added]
        level_ranks = np.concatenate([level_ranks[parents], added[:, None]], axis=1)
        blocks.append(np.pad(level_ranks, ((0, 0), (0, max_depth - depth)), constant_values=-1))
        probabilities.append(level)
        left_out = max(left_out, missed)
    depths = np.repeat(np.arange(1, len(blocks) + 1), [len(block) for block in blocks])
    return PathProbabilities(
        ranks=np.concatenate([np.zeros((0, max_depth), dtype=np.int64), *blocks]),
        depths=depths,
        probabilities=np.concatenate([np.zeros(0), *probabilities]),
        left_out=left_out,
    )


def prior_strength(
    sizes: Int[np.ndarray, " contexts"], counts: Int[np.ndarray, " pairs"], means: Float[np.ndarray, " pairs"]
) -> float:
    """The strength s of a Dirichlet prior with given means that makes the counts of several contexts likeliest.

    Scanned on a log grid, since a single maximum is not proved. The maximum may lie at either end; the upper end,
    contexts that do not differ, is returned as infinity, as it is where no context has two rows to compare.

    Args:
        sizes: rows of each context.
        counts: of each outcome that occurs in a context, at least 1; a context's counts add up to its size.
        means: the prior mean of each such outcome.
    """
    if sizes.max(initial=0) < 2:
        return np.inf
    s = _STRENGTHS[:, None]
    distinct, times = np.unique(sizes[sizes > 0], return_counts=True)
    likelihood = log_gamma(_STRENGTHS) * times.sum() - log_gamma(s + distinct) @ times
    likelihood += np.count_nonzero(counts == 1) * np.log(_STRENGTHS)  # lnG(1 + s m) - lnG(s m) = ln s + ln m
    levels, level = np.unique(means[counts > 1], return_inverse=True)  # equal pairs are evaluated once
    pairs, times = np.unique(level * (sizes.max() + 1) + counts[counts > 1], return_counts=True)
    level, count = pairs // (sizes.max() + 1), pairs % (sizes.max() + 1)
    prior = s * levels
    likelihood += log_gamma(prior[:, level] + count) @ times
    likelihood -= log_gamma(prior) @ np.bincount(level, weights=times, minlength=len(levels))
    best = np.flatnonzero(likelihood >= likelihood.max() - _FLAT * np.abs(likelihood).max())[-1]
    return np.inf if best == len(_STRENGTHS) - 1 else float(_STRENGTHS[best])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contexts:
    """The counted rows that reach one depth, by the node above: its number in the table less `first`.

    Attributes:
        table: the counts.
        depth: of the outcomes.
        first: number of the first node one depth above; the root alone, numbered -1, above depth 1.
        sizes: `[contexts]`, rows.
        last_ranks: `[contexts]`, the rank that ends each context's path; 0 for the root.
        context, rank, count: `[pairs]`, the outcomes that occur: a rank, or K for a miss.
    """

    table: PrefixTable
    depth: int
    first: int
    sizes: np.ndarray
    last_ranks: np.ndarray
    context: np.ndarray
    rank: np.ndarray
    count: np.ndarray

    @classmethod
    def of(cls, table: PrefixTable, depth: int) -> _Contexts:
        starts = table.level_starts
        first, end = (NO_NODE, 0) if depth == 1 else (int(starts[depth - 2]), int(starts[depth - 1]))
        below = slice(int(starts[depth - 1]), int(starts[depth]))
        sizes = np.array([table.observed]) if depth == 1 else table.continuing[first:end]
        context, count = table.parents[below] - first, table.starting[below]
        misses = sizes - np.bincount(context, weights=count, minlength=len(sizes)).astype(np.int64)
        pairs = (
            np.concatenate([context, np.arange(len(sizes))]),
            np.concatenate([table.ranks[below, depth - 1], np.full(len(sizes), table.resolved_ranks)]),
            np.concatenate([count, misses]),
        )
        return cls(
            table=table,
            depth=depth,
            first=first,
            sizes=sizes,
            last_ranks=np.zeros(1, dtype=np.int64) if depth == 1 else table.ranks[first:end, depth - 2],
            context=pairs[0][pairs[2] > 0],
            rank=pairs[1][pairs[2] > 0],
            count=pairs[2][pairs[2] > 0],
        )

    def depth_shares(self) -> Float[np.ndarray, " outcomes"]:
        """Shares over all contexts: counts, and a row spread evenly."""
        outcomes = self.table.resolved_ranks + 1
        counts = np.bincount(self.rank, weights=self.count, minlength=outcomes)
        shares: np.ndarray = (counts + _PSEUDO_ROWS / outcomes) / (counts.sum() + _PSEUDO_ROWS)
        return shares

    def shares_after_last_rank(self) -> Float[np.ndarray, "ranks outcomes"]:
        """Shares by the rank just passed, shrunken towards the depth's."""
        ranks, means = self.table.resolved_ranks, self.depth_shares()
        keys = self.last_ranks[self.context] * (ranks + 1) + self.rank
        counts = np.bincount(keys, weights=self.count, minlength=ranks * (ranks + 1)).reshape(ranks, ranks + 1)
        sizes = counts.sum(axis=1)
        occurs = counts > 0
        tiled = np.broadcast_to(means, counts.shape)
        strength = prior_strength(sizes.astype(np.int64), counts[occurs].astype(np.int64), tiled[occurs])
        return _shrunken(counts, sizes, tiled, strength)


def _shares_below(
    contexts: _Contexts, numbers: Int[np.ndarray, " kept"], level_ranks: Int[np.ndarray, "kept above"]
) -> tuple[Float[np.ndarray, "kept outcomes"], Int[np.ndarray, "kept ranks"]]:
    """Shares of every outcome after each kept node, and the numbers of its children, -1 where they never occur."""
    table = contexts.table
    ranks = table.resolved_ranks
    place = np.full(len(contexts.sizes), NO_NODE, dtype=np.int64)  # of a context among the nodes kept
    known = np.flatnonzero(numbers != NO_NODE) if contexts.depth > 1 else np.arange(1)
    place[numbers[known] - contexts.first] = known
    below = np.arange(*table.level_starts[contexts.depth - 1 : contexts.depth + 1])
    parent = place[table.parents[below] - contexts.first]
    children = np.full((len(numbers), ranks), NO_NODE, dtype=np.int64)
    children[parent[parent >= 0], table.ranks[below, contexts.depth - 1][parent >= 0]] = below[parent >= 0]
    if contexts.depth == 1:
        return contexts.depth_shares()[None, :], children
    by_last = contexts.shares_after_last_rank()
    means = by_last[level_ranks[:, -1]]
    if contexts.depth == 2:  # the path is the last rank
        return means, children
    tiled = by_last[contexts.last_ranks[contexts.context], contexts.rank]
    strength = prior_strength(contexts.sizes, contexts.count, tiled)
    counts, sizes = np.zeros((len(numbers), ranks + 1)), np.zeros(len(numbers))
    at = place[contexts.context]
    counts[at[at >= 0], contexts.rank[at >= 0]] = contexts.count[at >= 0]
    sizes[known] = contexts.sizes[numbers[known] - contexts.first]
    return _shrunken(counts, sizes, means, strength), children


def _shrunken(
    counts: Float[np.ndarray, "contexts outcomes"],
    sizes: Float[np.ndarray, " contexts"],
    means: Float[np.ndarray, "contexts outcomes"],
    strength: float,
) -> Float[np.ndarray, "contexts outcomes"]:
    if np.isinf(strength):
        return means
    shares: np.ndarray = (counts + strength * means) / (sizes + strength)[:, None]
    return shares
