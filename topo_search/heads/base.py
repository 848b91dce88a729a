"""The protocol of draft heads: propose a tree's tokens, score along the true path, identify themselves.

Every list must be a function of the committed tokens, the root and the node's own path (path-local);
replay is exact for such heads only.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from topo_search.decode.plan import TreePlan
from topo_search.identity import HeadsIdentity


@runtime_checkable
class DraftHeads(Protocol):
    """What the rest of the package needs of draft heads, and no more."""

    @property
    def identity(self) -> HeadsIdentity:
        """Name, kind, fingerprint and number of heads."""
        ...

    def propose(self, state: Float[Tensor, " hidden"], root: Int[Tensor, ""], plan: TreePlan) -> Int[Tensor, " nodes"]:
        """Draft tokens of the plan's nodes, from the hidden state of the last committed token and the root."""
        ...

    def path_scores(
        self, states: Float[Tensor, "rows hidden"], tokens: Int[Tensor, "rows depth"]
    ) -> Float[Tensor, "rows depth vocab"]:
        """Vocabulary scores of every depth at every row, each under the true path, in fp32 or better.

        `tokens[row, k]` is the root for k = 0 and the true token of depth k after it. Both may lie on any device.
        """
        ...
