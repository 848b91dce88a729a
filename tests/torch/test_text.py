"""The store of training text: written once, continued, extended, and refused where it is another run's or damaged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import word_tokenizer
from learning import learner
from models import PROMPTS, VOCAB, target_of

from topo_search.answers import Answer, answer_batch
from topo_search.errors import InputError
from topo_search.identity import GREEDY, RuleIdentity, sampling_rule
from topo_search.target import Target
from topo_search.training import text as text_module
from topo_search.training.text import (
    MANIFEST,
    TrainingText,
    answer_positions,
    invent_prompts,
    join_texts,
    new_prompts_only,
    open_store,
    ordinary_text,
    packaged_openings,
    read_text_store,
    store_target,
    text_of,
    user_turns,
    write_answers,
)

OPENINGS = ["w1 w2", "w3", "w4 w5 w6"]
WARM = sampling_rule(temperature=0.9)


def talker() -> Target:
    """The tiny target in float64 with a tokenizer that has a chat template."""
    return replace(target_of("llama"), tokenizer=word_tokenizer(), eos_token_ids=(51,))


def write(
    store: Path, prompts: Sequence[Sequence[int]] = PROMPTS, *, batch_size: int = 3, **changes: Any
) -> TrainingText:
    """Eight tokens after each prompt."""
    settings: dict[str, Any] = {"max_new_tokens": 8} | changes
    return write_answers(talker(), prompts, store=store, batch_size=batch_size, **settings)


def by_prompt(text: TrainingText) -> dict[tuple[int, ...], list[int]]:
    """Each prompt's answer."""
    pairs = zip(text.tokens.split(text.lengths.tolist()), text.prompt_lengths.tolist(), strict=True)
    return {tuple(tokens[:length].tolist()): tokens[length:].tolist() for tokens, length in pairs}


def spied_batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches that the target answers from now on."""
    sizes: list[int] = []

    def spy(target: Target, prompts: Sequence[Sequence[int]], **arguments: Any) -> list[Answer]:
        sizes.append(len(prompts))
        return answer_batch(target, prompts, **arguments)

    monkeypatch.setattr(text_module, "answer_batch", spy)
    return sizes


# Answers


def test_answers_are_stored_as_written(tmp_path: Path) -> None:
    text = write(tmp_path, max_new_tokens=20)
    answers = answer_batch(talker(), PROMPTS, max_new_tokens=20)
    expected = {prompt: list(answer.tokens) for prompt, answer in zip(PROMPTS, answers, strict=True)}
    assert by_prompt(text) == expected
    assert len({len(answer.tokens) for answer in answers}) > 1
    assert text.answer_tokens == sum(len(answer.tokens) for answer in answers)
    assert text.tokens[answer_positions(text)].tolist() == [t for answer in answers for t in answer.tokens]
    assert len(list(tmp_path.glob("text-*.safetensors"))) == 2
    assert read_text_store(tmp_path).digest == text.digest
    assert store_target(tmp_path) == talker().identity.fingerprint


@pytest.mark.parametrize("rule", [GREEDY, WARM])
def test_an_interrupted_store_continues_with_the_first_missing_shard(
    rule: RuleIdentity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The continued store is the undisturbed one, sampled text included."""
    whole = write(tmp_path / "whole", batch_size=1, rule=rule)

    def kill(done: int, total: int) -> None:
        assert total == len(PROMPTS)
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "killed", batch_size=1, rule=rule, progress=kill)
    batches = spied_batches(monkeypatch)
    assert write(tmp_path / "killed", batch_size=1, rule=rule).digest == whole.digest
    assert batches == [1, 1]


def test_a_shard_that_the_manifest_does_not_list_yet_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the shard and its line in the manifest."""
    whole = write(tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(manifest | {"shards": manifest["shards"][:1]}))
    batches = spied_batches(monkeypatch)
    assert write(tmp_path).digest == whole.digest
    assert batches == []


@pytest.mark.parametrize("rule", [GREEDY, WARM])
def test_more_prompts_are_added_and_none_is_answered_twice(rule: RuleIdentity, tmp_path: Path) -> None:
    """Else one prompt's text would be trained on and held out."""
    first = by_prompt(write(tmp_path, PROMPTS[:3], batch_size=2, rule=rule))
    text = write(tmp_path, [*PROMPTS, PROMPTS[0]], batch_size=2, rule=rule)
    assert len(text.prompt_lengths) == len(PROMPTS)
    assert set(by_prompt(text)) == set(PROMPTS)
    assert first.items() <= by_prompt(text).items()


def test_sampled_text_follows_from_its_seed(tmp_path: Path) -> None:
    seeds = {"a": 0, "b": 0, "c": 1}
    texts = {name: write(tmp_path / name, rule=replace(WARM, seed=seed)).digest for name, seed in seeds.items()}
    assert texts["a"] == texts["b"] != texts["c"]
    assert write(tmp_path / "greedy").digest not in texts.values()


def test_sampled_tokens_are_among_the_allowed(tmp_path: Path) -> None:
    """top_k = 1 is greedy at any temperature, and so is a top_p that the first token fills."""
    greedy = write(tmp_path / "greedy").digest
    assert write(tmp_path / "k", rule=sampling_rule(temperature=2.0, top_k=1)).digest == greedy
    assert write(tmp_path / "p", rule=sampling_rule(temperature=2.0, top_p=1e-9)).digest == greedy


@pytest.mark.parametrize(
    "changes", [{"seed": 1}, {"max_new_tokens": 9}, {"rule": WARM}, {"rule": replace(WARM, top_k=3)}]
)
def test_a_store_belongs_to_one_run(changes: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(InputError, match=r"holds text of another run .*delete it or give another folder"):
        write(tmp_path, **changes)


def test_a_store_belongs_to_one_target(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(InputError, match="holds text of another run"):
        open_store(learner(), tmp_path, max_new_tokens=8)


def test_damaged_stores_are_named(tmp_path: Path) -> None:
    whole = write(tmp_path)
    shard = sorted(tmp_path.glob("text-*.safetensors"))[0]
    content = shard.read_bytes()
    shard.write_bytes(content[:-4])
    with pytest.raises(InputError, match=rf"{shard.name} is damaged .*; delete it and run topo-search distill"):
        read_text_store(tmp_path)
    shard.unlink()
    with pytest.raises(InputError, match=rf"{shard.name}, which manifest.json lists, is missing"):
        read_text_store(tmp_path)
    assert by_prompt(write(tmp_path)) == by_prompt(whole)  # the way out


@pytest.mark.parametrize(
    ("content", "word"),
    [("{]", "no manifest"), ("{}", "no manifest"), ('{"settings": 3, "shards": []}', "settings and shards")],
)
def test_damaged_manifests_are_named(content: str, word: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(InputError, match=word):
        read_text_store(tmp_path)


def test_what_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"is no text store: it has no {MANIFEST}. Make one with topo-search distill"):
        read_text_store(tmp_path)
    open_store(talker(), tmp_path, max_new_tokens=8)
    with pytest.raises(InputError, match="holds no text; run topo-search distill"):
        read_text_store(tmp_path)


def test_a_text_keeps_its_borders() -> None:
    text = text_of([torch.tensor([1, 2, 3]), torch.tensor([4, 5]), torch.tensor([6, 7, 8, 9])], [2, 1, 1])
    assert text.lengths.tolist() == [3, 2, 4]
    assert answer_positions(text).tolist() == [2, 4, 6, 7, 8]
    chosen = text.select([2, 0])
    assert chosen.tokens.tolist() == [6, 7, 8, 9, 1, 2, 3]
    assert chosen.starts.tolist() == [0, 4, 7]
    assert chosen.prompt_lengths.tolist() == [1, 2]
    assert chosen.digest != text.digest == text.select([0, 1, 2]).digest


def test_joined_texts_keep_their_borders_and_choices() -> None:
    one = text_of([torch.tensor([1, 2, 3]), torch.tensor([4, 5])], [2, 1])
    other = text_of([torch.tensor([6, 7, 8, 9])], [1])
    joined = join_texts([one, other])
    assert joined.digest == text_of([*one.tokens.split([3, 2]), other.tokens], [2, 1, 1]).digest
    assert join_texts([one]).digest == one.digest
    asked = join_texts([replace(text, choices=text.tokens + 10) for text in (one, other)])
    assert asked.choices is not None and asked.choices.tolist() == [11, 12, 13, 14, 15, 16, 17, 18, 19]


def test_a_prompt_that_is_answered_elsewhere_is_left_out() -> None:
    """Else it could be trained on in one store and held out in the other."""
    known = text_of([torch.tensor([1, 2, 3]), torch.tensor([4, 5])], [2, 1])
    text = text_of([torch.tensor([4, 9]), torch.tensor([1, 3, 3]), torch.tensor([1, 2, 8, 8])], [1, 2, 2])
    assert new_prompts_only(text, [known]).tokens.tolist() == [1, 3, 3]
    assert new_prompts_only(text, []).digest == text.digest
    assert len(new_prompts_only(text, [text]).tokens) == 0


# Prompts


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
    (tmp_path / "prompts-00000.json").write_text("[")
    with pytest.raises(InputError, match=r"prompts-00000.json is damaged .*delete it"):
        invent_prompts(talker(), OPENINGS, count=7, seed=0, store=tmp_path, batch_size=4)


def test_a_target_without_further_turns_is_refused_and_not_asked_for_ever(tmp_path: Path) -> None:
    silent = replace(talker(), eos_token_ids=tuple(range(VOCAB)))
    with pytest.raises(InputError, match=r"invents only [1-9]\d* distinct prompts of 500; ask for fewer"):
        invent_prompts(silent, ["w1"], count=500, seed=0, store=tmp_path, batch_size=30)


def test_a_tokenizer_without_a_template_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    """FIELD-CASES 80."""
    target = replace(talker(), tokenizer=word_tokenizer(chat_template=None))
    with pytest.raises(InputError, match=r"no chat template.*instruct model .or --tokenizer.*raw text rows"):
        invent_prompts(target, OPENINGS, count=2, seed=0, store=tmp_path)


def test_the_packaged_openings_take_workloads_in_turn() -> None:
    openings = packaged_openings()
    assert len(openings) == len(set(openings)) > 8


# Ordinary text


def test_ordinary_text_is_cut_into_pieces(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" ".join(f"w{n % 50}" for n in range(11)))
    (tmp_path / "b.txt").write_text("w1 w2 w3")
    text = ordinary_text(talker(), [tmp_path / "a.txt", tmp_path / "b.txt"], length=5)
    assert text.lengths.tolist() == [5, 5, 3]  # one word is left over, and nothing follows it
    assert text.prompt_lengths.tolist() == [5, 5, 3]  # nothing of it is the target's own
    assert text.tokens.tolist() == [5 + n % 50 for n in range(10)] + [6, 7, 8]


def test_ordinary_text_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xe4")
    (tmp_path / "short").write_text("w1 w2")
    (tmp_path / "empty").write_text("\n")
    refused = (
        ("latin", "latin is not UTF-8"),
        ("none", "none cannot be read: No such file"),
        ("empty", "empty is empty"),
        ("short", r"short\) needs three tokens"),
    )
    for name, words in refused:
        with pytest.raises(InputError, match=words):
            ordinary_text(talker(), [tmp_path / name])
