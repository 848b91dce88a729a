"""The decoder's text is transformers' own, token for token; its steps are those of the tree; its buffers stay put."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from models import (
    ARCHITECTURES,
    MEDUSA_63,
    NEW_TOKENS,
    POSITIONS,
    PROMPTS,
    TREES,
    VOCAB,
    as_target,
    as_users_run_it,
    heads_of,
    llama_config,
    must_not_run,
    plain_text,
    target_of,
    tiny_heads,
    tiny_llama,
    tiny_model,
)
from torch._subclasses.fake_tensor import FakeTensor
from transformers import GenerationConfig, Phi3Config

from topo_search.decode.arguments import one_prompt
from topo_search.decode.decoder import Decoded, TreeDecoder
from topo_search.errors import InputError
from topo_search.heads.medusa import MedusaHeads
from topo_search.reference import generate_plain, greedy_settings, neutralised
from topo_search.target import Target
from topo_search.tree import Tree

DENSE = TREES["dense"]


def decoder_of(architecture: str, tree: Tree) -> TreeDecoder:
    """A decoder without the start-up probe, which has tests of its own."""
    return TreeDecoder(target_of(architecture), heads_of(architecture), tree, capacity=POSITIONS, run_probe=False)


@cache
def decoded(architecture: str, tree: str) -> list[Decoded]:
    """Answers to all prompts by one of the trees, each pair run once."""
    decoder = decoder_of(architecture, TREES[tree])
    return [decoder.generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]


def step_starts(steps: Sequence[Sequence[int]]) -> list[int]:
    """Answer index of the first token of the prefill and of every step, and the answer's length last."""
    return list(itertools.accumulate(map(len, steps), initial=0))


# Text


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tree", TREES)
def test_text_is_that_of_generate(architecture: str, tree: str) -> None:
    """FIELD-CASES 1, 9, 69, 75: grouped-query heads, windows passed many times over, mixed layers, learned positions.

    One test tree has siblings and grandchildren at least: a chain alone proves nothing about positions.
    """
    for prompt, answer in zip(PROMPTS, decoded(architecture, tree), strict=True):
        plain = plain_text(architecture, prompt)
        assert answer.tokens == plain.tokens
        assert (answer.end, plain.end) == ("cap", "cap")
        assert sum(answer.accepted) + len(answer.accepted) == NEW_TOKENS - 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_steps_of_every_accepted_length_occur(architecture: str) -> None:
    """Without them the test above would prove little; rejected steps past the window are FIELD-CASES 9."""
    answers = [answer for tree in ("chain", "dense", "sparse") for answer in decoded(architecture, tree)]
    assert {length for answer in answers for length in answer.accepted} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    "tree",
    [Tree(((0,), (1,), (2,), (3,))), Tree(((0,),)), Tree(((3,),)), Tree(())],
    ids=["depth-1", "single", "rank-3", "empty"],
)
def test_the_smallest_trees(tree: Tree) -> None:
    """FIELD-CASES 68: depth-1, single-node and empty trees work."""
    for prompt in PROMPTS:
        answer = decoder_of("llama", tree).generate(prompt, max_new_tokens=12)
        assert answer.tokens == plain_text("llama", prompt).tokens[:12]
        assert max(answer.accepted) <= tree.depth


def test_plain_decoding_needs_no_heads_and_runs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MedusaHeads, "propose", must_not_run)
    expected = plain_text("llama", PROMPTS[0]).tokens
    for heads in (None, heads_of("llama")):
        decoder = TreeDecoder(target_of("llama"), heads, Tree(()))
        assert decoder.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS).tokens == expected


def test_stream_yields_the_steps_of_generate() -> None:
    decoder = decoder_of("llama", DENSE)
    steps = list(decoder.stream(PROMPTS[1], max_new_tokens=NEW_TOKENS))
    answer = decoder.generate(PROMPTS[1], max_new_tokens=NEW_TOKENS)
    assert [token for step in steps for token in step] == list(answer.tokens)
    assert [len(step) - 1 for step in steps[1:]] == list(answer.accepted)
    assert len(steps[0]) == 1


def test_every_prompt_starts_afresh() -> None:
    """FIELD-CASES 46: nothing that one prompt left speeds up, or spoils, the next."""
    decoder = decoder_of("mistral", MEDUSA_63)
    once = decoder.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS)
    decoder.generate(PROMPTS[1], max_new_tokens=5)
    again = decoder.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS)
    assert (again.tokens, again.accepted) == (once.tokens, once.accepted)


# Ends


@pytest.mark.parametrize("tree", [TREES["chain"], DENSE, MEDUSA_63], ids=["chain", "dense", "medusa-63"])
@pytest.mark.parametrize("listed", [False, True], ids=["one id", "list of ids"])
def test_end_of_text_inside_a_path_ends_the_answer_there(tree: Tree, listed: bool) -> None:
    """FIELD-CASES 3: whatever token of the answer is declared to be the end, as one id or among several."""
    decoder, inside = decoder_of("llama", tree), 0
    for prompt in PROMPTS:
        free = plain_text("llama", prompt).tokens
        last_of_step = {start - 1 for start in step_starts(list(decoder.stream(prompt, max_new_tokens=NEW_TOKENS)))}
        unused = next(token for token in range(VOCAB) if token not in free)
        for end in dict.fromkeys(free[:8]):
            ids = (unused, end) if listed else (end,)
            answer = decoder.generate(prompt, max_new_tokens=NEW_TOKENS, eos_token_ids=ids)
            assert answer.tokens == free[: free.index(end) + 1]
            assert answer.end == "eos"
            inside += free.index(end) not in last_of_step
    assert inside >= 3


@pytest.mark.parametrize("ids", [(51,), (99, 44, 51)])
def test_generate_ends_where_the_decoder_ends(ids: tuple[int, ...]) -> None:
    """The target's own ids are the default of both sides."""
    target = replace(target_of("llama"), eos_token_ids=ids)
    decoder = TreeDecoder(target, heads_of("llama"), DENSE, capacity=64, run_probe=False)
    ends = set()
    for prompt in PROMPTS:
        answer, plain = (
            decoder.generate(prompt, max_new_tokens=NEW_TOKENS),
            generate_plain(target, prompt, max_new_tokens=NEW_TOKENS),
        )
        assert (answer.tokens, answer.end) == (plain.tokens, plain.end)
        ends.add(answer.end)
    assert "eos" in ends


@pytest.mark.parametrize("cap", range(1, 12))
def test_the_cap_is_exact(cap: int) -> None:
    decoder = decoder_of("llama", DENSE)
    for prompt in PROMPTS:
        answer = decoder.generate(prompt, max_new_tokens=cap)
        assert answer.tokens == plain_text("llama", prompt).tokens[:cap]
        assert answer.end == "cap"
        assert sum(answer.accepted) + len(answer.accepted) == cap - 1


@pytest.mark.parametrize("tree", [Tree(()), TREES["chain"], DENSE], ids=["empty", "chain", "dense"])
@pytest.mark.parametrize("prompt", [PROMPTS[1], tuple(range(1, POSITIONS - 2)), tuple(range(POSITIONS - 1))])
def test_the_position_limit_trims_the_tree(tree: Tree, prompt: tuple[int, ...]) -> None:
    """A node without a position would index past the learned embeddings; the answer ends with the positions."""
    decoder = decoder_of("gpt2", tree)
    room = POSITIONS - len(prompt)
    plain = generate_plain(target_of("gpt2"), prompt, max_new_tokens=room).tokens
    answer = decoder.generate(prompt, max_new_tokens=1000)
    assert answer.tokens == plain
    assert answer.end == "limit"
    assert decoder.generate(prompt, max_new_tokens=room).end == "cap"


def test_trimming_near_the_limit_accepts_what_it_can() -> None:
    """Only the nodes without a position go: the steps before the limit are those of a longer context."""
    target = target_of("llama")
    short = replace(target, position_limit=len(PROMPTS[0]) + 20)
    free, trimmed = (
        TreeDecoder(each, heads_of("llama"), DENSE, capacity=64, run_probe=False).generate(
            PROMPTS[0], max_new_tokens=cap
        )
        for each, cap in ((target, 20), (short, 1000))
    )
    assert trimmed.tokens == free.tokens
    assert trimmed.accepted == free.accepted
    assert (free.end, trimmed.end) == ("cap", "limit")


def test_a_text_ends_before_its_positions_are_turned_anew() -> None:
    """`longrope` changes the angle of every position once the text outgrows a length, and cached keys keep theirs."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}
    config = Phi3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        max_position_embeddings=128,
        original_max_position_embeddings=24,
        rope_scaling=rope,
        eos_token_id=None,
        pad_token_id=0,
        **sizes,
    )
    target = as_target(tiny_model(config))
    assert target.position_limit == 24
    decoder = TreeDecoder(target, tiny_heads(target), DENSE)
    for prompt in PROMPTS:
        answer = decoder.generate(prompt, max_new_tokens=100)
        room = 24 - len(prompt)
        assert answer.tokens == generate_plain(target, prompt, max_new_tokens=100).tokens[:room]
        assert (len(answer.tokens), answer.end) == (room, "limit")


# Settings


def test_one_settings_object_decides_both_sides() -> None:
    """FIELD-CASES 13: `generate` would take penalty and temperature from the model's own generation config."""
    model = tiny_model(llama_config())
    own = GenerationConfig(
        repetition_penalty=1.05, temperature=0.7, do_sample=True, eos_token_id=[51, 42], cache_implementation="static"
    )
    model.generation_config = own
    target = as_target(model)
    assert neutralised(target) == {
        "repetition_penalty": 1.05,
        "temperature": 0.7,
        "do_sample": True,
        "cache_implementation": "static",
    }
    settings = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": [51, 42], "pad_token_id": 51}
    assert greedy_settings(target, 9) == settings
    decoder = TreeDecoder(target, heads_of("llama"), DENSE)
    for prompt in PROMPTS:
        plain = generate_plain(target, prompt, max_new_tokens=NEW_TOKENS)
        assert decoder.generate(prompt, max_new_tokens=NEW_TOKENS).tokens == plain.tokens
        free = plain_text("llama", prompt).tokens
        ends = [index for index, token in enumerate(free) if token in (51, 42)]
        assert plain.tokens == free[: ends[0] + 1 if ends else None]
    assert model.generation_config is own


def test_a_model_without_generation_config_has_nothing_to_neutralise() -> None:
    model = tiny_model(llama_config(eos_token_id=[7, 8]))
    model.generation_config = None
    target = as_target(model)
    assert neutralised(target) == {}
    assert target.eos_token_ids == (7, 8)


# Refusals


@pytest.mark.parametrize("heads", [0, 2, 3])
def test_a_tree_deeper_than_the_heads_is_refused_before_any_work(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """FIELD-CASES 16: the published 63-node tree with too few heads; its pruning runs."""
    target = target_of("llama")
    fewer = tiny_heads(target, num_heads=heads) if heads else None
    with monkeypatch.context() as patch:
        patch.setattr(Target, "hidden_states", must_not_run)
        with pytest.raises(
            InputError, match=rf"path \[.*\] is {heads + 1} deep, but there are {heads} .*depth {heads}"
        ):
            TreeDecoder(target, fewer, MEDUSA_63)
    answer = TreeDecoder(target, fewer, MEDUSA_63.pruned(heads)).generate(PROMPTS[0], max_new_tokens=NEW_TOKENS)
    assert answer.tokens == plain_text("llama", PROMPTS[0]).tokens


@pytest.mark.parametrize(
    ("prompt", "cap", "message"),
    [
        ([], 8, "The prompt has no token"),
        ([[1, 2], [3]], 8, "one prompt at a time .batch 1 only."),
        ([1, VOCAB], 8, f"token id {VOCAB}, outside the target's vocabulary of {VOCAB}"),
        ([1, -1], 8, "token id -1, outside"),
        ([1, 2], 0, "max_new_tokens is 0"),
        ([1] * POSITIONS, 8, f"has {POSITIONS} tokens, but the target's context is {POSITIONS}; shorten it"),
    ],
)
def test_prompts_that_cannot_be_decoded_are_refused(prompt: list[int], cap: int, message: str) -> None:
    """FIELD-CASES 70: two prompts at once give one clear message at entry."""
    with as_users_run_it(), pytest.raises(InputError, match=message):
        decoder_of("gpt2", DENSE).generate(prompt, max_new_tokens=cap)


def test_tensors_of_one_prompt_are_taken_and_batches_refused() -> None:
    """FIELD-CASES 70."""
    target = target_of("llama")
    for prompt in (torch.tensor([[4, 5]]), torch.tensor([4, 5]), np.array([4, 5]), list(torch.tensor([4, 5]))):
        assert one_prompt(prompt, target) == [4, 5]
    with pytest.raises(InputError, match=r"batch 1 only.*\(2, 3\)"):
        one_prompt(torch.zeros(2, 3, dtype=torch.long), target)


def test_ids_beyond_the_tokenizer_are_never_drafted_or_decoded() -> None:
    """FIELD-CASES 79: the output layer is wider than the tokenizer, and its spare rows would win."""
    model = tiny_model(llama_config())
    with torch.no_grad():
        model.lm_head.weight[50:] *= 4.0
    assert max(generate_plain(as_target(model), PROMPTS[0], max_new_tokens=NEW_TOKENS).tokens) >= 50
    target = replace(as_target(model), known_ids=50)
    heads = tiny_heads(target)
    seen: set[int] = set()
    decoder = TreeDecoder(target, heads, DENSE)
    for prompt in ((1, 2, 3), (7,)):
        for step in decoder.stream(prompt, max_new_tokens=NEW_TOKENS):
            seen |= {*step, *decoder._steps[-1].input_ids[0].tolist()}
    assert max(seen) < 50
    with pytest.raises(InputError, match="token id 50, outside the target's vocabulary of 50"):
        decoder.generate([50], max_new_tokens=4)


# Cache and buffers


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_after_every_step_the_cache_is_that_of_the_committed_text(architecture: str) -> None:
    """FIELD-CASES 4: scattered accepted slots become a dense prefix, and what was committed before does not move."""
    target, decoder, prompt = target_of(architecture), decoder_of(architecture, DENSE), PROMPTS[0]
    steps, storage, scattered = decoder.stream(prompt, max_new_tokens=NEW_TOKENS), decoder.buffers()[0], 0
    text = [*prompt, *next(steps)]
    committed = storage[..., : len(prompt), :].clone()
    for emitted in steps:
        assert torch.equal(storage[..., : committed.shape[-2], :], committed)
        text += emitted
        committed = storage[..., : len(text) - 1, :].clone()
        fresh = target.new_cache(len(text) - 1)
        target.hidden_states(torch.tensor([text[:-1]]), cache=fresh)
        assert torch.allclose(committed, fresh.storage, rtol=0, atol=1e-9)
        drafted = decoder._steps[-1].input_ids[0].tolist()
        scattered += drafted[1 : len(emitted)] != emitted[:-1]
    assert scattered >= 3


def live_bytes() -> int:
    """Bytes of every tensor that Python still reaches; packed weights, which have no storage to ask, aside."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    tensors = [tensor for tensor in found if tensor.layout == torch.strided]
    real = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]  # compiling elsewhere leaves fakes
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in real}
    return sum(storages.values())


def test_500_steps_leave_every_buffer_where_it_was() -> None:
    """FIELD-CASES 49: no buffer is allocated, grown or freed in a step, and nothing piles up."""
    target = tiny_llama(max_position_embeddings=4096)
    decoder = TreeDecoder(target, tiny_heads(target), DENSE, capacity=2000, run_probe=False)
    addresses = [buffer.data_ptr() for buffer in decoder.buffers()]
    steps = decoder.stream(PROMPTS[0], max_new_tokens=1990)
    with as_users_run_it():
        for _ in range(10):
            next(steps)
        after_ten = live_bytes()
        for _ in range(490):
            next(steps)
    path_bytes = (DENSE.depth + 1) * target.hidden_size * 8  # the last step's states, as many as it committed
    assert abs(live_bytes() - after_ten) < path_bytes
    assert [buffer.data_ptr() for buffer in decoder.buffers()] == addresses


def test_a_longer_answer_than_reserved_gets_larger_buffers_once() -> None:
    decoder = TreeDecoder(target_of("llama"), heads_of("llama"), DENSE, capacity=8, run_probe=False)
    answer = decoder.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS)
    assert answer.tokens == plain_text("llama", PROMPTS[0]).tokens
    addresses = [buffer.data_ptr() for buffer in decoder.buffers()]
    decoder.generate(PROMPTS[3], max_new_tokens=NEW_TOKENS)
    assert [buffer.data_ptr() for buffer in decoder.buffers()] == addresses
