"""Medusa heads and their files: untrained heads repeat the target, and no broken checkpoint loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import VOCAB, target_of, tiny_heads, tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from topo_search.decode.plan import plan_tree
from topo_search.errors import InputError, MismatchError
from topo_search.heads import load_heads, save_medusa
from topo_search.heads.base import DraftHeads
from topo_search.heads.files import CONFIG_FILE, WEIGHTS_FILE
from topo_search.heads.medusa import MedusaBlocks, MedusaHeads, untrained_blocks
from topo_search.identity import HeadsIdentity
from topo_search.ranking import top_tokens
from topo_search.target import Target
from topo_search.target.load import make_target
from topo_search.tree import Tree

TARGET = target_of("llama")
LAYOUTS = pytest.mark.parametrize("shared", [False, True], ids=["layout A", "layout B"])


def drawn_blocks(*, shared: bool, num_heads: int = 3, num_layers: int = 2) -> MedusaBlocks:
    """Blocks whose every number is drawn."""
    blocks = untrained_blocks(TARGET, num_heads=num_heads, num_layers=num_layers, share_projection=shared)
    with torch.no_grad():
        for parameter in blocks.parameters():
            parameter.normal_(std=0.1)
    return blocks


def bound(blocks: MedusaBlocks, target: Target = TARGET) -> MedusaHeads:
    identity = HeadsIdentity(name="drawn", kind="medusa", fingerprint="", num_heads=blocks.num_heads)
    return MedusaHeads(blocks, target, identity)


def saved(folder: Path, *, shared: bool = False, num_heads: int = 3, **record: Any) -> Path:
    save_medusa(folder, drawn_blocks(shared=shared, num_heads=num_heads), record, dtype=torch.float32)
    return folder


def rewritten(folder: Path, change: Any) -> None:
    """Load the stored tensors, let `change` alter the dictionary, store them again."""
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_FILE)


# Scores


@LAYOUTS
def test_untrained_heads_give_the_targets_own_scores(shared: bool) -> None:
    """Blocks start at zero, the projection is the output layer (then exactly so) or a copy of it."""
    states = torch.randn(5, TARGET.hidden_size, dtype=torch.float64)
    heads = bound(untrained_blocks(TARGET, num_heads=3, num_layers=2, share_projection=shared))
    scores, own = heads.scores(states, 3), TARGET.scores(states.repeat(3, 1, 1))
    assert scores.shape == (3, 5, VOCAB)
    assert torch.equal(scores, own) if shared else torch.allclose(scores, own, rtol=0, atol=1e-12)
    assert torch.equal(top_tokens(scores, 10), top_tokens(own, 10))


@LAYOUTS
def test_scores_are_those_of_the_formula(shared: bool) -> None:
    """h + SiLU(W h + b) per block, then the projection (Medusa, section 2.1)."""
    blocks = drawn_blocks(shared=shared)
    states = torch.randn(4, TARGET.hidden_size, dtype=torch.float64)
    heads = bound(blocks)
    for head in range(3):
        features = states
        for layer in range(2):
            inner = features @ blocks.weight[head, layer].T + blocks.bias[head, layer]
            features = features + inner * torch.sigmoid(inner)
        projection = TARGET.output_weight if blocks.projection is None else blocks.projection[head]
        assert torch.allclose(heads.scores(states, 3)[head], features @ projection.T, rtol=0, atol=1e-12)


def test_fewer_heads_score_alike() -> None:
    """A shallow tree runs its own heads only."""
    heads = bound(drawn_blocks(shared=False))
    states = torch.randn(4, TARGET.hidden_size, dtype=torch.float64)
    assert torch.equal(heads.scores(states, 2), heads.scores(states, 3)[:2])


def test_proposals_are_the_nodes_ranks_in_the_list_of_their_depth() -> None:
    """The lists that calibration ranks the true tokens in."""
    heads, tree = tiny_heads(TARGET), Tree(((0,), (5,), (0, 1), (5, 0), (0, 1, 7)))
    plan = plan_tree(tree, capacity=4, window=None, dtype=torch.float64, device=TARGET.device)
    state = torch.randn(TARGET.hidden_size, dtype=torch.float64)
    proposed = heads.propose(state, torch.tensor(3), plan)
    lists = top_tokens(heads.path_scores(state[None], torch.zeros(1, 4, dtype=torch.long)), 10)[0]
    assert proposed.tolist() == [int(lists[len(path) - 1, path[-1]]) for path in tree.paths]


def test_lists_do_not_depend_on_where_steps_begin() -> None:
    """MATH 1: replay is exact for path-local heads only, so a row's scores are those of the row alone."""
    heads = tiny_heads(TARGET)
    states, tokens = torch.randn(6, TARGET.hidden_size, dtype=torch.float64), torch.randint(0, VOCAB, (6, 4))
    together = heads.path_scores(states, tokens)
    for row in range(6):
        alone = heads.path_scores(states[row : row + 1], tokens[row : row + 1])[0]
        assert torch.equal(top_tokens(alone, 10), top_tokens(together[row], 10))


@LAYOUTS
def test_ids_beyond_the_tokenizer_score_minus_infinity(shared: bool) -> None:
    """FIELD-CASES 79."""
    target = replace(TARGET, known_ids=50)
    heads = bound(drawn_blocks(shared=shared), target)
    scores = heads.scores(torch.randn(4, TARGET.hidden_size, dtype=torch.float64), 3)
    assert bool((scores[..., 50:] == float("-inf")).all())
    assert bool(torch.isfinite(scores[..., :50]).all())


def test_medusa_heads_are_draft_heads() -> None:
    assert isinstance(tiny_heads(TARGET), DraftHeads)


# Files


@LAYOUTS
@pytest.mark.parametrize("num_layers", [1, 2])
def test_saved_heads_load_as_they_were(shared: bool, num_layers: int, tmp_path: Path) -> None:
    """FIELD-CASES 85, 86: both layouts, told apart by their keys; nothing is inherited from a tied base."""
    blocks = drawn_blocks(shared=shared, num_layers=num_layers)
    save_medusa(tmp_path, blocks, {"training_tokens": 7}, dtype=torch.float64)
    loaded = load_heads(str(tmp_path), TARGET)
    assert (loaded.blocks.projection is None) == shared
    assert loaded.identity.num_heads == 3
    assert loaded.blocks.num_layers == num_layers
    for one, other in zip(blocks.parameters(), loaded.blocks.parameters(), strict=True):
        assert torch.equal(one, other)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, num_layers)
    assert config["training_tokens"] == 7


def test_the_layouts_keys_are_medusas_own(tmp_path: Path) -> None:
    tensors = load_file(saved(tmp_path, num_heads=1) / WEIGHTS_FILE)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {
        "0.0.linear.weight": (64, 64),
        "0.0.linear.bias": (64,),
        "0.1.linear.weight": (64, 64),
        "0.1.linear.bias": (64,),
        "0.2.weight": (VOCAB, 64),
    }


def test_the_fingerprint_is_that_of_the_tensors(tmp_path: Path) -> None:
    first = load_heads(str(saved(tmp_path / "a")), TARGET).identity
    again = load_heads(str(tmp_path / "a"), TARGET).identity
    rewritten(tmp_path / "a", lambda tensors: tensors["0.0.linear.bias"].add_(1e-3))
    changed = load_heads(str(tmp_path / "a"), TARGET).identity
    assert first == again
    assert first.fingerprint != changed.fingerprint


@pytest.mark.parametrize(("stated", "held"), [(2, 5), (5, 3)])
def test_heads_are_counted_from_the_weights(stated: int, held: int, tmp_path: Path) -> None:
    """FIELD-CASES 53: published configurations are wrong in both directions; no head is made without weights."""
    saved(tmp_path, num_heads=held, medusa_num_heads=stated)
    with pytest.warns(UserWarning, match=rf"medusa_num_heads = {stated}, the weights hold {held}; the weights count"):
        loaded = load_heads(str(tmp_path), TARGET)
    assert loaded.identity.num_heads == loaded.blocks.num_heads == held


def test_heads_without_a_configuration_load(tmp_path: Path) -> None:
    (saved(tmp_path) / CONFIG_FILE).unlink()
    assert load_heads(str(tmp_path), TARGET).identity.num_heads == 3


def _drop(*names: str) -> Any:
    return lambda tensors: [tensors.pop(name) for name in names]


def _add(name: str, *shape: int) -> Any:
    return lambda tensors: tensors.update({name: torch.zeros(*shape)})


def _rename(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[f"medusa_head.{name}"] = tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("1.2.weight"), r"missing tensors \['1.2.weight'\], unexpected tensors \[\]"),
        (_drop("1.0.linear.bias"), r"missing tensors \['1.0.linear.bias'\]"),
        (_drop("0.0.linear.weight", "0.0.linear.bias"), r"missing tensors \['0.0.linear.bias', '0.0.linear.weight'\]"),
        (_add("3.2.weight", VOCAB, 64), r"unexpected tensors \['3.2.weight'\]"),
        (_add("lm_head.weight", VOCAB, 64), r"unexpected tensors \['lm_head.weight'\]"),
        (_add("1.0.linear.bias", 63), r"tensor 1.0.linear.bias has shape \(63,\), not \(64,\)"),
        (_add("2.2.weight", VOCAB, 60), rf"tensor 2.2.weight has shape \({VOCAB}, 60\), not \({VOCAB}, 64\)"),
        (_rename, r"unknown layout; expected .*0.0.linear.weight, found medusa_head.0.0.linear.bias"),
        (dict.clear, "unknown layout.*found none"),
    ],
)
def test_incomplete_or_unknown_tensors_are_refused_by_name(change: Any, message: str, tmp_path: Path) -> None:
    """FIELD-CASES 22, 86: a head that stays random serves without an error and accepts nothing."""
    rewritten(saved(tmp_path), change)
    with pytest.raises(InputError, match=message):
        load_heads(str(tmp_path), TARGET)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path) / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=f"{WEIGHTS_FILE} is no whole safetensors file"):
        load_heads(str(tmp_path), TARGET)


def test_a_folder_of_pickles_is_refused(tmp_path: Path) -> None:
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"pickle")
    with pytest.raises(
        InputError, match=r"has no medusa_lm_head.safetensors. It holds \['medusa_lm_head.pt'\].*pickles"
    ):
        load_heads(str(tmp_path), TARGET)


def test_missing_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere does not exist; give a folder or one of demo-medusa"):
        load_heads(str(tmp_path / "nowhere"), TARGET)
    with pytest.raises(InputError, match=r"has no medusa_lm_head.safetensors.$"):
        load_heads(str(tmp_path), TARGET)


@pytest.mark.parametrize(("content", "message"), [("{", "is not JSON"), ("[]", "must hold a JSON object")])
def test_a_broken_configuration_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (saved(tmp_path) / CONFIG_FILE).write_text(content)
    with pytest.raises(InputError, match=message):
        load_heads(str(tmp_path), TARGET)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "are for hidden size 64, but target other has 32"),
        ({"vocab_size": 70}, f"score {VOCAB} tokens, but target other has 70"),
    ],
)
def test_heads_of_another_shape_are_refused(changes: dict[str, int], message: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    model = tiny_model(LlamaConfig(num_attention_heads=4, **(sizes | changes)))
    other = make_target(model, None, name="other", dtype="float64")
    with pytest.raises(MismatchError, match=message):
        load_heads(str(saved(tmp_path)), other)


def test_heads_trained_for_another_target_are_refused(tmp_path: Path) -> None:
    fingerprint = TARGET.identity.fingerprint
    assert load_heads(str(saved(tmp_path / "mine", target_fingerprint=fingerprint)), TARGET).identity.num_heads == 3
    saved(tmp_path / "theirs", target_fingerprint="0123", base_model_name_or_path="vicuna")
    with pytest.raises(MismatchError, match=rf"trained for target vicuna \(0123\), not for llama \({fingerprint}\)"):
        load_heads(str(tmp_path / "theirs"), TARGET)
