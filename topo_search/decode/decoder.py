"""`TreeDecoder`: load a target, heads and a tree, and decode text that equals plain decoding token for token.

Batch 1 and greedy acceptance. Prefill emits the first token and is not a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from topo_search.decode.cache import SlotCache
from topo_search.decode.plan import plan_tree
from topo_search.decode.probe import probe
from topo_search.decode.step import DecodeState, TreeStep
from topo_search.errors import InputError
from topo_search.heads.base import DraftContext, DraftHeads
from topo_search.stats import DecodeStats
from topo_search.target.adapter import Target
from topo_search.tree import Tree

DEFAULT_CAPACITY = 1024

Prompt = Sequence[int] | torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """One answer.

    Attributes:
        tokens: the answer, end-of-text included where it ended so.
        end: `eos`, `cap`, or `limit` where the target's positions ran out.
        accepted: accepted drafted tokens of every step, in order.
        prefill_ms: time until the first token.
        decode_ms: time of all steps after it.
    """

    tokens: tuple[int, ...]
    end: str
    accepted: tuple[int, ...]
    prefill_ms: float
    decode_ms: float

    @property
    def stats(self) -> DecodeStats:
        """Histogram of the accepted tokens."""
        return DecodeStats.of(self.accepted)


class TreeDecoder:
    """Decodes with one verification tree; the empty tree is plain decoding.

    Example:
        >>> decoder = TreeDecoder(target, heads, Tree.dense([3, 2, 2]))  # doctest: +SKIP
        >>> decoder.generate(prompt_ids, max_new_tokens=64).tokens  # doctest: +SKIP

    Raises:
        InputError: the tree is deeper than the heads, ranks more tokens than they score, or needs heads and has none.
        CheckError: the start-up probe failed.
    """

    def __init__(
        self,
        target: Target,
        heads: DraftHeads | None,
        tree: Tree,
        *,
        capacity: int = DEFAULT_CAPACITY,
        run_probe: bool = True,
    ) -> None:
        require_depth(tree, heads)
        require_ranks(tree, heads)
        if run_probe:
            probe(target)
        self.target, self.heads, self.tree = target, heads, tree
        self._capacity = 0
        self._cache: SlotCache | None = None
        self._context: DraftContext | None = None
        self._steps: list[TreeStep] = []
        self._reserve(min(capacity, target.position_limit or capacity))

    def generate(self, prompt: Prompt, *, max_new_tokens: int, eos_token_ids: Sequence[int] | None = None) -> Decoded:
        """The whole answer to one prompt.

        Args:
            prompt: token ids of one prompt, as a sequence or a `[tokens]` or `[1, tokens]` tensor; neither empty nor
                longer than the target's positions.
            max_new_tokens: exact cap of the answer, at least 1.
            eos_token_ids: ids that end the answer; the target's own by default.

        Raises:
            InputError: the prompt is empty, batched, too long, or has an unknown id; the cap is below 1.
        """
        tokens: list[int] = []
        accepted: list[int] = []
        clock = time.perf_counter()
        prefill_ms = 0.0
        for emitted in self.stream(prompt, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids):
            if tokens:
                accepted.append(len(emitted) - 1)
            else:
                prefill_ms = 1000 * (time.perf_counter() - clock)
            tokens.extend(emitted)
        return Decoded(
            tokens=tuple(tokens),
            end=self._end(tokens, max_new_tokens, eos_token_ids),
            accepted=tuple(accepted),
            prefill_ms=prefill_ms,
            decode_ms=1000 * (time.perf_counter() - clock) - prefill_ms,
        )

    def stream(
        self, prompt: Prompt, *, max_new_tokens: int, eos_token_ids: Sequence[int] | None = None
    ) -> Iterator[list[int]]:
        """Yield the tokens of the prefill (one), then those of every step; see `generate`."""
        prompt = single_prompt(prompt)
        cap = self._allowed_tokens(prompt, max_new_tokens)
        ends = frozenset(self.target.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self._reserve(len(prompt) + cap)
        with torch.inference_mode():
            state = self._prefill(prompt)
            emitted = state.root.tolist()
        yield emitted
        count = 1
        while count < cap and emitted[-1] not in ends:
            with torch.inference_mode():
                step = self._step_at(state.cache.length)
                step.draft(state)
                emitted = _until_end(step.verify(state).tolist(), cap - count, ends)
            yield emitted
            count += len(emitted)

    def buffers(self) -> list[torch.Tensor]:
        """Every buffer that lives across steps: cache, masks, indices and step inputs."""
        assert self._cache is not None
        found = [self._cache.storage, *(self._context.buffers() if self._context else ())]
        for step in self._steps:
            plan = step.plan
            optional = [] if plan.window_mask is None else [plan.window_mask]
            found += [step.input_ids, step.positions, plan.full_mask, plan.visible, plan.parents, *optional]
        return found

    def _prefill(self, prompt: Sequence[int]) -> DecodeState:
        assert self._cache is not None
        self._cache.clear()
        ids = torch.tensor([list(prompt)], device=self.target.device)
        hidden = self.target.hidden_states(ids, cache=self._cache)[0]
        self._cache.commit(len(prompt))
        if self._context is not None:
            self._context.rewind(0)
            if len(prompt) > 1:
                self._context.extend(hidden[None, :-1])
        root = self.target.choose(hidden[-1:])
        return DecodeState(root=root, fresh=hidden[-1:], cache=self._cache, context=self._context)

    def _reserve(self, tokens: int) -> None:
        """Cache and plans for answers that reach `tokens` tokens; kept while they suffice."""
        if tokens <= self._capacity:
            return
        self._capacity = tokens
        self._cache = self.target.new_cache(tokens + self.tree.verify_width)
        if self.heads is not None and self.tree.paths:
            self._context = self.heads.new_context(tokens + self.tree.depth)
        # One plan per depth, so that near the position limit the tree loses the nodes that have no position.
        depths = range(self.tree.depth + 1) if self.target.position_limit else [self.tree.depth]
        self._steps = [self._new_step(self.tree.pruned(depth)) for depth in depths]

    def _new_step(self, tree: Tree) -> TreeStep:
        plan = plan_tree(
            tree,
            capacity=self._capacity,
            window=self.target.window,
            dtype=self.target.dtype,
            device=self.target.device,
        )
        return TreeStep(self.target, self.heads, plan)

    def _step_at(self, length: int) -> TreeStep:
        limit = self.target.position_limit
        if limit is None:
            return self._steps[-1]
        return self._steps[max(0, min(self.tree.depth, limit - 1 - length))]

    def _allowed_tokens(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        _require_prompt(prompt, self.target)
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {max_new_tokens}; an answer has at least 1 token.")
        limit = self.target.position_limit
        return max_new_tokens if limit is None else min(max_new_tokens, limit - len(prompt))

    def _end(self, tokens: list[int], max_new_tokens: int, eos_token_ids: Sequence[int] | None) -> str:
        if tokens[-1] in (self.target.eos_token_ids if eos_token_ids is None else eos_token_ids):
            return "eos"
        return "cap" if len(tokens) == max_new_tokens else "limit"


def require_depth(tree: Tree, heads: DraftHeads | None) -> None:
    """Refuse a tree that the heads cannot draft, before any device work.

    Raises:
        InputError: names the first path that is too deep, and the way out.
    """
    available = 0 if heads is None else heads.identity.num_heads
    if tree.depth > available:
        path = next(path for path in tree.paths if len(path) > available)
        raise InputError(
            f"Tree path {list(path)} is {len(path)} deep, but there are {available} draft heads; "
            f"prune the tree to depth {available} (--prune-depth {available}) or load heads that draft deeper."
        )


def require_ranks(tree: Tree, heads: DraftHeads | None) -> None:
    """Refuse a tree whose ranks lie beyond the heads' shortlist.

    Raises:
        InputError: names the rank and the shortlist's size.
    """
    if heads is not None and heads.token_map is not None and tree.max_rank >= len(heads.token_map):
        raise InputError(
            f"The tree drafts rank {tree.max_rank}, but the heads rank a shortlist of {len(heads.token_map)} tokens; "
            "use a tree of smaller ranks, or heads with a longer shortlist."
        )


def single_prompt(input_ids: Prompt) -> Sequence[int]:
    """The token ids of one prompt, taken out of a `[1, tokens]` or `[tokens]` tensor where it is one.

    Raises:
        InputError: more than one prompt was passed; batches are not supported.
    """
    if not isinstance(input_ids, torch.Tensor):
        return input_ids
    if input_ids.ndim == 2 and input_ids.shape[0] == 1:
        input_ids = input_ids[0]
    if input_ids.ndim != 1:
        raise InputError(
            f"Tree decoding takes one prompt at a time (batch 1 only), not shape {tuple(input_ids.shape)}."
        )
    ids: list[int] = input_ids.tolist()
    return ids


def _require_prompt(prompt: Sequence[int], target: Target) -> None:
    if not len(prompt):
        raise InputError("The prompt has no token.")
    if any(isinstance(token, Sequence) for token in prompt):
        raise InputError("Tree decoding takes one prompt at a time (batch 1 only); call generate once per prompt.")
    limit = target.position_limit
    if limit is not None and len(prompt) >= limit:
        raise InputError(f"The prompt has {len(prompt)} tokens, but the target's context is {limit}; shorten it.")
    unknown = [token for token in prompt if not 0 <= token < target.known_ids]
    if unknown:
        raise InputError(
            f"The prompt has token id {unknown[0]}, outside the target's vocabulary of {target.known_ids}."
        )


def _until_end(emitted: list[int], room: int, ends: frozenset[int]) -> list[int]:
    """The step's tokens up to the cap and up to the first end-of-text among them."""
    emitted = emitted[:room]
    for index, token in enumerate(emitted):
        if token in ends:
            return emitted[: index + 1]
    return emitted
