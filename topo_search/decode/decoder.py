"""`TreeDecoder`: load a target, heads and a tree, and decode text that equals plain decoding token for token.

Batch 1; greedy, or sampled with noise that belongs to the position, so that text depends on the seed and never on the
tree. Typical acceptance alone changes the text, and says so wherever it is named. Prefill emits the first token and is
not a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import torch

from topo_search.decode.arguments import Asked, asked_of, one_prompt, require_parts
from topo_search.decode.cache import SlotCache
from topo_search.decode.ending import Ending
from topo_search.decode.modes import new_step
from topo_search.decode.plan import plan_tree
from topo_search.decode.probe import probe
from topo_search.decode.sampling import Sampler
from topo_search.decode.step import DecodeState, TreeStep
from topo_search.decode.typical import Acceptable
from topo_search.errors import InputError
from topo_search.heads.base import DraftContext, DraftHeads
from topo_search.identity import RuleIdentity
from topo_search.stats import DecodeStats
from topo_search.target.adapter import Target
from topo_search.tree import Tree

DEFAULT_CAPACITY = 1024

Prompt = Sequence[int] | torch.Tensor


class DecodeSettings(TypedDict, total=False):
    """What an answer may be asked for with, besides its cap.

    Attributes:
        eos_token_ids: id or ids that end the answer; the target's own by default.
        rule: greedy, or what `identity.sampling_rule` gives; what `identity.typical_rule` gives changes the text.
        request: number of the sequence; sequences of one seed that should not share noise need different ones.
        stop_strings: text or texts that end the answer once it holds one of them.
        processors: logits processors, applied before the rule along the text alone; see `decode.processors`.
        observe: called with what every step of typical acceptance finds acceptable.
    """

    eos_token_ids: int | Sequence[int] | None
    rule: RuleIdentity
    request: int
    stop_strings: str | Sequence[str] | None
    processors: Sequence[Any] | None
    observe: Callable[[Acceptable], None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """One answer.

    Attributes:
        tokens: the answer, end-of-text included where it ended so.
        end: `eos`, `stop` for a stop string, `cap`, or `limit` where the target's positions ran out.
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
        InputError: an argument is not what it should be, or the tree is deeper than the heads, ranks more tokens than
            they score, or needs heads and has none.
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
        require_parts(target, heads, tree, capacity)
        require_depth(tree, heads)
        require_ranks(tree, heads)
        self._has_own_logits = probe(target) if run_probe else True
        self.target, self.heads, self.tree = target, heads, tree
        self._capacity = 0
        self._cache: SlotCache | None = None
        self._context: DraftContext | None = None
        self._steps: list[TreeStep] = []
        self._reserve(min(capacity, target.position_limit or capacity))

    def generate(self, prompt: Prompt, *, max_new_tokens: int, **settings: Unpack[DecodeSettings]) -> Decoded:
        """The whole answer to one prompt.

        Args:
            prompt: token ids of one prompt, as a sequence or a `[tokens]` or `[1, tokens]` tensor; neither empty nor
                longer than the target's positions.
            max_new_tokens: exact cap of the answer, at least 1.
            **settings: see `DecodeSettings`.

        Raises:
            InputError: the prompt is no list of token ids, empty, batched, too long, or has an unknown id; a setting is
                unknown, of a wrong type or out of range; a stop string or logits processor cannot be honoured.
            CheckError: the target's logits are not finite.
        """
        prompt = one_prompt(prompt, self.target)
        sampler = self.sampler(prompt, self.asked(max_new_tokens, settings))
        assert sampler.ending is not None
        tokens: list[int] = []
        accepted: list[int] = []
        clock = time.perf_counter()
        prefill_ms = 0.0
        for emitted in self._emit(prompt, sampler):
            if tokens:
                accepted.append(len(emitted) - 1)
            else:
                prefill_ms = 1000 * (time.perf_counter() - clock)
            tokens.extend(emitted)
        return Decoded(
            tokens=tuple(tokens),
            end=sampler.ending.reason([*prompt, *tokens]) or "",
            accepted=tuple(accepted),
            prefill_ms=prefill_ms,
            decode_ms=1000 * (time.perf_counter() - clock) - prefill_ms,
        )

    def stream(self, prompt: Prompt, *, max_new_tokens: int, **settings: Unpack[DecodeSettings]) -> Iterator[list[int]]:
        """Yield the tokens of the prefill (one), then those of every step; see `generate`."""
        ids = one_prompt(prompt, self.target)
        return self._emit(ids, self.sampler(ids, self.asked(max_new_tokens, settings)))

    def _emit(self, prompt: Sequence[int], sampler: Sampler) -> Iterator[list[int]]:
        assert sampler.ending is not None
        self._reserve(len(prompt) + self._room(prompt, sampler.ending.max_new_tokens))
        with torch.inference_mode():
            state = self._prefill(prompt, sampler)
        text, emitted = [*prompt], state.root.tolist()
        while True:
            kept, is_over = until_end(text, emitted, sampler)
            yield kept
            if is_over:
                return
            with torch.inference_mode():
                step = self._step_at(state.cache.length)
                step.draft(state)
                emitted = step.verify(state).tolist()

    def asked(self, max_new_tokens: int, settings: DecodeSettings) -> Asked:
        """What a call asks for, checked.

        Raises:
            InputError: see `generate`.
        """
        asked = asked_of(self.target, max_new_tokens, settings, DecodeSettings.__annotations__)
        needs_odds = asked.rule.samples or asked.rule.changes_text or asked.processors
        if needs_odds and not self._has_own_logits:
            raise InputError(
                f"{self.target.identity.name} changes its output layer's scores in a way that keeps their order only, "
                "so its draws cannot be reproduced; decode greedily and without logits processors."
            )
        return asked

    def sampler(self, prompt: Sequence[int], asked: Asked, *, request: int | None = None) -> Sampler:
        """How the tokens of one answer are chosen and what ends it; `request` takes the place of the one asked for."""
        return Sampler(
            rule=asked.rule,
            request=asked.request if request is None else request,
            processors=asked.processors,
            observe=asked.observe,
            ending=Ending(
                prompt_tokens=len(prompt),
                max_new_tokens=asked.max_new_tokens,
                position_limit=self.target.position_limit,
                eos_token_ids=asked.eos_token_ids,
                stops=asked.stops,
            ),
        )

    def buffers(self) -> list[torch.Tensor]:
        """Every buffer that lives across steps: cache, masks, indices and step inputs."""
        assert self._cache is not None
        found = [self._cache.storage, *(self._context.buffers() if self._context else ())]
        for step in self._steps:
            plan = step.plan
            optional = [] if plan.window_mask is None else [plan.window_mask]
            found += [step.input_ids, step.positions, plan.full_mask, plan.visible, plan.parents, *optional]
        return found

    def _prefill(self, prompt: Sequence[int], sampler: Sampler) -> DecodeState:
        assert self._cache is not None
        self._cache.clear()
        ids = torch.tensor([list(prompt)], device=self.target.device)
        hidden = self.target.hidden_states(ids, cache=self._cache)[0]
        self._cache.commit(len(prompt))
        if self._context is not None:
            self._context.rewind(0)
            if len(prompt) > 1:
                self._context.extend(hidden[None, :-1], ids[:, 1:])
        token = sampler.next_token(self.target.logits(hidden[-1]), prompt)
        root = torch.tensor([token], device=self.target.device)
        return DecodeState(
            root=root,
            fresh=hidden[-1:],
            following=root,
            cache=self._cache,
            context=self._context,
            sampler=sampler,
            text=[*prompt, token],
        )

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
        with torch.inference_mode():
            for step in self._steps:
                if step.plan.tree == self.tree:
                    step.prepare(self._cache)

    def _new_step(self, tree: Tree) -> TreeStep:
        plan = plan_tree(
            tree,
            capacity=self._capacity,
            window=self.target.window,
            dtype=self.target.dtype,
            device=self.target.device,
        )
        return new_step(self.target, self.heads, plan)

    def _step_at(self, length: int) -> TreeStep:
        limit = self.target.position_limit
        if limit is None:
            return self._steps[-1]
        return self._steps[max(0, min(self.tree.depth, limit - 1 - length))]

    def _room(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        """Answer tokens that both the cap and the target's positions allow."""
        limit = self.target.position_limit
        return max_new_tokens if limit is None else min(max_new_tokens, limit - len(prompt))


def require_decoder(decoder: object) -> None:
    """Refuse anything else in a decoder's place.

    Raises:
        InputError: says what makes one.
    """
    if not isinstance(decoder, TreeDecoder):
        raise InputError(f"decoder is a {type(decoder).__name__}; give a TreeDecoder(target, heads, tree).")


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


def until_end(text: list[int], emitted: Sequence[int], sampler: Sampler) -> tuple[list[int], bool]:
    """The step's tokens up to the first that ends the answer, appended to `text`, and whether one does."""
    for index, token in enumerate(emitted):
        text.append(token)
        if sampler.is_over(text):
            return list(emitted[: index + 1]), True
    return list(emitted), False
