"""The families table: each either equals transformers' `generate` in fp32, or is refused by a message with the cause.

Tiny random models from their configurations. Trees have siblings and grandchildren, prompts are longer than any
window, and text runs past it many times over.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from models import SPARSE, VOCAB, WINDOW, tiny_heads, tiny_model
from transformers import GenerationConfig

from topo_search.decode.decoder import TreeDecoder
from topo_search.errors import CheckError, InputError
from topo_search.heads.medusa import MedusaHeads
from topo_search.identity import GREEDY, sampling_rule
from topo_search.reference import generate_plain, neutralised
from topo_search.target import Target
from topo_search.target.load import make_target
from topo_search.tree import Tree

PROMPTS = ((5, 9, 7), tuple(range(20, 20 + 3 * WINDOW)))
CAP = 20
TREES = (Tree.dense([3, 2, 2]), SPARSE)
ENDS: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
BLOCKS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    **ENDS,
}
GROUPED = BLOCKS | {"num_key_value_heads": 2}
GEMMA = GROUPED | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW}
MIXED = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, Callable[[], Any]] = {
    "Llama": lambda: transformers.LlamaConfig(**GROUPED),
    "Llama, tied": lambda: transformers.LlamaConfig(**GROUPED | {"tie_word_embeddings": True}),
    "Llama, head_dim 24": lambda: transformers.LlamaConfig(**GROUPED, head_dim=24),
    "Qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "Qwen2, window": lambda: transformers.Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "Qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=16),
    "Mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=WINDOW),
    "Gemma 2": lambda: transformers.Gemma2Config(**GEMMA),
    "Gemma 3": lambda: transformers.Gemma3TextConfig(**GEMMA, layer_types=MIXED),
    "Phi-3": lambda: transformers.Phi3Config(**GROUPED),
    "Phi-3, window": lambda: transformers.Phi3Config(**GROUPED, sliding_window=WINDOW),
    "GPT-2": lambda: transformers.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=64, **ENDS),
    "GPT-NeoX": lambda: transformers.GPTNeoXConfig(**BLOCKS),
    "OLMo 2": lambda: transformers.Olmo2Config(**GROUPED),
    "Cohere": lambda: transformers.CohereConfig(**GROUPED, logit_scale=0.25),
    "Mixtral": lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "Qwen3-MoE": lambda: transformers.Qwen3MoeConfig(
        **GROUPED, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "GPT-OSS": lambda: transformers.GptOssConfig(
        **GROUPED,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=MIXED,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "Granite": lambda: transformers.GraniteConfig(**GROUPED, logits_scaling=4.0),
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "Mamba": (
        lambda: transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4),
        "fills no key-value cache",
    ),
    "RecurrentGemma": (
        lambda: transformers.RecurrentGemmaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=3,
            intermediate_size=48,
            num_attention_heads=4,
            attention_window_size=8,
        ),
        "fills no key-value cache",
    ),
    "LFM2": (
        lambda: transformers.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]),
        "fills no key-value cache",
    ),
    "Qwen3-Next": (
        lambda: transformers.Qwen3NextConfig(
            **GROUPED | {"num_hidden_layers": 4},
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
        "fills no key-value cache",
    ),
    "Jamba": (
        lambda: transformers.JambaConfig(
            **GROUPED,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=2,
            num_experts_per_tok=1,
            mamba_d_state=4,
            use_mamba_kernels=False,
        ),
        "fills no key-value cache",
    ),
}


@cache
def target_of(family: str) -> Target:
    """The family's tiny model in fp32; soft caps and attention sinks need eager attention."""
    attention = "eager" if family in ("Gemma 2", "GPT-OSS") else "sdpa"
    model = tiny_model(FAMILIES[family](), dtype=torch.float32, attention=attention)
    return make_target(model, None, name=family, dtype="float32", pack=False)


@cache
def heads_of(family: str) -> MedusaHeads:
    return tiny_heads(target_of(family))


def verdict(family: str) -> str:
    """`equal`, or why not; what neither equals nor refuses is a failure of the table."""
    try:
        decoders = [TreeDecoder(target_of(family), heads_of(family), tree, capacity=64) for tree in TREES]
    except (InputError, CheckError) as error:
        return f"refused: {error}"
    accepted = 0
    for prompt in PROMPTS:
        for rule in (GREEDY, sampling_rule(temperature=0.8, seed=1)):
            plain = generate_plain(target_of(family), prompt, max_new_tokens=CAP, rule=rule)
            for decoder in decoders:
                answer = decoder.generate(prompt, max_new_tokens=CAP, rule=rule)
                if answer.tokens != plain.tokens:
                    return "DIFFERENT"
                accepted += answer.stats.accepted_tokens
    return "equal" if accepted else "equal, nothing accepted"


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_equals_generate(family: str) -> None:
    """FIELD-CASES 1, 9, 75: none differs in silence; a refusal here would be a family lost."""
    found = verdict(family)
    sys.stdout.write(f"{family}: {found}\n")
    assert found == "equal"


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_trees_cannot_serve_are_refused_with_the_cause(family: str) -> None:
    """FIELD-CASES 10, 15: a recurrent state cannot follow two branches."""
    config, cause = REFUSED[family]
    attention = "eager" if family == "Mamba" else "sdpa"
    model = tiny_model(config(), dtype=torch.float32, attention=attention)
    with pytest.raises(InputError, match=cause) as refused:
        make_target(model, None, name=family, dtype="float32", pack=False)
    sys.stdout.write(f"{family}: refused: {refused.value}\n")
    assert family in str(refused.value)


def test_windows_are_passed() -> None:
    """The table would prove less if no prompt were longer than the window, or no layer had one."""
    assert len(PROMPTS[1]) > 2 * WINDOW
    windows = {family: target_of(family).window for family in FAMILIES}
    assert {family for family, window in windows.items() if window == WINDOW} == {
        *("Qwen2, window", "Mistral", "Gemma 2", "Gemma 3", "Phi-3, window", "GPT-OSS")
    }
    assert target_of("Qwen2, window").mixes_layer_types


def test_a_model_whose_odds_are_not_known_is_decoded_greedily_only() -> None:
    """A soft cap keeps the order of scores, so greedy text stands, but draws would follow another distribution."""
    uncapped = replace(target_of("Gemma 2"), logit_cap=None)
    decoder = TreeDecoder(uncapped, heads_of("Gemma 2"), TREES[0], capacity=64)
    plain = generate_plain(uncapped, PROMPTS[0], max_new_tokens=CAP)
    assert decoder.generate(PROMPTS[0], max_new_tokens=CAP).tokens == plain.tokens
    with pytest.raises(InputError, match=r"Gemma 2 changes its output layer's scores .* decode greedily"):
        decoder.generate(PROMPTS[0], max_new_tokens=CAP, rule=sampling_rule(temperature=0.8))


def test_padded_vocabularies_and_several_ends_hold_for_every_rule() -> None:
    """FIELD-CASES 3, 79: spare rows of the output layer never win, and any of the ends ends."""
    target = replace(target_of("Llama"), known_ids=50)
    heads = tiny_heads(target)
    for rule in (GREEDY, sampling_rule(temperature=1.5, seed=2)):
        plain = TreeDecoder(target, None, Tree(()), run_probe=False)
        free = plain.generate(PROMPTS[0], max_new_tokens=CAP, rule=rule).tokens
        assert max(free) < 50
        for tree in TREES:
            decoder = TreeDecoder(target, heads, tree, run_probe=False)
            for ends in ((free[3],), (free[9], free[5]), (51,)):
                answer = decoder.generate(PROMPTS[0], max_new_tokens=CAP, rule=rule, eos_token_ids=ends)
                stop = min((free.index(end) + 1 for end in ends if end in free), default=CAP)
                assert answer.tokens == free[:stop]


def test_settings_of_the_models_own_are_shown_and_neutralised_on_both_sides() -> None:
    """FIELD-CASES 13: whatever the generation configuration says, both sides obey the rule they are given."""
    model = tiny_model(FAMILIES["Qwen2"](), dtype=torch.float32)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.3, top_k=3, top_p=0.5, repetition_penalty=1.4, eos_token_id=[44, 45]
    )
    target = make_target(model, None, name="own settings", dtype="float32", pack=False)
    shown = neutralised(target)
    assert {"do_sample", "temperature", "top_k", "top_p", "repetition_penalty"} <= set(shown)
    for rule in (GREEDY, sampling_rule(temperature=0.9, seed=3)):
        plain = generate_plain(target, PROMPTS[0], max_new_tokens=CAP, rule=rule)
        decoder = TreeDecoder(target, heads_of("Qwen2"), TREES[0], run_probe=False)
        assert decoder.generate(PROMPTS[0], max_new_tokens=CAP, rule=rule).tokens == plain.tokens
