"""Optuna: starts from the exact search, tries no tree twice, resumes, says when it is not reproducible."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import TABLE_A, drawn_trace, latency_table

from topo_search.errors import InputError
from topo_search.estimates import independent
from topo_search.search.choose import Settings, choose
from topo_search.search.frontier import frontier
from topo_search.search.judge import ReplayJudge
from topo_search.search.replay_objective import ReplayObjective
from topo_search.search.study import (
    Arm,
    Report,
    Space,
    StudyResult,
    StudySettings,
    ask_new_tree,
    open_study,
    run_study,
)
from topo_search.tree import Tree

ESTIMATE = independent(TABLE_A, 200)
KNOWN = dict(zip(ESTIMATE.paths, ESTIMATE.probabilities.tolist(), strict=True))
SPACE = Space(estimate=ESTIMATE, sizes=tuple(range(1, 9)), depth=3, ranks=3)


class Additive:
    """1 + sum of probabilities: what the sort makes best. Counts its calls."""

    def __init__(self, ceiling: float | None = None) -> None:
        self.tried: list[Tree] = []
        self.limit = ceiling

    def __call__(self, tree: Tree, report: Report) -> float:
        self.tried.append(tree)
        return 1 + sum(KNOWN[path] for path in tree.paths)

    def ceiling(self, tree: Tree) -> float | None:
        return self.limit


def study(trials: int = 25, *, storage: str | None = None, seed: int = 0, name: str = "test") -> StudySettings:
    return StudySettings(name=name, storage=storage, trials=trials, seed=seed)


def run(objective: Any, trials: int = 25, **changes: Any) -> StudyResult:
    return run_study(of_one(SPACE, objective, frontier(ESTIMATE, num_draft_nodes=8).tree(8)), study(trials, **changes))


def of_one(space: Space, objective: Any, *seeds: Tree) -> dict[str, Arm]:
    return {"toy": Arm(space=space, objective=objective, seeds=seeds)}


def history(storage: str) -> list[tuple[Any, ...]]:
    trials = open_study(study(storage=storage)).get_trials()
    return [(t.state.name, t.value, t.params, t.user_attrs.get("tree")) for t in trials]


def test_nothing_beats_the_sort_on_the_additive_objective() -> None:
    best = frontier(ESTIMATE, num_draft_nodes=8).tree(8)
    found = run(Additive(), 30)
    assert found.tree == best
    assert found.value == found.seed_value == pytest.approx(1 + sum(KNOWN[path] for path in best.paths))


def test_no_tree_is_tried_twice() -> None:
    objective = Additive()
    found = run(objective, 30)
    assert len(objective.tried) == len(set(objective.tried)) == found.tried


def test_four_asks_before_any_answer_are_four_trees() -> None:
    """FIELD-CASES 51: pending trials are known."""
    opened = open_study(study())
    asked = [ask_new_tree(opened, of_one(SPACE, Additive()), 0) for _ in range(4)]
    assert len({found[1] for found in asked if found}) == 4


def test_one_process_is_reproducible_and_resumes(tmp_path: Path) -> None:
    """FIELD-CASES 52: same seed, same history; interrupted and continued too."""
    whole, parts, other = (f"sqlite:///{tmp_path / name}.db" for name in ("whole", "parts", "other"))
    found = run(Additive(), 14, storage=whole)
    run(Additive(), 6, storage=parts)
    resumed = Additive()
    again = run(resumed, 14, storage=parts)
    assert (again.known, replace(again, known=0)) == (6, found)
    assert len(resumed.tried) == 14 - 6
    assert history(parts) == history(whole)
    run(Additive(), 14, storage=other, seed=1)
    assert history(other) != history(whole)
    assert found.reproducible


def test_a_second_process_sees_what_is_pending_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = f"sqlite:///{tmp_path / 'shared'}.db"
    run(Additive(), 3, storage=storage)
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    pending = ask_new_tree(open_study(study(storage=storage)), of_one(SPACE, Additive()), 5)
    assert pending is not None
    monkeypatch.undo()
    objective = Additive()
    found = run(objective, 10, storage=storage)
    assert pending[1][1] not in objective.tried
    assert not found.reproducible


def test_a_trial_of_a_dead_process_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = f"sqlite:///{tmp_path / 'dead'}.db"
    run(Additive(), 3, storage=storage)
    monkeypatch.setattr("os.getpid", lambda: 2**22 + 1)
    lost = ask_new_tree(open_study(study(storage=storage)), of_one(SPACE, Additive()), 0)
    assert lost is not None
    monkeypatch.undo()
    objective = Additive()
    assert run(objective, 6, storage=storage).reproducible
    assert lost[1][1] in objective.tried


def test_a_small_space_ends_the_study() -> None:
    tiny = Space(estimate=ESTIMATE, sizes=(1,), depth=1, ranks=1)
    objective = Additive()
    found = run_study(of_one(tiny, objective, Tree.chain(1)), study(50))
    assert (found.tried, objective.tried) == (1, [Tree.chain(1)])


def test_what_cannot_win_is_not_tried() -> None:
    objective = Additive(ceiling=1.5)
    found = run(objective, 8)
    assert len(objective.tried) == 1
    assert found.pruned == found.tried - 1 > 0


def test_a_hopeless_measurement_stops_between_its_rounds() -> None:
    rounds: list[int] = []

    class Slow(Additive):
        def __call__(self, tree: Tree, report: Report) -> float:
            value = 10.0 if len(self.tried) < 8 else 1.0
            self.tried.append(tree)
            for number in range(4):
                rounds.append(number)
                report(number, value)
            return value

    found = run(Slow(), 12)
    assert found.pruned > 0
    assert len(rounds) < 4 * found.tried


def test_the_computed_objective_is_the_searchs_own(tmp_path: Path) -> None:
    """Caps per depth on a replayed objective: never below the seed, which is the exact search's tree."""
    trace = drawn_trace(TABLE_A, prompts=8, rows=40)
    settings = Settings(budget=9, estimator="joint", pick="best")
    judge = ReplayJudge.of(trace, latency_table({width: 10 + 0.5 * width for width in range(1, 10)}))
    choice = choose(judge, settings)
    objective = ReplayObjective(judge=judge, settings=settings)
    space = Space(estimate=choice.estimate, sizes=tuple(range(1, 9)), depth=3, ranks=3)
    found = run_study(of_one(space, objective, *choice.trees[::-1][:2]), study(20))
    assert found.value >= found.seed_value == pytest.approx(1000 * choice.alternatives.tokens_per_ms[2])
    assert objective.ceiling(choice.trees[-1]) >= found.seed_value  # type: ignore[operator]


def test_an_objective_that_fails_leaves_the_study_usable(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'failed'}.db"

    class Failing(Additive):
        def __call__(self, tree: Tree, report: Report) -> float:
            if len(self.tried) == 2:
                raise ValueError("out of memory")
            return super().__call__(tree, report)

    with pytest.raises(ValueError, match="out of memory"):
        run(Failing(), 6, storage=storage)
    assert run(Additive(), 6, storage=storage).tried == 6


def test_bad_storage_and_no_trials_are_named() -> None:
    with pytest.raises(InputError, match=r"storage nonsense://.*sqlite:///"):
        run(Additive(), storage="nonsense://x")
    with pytest.raises(InputError, match="--trials"):
        run(Additive(), 0)
