"""One decode step: draft the tree's tokens, verify them in one target pass, keep the accepted path in place.

The step that is timed is the step that serves: `measure` calls the same two halves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from topo_search.decode.cache import SlotCache
from topo_search.decode.plan import TreePlan
from topo_search.decode.sampling import Sampler, candidate_noise, require_finite
from topo_search.decode.typical import typical_path
from topo_search.heads.base import DraftContext, DraftHeads
from topo_search.ranking import best_token
from topo_search.target.adapter import Target


@dataclass(slots=True)
class DecodeState:
    """Where decoding stands: the committed text is in the cache, the root is chosen but not yet in it.

    Attributes:
        root: `[1]`, the token chosen last.
        fresh: `[count, hidden]`, states of the tokens committed since heads last drafted; the last one chose the root.
        following: `[count]`, the tokens after those, the root last.
        cache: the committed text's keys and values.
        context: what the heads keep of the committed text before `fresh`, or None where no head drafts.
        sampler: how this sequence's tokens are chosen.
        text: the whole sequence up to the root.
    """

    root: Int[Tensor, " one"]
    fresh: Float[Tensor, "count hidden"]
    following: Int[Tensor, " count"]
    cache: SlotCache
    context: DraftContext | None = None
    sampler: Sampler = field(default_factory=Sampler)
    text: list[int] = field(default_factory=list)


class TreeStep:
    """The step of one tree. Its buffers are built once; a step allocates no mask, index or cache."""

    def __init__(self, target: Target, heads: DraftHeads | None, plan: TreePlan) -> None:
        self.target, self.heads, self.plan = target, heads, plan
        self.input_ids = torch.zeros(1, plan.verify_width, dtype=torch.long, device=target.device)
        self.positions = torch.zeros(1, plan.verify_width, dtype=torch.long, device=target.device)

    def prepare(self, cache: SlotCache) -> None:
        """Get ready whatever a mode needs before an answer is written or a step timed; nothing here."""

    def draft(self, state: DecodeState) -> None:
        """Fill the step's input: the root and the drafted tokens. Plain decoding runs no head."""
        self.input_ids[0, :1] = state.root
        if self.plan.tree.paths:
            assert self.heads is not None and state.context is not None
            features = state.context.extend(state.fresh[None], state.following[None])
            self.input_ids[:, 1:] = self.heads.propose(features, state.root, self.plan, self._noise(state))

    def _noise(self, state: DecodeState) -> Float[Tensor, "1 depth vocab"] | None:
        device = self.input_ids.device
        request, root = (torch.tensor([n], device=device) for n in (state.sampler.request, state.cache.length))
        depth, vocab = self.plan.tree.depth, self.target.vocab_size
        return candidate_noise(state.sampler.rule, request, root, depth=depth, vocab=vocab)

    def verify(self, state: DecodeState) -> Int[Tensor, " emitted"]:
        """Run the target over the tree, keep the longest accepted path and move `state` behind it.

        Returns:
            The emitted tokens: the accepted drafted ones and the target's own choice after them.
        """
        hidden, scores = self.tree_scores(state.cache)
        slots, root = accepted_path(scores, self.input_ids[0], self.plan, state.sampler, state.text)
        emitted = torch.cat([self.input_ids[0, slots[1:]], root])
        state.cache.keep(slots)
        state.root, state.fresh, state.following = root, hidden[slots], emitted
        return emitted

    def tree_scores(self, cache: SlotCache) -> tuple[Float[Tensor, "width hidden"], Float[Tensor, "width vocab"]]:
        """Hidden states and logits of every slot of the filled-in tree."""
        hidden = self.tree_states(cache)
        return hidden, self.target.logits(hidden)

    def tree_states(self, cache: SlotCache) -> Float[Tensor, "width hidden"]:
        """Hidden states of every slot of the filled-in tree, written behind the committed text."""
        torch.add(self.plan.offsets, cache.length, out=self.positions)
        states = self.target.hidden_states(
            self.input_ids, cache=cache, position_ids=self.positions, attention_mask=self._mask(cache.length)
        )
        return states[0]

    def _mask(self, length: int) -> Tensor | dict[str, Tensor]:
        full, windowed = self.plan.mask_at(length), self.plan.mask_at(length, windowed=True)
        if self.target.mixes_layer_types:
            return {"full_attention": full, "sliding_attention": windowed}
        return windowed


def accepted_path(
    scores: Float[Tensor, "width vocab"],
    tokens: Int[Tensor, " width"],
    plan: TreePlan,
    sampler: Sampler,
    text: list[int],
) -> tuple[Int[Tensor, " path"], Int[Tensor, " one"]]:
    """Slots of the longest accepted path of one sequence, and the target's own token after it.

    `text` is the sequence up to the root; the emitted tokens are appended. Typical acceptance takes another path; see
    `decode.typical`.

    Raises:
        CheckError: the scores on the path are not finite.
    """
    if sampler.rule.changes_text:
        return typical_path(scores, tokens, plan, sampler, text)
    if sampler.needs_text:
        return _walk(scores, tokens, plan, sampler, text)
    choices = best_token(scores)
    slots = accepted_slots(tokens, choices, plan)
    chosen = choices[slots]
    positions = len(text) + torch.arange(len(slots), device=slots.device)
    require_finite(scores[slots].gather(1, chosen[:, None])[:, 0], positions)
    text += chosen.tolist()
    return slots, chosen[-1:]


def _walk(
    scores: Float[Tensor, "width vocab"],
    tokens: Int[Tensor, " width"],
    plan: TreePlan,
    sampler: Sampler,
    text: list[int],
) -> tuple[Int[Tensor, " path"], Int[Tensor, " one"]]:
    """The same, chosen node by node.

    Only nodes on the path are asked, each once and after the very text that plain decoding would have there: a step
    costs one draw per emitted token, and logits processors see the calls of plain decoding.
    """
    drafted, slots = tokens.tolist(), [0]
    while True:
        token = sampler.next_token(scores[slots[-1]], text)
        text.append(token)
        below = () if sampler.is_over(text) else plan.children[slots[-1]]
        child = next((child for child in below if drafted[child] == token), None)  # siblings carry distinct tokens
        if child is None:
            return torch.tensor(slots, device=tokens.device), torch.tensor([token], device=tokens.device)
        slots.append(child)


def accepted_slots(
    tokens: Int[Tensor, " width"], choices: Int[Tensor, " width"], plan: TreePlan
) -> Int[Tensor, " path"]:
    """Slots of the longest path whose every token the target chose after its parent, the root first.

    Siblings carry distinct tokens, so at most one child of a node matches and the accepted slots are one path, in
    ascending order. A path never accepts more than its own length: no padding is involved.
    """
    matches = torch.ones_like(tokens, dtype=torch.bool)
    matches[1:] = tokens[1:] == choices[plan.parents]
    return torch.nonzero((matches | ~plan.visible).all(dim=1))[:, 0]
