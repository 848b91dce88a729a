"""Batched, left-padded answers: each is what the prompt alone gives, and so are the states that chose its tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import NEW_TOKENS, PROMPTS, plain_text, target_of

from topo_search.answers import answer_batch, batches_by_length
from topo_search.compare import teacher_forced
from topo_search.reference import generate_plain

EXACT = ("llama", "mistral", "gemma3", "gpt2")  # in float64 throughout


@pytest.mark.parametrize("architecture", EXACT)
def test_batched_answers_are_those_of_each_prompt_alone(architecture: str) -> None:
    """FIELD-CASES 70, 72: prompts of lengths 3, 5, 2 and 1, so every row but one is padded."""
    target = target_of(architecture)
    together = answer_batch(target, PROMPTS, max_new_tokens=NEW_TOKENS)
    for index, (prompt, answer) in enumerate(zip(PROMPTS, together, strict=True)):
        alone = answer_batch(target, [prompt], max_new_tokens=NEW_TOKENS)[0]
        assert answer.prompt_index == index
        assert answer.tokens == alone.tokens == plain_text(architecture, prompt).tokens
        assert torch.allclose(answer.states, alone.states, rtol=0, atol=1e-9)


@pytest.mark.parametrize("architecture", EXACT)
def test_states_are_those_that_chose_the_tokens(architecture: str) -> None:
    """Draft heads read them: row j chose y_j. A forward pass over the whole text must give the same."""
    target = target_of(architecture)
    for prompt, answer in zip(PROMPTS, answer_batch(target, PROMPTS, max_new_tokens=NEW_TOKENS), strict=True):
        forced = teacher_forced(target, prompt, answer.tokens, index=0, end="cap")
        assert answer.states.shape == (NEW_TOKENS, target.hidden_size)
        assert torch.allclose(answer.states, forced.states, rtol=0, atol=1e-9)
        assert tuple(target.choose(answer.states).tolist()) == answer.tokens


@pytest.mark.parametrize("architecture", EXACT)
def test_rows_end_at_their_own_end_of_text(architecture: str) -> None:
    """FIELD-CASES 3, 40: the batch shrinks, the rows that go on are not disturbed, nothing follows an end."""
    ends = tuple({plain_text(architecture, prompt).tokens[3 + 4 * i] for i, prompt in enumerate(PROMPTS[:3])})
    target = replace(target_of(architecture), eos_token_ids=ends)
    answers = answer_batch(target, PROMPTS, max_new_tokens=NEW_TOKENS)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        plain = generate_plain(target, prompt, max_new_tokens=NEW_TOKENS)
        assert (answer.tokens, answer.end) == (plain.tokens, plain.end)
        assert len(answer.states) == len(answer.tokens)
        assert not set(answer.tokens[:-1]) & set(ends)
    assert len({len(answer.tokens) for answer in answers}) > 1


def test_the_cap_is_exact_and_an_end_on_the_cap_is_an_end() -> None:
    free = plain_text("llama", PROMPTS[0]).tokens
    target = replace(target_of("llama"), eos_token_ids=(free[4],))
    for cap, end in ((1, "cap"), (4, "cap"), (5, "eos"), (6, "eos")):
        answer = answer_batch(target, [PROMPTS[0]], max_new_tokens=cap)[0]
        assert (answer.tokens, answer.end) == (free[: min(cap, 5)], end)


def test_batches_hold_prompts_of_like_length_longest_first() -> None:
    assert batches_by_length([3, 9, 1, 9, 4], 2) == [[1, 3], [4, 0], [2]]
    assert batches_by_length([], 2) == []
