"""`RankTrace`: at every position of the target's own answers, the rank of the true continuation at every depth.

Conventions: an answer y_0 .. y_{N-1} has rows j = 0 .. N-2. Row j's root is y_j, and its
column k - 1 holds the rank of y_{j+k} in the list of depth k. Two sentinels, never mixed: `resolved_ranks` (the true
token ranks beyond those resolved: a miss) and -1 (past the answer's end: not observed).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from topo_search.errors import InputError, MismatchError
from topo_search.identity import HeadsIdentity, RuleIdentity, TargetIdentity, require_same

PAST_END = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePrompt:
    """One prompt and how its answer ended.

    Attributes:
        id: unique within the trace.
        workload: e.g. `code`; `default` where the prompts name none.
        prompt_tokens: tokens of the prompt.
        answer_tokens: N, tokens of the answer, the last one included.
        end: `eos` or `cap`.
        digest: hash of the prompt's token ids, so that changed text under an old id is noticed.
    """

    id: str
    workload: str
    prompt_tokens: int
    answer_tokens: int
    end: str
    digest: str = ""

    @property
    def rows(self) -> int:
        """Possible step starts, N - 1; none for an answer of one token."""
        return self.answer_tokens - 1


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """Ranks of every prompt's rows, prompt after prompt, rows in order of position.

    Attributes:
        prompts: the prompts in row order.
        ranks: `[rows, depth]`, int16; see the module for the two sentinels.
        resolved_ranks: ranks 0 .. resolved_ranks - 1 are told apart.
        target, heads, rule: what wrote and drafted; part of the identity.
        max_new_tokens: the cap of every answer; part of the identity.
        provenance: versions, command and time; not part of the identity.

    Raises:
        InputError: rows, sentinels or ranks contradict the prompts, or the rule changes the text.
    """

    prompts: tuple[TracePrompt, ...]
    ranks: Int[np.ndarray, "rows depth"]
    resolved_ranks: int
    target: TargetIdentity
    heads: HeadsIdentity
    rule: RuleIdentity
    max_new_tokens: int
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rule.changes_text:
            raise InputError(
                "A rank trace replays the target's own text, which typical acceptance changes; record accept masks "
                "(topo-search calibrate --acceptance typical)."
            )
        if self.ranks.ndim != 2 or self.ranks.shape[0] != sum(prompt.rows for prompt in self.prompts):
            raise InputError(
                f"The trace's ranks have shape {self.ranks.shape}, but its prompts have {self._rows()} rows."
            )
        if len({prompt.id for prompt in self.prompts}) != len(self.prompts):
            raise InputError("The trace holds a prompt id twice.")
        if not self.ranks.size:
            return
        if self.ranks.min() < PAST_END or self.ranks.max() > self.resolved_ranks:
            raise InputError(f"The trace's ranks must lie in -1 .. {self.resolved_ranks}.")
        past = np.arange(1, self.depth + 1)[None, :] > self.remaining[:, None]
        if not np.array_equal(past, self.ranks == PAST_END):
            raise InputError("The trace's -1 entries must be exactly the positions past each answer's end.")

    def _rows(self) -> int:
        return sum(prompt.rows for prompt in self.prompts)

    @property
    def depth(self) -> int:
        """Draft heads recorded."""
        return int(self.ranks.shape[1])

    @cached_property
    def starts(self) -> Int[np.ndarray, " prompts_plus_one"]:
        """First row of each prompt, and the number of rows last."""
        return np.concatenate([[0], np.cumsum([prompt.rows for prompt in self.prompts], dtype=np.int64)])

    @cached_property
    def prompt_of_row(self) -> Int[np.ndarray, " rows"]:
        """Index of each row's prompt."""
        return np.repeat(np.arange(len(self.prompts)), [prompt.rows for prompt in self.prompts])

    @cached_property
    def positions(self) -> Int[np.ndarray, " rows"]:
        """j of each row: answer tokens already in the cache when a step starts there."""
        positions: np.ndarray = np.arange(self.ranks.shape[0]) - self.starts[self.prompt_of_row]
        return positions

    @cached_property
    def remaining(self) -> Int[np.ndarray, " rows"]:
        """N - 1 - j of each row: tokens that a step starting there can still emit."""
        lengths = np.array([prompt.answer_tokens for prompt in self.prompts], dtype=np.int64)
        remaining: np.ndarray = lengths[self.prompt_of_row] - 1 - self.positions
        return remaining

    @property
    def contexts(self) -> Int[np.ndarray, " rows"]:
        """Committed tokens in the cache when a step starts at each row."""
        lengths = np.array([prompt.prompt_tokens for prompt in self.prompts], dtype=np.int64)
        contexts: np.ndarray = lengths[self.prompt_of_row] + self.positions
        return contexts

    def select(self, keep: Callable[[TracePrompt], bool]) -> RankTrace:
        """The trace of the prompts that `keep` accepts."""
        return self.of_prompts(np.array([keep(prompt) for prompt in self.prompts], dtype=np.bool_))

    def of_prompts(self, kept: Bool[np.ndarray, " prompts"]) -> RankTrace:
        """The trace of the prompts marked."""
        rows = kept[self.prompt_of_row]
        prompts = tuple(prompt for prompt, wanted in zip(self.prompts, kept, strict=True) if wanted)
        return replace(self, prompts=prompts, ranks=self.ranks[rows])

    def in_order(self, order: Sequence[int]) -> RankTrace:
        """The trace with its prompts in another order, or only some of them: those at these indices."""
        rows = [np.arange(self.starts[index], self.starts[index + 1]) for index in order]
        prompts = tuple(self.prompts[index] for index in order)
        return replace(self, prompts=prompts, ranks=self.ranks[np.concatenate(rows)] if rows else self.ranks[:0])

    def capped(self, max_new_tokens: int) -> RankTrace:
        """The trace that a smaller cap would have recorded (N' = min(N, cap)).

        Raises:
            InputError: the cap is larger than the recorded one, or below 1.
        """
        if not 1 <= max_new_tokens <= self.max_new_tokens:
            raise InputError(
                f"A trace of answers of at most {self.max_new_tokens} tokens cannot replay {max_new_tokens}; "
                "calibrate with a larger --max-new-tokens."
            )
        prompts = tuple(_capped_prompt(prompt, max_new_tokens) for prompt in self.prompts)
        rows = self.positions < max_new_tokens - 1
        shorter = np.minimum(self.remaining[rows], max_new_tokens - 1 - self.positions[rows])
        past = np.arange(1, self.depth + 1)[None, :] > shorter[:, None]
        ranks = np.where(past, np.int16(PAST_END), self.ranks[rows])
        return replace(self, prompts=prompts, ranks=ranks, max_new_tokens=max_new_tokens)

    def require_same_identity(self, other: RankTrace) -> None:
        """Refuse a trace of another target, heads, rule, cap or resolution.

        Raises:
            MismatchError: names what differs.
        """
        require_same("The other trace's target", other.target, self.target)
        require_same("The other trace's heads", other.heads, self.heads)
        require_same("The other trace's rule", other.rule, self.rule)
        for name in ("max_new_tokens", "resolved_ranks", "depth"):
            if getattr(self, name) != getattr(other, name):
                raise MismatchError(
                    f"The other trace does not fit: {name} is {getattr(other, name)}, not {getattr(self, name)}."
                )


def merge_traces(traces: Sequence[RankTrace]) -> RankTrace:
    """One trace of all prompts; a prompt recorded twice is kept once.

    Raises:
        MismatchError: the traces differ in identity, or record one prompt id with different rows.
    """
    merged = traces[0]
    for other in traces[1:]:
        merged.require_same_identity(other)
        known = {prompt.id for prompt in merged.prompts}
        _require_equal_rows(merged, other)
        extra = other.select(lambda prompt, known=known: prompt.id not in known)  # type: ignore[misc]
        merged = replace(
            merged, prompts=merged.prompts + extra.prompts, ranks=np.concatenate([merged.ranks, extra.ranks])
        )
    return merged


def _require_equal_rows(first: RankTrace, second: RankTrace) -> None:
    at = {prompt.id: index for index, prompt in enumerate(second.prompts)}
    for index, prompt in enumerate(first.prompts):
        if prompt.id not in at:
            continue
        rows = first.ranks[first.starts[index] : first.starts[index + 1]]
        start, end = second.starts[at[prompt.id]], second.starts[at[prompt.id] + 1]
        if second.prompts[at[prompt.id]] != prompt or not np.array_equal(rows, second.ranks[start:end]):
            raise MismatchError(f"Prompt {prompt.id} is recorded differently in the two traces; give it another id.")


def _capped_prompt(prompt: TracePrompt, max_new_tokens: int) -> TracePrompt:
    if prompt.answer_tokens <= max_new_tokens:
        return prompt
    return replace(prompt, answer_tokens=max_new_tokens, end="cap")
