"""Medusa heads (arXiv 2401.10774, section 2.1): residual SiLU blocks on the last hidden state, then a projection.

Head k scores x_{t+1+k} from h_t. Blocks start at zero and the projection as a copy of the target's output layer, or
is that frozen layer itself, so an untrained head repeats the target's own next-token scores exactly. All heads read
one state: a list per depth, blind to the path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from topo_search.decode.plan import TreePlan
from topo_search.heads.base import DraftCost, LastState
from topo_search.heads.projection import Projection
from topo_search.identity import HeadsIdentity
from topo_search.target.adapter import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaShape:
    """What decides the tensors of Medusa's blocks: width of the states, draft heads, residual blocks per head."""

    hidden: int
    num_heads: int
    num_layers: int


class MedusaBlocks(nn.Module):
    """The trained part: `[heads, layers]` residual blocks and, unless the projection is shared, one matrix a head."""

    def __init__(self, *, num_heads: int, num_layers: int, hidden: int, projection: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads, num_layers, hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(num_heads, num_layers, hidden))
        copies = None if projection is None else nn.Parameter(projection.repeat(num_heads, 1, 1))
        self.projection: Float[Tensor, "heads vocab hidden"] | None = copies

    @property
    def shape(self) -> MedusaShape:
        """Their shape."""
        return MedusaShape(hidden=self.weight.shape[-1], num_heads=self.num_heads, num_layers=self.num_layers)

    @property
    def num_heads(self) -> int:
        """Draft heads, one per depth."""
        return self.weight.shape[0]

    @property
    def num_layers(self) -> int:
        """Residual blocks per head."""
        return self.weight.shape[1]

    @property
    def reads_prefix(self) -> bool:
        """Whether `read_prefix` mixes positions."""
        return False

    def read_prefix(
        self,
        states: Float[Tensor, "batch positions hidden"],
        following: Float[Tensor, "batch positions hidden"] | None = None,
        mask: Tensor | None = None,
    ) -> Float[Tensor, "batch positions hidden"]:
        """What the heads read at each position of whole texts: the states themselves."""
        del following, mask
        return states

    def true_path(
        self, features: Float[Tensor, "rows hidden"], path: Float[Tensor, "rows depth hidden"], heads: int
    ) -> Float[Tensor, "heads rows hidden"]:
        """What the first `heads` heads hand to their projection under the true path, which Medusa does not read."""
        del path
        return self.forward(features, heads)

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
    """Medusa heads bound to their target; satisfies `DraftHeads`.

    Args:
        blocks: the trained part, taken over: moved to the target's device and frozen.
        target: whose states they read.
        identity: who they are.
        token_map: `[columns]` target ids of a shortlist, ascending.
        dtype: precision of the heads, the target's own by default.
    """

    cost = DraftCost.PER_STEP
    path_local = True
    reads_prefix = False

    def __init__(
        self,
        blocks: MedusaBlocks,
        target: Target,
        identity: HeadsIdentity,
        *,
        token_map: Int[Tensor, " columns"] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.dtype = dtype or target.dtype
        self.blocks = blocks.to(device=target.device, dtype=self.dtype).eval().requires_grad_(False)
        self.projection = Projection(target, weight=blocks.projection, token_map=token_map)
        self.target = target
        self.identity = identity

    @property
    def token_map(self) -> Int[Tensor, " columns"] | None:
        """See `DraftHeads`."""
        return self.projection.token_map

    def features(
        self, states: Float[Tensor, "positions hidden"], following: Int[Tensor, " positions"]
    ) -> Float[Tensor, "positions hidden"]:
        """See `DraftHeads`: the states themselves."""
        del following
        return states

    def new_context(self, capacity: int, *, batch: int = 1) -> LastState:
        """See `DraftHeads`: Medusa keeps nothing."""
        del capacity, batch
        return LastState()

    def scores(self, features: Float[Tensor, "rows hidden"], heads: int) -> Float[Tensor, "heads rows columns"]:
        """Scores of the first `heads` heads, in fp32 or better."""
        return self.projection.scores(self._handed(features, heads))

    def propose(
        self,
        features: Float[Tensor, "batch hidden"],
        roots: Int[Tensor, " batch"],
        plan: TreePlan,
        noise: Float[Tensor, "batch depth vocab"] | None = None,
    ) -> Int[Tensor, "batch nodes"]:
        """See `DraftHeads`; the root is not read, Medusa's lists are blind to the path."""
        del roots
        by_head = None if noise is None else noise.transpose(0, 1)
        lists = self.projection.top(self._handed(features, plan.tree.depth), plan.ranks, noise=by_head)
        return lists[plan.depth_index, :, plan.rank_index].transpose(0, 1)

    def path_scores(
        self, features: Float[Tensor, "rows hidden"], tokens: Int[Tensor, "rows depth"]
    ) -> Float[Tensor, "rows depth columns"]:
        """See `DraftHeads`; the tokens are not read."""
        del tokens
        return self.scores(features, self.blocks.num_heads).transpose(0, 1)

    def _handed(self, features: Float[Tensor, "rows hidden"], heads: int) -> Float[Tensor, "heads rows hidden"]:
        handed: Tensor = self.blocks(features.to(device=self.target.device, dtype=self.dtype), heads)
        return handed


def untrained_blocks(target: Target, *, num_heads: int, num_layers: int, share_projection: bool) -> MedusaBlocks:
    """Heads at their starting point: each repeats the target's next-token scores."""
    return MedusaBlocks(
        num_heads=num_heads,
        num_layers=num_layers,
        hidden=target.hidden_size,
        projection=None if share_projection else target.output_weight,
    )
