"""Calibration: ranks by definition, files that continue, and traces that replay to what the decoder does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import closed, trace_of
from folders import word_tokenizer
from models import NEW_TOKENS, PROMPTS, TREES, encoded, heads_of, plain_text, target_of, tiny_heads

from topo_search import calibrate as calibrate_module
from topo_search.accuracy import depth_accuracies, near_chance_heads
from topo_search.answers import Answer, answer_batch
from topo_search.calibrate import (
    EncodedPrompt,
    calibrate,
    constant_heads,
    empty_trace,
    encode_prompts,
    trace_of_answers,
    true_ranks,
)
from topo_search.decode.decoder import TreeDecoder
from topo_search.errors import InputError, MismatchError
from topo_search.files.prompts import Prompt
from topo_search.files.trace_file import read_trace
from topo_search.heads.medusa import MedusaHeads
from topo_search.replay import replay
from topo_search.target import Target
from topo_search.trace import PAST_END, RankTrace
from topo_search.tree import Tree

TARGET, HEADS = target_of("llama"), heads_of("llama")
TEXTS = [plain_text("llama", prompt).tokens for prompt in PROMPTS]
LATER = (TEXTS[0][10], TEXTS[2][3])  # ends some answers early, others not at all
FIRST = (TEXTS[1][0],)  # one answer is over as soon as it begins


def ended(ids: tuple[int, ...]) -> Target:
    """The tiny target with other end-of-text ids."""
    return replace(TARGET, eos_token_ids=ids)


def recorded(target: Target, *, cap: int = NEW_TOKENS, prompts: Sequence[tuple[int, ...]] = PROMPTS) -> RankTrace:
    answers = answer_batch(target, prompts, max_new_tokens=cap)
    return trace_of_answers(empty_trace(target, HEADS, max_new_tokens=cap), HEADS, encoded(*prompts), answers)


# Ranks


def by_definition(answer: Answer, heads: MedusaHeads, resolved: int) -> list[list[int]]:
    """r_k of row j = larger scores + equal ones with a smaller id than y_{j+k}, in the list of depth k."""
    rows, depth = len(answer.tokens) - 1, heads.identity.num_heads
    table = [[PAST_END] * depth for _ in range(rows)]
    for j in range(rows):
        scores = heads.scores(answer.states[j : j + 1], depth)[:, 0].tolist()
        for k in range(1, depth + 1):
            if j + k < len(answer.tokens):
                true = answer.tokens[j + k]
                own = scores[k - 1][true]
                rank = sum(other > own or (other == own and i < true) for i, other in enumerate(scores[k - 1]))
                table[j][k - 1] = min(rank, resolved)
    return table


@pytest.mark.parametrize("resolved", [1, 3, 32, 61])
def test_ranks_and_sentinels_are_those_of_the_definition(resolved: int) -> None:
    seen = set()
    for answer in answer_batch(TARGET, PROMPTS, max_new_tokens=12):
        ranks = true_ranks(HEADS, answer.states, torch.tensor(answer.tokens), resolved)
        assert ranks.tolist() == by_definition(answer, HEADS, resolved)
        seen |= set(ranks.flatten().tolist())
    assert PAST_END in seen
    assert (resolved in seen) == (resolved < 32)


def test_tied_scores_rank_by_lower_id() -> None:
    """MATH 1, tie rule: heads that score every token alike rank it by its id."""
    heads = tiny_heads(TARGET)
    heads.blocks.projection.zero_()
    answer = answer_batch(TARGET, [PROMPTS[0]], max_new_tokens=9)[0]
    ranks = true_ranks(heads, answer.states, torch.tensor(answer.tokens), 61)
    assert ranks[:, 0].tolist() == list(answer.tokens[1:])


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 130])
def test_long_answers_are_ranked_in_parts(rows: int) -> None:
    states, tokens = torch.randn(rows + 1, 64, dtype=torch.float64), torch.randint(0, 61, (rows + 1,))
    answer = Answer(prompt_index=0, tokens=tuple(tokens.tolist()), end="cap", states=states)
    assert true_ranks(HEADS, states, tokens, 32).tolist() == by_definition(answer, HEADS, 32)


def test_an_answer_of_one_token_has_no_row() -> None:
    assert true_ranks(HEADS, torch.randn(1, 64, dtype=torch.float64), torch.tensor([3]), 32).shape == (0, 4)


def test_nothing_after_the_end_of_text_is_recorded() -> None:
    """FIELD-CASES 40: an answer of three tokens and its end has three rows, whatever the cap."""
    trace = recorded(ended((TEXTS[2][3],)), prompts=PROMPTS[2:3], cap=20)
    assert (trace.prompts[0].answer_tokens, trace.prompts[0].end) == (4, "eos")
    assert (trace.ranks != PAST_END).sum(axis=1).tolist() == [3, 2, 1]


# Replay


@cache
def random_trees() -> dict[str, Tree]:
    draw = random.Random(0)
    drawn = {}
    for number in range(20):
        paths = [tuple(draw.choices(range(6), k=draw.randint(1, 4))) for _ in range(draw.randint(0, 12))]
        drawn[f"random-{number}"] = closed(paths)
    return drawn


def assert_replay_is_the_decoder(target: Target, cap: int, trees: dict[str, Tree]) -> set[int]:
    """Accepted tokens of every step of every prompt and tree, by both."""
    walks, found = replay(recorded(target, cap=cap), trees.values()), set()
    for index, tree in enumerate(trees.values()):
        decoder = TreeDecoder(target, HEADS, tree, capacity=64, run_probe=False)
        decoded = [list(decoder.generate(prompt, max_new_tokens=cap).accepted) for prompt in PROMPTS]
        assert walks.accepted(index) == decoded
        found |= {length for steps in decoded for length in steps}
    return found


@pytest.mark.parametrize("cap", [1, 2, 3, 7, NEW_TOKENS])
@pytest.mark.parametrize("ends", [(), LATER, FIRST], ids=["no end", "later", "first"])
def test_replay_is_the_decoder_step_for_step(cap: int, ends: tuple[int, ...]) -> None:
    """MATH 1; ends of text inside paths, as the target's own choice and as first token, and every cap."""
    found = assert_replay_is_the_decoder(ended(ends), cap, TREES)
    if (cap, ends) == (NEW_TOKENS, ()):
        assert found == {0, 1, 2, 3, 4}


def test_twenty_random_trees_replay_as_they_decode() -> None:
    """FIELD-CASES 37: one recorded trace gives the accepted lengths of any tree."""
    assert {0, 1, 2, 3} <= assert_replay_is_the_decoder(ended(LATER), 20, random_trees())


def test_the_ends_of_these_tests_fall_everywhere() -> None:
    """As the first token, later and never: else the tests above would prove less."""
    first, later = (recorded(ended(ends)).prompts for ends in (FIRST, LATER))
    assert 1 in {prompt.answer_tokens for prompt in first}
    assert {prompt.end for prompt in first} == {prompt.end for prompt in later} == {"eos", "cap"}


# Files


def calibrated(out: Path, prompts: Sequence[EncodedPrompt], **settings: object) -> RankTrace:
    return calibrate(TARGET, HEADS, prompts, out=out, max_new_tokens=10, batch_size=2, **settings).trace  # type: ignore[arg-type]


def test_the_file_is_the_trace(tmp_path: Path) -> None:
    out = tmp_path / "t.trace.safetensors"
    calls: list[tuple[int, int, int]] = []
    trace = calibrated(out, encoded(*PROMPTS), provenance={"by": "test"}, progress=lambda *done: calls.append(done))
    stored = read_trace(out)
    assert np.array_equal(stored.ranks, trace.ranks)
    assert stored.prompts == trace.prompts
    assert (stored.target, stored.heads) == (TARGET.identity, HEADS.identity)
    assert (stored.resolved_ranks, stored.max_new_tokens) == (32, 10)
    assert stored.provenance == {"by": "test"}
    assert [prompt.id for prompt in stored.prompts] == ["p0", "p1", "p2", "p3"]
    assert [prompt.prompt_tokens for prompt in stored.prompts] == [len(prompt) for prompt in PROMPTS]
    assert np.array_equal(trace.ranks, recorded(TARGET, cap=10).ranks)
    assert calls == [(2, 4, 18), (4, 4, 36)]
    assert list(tmp_path.iterdir()) == [out]


def test_an_interrupted_run_continues_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, out = tmp_path / "whole.trace.safetensors", tmp_path / "t.trace.safetensors"
    calibrated(whole, encoded(*PROMPTS))

    def kill(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrated(out, encoded(*PROMPTS), progress=kill)
    assert not out.exists()
    batches: list[int] = []

    def spy(target: Target, prompts: Sequence[Sequence[int]], **settings: Any) -> list[Answer]:
        batches.append(len(prompts))
        return answer_batch(target, prompts, **settings)

    monkeypatch.setattr(calibrate_module, "answer_batch", spy)
    calibrated(out, encoded(*PROMPTS))
    assert batches == [2]
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.trace.safetensors", "whole.trace.safetensors"]
    calibrated(out, encoded(*PROMPTS))
    assert batches == [2]  # a finished trace is not run again


def test_a_finished_trace_is_extended_by_new_prompts(tmp_path: Path) -> None:
    out, whole = tmp_path / "t.trace.safetensors", tmp_path / "whole.trace.safetensors"
    calibrated(out, encoded(*PROMPTS[:2]))
    extended = calibrated(out, encoded(*PROMPTS))
    assert [prompt.id for prompt in extended.prompts] == ["p0", "p1", "p2", "p3"]
    calibrated(whole, encoded(*PROMPTS))
    assert out.read_bytes() == whole.read_bytes()


def test_prompts_that_are_not_asked_for_again_stay(tmp_path: Path) -> None:
    out = tmp_path / "t.trace.safetensors"
    first = calibrated(out, encoded(*PROMPTS))
    again = calibrated(out, encoded(*PROMPTS)[2:])
    assert [prompt.id for prompt in again.prompts] == ["p2", "p3", "p0", "p1"]
    assert len(again.ranks) == len(first.ranks)


@pytest.mark.parametrize("unfinished", [False, True])
def test_a_trace_of_another_identity_is_refused(unfinished: bool, tmp_path: Path) -> None:
    """FIELD-CASES 30: one prompt set, two targets, one file: never carried over silently."""
    out = tmp_path / "t.trace.safetensors"
    calibrated(out, encoded(*PROMPTS))
    if unfinished:
        out.rename(tmp_path / "t.trace.safetensors.part")
    other = replace(TARGET, identity=replace(TARGET.identity, dtype="bfloat16"))
    with pytest.raises(MismatchError, match=r"cannot be continued.*dtype is 'float64', not 'bfloat16'.*another --out"):
        calibrate(other, HEADS, encoded(*PROMPTS), out=out, max_new_tokens=10)
    with pytest.raises(MismatchError, match=r"cannot be continued.*max_new_tokens is 10, not 11"):
        calibrate(TARGET, HEADS, encoded(*PROMPTS), out=out, max_new_tokens=11)


def test_changed_text_under_an_old_id_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "t.trace.safetensors"
    calibrated(out, encoded(*PROMPTS))
    with pytest.raises(MismatchError, match="Prompt p1 was calibrated with other text before"):
        calibrated(out, encoded(PROMPTS[0], (5, 9, 7, 11, 21)))


# Heads that cannot help


def test_constant_heads_are_flagged() -> None:
    """FIELD-CASES 54: a head that always proposes the same token only costs time."""
    heads = tiny_heads(TARGET)
    heads.blocks.projection[1].zero_()  # head 2: every score equal, so always token 0
    answers = answer_batch(TARGET, PROMPTS, max_new_tokens=10)
    assert constant_heads(heads, answers) == [2]
    assert constant_heads(HEADS, answers) == []
    assert constant_heads(heads, [replace(answers[0], tokens=answers[0].tokens[:1])]) == []


def test_calibration_names_constant_heads(tmp_path: Path) -> None:
    """FIELD-CASES 54."""
    heads = tiny_heads(TARGET)
    heads.blocks.projection[[0, 3]] = 0.0
    found = calibrate(TARGET, heads, encoded(*PROMPTS), out=tmp_path / "t.trace.safetensors", max_new_tokens=10)
    assert found.constant_heads == (1, 4)


def test_heads_near_chance_are_flagged() -> None:
    """FIELD-CASES 54: a near-uniform head finds the true token as often as guessing does."""
    rng = np.random.default_rng(0)
    rows = np.stack([rng.integers(0, 12, 400), np.minimum(rng.integers(0, 1000, 400), 32)], axis=1)
    assert near_chance_heads(trace_of(rows.tolist(), resolved=32), 1000) == [2]


def test_accuracies_count_observed_rows_only() -> None:
    """Over all rows, and over those whose shallower ranks were all 0."""
    first, second = depth_accuracies(trace_of([[0, 0], [0, 2], [1, 0], [3, 3]]))
    assert (first.observed, second.observed) == (4, 3)
    assert first.accuracy == (0.5, 0.75, 0.75, 1.0, 1.0)
    assert second.accuracy == (2 / 3, 2 / 3, 1.0, 1.0, 1.0)
    assert second.on_path == 2
    assert second.accuracy_given_path == (0.5, 0.5, 1.0, 1.0, 1.0)


# Prompts


def chat(content: str) -> Prompt:
    return Prompt(id="one", workload="chat", split=None, messages=({"role": "user", "content": content},), text=None)


def raw(text: str) -> Prompt:
    return Prompt(id="one", workload="chat", split=None, messages=None, text=text)


def test_chats_go_through_the_template_and_raw_text_does_not() -> None:
    target = replace(TARGET, tokenizer=word_tokenizer())
    assert encode_prompts(target, [chat("w1 w2")], max_new_tokens=4)[0].tokens == (2, 6, 7, 4)
    assert encode_prompts(target, [raw("w1 w2")], max_new_tokens=4)[0].tokens == (6, 7)


def test_digests_follow_the_tokens() -> None:
    one, other = encoded((1, 2), (1, 3))
    assert one.digest != other.digest
    assert one.digest == replace(one, id="renamed").digest


def test_a_chat_without_a_template_names_both_ways_out() -> None:
    """FIELD-CASES 80."""
    target = replace(TARGET, tokenizer=word_tokenizer(chat_template=None))
    message = r"tokenizer of llama has no chat template. Use an instruct model .* or give raw text rows"
    with pytest.raises(InputError, match=message):
        encode_prompts(target, [chat("w1")], max_new_tokens=4)
    assert encode_prompts(target, [raw("w1")], max_new_tokens=4)


@pytest.mark.parametrize(
    ("prompts", "cap", "message"),
    [
        ([], 4, "No prompt is left to run"),
        ([raw(" ")], 4, "Prompt one has no token"),
        (
            [raw("w1 " * 1000)],
            25,
            "Prompt one has 1000 tokens; with 25 new ones it exceeds the target's context of 1024",
        ),
    ],
)
def test_prompts_that_cannot_be_answered_are_refused(prompts: list[Prompt], cap: int, message: str) -> None:
    target = replace(TARGET, tokenizer=word_tokenizer())
    with pytest.raises(InputError, match=message):
        encode_prompts(target, prompts, max_new_tokens=cap)
