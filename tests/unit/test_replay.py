from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
import toy
from factories import closed, repeatable, trace_of, traces, trees
from hypothesis import given
from hypothesis import strategies as st

from topo_search.errors import MismatchError
from topo_search.replay import replay, replay_nested
from topo_search.trace import RankTrace
from topo_search.tree import Tree

CHAIN = Tree.chain(4)


def accepted_by_hand(trace: RankTrace, tree: Tree) -> list[list[int]]:
    """Walk row after row as the definition says."""
    steps: list[list[int]] = []
    for prompt, first in zip(trace.prompts, trace.starts, strict=False):
        steps.append([])
        j = 0
        while j < prompt.rows:
            row = tuple(trace.ranks[first + j])
            hit = max((len(path) for path in tree.paths if row[: len(path)] == path), default=0)
            emitted = min(hit + 1, prompt.rows - j)
            steps[-1].append(emitted - 1)
            j += emitted
    return steps


def answer_accepting(*accepted: int) -> list[list[int]]:
    """Rows on which a chain's steps accept these numbers of drafted tokens."""
    return [row for a in accepted for row in ([0] * a + [3] * (4 - a), *[[3] * 4] * a)]


@repeatable
@given(trace=traces(), batch=st.lists(trees(ranks=3, depth=3), max_size=4))
def test_replay_is_the_walk_by_hand(trace: RankTrace, batch: list[Tree]) -> None:
    walks = replay(trace, batch)
    for index, tree in enumerate(batch):
        accepted = accepted_by_hand(trace, tree)
        flat = [length for lengths in accepted for length in lengths]
        assert walks.accepted(index) == accepted
        assert [sum(a + 1 for a in lengths) for lengths in accepted] == [prompt.rows for prompt in trace.prompts]
        assert walks.steps[index] == len(flat)
        assert walks.histogram(index) == [flat.count(a) for a in range(max(flat, default=0) + 1)]
        assert walks.tokens_per_step[index] == (sum(a + 1 for a in flat) / len(flat) if flat else 1.0)


@repeatable
@given(trace=traces(), tree=trees(ranks=3, depth=3), data=st.data())
def test_nested_replay_is_replay_of_every_prefix(trace: RankTrace, tree: Tree, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, tree.num_draft_nodes), max_size=5))
    nested = replay_nested(trace, [(tree.paths, sizes)])
    single = replay(trace, [Tree(tree.paths[:size]) for size in sizes])
    assert np.array_equal(nested.emitted, single.emitted)
    assert np.array_equal(nested.visited, single.visited)


def test_two_hundred_trees_from_one_trace_equal_their_decodes() -> None:
    """FIELD-CASES 37; answers end by end-of-text (as first token, inside a path, as own choice) and by the cap."""
    trace = toy.record(toy.PROMPTS, cap=26)
    draw = random.Random(0)
    drawn = [
        [tuple(draw.choices(range(4), k=draw.randint(1, 3))) for _ in range(draw.randint(0, 8))] for _ in range(200)
    ]
    batch = [closed(paths) for paths in drawn]
    walks = replay(trace, batch)
    for index, tree in enumerate(batch):
        decoded = [toy.decode(prompt, tree, cap=26) for prompt in toy.PROMPTS]
        assert walks.accepted(index) == [accepted for _, accepted in decoded]
        assert walks.tokens.tolist() == [len(answer) - 1 for answer, _ in decoded]
    assert {prompt.end for prompt in trace.prompts} == {"eos", "cap"}
    assert 1 in {prompt.answer_tokens for prompt in trace.prompts}


def test_plain_decoding_is_exactly_one_token_per_step() -> None:
    """MATH 0: false as soon as the first token or the prefill pass is counted."""
    walks = replay(toy.record(toy.PROMPTS, cap=26), [Tree(())])
    assert walks.tokens_per_step.tolist() == [1.0]
    assert walks.all_positions.tolist() == [1.0]
    assert walks.steps[0] == walks.tokens.sum()


def test_a_cap_of_one_or_an_end_as_first_token_takes_no_step() -> None:
    trace = toy.record(toy.PROMPTS, cap=1)
    walks = replay(trace, [CHAIN.pruned(3), Tree(())])
    assert walks.steps.tolist() == [0, 0]
    assert walks.tokens_per_step.tolist() == [1.0, 1.0]
    assert walks.all_positions.tolist() == [1.0, 1.0]
    beside = replay(trace_of([], [[0, 0], [0, 0]], []), [CHAIN.pruned(1)])
    assert beside.accepted(0) == [[], [1], []]
    assert beside.tokens_per_step.tolist() == [2.0]


@pytest.mark.parametrize(
    ("rows", "accepted"),
    [
        ([[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]], [2]),  # the end is drafted and in the tree: inside the path
        ([[0, 0, 3, 0], [3, 3, 3, 3], [3, 3, 3, 3]], [2]),  # the end is the target's own choice
        ([[0, 3, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]], [1, 0]),
    ],
)
def test_the_last_token_counts_as_the_targets_own_choice(rows: list[list[int]], accepted: list[int]) -> None:
    assert replay(trace_of(rows), [CHAIN]).accepted(0) == [accepted]


@repeatable
@given(trace=traces(), tree=trees(ranks=3, depth=3))
def test_trimming_near_the_end_changes_nothing(trace: RankTrace, tree: Tree) -> None:
    """MATH 0: a node as deep as the tokens that remain never changes what is emitted."""
    emitted = replay(trace, [tree, *(tree.pruned(remaining - 1) for remaining in range(1, 9))]).emitted
    for row, remaining in enumerate(trace.remaining):
        assert emitted[remaining, row] == emitted[0, row]


def test_all_positions_is_the_mean_over_every_row() -> None:
    trace = trace_of([[0, 0], [3, 0], [0, 0]], [[0, 3]])
    walks = replay(trace, [Tree.chain(2)])
    assert walks.emitted.tolist() == [[3, 1, 1, 1]]
    assert walks.visited.tolist() == [[True, False, False, True]]
    assert walks.all_positions.tolist() == [6 / 4]
    assert walks.tokens_per_step.tolist() == [4 / 2]


def test_accepted_and_emitted_are_kept_apart() -> None:
    """FIELD-CASES 31: ten steps, 15 accepted: 1.5 drafts and 2.5 tokens per step."""
    walks = replay(trace_of(answer_accepting(3, 1, 0, 2, 1), answer_accepting(0, 4, 1, 2, 1)), [CHAIN])
    accepted = [length for lengths in walks.accepted(0) for length in lengths]
    assert (len(accepted), sum(accepted)) == (10, 15)
    assert walks.tokens_per_step.tolist() == [2.5]


def test_mean_count_and_spread_are_over_all_steps() -> None:
    """FIELD-CASES 32: steps accept 3, 1, 1, 1."""
    walks = replay(trace_of(answer_accepting(3), answer_accepting(1, 1), answer_accepting(1)), [CHAIN])
    accepted = [length for lengths in walks.accepted(0) for length in lengths]
    assert walks.accepted(0) == [[3], [1, 1], [1]]
    assert walks.histogram(0) == [0, 3, 0, 1]
    assert (len(accepted), statistics.mean(accepted), statistics.stdev(accepted)) == (4, 1.5, 1.0)


def test_tokens_per_step_is_no_mean_of_prompt_means() -> None:
    walks = replay(trace_of(answer_accepting(4), answer_accepting(0, 0, 0)), [CHAIN])
    assert walks.tokens_per_step.tolist() == [8 / 4]


@pytest.mark.parametrize(("first_phase", "wide", "deep"), [(3, 2.0, 3.0), (1, 2.0, 2.727), (2, 2.0, 2.857)])
def test_three_phases_deliver_other_than_they_count(first_phase: int, wide: float, deep: float) -> None:
    """MATH 5: where steps start depends on the tree; N = 61."""
    phases: dict[int, Sequence[int]] = {1: (1, 2), 2: (1, 2), 3: (0, 1)}
    trace = trace_of([phases[(first_phase - 1 + j) % 3 + 1] for j in range(60)], resolved=2)
    walks = replay(trace, [Tree(((0,), (1,))), Tree(((0,), (0, 1)))])
    assert walks.tokens_per_step == pytest.approx([wide, deep], abs=5e-4)
    assert walks.all_positions == pytest.approx([2.0, 5 / 3], abs=0.04)
    if first_phase == 3:
        assert walks.tokens_per_step.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("heads", [2, 3])
def test_a_tree_deeper_than_the_heads_is_refused_and_its_pruning_fits(heads: int) -> None:
    """FIELD-CASES 16."""
    trace, tree = trace_of([[0] * heads] * 8), closed([(0, 0, 0, 0), (1, 1)])
    with pytest.raises(MismatchError, match=f"4 deep, but the trace records {heads} draft heads"):
        replay(trace, [tree])
    assert replay(trace, [tree.pruned(heads)]).tokens_per_step[0] > 1.0


def test_a_rank_that_the_trace_does_not_resolve_is_refused() -> None:
    with pytest.raises(MismatchError, match="rank 3, but the trace resolves ranks 0 to 2"):
        replay(trace_of([[0, 3]] * 3), [Tree(((0,), (3,)))])


def test_no_tree_at_all_gives_empty_walks() -> None:
    walks = replay(trace_of([[0]] * 3), [])
    assert (walks.emitted.shape, walks.steps.tolist()) == ((0, 3), [])
