"""One decode step: draft the tree's tokens, verify them in one target pass, keep the accepted path in place.

The step that is timed is the step that serves: `measure` calls the same two halves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from topo_search.decode.cache import SlotCache
from topo_search.decode.plan import TreePlan
from topo_search.heads.base import DraftContext, DraftHeads
from topo_search.target.adapter import Target


@dataclass(slots=True)
class DecodeState:
    """Where decoding stands: the committed text is in the cache, the root is chosen but not yet in it.

    Attributes:
        root: `[1]`, the token chosen last.
        fresh: `[count, hidden]`, states of the tokens committed since heads last drafted; the last one chose the root.
        cache: the committed text's keys and values.
        context: what the heads keep of the committed text before `fresh`, or None where no head drafts.
    """

    root: Int[Tensor, " one"]
    fresh: Float[Tensor, "count hidden"]
    cache: SlotCache
    context: DraftContext | None = None


class TreeStep:
    """The step of one tree. Its buffers are built once; a step allocates no mask, index or cache."""

    def __init__(self, target: Target, heads: DraftHeads | None, plan: TreePlan) -> None:
        self.target, self.heads, self.plan = target, heads, plan
        self.input_ids = torch.zeros(1, plan.verify_width, dtype=torch.long, device=target.device)
        self.positions = torch.zeros(1, plan.verify_width, dtype=torch.long, device=target.device)

    def draft(self, state: DecodeState) -> None:
        """Fill the step's input: the root and the drafted tokens. Plain decoding runs no head."""
        self.input_ids[0, :1] = state.root
        if self.plan.tree.paths:
            assert self.heads is not None and state.context is not None
            features = state.context.extend(state.fresh[None])
            self.input_ids[:, 1:] = self.heads.propose(features, state.root, self.plan)

    def verify(self, state: DecodeState) -> Int[Tensor, " emitted"]:
        """Run the target over the tree, keep the longest accepted path and move `state` behind it.

        Returns:
            The emitted tokens: the accepted drafted ones and the target's own choice after them.
        """
        hidden = self.tree_states(state.cache)
        choices = self.target.choose(hidden)
        slots = accepted_slots(self.input_ids[0], choices, self.plan)
        last = slots[-1]
        emitted = torch.cat([self.input_ids[0, slots[1:]], choices[last, None]])
        state.cache.keep(slots)
        state.root, state.fresh = choices[last, None], hidden[slots]
        return emitted

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
