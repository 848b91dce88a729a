"""Fused decoder layers say what transformers' layers say, and stand only where they do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from models import PROMPTS, SPARSE, VOCAB, WINDOW, llama_config, tiny_heads, tiny_model
from torch import nn

from topo_search.decode.decoder import TreeDecoder
from topo_search.decode.probe import probe
from topo_search.reference import generate_plain
from topo_search.target import Target
from topo_search.target.fused import FusedLayer, fuse_layers
from topo_search.target.load import make_target
from topo_search.target.packing import can_pack
from topo_search.training.states import parameter_count
from topo_search.tree import Tree

pytestmark = pytest.mark.skipif(not can_pack(), reason="this torch build cannot pack")

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
}
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FUSED: dict[str, Callable[[], Any]] = {
    "Llama": lambda: transformers.LlamaConfig(**SIZES),
    "Llama, biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "Llama, own angles": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA_3_ROPE),
    "Llama, one head each": lambda: transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 8}),
    "Qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "Qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "Mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
}
KEPT: dict[str, Callable[[], Any]] = {
    "Llama, GELU": lambda: transformers.LlamaConfig(**SIZES, hidden_act="gelu"),
    "Granite": lambda: transformers.GraniteConfig(**SIZES, residual_multiplier=0.5),
    "OLMo 2": lambda: transformers.Olmo2Config(**SIZES),
    "Phi-3": lambda: transformers.Phi3Config(**SIZES | {"pad_token_id": 0}),
}


def pair(config: Any, *, scale: float = 1.0) -> tuple[Target, Target]:
    """The same fp32 model, with transformers' layers and with ours; `scale` makes its matrices larger."""
    model = tiny_model(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))  # norms and biases start at one and at zero
            else:
                parameter.mul_(scale)
    plain = make_target(copy.deepcopy(model), None, name="plain", dtype="float32", pack=False)
    return plain, make_target(model, None, name="fused", dtype="float32")


@pytest.mark.parametrize("name", FUSED)
def test_fused_layers_say_what_the_models_own_say(name: str) -> None:
    """With a causal mask, with padding, behind a cache and under a tree mask (which the probe makes)."""
    plain, fused = pair(FUSED[name]())
    assert all(type(layer) is FusedLayer for layer in fused.body.layers)  # type: ignore[union-attr]
    assert parameter_count(fused.model) == parameter_count(plain.model)
    ids = (torch.arange(3 * 20).view(3, 20) * 7919 + 11) % VOCAB
    padding = torch.ones_like(ids)
    padding[1, :5] = 0
    with torch.inference_mode():
        expected, found = (target.hidden_states(ids) for target in (plain, fused))
        assert torch.allclose(expected, found, rtol=0, atol=2e-5 * float(expected.abs().max()))
        padded = [target.hidden_states(ids, attention_mask=padding)[padding.bool()] for target in (plain, fused)]
        assert torch.allclose(*padded, rtol=0, atol=2e-5 * float(expected.abs().max()))
        cache = fused.new_cache(20)
        parts = []
        for part in ids[:1].split(6, dim=1):
            parts.append(fused.hidden_states(part, cache=cache))
            cache.commit(part.shape[1])
        assert torch.allclose(expected[:1], torch.cat(parts, dim=1), rtol=0, atol=2e-5 * float(expected.abs().max()))
    assert probe(fused)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral"])
def test_trees_on_fused_layers_write_what_generate_writes(name: str) -> None:
    """transformers' `generate` on its own layers; the tiny models' texts hold no near-tie."""
    plain, fused = pair(FUSED[name]())
    heads = tiny_heads(fused)
    for prompt in PROMPTS:
        expected = generate_plain(plain, prompt, max_new_tokens=24).tokens
        assert generate_plain(fused, prompt, max_new_tokens=24).tokens == expected
        for tree in (Tree(()), Tree.dense([3, 2, 2]), SPARSE):
            assert (
                TreeDecoder(fused, heads, tree, run_probe=False).generate(prompt, max_new_tokens=24).tokens == expected
            )


@pytest.mark.parametrize("name", KEPT)
def test_other_layers_stay_as_they_are(name: str) -> None:
    assert fuse_layers(tiny_model(KEPT[name](), dtype=torch.float32)) == 0


def test_only_fp32_is_fused() -> None:
    assert fuse_layers(tiny_model(llama_config())) == 0
    assert fuse_layers(tiny_model(llama_config(), dtype=torch.bfloat16)) == 0


def test_a_layer_that_means_something_else_is_kept() -> None:
    """Another transformers version may compute more in a layer of the same name and parts."""
    model = tiny_model(llama_config(), dtype=torch.float32)
    layer = model.model.layers[0]
    layer.self_attn.register_forward_hook(lambda _module, _inputs, output: (output[0] * 1.01, *output[1:]))
    assert fuse_layers(model) == 0
    assert type(layer.mlp.up_proj) is nn.Linear
