"""Shrunken counts: MATH 6."""

from __future__ import annotations

import math
from collections import Counter
from math import lgamma

import numpy as np
import pytest
from factories import repeatable, trace_of, traces
from hypothesis import given

from topo_search.estimates import PathProbabilities, backoff, joint, prior_strength
from topo_search.prefixes import PrefixTable
from topo_search.trace import PAST_END, RankTrace
from topo_search.tree import Path

STRENGTHS = np.logspace(-2, 5, 57)


def by_path(found: PathProbabilities) -> dict[Path, float]:
    return dict(zip(found.paths, found.probabilities.tolist(), strict=True))


def strength_by_hand(contexts: list[dict[int, int]], means: list[np.ndarray]) -> float:
    """The marginal likelihood as it is written down, over the same grid."""
    if max((sum(counts.values()) for counts in contexts), default=0) < 2:
        return math.inf
    likelihood = [
        sum(
            lgamma(s)
            - lgamma(s + sum(counts.values()))
            + sum(lgamma(c + s * m[r]) - lgamma(s * m[r]) for r, c in counts.items())
            for counts, m in zip(contexts, means, strict=True)
        )
        for s in STRENGTHS
    ]
    tied = np.flatnonzero(np.array(likelihood) >= max(likelihood) - 1e-9)
    return math.inf if tied[-1] == len(STRENGTHS) - 1 else float(STRENGTHS[tied[-1]])


def shrunken(counts: dict[int, int], means: np.ndarray, strength: float) -> np.ndarray:
    if math.isinf(strength):
        return means
    found = np.array([counts.get(r, 0) for r in range(len(means))])
    return (found + strength * means) / (found.sum() + strength)


def backoff_by_hand(trace: RankTrace) -> dict[Path, float]:
    """Level by level over dictionaries, every path of the resolved ranks."""
    resolved = trace.resolved_ranks
    level: dict[Path, float] = {(): 1.0}
    found: dict[Path, float] = {}
    for depth in range(1, trace.depth + 1):
        paths: dict[Path, Counter[int]] = {}
        for row in trace.ranks.tolist():
            if PAST_END not in row[:depth] and resolved not in row[: depth - 1]:
                paths.setdefault(tuple(row[: depth - 1]), Counter())[row[depth - 1]] += 1
        if not paths:
            break
        last: dict[int, Counter[int]] = {}
        for path, counts in paths.items():
            last.setdefault(path[-1] if path else 0, Counter()).update(counts)
        total = sum(paths.values(), Counter())
        base = np.array([total[r] + 1 / (resolved + 1) for r in range(resolved + 1)]) / (total.total() + 1)
        by_last = strength_by_hand([last[r] for r in last], [base] * len(last))
        after = [shrunken(last.get(r, {}), base, by_last) for r in range(resolved)]
        by_path_strength = strength_by_hand([paths[p] for p in paths], [after[p[-1]] if p else base for p in paths])
        below: dict[Path, float] = {}
        for path, probability in level.items():
            shares = base if depth == 1 else after[path[-1]]
            if depth > 2:
                shares = shrunken(paths.get(path, {}), shares, by_path_strength)
            below |= {(*path, r): probability * shares[r] for r in range(resolved)}
        found |= below
        level = below
    return found


@repeatable
@given(trace=traces(rows=12))
def test_backoff_is_the_formula_level_by_level(trace: RankTrace) -> None:
    assert by_path(backoff(PrefixTable.of(trace))) == pytest.approx(backoff_by_hand(trace), rel=1e-9)


@repeatable
@given(trace=traces(rows=12))
def test_the_shares_after_a_node_and_of_a_miss_add_up_to_one(trace: RankTrace) -> None:
    found = {(): 1.0} | by_path(backoff(PrefixTable.of(trace)))
    for path, probability in found.items():
        children = [found[(*path, rank)] for rank in range(3) if (*path, rank) in found]
        assert sum(children) < probability
        assert len(children) in (0, 3)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_shorter_list_holds_the_likeliest_nodes_of_every_depth_and_bounds_the_rest(count: int) -> None:
    rng = np.random.default_rng(3)
    table = PrefixTable.of(trace_of(rng.integers(0, 4, size=(60, 3)).tolist()))
    every, short = by_path(backoff(table)), backoff(table, count=count)
    for depth in (1, 2, 3):
        best = sorted((p for path, p in every.items() if len(path) <= depth), reverse=True)[:count]
        listed = sorted((p for path, p in by_path(short).items() if len(path) <= depth), reverse=True)[:count]
        assert listed == pytest.approx(best)
    missing = [p for path, p in every.items() if path not in by_path(short)]
    assert short.left_out == pytest.approx(max(missing))


@pytest.mark.parametrize("strength", [0.3, 3.0, 30.0])
def test_the_strength_that_made_the_contexts_is_recovered(strength: float) -> None:
    rng = np.random.default_rng(0)
    means = np.array([0.5, 0.2, 0.2, 0.1])
    sizes = rng.integers(1, 80, size=600)
    counts = np.stack([rng.multinomial(n, rng.dirichlet(strength * means)) for n in sizes])
    occurs = counts > 0
    found = prior_strength(sizes, counts[occurs], np.broadcast_to(means, counts.shape)[occurs])
    assert strength / 1.4 < found < strength * 1.4


def test_contexts_that_do_not_differ_back_off_fully() -> None:
    """MATH 6: the maximum is at infinity; the sampled counts are less spread than any prior would make them."""
    counts = np.array([[50, 30, 20]] * 40)
    means = np.broadcast_to(np.array([0.5, 0.3, 0.2]), counts.shape)
    assert prior_strength(counts.sum(axis=1), counts.ravel(), means.ravel()) == math.inf


def test_without_two_rows_in_any_context_there_is_nothing_to_compare() -> None:
    assert prior_strength(np.array([1, 1, 0]), np.array([1, 1]), np.array([0.2, 0.7])) == math.inf
    assert prior_strength(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0)) == math.inf


def test_opposite_contexts_keep_their_own_counts() -> None:
    counts = np.array([100, 100])
    assert prior_strength(counts, counts, np.array([0.5, 0.5])) < 0.5


def test_one_rank_that_always_hits_and_flat_ranks() -> None:
    always = by_path(backoff(PrefixTable.of(trace_of([[0, 0]] * 50, resolved=1))))
    assert list(always) == [(0,), (0, 0)]
    assert always[0, 0] > 0.97
    flat = by_path(backoff(PrefixTable.of(trace_of([[r, q] for r in range(4) for q in range(4)] * 9))))
    assert [flat[r, q] for r in range(3) for q in range(3)] == pytest.approx([1 / 16] * 9, rel=0.15)


def test_a_depth_that_no_row_observes_has_no_nodes() -> None:
    assert {len(path) for path in by_path(backoff(PrefixTable.of(trace_of([[0, 0]], [[1, 0]]))))} == {1}
    assert by_path(backoff(PrefixTable.of(trace_of([], depth=2)))) == {}


def test_many_positions_leave_the_counts_as_they_are() -> None:
    rng = np.random.default_rng(1)
    trace = trace_of(rng.choice(3, p=[0.6, 0.3, 0.1], size=(20_000, 2)).tolist())
    counted = by_path(joint(PrefixTable.of(trace)))
    shrunk = by_path(backoff(PrefixTable.of(trace)))
    assert {path: shrunk[path] for path in counted} == pytest.approx(counted, abs=5e-3)
