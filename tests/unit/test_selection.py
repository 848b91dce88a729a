"""Figures on prompts that did not choose: folds, cross-fitting, the size rule, unseen paths, workloads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from factories import TABLE_A, drawn_trace, latency_table, trace_of

from topo_search.cost import DraftTimes
from topo_search.errors import InputError
from topo_search.estimates import joint
from topo_search.prefixes import PrefixTable
from topo_search.replay import replay
from topo_search.search.assess import assess, assess_accuracies, assess_improved
from topo_search.search.choose import Settings, choose
from topo_search.search.judge import ReplayJudge
from topo_search.search.optimize import CHAIN, NAMES, PLAIN, TREE
from topo_search.search.ratio import fastest
from topo_search.search.selection import chosen_trees, fold_of_prompts, hold_out, text_units
from topo_search.search.unseen import unseen_shares
from topo_search.search.workloads import workload_rows
from topo_search.trace import RankTrace
from topo_search.tree import Tree

FLAT = latency_table({width: 10 + 0.3 * width for width in range(1, 17)})


def settings(budget: int = 9, **changes: Any) -> Settings:
    return Settings(budget=budget, **({"estimator": "joint", "pick": "best", "resamples": 200} | changes))


@pytest.fixture(scope="module")
def drawn() -> RankTrace:
    return drawn_trace(TABLE_A, prompts=20, rows=60)


def labelled(trace: RankTrace, *names: str) -> RankTrace:
    """Workloads dealt to the prompts in turn."""
    prompts = tuple(replace(p, workload=names[i % len(names)]) for i, p in enumerate(trace.prompts))
    return replace(trace, prompts=prompts)


def test_folds_split_prompts_evenly_within_each_workload(drawn: RankTrace) -> None:
    trace = labelled(drawn, "code", "chat")
    fold = fold_of_prompts(trace.prompts, 5, seed=0)
    assert np.bincount(fold).tolist() == [4] * 5
    for name in ("code", "chat"):
        of = [number for number, prompt in zip(fold, trace.prompts, strict=True) if prompt.workload == name]
        assert np.bincount(of).tolist() == [2] * 5
    assert (fold == fold_of_prompts(trace.prompts, 5, seed=0)).all()
    assert (fold != fold_of_prompts(trace.prompts, 5, seed=1)).any()


def test_a_text_recorded_twice_is_one_observation(drawn: RankTrace) -> None:
    """FIELD-CASES 46: a repeated prompt tells nothing new, and never sits on both sides of a split."""
    twice = tuple(replace(p, digest=str(i // 2)) for i, p in enumerate(drawn.prompts))
    assert text_units(twice).tolist() == [i // 2 for i in range(20)]
    fold = fold_of_prompts(twice, 4, seed=0)
    assert (fold[::2] == fold[1::2]).all()
    found = assess(replace(drawn, prompts=twice), FLAT, settings())
    assert any("20 prompts are 10 distinct texts" in warning for warning in found.warnings)


def test_every_prompt_is_scored_once_by_a_tree_that_never_saw_it(drawn: RankTrace) -> None:
    seen: list[set[str]] = []
    ask = chosen_trees(settings())

    def procedure(part: ReplayJudge) -> tuple[Tree, ...]:
        seen.append({prompt.id for prompt in part.trace.prompts})
        return ask(part)

    fold = fold_of_prompts(drawn.prompts, 5, seed=0)
    held = hold_out(ReplayJudge.of(drawn, FLAT), procedure, fold)
    assert held is not None
    assert sorted(prompt.id for prompt in held.prompts) == sorted(prompt.id for prompt in drawn.prompts)
    for number, ids in enumerate(seen):
        assert ids == {p.id for p, of in zip(drawn.prompts, fold, strict=True) if of != number}
    assert held.tokens.sum() == len(drawn.ranks) == held.steps[0].sum()


def test_the_printed_figure_is_not_the_winners_own() -> None:
    """Twelve equal ranks, room for four: the ones that chance favours look better than any are."""
    trace = drawn_trace([[0.05] * 12], prompts=20, rows=20)
    found = assess(trace, None, settings(budget=5, objective="tokens-per-step"))
    honest = found.figures(TREE)
    assert honest is not None
    assert honest.tokens_per_step is not None
    assert honest.tokens_per_step.value < found.result[TREE].tokens_per_step - 0.03
    assert honest.tokens_per_step.interval.low < 1.2 < honest.tokens_per_step.interval.high  # type: ignore[union-attr]
    assert found.recommended == TREE


def test_one_prompt_gets_an_answer_and_no_interval() -> None:
    trace = trace_of([[0, 0, 0], [1, 0, 0], [0, 1, 0], [2, 2, 2], [0, 0, 1]])
    found = assess(trace, FLAT, settings())
    assert (found.held_out, found.over_plain, found.sure, found.prompts_to_halve) == (None, None, None, None)
    assert "One prompt: no interval" in found.warnings[0]
    assert found.assumptions.split == "none: a single prompt"


def test_the_same_question_has_the_same_answer(drawn: RankTrace) -> None:
    ask = settings(estimator="backoff", pick="one-se")
    one, other = assess(drawn, FLAT, ask), assess(drawn, FLAT, ask)
    assert (one.held_out, one.over_plain, one.result) == (other.held_out, other.over_plain, other.result)


def test_a_size_within_one_paired_error_is_taken(drawn: RankTrace) -> None:
    """The best size by replay is rarely the smallest as good; `best` turns the rule off, tokens per step has none."""
    best, smaller = (choose(ReplayJudge.of(drawn, FLAT), settings(budget=16, pick=p)) for p in ("best", "one-se"))
    assert smaller.trees[-1].num_draft_nodes <= best.trees[-1].num_draft_nodes
    ms = best.sizes.ms
    sums, top = ms.sum(axis=1), ms.sum(axis=1).argmin()
    for index in range(len(sums)):
        residual = ms[top] / ms[top].mean() - ms[index] / ms[index].mean()
        if np.log(sums[index] / sums[top]) <= residual.std(ddof=1) / np.sqrt(len(residual)):
            break
    assert smaller.trees[-1] == best.sizes.trees[index]
    full = choose(ReplayJudge.of(drawn, None), settings(budget=16, pick="one-se", objective="tokens-per-step"))
    assert full.trees[-1].num_draft_nodes == 15


def test_a_shortlist_finds_the_same_trees(drawn: RankTrace) -> None:
    judge = ReplayJudge.of(drawn, FLAT)
    assert choose(judge, settings(), shortlist=True).trees == choose(judge, settings()).trees


def test_refinement_never_takes_more_steps_on_the_prompts_it_saw(drawn: RankTrace) -> None:
    judge = ReplayJudge.of(drawn, FLAT)
    plain, recount, swaps = (choose(judge, settings(refine=r)).trees[-1] for r in ("none", "recount", "swaps"))
    steps = replay(drawn, [plain, recount, swaps]).steps
    assert steps[0] >= steps[1]
    assert steps[0] >= steps[2]


def test_unseen_paths_are_counted_by_prompt() -> None:
    """MATH 6: p0 repeats (1,); only it shows (1,) and (0, 2): 3 of 6 rows at depth 1, and rows of depth 2."""
    trace = trace_of([[1, 3], [1, 3], [1, 3]], [[0, 0], [0, 2], [0, 0]], resolved=3)
    shares = unseen_shares(trace, PrefixTable.of(trace), np.array([0, 1]))
    assert shares.tolist() == [1.0, pytest.approx(2 / 4)]  # (0,) is p1's alone; the last rows observe no depth 2
    same_text = unseen_shares(trace, PrefixTable.of(trace), np.array([0, 0]))
    assert same_text.tolist() == [1.0, pytest.approx(2 / 4)]


def test_paths_that_every_prompt_shows_are_not_unseen(drawn: RankTrace) -> None:
    shares = unseen_shares(drawn, PrefixTable.of(drawn), text_units(drawn.prompts))
    assert shares[0] == 0
    assert 0 <= shares[1] <= shares[2] < 0.2


def test_a_workloads_tree_loses_where_another_is_served() -> None:
    """Chat accepts rank 1, code rank 0: with one draft node each tree is useless on the other."""
    answer = {"chat": [[1]] * 12, "code": [[0]] * 12}
    trace = labelled(trace_of(*[answer[w] for w in ("chat", "code") * 3], resolved=2), "chat", "code")
    latency = latency_table({1: 10.0, 2: 10.0})
    rows = {row.workload: row for row in workload_rows(ReplayJudge.of(trace, latency), settings(budget=2))}
    assert rows["chat"].tree == Tree(((1,),))
    assert rows["code"].tree == Tree(((0,),))
    assert rows["chat"].tokens_per_step == rows["code"].tokens_per_step == 2.0
    assert rows["chat"].loss_on == {"code": pytest.approx(0.5)}
    assert rows["code"].loss_on == {"chat": pytest.approx(0.5)}
    assert workload_rows(ReplayJudge.of(labelled(trace, "chat"), latency), settings(budget=2)) == []


def test_heads_that_miss_cost_steps_and_name_their_break_even() -> None:
    """FIELD-CASES 55: acceptance near 0: p50 and p95 steps per answer, and what acceptance would pay."""
    rng = np.random.default_rng(0)
    answers = [[[0 if rng.random() < 0.02 else 2] for _ in range(20 + 5 * n)] for n in range(10)]
    found = assess(trace_of(*answers, resolved=2), latency_table({1: 10.0, 2: 13.0}), settings(budget=2))
    assert found.recommended == PLAIN
    chain = found.figures(CHAIN)
    assert chain is not None
    assert chain.break_even_tokens_per_step == pytest.approx(1.3)
    assert 30 <= chain.steps_per_answer_p50 <= 45  # type: ignore[operator]
    assert 55 <= chain.steps_per_answer_p95 <= 65  # type: ignore[operator]
    assert chain.faster_than_plain < 0.01  # type: ignore[operator]


def test_batch_is_read_from_the_table(drawn: RankTrace) -> None:
    """FIELD-CASES 28: the gain at batch 1 is gone at batch 8; one answer per batch, plain decoding among them."""
    latency = latency_table({1: 10.0, 2: 10.5, 3: 11.0, 4: 11.5})
    dear = {(8, 16, width): replace(timing, median_ms=10.0 * width) for (_, _, width), timing in latency.verify.items()}
    latency.verify.update(dear)
    latency.draft.update({(8, *cell): timing for (_, *cell), timing in latency.draft.items()})
    one, eight = (assess(drawn, latency, settings(budget=4, batch=batch)) for batch in (1, 8))
    assert one.recommended != PLAIN
    assert eight.recommended == PLAIN
    assert eight.result[PLAIN].tokens_per_s == pytest.approx(800)
    assert eight.assumptions.batch == 8
    with pytest.raises(InputError, match=r"no time at batch 4, only at 1, 8.*give --batch one of these"):
        assess(drawn, latency, settings(budget=4, batch=4))


def test_what_is_too_slow_for_folds_is_scored_on_prompts_held_out(drawn: RankTrace) -> None:
    wide = Tree(((0,), (1,), (2,)))
    chosen_on: list[str] = []

    def improve(judge: ReplayJudge, _: object) -> Tree:
        chosen_on.extend(prompt.id for prompt in judge.trace.prompts)
        return wide

    found = assess_improved(drawn, FLAT, settings(), improve)
    assert found.result[TREE].tree == wide
    assert len(chosen_on) == 16
    left_out = drawn.select(lambda prompt: prompt.id not in chosen_on)
    honest = found.figures(TREE)
    assert honest is not None
    assert honest.tokens_per_step is not None
    assert honest.tokens_per_step.value == pytest.approx(replay(left_out, [wide]).tokens_per_step[0])
    assert found.assumptions.split == "4 prompts held out from choosing"


def test_accuracies_alone_give_an_expectation() -> None:
    """FIELD-CASES 34: the tree's own depth by rank table, not a mean rate."""
    from topo_search.estimates import independent

    found = assess_accuracies(independent(TABLE_A, 64), latency_table({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}), settings(4))
    assert found.result[TREE].tree == Tree(((0,), (1,), (0, 0)))
    assert found.result[TREE].tokens_per_step == pytest.approx(1 + 0.6 + 0.15 + 0.24)
    assert found.result[CHAIN].tokens_per_step == pytest.approx(1 + 0.6 + 0.24 + 0.06)
    assert found.result[TREE].speedup == pytest.approx(1.99)
    assert (found.recommended, found.held_out) == (TREE, None)


@pytest.mark.parametrize("changes", [{"folds": 1}, {"max_depth": 0}, {"max_rank": -1}, {"batch": 0}, {"resamples": 1}])
def test_numbers_out_of_range_are_named(changes: dict[str, int]) -> None:
    with pytest.raises(InputError, match=next(iter(changes)).replace("_", " ")):
        settings(**changes)


def test_heads_that_pay_per_expanded_node_get_the_ratio_solvers_tree(drawn: RankTrace) -> None:
    """MATH 4: where expanding a second node costs half a step, the wide tree beats the sort's deep one."""

    def linear_draft(root: float, *per_node: float) -> dict[tuple[int, int], float]:
        return {(1, 1): root} | {
            (depth, n): root + n * sum(per_node[: depth - 1])
            for depth in range(2, len(per_node) + 2)
            for n in (1, 2, 4, 8)
        }

    judge = ReplayJudge.of(drawn, FLAT)
    dear = replace(judge, times=replace(judge.times, draft=DraftTimes(ms=linear_draft(0.1, 6.0, 6.0))))
    sorted_tree, found = choose(judge, settings()).trees[-1], choose(dear, settings()).trees[-1]
    assert sorted_tree.depth > 1
    costs = dear.times.costs(dear.context_weights, 3)
    best = fastest(joint(PrefixTable.of(drawn)), costs, num_draft_nodes=8)
    scores = dear.score([found, best.tree, sorted_tree])
    assert scores.tokens_per_ms[0] >= scores.tokens_per_ms[1] > scores.tokens_per_ms[2]
    assert scores.ms[1].sum() == pytest.approx(scores.steps[1].sum() * best.step_ms)


@pytest.mark.parametrize("changes", [{"max_rank": 2}, {"rule": "contiguous"}])
def test_refinement_keeps_neither_ranks_nor_rules(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="leave out --refine"):
        settings(refine="swaps", **changes)


def test_an_engines_rule_is_kept() -> None:
    """FIELD-CASES and MATH 3: rank 1 is likelier than rank 0, and an engine that wants contiguous ranks gets both."""
    trace = trace_of(*[[[1], [1], [0], [3]] * 5] * 4, resolved=3)
    judge = ReplayJudge.of(trace, FLAT)
    assert choose(judge, settings(2)).trees[-1] == Tree(((1,),))
    assert choose(judge, settings(2, rule="contiguous")).trees[-1] == Tree(((0,),))
    assert choose(judge, settings(3, rule="contiguous")).trees[-1] == Tree(((0,), (1,)))
    assert choose(judge, settings(4, rule="uniform", objective="tokens-per-step")).trees[-1].is_chain is False


def test_caps_are_kept(drawn: RankTrace) -> None:
    found = choose(
        ReplayJudge.of(drawn, FLAT), settings(budget=16, max_depth=2, max_rank=1, objective="tokens-per-step")
    )
    assert found.trees[-1].depth == 2
    assert found.trees[-1].max_rank == 1
    assert found.trees[1] == Tree.chain(2)
    assert len(NAMES) == len(found.trees)


def test_the_judge_of_some_prompts_is_that_of_their_own_trace(drawn: RankTrace) -> None:
    """Counted and walked among the numbers of the whole trace, chosen as if the others had never been recorded."""
    kept = np.arange(20) % 3 > 0
    alone = ReplayJudge.of(drawn.of_prompts(kept), FLAT)
    among = ReplayJudge.of(drawn, FLAT).among(kept)
    for estimator in ("joint", "backoff", "independent"):
        one, other = (choose(judge, settings(16, estimator=estimator)) for judge in (alone, among))
        assert one.sizes.trees == other.sizes.trees
        assert one.alternatives.trees == other.alternatives.trees
        assert (one.alternatives.counts == other.alternatives.counts).all()
