"""Several prompts decoded together with one tree: each row has its own accepted length and its own end.

Every row's text is what it is alone: its noise belongs to its sequence, its mask to its length. A row that ends is
dropped from the batch, so it costs nothing more. Prompts of different lengths start at slot 0 and are padded behind,
where causal attention does not look.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from topo_search.decode.arguments import prompt_list, request_number
from topo_search.decode.decoder import Decoded, DecodeSettings, Prompt, TreeDecoder, require_decoder
from topo_search.decode.plan import TreePlan, plan_tree
from topo_search.decode.processors import require_stateless
from topo_search.decode.rows import RowCache
from topo_search.decode.sampling import Sampler, candidate_noise
from topo_search.decode.step import accepted_path
from topo_search.errors import InputError
from topo_search.heads.base import DraftContext, DraftHeads
from topo_search.target.adapter import Target


def decode_batch(
    decoder: TreeDecoder,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    requests: Sequence[int] | None = None,
    **settings: Unpack[DecodeSettings],
) -> list[Decoded]:
    """The answers to several prompts, in their order, each that of `decoder.generate` alone with the row's request.

    Args:
        decoder: its target, heads and tree serve all rows.
        prompts: token ids of each, of any lengths.
        max_new_tokens: exact cap of every answer, at least 1.
        requests: number of each row's sequence, its index by default (0 where a prompt is decoded alone); a row's slot
            in the batch plays no part.
        **settings: of every row; see `DecodeSettings`, without `request`.

    Raises:
        InputError: there is no prompt, one cannot be decoded, the numbers are not one per prompt, a setting is unknown
            or out of range, or a logits processor may keep a state that rows would share.
        CheckError: the target's logits are not finite.
    """
    require_decoder(decoder)
    if "request" in settings:
        raise InputError(
            "A batch has a number for each row; leave request out, or give requests=[...], one per prompt."
        )
    asked = decoder.asked(max_new_tokens, settings)
    require_stateless(asked.processors, "the rows of a batch would share", "decode its prompts one by one")
    texts = prompt_list(prompts, decoder.target)
    numbers = _row_numbers(requests, len(texts))
    rows = [
        Row(index=index, text=text, sampler=decoder.sampler(text, asked, request=number))
        for index, (text, number) in enumerate(zip(texts, numbers, strict=True))
    ]
    with torch.inference_mode():
        batch = Batch.start(decoder, rows, asked.max_new_tokens)
        while batch.rows:
            batch.step()
    return [row.decoded() for row in rows]


def _row_numbers(requests: Sequence[int] | None, rows: int) -> list[int]:
    if requests is not None and not isinstance(requests, Sequence):
        raise InputError(f"requests is {requests!r}; give a list of numbers, one for each prompt.")
    given = range(rows) if requests is None else requests
    if not rows or len(given) != rows:
        raise InputError(f"There are {rows} prompts and {len(given)} requests; give at least 1, one for each.")
    return [request_number(f"requests[{index}]", number) for index, number in enumerate(given)]


@dataclass(slots=True, kw_only=True)
class Row:
    """One sequence of the batch.

    Attributes:
        index: of its prompt.
        text: prompt and answer so far, the root last.
        sampler: how its tokens are chosen and what ends it.
        fresh: `[count, hidden]`, states committed since the heads last drafted.
        context: what the heads keep of its committed text.
        accepted: drafted tokens of every step.
        prefill_ms, total_ms: until its first and its last token.
    """

    index: int
    text: list[int]
    sampler: Sampler
    fresh: Tensor | None = None
    context: DraftContext | None = None
    accepted: list[int] = field(default_factory=list)
    prefill_ms: float = 0.0
    total_ms: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether its answer has ended."""
        return self.sampler.is_over(self.text)

    def cut(self, start: int) -> None:
        """Drop what was emitted from `start` on beyond the token that ends the answer."""
        for end in range(start + 1, len(self.text)):
            if self.sampler.is_over(self.text[:end]):
                del self.text[end:]
                return

    def decoded(self) -> Decoded:
        """Its answer."""
        assert self.sampler.ending is not None
        return Decoded(
            tokens=tuple(self.text[self.sampler.ending.prompt_tokens :]),
            end=self.sampler.ending.reason(self.text) or "",
            accepted=tuple(self.accepted),
            prefill_ms=self.prefill_ms,
            decode_ms=self.total_ms - self.prefill_ms,
        )


@dataclass(slots=True, kw_only=True)
class Batch:
    """The rows still being written, and their shared cache in the same order."""

    target: Target
    heads: DraftHeads | None
    plan: TreePlan
    cache: RowCache
    rows: list[Row]
    clock: float

    @classmethod
    def start(cls, decoder: TreeDecoder, rows: Sequence[Row], max_new_tokens: int) -> Batch:
        """Prefill all prompts and choose every row's first token."""
        target, clock = decoder.target, time.perf_counter()
        limit = target.position_limit
        longest = max(len(row.text) for row in rows)
        capacity = longest + max_new_tokens if limit is None else min(longest + max_new_tokens, limit)
        batch = cls(
            target=target,
            heads=decoder.heads,
            plan=plan_tree(
                decoder.tree, capacity=capacity, window=target.window, dtype=target.dtype, device=target.device
            ),
            cache=RowCache(target, batch=len(rows), capacity=capacity + decoder.tree.verify_width),
            rows=list(rows),
            clock=clock,
        )
        hidden = target.hidden_states(batch._padded(longest), cache=batch.cache)
        batch.cache.commit([len(row.text) for row in rows])
        for row, states in zip(rows, hidden, strict=True):
            batch._begin(row, states[: len(row.text)], capacity)
        batch._drop_ended()
        return batch

    def step(self) -> None:
        """Draft, verify and commit one tree per row."""
        self.verify(self.draft())

    def verify(self, tokens: Int[Tensor, "batch width"]) -> None:
        """Run the target over every row's tree, keep what each accepts and drop the rows that end."""
        offsets = self.plan.offsets + self.cache.lengths[:, None]
        limit = self.target.position_limit
        # A node beyond the last position is never accepted, but its position must exist.
        positions = offsets if limit is None else offsets.clamp(max=limit - 1)
        hidden = self.target.hidden_states(
            tokens, cache=self.cache, position_ids=positions, attention_mask=self._mask()
        )
        scores = self.target.logits(hidden)
        paths = []
        for row, drafted, states, row_scores in zip(self.rows, tokens, hidden, scores, strict=True):
            before = len(row.text)
            slots, _ = accepted_path(row_scores, drafted, self.plan, row.sampler, row.text)
            row.cut(before)
            row.accepted.append(len(row.text) - before - 1)
            row.fresh = states[slots]
            paths.append(slots)
        self.cache.keep(paths)
        self._drop_ended()

    def _begin(self, row: Row, states: Float[Tensor, "prompt hidden"], capacity: int) -> None:
        if self.heads is not None and self.plan.tree.paths:
            row.context = self.heads.new_context(capacity + self.plan.tree.depth)
            if len(states) > 1:
                row.context.extend(states[None, :-1], self._tokens(row.text[1:]))
        row.fresh = states[-1:]
        row.text.append(row.sampler.next_token(self.target.logits(states[-1:])[0], row.text))
        row.prefill_ms = row.total_ms = self._elapsed_ms()

    def draft(self) -> Int[Tensor, "batch width"]:
        """Roots and drafted tokens of every row."""
        roots = torch.tensor([row.text[-1] for row in self.rows], device=self.target.device)
        if not self.plan.tree.paths:
            return roots[:, None]
        features = []
        for row in self.rows:
            assert row.context is not None and row.fresh is not None
            features.append(row.context.extend(row.fresh[None], self._tokens(row.text[-len(row.fresh) :])))
        assert self.heads is not None
        return torch.cat(
            [roots[:, None], self.heads.propose(torch.cat(features), roots, self.plan, self._noise())], dim=1
        )

    def _noise(self) -> Float[Tensor, "batch depth vocab"] | None:
        requests = torch.tensor([row.sampler.request for row in self.rows], device=self.target.device)
        depth, vocab = self.plan.tree.depth, self.target.vocab_size
        return candidate_noise(self.rows[0].sampler.rule, requests, self.cache.lengths, depth=depth, vocab=vocab)

    def _mask(self) -> Tensor | dict[str, Tensor]:
        lengths = self.cache.lengths
        windowed = self.plan.masks_at(lengths, windowed=True)
        if self.target.mixes_layer_types:
            return {"full_attention": self.plan.masks_at(lengths), "sliding_attention": windowed}
        return windowed

    def _tokens(self, tokens: list[int]) -> Int[Tensor, "1 count"]:
        return torch.tensor([tokens], device=self.target.device)

    def _padded(self, width: int) -> Int[Tensor, "batch width"]:
        ids = [[*row.text, *[0] * (width - len(row.text))] for row in self.rows]
        return torch.tensor(ids, device=self.target.device)

    def _drop_ended(self) -> None:
        going = [slot for slot, row in enumerate(self.rows) if not row.is_over]
        for row in self.rows:
            row.total_ms = self._elapsed_ms()
        if len(going) < len(self.rows):
            self.cache.keep_rows(going)
            self.rows = [self.rows[slot] for slot in going]

    def _elapsed_ms(self) -> float:
        return 1000 * (time.perf_counter() - self.clock)
