"""The cache: written behind the committed text, cut by `commit`, compacted by `keep`, never moved otherwise."""

from __future__ import annotations

import pytest
import torch
from models import target_of, tiny_llama, tiny_model
from torch import nn
from transformers import DeepseekV3Config

from topo_search.decode.cache import SlotCache
from topo_search.errors import InputError
from topo_search.target.load import make_target

LAYERS, KV_HEADS, HEAD_DIM, CAPACITY = 2, 2, 3, 12


def filled(committed: int, *, batch: int = 1) -> SlotCache:
    """A cache with so many committed tokens, every number in it distinct."""
    cache = SlotCache(
        layers=LAYERS,
        batch=batch,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        capacity=CAPACITY,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    cache.storage.copy_(torch.arange(cache.storage.numel()).reshape(cache.storage.shape))
    cache.length = committed
    return cache


def written(cache: SlotCache, width: int) -> torch.Tensor:
    """Run what a forward pass of `width` tokens does in every layer; returns what was written."""
    tokens = torch.randn(LAYERS, 2, cache.storage.shape[2], KV_HEADS, width, HEAD_DIM, dtype=torch.float64)
    for layer, (keys, values) in zip(cache.layers, tokens, strict=True):
        layer.update(keys, values)
    return tokens


def test_a_forward_pass_writes_behind_the_committed_tokens() -> None:
    cache = filled(committed=4)
    committed = cache.storage[..., :4, :].clone()
    tokens = written(cache, width=3)
    assert torch.equal(cache.storage[..., 4:7, :], tokens)
    assert torch.equal(cache.storage[..., :4, :], committed)
    assert cache.length == 4


def test_attention_gets_views_of_the_storage() -> None:
    """Growing or copying the keys and values of every step is what the cache exists to avoid."""
    cache = filled(committed=4)
    keys, values = cache.layers[1].update(*torch.zeros(2, 1, KV_HEADS, 3, HEAD_DIM, dtype=torch.float64))
    assert keys.shape == values.shape == (1, KV_HEADS, 7, HEAD_DIM)
    assert (keys.data_ptr(), values.data_ptr()) == (cache.storage[1, 0].data_ptr(), cache.storage[1, 1].data_ptr())


@pytest.mark.parametrize("kept", range(6))
def test_commit_keeps_the_first_tokens_written(kept: int) -> None:
    """FIELD-CASES 10: keep-first-k, none and all included; what follows is overwritten by the next pass."""
    cache = filled(committed=3)
    tokens = written(cache, width=5)
    cache.commit(kept)
    after = written(cache, width=2)
    assert cache.length == 3 + kept
    assert torch.equal(cache.storage[..., 3 : 3 + kept, :], tokens[..., :kept, :])
    assert torch.equal(cache.storage[..., 3 + kept : 5 + kept, :], after)


@pytest.mark.parametrize("slots", [[0], [0, 2, 5], [0, 1, 2], [0, 5], [0, 1, 2, 3, 4, 5]])
def test_keep_gathers_the_accepted_slots_in_order(slots: list[int]) -> None:
    """FIELD-CASES 4, 10: of six slots exactly the accepted ones stay, dense and in order; the prefix does not move."""
    cache = filled(committed=4)
    prefix, address = cache.storage[..., :4, :].clone(), cache.storage.data_ptr()
    tokens = written(cache, width=6)
    cache.keep(torch.tensor(slots))
    assert cache.length == 4 + len(slots)
    assert torch.equal(cache.storage[..., 4 : cache.length, :], tokens[..., slots, :])
    assert torch.equal(cache.storage[..., :4, :], prefix)
    assert cache.storage.data_ptr() == address


def test_clear_forgets_the_text_and_keeps_the_storage() -> None:
    cache = filled(committed=7)
    address = cache.storage.data_ptr()
    cache.clear()
    tokens = written(cache, width=2)
    assert cache.storage.data_ptr() == address
    assert torch.equal(cache.storage[..., :2, :], tokens)


def test_rows_that_go_on_keep_their_text() -> None:
    cache = filled(committed=5, batch=3)
    smaller = cache.select_rows(torch.tensor([0, 2]))
    assert torch.equal(smaller.storage[..., :5, :], cache.storage[:, :, [0, 2], :, :5])
    assert (smaller.length, smaller.capacity) == (5, CAPACITY)
    tokens = written(smaller, width=1)
    assert torch.equal(smaller.storage[..., 5:6, :], tokens)


def test_what_transformers_asks_a_cache() -> None:
    cache = filled(committed=5)
    assert cache.get_seq_length() == 5
    assert cache.get_mask_sizes(3, 0) == (8, 0)
    assert cache.layers[0].get_max_cache_shape() == cache.layers[0].get_max_length() == CAPACITY
    assert not any(cache.is_sliding)


def test_the_cache_has_the_shape_of_key_value_heads() -> None:
    """FIELD-CASES 75: eight attention heads on two key-value heads."""
    target = target_of("llama")
    assert target.kv_shape == (2, 2, 8)
    assert target.new_cache(10, batch=3).storage.shape == (2, 2, 3, 2, 10, 8)


def test_layers_of_different_shapes_are_refused_by_name() -> None:
    """FIELD-CASES 10: one storage holds every layer, so all layers must agree."""
    model = tiny_llama().model
    attention = model.model.layers[1].self_attn
    attention.k_proj, attention.v_proj = (nn.Linear(64, 32, bias=False, dtype=torch.float64) for _ in range(2))
    attention.num_key_value_groups = 2
    with pytest.raises(InputError, match=r"uneven \(llama\) has layers whose caches differ .*\(1, 4, 1, 8\)"):
        make_target(model, None, name="uneven", dtype="float64")


def test_keys_and_values_of_different_shapes_are_refused_by_name() -> None:
    """FIELD-CASES 10: latent attention keeps keys that are wider than its values."""
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    config = DeepseekV3Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts_per_tok=2,
        **latent,
        **experts,
    )
    with pytest.raises(InputError, match=r"latent \(deepseek_v3\) has layers whose caches differ"):
        make_target(tiny_model(config, dtype=torch.float32), None, name="latent", dtype="float32")
