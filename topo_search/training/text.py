"""Training text: the target invents prompts, answers them, and the states that chose each token are stored.

The store is a folder of safetensors shards, one per batch, written atomically: a run that was interrupted continues
with the first missing shard and loses at most one batch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save
from torch import Tensor

from topo_search.answers import Answer, answer_batch
from topo_search.errors import InputError
from topo_search.files.atomic import write_bytes, write_text
from topo_search.files.prompts import Prompt
from topo_search.resources import packaged
from topo_search.target.adapter import Target

Progress = Callable[[int, int], None]  # done, total

_PROMPT_TOKENS = 40
_TEMPERATURE = 0.9
_TOP_K = 128
_TOP_P = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingText:
    """All stored answers end to end.

    Attributes:
        tokens: `[positions]`, every answer's tokens in turn.
        states: `[positions, hidden]`, fp16: the state that chose each token.
        answer_of: `[positions]`, the number of the answer a position belongs to.
    """

    tokens: Int[Tensor, " positions"]
    states: Float[Tensor, "positions hidden"]
    answer_of: Int[Tensor, " positions"]


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


def same_store(store: Path, settings: dict[str, Any]) -> None:
    """Bind a store to the settings that its shards depend on.

    Raises:
        InputError: it holds shards of other settings.
    """
    path = store / "settings.json"
    text = json.dumps(settings, sort_keys=True)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise InputError(f"{store} holds text of another run ({path}); delete it or give another --work.")
    write_text(path, text)


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
            sampler = torch.Generator(device=target.device).manual_seed(seed * 1_000_003 + number)
            write_text(shard, json.dumps(_continue_turns(target, picked, sampler), ensure_ascii=False))
        known, turns = turns, list(dict.fromkeys(turns + json.loads(shard.read_text(encoding="utf-8"))))
        if len(turns) == len(known):
            raise InputError(f"The target invents only {len(turns)} distinct prompts of {count}; ask for fewer.")
        number += 1
        if progress:
            progress(min(len(turns), count), count)
    return turns[:count]


def _continue_turns(target: Target, openings: Sequence[str], sampler: torch.Generator) -> list[str]:
    def sample(hidden: Float[Tensor, "batch hidden"]) -> Int[Tensor, " batch"]:
        scores, ids = torch.topk(target.scores(hidden) / _TEMPERATURE, min(_TOP_K, target.known_ids), dim=-1)
        probs = torch.softmax(scores, dim=-1)
        probs = probs.masked_fill(probs.cumsum(dim=-1) - probs > _TOP_P, 0.0)
        return ids.gather(-1, torch.multinomial(probs, 1, generator=sampler))[:, 0]

    prompts = [target.tokenizer(_turn_start(target, o), add_special_tokens=False).input_ids for o in openings]
    answers = answer_batch(target, prompts, max_new_tokens=_PROMPT_TOKENS, choose=sample)
    written = [target.tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers]
    return [(opening + text).strip() for opening, text in zip(openings, written, strict=True)]


def _turn_start(target: Target, opening: str) -> str:
    """The chat template up to and including the opening of the user's turn."""
    text: str = target.tokenizer.apply_chat_template([{"role": "user", "content": opening}], tokenize=False)
    return text[: text.rindex(opening) + len(opening)]


def write_answers(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    store: Path,
    batch_size: int = 64,
    progress: Progress | None = None,
) -> TrainingText:
    """The target's greedy answers to `prompts` with their states, stored shard by shard and read back."""
    shards = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        shards.append(store / f"answers-{_digest(batch)}.safetensors")
        if not shards[-1].exists():
            _write_shard(shards[-1], answer_batch(target, batch, max_new_tokens=max_new_tokens))
        if progress:
            progress(min(start + batch_size, len(prompts)), len(prompts))
    return read_answers(shards)


def _digest(batch: Sequence[Sequence[int]]) -> str:
    """Names a shard by its prompts, so that other prompts in the same store never meet old answers."""
    return hashlib.sha256(repr([tuple(prompt) for prompt in batch]).encode()).hexdigest()[:16]


def _write_shard(path: Path, answers: Sequence[Answer]) -> None:
    lengths = [len(answer.tokens) for answer in answers]
    content = save(
        {
            "tokens": torch.tensor([token for answer in answers for token in answer.tokens], dtype=torch.int32),
            "states": torch.cat([answer.states for answer in answers]).to(torch.float16),
            "lengths": torch.tensor(lengths, dtype=torch.int32),
        }
    )
    write_bytes(path, content)


def read_answers(shards: Sequence[Path]) -> TrainingText:
    """The stored answers of the given shards, in order."""
    loaded = [load_file(shard) for shard in shards]
    lengths = torch.cat([shard["lengths"] for shard in loaded]).long()
    return TrainingText(
        tokens=torch.cat([shard["tokens"] for shard in loaded]).long(),
        states=torch.cat([shard["states"] for shard in loaded]),
        answer_of=torch.repeat_interleave(torch.arange(lengths.shape[0]), lengths),
    )
