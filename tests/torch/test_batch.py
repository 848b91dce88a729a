"""Prompts decoded together: every row's text and steps are those it has alone, and an ended row costs nothing more."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from models import NEW_TOKENS, POSITIONS, PROMPTS, TREES, heads_of, must_not_run, plain_text, target_of, tiny_hydra
from transformers.generation import logits_process

from topo_search.decode.batch import decode_batch
from topo_search.decode.decoder import Decoded, TreeDecoder
from topo_search.decode.plan import plan_tree
from topo_search.decode.rows import RowCache
from topo_search.errors import InputError
from topo_search.heads.attention import PrefixContext
from topo_search.heads.medusa import MedusaHeads
from topo_search.identity import GREEDY, sampling_rule
from topo_search.target import Target

EXACT = ("llama", "mistral", "gemma3", "gpt2")  # in float64 throughout
RULES: dict[str, Any] = {
    "greedy": GREEDY,
    "T 0.7": sampling_rule(temperature=0.7, seed=1),
    "T 1.2, filters": sampling_rule(temperature=1.2, top_k=20, top_p=0.9, seed=2),
    "T 1.2, shared noise": sampling_rule(temperature=1.2, seed=2, noise_share=0.5),
}


@cache
def decoder_of(architecture: str, tree: str) -> TreeDecoder:
    return TreeDecoder(
        target_of(architecture), heads_of(architecture), TREES[tree], capacity=POSITIONS, run_probe=False
    )


def assert_as_alone(answers: list[Decoded], decoder: TreeDecoder, requests: list[int], **settings: Any) -> None:
    for answer, prompt, request in zip(answers, PROMPTS, requests, strict=True):
        alone = decoder.generate(prompt, request=request, **settings)
        assert (answer.tokens, answer.end, answer.accepted) == (alone.tokens, alone.end, alone.accepted)


@pytest.mark.parametrize("architecture", EXACT)
@pytest.mark.parametrize("tree", ["empty", "dense", "sparse"])
@pytest.mark.parametrize("rule", RULES)
def test_rows_are_what_they_are_alone(architecture: str, tree: str, rule: str) -> None:
    """FIELD-CASES 70, 72: prompts of lengths 3, 5, 2 and 1; windows, mixed layers and learned positions among them."""
    decoder, settings = decoder_of(architecture, tree), {"max_new_tokens": 20, "rule": RULES[rule]}
    answers = decode_batch(decoder, PROMPTS, **settings)
    assert_as_alone(answers, decoder, [0, 1, 2, 3], **settings)
    if rule == "greedy":
        assert [answer.tokens for answer in answers] == [plain_text(architecture, p).tokens[:20] for p in PROMPTS]


def test_prefix_heads_read_each_rows_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that read what follows each committed token are given a row's whole text, from its second token on."""
    heads = tiny_hydra(target_of("llama"), prefix_attention=True, root_in_prefix=True)
    decoder = TreeDecoder(target_of("llama"), heads, TREES["dense"], capacity=POSITIONS, run_probe=False)
    read: dict[int, list[int]] = {}
    extend = PrefixContext.extend

    def recording(context: PrefixContext, states: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        read.setdefault(id(context), []).extend(following[0].tolist())
        return extend(context, states, following)

    with monkeypatch.context() as patch:
        patch.setattr(PrefixContext, "extend", recording)
        answers = decode_batch(decoder, PROMPTS, max_new_tokens=20)
    assert_as_alone(answers, decoder, [0, 1, 2, 3], max_new_tokens=20)
    for prompt, answer, tokens in zip(PROMPTS, answers, read.values(), strict=True):
        text = [*prompt, *answer.tokens]
        assert len(tokens) >= len(prompt) and tokens == text[1 : len(tokens) + 1]


def test_a_row_is_the_same_at_another_slot_and_in_another_batch() -> None:
    decoder, rule = decoder_of("llama", "dense"), RULES["T 0.7"]
    requests = [7, 1, 1 << 40, 3]
    together = decode_batch(decoder, PROMPTS, max_new_tokens=16, rule=rule, requests=requests)
    for order in ([3, 0, 2, 1], [2], [1, 1, 0]):
        found = decode_batch(
            decoder,
            [PROMPTS[i] for i in order],
            max_new_tokens=16,
            rule=rule,
            requests=[requests[i] for i in order],
        )
        assert [(a.tokens, a.accepted) for a in found] == [(together[i].tokens, together[i].accepted) for i in order]


@pytest.mark.parametrize("tree", ["empty", "dense", "medusa-63"])
def test_rows_end_where_they_end_alone(tree: str) -> None:
    """FIELD-CASES 3: by end-of-text inside paths, by the first token, by the cap."""
    decoder = decoder_of("llama", tree)
    texts = [plain_text("llama", prompt).tokens for prompt in PROMPTS]
    for ends in ((texts[0][4], texts[1][0]), (texts[2][7],), tuple({text[0] for text in texts})):
        settings = {"max_new_tokens": NEW_TOKENS, "eos_token_ids": ends}
        answers = decode_batch(decoder, PROMPTS, **settings)
        assert_as_alone(answers, decoder, [0] * 4, **settings)
        assert "eos" in {answer.end for answer in answers}


@pytest.mark.parametrize("cap", [1, 2, 5])
def test_the_cap_is_exact(cap: int) -> None:
    answers = decode_batch(decoder_of("llama", "dense"), PROMPTS, max_new_tokens=cap)
    assert [answer.tokens for answer in answers] == [plain_text("llama", p).tokens[:cap] for p in PROMPTS]


def test_the_position_limit_ends_each_row_at_its_own_length() -> None:
    """Learned positions: a node without one is never looked up, and rows reach the limit at different steps."""
    decoder = decoder_of("gpt2", "dense")
    prompts = [tuple(range(1, POSITIONS - 6)), tuple(range(1, POSITIONS - 2)), tuple(range(POSITIONS - 1))]
    for prompt, answer in zip(prompts, decode_batch(decoder, prompts, max_new_tokens=1000), strict=True):
        alone = decoder.generate(prompt, max_new_tokens=1000)
        assert (answer.tokens, answer.end, answer.accepted) == (alone.tokens, "limit", alone.accepted)


def test_an_ended_row_is_run_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, texts = decoder_of("llama", "chain"), [plain_text("llama", prompt).tokens for prompt in PROMPTS]
    ends = (texts[0][2], texts[1][9])
    widths: list[int] = []
    forward = Target.hidden_states

    def spy(target: Target, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        widths.append(input_ids.shape[0])
        return forward(target, input_ids, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Target, "hidden_states", spy)
        answers = decode_batch(decoder, PROMPTS, max_new_tokens=NEW_TOKENS, eos_token_ids=ends)
    assert widths == sorted(widths, reverse=True)
    assert sum(widths[1:]) == sum(len(answer.accepted) for answer in answers)
    assert len(set(widths)) > 1


def test_plain_batches_run_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MedusaHeads, "propose", must_not_run)
    decode_batch(decoder_of("llama", "empty"), PROMPTS, max_new_tokens=6)


def test_processors_of_transformers_are_applied_to_each_row() -> None:
    decoder = decoder_of("llama", "dense")
    settings = {"max_new_tokens": 16, "processors": [logits_process.RepetitionPenaltyLogitsProcessor(1.3)]}
    assert_as_alone(decode_batch(decoder, PROMPTS, **settings), decoder, [0] * 4, **settings)


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([], {}, "There are 0 prompts and 0 requests; give at least 1"),
        (PROMPTS, {"requests": [1, 2]}, "There are 4 prompts and 2 requests"),
        ([(1, 2), ()], {}, r"prompts\[1\] has no token"),
        ([(1, 2), (99,)], {}, "token id 99, outside the target's vocabulary"),
        (PROMPTS, {"processors": [lambda ids, scores: scores]}, "function may keep a state that the rows of a batch"),
    ],
)
def test_batches_that_cannot_be_decoded_are_refused(prompts: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        decode_batch(decoder_of("llama", "dense"), prompts, max_new_tokens=4, **settings)


# Masks and cache


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_each_rows_mask_is_that_of_its_length_and_hides_what_lies_behind(architecture: str) -> None:
    target = target_of(architecture)
    plan = plan_tree(TREES["sparse"], capacity=16, window=target.window, dtype=target.dtype, device=target.device)
    lengths, width = [9, 3, 16, 0], plan.verify_width
    masks = plan.masks_at(torch.tensor(lengths), windowed=True)
    assert masks.shape == (4, 1, width, 16 + width)
    for mask, length in zip(masks, lengths, strict=True):
        assert torch.equal(mask[None, ..., : length + width], plan.mask_at(length, windowed=True))
        assert bool((mask[..., length + width :] == torch.finfo(target.dtype).min).all())


def test_rows_keep_their_own_paths_and_move_up_when_others_go() -> None:
    """FIELD-CASES 4, per row."""
    target = target_of("llama")
    cache = RowCache(target, batch=3, capacity=12)

    def written(width: int) -> torch.Tensor:
        layers, kv_heads, head_dim = target.kv_shape
        tokens = torch.randn(layers, 2, len(cache.lengths), kv_heads, width, head_dim, dtype=target.dtype)
        for layer, (keys, values) in zip(cache.layers, tokens, strict=True):
            layer.update(keys, values)
        return tokens

    first = written(4)
    cache.commit([4, 2, 3])
    second = written(5)
    cache.keep([torch.tensor([0, 2, 4]), torch.tensor([0]), torch.tensor([0, 1])])
    assert cache.lengths.tolist() == [7, 3, 5]
    cache.keep_rows([2, 0])
    assert cache.lengths.tolist() == [5, 7]
    for slot, row, kept, path in ((0, 2, 3, [0, 1]), (1, 0, 4, [0, 2, 4])):
        text = cache.storage[:, :, slot, :, : kept + len(path)]
        assert torch.equal(text, torch.cat([first[:, :, row, :, :kept], second[:, :, row, :, path]], dim=-2))
    third = written(2)
    assert torch.equal(cache.storage[:, :, 0, :, 5:7], third[:, :, 0])
    assert torch.equal(cache.storage[:, :, 1, :, 7:9], third[:, :, 1])
