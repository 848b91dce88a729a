"""Choice among heads: each searched as if alone, compared on the same held-out prompts, and one study over all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import TABLE_A, drawn_trace, latency_table, trace_of

from topo_search.cli.optimize import Objective
from topo_search.cli.studying import studied_among
from topo_search.cost import LatencyTable
from topo_search.errors import InputError, MismatchError
from topo_search.estimates import independent
from topo_search.identity import HeadsIdentity, RuleIdentity
from topo_search.search.among import (
    Among,
    Entrant,
    assess_among,
    assess_among_improved,
    comparable,
    differing_devices,
)
from topo_search.search.assess import assess
from topo_search.search.choose import Settings
from topo_search.search.optimize import CHAIN, PLAIN, TREE
from topo_search.search.study import Arm, Report, Space, StudySettings, run_study
from topo_search.search.verdict import heads_verdict
from topo_search.trace import RankTrace
from topo_search.tree import Tree

CHEAP = latency_table({width: 10 + 0.2 * width for width in range(1, 9)})
DEAR = latency_table({width: 10.0 * width for width in range(1, 9)})
GOOD = drawn_trace(TABLE_A, prompts=10, rows=24)
POOR = drawn_trace([[0.3, 0.1, 0.05], [0.2, 0.05, 0.05], [0.1, 0.05, 0.05]], prompts=10, rows=24, seed=1)


def heads(name: str, **changes: Any) -> HeadsIdentity:
    return HeadsIdentity(**({"name": name, "kind": "medusa", "fingerprint": f"h-{name}", "num_heads": 4} | changes))


def entrant(name: str, trace: RankTrace, latency: LatencyTable | None = CHEAP) -> Entrant:
    table = None if latency is None else replace(latency, heads=heads(name))
    return Entrant(name=name, trace=replace(trace, heads=heads(name)), latency=table)


def asked(budget: int = 6, **changes: Any) -> Settings:
    return Settings(budget=budget, **({"estimator": "joint", "pick": "best", "resamples": 100, "folds": 3} | changes))


def among(*entrants: Entrant, **changes: Any) -> Among:
    return assess_among(entrants, asked(**changes))


def reordered(trace: RankTrace, order: Sequence[int]) -> RankTrace:
    return trace.in_order(list(order))


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_the_better_heads_win_in_whatever_order_they_are_given(order: list[int]) -> None:
    given = [entrant("poor", POOR), entrant("good", GOOD)]
    found = among(*(given[index] for index in order))
    assert found.best.name == "good"
    other = next(standing for standing in found.standings if standing.name == "poor")
    assert other.chosen_over is not None and other.chosen_over.interval is not None and other.sure is not None
    rates = [s.found.figures(s.found.recommended).tokens_per_s.value for s in (found.best, other)]  # type: ignore[union-attr]
    assert other.chosen_over.value == pytest.approx(rates[0] / rates[1])
    assert other.chosen_over.interval.low > 1
    assert other.sure > 0.99
    assert "Fastest heads: good with the best tree: " in heads_verdict(found)
    assert "poor with the best" in heads_verdict(found) and "over 99 % sure" in heads_verdict(found)


def test_each_heads_answer_is_the_one_they_get_alone() -> None:
    found = among(entrant("poor", POOR), entrant("good", GOOD))
    for standing, trace in zip(found.standings, (POOR, GOOD), strict=True):
        alone = assess(trace, CHEAP, asked())
        assert standing.found.result.alternatives == alone.result.alternatives
        assert (standing.found.held_out, standing.found.over_plain) == (alone.held_out, alone.over_plain)


def test_fast_heads_beat_heads_that_are_right_more_often() -> None:
    """What counts is tokens per second by each one's own table, not tokens per step."""
    slow = latency_table({width: 10 + 0.2 * width for width in range(1, 9)}, [40.0, 60.0, 80.0])
    found = among(entrant("good but slow", GOOD, slow), entrant("poor", POOR))
    assert found.best.name == "poor"
    by_steps = among(entrant("poor", POOR, None), entrant("good", GOOD, None), objective="tokens-per-step")
    assert by_steps.best.name == "good"
    steps = [s.found.figures(TREE).tokens_per_step.value for s in by_steps.standings]  # type: ignore[union-attr]
    assert by_steps.standings[0].chosen_over.value == pytest.approx(steps[1] / steps[0])  # type: ignore[union-attr]
    assert "Heads of most tokens per step: good" in heads_verdict(by_steps)


def test_of_equals_the_first_is_chosen() -> None:
    found = among(entrant("one", GOOD), entrant("other", GOOD))
    assert found.best.name == "one"
    over, sure = found.standings[1].chosen_over, found.standings[1].sure
    assert over is not None
    assert (over.value, sure) == (1.0, 0.5)


def test_the_difference_is_paired_by_prompt_and_rests_on_both_tables() -> None:
    """Heads that differ by a constant cost on every prompt: no spread of prompts is left, the tables' is."""
    slower = latency_table({width: 2 * (10 + 0.2 * width) for width in range(1, 9)})
    sure = among(entrant("fast", GOOD), entrant("slow", GOOD, slower)).standings[1].chosen_over
    assert sure is not None and sure.log_se is not None
    assert (sure.value, sure.log_se) == (pytest.approx(2.0), pytest.approx(0, abs=1e-9))

    def noisy(table: LatencyTable) -> LatencyTable:
        shaky = {cell: replace(t, p10_ms=t.median_ms - 1, p90_ms=t.median_ms + 1) for cell, t in table.verify.items()}
        return replace(table, verify=shaky)

    one = among(entrant("fast", GOOD), entrant("slow", GOOD, noisy(slower))).standings[1].chosen_over
    both = among(entrant("fast", GOOD, noisy(CHEAP)), entrant("slow", GOOD, noisy(slower))).standings[1].chosen_over
    assert one is not None and both is not None and one.log_se is not None and both.log_se is not None
    assert both.log_se == pytest.approx(one.log_se * 5**0.5)  # the same spread over half the time counts twice


def test_heads_that_do_not_beat_plain_decoding_lose_to_those_that_do() -> None:
    """Plain decoding is the same for all, so the winner is compared with it by its own table, not across tables."""
    quick_but_useless = latency_table({width: 5.0 * width for width in range(1, 9)})
    found = among(entrant("useless", POOR, quick_but_useless), entrant("good", GOOD))
    assert found.best.name == "good"
    useless = found.standings[0]
    assert useless.found.recommended == PLAIN
    assert useless.chosen_over == found.best.found.over_plain
    assert "plain decoding, which useless does not beat" in heads_verdict(found)
    assert "Plain decoding takes 5.0 ms by the table of useless and 10.2 ms by that of good" in found.warnings[0]
    none = among(entrant("one", POOR, DEAR), entrant("other", POOR, DEAR))
    assert (none.best.name, none.standings[1].chosen_over) == ("one", None)
    assert "Of one, other, no heads beat plain decoding here" in heads_verdict(none)


def test_one_prompt_is_compared_by_own_scores() -> None:
    single = trace_of([[0, 0, 0]] * 8)
    found = among(entrant("poor", trace_of([[0, 3, 3]] * 8)), entrant("good", single))
    assert (found.best.name, found.standings[0].chosen_over) == ("good", None)
    assert "by their own scores" in heads_verdict(found)


def test_prompts_are_matched_by_id() -> None:
    shuffled = reordered(GOOD, [3, 1, 0, 2, *range(4, 10)])
    _, matched = comparable([entrant("one", POOR), entrant("other", shuffled)])
    assert matched.trace.prompts == POOR.prompts
    assert np.array_equal(matched.trace.ranks, GOOD.ranks)


def _another(trace: RankTrace, **changes: Any) -> RankTrace:
    return replace(trace, prompts=(replace(trace.prompts[0], **changes), *trace.prompts[1:]))


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        (replace(GOOD, target=replace(GOOD.target, fingerprint="t1")), "fingerprint is 't1', not 't0'"),
        (replace(GOOD, target=replace(GOOD.target, dtype="bfloat16")), "dtype is 'bfloat16', not 'float32'"),
        (
            replace(GOOD, rule=RuleIdentity(rule="sample", temperature=0.7, seed=1)),
            "rule is 'sample', not 'greedy'; temperature is 0.7, not 0.0",
        ),
        (replace(GOOD, max_new_tokens=99), "max_new_tokens is 99, not 25"),
        (reordered(GOOD, range(9)), r"prompt 'p9' \(1 in all\) is missing"),
        (_another(GOOD, id="new"), r"prompt 'p0' \(1 in all\) is missing"),
        (_another(GOOD, digest="other"), "of prompt 'p0', digest is 'other', not ''"),
        (_another(GOOD, prompt_tokens=99), "of prompt 'p0', prompt_tokens is 99, not 10"),
    ],
)
def test_traces_that_cannot_be_compared_are_refused(trace: RankTrace, words: str) -> None:
    with pytest.raises(MismatchError, match=f"traces of odd and first cannot be compared: in that of odd, {words}"):
        among(entrant("first", POOR), entrant("odd", trace))


def test_an_extra_prompt_is_refused() -> None:
    with pytest.raises(MismatchError, match=r"prompt 'p9' \(1 in all\) is only there"):
        among(entrant("first", reordered(POOR, range(9))), entrant("odd", GOOD))


def test_tables_of_another_device_or_mode_are_named() -> None:
    one, same = entrant("one", GOOD), entrant("other", POOR)
    assert differing_devices([one, same]) == []
    far = replace(CHEAP, mode="graph", device={"name": "elsewhere", "kind": "cuda"})
    assert differing_devices([one, entrant("other", POOR, far)]) == [
        "other: mode is 'graph', not 'eager'",
        "other: device name is 'elsewhere', not 'test'",
        "other: device kind is 'cuda', not None",
    ]


def study_of(entrants: Sequence[Entrant], storage: str, trials: int, **changes: Any) -> tuple[Among, dict[str, Any]]:
    words = {"objective": Objective.throughput, "storage": storage, "trials": trials}
    return studied_among(entrants, asked(**changes), words)


def test_a_study_over_heads_never_ends_below_the_better_exact_tree(tmp_path: Path) -> None:
    given = [entrant("poor", POOR), entrant("good", GOOD)]
    exact: list[float] = []

    def keep(parts: Any) -> list[Tree]:
        exact.extend(1000 * float(choice.alternatives.tokens_per_ms[2]) for _, choice in parts)
        return [choice.trees[-1] for _, choice in parts]

    unstudied = assess_among_improved(given, asked(), keep)
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    found, told = study_of(given, storage, 6)
    assert told["value"] >= told["seed_value"] == pytest.approx(max(exact))
    assert (told["heads"], told["tried"]) == ("good", 6)
    assert found.best.name == unstudied.best.name == "good"
    again, retold = study_of(given[::-1], storage, 6)  # the same question, whatever the order
    assert retold["name"] == told["name"]
    assert (retold["known"], retold["value"], again.best.name) == (6, told["value"], "good")


def test_a_study_finds_the_tree_of_the_heads_whose_exact_tree_loses() -> None:
    """MATH 5's three phases: counted everywhere, rank 7 is likeliest; by replay (1), (1, 0) emits 3 tokens a step."""
    phases, steady_rows = [(1, 0), (7, 8), (7, 8)], [(0, 0), (0, 8), (8, 8)]
    phased = trace_of(*[[phases[j % 3] for j in range(24)] for _ in range(6)], resolved=8)
    steady = trace_of(*[[steady_rows[(j * 7 + i) % 3] for j in range(24)] for i in range(6)], resolved=8)
    flat = latency_table(dict.fromkeys(range(1, 4), 10.0))
    given = [entrant("steady", steady, flat), entrant("phased", phased, flat)]
    assert assess_among(given, asked(3)).best.name == "steady"
    found, told = study_of(given, "sqlite:///:memory:", 8, budget=3)
    assert told["heads"] == "phased"
    assert told["value"] > told["seed_value"]
    assert found.best.name == "phased"
    assert found.best.found.result[TREE].tree == Tree(((1,), (1, 0)))


class Counted:
    """A value per heads, whatever the tree."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.tried: list[Tree] = []

    def __call__(self, tree: Tree, report: Report) -> float:
        self.tried.append(tree)
        return self.value

    def ceiling(self, tree: Tree) -> float | None:
        return None


def test_a_tree_is_another_one_with_other_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One possible tree, two heads: both are tried, each once, though only one has a seed."""
    monkeypatch.setattr("topo_search.search.study._ASKS_PER_TREE", 3)
    tiny = Space(estimate=independent([[0.5]], 4), sizes=(1,), depth=1, ranks=1)
    objectives = {"one": Counted(1.0), "other": Counted(2.0)}
    arms = {n: Arm(space=tiny, objective=o, seeds=[Tree.chain(1)][: n == "one"]) for n, o in objectives.items()}
    found = run_study(arms, StudySettings(name="two", storage=None, trials=9, seed=0))
    assert (found.heads, found.value, found.seed_value, found.tried) == ("other", 2.0, 1.0, 2)
    assert found.best_of == {"one": Tree.chain(1), "other": Tree.chain(1)}
    assert [len(objective.tried) for objective in objectives.values()] == [1, 1]


def test_seeds_of_heads_that_an_interrupted_study_did_not_reach_are_tried(tmp_path: Path) -> None:
    tiny = Space(estimate=independent([[0.5]], 4), sizes=(1,), depth=1, ranks=1)
    settings = StudySettings(name="cut", storage=f"sqlite:///{tmp_path / 'cut.db'}", trials=1, seed=0)

    class Interrupted(Counted):
        def __call__(self, tree: Tree, report: Report) -> float:
            raise KeyboardInterrupt

    def arms(other: Counted) -> dict[str, Arm]:
        objectives = {"one": Counted(1.0), "other": other}
        return {n: Arm(space=tiny, objective=o, seeds=[Tree.chain(1)]) for n, o in objectives.items()}

    with pytest.raises(KeyboardInterrupt):
        run_study(arms(Interrupted(0.0)), settings)
    found = run_study(arms(Counted(2.0)), settings)
    assert (found.heads, found.value, found.seed_value) == ("other", 2.0, 1.0)


def test_a_trace_without_rows_is_refused() -> None:
    empty = trace_of([], [], depth=3)
    with pytest.raises(InputError, match="no rows"):
        among(entrant("one", empty), entrant("other", empty))


def test_batch_weights_hold_for_every_heads() -> None:
    table = replace(CHEAP, verify={(b, c, w): ms for (_, c, w), ms in CHEAP.verify.items() for b in (1, 2)})
    table = replace(table, draft={(b, d, n): ms for (_, d, n), ms in CHEAP.draft.items() for b in (1, 2)})
    found = among(entrant("poor", POOR, table), entrant("good", GOOD, table), batch_weights=((1, 0.5), (2, 0.5)))
    assert found.best.name == "good"
    assert found.best.found.result[CHAIN].tokens_per_s == pytest.approx(
        assess(GOOD, table, asked()).result[CHAIN].tokens_per_s / 0.75  # type: ignore[operator]
    )
