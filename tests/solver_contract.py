"""What every solver promises, checked against every small tree; each solver's test class inherits it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from factories import all_subtrees, random_state_kept
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from topo_search.estimates import PathProbabilities
from topo_search.search.step_costs import AffineCosts, DraftCosts, StepCosts
from topo_search.tree import Path, Tree, canonical_key

SHAPES = ((3, 2), (2, 3))  # ranks, depth
LARGEST = 14
SHARES = (0.0, 0.05, 0.1, 0.25, 0.25, 0.4, 0.5, 0.9, 1.0)  # ties and zeros, in any order of rank

inherited = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.differing_executors],
)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One case: how likely each path is, what the tree may be and what its step costs."""

    shape: tuple[int, int]
    shares: tuple[float, ...]  # by node in canonical order: of its parent's probability
    num_draft_nodes: int
    max_depth: int | None = None
    ranks_per_depth: tuple[int, ...] | None = None
    costs: StepCosts | AffineCosts | None = None

    @property
    def estimate(self) -> PathProbabilities:
        every = every_tree(*self.shape)
        probability: dict[Path, float] = {(): 1.0}
        for path, share in zip(every.nodes, self.shares, strict=True):
            probability[path] = probability[path[:-1]] * share
        listed = [path for path in every.nodes if probability[path] > 0]
        return estimate_of({path: probability[path] for path in listed})


@dataclass(frozen=True, kw_only=True)
class EveryTree:
    """All trees of a shape, one per row."""

    nodes: tuple[Path, ...]
    trees: tuple[tuple[Path, ...], ...]
    inside: np.ndarray  # [trees, nodes]
    expanded: np.ndarray  # [trees, depths]: expanded nodes at depth 0, 1, ..
    depths: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        return self.inside.sum(axis=1)


@cache
def every_tree(ranks: int, depth: int) -> EveryTree:
    trees = tuple(tuple(sorted(paths, key=canonical_key)) for paths in all_subtrees(ranks, depth))
    nodes = max(trees, key=len)
    return EveryTree(
        nodes=nodes,
        trees=trees,
        inside=np.array([[node in paths for node in nodes] for paths in trees]),
        expanded=np.array(
            [[len({p[:-1] for p in paths if len(p) == d}) for d in range(1, depth + 1)] for paths in trees]
        ),
        depths=np.array([len(paths[-1]) if paths else 0 for paths in trees]),
    )


def estimate_of(probabilities: dict[Path, float]) -> PathProbabilities:
    width = max((len(path) for path in probabilities), default=0)
    return PathProbabilities(
        ranks=np.array([[*p, *[-1] * (width - len(p))] for p in probabilities], dtype=np.int64).reshape(
            len(probabilities), width
        ),
        depths=np.array([len(path) for path in probabilities], dtype=np.int64),
        probabilities=np.array(list(probabilities.values()), dtype=np.float64),
    )


def shuffled(estimate: PathProbabilities) -> PathProbabilities:
    """The same nodes in another order."""
    order = np.random.default_rng(0).permutation(len(estimate.depths))
    return replace(
        estimate,
        ranks=estimate.ranks[order],
        depths=estimate.depths[order],
        probabilities=estimate.probabilities[order],
    )


@st.composite
def problems(draw: st.DrawFn, *, costs: str | None = None) -> Problem:
    shape = draw(st.sampled_from(SHAPES))
    with random_state_kept():
        nodes = len(every_tree(*shape).nodes)
    shares = draw(st.lists(st.sampled_from(SHARES), min_size=nodes, max_size=nodes))
    size = draw(st.integers(0, LARGEST))
    problem = Problem(shape=shape, shares=tuple(shares), num_draft_nodes=size)
    if costs is None:
        caps = st.none() | st.lists(st.integers(0, shape[0]), min_size=1, max_size=3).map(tuple)
        return replace(problem, max_depth=draw(st.none() | st.integers(0, 3)), ranks_per_depth=draw(caps))
    expanding = [0.0] if costs == "width" else [0.0, 0.0, 0.05, 0.3, 2.0]
    per_expanded = [draw(st.sampled_from([0.0, 0.1, 1.0, 9.0]))]
    per_expanded += draw(st.lists(st.sampled_from(expanding), min_size=shape[1] - 1, max_size=shape[1] - 1))
    steps = draw(st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.5]), min_size=shape[1], max_size=shape[1]))
    with random_state_kept():
        draft = DraftCosts(per_expanded=tuple(per_expanded), by_depth=(0.0, *np.cumsum(steps).tolist()))
        return replace(problem, costs=_verify(draw, draft, affine=costs == "affine"))


def _verify(draw: st.DrawFn, draft: DraftCosts, *, affine: bool) -> StepCosts | AffineCosts:
    if affine:
        fixed, slope = draw(st.sampled_from([0.5, 1.0, 5.0])), draw(st.sampled_from([0.0, 0.01, 0.05, 0.24, 1.0]))
        return AffineCosts(fixed_ms=fixed, per_node_ms=slope, draft=draft)
    factors = st.sampled_from([1.0, 1.0, 1.0, 1.02, 1.2, 2.5, 0.8, 0.5, None])  # plateaus, jumps, drops, not measured
    ms, times = 1.0, {1: 1.0}
    for width, factor in enumerate(draw(st.lists(factors, min_size=LARGEST, max_size=LARGEST)), start=2):
        if factor is not None:
            ms *= factor
            times[width] = ms
    return StepCosts(verify_ms=times, draft=draft)


class SolverContract:
    """A subclass says how to solve a problem, and what a tree is worth in it."""

    def solve(self, problem: Problem, estimate: PathProbabilities) -> list[tuple[int, Tree, float]]:
        """Per size allowed: the size, the tree and what the solver says that it is worth."""
        raise NotImplementedError

    def worth(self, problem: Problem, every: EveryTree) -> np.ndarray:
        """What each tree is worth by definition; -inf where it breaks the problem's rule."""
        raise NotImplementedError

    def problems(self) -> st.SearchStrategy[Problem]:
        return problems()

    @inherited
    @given(data=st.data())
    def test_no_tree_that_fits_is_better(self, data: st.DataObject) -> None:
        """Prefix-closed (else it is no Tree), within size and rule, worth what is said, and optimal."""
        self.check(data.draw(self.problems()))

    @inherited
    @given(data=st.data())
    def test_the_order_of_the_nodes_given_decides_nothing(self, data: st.DataObject) -> None:
        problem = data.draw(self.problems())
        estimate = problem.estimate
        assert self.solve(problem, estimate) == self.solve(problem, shuffled(estimate))

    def check(self, problem: Problem) -> None:
        every = every_tree(*problem.shape)
        worth, at = self.worth(problem, every), {paths: index for index, paths in enumerate(every.trees)}
        for size, tree, stated in self.solve(problem, problem.estimate):
            best = worth[every.sizes <= size].max()
            assert tree.num_draft_nodes <= size
            assert (stated, worth[at[tree.paths]]) == (pytest.approx(best), pytest.approx(best))


def expected_tokens(problem: Problem, every: EveryTree) -> np.ndarray:
    return 1 + every.inside @ np.array(problem.estimate.of(every.nodes))


def within_caps(problem: Problem, paths: tuple[Path, ...]) -> bool:
    caps = problem.ranks_per_depth
    deepest = 99 if problem.max_depth is None else problem.max_depth
    return all(
        len(path) <= deepest and (caps is None or (len(path) <= len(caps) and all(map(int.__lt__, path, caps))))
        for path in paths
    )
