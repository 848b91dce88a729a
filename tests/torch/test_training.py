"""Training runs of every family: they learn, continue where they were killed, and refuse what cannot be learnt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learning import FAMILIES, HEADS, corpus, fresh, loss_of, own_text, states_of
from torch import nn

from topo_search.errors import InputError
from topo_search.training import checkpoint as checkpoint_module
from topo_search.training import heads as heads_module
from topo_search.training.heads import (
    Corpus,
    Recipe,
    TrainingReport,
    evaluate,
    schedule,
    split_held_out,
    train_heads,
)
from topo_search.training.text import TrainingText, prompts_of, text_of

RECIPE = Recipe(batch_texts=2, learning_rate=1e-2, sampled_tokens=20)
Report = Callable[[TrainingReport], None]


def trained(
    family: str,
    recipe: Recipe = RECIPE,
    *,
    epochs: int = 6,
    checkpoint: Path | None = None,
    report: Report | None = None,
) -> nn.Module:
    """Heads of a family after a run."""
    blocks = fresh(family)
    train_heads(
        loss_of(blocks, distill=recipe.distill),
        [corpus(epochs)],
        recipe,
        num_heads=HEADS,
        checkpoint=checkpoint,
        report=report,
    )
    return blocks


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), (_, yours) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(mine, yours), name


def differs(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return any(not torch.equal(mine, yours) for mine, yours in pairs)


# Learning


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_lowers_the_loss_of_every_head(family: str, own: bool) -> None:
    blocks = fresh(family, own_projection=own)
    loss, (text, states) = loss_of(blocks), (own_text(), states_of(own_text()))
    before = evaluate(loss, text, states, num_heads=HEADS)
    reports: list[TrainingReport] = []
    seconds = train_heads(loss, [corpus(8)], RECIPE, num_heads=HEADS, report=reports.append)
    after = evaluate(loss, text, states, num_heads=HEADS)
    assert all(late < 0.7 * early for late, early in zip(after.loss, before.loss, strict=True))
    assert reports[-1].step == reports[-1].steps == 8 * 5
    assert len(reports[-1].loss_per_head) == HEADS
    assert seconds > 0
    for name, parameter in blocks.named_parameters():
        assert bool(torch.isfinite(parameter).all()), name


def test_corpora_are_learned_from_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    load = heads_module.load_batch

    def spy(text: TrainingText, *arguments: Any, **named: Any) -> Any:
        seen.append(len(text.prompt_lengths))
        return load(text, *arguments, **named)

    monkeypatch.setattr(heads_module, "load_batch", spy)
    few = own_text().select([1, 3])
    ordinary = Corpus(text=few, states=states_of(few), epochs=2)
    train_heads(loss_of(fresh("medusa")), [ordinary, corpus(1)], RECIPE, num_heads=HEADS)
    assert seen == [2] * 2 + [9] * 5


def test_every_text_is_learned_from_once_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    load = heads_module.load_batch

    def spy(text: TrainingText, states: Any, texts: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        seen.append(texts.tolist())
        return load(text, states, texts, *arguments, **named)

    monkeypatch.setattr(heads_module, "load_batch", spy)
    trained("medusa", epochs=2)
    epochs = [[text for batch in seen[start : start + 5] for text in batch] for start in (0, 5)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(9))] * 2
    assert epochs[0] != epochs[1]


def test_the_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    shares = [schedule(step, 200) for step in range(200)]
    assert shares[0] == pytest.approx(0.1)
    assert max(shares) == shares[9] == shares[10] == 1.0
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert shares[-1] == pytest.approx(0.1, abs=1e-3)


def test_held_out_texts_are_no_training_texts() -> None:
    kept, held = split_held_out(own_text(), 0.34, seed=3)
    assert 0 < len(held.prompt_lengths) < len(own_text().prompt_lengths)
    texts = [tuple(part.tolist()) for one in (kept, held) for part in one.tokens.split(one.lengths.tolist())]
    assert sorted(texts) == sorted(
        tuple(part.tolist()) for part in own_text().tokens.split(own_text().lengths.tolist())
    )
    assert split_held_out(own_text(), 0.34, seed=3)[1].digest == held.digest
    assert split_held_out(own_text(), 0.34, seed=4)[1].digest != held.digest


def test_no_text_changes_sides() -> None:
    """Whatever is read beside it, however the store is ordered, and whatever share more is held out."""
    many = text_of([torch.tensor([number, number + 1, 5, 6]) for number in range(2000)], [2] * 2000)
    _, held = split_held_out(many, 0.1, seed=3)
    chosen = set(prompts_of(held))
    assert 140 < len(chosen) < 260
    part = many.select(torch.randperm(2000)[:700])
    assert set(prompts_of(split_held_out(part, 0.1, seed=3)[1])) == chosen & set(prompts_of(part))
    assert chosen < set(prompts_of(split_held_out(many, 0.2, seed=3)[1]))
    assert len(chosen & set(prompts_of(split_held_out(many, 0.1, seed=4)[1]))) < 60
    assert len(split_held_out(many, 0.0, seed=3)[1].prompt_lengths) == 0


# Runs that are killed


@pytest.mark.parametrize("killed_at", [1, 7, 13, 26])
@pytest.mark.parametrize("family", ["medusa", "hydra", "hydra++"])
def test_a_killed_run_ends_bit_identical_to_an_undisturbed_one(
    family: str, killed_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the step, it continues from the checkpoint before it with optimiser, order and negatives."""
    monkeypatch.setattr(heads_module, "_SAVE_EVERY", 5)
    monkeypatch.setattr(heads_module, "_REPORT_EVERY", 1)
    recipe = replace(RECIPE, distill=0.7 if family == "hydra++" else 0.0)
    undisturbed = trained(family, recipe)
    checkpoint = tmp_path / "training.pt"

    def kill(at: TrainingReport) -> None:
        if at.step == killed_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(family, recipe, checkpoint=checkpoint, report=kill)
    assert checkpoint.exists() == (killed_at >= 5)
    steps: list[int] = []
    resumed = trained(family, recipe, checkpoint=checkpoint, report=lambda at: steps.append(at.step))
    kept = killed_at // 5 * 5
    assert steps == [*([kept] if kept else []), *range(kept + 1, 31)]  # a resumed run says where it goes on
    assert_equal(undisturbed, resumed)


def test_a_finished_run_is_not_lost_before_its_heads_are_written(tmp_path: Path) -> None:
    """Killed between the last step and the heads' file: the run resumes at its end."""
    checkpoint = tmp_path / "training.pt"
    first = trained("medusa", checkpoint=checkpoint)
    steps: list[int] = []
    assert_equal(first, trained("medusa", checkpoint=checkpoint, report=lambda at: steps.append(at.step)))
    assert steps == [30]


def test_the_seed_decides_the_heads() -> None:
    runs = [trained("medusa", replace(RECIPE, seed=seed), epochs=1) for seed in (0, 0, 1)]
    assert_equal(runs[0], runs[1])
    assert differs(runs[0], runs[2])


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"seed": 1}, "seed 0, now 1"),
        ({"learning_rate": 1e-4, "seed": 1}, r"learning_rate 0\.\d+, now 0\.0001, seed 0, now 1"),
        ({"distill": 0.5}, r"distill 0\.0, now 0\.5"),
        ({"started_from": "abc"}, "started_from None, now abc"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(changed: dict[str, Any], word: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "training.pt"
    trained("medusa", epochs=1, checkpoint=checkpoint)
    with pytest.raises(InputError, match=rf"training.pt is of a run with other settings \({word}\); delete it or use"):
        trained("medusa", replace(RECIPE, **changed), epochs=1, checkpoint=checkpoint)


def test_a_checkpoint_of_other_heads_or_text_is_refused(tmp_path: Path) -> None:
    checkpoint = tmp_path / "training.pt"
    trained("hydra", epochs=1, checkpoint=checkpoint)
    with pytest.raises(InputError, match=r"other settings \(heads\)"):
        trained("guide", epochs=1, checkpoint=checkpoint)
    with pytest.raises(InputError, match=r"other settings \(passes\)"):
        trained("hydra", epochs=2, checkpoint=checkpoint)


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 half a file"])
def test_a_damaged_checkpoint_is_named(content: bytes, tmp_path: Path) -> None:
    checkpoint = tmp_path / "training.pt"
    checkpoint.write_bytes(content)
    with pytest.raises(InputError, match=r"training.pt is no checkpoint of a training run .*; delete it"):
        trained("medusa", epochs=1, checkpoint=checkpoint)


def test_a_checkpoint_that_holds_code_is_not_run(tmp_path: Path) -> None:
    checkpoint = tmp_path / "training.pt"
    torch.save({"settings": Path("never")}, checkpoint)
    with pytest.raises(InputError, match=r"training.pt is no checkpoint"):
        trained("medusa", epochs=1, checkpoint=checkpoint)


# What goes wrong on the way


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads_module, "_SAVE_EVERY", 5)
    monkeypatch.setattr(heads_module, "_REPORT_EVERY", 1)
    checkpoint = tmp_path / "training.pt"
    blocks = fresh("medusa")

    def spoil(at: TrainingReport) -> None:
        if at.step == 12:
            with torch.no_grad():
                blocks.bias[0, 0, 0] = float("nan")

    with pytest.raises(
        InputError, match=r"loss is nan .* at step 12: lower --learning-rate.*training.pt, is untouched"
    ):
        train_heads(loss_of(blocks), [corpus(6)], RECIPE, num_heads=HEADS, checkpoint=checkpoint, report=spoil)
    assert torch.load(checkpoint, weights_only=True)["step"] == 10
    assert_equal(trained("medusa", checkpoint=checkpoint), trained("medusa"))


def test_a_gradient_that_is_no_number_reaches_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss can be a number where its gradient is none; such a step must not end in a checkpoint."""
    monkeypatch.setattr(heads_module, "_SAVE_EVERY", 1)
    checkpoint = tmp_path / "training.pt"
    blocks = fresh("medusa")
    calls = 0

    def broken(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return gradient * float("nan") if calls == 4 else gradient

    blocks.weight.register_hook(broken)
    with pytest.raises(InputError, match=r"its gradient nan at step 3"):
        train_heads(loss_of(blocks), [corpus(6)], RECIPE, num_heads=HEADS, checkpoint=checkpoint)
    held = torch.load(checkpoint, weights_only=True)
    assert held["step"] == 3
    assert all(bool(torch.isfinite(tensor).all()) for tensor in held["blocks"].values())
    assert bool(torch.isfinite(blocks.weight).all())


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed")])
def test_a_full_disk_keeps_the_checkpoint_before(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads_module, "_SAVE_EVERY", 5)
    checkpoint = tmp_path / "training.pt"
    save, saved = torch.save, 0

    def full(state: Any, path: Path) -> None:
        nonlocal saved
        saved += 1
        if saved == 3:
            Path(path).write_bytes(b"half")
            raise error
        save(state, path)

    monkeypatch.setattr(checkpoint_module.torch, "save", full)
    with pytest.raises(InputError, match=r"training.pt cannot be written .*the one before it is untouched.*--work"):
        trained("medusa", checkpoint=checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["training.pt"]
    assert torch.load(checkpoint, weights_only=True)["step"] == 10
    monkeypatch.setattr(checkpoint_module.torch, "save", save)
    assert_equal(trained("medusa", checkpoint=checkpoint), trained("medusa"))


def test_text_without_a_supervised_token_is_refused() -> None:
    """FIELD-CASES 83."""
    text = text_of([torch.tensor([3, 4, 5]), torch.tensor([6, 7])], [2, 1])
    lost = Corpus(text=text, states=states_of(text), epochs=1)
    with pytest.raises(InputError, match="0 supervised tokens"):
        train_heads(loss_of(fresh("medusa")), [lost], RECIPE, num_heads=HEADS)


def test_a_batch_whose_labels_no_head_drafts_changes_nothing_but_the_step() -> None:
    """FIELD-CASES 83: no NaN where a step has no label that the shortlist holds."""
    text = own_text()
    missing = torch.tensor([token for token in range(61) if token not in set(text.tokens.tolist())])
    assert len(missing)
    loss = loss_of(fresh("hydra++"), token_map=missing, distill=0.5)
    train_heads(loss, [corpus(1)], replace(RECIPE, weight_decay=0.0), num_heads=HEADS)
    assert_equal(loss.blocks, fresh("hydra++"))
