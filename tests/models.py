"""Tiny random models from their configs, in float64 so that equality needs no tolerance."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, MistralConfig

from topo_search.heads.medusa import MedusaHeads, untrained_blocks
from topo_search.identity import HeadsIdentity
from topo_search.target import Target
from topo_search.target.load import make_target

VOCAB = 61


def tiny_model(config: Any, *, dtype: torch.dtype = torch.float64, attention: str = "sdpa") -> Any:
    """A random model of `config`, its weights large enough that its text does not settle on one token."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.4 if "embed" in name or "lm_head" in name else 0.15)
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    return model


def llama_config(**changes: Any) -> LlamaConfig:
    """Eight attention heads on two key-value heads."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    return LlamaConfig(**(settings | changes))


def mistral_config(window: int = 4) -> MistralConfig:
    """Every layer sees only the last `window` tokens."""
    return MistralConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        sliding_window=window,
        eos_token_id=None,
        bos_token_id=None,
    )


def as_target(model: Any, *, name: str = "tiny", dtype: str = "float64") -> Target:
    """A target without a tokenizer."""
    return make_target(model, None, name=name, dtype=dtype)


def tiny_llama(**changes: Any) -> Target:
    """A tiny Llama target."""
    return as_target(tiny_model(llama_config(**changes)))


def tiny_heads(target: Target, *, num_heads: int = 4, scale: float = 0.02) -> MedusaHeads:
    """Heads near their untrained state, so that some guesses are right and others wrong."""
    torch.manual_seed(3)
    blocks = untrained_blocks(target, num_heads=num_heads, num_layers=1, share_projection=True)
    with torch.no_grad():
        blocks.weight.normal_(std=scale)
    identity = HeadsIdentity(name="tiny", kind="medusa", fingerprint="tiny", num_heads=num_heads)
    return MedusaHeads(blocks, target, identity)
