"""Medusa-2 on a tiny model: what is learned, what stays the original, what is written, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import save_tiny_target, word_tokenizer
from learning import HEADS, states_of, texts_of
from models import llama_config, tiny_model
from torch import Tensor, nn
from torch.nn import functional

from topo_search.answers import answer_batch
from topo_search.errors import InputError
from topo_search.heads import load_heads, save_heads
from topo_search.heads.medusa import untrained_blocks
from topo_search.target import Target, load_target
from topo_search.target.load import make_target
from topo_search.training import joint as joint_module
from topo_search.training.heads import Corpus
from topo_search.training.joint import (
    Adapted,
    Drift,
    JointRecipe,
    JointReport,
    drift,
    greedy_texts,
    save_target,
    train_jointly,
)
from topo_search.training.loss import HeadLoss
from topo_search.training.states import HiddenStates, cached_states
from topo_search.training.text import TrainingText, text_of

RECIPE = JointRecipe(
    epochs=2, batch_texts=3, learning_rate=1e-2, backbone_learning_rate=5e-3, lora_rank=4, sampled_tokens=20
)
PROMPTS = tuple((5 + n, 9 + 2 * n, 7) for n in range(10))
Report = Callable[[JointReport], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target on disk."""
    return save_tiny_target(tmp_path_factory.mktemp("joint") / "target")


@cache
def trainable(folder: Path, number: int = 0) -> Target:
    """The target of a folder, its weights not packed; every `number` is another copy in memory."""
    del number
    return load_target(str(folder), pack=False)


@cache
def written(folder: Path) -> TrainingText:
    """What it answers."""
    answers = answer_batch(trainable(folder), PROMPTS, max_new_tokens=12)
    texts = [torch.tensor([*prompt, *answer.tokens]) for prompt, answer in zip(PROMPTS, answers, strict=True)]
    return text_of(texts, [3] * len(PROMPTS))


def states(target: Target, text: TrainingText, work: Path) -> HiddenStates:
    return cached_states(target, text, work)


def fresh_loss(target: Target, *, own: bool = False) -> HeadLoss:
    blocks = untrained_blocks(target, num_heads=HEADS, num_layers=1, share_projection=not own)
    return HeadLoss(blocks.float(), target.output_weight, target.input_embeddings)


def trained(
    folder: Path,
    work: Path,
    recipe: JointRecipe = RECIPE,
    *,
    own: bool = False,
    checkpoint: Path | None = None,
    report: Report | None = None,
) -> tuple[Adapted, HeadLoss]:
    """A fresh copy of the target and fresh heads after a run."""
    target = load_target(str(folder), pack=False)
    text = written(folder)
    corpus = Corpus(text=text, states=states(target, text, work), epochs=1)
    loss = fresh_loss(target, own=own)
    adapted = Adapted(target, rank=recipe.lora_rank, alpha=recipe.lora_alpha, seed=recipe.seed)
    train_jointly(adapted, loss, corpus, recipe, num_heads=HEADS, checkpoint=checkpoint, report=report)
    return adapted, loss


def logits(target: Target, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return target.model(input_ids=tokens[None]).logits[0].float()


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), (_, yours) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(mine, yours), name


# The loss


def test_adapters_start_as_the_original(folder: Path) -> None:
    target = load_target(str(folder), pack=False)
    before = logits(target, torch.arange(9))
    adapted = Adapted(target, rank=4, alpha=8, seed=0)
    assert torch.equal(logits(target, torch.arange(9)), before)
    assert adapted.weights
    assert all(".lora_" in name for name in adapted.weights)
    trained_names = " ".join(adapted.weights)
    assert "lm_head" not in trained_names and "embed" not in trained_names
    assert all(f".{part}." in trained_names for part in ("q_proj", "o_proj", "gate_proj", "down_proj"))


def test_the_language_loss_on_text_is_its_cross_entropy(folder: Path, tmp_path: Path) -> None:
    """Of the answers' tokens only; the prompt is not learned."""
    reports: list[JointReport] = []
    recipe = replace(RECIPE, epochs=1, batch_texts=len(PROMPTS), language_loss="text")
    trained(folder, tmp_path, recipe, report=reports.append)
    losses = [
        functional.cross_entropy(logits(trainable(folder), tokens)[2:-1], tokens[3:], reduction="none")
        for tokens in texts_of(written(folder))
    ]
    assert reports[0].language_loss == pytest.approx(float(torch.cat(losses).mean()), rel=1e-4)


def test_the_distance_from_the_original_starts_at_nothing_and_is_kept_small(folder: Path, tmp_path: Path) -> None:
    """At first KL is the rounding of cached states; on the way it is the KL by hand."""
    reports: list[JointReport] = []
    recipe = replace(RECIPE, epochs=3, batch_texts=len(PROMPTS), sampled_tokens=0)
    adapted, _ = trained(folder, tmp_path, recipe, report=reports.append)
    assert 0 <= reports[0].language_loss < 1e-5
    two, _ = trained(folder, tmp_path, recipe)
    assert reports[-1].language_loss > 1e-4
    divergences = []
    for tokens in texts_of(written(folder)):
        before, after = (
            functional.log_softmax(logits(one, tokens)[2:-1], -1) for one in (trainable(folder), two.target)
        )
        divergences.append((before.exp() * (before - after)).sum(dim=-1))
    by_hand = float(torch.cat(divergences).mean())
    moved = _drift(adapted, folder, tmp_path)
    assert moved.kl == pytest.approx(by_hand, rel=0.02)


def test_heads_learn_the_live_states(folder: Path, tmp_path: Path) -> None:
    """The first step's losses are those of the heads on the original's states, and both parts learn."""
    reports: list[JointReport] = []
    adapted, loss = trained(folder, tmp_path, replace(RECIPE, epochs=12, sampled_tokens=0), report=reports.append)
    assert reports[-1].step == reports[-1].steps == 12 * 4
    for head in range(HEADS):
        early = sum(at.loss_per_head[head] for at in reports[:4])
        late = sum(at.loss_per_head[head] for at in reports[-4:])
        assert late < 0.8 * early
    assert any(bool(weight.any()) for name, weight in adapted.weights.items() if "lora_B" in name)
    assert bool(loss.blocks.weight.any())


# The new target


def _drift(adapted: Adapted, folder: Path, work: Path) -> Drift:
    """The drift of a run's merged target on its own training text."""
    text = written(folder)
    before = states(trainable(folder), text, work)
    with adapted.original():
        texts = greedy_texts(adapted.target, text)
    assert texts == greedy_texts(trainable(folder), text)  # without its adapters it is the original still
    target = adapted.merged("new")
    return drift(target, text, original_states=before, states=states(target, text, work), original_texts=texts)


@pytest.mark.parametrize("own", [False, True])
def test_a_backbone_that_does_not_learn_does_not_drift(own: bool, folder: Path, tmp_path: Path) -> None:
    adapted, loss = trained(folder, tmp_path, replace(RECIPE, backbone_learning_rate=0.0), own=own)
    moved = _drift(adapted, folder, tmp_path)
    assert (moved.kl, moved.equal_text, moved.equal_leading_tokens) == (0.0, 1.0, 1.0)
    assert (moved.positions, moved.prompts) == (written(folder).answer_tokens, len(PROMPTS))
    assert bool(loss.blocks.weight.any())  # the heads did learn


def test_drift_by_hand(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_module, "_DRIFT_TOKENS", 16)
    adapted, _ = trained(folder, tmp_path, replace(RECIPE, backbone_learning_rate=5e-2))
    moved = _drift(adapted, folder, tmp_path)
    new = adapted.target
    shares = []
    for prompt in PROMPTS:
        one, other = (answer_batch(t, [prompt], max_new_tokens=16)[0].tokens for t in (trainable(folder), new))
        same = 0
        while same < min(len(one), len(other)) and one[same] == other[same]:
            same += 1
        shares.append(same / max(len(one), len(other)))
    assert moved.kl > 1e-3
    assert moved.equal_text == pytest.approx(sum(share == 1.0 for share in shares) / len(shares))
    assert moved.equal_leading_tokens == pytest.approx(sum(shares) / len(shares))
    assert moved.equal_text < 1.0


@pytest.mark.parametrize("own", [False, True])
def test_target_and_heads_load_as_any_others(own: bool, folder: Path, tmp_path: Path) -> None:
    adapted, loss = trained(folder, tmp_path, own=own)
    adapted_logits = logits(adapted.target, torch.arange(9))
    target = adapted.merged(str(tmp_path / "target"))
    save_target(target, tmp_path / "target")
    save_target(target, tmp_path / "target")  # over an older one
    record = {"base_model_name_or_path": "target", "target_fingerprint": target.identity.fingerprint}
    save_heads(tmp_path / "heads", loss.blocks, record, dtype=torch.float32)
    loaded = load_target(str(tmp_path / "target"))
    assert loaded.identity == target.identity
    assert loaded.identity.fingerprint != trainable(folder).identity.fingerprint
    assert loaded.eos_token_ids == trainable(folder).eos_token_ids
    assert loaded.encode_chat([{"role": "user", "content": "w1"}])
    assert torch.allclose(logits(loaded, torch.arange(9)), adapted_logits, atol=1e-4)
    heads = load_heads(str(tmp_path / "heads"), loaded)
    assert heads.identity.num_heads == HEADS
    with pytest.raises(InputError, match="trained for target"):
        load_heads(str(tmp_path / "heads"), trainable(folder))
    assert not list(tmp_path.glob(".target*"))


def test_tied_embeddings_stay_tied_and_untouched(tmp_path: Path) -> None:
    """FIELD-CASES 85: what is saved has the original's one table, and loads to what was trained."""
    model = tiny_model(llama_config(tie_word_embeddings=True), dtype=torch.float32)
    target = make_target(model, word_tokenizer(), name="tied", dtype="float32", pack=False)
    table = target.output_weight.clone()
    text = text_of([torch.tensor([5, 6, 7, 8, 9, 10]), torch.tensor([9, 8, 7, 6])], [2, 1])
    corpus = Corpus(text=text, states=cached_states(target, text, tmp_path), epochs=1)
    adapted = Adapted(target, rank=4, alpha=8, seed=0)
    train_jointly(adapted, fresh_loss(target), corpus, RECIPE, num_heads=HEADS)
    new = adapted.merged("new")
    save_target(new, tmp_path / "target")
    loaded = load_target(str(tmp_path / "target"), pack=False)
    assert loaded.identity.fingerprint == new.identity.fingerprint
    assert loaded.model.config.tie_word_embeddings
    assert loaded.output_weight.data_ptr() == loaded.input_embeddings.weight.data_ptr()
    assert torch.equal(loaded.output_weight, table)
    assert torch.equal(logits(loaded, torch.arange(9)), logits(new, torch.arange(9)))


# Runs that are killed, and what goes wrong


@pytest.mark.parametrize("killed_at", [1, 3, 7])
def test_a_killed_run_ends_bit_identical(
    killed_at: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_module, "_SAVE_SECONDS", 0.0)
    checkpoint = tmp_path / "joint.pt"

    def kill(at: JointReport) -> None:
        if at.step == killed_at:
            raise KeyboardInterrupt

    undisturbed, their_heads = trained(folder, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        trained(folder, tmp_path, checkpoint=checkpoint, report=kill)
    steps: list[int] = []
    resumed, heads = trained(folder, tmp_path, checkpoint=checkpoint, report=lambda at: steps.append(at.step))
    assert steps == list(range(killed_at + 1, 9))
    assert_equal(their_heads.blocks, heads.blocks)
    for name, weight in undisturbed.weights.items():
        assert torch.equal(weight, resumed.weights[name]), name
    with pytest.raises(InputError, match=r"joint.pt is of a run with other settings \(seed 0, now 1\)"):
        trained(folder, tmp_path, replace(RECIPE, seed=1), checkpoint=checkpoint)


def test_a_loss_that_is_no_number_keeps_the_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_module, "_SAVE_SECONDS", 0.0)
    loss_of = joint_module._Run._language_loss

    def spoiled(run: Any, *arguments: Any) -> Tensor:
        return loss_of(run, *arguments) * (float("nan") if run.step == 2 else 1.0)

    monkeypatch.setattr(joint_module._Run, "_language_loss", spoiled)
    with pytest.raises(InputError, match=r"The loss is nan .* at step 2: .*joint.pt, is untouched"):
        trained(folder, tmp_path, checkpoint=tmp_path / "joint.pt")
    held = torch.load(tmp_path / "joint.pt", weights_only=True)
    assert held["step"] == 2
    assert all(bool(torch.isfinite(weight).all()) for weight in held["adapters"].values())


def test_packed_weights_and_a_missing_library_are_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="packed for inference; load it with pack=False"):
        Adapted(load_target(str(folder)), rank=4, alpha=8, seed=0)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=r"Medusa-2 needs the extra `lora`: pip install 'topo-search\[lora\]'"):
        Adapted(trainable(folder), rank=4, alpha=8, seed=0)


def test_text_without_a_supervised_token_is_refused(folder: Path) -> None:
    """FIELD-CASES 83."""
    target = load_target(str(folder), pack=False)
    text = text_of([torch.tensor([3, 4, 5]), torch.tensor([6, 7])], [2, 1])
    lost = Corpus(text=text, states=states_of(text), epochs=1)
    with pytest.raises(InputError, match="0 supervised tokens"):
        train_jointly(Adapted(target, rank=4, alpha=8, seed=0), fresh_loss(target), lost, RECIPE, num_heads=HEADS)


def test_a_full_disk_keeps_the_target_that_was_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = trainable(folder)
    save_target(target, tmp_path / "target")
    before = (tmp_path / "target/model.safetensors").read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(target.tokenizer, "save_pretrained", full)
    with pytest.raises(InputError, match=r"cannot be written to .*target .*No space left.*start again to continue"):
        save_target(target, tmp_path / "target")
    assert (tmp_path / "target/model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
