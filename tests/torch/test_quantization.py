"""Quantised targets: loaded, identified, decoded and told apart; torchao is the extra `quant`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from folders import save_tiny_heads, save_tiny_target
from models import MEDUSA_63, SPARSE
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from topo_search.decode.decoder import TreeDecoder
from topo_search.errors import InputError, MismatchError
from topo_search.heads import load_heads
from topo_search.identity import require_same
from topo_search.reference import generate_plain
from topo_search.target import Target, load_target
from topo_search.target.packing import PackedLinear, pack_linears
from topo_search.target.quantization import dense, quantization_of
from topo_search.training.joint import Adapted
from topo_search.tree import Tree

pytest.importorskip("torchao", reason="the extra quant is not installed")

PROMPT = [6, 7, 8]
WAYS = [("int8", "float32"), ("int8", "bfloat16"), ("int4", "bfloat16"), ("int4", "float16")]
NAMES = {"int8": "torchao Int8WeightOnly PerRow", "int4": "torchao PrototypeInt4WeightOnly group_size=32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def heads(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_heads(tmp_path_factory.mktemp("heads") / "heads", folder)


@pytest.mark.parametrize(("quantize", "dtype"), WAYS)
def test_trees_write_the_quantised_targets_own_text(quantize: str, dtype: str, folder: Path, heads: Path) -> None:
    """FIELD-CASES 29, 30: heads in the target's precision, sharing its unquantised output layer."""
    target = load_target(str(folder), dtype=dtype, quantize=quantize)
    assert str(target.dtype) == f"torch.{dtype}"
    plain = generate_plain(target, PROMPT, max_new_tokens=12)
    accepted = 0
    for tree in (Tree(()), SPARSE.pruned(3), MEDUSA_63.pruned(3)):
        answer = TreeDecoder(target, load_heads(str(heads), target), tree).generate(PROMPT, max_new_tokens=12)
        assert answer.tokens == plain.tokens
        accepted += answer.stats.accepted_tokens
    assert accepted


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_the_identity_says_how_the_weights_are_held(quantize: str, folder: Path) -> None:
    """FIELD-CASES 30: one checkpoint, so one fingerprint, and a trace of the one is refused beside the other."""
    whole = load_target(str(folder), dtype="bfloat16")
    target = load_target(str(folder), dtype="bfloat16", quantize=quantize)
    assert target.identity.fingerprint == whole.identity.fingerprint
    assert (whole.identity.quantization, target.identity.quantization) == (None, NAMES[quantize])
    assert target.note == f"{quantize} weights made by torchao"
    with pytest.raises(MismatchError, match=f"quantization is None, not '{NAMES[quantize]}'"):
        require_same("The trace", whole.identity, target.identity)


def test_the_output_layer_and_the_embeddings_stay_whole_and_packing_leaves_the_rest_alone(folder: Path) -> None:
    target = load_target(str(folder), quantize="int8")
    linears = [m for m in target.model.modules() if isinstance(m, nn.Linear)]
    assert {type(m.weight).__name__ for m in linears} == {"Int8Tensor"}
    assert target.packed
    assert isinstance(target.output_layer, PackedLinear)
    assert torch.equal(target.output_weight, load_target(str(folder), pack=False).output_weight)
    assert pack_linears(target.model) == 0
    assert (target.vocab_size, target.hidden_size) == (61, 64)


def test_a_checkpoint_that_is_quantised_already_loads_as_it_is(folder: Path, heads: Path, tmp_path: Path) -> None:
    """Its fingerprint is of the weights as stored, so heads that name the whole target are refused beside it."""
    made = load_target(str(folder), dtype="bfloat16", quantize="int8", pack=False)
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    assert any(tensor.dtype == torch.int8 for tensor in load_file(tmp_path / "model.safetensors").values())
    target = load_target(str(tmp_path), dtype="bfloat16")
    assert target.identity.quantization == NAMES["int8"]
    assert target.identity.fingerprint != made.identity.fingerprint
    assert target.identity.fingerprint == load_target(str(tmp_path), dtype="bfloat16").identity.fingerprint
    text = [TreeDecoder(one, None, Tree(())).generate(PROMPT, max_new_tokens=8).tokens for one in (made, target)]
    assert text[0] == text[1]
    with pytest.raises(MismatchError, match="were trained for target tiny"):
        load_heads(str(heads), target)
    with pytest.raises(
        InputError, match=r"is quantised already \(torchao Int8WeightOnly PerRow\); leave --quantize out"
    ):
        load_target(str(tmp_path), dtype="bfloat16", quantize="int4")


def test_a_quantised_output_layer_is_read_as_the_matrix_it_stands_for(folder: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole = model.lm_head.weight.detach().clone()
    quantize_(model.lm_head, Int8WeightOnlyConfig())
    assert type(model.lm_head.weight).__name__ == "Int8Tensor"
    assert torch.allclose(dense(model.lm_head.weight, "tiny"), whole, atol=0.02)
    with pytest.raises(InputError, match=r"The output layer of tiny is quantised as Tensor of torch.uint8"):
        dense(torch.zeros(4, 4, dtype=torch.uint8), "tiny")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantize": "int3"}, r"Unknown quantisation 'int3'; choose one of int8, int4"),
        ({"quantize": "int8", "dtype": "float64"}, r"int8 weights compute in float32 or bfloat16, not in float64"),
        ({"quantize": "int8", "dtype": "float16"}, r"int8 weights compute in float32 or bfloat16, not in float16"),
        ({"quantize": "int4", "device": "meta"}, r"int4 is torchao's prototype for CPUs, not for meta"),
    ],
)
def test_what_cannot_be_quantised_is_refused_before_loading(settings: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_target("no-such-model", **settings)  # type: ignore[arg-type]


def test_without_torchao_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"needs torchao: pip install 'topo-search\[quant\]'"):
        load_target(str(folder), quantize="int8")


def test_a_quantised_target_is_not_trained(folder: Path) -> None:
    target: Target = load_target(str(folder), quantize="int8", pack=False)
    with pytest.raises(InputError, match=r"are quantised \(torchao Int8WeightOnly PerRow\) and cannot be merged"):
        Adapted(target, rank=2, alpha=2, seed=0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (None, None),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dataset": "c4"}, "gptq bits=4 group_size=128"),
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": False, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            "bitsandbytes load_in_4bit=True bnb_4bit_quant_type=nf4",
        ),
    ],
)
def test_other_ways_to_quantise_are_named_by_their_method(settings: dict[str, Any] | None, words: str | None) -> None:
    config = SimpleNamespace() if settings is None else SimpleNamespace(quantization_config=settings)
    assert quantization_of(config) == words
