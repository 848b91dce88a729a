from __future__ import annotations

from collections import Counter

import numpy as np
from factories import repeatable, trace_of, traces
from hypothesis import given

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
