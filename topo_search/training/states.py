"""The hidden states of training text, on disk: one memory-mapped fp16 file per target and text.

The target is frozen, so its states are computed once, whatever heads are trained on them. A killed run continues
with the texts that are missing. Beside them lies what the target would have said in text that is not its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from topo_search.answers import batches_by_length
from topo_search.errors import InputError
from topo_search.files.atomic import write_text
from topo_search.target.adapter import Target
from topo_search.target.packing import PackedLinear
from topo_search.training.text import TrainingText, answer_positions

Progress = Callable[[int, int], None]  # texts done, texts in all

_PADDED_TOKENS = 4096  # computed together
_CHOSEN_AT_ONCE = 256


class HiddenStates:
    """States of every position of texts that follow each other, `[positions, hidden]`, read from disk row by row."""

    def __init__(self, *values: np.ndarray) -> None:
        """`values` are the states of each text, at least one, `[its positions, hidden]`."""
        self._values = values
        self._starts = np.cumsum([0, *(len(value) for value in values)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @classmethod
    def joined(cls, parts: Sequence[HiddenStates]) -> HiddenStates:
        """States of texts that are joined in the same order."""
        return cls(*(value for part in parts for value in part._values))

    @property
    def parts(self) -> list[HiddenStates]:
        """The states of each text alone."""
        return [HiddenStates(value) for value in self._values]

    def rows(self, positions: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows hidden"]:
        """The states at the given positions, in fp32."""
        places = positions.numpy()
        rows = np.empty((*places.shape, self._values[0].shape[1]), dtype=np.float32)
        owners = np.searchsorted(self._starts, places, side="right") - 1
        for owner in np.unique(owners):
            own = owners == owner
            rows[own] = self._values[owner][places[own] - self._starts[owner]]
        return torch.from_numpy(rows)


def states_bytes(target: Target, text: TrainingText) -> int:
    """Bytes that the states of `text` take on disk."""
    return 2 * len(text.tokens) * target.hidden_size


def cached_states(
    target: Target, text: TrainingText, folder: Path, *, progress: Progress | None = None
) -> HiddenStates:
    """The states of `text`, computed where `folder` does not hold them yet.

    Raises:
        InputError: a token id is beyond the target's table, a text exceeds its positions, a state is beyond fp16, or
            the disk is full.
    """
    _require_known(target, text)
    name = _cache_name(target, text)
    path, log = folder / f"{name}.f16", folder / f"{name}.json"
    shape = (len(text.tokens), target.hidden_size)
    if not len(text.tokens):
        return HiddenStates(np.zeros(shape, dtype=np.float16))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        done = _batches_done(path, log, states_bytes(target, text))
        if not done:
            _reserve(path, states_bytes(target, text))
        values = np.memmap(path, dtype=np.float16, mode="r+", shape=shape)
        batches = _batches(text)
        read = sum(len(batch) for batch in batches[:done])
        for number, batch in enumerate(batches[done:], start=done + 1):
            _write(target, text, batch, values)
            values.flush()
            write_text(log, json.dumps({"batches": number}))
            read += len(batch)
            if progress:
                progress(read, len(text.prompt_lengths))
    except OSError as error:
        raise InputError(
            f"The hidden states need {states_bytes(target, text) / 1e6:.0f} MB in {folder}, and writing failed: "
            f"{error}. Free space or give another --work; what is written is kept."
        ) from None
    return HiddenStates(np.memmap(path, dtype=np.float16, mode="r", shape=shape))


def greedy_agreement(target: Target, text: TrainingText, states: HiddenStates, *, at_most: int = 4096) -> float:
    """Share of answer tokens, `at_most` of them taken evenly, that are the target's own greedy choice."""
    chosen = answer_positions(text)
    chosen = chosen[:: math.ceil(len(chosen) / at_most)] if len(chosen) else chosen
    agreeing = 0
    with torch.inference_mode():
        for positions in chosen.split(_CHOSEN_AT_ONCE):
            choice = target.choose(states.rows(positions - 1).to(device=target.device, dtype=target.dtype))
            agreeing += int((choice.cpu() == text.tokens[positions]).sum())
    return agreeing / max(len(chosen), 1)


def with_prompts(
    target: Target, text: TrainingText, states: HiddenStates, folder: Path, *, progress: Progress | None = None
) -> TrainingText:
    """The same text, to be learned from its first token that differs between texts on.

    Prompts are not the target's own greedy words. What is learned there is what it would have said after each of their
    tokens; it is looked up once and kept in `folder` beside the states. `progress` counts tokens.

    Raises:
        InputError: the disk is full.
    """
    shared = _shared_beginning(text)
    inside = torch.arange(len(text.tokens)) - torch.repeat_interleave(text.starts[:-1], text.lengths)
    of_prompt = inside < torch.repeat_interleave(text.prompt_lengths, text.lengths) - 1
    asked = torch.nonzero(of_prompt & (inside >= shared)).flatten()
    choices = text.tokens.roll(-1)
    learned = replace(text, prompt_lengths=text.prompt_lengths.clamp(max=shared), choices=choices)
    if len(asked):
        path = folder / f"{_cache_name(target, text)}.choices.i32"
        choices[asked] = _cached_choices(target, states, asked, path, progress)
    return learned


def _cached_choices(
    target: Target, states: HiddenStates, positions: Int[Tensor, " rows"], path: Path, progress: Progress | None
) -> Int[Tensor, " rows"]:
    """The target's choice after each position; `path` holds ids plus 1, 0 is a gap."""
    size = 4 * len(positions)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (path.exists() and path.stat().st_size == size):
            _reserve(path, size)
        held = np.memmap(path, dtype=np.int32, mode="r+", shape=len(positions))
        for start in range(0, len(positions), _CHOSEN_AT_ONCE):
            places = slice(start, start + _CHOSEN_AT_ONCE)
            if ((held[places] < 1) | (held[places] > _table(target))).any():
                found = states.rows(positions[places]).to(device=target.device, dtype=target.dtype)
                with torch.inference_mode():
                    held[places] = target.choose(found).cpu().numpy() + 1
                if progress:
                    progress(min(start + _CHOSEN_AT_ONCE, len(positions)), len(positions))
        held.flush()
    except OSError as error:
        raise InputError(f"Writing {path} failed: {error}. Free space or give another --work.") from None
    return torch.from_numpy(held.astype(np.int64)) - 1


def _shared_beginning(text: TrainingText) -> int:
    """Tokens that all texts begin with, e.g. those of a chat template; at least 1."""
    if len(text.prompt_lengths) < 2:
        return 1
    length = int(text.prompt_lengths.min())
    beginnings = text.tokens[text.starts[:-1, None] + torch.arange(length)]
    same = (beginnings == beginnings[:1]).all(dim=0)
    return max(1, int(same.long().cumprod(dim=0).sum()))


def parameter_count(model: nn.Module) -> int:
    """Weights of a model, those that were packed included."""
    packed = (
        m.in_features * m.out_features for m in model.modules() if isinstance(m, PackedLinear) and m.weight is None
    )
    return sum(parameter.numel() for parameter in model.parameters()) + sum(packed)


def _cache_name(target: Target, text: TrainingText) -> str:
    held = (target.identity.dtype, *(target.identity.quantization or "").split())
    return "-".join(["states", target.identity.fingerprint, *held, text.digest])


def _batches_done(path: Path, log: Path, size: int) -> int:
    """Batches that an earlier run finished; 0 where its files are missing or cut off."""
    if not (log.exists() and path.exists() and path.stat().st_size == size):
        return 0
    try:
        return int(json.loads(log.read_text(encoding="utf-8"))["batches"])
    except (ValueError, KeyError, TypeError):
        return 0


def _reserve(path: Path, size: int) -> None:
    """Take the whole space first, so that a full disk is met at once and not as a fault of the mapped memory."""
    scratch = path.with_suffix(".reserving")
    try:
        with scratch.open("wb") as file:
            block = bytes(1 << 20)
            for start in range(0, size, len(block)):
                file.write(block[: min(len(block), size - start)])
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _batches(text: TrainingText) -> list[list[int]]:
    lengths = text.lengths.tolist()
    size = max(1, _PADDED_TOKENS // max(max(lengths), 1))
    return batches_by_length(lengths, size)


def _write(target: Target, text: TrainingText, batch: list[int], values: np.ndarray) -> None:
    """Run one batch, padded on the right, where causal attention does not see the padding."""
    lengths = [int(text.lengths[index]) for index in batch]
    ids = torch.zeros(len(batch), max(lengths), dtype=torch.long)
    for row, index in enumerate(batch):
        start = int(text.starts[index])
        ids[row, : lengths[row]] = text.tokens[start : start + lengths[row]]
    with torch.inference_mode():
        states = target.hidden_states(ids.to(target.device)).to(device="cpu", dtype=torch.float16)
    for row, index in enumerate(batch):
        start, found = int(text.starts[index]), states[row, : lengths[row]]
        if not bool(torch.isfinite(found).all()):
            raise InputError(
                f"{target.identity.name} has hidden states that are not finite in fp16, in which they are kept: a "
                "broken model, or one whose states are too large for it."
            )
        values[start : start + lengths[row]] = found.numpy()


def _require_known(target: Target, text: TrainingText) -> None:
    if len(text.tokens) and not 0 <= int(text.tokens.min()) <= int(text.tokens.max()) < _table(target):
        lowest, highest = int(text.tokens.min()), int(text.tokens.max())
        raise InputError(
            f"The training text has token id {lowest if lowest < 0 else highest}, beyond the {_table(target)} rows "
            f"of {target.identity.name}'s table; was it written with another tokenizer? Run topo-search distill again."
        )
    limit = target.position_limit
    longest = int(text.lengths.max()) if len(text.prompt_lengths) else 0
    if limit is not None and longest > limit:
        raise InputError(f"A training text has {longest} tokens, but the target's context is {limit}; shorten it.")


def _table(target: Target) -> int:
    return target.vocab_size
