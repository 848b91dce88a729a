from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from factories import repeatable, trace_of, traces
from hypothesis import given
from hypothesis import strategies as st

from topo_search.prefixes import NO_NODE, PrefixTable
from topo_search.trace import RankTrace
from topo_search.tree import canonical_key


def test_what_lies_behind_the_first_miss_is_not_reached() -> None:
    """FIELD-CASES 19: match vector 1, 0, 1, 0 is length 1; depth 2 reached and failed, depths 3 and 4 not reached."""
    rows = [(0, 3, 0, 3), (0, 0, 0, 0)]
    trace = trace_of(*[[row, *[[3, 3, 3, 3]] * 3] for row in rows])
    table = PrefixTable.of(trace, rows=np.array([0, 4]))
    counts = {path: (int(table.starting[n]), int(table.reached[n])) for path, n in table.numbers.items()}
    assert counts == {(0,): (2, 2), (0, 0): (1, 2), (0, 0, 0): (1, 1), (0, 0, 0, 0): (1, 1)}
    assert table.node_of_row.tolist() == [[0, NO_NODE, NO_NODE, NO_NODE], [0, 1, 2, 3]]


def test_an_unobserved_depth_is_no_failure() -> None:
    table = PrefixTable.of(trace_of([[0, 0], [0, 0]]))
    assert table.starting[table.numbers[0, 0]] == table.reached[table.numbers[0, 0]] == 1
    assert table.reached[table.numbers[(0,)]] == 2


def test_a_trace_without_rows_has_no_nodes() -> None:
    table = PrefixTable.of(trace_of([], depth=2))
    assert (table.numbers, table.shares.tolist()) == ({}, [])


@repeatable
@given(trace=traces())
def test_nodes_and_counts_agree_with_counting_prefixes(trace: RankTrace) -> None:
    table, rows = PrefixTable.of(trace), [tuple(row) for row in trace.ranks.tolist()]
    spelled = [[row[:d] for d in range(1, 4) if all(0 <= r < 3 for r in row[:d])] for row in rows]
    starting = Counter(path for paths in spelled for path in paths)
    assert list(table.numbers) == sorted(starting, key=canonical_key)
    for path, node in table.numbers.items():
        siblings = [row for row in rows if row[: len(path) - 1] == path[:-1] and row[len(path) - 1] != -1]
        assert table.ranks[node].tolist() == [*path, *[-1] * (3 - len(path))]
        assert (table.depths[node], table.parents[node]) == (len(path), table.numbers.get(path[:-1], -1))
        assert (table.starting[node], table.reached[node]) == (starting[path], len(siblings))
    found = [[table.numbers[path] for path in paths] + [NO_NODE] * (3 - len(paths)) for paths in spelled]
    assert table.node_of_row.tolist() == found


@repeatable
@given(trace=traces(), data=st.data())
def test_counting_some_rows_is_numbering_them_alone(trace: RankTrace, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(trace.ranks) - 1), unique=True)) if len(trace.ranks) else []
    rows = np.array(sorted(chosen), dtype=np.int64)
    counted, alone = PrefixTable.of(trace).counted(rows), PrefixTable.of(trace, rows=rows)
    for path, node in counted.numbers.items():
        there = alone.numbers.get(path)
        found = (counted.starting[node], counted.continuing[node], counted.shares[node])
        expected = (
            (0, 0, 0.0) if there is None else (alone.starting[there], alone.continuing[there], alone.shares[there])
        )
        assert found == expected
    assert counted.observed == alone.observed
    assert np.array_equal(counted.rank_counts, alone.rank_counts)


@repeatable
@given(trace=traces(), paths=st.lists(st.lists(st.integers(0, 4), max_size=4).map(tuple), max_size=8))
def test_finding_paths_is_looking_them_up(trace: RankTrace, paths: list[tuple[int, ...]]) -> None:
    table = PrefixTable.of(trace)
    assert table.find(paths).tolist() == [table.numbers.get(path, NO_NODE) for path in paths]


@pytest.mark.parametrize("resolved", [3, 1000])
def test_few_ranks_and_many_are_numbered_alike(resolved: int) -> None:
    """Sparse keys are sorted, dense ones marked."""
    trace = trace_of([[2, 0], [0, 2], [2, 0]], resolved=resolved)
    assert list(PrefixTable.of(trace).numbers) == [(0,), (2,), (0, 2), (2, 0)]
