"""The arithmetic of `benchmarks/typical.py` and `benchmarks/topologies.py`, where tables are made from it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from factories import drawn_trace
from models import PROMPTS, TREES, encoded, heads_of, target_of

from topo_search.decode.decoder import TreeDecoder
from topo_search.decode.sampling import filtered
from topo_search.decode.typical import Acceptable
from topo_search.identity import sampling_rule, typical_rule
from topo_search.tree import Tree

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import topologies
import typical

TARGET, HEADS = target_of("llama"), heads_of("llama")


def test_exact_sampling_has_moved_nothing() -> None:
    rule = sampling_rule(temperature=0.7, seed=4)
    prompt = encoded(PROMPTS[1])[0]
    decoder = TreeDecoder(TARGET, HEADS, TREES["dense"], capacity=48, run_probe=False)
    found = decoder.generate(prompt.tokens, max_new_tokens=20, rule=rule, request=prompt.request)
    moved = typical.moved_law(TARGET, prompt, found.tokens, [], rule, seed=4)
    assert (moved["divergence"], moved["certain_other"], moved["other"]) == (0, 0, 0)
    assert moved["log_prob"] < 0


@pytest.mark.parametrize("bonus", ["sampled", "greedy"])
def test_the_moved_law_is_that_of_the_tokens_taken(bonus: str) -> None:
    """Token by token against plain forward passes: certain tokens count by their probability, drawn ones not at all."""
    rule = typical_rule(temperature=0.7, epsilon=0.05, delta=0.3, seed=4, bonus=bonus)
    prompt = encoded(PROMPTS[3])[0]
    decoder = TreeDecoder(TARGET, HEADS, TREES["medusa-63"], capacity=48, run_probe=False)
    seen: list[Acceptable] = []
    found = decoder.generate(prompt.tokens, max_new_tokens=20, rule=rule, request=prompt.request, observe=seen.append)
    drafted = typical.taken(found.accepted, seen)
    assert len(drafted) == len(found.tokens)
    assert 0 < sum(drafted) < len(drafted)
    moved = typical.moved_law(TARGET, prompt, found.tokens, drafted, rule, seed=4)
    wanted = 0.0
    for place, (token, is_drafted) in enumerate(zip(found.tokens, drafted, strict=True)):
        with torch.inference_mode():
            text = torch.tensor([[*prompt.tokens, *found.tokens[:place]]])
            scores = TARGET.logits(TARGET.hidden_states(text)[0, -1:])
        law = torch.softmax(filtered(scores, sampling_rule(temperature=0.7)), dim=-1)[0]
        wanted -= float(law[token].log()) if is_drafted or bonus == "greedy" else 0.0
    assert moved["divergence"] == pytest.approx(wanted)
    if bonus == "sampled":
        drawn = sum(drafted)  # only taken drafts can differ from the exact draw
        assert moved["other"] <= drawn


def test_a_wide_tree_beats_a_deep_one_where_depth_never_hits() -> None:
    """Depth 2 on never hits, depth 1 spreads over five ranks: the comparison must say so, with an interval above 1."""
    flat = drawn_trace([[0.2] * 5, [0.0] * 5, [0.0] * 5, [0.0] * 5], prompts=12, rows=20)
    traces = {(workload, t): flat for workload in topologies.WORKLOADS for t in (0.0, 1.0)}
    claims = topologies.guide_shapes(traces)
    assert [claim["answer"] for claim in claims[:2]] == ["more", "more"]
    assert claims[2]["question"].startswith("the same ratio at temperature 1 over that at 0")
    assert claims[2]["value"] == pytest.approx(1.0)
    assert claims[2]["interval"] == pytest.approx([1.0, 1.0])  # the same prompts: nothing is left to differ
    assert claims[3]["answer"] == "less"


def test_shapes_are_searched_again_and_cells_are_tabled() -> None:
    deep = drawn_trace([[0.9, 0.02]] * 4, prompts=8, rows=20)
    wide = drawn_trace([[0.3, 0.3]] + [[0.05, 0.05]] * 3, prompts=8, rows=20, seed=1)
    traces = {(w, t): wide if t else deep for w in topologies.WORKLOADS for t in (0.0, 1.0)}
    found = topologies.best_shapes(traces, topologies.settings_of(4), 3)
    by_question = {claim["question"]: claim for claim in found}
    assert by_question["mean_depth at width 4: temperature 1 less 0"]["answer"] == "less"
    assert by_question["width_at_1 at width 4: temperature 1 less 0"]["value"] > 0
    rows = topologies.cell_rows(traces, None, topologies.settings_of(4))  # type: ignore[arg-type]
    assert rows[0]["depth"] == 3
    assert rows[0]["tokens_per_step"]["low"] < rows[0]["tokens_per_step"]["value"]
    page = topologies.markdown({"cells": {"width 4": rows}, "claims": found})
    assert page.count("\n| chat |") == 2
    assert "no measurable difference" in page


def test_shapes_count_what_they_say() -> None:
    shape = topologies.Shape.of(Tree.dense([3, 2]))
    assert (shape.depth, shape.width_at_1, shape.nodes) == (2, 3, 9)
    assert shape.mean_branching == pytest.approx(9 / 4)
    assert shape.mean_depth == pytest.approx(15 / 9, abs=1e-3)
    resampled = topologies.resampled(drawn_trace([[0.5]], prompts=3, rows=4), np.array([2, 2, 0]))
    assert [prompt.rows for prompt in resampled.prompts] == [4, 4, 4]
