"""The best trees of every size, free and under each rule, against every small tree."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from factories import goldens
from hypothesis import strategies as st
from solver_contract import (
    EveryTree,
    Problem,
    SolverContract,
    estimate_of,
    expected_tokens,
    problems,
    within_caps,
)

from topo_search.errors import InputError
from topo_search.estimates import PathProbabilities, independent
from topo_search.search.rules import best_trees
from topo_search.search.slots import ordered_slots
from topo_search.tree import Path, Tree


def children(paths: tuple[Path, ...]) -> dict[Path, list[int]]:
    """Ranks of the children of every expanded node."""
    found: dict[Path, list[int]] = {}
    for path in paths:
        found.setdefault(path[:-1], []).append(path[-1])
    return found


def is_contiguous(paths: tuple[Path, ...]) -> bool:
    return all(sorted(ranks) == list(range(len(ranks))) for ranks in children(paths).values())


def is_expanded_first(paths: tuple[Path, ...]) -> bool:
    groups = children(paths)
    expanded = {node: [rank for rank in ranks if (*node, rank) in groups] for node, ranks in groups.items()}
    return is_contiguous(paths) and all(sorted(ranks) == list(range(len(ranks))) for ranks in expanded.values())


def is_uniform(paths: tuple[Path, ...]) -> bool:
    groups = children(paths)
    counts = [
        {len(groups.get(node, [])) for node in ((), *paths) if len(node) == depth} for depth in range(len(paths) + 1)
    ]
    return is_contiguous(paths) and all(len(found) <= 1 for found in counts)


class RuleContract(SolverContract):
    rule: str
    keeps: Callable[[tuple[Path, ...]], bool]

    def solve(self, problem: Problem, estimate: PathProbabilities) -> list[tuple[int, Tree, float]]:
        family = best_trees(
            estimate,
            num_draft_nodes=problem.num_draft_nodes,
            rule=self.rule,
            max_depth=problem.max_depth,
            ranks_per_depth=problem.ranks_per_depth,
        )
        tokens = family.expected_tokens().tolist()
        found = [(size, family.tree(size), value) for size, value in enumerate(tokens)]
        return [*found, (problem.num_draft_nodes, family.tree(problem.num_draft_nodes), tokens[-1])]

    def worth(self, problem: Problem, every: EveryTree) -> np.ndarray:
        fits = [within_caps(problem, paths) and type(self).keeps(paths) for paths in every.trees]
        return np.where(fits, expected_tokens(problem, every), -np.inf)


class TestFrontier(RuleContract):
    rule, keeps = "any", staticmethod(lambda paths: True)


class TestContiguous(RuleContract):
    rule, keeps = "contiguous", staticmethod(is_contiguous)


class TestExpandedFirst(RuleContract):
    """FORMATS 1.2."""

    rule, keeps = "expanded-first", staticmethod(is_expanded_first)


class TestUniform(RuleContract):
    """FORMATS 1.6."""

    rule, keeps = "uniform", staticmethod(is_uniform)


class TestOrderedSlots(SolverContract):
    """The chance depends on slot and depth alone; slots are filled from the first."""

    def problems(self) -> st.SearchStrategy[Problem]:
        return problems().map(_same_at_every_parent)

    def solve(self, problem: Problem, estimate: PathProbabilities) -> list[tuple[int, Tree, float]]:
        family = ordered_slots(_acceptance(problem), num_draft_nodes=problem.num_draft_nodes)
        return [(size, family.tree(size), value) for size, value in enumerate(family.expected_tokens().tolist())]

    def worth(self, problem: Problem, every: EveryTree) -> np.ndarray:
        fits = [is_contiguous(paths) for paths in every.trees]
        return np.where(fits, expected_tokens(problem, every), -np.inf)


def _acceptance(problem: Problem) -> list[list[float]]:
    """The first sibling group's shares at each depth."""
    ranks, depth = problem.shape
    firsts = [sum(ranks**level for level in range(1, above + 1)) for above in range(depth)]
    return [list(problem.shares[first : first + ranks]) for first in firsts]


def _same_at_every_parent(problem: Problem) -> Problem:
    ranks = problem.shape[0]
    shares = [row * ranks**above for above, row in enumerate(_acceptance(problem))]
    return Problem(shape=problem.shape, shares=tuple(itertools.chain(*shares)), num_draft_nodes=problem.num_draft_nodes)


def test_under_contiguity_increments_may_rise() -> None:
    """MATH 3: (0) .1, (1) .5, (1, 0) .4; the sort would take (1) first and leave a gap."""
    estimate = estimate_of({(0,): 0.1, (1,): 0.5, (1, 0): 0.4})
    family = best_trees(estimate, num_draft_nodes=3, rule="contiguous")
    assert np.diff(family.expected_tokens()) == pytest.approx([0.1, 0.5, 0.4])
    assert np.diff(best_trees(estimate, num_draft_nodes=3).expected_tokens()) == pytest.approx([0.5, 0.4, 0.1])


def test_a_node_that_must_be_expanded_first_gets_a_child_that_never_hits() -> None:
    estimate = estimate_of({(0,): 0.5, (1,): 0.5, (1, 0): 0.5})
    family = best_trees(estimate, num_draft_nodes=4, rule="expanded-first")
    assert family.tree(3).paths == ((0,), (1,))
    assert family.tree(4).paths == ((0,), (1,), (0, 0), (1, 0))


def test_an_unknown_rule_is_refused_with_the_choices() -> None:
    with pytest.raises(
        InputError, match="no tree rule 'dense'; choose one of any, contiguous, expanded-first, uniform"
    ):
        best_trees(estimate_of({(0,): 0.5}), num_draft_nodes=1, rule="dense")


def test_what_the_estimate_does_not_list_is_bounded() -> None:
    estimate = independent([[0.5, 0.3, 0.1], [0.5, 0.3]], 4)  # leaves out .15 (0, 1), .15 (1, 0) and less
    family = best_trees(estimate, num_draft_nodes=4)
    assert family.probabilities.tolist() == pytest.approx([0.5, 0.3, 0.25, 0.15])
    assert family.tokens_at_most_lost(4) == pytest.approx(0.0)
    capped = best_trees(estimate, num_draft_nodes=2, ranks_per_depth=(1, 1))
    assert capped.tokens_at_most_lost(3) == pytest.approx(0.15)
    assert best_trees(estimate, num_draft_nodes=2, rule="contiguous").tokens_at_most_lost(2) == pytest.approx(0.3)


def test_sequoias_vector_in_ordered_slots_gives_the_golden_tokens_per_step() -> None:
    """Sizes include the root; at most nine levels below it."""
    golden = goldens()["sequoia"]
    counts = golden["event_counts_rank_1_to_32"]
    shares = [count / (sum(counts) + golden["events_none"]) for count in counts]
    family = ordered_slots([shares] * 9, num_draft_nodes=127)
    best = golden["best_tokens_per_step_by_size_including_root_slot_ordered_at_most_9_draft_levels"]
    assert {size: float(family.expected_tokens()[int(size) - 1]) for size in best} == pytest.approx(best, abs=5e-5)
    assert all(
        family.tree(size).num_draft_nodes == size and is_contiguous(family.tree(size).paths) for size in (1, 63, 127)
    )


def test_slots_of_each_depth_are_kept_apart() -> None:
    """FIELD-CASES 88: depth x rank, where the peer's search knows ranks only."""
    steep = ordered_slots([[0.9, 0.0], [0.2, 0.2]], num_draft_nodes=2)
    flat = ordered_slots([[0.2, 0.2], [0.9, 0.0]], num_draft_nodes=2)
    assert (steep.tree(2).paths, flat.tree(2).paths) == (((0,), (0, 0)), ((0,), (1,)))
    assert ordered_slots([], num_draft_nodes=3).expected_tokens().tolist() == [1.0] * 4
