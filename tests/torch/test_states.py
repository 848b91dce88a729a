"""Hidden states on disk: those of a plain forward pass, continued after a kill, safe on a full disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learning import learner, own_text, plain_states, texts_of
from models import llama_config, must_not_run, tiny_model
from torch import nn

from topo_search.errors import InputError
from topo_search.target import Target
from topo_search.target.load import make_target
from topo_search.training import states as states_module
from topo_search.training.states import (
    HiddenStates,
    cached_states,
    greedy_agreement,
    parameter_count,
    states_bytes,
    with_prompts,
)
from topo_search.training.text import text_of

TEXT = own_text()


def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts per batch."""
    monkeypatch.setattr(states_module, "_PADDED_TOKENS", 2 * int(TEXT.lengths.max()))


def test_the_states_are_those_of_a_plain_forward_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batched and padded, kept in fp16: within its rounding."""
    few_at_once(monkeypatch)
    states = cached_states(learner(), TEXT, tmp_path)
    expected = torch.cat([plain_states(tokens) for tokens in texts_of(TEXT)])
    assert len(states) == len(TEXT.tokens)
    found = states.rows(torch.arange(len(states)))
    assert found.dtype == torch.float32
    assert torch.allclose(found, expected, rtol=2**-10, atol=1e-4)
    assert torch.equal(states.rows(torch.tensor([[5, 0], [7, 7]])), found[torch.tensor([[5, 0], [7, 7]])])
    assert (tmp_path / next(tmp_path.glob("*.f16"))).stat().st_size == states_bytes(learner(), TEXT)


def test_finished_states_are_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cached_states(learner(), TEXT, tmp_path)
    monkeypatch.setattr(Target, "hidden_states", must_not_run)
    again = cached_states(learner(), TEXT, tmp_path)
    everything = torch.arange(len(first))
    assert torch.equal(first.rows(everything), again.rows(everything))


def test_killed_states_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_at_once(monkeypatch)
    whole = cached_states(learner(), TEXT, tmp_path / "whole")

    def kill(done: int, total: int) -> None:
        assert total == 9
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_states(learner(), TEXT, tmp_path, progress=kill)
    seen: list[tuple[int, int]] = []
    resumed = cached_states(learner(), TEXT, tmp_path, progress=lambda *at: seen.append(at))
    assert seen == [(6, 9), (8, 9), (9, 9)]
    everything = torch.arange(len(whole))
    assert torch.equal(whole.rows(everything), resumed.rows(everything))


@pytest.mark.parametrize("damage", ["cut", "log"])
def test_damaged_states_are_computed_again(damage: str, tmp_path: Path) -> None:
    first = cached_states(learner(), TEXT, tmp_path / "a").rows(torch.arange(20))
    cached_states(learner(), TEXT, tmp_path / "b")
    values, log = next((tmp_path / "b").glob("*.f16")), next((tmp_path / "b").glob("*.json"))
    if damage == "cut":
        values.write_bytes(values.read_bytes()[:-2])
    else:
        log.write_text("{")
    assert torch.equal(cached_states(learner(), TEXT, tmp_path / "b").rows(torch.arange(20)), first)


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("when", ["reserving", "writing"])
def test_a_full_disk_is_one_clear_error(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was computed stays and is used; no half-reserved file is left to fill the disk."""
    few_at_once(monkeypatch)
    whole = cached_states(learner(), TEXT, tmp_path / "whole").rows(torch.arange(len(TEXT.tokens)))
    with monkeypatch.context() as patched:
        if when == "reserving":
            patched.setattr(Path, "replace", full_disk)
        else:
            patched.setattr(states_module, "write_text", _fails_on_third_call())
        with pytest.raises(InputError, match=r"hidden states need 0 MB in .*No space left.*--work; what is written"):
            cached_states(learner(), TEXT, tmp_path / "full")
    assert not list((tmp_path / "full").glob("*.reserving"))
    seen: list[int] = []
    states = cached_states(learner(), TEXT, tmp_path / "full", progress=lambda done, _: seen.append(done))
    assert seen == ([2, 4, 6, 8, 9] if when == "reserving" else [6, 8, 9])
    assert torch.equal(states.rows(torch.arange(len(states))), whole)


def _fails_on_third_call() -> Callable[[Path, str], None]:
    calls, write = 0, states_module.write_text

    def flaky(path: Path, content: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            full_disk()
        write(path, content)

    return flaky


@pytest.mark.parametrize("token", [61, -1])
def test_an_id_beyond_the_table_is_refused_before_the_device_sees_it(
    token: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FIELD-CASES 84."""
    monkeypatch.setattr(Target, "hidden_states", must_not_run)
    text = text_of([torch.tensor([5, 9, token])], [1])
    with pytest.raises(InputError, match=rf"token id {token}, beyond the 61 rows of learner's table.*distill again"):
        cached_states(learner(), text, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_text_beyond_the_context_is_refused(tmp_path: Path) -> None:
    short = replace(learner(), position_limit=10)
    with pytest.raises(InputError, match=r"has \d+ tokens, but the target's context is 10; shorten it"):
        cached_states(short, TEXT, tmp_path)


def test_states_beyond_fp16_are_refused(tmp_path: Path) -> None:
    model = tiny_model(llama_config(), dtype=torch.float32)
    with torch.no_grad():
        model.base_model.norm.weight.fill_(1e6)
    target = make_target(model, None, name="huge", dtype="float32")
    with pytest.raises(InputError, match="huge has hidden states that are not finite in fp16"):
        cached_states(target, TEXT, tmp_path)


def test_no_text_has_no_states(tmp_path: Path) -> None:
    assert len(cached_states(learner(), text_of([], []), tmp_path)) == 0


def test_states_of_joined_texts_are_read_as_one(tmp_path: Path) -> None:
    """Each text keeps its own file, so another text beside it costs nothing anew."""
    texts = [TEXT.select([2, 0]), text_of([], []), TEXT.select([1])]
    parts = [cached_states(learner(), text, tmp_path) for text in texts]
    joined, alone = HiddenStates.joined(parts), cached_states(learner(), TEXT.select([2, 0, 1]), tmp_path)
    assert len(joined) == len(alone)
    places = torch.randperm(len(alone))[: len(alone) // 2 * 2].view(-1, 2)
    assert torch.equal(joined.rows(places), alone.rows(places))
    assert [len(part) for part in joined.parts] == [len(part) for part in parts]


def test_agreement_is_the_share_of_the_targets_own_choices(tmp_path: Path) -> None:
    """FIELD-CASES 87: its own text agrees, another's does not; the prompt's tokens do not count."""
    states = cached_states(learner(), TEXT, tmp_path)
    assert greedy_agreement(learner(), TEXT, states) == 1.0
    others = [torch.cat([tokens[:length], (tokens[length:] + 1) % 61]) for tokens, length in _texts()]
    foreign = text_of(others, TEXT.prompt_lengths.tolist())
    states = cached_states(learner(), foreign, tmp_path)
    expected, total = 0, 0
    for tokens, length in zip(others, TEXT.prompt_lengths.tolist(), strict=True):
        chosen = learner().choose(plain_states(tokens))
        expected += int((chosen[length - 1 : -1] == tokens[length:]).sum())
        total += len(tokens) - length
    assert greedy_agreement(learner(), foreign, states) == pytest.approx(expected / total)
    assert expected / total < 0.5
    assert 0 <= greedy_agreement(learner(), foreign, states, at_most=10) < 0.7


def test_prompts_are_learned_from_where_they_begin_to_differ(tmp_path: Path) -> None:
    """There the target's own choice is learned, in answers the token that follows."""
    template = [torch.tensor([7, 5, *tokens.tolist()]) for tokens in texts_of(TEXT)]
    text = text_of(template, (TEXT.prompt_lengths + 2).tolist())
    learned = with_prompts(learner(), text, cached_states(learner(), text, tmp_path), tmp_path)
    assert learned.prompt_lengths.tolist() == [2] * len(template)
    assert learned.choices is not None
    differing = 0
    for number, tokens in enumerate(template):
        start, prompt = int(text.starts[number]), int(text.prompt_lengths[number])
        chosen = learner().choose(plain_states(tokens))
        asked = learned.choices[start : start + len(tokens)]
        assert asked[2 : prompt - 1].tolist() == chosen[2 : prompt - 1].tolist()
        assert asked[prompt - 1 : -1].tolist() == tokens[prompt:].tolist()
        differing += int((asked[2 : prompt - 1] != tokens[3:prompt]).sum())
    assert differing > 0
    assert torch.equal(learned.tokens, text.tokens) and torch.equal(learned.starts, text.starts)


def test_texts_that_share_nothing_are_learned_from_their_second_token_on(tmp_path: Path) -> None:
    learned = with_prompts(learner(), TEXT, cached_states(learner(), TEXT, tmp_path), tmp_path)
    assert learned.prompt_lengths.tolist() == [1] * len(TEXT.prompt_lengths)
    alone = with_prompts(learner(), TEXT.select([2]), cached_states(learner(), TEXT.select([2]), tmp_path), tmp_path)
    assert alone.prompt_lengths.tolist() == [1]


def test_what_the_target_was_asked_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed run continues; a finished one asks nothing again; text without prompts has nothing to ask."""
    states = cached_states(learner(), TEXT, tmp_path)
    whole = with_prompts(learner(), TEXT, states, tmp_path / "undisturbed")
    monkeypatch.setattr(states_module, "_CHOSEN_AT_ONCE", 3)
    asked: list[int] = []

    def die(done: int, _: int) -> None:
        asked.append(done)
        if done >= 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with_prompts(learner(), TEXT, states, tmp_path, progress=die)
    first = asked.pop()
    continued = with_prompts(learner(), TEXT, states, tmp_path, progress=lambda done, _: asked.append(done))
    assert min(asked[1:]) > first
    assert torch.equal(continued.choices, whole.choices)  # type: ignore[arg-type]
    (file,) = tmp_path.glob("*.choices.i32")
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert torch.equal(with_prompts(learner(), TEXT, states, tmp_path).choices, whole.choices)  # type: ignore[arg-type]
    monkeypatch.setattr(Target, "choose", must_not_run)
    assert torch.equal(with_prompts(learner(), TEXT, states, tmp_path).choices, whole.choices)  # type: ignore[arg-type]
    bare = replace(TEXT, prompt_lengths=torch.ones_like(TEXT.prompt_lengths))
    assert with_prompts(learner(), bare, states, tmp_path).prompt_lengths.tolist() == [1] * len(TEXT.prompt_lengths)


def test_a_disk_too_full_for_what_the_target_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = cached_states(learner(), TEXT, tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(states_module, "_reserve", full)
    with pytest.raises(InputError, match=r"choices\.i32 failed.*No space left.*--work"):
        with_prompts(learner(), TEXT, states, tmp_path)


def _texts() -> list[tuple[torch.Tensor, int]]:
    return list(zip(texts_of(TEXT), TEXT.prompt_lengths.tolist(), strict=True))


def test_packed_weights_count() -> None:
    """Packing releases the plain matrices; the share of the target's parameters is of all of them."""
    model: nn.Module = tiny_model(llama_config(), dtype=torch.float32)
    wanted = sum(parameter.numel() for parameter in model.parameters())
    assert parameter_count(model) == wanted
    target = make_target(model, None, name="packed", dtype="float32")
    assert target.packed
    assert parameter_count(target.model) == wanted
