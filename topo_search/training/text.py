"""Training text: the target invents prompts and answers them, into a store that a killed run continues.

A store is a folder of safetensors shards, one per batch of prompts, each named by its prompts and written atomically,
and a manifest that lists them. It holds token ids only; hidden states are recomputed by `training.states`, since one
forward pass over written text is several times faster than writing it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from topo_search.answers import Answer, answer_batch, digest_of, request_of
from topo_search.errors import InputError
from topo_search.files.atomic import write_bytes, write_text
from topo_search.files.prompts import Prompt
from topo_search.identity import GREEDY, RuleIdentity, recorded, sampling_rule
from topo_search.resources import packaged
from topo_search.target.adapter import Target

Progress = Callable[[int, int], None]  # done, total

MANIFEST = "manifest.json"
_TURN_TOKENS = 40
_SHORTEST_LESSON = 3  # a state's token, the root after it, and one to guess


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingText:
    """Prompts with their answers, end to end.

    Attributes:
        tokens: `[positions]`, every prompt and its answer in turn.
        starts: `[texts + 1]`, where each text begins; the last entry is the number of positions.
        prompt_lengths: `[texts]`, leading tokens of each text that nothing is learned about; at least 1.
        choices: `[positions]`, the token to learn after each position, which need not be the one that follows; None:
            the one that follows.
    """

    tokens: Int[Tensor, " positions"]
    starts: Int[Tensor, " texts_plus_one"]
    prompt_lengths: Int[Tensor, " texts"]
    choices: Int[Tensor, " positions"] | None = None

    @property
    def lengths(self) -> Int[Tensor, " texts"]:
        """Tokens of each text."""
        return self.starts[1:] - self.starts[:-1]

    @property
    def answer_tokens(self) -> int:
        """Answer tokens in all."""
        return int((self.lengths - self.prompt_lengths).sum())

    @property
    def digest(self) -> str:
        """Hash of every token and border."""
        content = hashlib.sha256()
        parts = (self.tokens, self.starts, self.prompt_lengths, self.choices)
        for part in (part for part in parts if part is not None):
            content.update(part.to(torch.int64).numpy().tobytes())
        return content.hexdigest()[:16]

    def select(self, texts: Sequence[int] | Int[Tensor, " chosen"]) -> TrainingText:
        """The given texts only, in the given order."""
        chosen = torch.as_tensor(texts, dtype=torch.long)
        places = [slice(int(self.starts[i]), int(self.starts[i + 1])) for i in chosen.tolist()]
        found = text_of([self.tokens[place] for place in places], self.prompt_lengths[chosen].tolist())
        if self.choices is None:
            return found
        return replace(found, choices=torch.cat([self.choices[place] for place in places]))


def text_of(texts: Sequence[Int[Tensor, " _"]], prompt_lengths: Sequence[int]) -> TrainingText:
    """Texts of known prompt lengths."""
    lengths = torch.tensor([0, *(len(text) for text in texts)])
    return TrainingText(
        tokens=torch.cat([*texts, torch.zeros(0, dtype=torch.long)]).long(),
        starts=lengths.cumsum(0),
        prompt_lengths=torch.tensor(prompt_lengths, dtype=torch.long),
    )


def join_texts(texts: Sequence[TrainingText]) -> TrainingText:
    """The given texts in turn, at least one; all have choices, or none has."""
    joined = text_of(
        [piece for text in texts for piece in text.tokens.split(text.lengths.tolist())],
        [length for text in texts for length in text.prompt_lengths.tolist()],
    )
    choices = [text.choices for text in texts if text.choices is not None]
    return replace(joined, choices=torch.cat(choices)) if choices else joined


def new_prompts_only(text: TrainingText, others: Sequence[TrainingText]) -> TrainingText:
    """What of `text` answers no prompt of `others`: the same text must not be trained on and held out."""
    known = {prompt for other in others for prompt in prompts_of(other)}
    return text.select([index for index, prompt in enumerate(prompts_of(text)) if prompt not in known])


def answer_positions(text: TrainingText) -> Int[Tensor, " positions"]:
    """Positions of every answer token."""
    inside = torch.arange(len(text.tokens)) - torch.repeat_interleave(text.starts[:-1], text.lengths)
    return torch.nonzero(inside >= torch.repeat_interleave(text.prompt_lengths, text.lengths)).flatten()


def packaged_openings() -> list[str]:
    """Beginnings of user turns, workloads in turn."""
    content = json.loads(packaged("calibration/openings.json").read_text(encoding="utf-8"))
    return [opening for turn in zip(*content.values(), strict=True) for opening in turn]


def user_turns(turns: Sequence[str]) -> list[Prompt]:
    """The given user turns as prompts."""
    return [
        Prompt(
            id=f"self-{n:05d}", workload="default", split=None, messages=({"role": "user", "content": t},), text=None
        )
        for n, t in enumerate(turns)
    ]


def read_ordinary(files: Sequence[Path]) -> list[str]:
    """The files' text.

    Raises:
        InputError: a file cannot be read, is not UTF-8, or is empty.
    """
    texts = []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise InputError(f"Text file {file} is not UTF-8 ({error}); convert it, or leave it out.") from None
        except OSError as error:
            raise InputError(f"Text file {file} cannot be read: {error.strerror}.") from None
        if not texts[-1].strip():
            raise InputError(f"Text file {file} is empty; leave it out.")
    return texts


def ordinary_text(target: Target, files: Sequence[Path], *, length: int = 256) -> TrainingText:
    """Files cut into texts of `length` tokens, fewer where the target's context is shorter.

    It is text the target did not write, to learn from before its own: all of it is prompt.

    Raises:
        InputError: a file cannot be read as UTF-8, or all of them together hold no three tokens in a row.
    """
    pieces: list[Tensor] = []
    length = min(length, target.position_limit or length)
    for content in read_ordinary(files):
        ids = torch.tensor(target.tokenizer(content, add_special_tokens=False).input_ids, dtype=torch.long)
        pieces += [piece for piece in ids.split(length) if len(piece) >= _SHORTEST_LESSON]
    if not pieces:
        names = ", ".join(map(str, files))
        raise InputError(f"Ordinary text ({names}) needs three tokens at least; give more of it or leave it out.")
    return text_of(pieces, [len(piece) for piece in pieces])


def invent_prompts(
    target: Target,
    openings: Sequence[str],
    *,
    count: int,
    seed: int,
    store: Path,
    batch_size: int = 96,
    progress: Progress | None = None,
) -> list[str]:
    """`count` distinct user turns that the target continued from `openings`, sampled; resumable in `store`.

    Every opening is used equally often. Turns that only repeat an earlier one are dropped.

    Raises:
        InputError: the tokenizer has no chat template, or the target has no further turn to offer.
    """
    if not getattr(target.tokenizer, "chat_template", None):
        raise InputError(
            f"The tokenizer of {target.identity.name} has no chat template, so the target cannot invent user turns. "
            'Use an instruct model (or --tokenizer with a template), or give raw text rows: {"text": ...}.'
        )
    turns: list[str] = []
    number = 0
    while len(turns) < count:
        shard = store / f"prompts-{number:05d}.json"
        if not shard.exists():
            picked = [openings[(number * batch_size + i) % len(openings)] for i in range(batch_size)]
            requests = range(number * batch_size, (number + 1) * batch_size)
            write_text(shard, json.dumps(_continue_turns(target, picked, seed, requests), ensure_ascii=False))
        known, turns = turns, list(dict.fromkeys(turns + _read_turns(shard)))
        if len(turns) == len(known):
            raise InputError(f"The target invents only {len(turns)} distinct prompts of {count}; ask for fewer.")
        number += 1
        if progress:
            progress(min(len(turns), count), count)
    return turns[:count]


def open_store(target: Target, store: Path, *, max_new_tokens: int, seed: int = 0, rule: RuleIdentity = GREEDY) -> None:
    """Bind `store` to how its text is written, before anything is written.

    Raises:
        InputError: the store holds text of another target, cap, seed or rule.
    """
    settings = {
        "target": target.identity.fingerprint,
        "quantization": target.identity.quantization,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "rule": recorded(rule),
    }
    if not (store / MANIFEST).exists():
        _write_manifest(store, settings, [])
    held = _read_manifest(store)["settings"]
    if held != settings:
        raise InputError(
            f"{store} holds text of another run ({held}, not {settings}); delete it or give another folder."
        )


def write_answers(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    store: Path,
    seed: int = 0,
    rule: RuleIdentity = GREEDY,
    batch_size: int = 64,
    progress: Progress | None = None,
) -> TrainingText:
    """The target's answers to `prompts` in `store`, shard by shard; what the store holds already is not run again.

    A prompt is answered once, however often it is given: the same text must not be trained on and held out.

    Raises:
        InputError: the store holds text of another target, cap, seed or rule, or cannot be written.
    """
    open_store(target, store, max_new_tokens=max_new_tokens, seed=seed, rule=rule)
    manifest = _read_manifest(store)
    shards = [str(name) for name in manifest["shards"] if (store / Path(str(name)).name).exists()]
    wanted = list(dict.fromkeys(tuple(prompt) for prompt in prompts))
    answered = {prompt for name in shards for prompt in prompts_of(_read_shard(store, name))}
    missing = [prompt for prompt in wanted if prompt not in answered]
    for start in range(0, len(missing), batch_size):
        batch = missing[start : start + batch_size]
        shard = f"text-{digest_of(batch)}.safetensors"  # by its prompts, so that others never meet old answers
        if not (store / shard).exists():
            requests = [request_of(prompt) for prompt in batch]
            answers = answer_batch(target, batch, max_new_tokens=max_new_tokens, rule=rule, requests=requests)
            write_bytes(store / shard, _shard(batch, answers))
        shards.append(shard)
        _write_manifest(store, manifest["settings"], shards)
        if progress:
            progress(len(wanted) - len(missing) + min(start + batch_size, len(missing)), len(wanted))
    return read_text_store(store)


def read_text_store(store: Path) -> TrainingText:
    """Everything a store holds.

    Raises:
        InputError: it is no store, empty, or a shard is damaged.
    """
    parts = [_read_shard(store, name) for name in _read_manifest(store)["shards"]]
    if not parts:
        raise InputError(f"{store} holds no text; run topo-search distill --out {store}.")
    return join_texts(parts)


def store_target(store: Path) -> str:
    """Fingerprint of the target that wrote a store's text."""
    return str(_read_manifest(store)["settings"].get("target"))


def _read_manifest(store: Path) -> dict[str, Any]:
    path = store / MANIFEST
    if not path.is_file():
        raise InputError(f"{store} is no text store: it has no {MANIFEST}. Make one with topo-search distill.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(manifest["settings"], dict) or not isinstance(manifest["shards"], list):
            raise TypeError("settings and shards are missing")
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no manifest of a text store: {error}.") from None
    found: dict[str, Any] = manifest
    return found


def _write_manifest(store: Path, settings: dict[str, Any], shards: list[str]) -> None:
    write_text(store / MANIFEST, json.dumps({"settings": settings, "shards": shards}, indent=1) + "\n")


def _read_shard(store: Path, name: object) -> TrainingText:
    path = store / Path(str(name)).name
    if not path.is_file():
        raise InputError(f"{path}, which {MANIFEST} lists, is missing; run topo-search distill again to write it.")
    try:
        shard = load_file(path)
        lengths, prompts = shard["lengths"].long(), shard["prompt_lengths"].long()
        if lengths.shape != prompts.shape or not bool(((prompts > 0) & (prompts < lengths)).all()):
            raise ValueError("lengths of texts and prompts do not fit")
        return text_of(shard["tokens"].long().split(lengths.tolist()), prompts.tolist())
    except (SafetensorError, OSError, KeyError, RuntimeError, ValueError) as error:
        raise InputError(f"{path} is damaged ({error}); delete it and run topo-search distill again.") from None


def prompts_of(text: TrainingText) -> list[tuple[int, ...]]:
    """The prompts of a text's answers."""
    pairs = zip(text.starts.tolist(), text.prompt_lengths.tolist(), strict=False)
    return [tuple(text.tokens[start : start + length].tolist()) for start, length in pairs]


def _read_turns(shard: Path) -> list[str]:
    try:
        turns = json.loads(shard.read_text(encoding="utf-8"))
        return [str(turn) for turn in turns]
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{shard} is damaged ({error}); delete it and run topo-search distill again.") from None


def _continue_turns(target: Target, openings: Sequence[str], seed: int, requests: Sequence[int]) -> list[str]:
    rule = sampling_rule(temperature=0.9, top_k=128, top_p=0.95, seed=seed)
    prompts = [target.tokenizer(_turn_start(target, o), add_special_tokens=False).input_ids for o in openings]
    answers = answer_batch(target, prompts, max_new_tokens=_TURN_TOKENS, rule=rule, requests=requests)
    written = [target.tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers]
    return [(opening + text).strip() for opening, text in zip(openings, written, strict=True)]


def _turn_start(target: Target, opening: str) -> str:
    """The chat template up to and including the opening of the user's turn."""
    text: str = target.tokenizer.apply_chat_template([{"role": "user", "content": opening}], tokenize=False)
    return text[: text.rindex(opening) + len(opening)]


def _shard(prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> bytes:
    texts = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers, strict=True)]
    content: bytes = save(
        {
            "tokens": torch.tensor([token for text in texts for token in text], dtype=torch.int32),
            "lengths": torch.tensor([len(text) for text in texts], dtype=torch.int32),
            "prompt_lengths": torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32),
        }
    )
    return content
