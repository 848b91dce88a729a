"""Medusa heads (arXiv 2401.10774, section 2.1): residual SiLU blocks on the last hidden state, then a projection.

Head k scores x_{t+1+k} from h_t. Blocks start at zero and the projection as a copy of the target's output layer, or
is that frozen layer itself, so an untrained head repeats the target's own next-token scores exactly. All heads read
one state: a list per depth, blind to the path.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from topo_search.decode.plan import TreePlan
from topo_search.identity import HeadsIdentity
from topo_search.ranking import top_tokens
from topo_search.target.adapter import Target


class MedusaBlocks(nn.Module):
    """The trained part: `[heads, layers]` residual blocks and, unless the projection is shared, one matrix a head."""

    def __init__(self, *, num_heads: int, num_layers: int, hidden: int, projection: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads, num_layers, hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(num_heads, num_layers, hidden))
        copies = None if projection is None else nn.Parameter(projection.repeat(num_heads, 1, 1))
        self.projection: Float[Tensor, "heads vocab hidden"] | None = copies

    @property
    def num_heads(self) -> int:
        """Draft heads, one per depth."""
        return self.weight.shape[0]

    @property
    def num_layers(self) -> int:
        """Residual blocks per head."""
        return self.weight.shape[1]

    def forward(self, states: Float[Tensor, "rows hidden"], heads: int) -> Float[Tensor, "heads rows hidden"]:
        """What the first `heads` heads hand to their projection."""
        features = states.expand(heads, *states.shape)
        for layer in range(self.num_layers):
            bias = self.bias[:heads, layer, None, :]
            features = features + functional.silu(
                torch.baddbmm(bias, features, self.weight[:heads, layer].transpose(1, 2))
            )
        return features


class MedusaHeads:
    """Medusa heads bound to their target; satisfies `DraftHeads`."""

    def __init__(self, blocks: MedusaBlocks, target: Target, identity: HeadsIdentity) -> None:
        self.blocks = blocks.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
        self.target = target
        self.identity = identity

    def scores(self, states: Float[Tensor, "rows hidden"], heads: int) -> Float[Tensor, "heads rows vocab"]:
        """Vocabulary scores of the first `heads` heads, in fp32 or better."""
        features = self.blocks(states, heads)
        if self.blocks.projection is None:
            return self.target.scores(features)
        scores = torch.bmm(features, self.blocks.projection[:heads].transpose(1, 2))
        scores = scores if scores.dtype == torch.float64 else scores.float()
        scores[..., self.target.known_ids :] = float("-inf")
        return scores

    def propose(self, state: Float[Tensor, " hidden"], root: Int[Tensor, ""], plan: TreePlan) -> Int[Tensor, " nodes"]:
        """See `DraftHeads`; the root is not read, Medusa's lists are blind to the path."""
        del root
        lists = top_tokens(self.scores(state[None], plan.tree.depth)[:, 0], plan.ranks)
        return lists[plan.depth_index, plan.rank_index]

    def path_scores(
        self, states: Float[Tensor, "rows hidden"], tokens: Int[Tensor, "rows depth"]
    ) -> Float[Tensor, "rows depth vocab"]:
        """See `DraftHeads`; the tokens are not read."""
        del tokens
        states = states.to(device=self.target.device, dtype=self.target.dtype)
        return self.scores(states, self.blocks.num_heads).transpose(0, 1)


def untrained_blocks(target: Target, *, num_heads: int, num_layers: int, share_projection: bool) -> MedusaBlocks:
    """Heads at their starting point: each repeats the target's next-token scores."""
    return MedusaBlocks(
        num_heads=num_heads,
        num_layers=num_layers,
        hidden=target.hidden_size,
        projection=None if share_projection else target.output_weight,
    )
