"""Loading a target: what cannot serve trees is refused by name, and packing or padding changes nothing it says."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from folders import save_tiny_target, word_tokenizer
from models import VOCAB, as_target, llama_config, mistral_config, target_of, tiny_llama, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerFast, T5Config

from topo_search.decode.decoder import TreeDecoder
from topo_search.errors import InputError
from topo_search.reference import generate_plain
from topo_search.target import Target, load_target
from topo_search.target.fingerprint import weights_fingerprint
from topo_search.target.gguf import repair_pre_tokenizer
from topo_search.target.load import make_target, require_sane
from topo_search.target.packing import PackedLinear, can_pack, pack_linears
from topo_search.tree import Tree

# Loading


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in fp32 with a tokenizer."""
    return save_tiny_target(tmp_path_factory.mktemp("target"))


def test_a_folder_loads_as_a_target(folder: Path) -> None:
    target = load_target(str(folder))
    assert target.identity.name == str(folder)
    assert target.identity.dtype == "float32"
    assert target.eos_token_ids == (1,)
    assert target.position_limit == 128
    assert (target.window, target.mixes_layer_types, target.note) == (None, False, None)
    assert (target.attention, target.dtype, target.hidden_size) == ("grouped", torch.float32, 64)
    assert target.encode_chat([{"role": "user", "content": "w1"}]) == [2, 6, 4]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_every_precision_loads_and_decodes(dtype: str, folder: Path) -> None:
    """FIELD-CASES 30: precision is a field of its own in the identity, beside the weights' fingerprint."""
    target = load_target(str(folder), dtype=dtype)
    assert str(target.dtype) == f"torch.{dtype}"
    assert target.identity.dtype == dtype
    assert target.packed == (dtype == "float32" and can_pack())
    if dtype != "float16":  # fp16 rounds otherwise than bf16, to which the fingerprint's samples are rounded
        assert target.identity.fingerprint == load_target(str(folder)).identity.fingerprint
    prompt = [6, 7, 8]
    plain = generate_plain(target, prompt, max_new_tokens=6)
    assert TreeDecoder(target, None, Tree(())).generate(prompt, max_new_tokens=6).tokens == plain.tokens


def test_another_tokenizer_may_be_named(folder: Path, tmp_path: Path) -> None:
    """FIELD-CASES 77: the override for a tokenizer that came out wrong."""
    other = word_tokenizer(chat_template="{{ messages[0]['content'] }}")
    other.save_pretrained(tmp_path)
    assert load_target(str(folder), tokenizer=str(tmp_path)).encode_chat([{"role": "user", "content": "w1"}]) == [6]
    with pytest.raises(InputError, match=r"No tokenizer in .*nowhere.*Name one with --tokenizer"):
        load_target(str(folder), tokenizer=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("./no-such-folder", "Target folder ./no-such-folder does not exist"),
        ("/no/such/folder", "Target folder /no/such/folder does not exist"),
        ("no-such-file.gguf", "Target file no-such-file.gguf does not exist"),
    ],
)
def test_a_missing_target_is_refused(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_target(spec)


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no config.json, so it holds no transformers model"):
        load_target(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(InputError, match="cannot be loaded as a decoder-only model"):
        load_target(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(llama_config().to_dict()))
    with pytest.raises(InputError, match=r"cannot be loaded as a decoder-only model: .*model.safetensors"):
        load_target(str(tmp_path))


def test_pickled_weights_are_not_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="cannot be loaded as a decoder-only model"):
        load_target(str(tmp_path))


def test_an_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    T5Config(vocab_size=VOCAB, d_model=16, num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"is an encoder-decoder \(t5\); trees need a decoder-only model"):
        load_target(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int3"}, "Unknown dtype 'int3'; choose one of float32, bfloat16, float16, float64"),
        ({"device": "no-such-device"}, "Device 'no-such-device' cannot be used here"),
        ({"device": "cuda:77"}, "Device 'cuda:77' cannot be used here"),
        ({"attention": "flex_attention"}, "Attention 'flex_attention' takes no 4-D tree mask"),
    ],
)
def test_unknown_settings_are_refused(settings: dict[str, str], message: str, folder: Path) -> None:
    with pytest.raises(InputError, match=message):
        load_target(str(folder), **settings)


SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4}
ATTENTION = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
RECURRENT = {
    "mamba": lambda: transformers.MambaConfig(**SMALL, state_size=4),
    "recurrent_gemma": lambda: transformers.RecurrentGemmaConfig(
        **SMALL, intermediate_size=48, num_attention_heads=4, attention_window_size=8
    ),
    "lfm2": lambda: transformers.Lfm2Config(**SMALL, **ATTENTION, layer_types=["conv", "full_attention"] * 2),
}


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_and_hybrid_models_are_refused_by_name(kind: str) -> None:
    """FIELD-CASES 10, 15: their state cannot follow two branches; the cache that is missing is named too."""
    attention = "eager" if kind == "mamba" else "sdpa"
    model = tiny_model(RECURRENT[kind](), dtype=torch.float32, attention=attention)
    with pytest.raises(InputError, match=rf"hybrid \({kind}\) fills no key-value cache .*LinearAttentionLayer"):
        make_target(model, None, name="hybrid", dtype="float32")


# Ids


@pytest.mark.parametrize(("own", "ids"), [(None, (7,)), (3, (3,)), ([3, 4], (3, 4)), ([], ())])
def test_every_end_of_text_id_counts(own: Any, ids: tuple[int, ...]) -> None:
    """FIELD-CASES 3: one id or several; the model's configuration where the generation settings name none."""
    model = tiny_model(llama_config(eos_token_id=7))
    model.generation_config = GenerationConfig(eos_token_id=own)
    assert as_target(model).eos_token_ids == ids


def test_ids_without_a_tokenizer_entry_are_unknown() -> None:
    """FIELD-CASES 79: the output layer is padded beyond the tokenizer; gaps inside the tokenizer are not its end."""
    model = tiny_model(llama_config(vocab_size=80))
    assert as_target(model, tokenizer=word_tokenizer()).known_ids == 61
    gapped = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 70}, unk_token="a")))
    assert as_target(model, tokenizer=gapped).known_ids == 71
    assert as_target(model).known_ids == 80
    assert as_target(tiny_model(llama_config(vocab_size=40)), tokenizer=word_tokenizer()).known_ids == 40


def test_unknown_ids_score_minus_infinity() -> None:
    """FIELD-CASES 79."""
    target = replace(target_of("llama"), known_ids=50)
    scores = target.scores(torch.randn(3, 64, dtype=torch.float64))
    assert bool((scores[:, 50:] == float("-inf")).all())
    assert bool(torch.isfinite(scores[:, :50]).all())


@pytest.mark.parametrize(
    ("changes", "window", "mixes"),
    [
        ({"sliding_window": 4}, 4, False),
        ({"sliding_window": None}, None, False),
        ({"sliding_window": 4, "layer_types": ["full_attention", "full_attention"]}, None, False),
        ({"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}, 4, True),
    ],
)
def test_windows_are_those_of_the_layers(changes: dict[str, Any], window: int | None, mixes: bool) -> None:
    target = as_target(tiny_model(mistral_config(**changes)))
    assert (target.window, target.mixes_layer_types) == (window, mixes)


def test_heads_are_as_wide_as_what_the_output_layer_reads() -> None:
    """OPT-350m projects its hidden states down first."""
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    target = as_target(tiny_model(transformers.OPTConfig(vocab_size=VOCAB, word_embed_proj_dim=16, **sizes)))
    assert target.hidden_size == 16
    assert target.hidden_states(torch.tensor([[5, 6]])).shape == (1, 2, 16)


# Identity


def test_a_fingerprint_tells_weights_apart() -> None:
    one, again = tiny_llama(), tiny_llama()
    assert one.identity.fingerprint == again.identity.fingerprint
    with torch.no_grad():
        again.model.model.layers[1].mlp.up_proj.weight[0, 0] += 0.5
    assert weights_fingerprint(again.model) != one.identity.fingerprint
    assert weights_fingerprint(one.model.to(torch.bfloat16)) == one.identity.fingerprint


# Packing


def fp32_llama() -> Target:
    return make_target(tiny_model(llama_config(), dtype=torch.float32), None, name="fp32", dtype="float32", pack=False)


def test_packed_weights_say_what_unpacked_ones_say() -> None:
    plain = fp32_llama()
    packed = make_target(copy.deepcopy(plain.model), None, name="fp32", dtype="float32")
    assert packed.packed == can_pack()
    assert not plain.packed
    for width in (1, 2, 7, 40):
        ids = torch.randint(0, VOCAB, (1, width))
        with torch.inference_mode():
            states = [target.hidden_states(ids) for target in (plain, packed)]
            assert torch.allclose(*states, rtol=0, atol=1e-4)
            assert torch.allclose(plain.scores(states[0]), packed.scores(states[0]), rtol=0, atol=1e-4)
    assert packed.identity == plain.identity
    assert torch.equal(packed.output_weight, plain.output_weight)


@pytest.mark.skipif(not can_pack(), reason="this torch build cannot pack")
def test_every_linear_layer_is_packed_and_only_the_output_weight_kept() -> None:
    model = fp32_llama().model
    linear = sum(type(module) is nn.Linear for module in model.modules())
    assert pack_linears(model, output_layer=model.get_output_embeddings()) == linear
    packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert len(packed) == linear
    assert [name for name, module in packed.items() if module.weight is not None] == ["lm_head"]


def test_biases_are_packed_too() -> None:
    plain = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16, bias=False))
    packed = copy.deepcopy(plain)
    pack_linears(packed)
    inputs = torch.randn(5, 32)
    with torch.inference_mode():
        assert torch.allclose(plain(inputs), packed(inputs), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_only_fp32_is_packed(dtype: torch.dtype) -> None:
    assert pack_linears(nn.Sequential(nn.Linear(8, 8, dtype=dtype))) == 0


# Sanity


def test_uniform_logits_are_refused() -> None:
    """FIELD-CASES 78: tensors dropped on the way give uniform logits and no error."""
    model = tiny_model(llama_config())
    with torch.no_grad():
        model.lm_head.weight.zero_()
    with pytest.raises(InputError, match=r"lossy predicts plain English no better than chance \(loss .*guessing gives"):
        require_sane(model, word_tokenizer(), "lossy")


def test_only_the_pre_tokenizer_that_is_known_is_repaired() -> None:
    tokenizer = word_tokenizer()
    before = tokenizer.tokenize("w1 w22")
    repair_pre_tokenizer(tokenizer, "llama-bpe")
    repair_pre_tokenizer(tokenizer, None)
    assert tokenizer.tokenize("w1 w22") == before
    repair_pre_tokenizer(tokenizer, "smollm")
    assert tokenizer.tokenize("w1 w22") != before


# The demo target


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("    12 apples", ["ĠĠĠĠ", "1", "2", "Ġapples"]),
        ("\n\n3.", ["ĊĊ", "3", "."]),
        ("x = 2024", ["x", "Ġ=", "Ġ", "2", "0", "2", "4"]),
    ],
)
def test_the_demo_tokenizer_isolates_digits(text: str, tokens: list[str], demo: Target) -> None:
    """FIELD-CASES 77: as the model was trained, not as a plain byte-level tokenizer splits."""
    assert demo.tokenizer.tokenize(text) == tokens
    assert demo.tokenizer.decode(demo.tokenizer(text).input_ids) == text


@pytest.mark.real_model
def test_the_demos_special_tokens_are_one_id_each(demo: Target) -> None:
    """FIELD-CASES 77."""
    for token in ("<|im_start|>", "<|im_end|>"):
        assert len(demo.tokenizer(token, add_special_tokens=False).input_ids) == 1
    chat = demo.encode_chat([{"role": "user", "content": "Hello"}])
    start, end = demo.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert chat.count(start) >= 2
    assert demo.eos_token_ids == (end,)


@pytest.mark.real_model
def test_the_demo_is_labelled_and_sane(demo: Target) -> None:
    """FIELD-CASES 78: de-quantised weights are said to be; weights that lost something are refused."""
    assert demo.note is not None
    assert "its latency is not the quantised model's" in demo.note
    require_sane(demo.model, demo.tokenizer, "demo")
    norm = demo.body.norm.weight
    kept = norm.clone()
    try:
        with torch.no_grad():
            norm.zero_()
        with pytest.raises(InputError, match=r"demo predicts plain English no better than chance"):
            require_sane(demo.model, demo.tokenizer, "demo")
    finally:
        with torch.no_grad():
            norm.copy_(kept)
