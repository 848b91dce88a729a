"""Draft heads on disk: our layout round-trips, other projects' layouts score by their formula, no broken one loads."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import (
    HIDDEN,
    drawn,
    hydra_scores,
    hydra_tensors,
    medusa_scores,
    medusa_tensors,
    stored,
    vllm_scores,
    vllm_tensors,
)
from models import (
    VOCAB,
    as_target,
    drawn_hydra,
    hydra_shape,
    llama_config,
    must_not_run,
    target_of,
    tiny_model,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaModel

from topo_search.errors import InputError, MismatchError
from topo_search.heads import DraftHeads, load_heads, save_heads
from topo_search.heads.attention import LayerShape
from topo_search.heads.checkpoints import read_checkpoint
from topo_search.heads.checkpoints.medusa_layouts import write_medusa
from topo_search.heads.families import FAMILIES, family_of
from topo_search.heads.hydra import HydraBlocks, HydraHeads, HydraShape
from topo_search.heads.medusa import MedusaBlocks, MedusaHeads, untrained_blocks
from topo_search.target import Target

TARGET = target_of("llama")
FILES = pytest.mark.parametrize("suffix", ["safetensors", "pt"])
KINDS = ("medusa", "medusa own", "hydra", "hydra own", "hydra++")


def blocks_of(kind: str) -> Any:
    """Blocks whose every number is drawn."""
    if kind.startswith("medusa"):
        blocks = untrained_blocks(TARGET, num_heads=3, num_layers=2, share_projection=kind == "medusa").double()
        for parameter in blocks.parameters():
            parameter.data.normal_(std=0.1)
        return blocks
    whole = {"arch": "guide", "sees": "fusion", "prefix_attention": True, "root_in_prefix": True}
    options: dict[str, Any] = whole if kind == "hydra++" else {}
    return drawn_hydra(TARGET, hydra_shape(TARGET, num_heads=3, **options), own_projection=kind == "hydra own")


def rows(count: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(count, HIDDEN, dtype=torch.float64), torch.randint(0, VOCAB, (count, 8))


def scores_of(heads: DraftHeads, states: Tensor, tokens: Tensor) -> Tensor:
    return heads.path_scores(heads.features(states, tokens[:, 0]), tokens[:, : heads.identity.num_heads])


def rewritten(folder: Path, change: Any) -> None:
    """Let `change` alter the dictionary of stored tensors."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def load(folder: Path, target: Target = TARGET) -> Any:
    return load_heads(str(folder), target)


# Our own layout


@pytest.mark.parametrize("kind", KINDS)
def test_saved_heads_load_as_they_were(kind: str, tmp_path: Path) -> None:
    """FIELD-CASES 85, 86: kind and shape from the configuration, projections from the tensors."""
    blocks = blocks_of(kind)
    save_heads(tmp_path, blocks, {"seed": 7, "training_tokens": 9}, dtype=torch.float64)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "heads.safetensors"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert list(config) == ["format", "version", "kind", "shape", "seed", "training_tokens"]
    loaded = load(tmp_path)
    assert isinstance(loaded, MedusaHeads if kind.startswith("medusa") else HydraHeads)
    assert loaded.blocks.shape == blocks.shape
    assert loaded.identity.num_heads == 3
    assert loaded.identity.kind == family_of(blocks).kind
    assert loaded.token_map is None
    expected, found = blocks.state_dict(), loaded.blocks.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shortlist_is_stored_with_its_heads(kind: str, tmp_path: Path) -> None:
    """FIELD-CASES 85: a tied base, a smaller head output; nothing of the base's configuration is inherited."""
    model = tiny_model(llama_config(tie_word_embeddings=True))
    tied, blocks, shortlist = as_target(model), blocks_of(kind), torch.tensor([1, 4, 9, 60])
    if blocks.projection is not None:
        blocks.projection = nn.Parameter(blocks.projection[:, shortlist].detach())
    save_heads(tmp_path, blocks, {}, token_map=shortlist, dtype=torch.float64)
    assert load_file(tmp_path / "heads.safetensors")["token_map"].dtype == torch.int32
    assert "tie" not in (tmp_path / "config.json").read_text()
    loaded = load(tmp_path, tied)
    assert loaded.token_map.tolist() == [1, 4, 9, 60]
    states, tokens = rows()
    assert scores_of(loaded, states, tokens).shape == (4, 3, 4)


def test_heads_are_stored_and_loaded_in_the_precision_asked_for(tmp_path: Path) -> None:
    """Rounded heads rank otherwise, so their fingerprint is another."""
    save_heads(tmp_path, blocks_of("hydra"), {}, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "heads.safetensors").values()} == {torch.bfloat16}
    whole, rounded = load(tmp_path), load_heads(str(tmp_path), TARGET, dtype=torch.bfloat16)
    assert {p.dtype for p in whole.blocks.parameters()} == {torch.float64}  # type: ignore[attr-defined]
    assert {p.dtype for p in rounded.blocks.parameters()} == {torch.bfloat16}  # type: ignore[attr-defined]
    assert rounded.identity.fingerprint == f"{whole.identity.fingerprint}-bfloat16"
    assert load_heads(str(tmp_path), TARGET, dtype=torch.float64).identity == whole.identity


def test_the_fingerprint_is_that_of_tensors_and_shape(tmp_path: Path) -> None:
    """Two attention layers may differ in what no tensor shows, the base of their rotary angles."""
    layer = LayerShape.of(TARGET)
    found = set()
    for name, theta in (("a", 1e4), ("b", 1e4), ("c", 1e6)):
        shape = hydra_shape(TARGET, num_heads=1, prefix_attention=True)
        blocks = drawn_hydra(TARGET, replace(shape, layer=replace(layer, rope_theta=theta)))
        save_heads(tmp_path / name, blocks, {"note": name}, dtype=torch.float32)
        found.add(load(tmp_path / name).identity.fingerprint)
    assert len(found) == 2
    rewritten(tmp_path / "a", lambda tensors: tensors["heads.0.linear.bias"].add_(1e-3))
    assert load(tmp_path / "a").identity.fingerprint not in found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "eagle"}, r"kind 'eagle'; known are medusa, hydra"),
        ({"version": 2}, "has version 2; this topo-search reads version 1"),
        ({"format": "other"}, "is no topo-search heads file"),
        ({"shape": None}, "shape: input should be an object"),
        ({"shape": {"hidden": 64, "num_heads": 3}}, "shape: num_layers is missing"),
        ({"shape": {"hidden": 64, "num_heads": 3, "num_layers": 2, "x": 1}}, "x must be given, with known keys only"),
        ({"shape": {"hidden": 64, "num_heads": "3", "num_layers": 2}}, "num_heads: input should be a valid integer"),
        ({"shape": {"hidden": 64, "num_heads": 2, "num_layers": 2}}, r"tensor bias has shape \(3, 2, 64\), not \(2, 2"),
    ],
)
def test_a_configuration_that_makes_no_heads_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_heads(tmp_path, blocks_of("medusa"), {}, dtype=torch.float32)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=message):
        load(tmp_path)


def test_a_record_may_not_overwrite_the_layout(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"own keys .'kind'"):
        save_heads(tmp_path, blocks_of("medusa"), {"kind": "x"}, dtype=torch.float32)


def test_every_family_has_its_own_shape() -> None:
    assert [family.kind for family in FAMILIES] == ["medusa", "hydra"]
    with pytest.raises(ValueError, match="Linear belong to no family"):
        family_of(nn.Linear(2, 2))


# Medusa's layouts


@FILES
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("own", [True, False], ids=["layout A", "layout B"])
def test_medusa_a_and_b(own: bool, layers: int, suffix: str, tmp_path: Path) -> None:
    """FIELD-CASES 86: told apart by their keys; layers that one module repeats are stored as equal tensors."""
    tensors = medusa_tensors(3, layers, own=own)
    heads = load(stored(tmp_path, f"medusa_lm_head.{suffix}", tensors, medusa_num_heads=3, medusa_num_layers=layers))
    states, tokens = rows()
    expected = medusa_scores(tensors, states, None if own else TARGET.output_weight)
    assert torch.allclose(scores_of(heads, states, tokens), expected, rtol=0, atol=1e-9)
    assert (heads.identity.kind, heads.identity.num_heads) == ("medusa", 3)


@pytest.mark.parametrize("prefix", ["medusa_head.", "medusa_heads."])
def test_medusa_c_inside_a_whole_model(prefix: str, tmp_path: Path) -> None:
    """The heads may lie in another shard than the model; of the model only its output layer is looked at."""
    tensors = medusa_tensors(2, 1, prefix=prefix)
    model = {"model.layers.0.mlp.up_proj.weight": drawn(4, 4), "lm_head.weight": TARGET.output_weight.clone()}
    save_file(model, tmp_path / "model-00001-of-00002.safetensors")
    stored(tmp_path, "model-00002-of-00002.safetensors", tensors, medusa_num_heads=2)
    states, tokens = rows()
    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    assert torch.allclose(scores_of(load(tmp_path), states, tokens), medusa_scores(bare, states), rtol=0, atol=1e-9)
    model["lm_head.weight"] = drawn(VOCAB, HIDDEN)
    save_file(model, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(MismatchError, match="carry the output layer of another model"):
        load(tmp_path)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("bias", [False, True])
def test_medusa_d(bias: bool, prefix: str, tmp_path: Path) -> None:
    tensors = vllm_tensors(2, 2, bias=bias, prefix=prefix)
    config = {"model_type": "medusa", "num_heads": 2, "num_hidden_layers": 2, "hidden_size": HIDDEN, "logit_scale": 1.0}
    heads = load(stored(tmp_path, "model.safetensors", tensors, medusa_fc_bias=bias, **config))
    states, tokens = rows()
    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    expected = vllm_scores(bare, states, [bare[f"lm_heads.{head}.weight"] for head in range(2)])
    assert torch.allclose(scores_of(heads, states, tokens), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("whole", [False, True], ids=["cut matrices", "whole matrices"])
@pytest.mark.parametrize("original", [False, True], ids=["own lm_heads", "original_lm_head"])
def test_medusa_d_with_a_token_map(original: bool, whole: bool, tmp_path: Path) -> None:
    """In any order, with matrices already cut to it or whole; columns come out in ascending order of ids."""
    token_map = torch.tensor([40, 3, 17, 60, 2])
    tensors = vllm_tensors(2, 1, rows=VOCAB if whole else 5)
    if original:
        del tensors["lm_heads.1.weight"]
        tensors["lm_heads.0.weight"] = TARGET.output_weight.clone() if whole else TARGET.output_weight[token_map]
    matrices = [tensors[f"lm_heads.{0 if original else head}.weight"] for head in range(2)]
    cut = [matrix[token_map] if whole else matrix for matrix in matrices]
    folder = stored(
        tmp_path,
        "model.safetensors",
        tensors | {"token_map": token_map},
        original_lm_head=original,
        truncated_vocab_size=5,
        vocab_size=VOCAB,
    )
    heads, (states, tokens) = load(folder), rows()
    assert heads.token_map.tolist() == [2, 3, 17, 40, 60]
    expected = vllm_scores(tensors, states, cut)[..., token_map.argsort()]
    assert torch.allclose(scores_of(heads, states, tokens), expected, rtol=0, atol=1e-9)
    assert (heads.blocks.projection is None) == original


def test_an_original_output_layer_of_another_model_is_refused(tmp_path: Path) -> None:
    tensors = vllm_tensors(1, 1)
    with pytest.raises(MismatchError, match="carry the output layer of another model than this target"):
        load(stored(tmp_path, "model.safetensors", tensors, original_lm_head=True))


def test_scaled_scores_are_refused(tmp_path: Path) -> None:
    folder = stored(tmp_path, "model.safetensors", vllm_tensors(1, 1), logit_scale=0.5)
    with pytest.raises(InputError, match=r"logit_scale = 0.5.; only 1 is supported"):
        load(folder)


@pytest.mark.parametrize(("stated", "held"), [(2, 5), (5, 3)])
def test_heads_are_counted_from_the_weights(stated: int, held: int, tmp_path: Path) -> None:
    """FIELD-CASES 53: published configurations are wrong in both directions; no head is made without weights."""
    stored(tmp_path, "medusa_lm_head.safetensors", medusa_tensors(held, 1), medusa_num_heads=stated)
    with pytest.warns(UserWarning, match=rf"medusa_num_heads = {stated}, the weights hold {held}; the weights count"):
        loaded = load(tmp_path)
    assert loaded.identity.num_heads == loaded.blocks.num_heads == held


def test_heads_without_a_configuration_load(tmp_path: Path) -> None:
    (stored(tmp_path, "medusa_lm_head.safetensors", medusa_tensors(3, 1)) / "config.json").unlink()
    assert load(tmp_path).identity.num_heads == 3


# Hydra's layouts


def hydra_config(heads: int, layers: int, **changes: Any) -> dict[str, Any]:
    settings = {"hydra_num_heads": heads, "hydra_num_layers": layers, "hydra_head_arch": "mlp", "grounded_heads": True}
    return settings | {"hidden_state_offset": 0} | changes


@FILES
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("spaced", [False, True], ids=["plain", "dropout in between"])
def test_hydra_mlp(spaced: bool, layers: int, suffix: str, tmp_path: Path) -> None:
    tensors = hydra_tensors(3, layers, spaced=spaced)
    kept = tensors | {"input_embed_fn.weight": TARGET.input_embeddings.weight.detach().clone()}
    heads = load(stored(tmp_path, f"hydra_lm_head.{suffix}", kept, **hydra_config(3, layers)))
    states, tokens = rows()
    expected = hydra_scores(tensors, states, TARGET.embed(tokens))
    assert torch.allclose(scores_of(heads, states, tokens), expected, rtol=0, atol=1e-9)
    assert (heads.identity.kind, heads.identity.num_heads, heads.blocks.shape.num_layers) == ("hydra", 3, layers)


def test_hydra_prefix_mlp(tmp_path: Path) -> None:
    """Its layer is shaped as the target's own; here it is run by transformers, on the same tensors."""
    reference = LlamaModel(llama_config(num_hidden_layers=1)).double()
    tensors, layer = hydra_tensors(2, 2, spaced=True), reference.state_dict()
    layer = {name: drawn(*value.shape) for name, value in layer.items()}
    reference.load_state_dict(layer)
    # All of it under their names: the embedding table is stored and never read.
    named = {f"prefix_embeding_layer.{name}": value for name, value in layer.items()}
    named["prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"] = drawn(4)
    named["input_embed_fn.weight"] = TARGET.input_embeddings.weight.detach().clone()
    folder = stored(tmp_path, "hydra_lm_head.pt", tensors | named, **hydra_config(2, 2, hydra_head_arch="prefix-mlp"))
    heads, (states, tokens) = load(folder), rows(7)
    with torch.no_grad():
        read = reference(inputs_embeds=states[None]).last_hidden_state[0]
    assert heads.reads_prefix
    assert torch.allclose(heads.features(states, tokens[:, 0]), read, rtol=0, atol=1e-9)
    expected = hydra_scores(tensors, read, TARGET.embed(tokens))
    assert torch.allclose(scores_of(heads, states, tokens), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({}, {"hidden_state_offset": 2}, "read the hidden state 2 layers before the last .hidden_state_offset."),
        ({}, {"grounded_heads": False}, "are not grounded"),
        ({"input_embed_fn.weight": drawn(VOCAB, HIDDEN)}, {}, "carry the input embeddings of another model"),
        ({"input_embed_fn.weight": drawn(9, HIDDEN)}, {}, "carry the input embeddings of another model"),
        ({"prefix_embeding_layer.embed_tokens.weight": drawn(9, 9)}, {}, r"embed_tokens.weight has shape \(9, 9\)"),
        ({"cross_attn.q_proj.weight": drawn(9, 9)}, {}, r"unexpected tensors \['cross_attn.q_proj.weight'\]"),
        ({"hydra_lm_head.1.bias": None}, {}, r"missing tensors \['hydra_lm_head.1.bias'\]"),
        ({"hydra_mlp.1.0.linear.bias": None}, {}, r"missing tensors \['hydra_mlp.1.0.linear.bias'\]"),
    ],
)
def test_hydra_checkpoints_that_cannot_serve_are_refused(
    changes: dict[str, Tensor | None], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Their own loader is not strict: a missing tensor would stay random there."""
    tensors = {name: value for name, value in (hydra_tensors(2, 1) | changes).items() if value is not None}
    folder = stored(tmp_path, "hydra_lm_head.safetensors", tensors, **hydra_config(2, 1, **config))
    with pytest.raises(InputError, match=message):
        load(folder)


def test_ungrounded_heads_are_refused(tmp_path: Path) -> None:
    tensors = {name: value for name, value in hydra_tensors(1, 1).items() if "res_connection" not in name}
    with pytest.raises(InputError, match="are not grounded: they see no drafted token"):
        load(stored(tmp_path, "hydra_lm_head.safetensors", tensors))


def test_a_disagreeing_hydra_configuration_is_warned_about(tmp_path: Path) -> None:
    """FIELD-CASES 53."""
    folder = stored(tmp_path, "hydra_lm_head.safetensors", hydra_tensors(2, 1), **hydra_config(4, 1))
    with pytest.warns(UserWarning, match="hydra_num_heads = 4, the weights hold 2"):
        assert load(folder).identity.num_heads == 2


# Refusals


def _drop(*names: str) -> Any:
    return lambda tensors: [tensors.pop(name) for name in names]


def _add(name: str, *shape: int) -> Any:
    return lambda tensors: tensors.update({name: torch.zeros(*shape)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("1.2.weight"), r"missing tensors \['1.2.weight'\], unexpected tensors \[\]"),
        (_drop("1.0.linear.bias"), r"missing tensors \['1.0.linear.bias'\]"),
        (_drop("0.0.linear.weight", "0.0.linear.bias"), r"missing tensors \['0.0.linear.bias', '0.0.linear.weight'\]"),
        (_add("3.2.weight", VOCAB, HIDDEN), r"unexpected tensors \['3.2.weight'\]"),
        (_add("lm_head.weight", VOCAB, HIDDEN), r"unexpected tensors \['lm_head.weight'\]"),
        (_add("1.0.linear.bias", 63), r"tensor 1.0.linear.bias has shape \(63,\), not \(64,\)"),
        (_add("2.2.weight", VOCAB, 60), rf"tensor 2.2.weight has shape \({VOCAB}, 60\), not \({VOCAB}, 64\)"),
        (dict.clear, "unknown layout"),
    ],
)
def test_incomplete_tensors_are_refused_by_name(change: Any, message: str, tmp_path: Path) -> None:
    """FIELD-CASES 22, 86: a head that stays random serves without an error and accepts nothing."""
    rewritten(stored(tmp_path, "medusa_lm_head.safetensors", medusa_tensors(3, 2)), change)
    with pytest.raises(InputError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ("fc.weight", "fc.bias", "layers.0.self_attn.q_proj.weight"),  # EAGLE-1
        ("midlayer.mlp.up_proj.weight", "d2t", "t2d"),  # EAGLE-3
        ("attn.q_proj.weight", "lm_head.weight"),  # Hydra's eagle-attn
        ("medusa_heads.0.medusa_layers.0.linear.weight", "medusa_heads.0.lm_head.weight"),  # an engine's own
    ],
)
def test_unknown_layouts_are_refused_with_the_key_list(names: tuple[str, ...], tmp_path: Path) -> None:
    """FIELD-CASES 86."""
    folder = stored(tmp_path, "model.safetensors", {name: drawn(2, 2) for name in names})
    with pytest.raises(
        InputError, match=r"unknown layout; known are Medusa A, B or C, .*Hydra.* Their tensors"
    ) as error:
        load(folder)
    assert all(name in str(error.value) for name in names)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = stored(tmp_path, "medusa_lm_head.safetensors", medusa_tensors(2, 1)) / "medusa_lm_head.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"medusa_lm_head.safetensors is no whole safetensors file"):
        load(tmp_path)


def test_pickles_are_never_unpickled(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return must_not_run, ()

    path = tmp_path / "medusa_lm_head.pt"
    for content in (pickle.dumps(Evil()), b"no pickle", b""):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"holds more than tensors or is cut off, and is not unpickled"):
            load(tmp_path)
    torch.save([1, 2], path)
    with pytest.raises(InputError, match="is no dictionary of tensors"):
        load(tmp_path)


def test_missing_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere does not exist; give a folder or one of demo-medusa, demo-hydra"):
        load(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(InputError, match=r"holds no weights; expected one of heads.safetensors.*found \['notes.txt'\]"):
        load(tmp_path)


@pytest.mark.parametrize(("content", "message"), [("{", "is not valid JSON"), ("[]", "must hold a JSON object")])
def test_a_broken_configuration_is_refused(content: str, message: str, tmp_path: Path) -> None:
    stored(tmp_path, "medusa_lm_head.safetensors", medusa_tensors(2, 1))
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "are for hidden size 64, but target other has 32"),
        ({"vocab_size": 70}, f"score {VOCAB} tokens, but target other has 70"),
    ],
)
def test_heads_of_another_shape_are_refused(changes: dict[str, int], message: str, tmp_path: Path) -> None:
    other = as_target(tiny_model(llama_config(**changes)), name="other")
    with pytest.raises(MismatchError, match=message):
        load(stored(tmp_path, "medusa_lm_head.safetensors", medusa_tensors(2, 1)), other)


@pytest.mark.parametrize(
    ("token_map", "message"),
    [
        ([1, VOCAB], rf"names token id {VOCAB}, outside the target's vocabulary of {VOCAB}"),
        ([-1, 3], "names token id -1, outside"),
        ([3, 3], "every id once, in ascending order"),
        ([4, 3], "every id once, in ascending order"),
        ([], "must be a list of token ids"),
    ],
)
def test_shortlists_are_checked_on_the_cpu(
    token_map: list[int], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FIELD-CASES 84: an id beyond the table is an index assert on a device, which ends the process."""
    ids = torch.tensor(token_map, dtype=torch.long)
    save_heads(tmp_path, blocks_of("medusa"), {}, token_map=ids, dtype=torch.float32)
    monkeypatch.setattr(MedusaHeads, "__init__", must_not_run)
    with pytest.raises(InputError, match=message):
        load(tmp_path)


def test_own_projections_must_score_the_shortlist(tmp_path: Path) -> None:
    save_heads(tmp_path, blocks_of("medusa own"), {}, token_map=torch.tensor([1, 2]), dtype=torch.float32)
    with pytest.raises(MismatchError, match=f"score {VOCAB} tokens, but their token_map names 2"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_heads_trained_for_another_target_are_refused(kind: str, tmp_path: Path) -> None:
    """FIELD-CASES 87: heads of another model draft poorly, and nobody notices before serving."""
    fingerprint = TARGET.identity.fingerprint
    save_heads(tmp_path / "mine", blocks_of(kind), {"target_fingerprint": fingerprint}, dtype=torch.float32)
    assert load(tmp_path / "mine").identity.num_heads == 3
    theirs = {"target_fingerprint": "0123", "base_model_name_or_path": "vicuna"}
    save_heads(tmp_path / "theirs", blocks_of(kind), theirs, dtype=torch.float32)
    with pytest.raises(MismatchError, match=rf"trained for target vicuna \(0123\), not for llama \({fingerprint}\)"):
        load(tmp_path / "theirs")


# For other engines


@pytest.mark.parametrize(("kind", "copies"), [("medusa", False), ("medusa", True), ("medusa own", False)])
def test_written_medusa_checkpoints_load_and_have_medusas_names(kind: str, copies: bool, tmp_path: Path) -> None:
    blocks = blocks_of(kind)
    weight = TARGET.output_weight if copies else None
    write_medusa(tmp_path, blocks, {"base_model_name_or_path": "tiny"}, output_weight=weight)
    own = copies or kind == "medusa own"
    names = load_file(tmp_path / "medusa_lm_head.safetensors").keys()
    assert set(names) == set(medusa_tensors(3, 2, own=own))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {
        "medusa_num_heads": 3,
        "medusa_num_layers": 2,
        "version": "2",
        "base_model_name_or_path": "tiny",
    }
    save_heads(tmp_path / "ours", blocks, {}, dtype=torch.float64)
    states, tokens = rows()
    ours, theirs = load(tmp_path / "ours"), load(tmp_path)
    assert (theirs.blocks.projection is not None) == own
    assert torch.allclose(scores_of(ours, states, tokens), scores_of(theirs, states, tokens), rtol=0, atol=1e-12)


def test_a_checkpoint_keeps_its_record(tmp_path: Path) -> None:
    save_heads(tmp_path, blocks_of("hydra"), {"seed": 3}, dtype=torch.bfloat16)
    found = read_checkpoint(str(tmp_path), TARGET)
    assert (found.layout, found.config["seed"]) == ("topo-search", 3)
    assert isinstance(found.blocks, HydraBlocks)
    assert isinstance(found.blocks.shape, HydraShape)
    assert {parameter.dtype for parameter in found.blocks.parameters()} == {torch.bfloat16}
    stored(tmp_path / "theirs", "medusa_lm_head.safetensors", medusa_tensors(2, 1))
    theirs = read_checkpoint(str(tmp_path / "theirs"), TARGET)
    assert theirs.layout == "Medusa A, B or C"
    assert isinstance(theirs.blocks, MedusaBlocks)
