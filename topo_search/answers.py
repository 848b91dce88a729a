"""The target's own answers, many prompts at a time: the text that traces and training are made from.

Rows are padded on the left; a row ends at an end-of-text id or at its cap, and the batch shrinks as rows end. The
hidden state that chose each token is kept, so neither profiling nor training runs the target a second time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from topo_search.decode.cache import SlotCache
from topo_search.decode.sampling import choose
from topo_search.identity import GREEDY, MAX_SEED, RuleIdentity
from topo_search.target.adapter import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the target wrote after one prompt.

    Attributes:
        prompt_index: index of the prompt among those given.
        tokens: the answer y_0 .. y_{N-1}, end-of-text included where it ended so.
        end: `eos` or `cap`.
        states: the hidden state that chose each token, `[N, hidden]`, that of the prompt's last token first.
        prompt_states: those of the prompt's tokens before its last, where they were asked for.
        prompt: the prompt's tokens, where its states were asked for.
    """

    prompt_index: int
    tokens: tuple[int, ...]
    end: str
    states: Float[Tensor, "tokens hidden"]
    prompt_states: Float[Tensor, "prompt hidden"] | None = None
    prompt: tuple[int, ...] = ()


def digest_of(tokens: object) -> str:
    """Hash of token ids, or of a list of such, as artefacts and file names hold it."""
    return hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]


def request_of(tokens: Sequence[int]) -> int:
    """Number of a prompt's sequence for sampling: it follows from the tokens, so it is the same in every set."""
    return int(digest_of(tuple(tokens)), 16) % MAX_SEED


def batches_by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices grouped by similar length, so that little padding is computed; longest first, so memory fails early."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def answer_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    rule: RuleIdentity = GREEDY,
    requests: Sequence[int] | None = None,
    keep_prompt_states: bool = False,
) -> list[Answer]:
    """Answers of one batch of prompts, in their order.

    Args:
        target: the model.
        prompts: token ids of each prompt, none empty.
        max_new_tokens: cap of each answer, at least 1.
        rule: greedy, or sampling; the answers are those of plain decoding under the same rule and request.
        requests: number of each prompt's sequence; its index by default.
        keep_prompt_states: whether answers carry the states of their prompts too, for heads that read them.

    Raises:
        CheckError: the target's logits are not finite.
    """
    batch = _Batch.start(target, prompts, max_new_tokens, requests=requests)
    answers: dict[int, Answer] = {}
    ends = torch.tensor(target.eos_token_ids, device=target.device)
    with torch.inference_mode():
        prefilled = batch.forward(batch.padded_ids)
        if keep_prompt_states:
            batch.keep_prompt_states(prefilled, prompts)
        hidden = prefilled[:, -1]
        for step in range(max_new_tokens):
            chosen = batch.choose(hidden, rule)
            batch.append(chosen, hidden)
            is_last = step + 1 == max_new_tokens
            ended = torch.isin(chosen, ends)
            for row in torch.nonzero(ended | is_last).flatten().tolist():
                index = batch.rows[row]
                end = "eos" if bool(ended[row]) else "cap"
                answers[index] = batch.answer(index, end)
            if len(answers) == len(prompts):
                break
            batch.drop(ended)
            hidden = batch.forward(chosen[~ended, None])[:, -1]
    return [answers[index] for index in range(len(prompts))]


@dataclass(slots=True)
class _Batch:
    """Rows still being written."""

    target: Target
    cache: SlotCache
    padded_ids: Int[Tensor, "batch width"]
    mask: Int[Tensor, "batch capacity"]
    positions: Int[Tensor, " batch"]
    requests: Int[Tensor, " batch"]
    rows: list[int]
    written: list[list[int]]
    states: list[list[Tensor]]
    prompt_states: list[Tensor]
    prompts: list[tuple[int, ...]]

    @classmethod
    def start(
        cls,
        target: Target,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        requests: Sequence[int] | None,
    ) -> _Batch:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.ones(len(prompts), width + max_new_tokens, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, : width - len(prompt)] = 0
        return cls(
            target=target,
            cache=target.new_cache(width + max_new_tokens, batch=len(prompts)),
            padded_ids=ids.to(target.device),
            mask=mask.to(target.device),
            positions=torch.tensor([len(prompt) for prompt in prompts], device=target.device),
            requests=torch.tensor(requests or range(len(prompts)), device=target.device),
            rows=list(range(len(prompts))),
            written=[[] for _ in prompts],
            states=[[] for _ in prompts],
            prompt_states=[],
            prompts=[],
        )

    def forward(self, ids: Int[Tensor, "batch width"]) -> Float[Tensor, "batch width hidden"]:
        """Write the given tokens and return their hidden states."""
        width = ids.shape[1]
        offsets = torch.arange(width, device=ids.device) - width
        positions = (self.positions[:, None] + offsets).clamp(min=0)
        seen = self.cache.length + width
        hidden = self.target.hidden_states(
            ids, cache=self.cache, position_ids=positions, attention_mask=self.mask[:, :seen]
        )
        self.cache.commit(width)
        return hidden

    def choose(self, hidden: Float[Tensor, "batch hidden"], rule: RuleIdentity) -> Int[Tensor, " batch"]:
        """The rule's next token of every row."""
        scores = self.target.logits(hidden)
        return choose(scores, rule, positions=self.positions, requests=self.requests)

    def keep_prompt_states(self, hidden: Float[Tensor, "batch width hidden"], prompts: Sequence[Sequence[int]]) -> None:
        """Remember every prompt, and the states of its tokens before its last, padding excluded."""
        rows = zip(hidden.cpu(), prompts, strict=True)
        self.prompt_states = [row[row.shape[0] - len(prompt) : -1].clone() for row, prompt in rows]
        self.prompts = [tuple(prompt) for prompt in prompts]

    def append(self, chosen: Int[Tensor, " batch"], hidden: Float[Tensor, "batch hidden"]) -> None:
        """Add one token and the state that chose it to every row's text."""
        for row, token, state in zip(self.rows, chosen.tolist(), hidden.cpu(), strict=True):
            self.written[row].append(token)
            self.states[row].append(state)
        self.positions += 1

    def answer(self, index: int, end: str) -> Answer:
        """The finished answer of prompt `index`."""
        states = torch.stack(self.states[index])
        return Answer(
            prompt_index=index,
            tokens=tuple(self.written[index]),
            end=end,
            states=states,
            prompt_states=self.prompt_states[index] if self.prompt_states else None,
            prompt=self.prompts[index] if self.prompts else (),
        )

    def drop(self, ended: Tensor) -> None:
        """Forget the rows that have ended."""
        if not bool(ended.any()):
            return
        kept = torch.nonzero(~ended).flatten()
        self.cache = self.cache.select_rows(kept)
        self.mask, self.positions, self.requests = self.mask[kept], self.positions[kept], self.requests[kept]
        self.rows = [self.rows[row] for row in kept.tolist()]
