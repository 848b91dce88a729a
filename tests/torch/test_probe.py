"""The start-up probe: it passes for every backend that isolates branches, and nothing else gets past it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import (
    ARCHITECTURES,
    WINDOW,
    as_target,
    gpt2_config,
    heads_of,
    llama_config,
    mistral_config,
    must_not_run,
    target_of,
    tiny_llama,
    tiny_model,
)
from torch import Tensor
from transformers import BertConfig, GPTNeoConfig

from topo_search.decode import plan as plan_module
from topo_search.decode import probe as probe_module
from topo_search.decode.decoder import TreeDecoder
from topo_search.decode.plan import plan_tree
from topo_search.decode.probe import probe
from topo_search.decode.step import TreeStep
from topo_search.errors import CheckError, InputError
from topo_search.target import Target, load_target
from topo_search.target.load import make_target
from topo_search.tree import Tree

REAL_FORWARD = Target.hidden_states


def tampered_plan(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let the probe build plans with other tensors than those of the tree."""
    monkeypatch.setattr(
        probe_module, "plan_tree", lambda *args, **kwargs: replace(plan_tree(*args, **kwargs), **changes)
    )


def tampered_forward(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let the adapter change its arguments where a tree is verified."""

    def forward(target: Target, input_ids: Tensor, **arguments: Any) -> Tensor:
        if arguments.get("attention_mask") is not None:
            input_ids, arguments = change(input_ids, dict(arguments))
        return REAL_FORWARD(target, input_ids, **arguments)

    monkeypatch.setattr(Target, "hidden_states", forward)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_supported_kind_of_model_passes(architecture: str) -> None:
    probe(target_of(architecture))


@pytest.mark.parametrize("config", [llama_config(), mistral_config(), gpt2_config()])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_precision_and_backend_passes(config: Any, dtype: str, attention: str) -> None:
    model = tiny_model(config, dtype=getattr(torch, dtype), attention=attention)
    probe(make_target(model, None, name="tiny", dtype=dtype, pack=False))


def test_a_mask_of_ones_and_zeros_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """FIELD-CASES 6: a float mask is added to the scores, so ones and zeros hide nothing and raise nothing."""
    monkeypatch.setattr(plan_module, "_additive", lambda visible, dtype: visible.to(dtype))
    with pytest.raises(CheckError, match="mask is not honoured: changing one sibling's token moved the logits"):
        probe(target_of("llama"))


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
def test_an_ignored_mask_is_caught(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FIELD-CASES 6: the version or backend silently takes its own causal mask instead."""
    tampered_forward(monkeypatch, lambda ids, arguments: (ids, arguments | {"attention_mask": None}))
    with pytest.raises(CheckError, match="mask is not honoured"):
        probe(target_of(architecture))


def test_positions_by_slot_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """FIELD-CASES 1: the mask is right, the positions are those of a flat list."""
    tampered_plan(monkeypatch, offsets=torch.arange(7)[None])
    with pytest.raises(CheckError, match="positions, window or mask are wrong for llama"):
        probe(target_of("llama"))


def test_a_forgotten_window_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """FIELD-CASES 9: the prompt of the probe is longer than the window."""
    tampered_plan(monkeypatch, window_mask=None)
    with pytest.raises(CheckError, match="positions, window or mask are wrong for mistral"):
        probe(target_of("mistral"))


def test_a_window_that_the_adapter_does_not_know_is_caught() -> None:
    """GPT-Neo's local layers count slots, not positions, back to `window_size`; a short prompt would not show it."""
    config = GPTNeoConfig(
        vocab_size=61,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=20,
    )
    neo = as_target(tiny_model(config, attention="eager"), name="neo")
    assert neo.window is None
    with pytest.raises(CheckError, match="positions, window or mask are wrong for neo"):
        probe(neo)


def test_one_mask_for_layers_that_differ_is_caught() -> None:
    mixed = replace(target_of("gemma3"), mixes_layer_types=False)
    with pytest.raises(CheckError, match="positions, window or mask are wrong for gemma3"):
        probe(mixed)


def test_an_output_layer_that_is_not_all_of_it_is_caught() -> None:
    """BERT's decoders transform the hidden states once more before the output layer."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    bert = as_target(tiny_model(BertConfig(vocab_size=61, is_decoder=True, **sizes)), name="bert")
    with pytest.raises(CheckError, match=r"bert \(bert\) computes its logits otherwise than by its output layer"):
        probe(bert)


def test_tokens_that_are_not_read_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    tampered_forward(monkeypatch, lambda ids, arguments: (ids[:, :1].expand_as(ids), arguments))
    with pytest.raises(CheckError, match="Changing a node's token left its own logits unchanged"):
        probe(target_of("llama"))


def test_an_adapter_that_raises_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """FIELD-CASES 7: index asserts and wrong shapes of a kernel that takes no 4-D mask."""

    def refuse(ids: Tensor, arguments: dict[str, Any]) -> Any:
        raise IndexError("mask must be 2-D")

    tampered_forward(monkeypatch, refuse)
    with pytest.raises(CheckError, match="llama cannot take a 4-D tree mask: mask must be 2-D"):
        probe(target_of("llama"))


def test_the_probe_reads_past_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def forward(target: Target, input_ids: Tensor, **arguments: Any) -> Tensor:
        seen.append(input_ids.shape[1])
        return REAL_FORWARD(target, input_ids, **arguments)

    monkeypatch.setattr(Target, "hidden_states", forward)
    probe(target_of("mistral"))
    assert max(seen) > 2 * WINDOW


def test_a_window_as_long_as_the_positions_is_none() -> None:
    """It hides nothing that can be reached, and the probe need not write a prompt that long."""
    assert as_target(tiny_model(mistral_config(max_position_embeddings=64, sliding_window=63))).window == 63
    assert as_target(tiny_model(mistral_config(max_position_embeddings=64, sliding_window=64))).window is None


def test_a_decoder_is_not_built_when_the_probe_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeStep, "_mask", lambda step, length: None)
    with pytest.raises(CheckError, match="mask is not honoured"):
        TreeDecoder(target_of("llama"), heads_of("llama"), Tree.chain(2))


def test_flash_attention_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """FIELD-CASES 7: it takes no 4-D mask; never a silent ignore."""
    monkeypatch.setattr("topo_search.target.load._load_model", must_not_run)
    with pytest.raises(
        InputError, match="'flash_attention_2' takes no 4-D tree mask; choose one of auto, grouped, sdpa, eager"
    ):
        load_target("demo", attention="flash_attention_2")


def test_a_model_loaded_with_flash_attention_is_refused() -> None:
    """FIELD-CASES 7."""
    model = tiny_llama().model
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match="'flash_attention_2' takes no 4-D tree mask"):
        as_target(model)
