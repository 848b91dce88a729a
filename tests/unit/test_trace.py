from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import toy
from factories import HEADS, TARGET, repeatable, trace_of, traces
from hypothesis import given

from topo_search.errors import InputError, MismatchError
from topo_search.identity import RuleIdentity
from topo_search.trace import RankTrace, merge_traces


def same(one: RankTrace, other: RankTrace) -> bool:
    fields = ("prompts", "resolved_ranks", "max_new_tokens")
    return np.array_equal(one.ranks, other.ranks) and all(getattr(one, f) == getattr(other, f) for f in fields)


def test_rows_positions_and_remaining() -> None:
    trace = trace_of([[0, 1], [2, 0], [3, 3]], [], [[1, 1]], prompt_tokens=[5, 6, 7])
    assert trace.ranks.tolist() == [[0, 1], [2, 0], [3, -1], [1, -1]]
    assert [prompt.rows for prompt in trace.prompts] == [3, 0, 1]
    assert trace.starts.tolist() == [0, 3, 3, 4]
    assert trace.prompt_of_row.tolist() == [0, 0, 0, 2]
    assert trace.positions.tolist() == [0, 1, 2, 0]
    assert trace.remaining.tolist() == [3, 2, 1, 1]
    assert trace.contexts.tolist() == [5, 6, 7, 7]
    assert trace.depth == 2


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[0, 1], [2, 0]], r"shape \(2, 2\), but its prompts have 3 rows"),
        ([[0, 1], [2, 0], [4, -1]], r"must lie in -1 \.\. 3"),
        ([[0, 1], [2, 0], [-2, -1]], r"must lie in -1 \.\. 3"),
        ([[0, 1], [2, 0], [1, 1]], r"-1 entries must be exactly the positions past"),
        ([[0, 1], [-1, 0], [1, -1]], r"-1 entries must be exactly the positions past"),
    ],
)
def test_ranks_that_contradict_the_prompts_are_refused(ranks: list[list[int]], message: str) -> None:
    trace = trace_of([[0, 1], [2, 0], [3, 3]])
    with pytest.raises(InputError, match=message):
        replace(trace, ranks=np.array(ranks, dtype=np.int16))


def test_a_prompt_id_may_occur_once() -> None:
    trace = trace_of([[0]], [[1]])
    with pytest.raises(InputError, match="prompt id twice"):
        replace(trace, prompts=(trace.prompts[0], trace.prompts[0]))


@pytest.mark.parametrize("cap", range(1, 25))
def test_a_smaller_cap_gives_what_that_cap_would_have_recorded(cap: int) -> None:
    """MATH 1: N' = min(N, M'), so ranks past the new end become unobserved."""
    assert same(toy.record(toy.PROMPTS, cap=24).capped(cap), toy.record(toy.PROMPTS, cap=cap))


@pytest.mark.parametrize("cap", [0, 25])
def test_a_larger_cap_is_refused(cap: int) -> None:
    with pytest.raises(InputError, match=f"at most 24 tokens cannot replay {cap}"):
        toy.record(toy.PROMPTS[:2], cap=24).capped(cap)


@repeatable
@given(trace=traces())
def test_selecting_and_merging_restores_the_trace(trace: RankTrace) -> None:
    first = trace.select(lambda prompt: prompt.id == "p0")
    others = trace.select(lambda prompt: prompt.id != "p0")
    assert len(first.prompts) == 1
    assert len(first.ranks) == trace.prompts[0].rows
    assert same(merge_traces([first, others]), trace)


def test_a_prompt_recorded_twice_is_kept_once() -> None:
    one, two = trace_of([[0, 1], [1, 0]], [[2, 2]]), trace_of([[0, 1], [1, 0]], [[2, 2]], [[1, 3]])
    merged = merge_traces([one, two])
    assert same(merged, two)


def test_a_prompt_recorded_differently_is_refused() -> None:
    one, two = trace_of([[0, 1], [1, 0]]), trace_of([[0, 2], [1, 0]])
    with pytest.raises(MismatchError, match="Prompt p0 is recorded differently"):
        merge_traces([one, two])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": replace(TARGET, fingerprint="t1")}, "target.*fingerprint is 't1', not 't0'"),
        ({"target": replace(TARGET, dtype="bfloat16")}, "target.*dtype is 'bfloat16', not 'float32'"),
        ({"heads": replace(HEADS, fingerprint="h1")}, "heads.*fingerprint is 'h1', not 'h0'"),
        ({"rule": RuleIdentity(rule="sample", temperature=0.7, seed=1)}, "rule.*temperature is 0.7, not 0.0"),
        ({"max_new_tokens": 65}, "max_new_tokens is 65, not 64"),
        ({"resolved_ranks": 4}, "resolved_ranks is 4, not 3"),
    ],
)
def test_traces_of_different_identity_never_merge(change: dict[str, object], message: str) -> None:
    """FIELD-CASES 30, 41: another dtype, rule or temperature is another trace."""
    with pytest.raises(MismatchError, match=message):
        merge_traces([trace_of([[0, 1]]), replace(trace_of([[0, 1]]), **change)])


def test_names_and_provenance_are_no_part_of_the_identity() -> None:
    trace = trace_of([[0, 1]])
    renamed = replace(trace, target=replace(TARGET, name="copy"), provenance={"time": "later"})
    assert same(merge_traces([trace, renamed]), trace)
