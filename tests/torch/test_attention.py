"""Grouped attention: the same sums as `sdpa`, without a copy of the prefix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import (
    NEW_TOKENS,
    PROMPTS,
    TREES,
    as_target,
    gemma2_config,
    llama_config,
    mistral_config,
    tiny_heads,
    tiny_model,
)
from torch import nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from topo_search.decode.decoder import TreeDecoder
from topo_search.reference import generate_plain
from topo_search.target.attention import GROUPED, grouped_attention, suited_attention


def drawn(batch: int, heads: int, kv_heads: int, width: int, seen: int) -> tuple[Any, ...]:
    """A module's sizes, queries, keys, values and a mask in which every row sees itself."""
    torch.manual_seed(batch + heads + width)
    query = torch.randn(batch, heads, width, 16, dtype=torch.float64)
    key, value = torch.randn(2, batch, kv_heads, seen, 16, dtype=torch.float64)
    visible = torch.rand(batch, 1, width, seen) < 0.5
    visible[..., 0] = True
    mask = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, torch.finfo(torch.float64).min)
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = heads // kv_heads, True
    return module, query, key, value, mask


@pytest.mark.parametrize("sizes", [(1, 8, 2, 5, 20), (3, 6, 3, 2, 9), (1, 4, 4, 3, 7), (2, 8, 1, 7, 7)])
def test_grouped_attention_is_that_of_transformers(sizes: tuple[int, ...]) -> None:
    module, query, key, value, mask = drawn(*sizes)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    found, _ = grouped_attention(module, query, key, value, mask, scaling=0.3)
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_no_key_or_value_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a mask every query head would get its own copy of the whole prefix."""
    module, query, key, value, mask = drawn(1, 8, 2, 5, 20)
    seen: list[tuple[int, ...]] = []
    real = functional.scaled_dot_product_attention

    def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any) -> torch.Tensor:
        seen.append((k.data_ptr(), v.data_ptr()))
        return real(q, k, v, **rest)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    grouped_attention(module, query, key, value, mask)
    assert seen == [(key.data_ptr(), value.data_ptr())]


@pytest.mark.parametrize("config", [llama_config, mistral_config], ids=["llama", "window"])
@pytest.mark.parametrize("tree", ["dense", "sparse", "empty"])
def test_trees_decode_the_same_text(config: Any, tree: str) -> None:
    target = as_target(tiny_model(config(), attention=GROUPED))
    decoder = TreeDecoder(target, tiny_heads(target), TREES[tree])
    for prompt in PROMPTS:
        expected = generate_plain(target, prompt, max_new_tokens=NEW_TOKENS).tokens
        assert decoder.generate(prompt, max_new_tokens=NEW_TOKENS).tokens == expected


def test_the_backend_follows_from_the_configuration() -> None:
    assert suited_attention(llama_config()) == GROUPED
    assert suited_attention(llama_config(num_key_value_heads=8)) == "sdpa"
    assert suited_attention(gemma2_config()) == "eager"
