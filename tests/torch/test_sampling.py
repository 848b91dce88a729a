"""Lossless sampling: transformers' filters, the target's law, and one text per seed whatever verifies it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from models import PROMPTS, TREES, VOCAB, encoded, heads_of, target_of
from scipy import stats
from transformers.generation import logits_process

from topo_search.answers import answer_batch
from topo_search.calibrate import empty_trace, trace_of_answers
from topo_search.decode.decoder import TreeDecoder
from topo_search.decode.habits import TreeGenerator
from topo_search.decode.sampling import choose, filtered
from topo_search.errors import InputError
from topo_search.identity import GREEDY, RuleIdentity, sampling_rule
from topo_search.reference import generate_plain
from topo_search.replay import replay
from topo_search.tree import Tree

TARGET, HEADS = target_of("llama"), heads_of("llama")
CAP, GRID_CAP = 24, 6
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "all": {"top_k": 12, "top_p": 0.9, "min_p": 0.02},
}
GRID_TREES = ("chain", "dense", "sparse", "medusa-63")


@cache
def decoder_of(tree: str) -> TreeDecoder:
    return TreeDecoder(TARGET, HEADS, TREES[tree], capacity=64, run_probe=False)


def plain(prompt: tuple[int, ...], rule: RuleIdentity, *, request: int = 0, cap: int = CAP) -> tuple[int, ...]:
    return decoder_of("empty").generate(prompt, max_new_tokens=cap, rule=rule, request=request).tokens


# Filters


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("filters", FILTERS)
def test_filters_are_those_of_transformers(filters: str, temperature: float) -> None:
    settings = FILTERS[filters]
    scores = 3 * torch.randn(16, 200)
    expected = logits_process.TemperatureLogitsWarper(temperature)(None, scores)
    if "top_k" in settings:
        expected = logits_process.TopKLogitsWarper(settings["top_k"])(None, expected)
    if "top_p" in settings:
        expected = logits_process.TopPLogitsWarper(settings["top_p"])(None, expected)
    if "min_p" in settings:
        expected = logits_process.MinPLogitsWarper(settings["min_p"])(None, expected)
    assert torch.equal(filtered(scores, sampling_rule(temperature=temperature, **settings)), expected)


def test_ids_that_the_tokenizer_lacks_are_never_drawn() -> None:
    """FIELD-CASES 79: minus infinity plus any noise stays minus infinity."""
    scores = torch.full((400, 40), float("-inf"))
    scores[:, :2] = 0.0
    positions = torch.arange(400)
    drawn = choose(scores, sampling_rule(temperature=5.0), positions=positions, requests=torch.zeros_like(positions))
    assert set(drawn.tolist()) == {0, 1}


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be 0 .greedy. or above"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p is 1.1"),
        ({"temperature": 1.0, "top_p": float("nan")}, "top_p is nan"),
        ({"temperature": 1.0, "top_k": -1}, "top_k is -1; it must be at least 1"),
        ({"temperature": 1.0, "min_p": 1.5}, "min_p is 1.5; it must lie between 0 and 1"),
        ({"temperature": 1.0, "seed": -1}, "seed is -1; it must lie between 0 and"),
        ({"temperature": 1.0, "noise_share": -1.0}, "noise_share is -1.0; it must be 0 or above"),
        ({"temperature": 0.0, "top_p": 2.0}, "top_p is 2.0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sampling_rule(**settings)


def test_equal_behaviour_is_one_rule() -> None:
    assert sampling_rule(temperature=0.0, top_k=5, seed=3) == GREEDY
    neutral = sampling_rule(temperature=0.7, top_k=0, top_p=1.0, min_p=0.0)
    assert neutral == sampling_rule(temperature=0.7)
    assert (neutral.rule, neutral.noise) == ("sample", "philox4x32-10 gumbel 1")


# One text per seed


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tree_text_is_plain_text_is_that_of_generate(temperature: float, seed: int, filters: str) -> None:
    """MATH 2.1: the draw is transformers' own warpers plus the noise of the place, at any node of any tree."""
    rule = sampling_rule(temperature=temperature, seed=seed, **FILTERS[filters])
    for request, prompt in enumerate(PROMPTS[:2]):
        reference = generate_plain(TARGET, prompt, max_new_tokens=CAP, rule=rule, request=request)
        assert plain(prompt, rule, request=request) == reference.tokens
        for tree in GRID_TREES:
            answer = decoder_of(tree).generate(prompt, max_new_tokens=CAP, rule=rule, request=request)
            assert answer.tokens == reference.tokens
            assert sum(answer.accepted) + len(answer.accepted) == CAP - 1


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("filters", ["none", "all"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_padded_batches_write_what_each_prompt_writes_alone(temperature: float, filters: str, side: str) -> None:
    """The whole grid: greedy and two temperatures, three seeds, filters, four trees, batch 1 and 4, either padding."""
    ids, mask = padded(PROMPTS, side)
    width = ids.shape[1]
    for seed in (0, 1, 2) if temperature else (0,):
        given: dict[str, Any] = {"temperature": temperature, "seed": seed, "do_sample": True, **FILTERS[filters]}
        given = {"max_new_tokens": GRID_CAP} | (given if temperature else {})
        rule = sampling_rule(temperature=temperature, seed=seed, **FILTERS[filters]) if temperature else GREEDY
        alone = [list(plain(p, rule, request=number, cap=GRID_CAP)) for number, p in enumerate(PROMPTS)]
        for tree in GRID_TREES:
            generator = TreeGenerator(decoder_of(tree))
            found = generator.generate(ids, mask, **given)[:, width:].tolist()
            assert found == alone
            assert generator.generate(ids[:1], mask[:1], **given)[0, width:].tolist() == alone[0]


def padded(prompts: Sequence[Sequence[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(prompt) for prompt in prompts)
    ids, mask = torch.zeros(2, len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        start = longest - len(prompt) if side == "left" else 0
        ids[row, start : start + len(prompt)] = torch.tensor(prompt)
        mask[row, start : start + len(prompt)] = 1
    return ids, mask


@pytest.mark.parametrize("architecture", ["mistral", "gemma3", "gpt2"])
def test_other_kinds_of_models_sample_alike(architecture: str) -> None:
    rule = sampling_rule(temperature=0.8, top_p=0.9, seed=4)
    tree = TreeDecoder(target_of(architecture), heads_of(architecture), TREES["dense"], capacity=48, run_probe=False)
    for prompt in PROMPTS:
        reference = generate_plain(target_of(architecture), prompt, max_new_tokens=CAP, rule=rule)
        assert tree.generate(prompt, max_new_tokens=CAP, rule=rule).tokens == reference.tokens


def test_a_low_temperature_is_nearly_greedy_and_accepts() -> None:
    """The tests above would prove less if every drafted token were rejected."""
    accepted: Counter[int] = Counter()
    for seed in range(6):
        rule = sampling_rule(temperature=0.3, seed=seed)
        for prompt in PROMPTS:
            accepted.update(decoder_of("dense").generate(prompt, max_new_tokens=CAP, rule=rule).accepted)
    assert set(accepted) == {0, 1, 2, 3}


def test_a_text_continues_as_it_would_have_gone_on() -> None:
    """The position counts from the start of the unpadded sequence, so a longer prompt changes no later draw."""
    rule = sampling_rule(temperature=0.9, seed=11)
    for tree in ("empty", "dense"):
        whole = decoder_of(tree).generate(PROMPTS[1], max_new_tokens=CAP, rule=rule, request=3).tokens
        for taken in (1, 5, 9):
            prompt = (*PROMPTS[1], *whole[:taken])
            rest = decoder_of(tree).generate(prompt, max_new_tokens=CAP - taken, rule=rule, request=3).tokens
            assert rest == whole[taken:]


def test_a_sequence_keeps_its_text_in_any_batch_slot() -> None:
    """MATH 2.1: the request belongs to the sequence, never to the slot."""
    rule = sampling_rule(temperature=0.9, top_k=20, seed=5)
    requests = [7, 1, 7, 1 << 40]
    alone = [plain(prompt, rule, request=r) for prompt, r in zip(PROMPTS, requests, strict=True)]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2]):
        answers = answer_batch(
            TARGET,
            [PROMPTS[i] for i in order],
            max_new_tokens=CAP,
            rule=rule,
            requests=[requests[i] for i in order],
        )
        assert [answer.tokens for answer in answers] == [alone[i] for i in order]


def test_seeds_and_requests_write_different_texts() -> None:
    texts = {plain(PROMPTS[0], sampling_rule(temperature=1.0, seed=seed), request=r) for seed in (0, 1) for r in (0, 1)}
    assert len(texts) == 4


# The target's law


def test_pairs_of_tokens_follow_the_targets_distribution() -> None:
    """Chi-square over pairs of consecutive tokens, by tree decoding, over 1,600 seeds and requests."""
    prompt, draws, rule = (5, 9, 7), 1600, {"temperature": 1.0, "top_k": 4}
    expected = pair_probs(prompt, sampling_rule(**rule))
    decoder = decoder_of("dense")
    found: Counter[tuple[int, int]] = Counter()
    for number in range(draws):
        drawn = sampling_rule(**rule, seed=number // 4)
        found[decoder.generate(prompt, max_new_tokens=2, rule=drawn, request=number % 4).tokens] += 1  # type: ignore[index]
    assert set(found) <= set(expected)
    common = [pair for pair, prob in expected.items() if prob * draws >= 5]
    rare = draws - sum(found[pair] for pair in common)
    observed = [*(found[pair] for pair in common), rare]
    wanted = [*(draws * expected[pair] for pair in common)]
    wanted.append(draws - sum(wanted))
    assert stats.chisquare(observed, wanted).pvalue > 1e-3


def pair_probs(prompt: tuple[int, ...], rule: RuleIdentity) -> dict[tuple[int, int], float]:
    """Probability of every pair of first tokens."""

    def next_probs(text: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            scores = TARGET.scores(TARGET.hidden_states(torch.tensor([text]))[0, -1:])
        return torch.softmax(filtered(scores, rule), dim=-1)[0]

    first = next_probs(prompt)
    return {
        (one, other): float(first[one] * prob)
        for one in range(VOCAB)
        if first[one] > 0
        for other, prob in enumerate(next_probs((*prompt, one)).tolist())
        if prob > 0
    }


# Replay


@pytest.mark.parametrize("settings", [{"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.8, "top_k": 20}])
@pytest.mark.parametrize("seed", [0, 9])
def test_a_trace_at_a_temperature_replays_step_for_step(settings: dict[str, Any], seed: int) -> None:
    """FIELD-CASES 41: MATH 1 and 2.6, with each prompt's own request."""
    rule, prompts = sampling_rule(seed=seed, **settings), encoded(*PROMPTS)
    answers = answer_batch(
        TARGET, PROMPTS, max_new_tokens=CAP, rule=rule, requests=[prompt.request for prompt in prompts]
    )
    trace = trace_of_answers(empty_trace(TARGET, HEADS, max_new_tokens=CAP, rule=rule), HEADS, prompts, answers)
    walks = replay(trace, TREES.values())
    for index, name in enumerate(TREES):
        decoded = [
            decoder_of(name).generate(p.tokens, max_new_tokens=CAP, rule=rule, request=p.request) for p in prompts
        ]
        assert [answer.tokens for answer in decoded] == [answer.tokens for answer in answers]
        assert walks.accepted(index) == [list(answer.accepted) for answer in decoded]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_share_of_the_noise_in_the_ranking_changes_steps_and_never_text(share: float) -> None:
    """MATH 2.5: still lossless, still path-local, still replayable."""
    rule, prompts = sampling_rule(temperature=1.2, seed=6, noise_share=share), encoded(*PROMPTS)
    requests = [prompt.request for prompt in prompts]
    answers = answer_batch(TARGET, PROMPTS, max_new_tokens=CAP, rule=rule, requests=requests)
    trace = trace_of_answers(empty_trace(TARGET, HEADS, max_new_tokens=CAP, rule=rule), HEADS, prompts, answers)
    assert trace.rule.noise_share == share
    walks = replay(trace, [TREES[tree] for tree in GRID_TREES])
    for index, tree in enumerate(GRID_TREES):
        found = [decoder_of(tree).generate(p.tokens, max_new_tokens=CAP, rule=rule, request=p.request) for p in prompts]
        assert [answer.tokens for answer in found] == [
            plain(p.tokens, sampling_rule(temperature=1.2, seed=6), request=p.request) for p in prompts
        ]
        assert walks.accepted(index) == [list(answer.accepted) for answer in found]


def test_a_share_of_the_noise_finds_the_draw_more_often() -> None:
    """Heads that know the target's own distribution: their plain list is fixed, the noisy one holds the draw."""
    found = {}
    for share in (0.0, 1.0):
        rule = sampling_rule(temperature=2.0, seed=1, noise_share=share)
        steps = [
            length
            for request in range(12)
            for prompt in PROMPTS
            for length in decoder_of("dense").generate(prompt, max_new_tokens=CAP, rule=rule, request=request).accepted
        ]
        found[share] = sum(steps) / len(steps)
    assert found[1.0] > found[0.0]


def test_an_end_of_text_is_drawn_like_any_token() -> None:
    rule = sampling_rule(temperature=0.8, seed=2)
    free = plain(PROMPTS[0], rule)
    for end in dict.fromkeys(free[:6]):
        answer = decoder_of("dense").generate(PROMPTS[0], max_new_tokens=CAP, rule=rule, eos_token_ids=[end])
        assert answer.tokens == free[: free.index(end) + 1]
        assert answer.end == "eos"


def test_greedy_needs_no_heads_and_no_seed() -> None:
    assert GREEDY.seed is None
    decoder = TreeDecoder(TARGET, None, Tree(()), run_probe=False)
    rule = sampling_rule(temperature=0.7)
    assert decoder.generate(PROMPTS[0], max_new_tokens=8, rule=rule).tokens == plain(PROMPTS[0], rule, cap=8)
