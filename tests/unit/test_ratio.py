"""Tokens over milliseconds: every solver against every small tree, and the field's cases."""

from __future__ import annotations

import numpy as np
import pytest
from factories import TABLE_A
from hypothesis import given, settings
from hypothesis import strategies as st
from solver_contract import (
    EveryTree,
    Problem,
    SolverContract,
    estimate_of,
    expected_tokens,
    inherited,
    problems,
)

from topo_search.errors import InputError
from topo_search.estimates import PathProbabilities, independent
from topo_search.search.affine import fastest_affine
from topo_search.search.knapsack import fastest_by_knapsack
from topo_search.search.ratio import fastest
from topo_search.search.step_costs import AffineCosts, DraftCosts, StepCosts
from topo_search.search.width_scan import fastest_by_width
from topo_search.tree import Tree

NO_DRAFT = DraftCosts(per_expanded=(0.0,) * 3, by_depth=(0.0,) * 4)
THREE_HUNDRED = settings(inherited, max_examples=300)


class RatioContract(SolverContract):
    kind: str
    solver: object

    def problems(self) -> st.SearchStrategy[Problem]:
        return problems(costs=self.kind)

    def worth(self, problem: Problem, every: EveryTree) -> np.ndarray:
        """Tokens per millisecond by the definition of a step's cost."""
        draft = problem.costs.draft
        if isinstance(problem.costs, AffineCosts):
            verify = problem.costs.fixed_ms + problem.costs.per_node_ms * every.sizes
        else:
            verify = np.array([problem.costs.verify_ms.get(size + 1, np.inf) for size in every.sizes])
        step_ms = verify + every.expanded @ np.array(draft.per_expanded) + np.array(draft.by_depth)[every.depths]
        possible = ~every.inside[:, np.array(problem.estimate.of(every.nodes)) == 0].any(axis=1)
        return np.where(possible, expected_tokens(problem, every) / step_ms, -np.inf)  # P = 0 is never added

    @THREE_HUNDRED
    @given(data=st.data())
    def test_no_tree_that_fits_is_better(self, data: st.DataObject) -> None:
        """MATH 4: random costs, plateaus, drops, widths not measured, zero costs and empty trees that win."""
        self.check(data.draw(self.problems()))

    def solve(self, problem: Problem, estimate: PathProbabilities) -> list[tuple[int, Tree, float]]:
        found = type(self).solver(estimate, problem.costs, num_draft_nodes=problem.num_draft_nodes)
        assert found.step_ms == problem.costs.step_ms(found.tree)
        return [(problem.num_draft_nodes, found.tree, found.tokens_per_step / found.step_ms)]


class TestWidthScan(RatioContract):
    kind, solver = "width", staticmethod(fastest_by_width)


class TestKnapsack(RatioContract):
    kind, solver = "any", staticmethod(fastest_by_knapsack)


class TestAffine(RatioContract):
    """Of any size: the number of nodes in a problem is not used."""

    kind = "affine"

    @staticmethod
    def solver(estimate: PathProbabilities, costs: AffineCosts, *, num_draft_nodes: int) -> object:
        return fastest_affine(estimate, costs)

    def solve(self, problem: Problem, estimate: PathProbabilities) -> list[tuple[int, Tree, float]]:
        return [(99, tree, worth) for _, tree, worth in super().solve(problem, estimate)]


class TestChoiceOfSolver(RatioContract):
    """`fastest` keeps affine costs within the size allowed."""

    kind, solver = "affine", staticmethod(fastest)


def test_drafting_that_costs_too_much_leaves_plain_decoding() -> None:
    dear = DraftCosts(per_expanded=(9.0, 1.0, 1.0), by_depth=(0.0,) * 4)
    affine = AffineCosts(fixed_ms=1.0, per_node_ms=0.01, draft=dear)
    for costs in (affine, affine.at_every_width(8)):
        found = fastest(independent(TABLE_A, 39), costs, num_draft_nodes=8)
        assert (found.tree.paths, found.tokens_per_step, found.step_ms) == ((), 1.0, 1.0)


def test_no_head_and_nothing_measured_but_plain_decoding_leave_plain_decoding() -> None:
    headless = DraftCosts(per_expanded=(), by_depth=(0.0,))
    per_node = DraftCosts(per_expanded=(0.0, 0.1), by_depth=(0.0,) * 3)
    estimate = independent(TABLE_A, 9)
    for costs in (
        AffineCosts(fixed_ms=1.0, per_node_ms=0.0, draft=headless),
        StepCosts(verify_ms={1: 1.0, 2: 1.0}, draft=headless),
        StepCosts(verify_ms={1: 1.0}, draft=per_node),
        StepCosts(verify_ms={1: 1.0, 90: 1.0}, draft=per_node),
    ):
        assert fastest(estimate, costs, num_draft_nodes=8).tree == Tree(())


def test_table_a_over_jagged_times() -> None:
    """FIELD-CASES 25: n = 2 wins at 57.0 tokens/s; stopping at the first drop would miss that n = 4 beats n = 3."""
    ms = dict(enumerate([28.8, 30.9, 32.3, 36.9, 37.0, 44.5, 46.4, 49.7, 112.0], start=1))
    estimate = independent(TABLE_A, 39)
    found = fastest(estimate, StepCosts(verify_ms=ms, draft=NO_DRAFT), num_draft_nodes=8)
    assert (found.tree.paths, round(found.tokens_per_s, 1)) == (((0,), (0, 0)), 57.0)
    alone = [
        fastest(estimate, StepCosts(verify_ms={1: 999.0, n + 1: ms[n + 1]}, draft=NO_DRAFT), num_draft_nodes=8)
        for n in (3, 4, 8)
    ]
    assert [round(one.tokens_per_s, 1) for one in alone] == [53.9, 55.4, 20.1]


@pytest.mark.parametrize(("slope", "speedup", "paths"), [(0.24, 1.290, ((0,),)), (0.04, 1.777, ((0,), (1,), (0, 0)))])
def test_table_a_over_times_that_rise_with_width(slope: float, speedup: float, paths: tuple[tuple[int, ...]]) -> None:
    """FIELD-CASES 26: a dear position leaves one node, a cheap one three."""
    costs = AffineCosts(fixed_ms=1.0, per_node_ms=slope, draft=NO_DRAFT)
    for found in (
        fastest_affine(independent(TABLE_A, 39), costs),
        fastest_by_width(independent(TABLE_A, 39), costs.at_every_width(9), num_draft_nodes=9),
        fastest_by_knapsack(independent(TABLE_A, 39), costs.at_every_width(9), num_draft_nodes=9),
    ):
        assert (found.tree.paths, found.tokens_per_step / found.step_ms) == (paths, pytest.approx(speedup, abs=5e-4))
        assert found.tokens_at_most_lost == 0.0


def test_each_batch_size_has_its_own_best_tree() -> None:
    """FIELD-CASES 28: the gain at batch 1 is gone at 32, where each position costs as much as a step."""
    estimate = independent(TABLE_A, 39)
    found = {}
    for batch, slope in ((1, 0.02), (8, 0.12), (32, 0.7)):
        costs = AffineCosts(fixed_ms=20.0, per_node_ms=20.0 * slope, draft=NO_DRAFT)
        found[batch] = fastest(estimate, costs, num_draft_nodes=16).tree
    assert found[1].num_draft_nodes > found[8].num_draft_nodes > found[32].num_draft_nodes == 0
    assert found[1].depth > found[8].depth


def test_accuracies_and_a_cost_table_answer_with_a_tree_and_its_speed_up() -> None:
    """FIELD-CASES 29: three heads, top-1 .68/.33/.18; drafting is dear, so the answer is a small tree."""
    rank_table = [[0.68, 0.08, 0.04, 0.03, 0.02], [0.33, 0.1, 0.06, 0.04, 0.02], [0.18, 0.06, 0.04, 0.03, 0.02]]
    draft = DraftCosts(per_expanded=(0.0,) * 3, by_depth=(0.0, 1.0, 2.0, 3.0))
    times = {1: 10.0, 2: 10.2, 3: 10.4, 5: 11.5, 9: 14.0, 17: 22.0}
    found = fastest(independent(rank_table, 155), StepCosts(verify_ms=times, draft=draft), num_draft_nodes=16)
    assert found.tree.verify_width in times
    assert found.tokens_per_s * 10.0 / 1000 == pytest.approx(found.tokens_per_step / found.step_ms * 10.0)
    assert 1.4 < found.tokens_per_s * 10.0 / 1000 < 1.6


def test_a_mean_rate_says_less_than_the_table_by_depth_and_rank() -> None:
    """FIELD-CASES 34: .65 over five drafts is 2.64 by the geometric formula; a tree of the same depth has more."""
    chain = independent([[0.65]] * 5, 5)
    assert 1 + chain.probabilities.sum() == pytest.approx((1 - 0.65**6) / (1 - 0.65)) == pytest.approx(2.64, abs=5e-3)
    tree = independent([[0.65, 0.12, 0.06]] * 5, 25)
    assert 1 + tree.probabilities.sum() > 3.2


def test_a_width_without_a_time_is_an_error_and_chains_are_judged_like_trees() -> None:
    """FIELD-CASES 88."""
    draft = DraftCosts(per_expanded=(0.0,) * 8, by_depth=(0.0,) * 9)
    costs = StepCosts(verify_ms={1: 10.0, 5: 12.0}, draft=draft)
    assert costs.step_ms(Tree.chain(4)) == 12.0
    with pytest.raises(InputError, match="Width 9 was not measured; measured: 1, 5"):
        costs.step_ms(Tree.chain(8))


def test_candidates_left_out_are_bounded() -> None:
    draft = DraftCosts(per_expanded=(0.1, 0.1, 0.1), by_depth=(0.0,) * 4)
    costs = AffineCosts(fixed_ms=1.0, per_node_ms=0.01, draft=draft).at_every_width(9)
    every = fastest_by_knapsack(independent(TABLE_A, 39), costs, num_draft_nodes=9)
    few = fastest_by_knapsack(independent(TABLE_A, 39), costs, num_draft_nodes=9, candidates=4)
    assert every.tokens_at_most_lost == 0.0
    assert few.tokens_at_most_lost == pytest.approx(4 * 0.06)
    assert few.tokens_per_s < every.tokens_per_s
    unlisted = AffineCosts(fixed_ms=1.0, per_node_ms=0.0, draft=draft)
    assert fastest_affine(independent(TABLE_A, 4), unlisted).tokens_at_most_lost == np.inf
    assert fastest(independent(TABLE_A, 4), unlisted, num_draft_nodes=4).tokens_at_most_lost < 1


def test_a_scan_over_widths_refuses_draft_times_per_node() -> None:
    draft = DraftCosts(per_expanded=(0.1, 0.1), by_depth=(0.0,) * 3)
    with pytest.raises(InputError, match="use the knapsack"):
        fastest_by_width(estimate_of({(0,): 0.5}), StepCosts(verify_ms={1: 1.0}, draft=draft), num_draft_nodes=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DraftCosts(per_expanded=(-1.0,), by_depth=(0.0, 0.0)), "finite and not negative"),
        (lambda: DraftCosts(per_expanded=(0.0,), by_depth=(0.0, float("nan"))), "finite and not negative"),
        (lambda: DraftCosts(per_expanded=(0.0,), by_depth=(1.0, 2.0)), "start at 0.0"),
        (lambda: DraftCosts(per_expanded=(0.0, 0.0), by_depth=(0.0, 2.0, 1.0)), "never fall"),
        (lambda: DraftCosts(per_expanded=(), by_depth=(0.0, 1.0)), "equally deep"),
        (lambda: StepCosts(verify_ms={2: 1.0}, draft=NO_DRAFT), "lack width 1"),
        (lambda: StepCosts(verify_ms={1: 1.0, 2: 0.0}, draft=NO_DRAFT), "width 2 is 0.0 ms"),
        (lambda: AffineCosts(fixed_ms=0.0, per_node_ms=1.0, draft=NO_DRAFT), "takes 0.0 ms"),
        (lambda: AffineCosts(fixed_ms=1.0, per_node_ms=-1.0, draft=NO_DRAFT), "takes -1.0 ms"),
    ],
    ids=range(9),
)
def test_costs_out_of_range_are_refused(make: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
