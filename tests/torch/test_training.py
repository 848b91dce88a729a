"""Training: labels by closed form, losses against plain cross-entropy, runs that continue where they were killed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import word_tokenizer
from models import PROMPTS, VOCAB, target_of
from torch import Tensor
from torch.nn import functional

from topo_search.answers import Answer, answer_batch
from topo_search.errors import InputError
from topo_search.heads.medusa import MedusaBlocks, untrained_blocks
from topo_search.target import Target
from topo_search.training import text as text_module
from topo_search.training.medusa import (
    IGNORED,
    MedusaRecipe,
    TrainingReport,
    _candidates,
    aligned_labels,
    head_losses,
    train_medusa,
)
from topo_search.training.text import TrainingText, invent_prompts, same_store, user_turns, write_answers

RECIPE = MedusaRecipe(num_heads=3, batch=4, epochs=1, sampled_tokens=0, learning_rate=1e-2)
OUTPUT = target_of("llama").output_weight.float()


def text_of(*answers: Sequence[int]) -> TrainingText:
    """Answers of the given tokens, with drawn states."""
    tokens = torch.tensor([token for answer in answers for token in answer])
    lengths = torch.tensor([len(answer) for answer in answers])
    states = torch.randn(len(tokens), OUTPUT.shape[1]).half()
    return TrainingText(
        tokens=tokens, states=states, answer_of=torch.repeat_interleave(torch.arange(len(answers)), lengths)
    )


def fresh_blocks(*, shared: bool = True) -> MedusaBlocks:
    target = target_of("llama")
    return untrained_blocks(target, num_heads=3, num_layers=1, share_projection=shared).float()


# Alignment


@pytest.mark.parametrize("lengths", [(10,), (1,), (2,), (3, 1, 4), (1, 1, 5, 2), (4, 4)])
@pytest.mark.parametrize("num_heads", [1, 3, 6])
def test_head_k_at_position_t_learns_the_token_k_later(lengths: tuple[int, ...], num_heads: int) -> None:
    """FIELD-CASES 82: states[t] chose tokens[t] = x_{t+1}, so head k, which guesses x_{t+1+k}, learns tokens[t + k]."""
    offsets = [sum(lengths[:index]) for index in range(len(lengths))]
    tokens = torch.arange(100, 100 + sum(lengths))
    answer_of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    labels = aligned_labels(tokens, answer_of, num_heads)
    assert labels.shape == (sum(lengths), num_heads)
    for offset, length in zip(offsets, lengths, strict=True):
        for t in range(length):
            for k in range(1, num_heads + 1):
                expected = 100 + offset + t + k if t + k < length else IGNORED
                assert labels[offset + t, k - 1] == expected


def test_a_perfect_alignment_is_that_of_calibration() -> None:
    """The state that training pairs with a label is the one that calibration ranks that token by."""
    answer = answer_batch(target_of("llama"), [PROMPTS[0]], max_new_tokens=12)[0]
    tokens = torch.tensor(answer.tokens)
    labels = aligned_labels(tokens, torch.zeros(12, dtype=torch.long), 3)
    for row in range(len(answer.tokens)):
        chosen = target_of("llama").choose(answer.states[row])
        assert chosen == tokens[row]  # states[row] chose the root y_row ...
        assert labels[row, 0] == (tokens[row + 1] if row + 1 < 12 else IGNORED)  # ... and head 1 learns what follows


# Losses


@pytest.mark.parametrize("shared", [True, False])
def test_losses_are_plain_cross_entropy_over_the_whole_vocabulary(shared: bool) -> None:
    blocks = fresh_blocks(shared=shared)
    with torch.no_grad():
        blocks.weight.normal_(std=0.05)
    states = torch.randn(9, OUTPUT.shape[1])
    labels = torch.randint(0, VOCAB, (9, 3))
    labels[7:, 1], labels[:, 2] = IGNORED, IGNORED
    losses = head_losses(blocks, OUTPUT, states, labels, RECIPE, torch.Generator())
    features = blocks(states, 3)
    for head in (0, 1):
        weight = OUTPUT if blocks.projection is None else blocks.projection[head]
        expected = functional.cross_entropy(features[head] @ weight.T, labels[:, head], ignore_index=IGNORED)
        assert losses[head].item() == pytest.approx(expected.item(), rel=1e-5)
    assert losses[2].item() == 0.0  # a head without a label in the batch, not NaN


def test_with_every_negative_sampled_the_loss_is_the_full_one() -> None:
    blocks, sampler = fresh_blocks(), torch.Generator().manual_seed(0)
    states, labels = torch.randn(56, OUTPUT.shape[1]), torch.arange(56)[:, None].expand(56, 3)
    candidates, correction = _candidates(labels, VOCAB, 60, sampler)
    assert sorted(candidates.tolist()) == list(range(VOCAB))
    assert not correction.any()
    sampled = head_losses(blocks, OUTPUT, states, labels, replace(RECIPE, sampled_tokens=60), sampler)
    full = head_losses(blocks, OUTPUT, states, labels, RECIPE, sampler)
    assert torch.allclose(sampled, full, rtol=1e-5)


def test_the_sampled_denominator_is_unbiased() -> None:
    """The mean over many samples of the softmax's denominator is that of the whole vocabulary."""
    scores, sampler = torch.randn(VOCAB, dtype=torch.float64), torch.Generator().manual_seed(1)
    labels = torch.tensor([[3, 5, IGNORED], [5, 9, 20]])
    drawn = []
    for _ in range(4000):
        candidates, correction = _candidates(labels, VOCAB, 12, sampler)
        assert {3, 5, 9, 20} <= set(candidates.tolist())
        assert len(set(candidates.tolist())) == len(candidates) < VOCAB
        drawn.append((scores[candidates] + correction).exp().sum())
    estimates = torch.stack(drawn)
    error = estimates.std() / len(drawn) ** 0.5
    assert abs(estimates.mean() - scores.exp().sum()) < 4 * error < 0.02 * scores.exp().sum()


def test_a_batch_that_holds_the_whole_vocabulary_has_no_negative() -> None:
    """A byte-level vocabulary soon is in every batch."""
    labels = torch.arange(VOCAB)[:, None].expand(VOCAB, 3)
    candidates, correction = _candidates(labels, VOCAB, 5, torch.Generator())
    assert candidates.tolist() == list(range(VOCAB))
    assert not correction.any()


# Runs


@cache
def own_text() -> TrainingText:
    """What the tiny target writes after the prompts of the tests."""
    answers = answer_batch(target_of("llama"), PROMPTS, max_new_tokens=30)
    return TrainingText(
        tokens=torch.tensor([token for answer in answers for token in answer.tokens]),
        states=torch.cat([answer.states for answer in answers]).half(),
        answer_of=torch.repeat_interleave(torch.arange(len(PROMPTS)), 30),
    )


@pytest.mark.parametrize("shared", [True, False])
def test_training_lowers_the_loss_of_every_head(shared: bool) -> None:
    text, blocks = own_text(), fresh_blocks(shared=shared)
    labels = aligned_labels(text.tokens, text.answer_of, 3)

    def losses() -> Tensor:
        with torch.no_grad():
            return head_losses(blocks, OUTPUT, text.states.float(), labels, RECIPE, torch.Generator())

    before = losses()
    reports: list[TrainingReport] = []
    recipe = replace(RECIPE, batch=29, epochs=20, sampled_tokens=20)
    trained = train_medusa(blocks, OUTPUT, text, recipe, report=reports.append)
    assert trained is blocks
    assert bool((losses() < 0.6 * before).all())
    assert reports[-1].step == reports[-1].steps == 20 * 4
    assert len(reports[-1].loss_per_head) == 3


def test_a_killed_run_ends_bit_identical_to_an_undisturbed_one(tmp_path: Path) -> None:
    """Killed at step 120, it continues from the checkpoint of step 100 with optimiser, order and negatives."""
    recipe = replace(RECIPE, epochs=5, sampled_tokens=20)
    undisturbed = train_medusa(fresh_blocks(), OUTPUT, own_text(), recipe)
    checkpoint = tmp_path / "training.pt"

    def kill(report: TrainingReport) -> None:
        if report.step == 120:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_medusa(fresh_blocks(), OUTPUT, own_text(), recipe, checkpoint=checkpoint, report=kill)
    assert checkpoint.exists()
    steps: list[int] = []
    resumed = train_medusa(
        fresh_blocks(),
        OUTPUT,
        own_text(),
        recipe,
        checkpoint=checkpoint,
        report=lambda report: steps.append(report.step),
    )
    assert steps[0] == 120
    assert not checkpoint.exists()
    for one, other in zip(undisturbed.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(KeyboardInterrupt):
        train_medusa(fresh_blocks(), OUTPUT, own_text(), recipe, checkpoint=checkpoint, report=kill)
    with pytest.raises(InputError, match=r"training.pt is of a run with other settings; delete it"):
        train_medusa(fresh_blocks(), OUTPUT, own_text(), replace(recipe, seed=1), checkpoint=checkpoint)


def test_the_seed_decides_the_heads() -> None:
    runs = [
        train_medusa(fresh_blocks(), OUTPUT, own_text(), replace(RECIPE, sampled_tokens=20, seed=seed))
        for seed in (0, 0, 1)
    ]
    assert torch.equal(runs[0].weight, runs[1].weight)
    assert not torch.equal(runs[0].weight, runs[2].weight)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([[5], [9], [3]], "0 supervised tokens"),
        ([[5, 9, VOCAB]], rf"token ids outside 0 .. {VOCAB - 1}"),
        ([[5, -1, 9]], "token ids outside"),
    ],
)
def test_text_that_cannot_be_learnt_is_refused(answers: list[list[int]], message: str) -> None:
    """FIELD-CASES 83, 84: no NaN step without a label, no index assert by an id beyond the rows."""
    with pytest.raises(InputError, match=message):
        train_medusa(fresh_blocks(), OUTPUT, text_of(*answers), RECIPE)


# Text


@cache
def talker() -> Target:
    """The tiny target with a tokenizer that has a chat template."""
    return replace(target_of("llama"), tokenizer=word_tokenizer(), eos_token_ids=(51,))


def test_answers_are_stored_as_written(tmp_path: Path) -> None:
    target = talker()
    text = write_answers(target, PROMPTS, max_new_tokens=20, store=tmp_path, batch_size=3)
    assert len(list(tmp_path.glob("answers-*.safetensors"))) == 2
    answers = answer_batch(target, PROMPTS, max_new_tokens=20)
    assert text.tokens.tolist() == [token for answer in answers for token in answer.tokens]
    assert text.answer_of.tolist() == [a for a, answer in enumerate(answers) for _ in answer.tokens]
    assert len({len(answer.tokens) for answer in answers}) > 1
    assert torch.allclose(text.states.double(), torch.cat([a.states for a in answers]), rtol=0, atol=4e-3)


def test_other_prompts_in_the_same_store_meet_no_old_answers(tmp_path: Path) -> None:
    write_answers(talker(), PROMPTS, max_new_tokens=8, store=tmp_path, batch_size=2)
    others = [[*prompt, 9] for prompt in PROMPTS]
    text = write_answers(talker(), others, max_new_tokens=8, store=tmp_path, batch_size=2)
    answers = answer_batch(talker(), others, max_new_tokens=8)
    assert text.tokens.tolist() == [token for answer in answers for token in answer.tokens]


def spied_batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches that the target answers from now on."""
    sizes: list[int] = []

    def spy(target: Target, prompts: Sequence[Sequence[int]], **arguments: Any) -> list[Answer]:
        sizes.append(len(prompts))
        return answer_batch(target, prompts, **arguments)

    monkeypatch.setattr(text_module, "answer_batch", spy)
    return sizes


def test_interrupted_answers_continue_with_the_first_missing_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_answers(talker(), PROMPTS, max_new_tokens=8, store=tmp_path / "whole", batch_size=1)

    def kill(done: int, total: int) -> None:
        assert total == len(PROMPTS)
        if done == 2:
            raise KeyboardInterrupt

    store = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        write_answers(talker(), PROMPTS, max_new_tokens=8, store=store, batch_size=1, progress=kill)
    batches = spied_batches(monkeypatch)
    resumed = write_answers(talker(), PROMPTS, max_new_tokens=8, store=store, batch_size=1)
    assert batches == [1, 1]
    assert torch.equal(resumed.tokens, whole.tokens)
    assert torch.equal(resumed.states, whole.states)


OPENINGS = ["w1 w2", "w3", "w4 w5 w6"]


def test_invented_prompts_continue_their_openings_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = invent_prompts(talker(), OPENINGS, count=7, seed=0, store=tmp_path, batch_size=4)
    assert len(set(turns)) == len(turns) == 7
    assert all(turn.startswith(tuple(OPENINGS)) for turn in turns)
    assert all(any(turn.startswith(opening) for turn in turns) for opening in OPENINGS)
    assert any(len(turn.split()) > 3 for turn in turns)
    assert user_turns(turns)[1].messages == ({"role": "user", "content": turns[1]},)
    (tmp_path / "prompts-00001.json").unlink()
    batches = spied_batches(monkeypatch)
    assert invent_prompts(talker(), OPENINGS, count=7, seed=0, store=tmp_path, batch_size=4) == turns
    assert batches == [4]
    assert invent_prompts(talker(), OPENINGS, count=7, seed=1, store=tmp_path / "other", batch_size=4) != turns


def test_a_target_without_further_turns_is_refused_and_not_asked_for_ever(tmp_path: Path) -> None:
    silent = replace(talker(), eos_token_ids=tuple(range(VOCAB)))
    with pytest.raises(InputError, match=r"invents only [1-9]\d* distinct prompts of 500; ask for fewer"):
        invent_prompts(silent, ["w1"], count=500, seed=0, store=tmp_path, batch_size=30)


def test_a_tokenizer_without_a_template_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    """FIELD-CASES 80."""
    target = replace(talker(), tokenizer=word_tokenizer(chat_template=None))
    with pytest.raises(InputError, match=r"no chat template.*instruct model .or --tokenizer.*raw text rows"):
        invent_prompts(target, OPENINGS, count=2, seed=0, store=tmp_path)


def test_a_store_belongs_to_one_run(tmp_path: Path) -> None:
    same_store(tmp_path, {"target": "a", "seed": 0})
    same_store(tmp_path, {"seed": 0, "target": "a"})
    with pytest.raises(InputError, match="holds text of another run"):
        same_store(tmp_path, {"target": "b", "seed": 0})
