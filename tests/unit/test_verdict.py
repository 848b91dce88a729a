"""What `optimize` tells people to use, in words, and in JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import TABLE_A, drawn_trace, latency_table, trace_of

from topo_search.cli.optimized import answer_json
from topo_search.cost import LatencyTable
from topo_search.identity import RuleIdentity
from topo_search.search.assess import Assessment, assess
from topo_search.search.choose import Settings
from topo_search.search.verdict import basis, verdict
from topo_search.trace import RankTrace

TRACE = drawn_trace(TABLE_A, prompts=12, rows=40)
CHEAP = latency_table({width: 10 + 0.2 * width for width in range(1, 17)})
DEAR = latency_table({width: 10.0 * width for width in range(1, 17)})


def answer(latency: LatencyTable | None, trace: RankTrace = TRACE, **changes: Any) -> Assessment:
    return assess(trace, latency, Settings(**({"budget": 9, "resamples": 100} | changes)))


@pytest.mark.parametrize(
    ("latency", "changes", "words"),
    [
        (CHEAP, {}, ["Recommended: best tree", "times (95 % interval", "plain decoding", "the chain", "% sure"]),
        (DEAR, {}, ["Recommended: plain decoding", "earns its cost"]),
        (CHEAP, {"budget": 1}, ["no tree could be tried", "--budget", "topo-search measure"]),
        (latency_table({1: 10.0}), {}, ["no other width within the budget has a time", "topo-search measure"]),
        (None, {"objective": "tokens-per-step"}, ["Asked for tokens per step", "Width 9 has no time"]),
        (None, {"objective": "tokens-per-step", "budget": 1}, ["plain decoding, 1 token per step", "Raise --budget"]),
        (DEAR, {"objective": "tokens-per-step"}, ["Asked for tokens per step", "so plain decoding is faster"]),
    ],
)
def test_the_verdict_says_what_it_rests_on(
    latency: LatencyTable | None, changes: dict[str, Any], words: list[str]
) -> None:
    said = verdict(answer(latency, **changes))
    for word in words:
        assert word in said, said


def test_the_verdict_names_batch_context_rule_and_temperature() -> None:
    """FIELD-CASES 28 and 41: no result without them."""
    warm = replace(TRACE, rule=RuleIdentity(rule="gumbel", temperature=0.7, seed=3))
    assert "batch 1, contexts of 10 to 49 tokens, timed at 16, greedy acceptance at temperature 0" in verdict(
        answer(CHEAP)
    )
    assert "gumbel acceptance at temperature 0.7" in verdict(answer(CHEAP, warm))


def test_every_assumption_is_stated() -> None:
    found = answer(CHEAP, seed=7, max_depth=2)
    said = basis(found.assumptions, found.result.settings)
    for word in (
        "estimator backoff",
        "12 prompts, 480 positions",
        "5 folds by prompt",
        "rule any, refine none, max depth 2",
        "one-se",
        "seed 7",
    ):
        assert word in said


def test_one_prompt_is_said_and_no_interval_is_given() -> None:
    found = answer(CHEAP, trace_of([[0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]]))
    assert "by its own score" in verdict(found)
    row = answer_json(found, {}, None)
    assert row["warnings"][0].startswith("One prompt: no interval")
    assert (row["tokens_per_step"], row["intervals"]) == (None, None)
    assert row["tokens_per_step_own"] > 1


def test_a_wide_interval_asks_for_prompts() -> None:
    few = drawn_trace(TABLE_A, prompts=4, rows=10)
    assert "scored prompts would halve it" in " ".join(answer(CHEAP, few).warnings)


def test_a_table_in_which_more_costs_less_is_doubted() -> None:
    disturbed = latency_table({1: 12.0, **{width: 10 + 0.2 * width for width in range(2, 17)}})
    assert "a wider step takes less time than plain decoding's" in " ".join(answer(disturbed).warnings)
    assert not answer(CHEAP).warnings or "wider step" not in " ".join(answer(CHEAP).warnings)


def test_json_repeats_the_question() -> None:
    row = answer_json(answer(CHEAP, max_depth=2), {}, None, warnings=["one"])
    asked = {name: row["settings"][name] for name in ("budget", "objective", "rule", "refine", "max_depth", "max_rank")}
    assert asked == {
        "budget": 9,
        "objective": "throughput",
        "rule": "any",
        "refine": "none",
        "max_depth": 2,
        "max_rank": None,
    }
    assert row["warnings"] == ["one"]


def test_json_keeps_its_keys_and_holds_no_nan() -> None:
    found = answer(CHEAP)
    row = answer_json(found, {"best tree": Path("best-tree.tree.json")}, None)
    keys = ("name", "tree_file", "paths", "num_draft_nodes", "verify_width", "depth", "tokens_per_step")
    keys += ("tokens_per_step_all_positions", "step_ms", "tokens_per_s", "speedup")
    for alternative in row["alternatives"]:
        assert set(keys) <= set(alternative)
    assert {key: row[key] for key in keys} == {
        key: alternative[key]
        for alternative in row["alternatives"]
        if alternative["name"] == row["recommended"]
        for key in keys
    }
    assert row["tokens_per_s"] == pytest.approx(1000 * row["tokens_per_step"] / row["step_ms"])
    low, high = row["intervals"]["speedup"]["interval"]
    assert low < row["speedup"] < high
    json.dumps(row, allow_nan=False)
    assert row["assumptions"]["law"]
    no_times = answer_json(answer(None, objective="tokens-per-step"), {}, None)
    assert (no_times["step_ms"], no_times["speedup"], no_times["tokens_per_s"]) == (None, None, None)
    json.dumps(no_times, allow_nan=False)
