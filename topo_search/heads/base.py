"""The protocol of draft heads: what calibration, measuring, search and the decoder need of them, and no more.

Every list must be a function of the committed tokens, the root and the node's own path (path-local); replay is exact
for such heads only, and calibration refuses others. A family is one file beside this one and one line in
`heads.families`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from topo_search.decode.plan import TreePlan
from topo_search.identity import HeadsIdentity


class DraftCost(StrEnum):
    """What drafting a tree costs besides its depth."""

    PER_STEP = "per step"
    """All depths in one call: the tree's shape below the root is free."""
    PER_DEPTH = "per depth"
    """One call per depth over that depth's expanded nodes."""


@runtime_checkable
class DraftContext(Protocol):
    """What heads keep of the committed text while decoding."""

    def extend(
        self, states: Float[Tensor, "batch count hidden"], following: Int[Tensor, "batch count"]
    ) -> Float[Tensor, "batch read"]:
        """Take in the states of newly committed tokens, in order, and return what the heads read at the last.

        `following` are the tokens that come after them, the root last.
        """
        ...

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` committed tokens."""
        ...

    def buffers(self) -> list[Tensor]:
        """What lives across steps."""
        ...


@runtime_checkable
class DraftHeads(Protocol):
    """Draft heads bound to their target."""

    @property
    def identity(self) -> HeadsIdentity:
        """Name, kind, fingerprint and number of heads."""
        ...

    @property
    def cost(self) -> DraftCost:
        """How drafting is paid for."""
        ...

    @property
    def path_local(self) -> bool:
        """Whether every list depends on committed tokens, root and path only."""
        ...

    @property
    def reads_prefix(self) -> bool:
        """Whether `features` needs every committed position, the prompt's first among them."""
        ...

    @property
    def token_map(self) -> Int[Tensor, " columns"] | None:
        """Target id of each score column, ascending, where heads draft from a shortlist; None: the id itself."""
        ...

    def features(
        self, states: Float[Tensor, "positions hidden"], following: Int[Tensor, " positions"]
    ) -> Float[Tensor, "positions read"]:
        """What the heads read at each of the given consecutive committed positions (from the first, if they must).

        `following` are the tokens that come after them; they may lie on any device.
        """
        ...

    def new_context(self, capacity: int, *, batch: int = 1) -> DraftContext:
        """What `features` is, step by step, for up to `capacity` committed tokens."""
        ...

    def propose(
        self,
        features: Float[Tensor, "batch read"],
        roots: Int[Tensor, " batch"],
        plan: TreePlan,
        noise: Float[Tensor, "batch depth vocab"] | None = None,
    ) -> Int[Tensor, "batch nodes"]:
        """Draft tokens of the plan's nodes, from what the heads read at the last committed token and the root.

        `noise` is added to the scores of each depth before they are ranked.
        """
        ...

    def path_scores(
        self, features: Float[Tensor, "rows read"], tokens: Int[Tensor, "rows depth"]
    ) -> Float[Tensor, "rows depth columns"]:
        """Scores of every depth at every row, each under the true path, in fp32 or better.

        `tokens[row, k]` is the root for k = 0 and the true token of depth k after it. Both may lie on any device.
        """
        ...


class LastState:
    """The context of heads that read the last committed token's hidden state and nothing else."""

    def extend(
        self, states: Float[Tensor, "batch count hidden"], following: Int[Tensor, "batch count"]
    ) -> Float[Tensor, "batch hidden"]:
        """See `DraftContext`."""
        del following
        return states[:, -1]

    def rewind(self, length: int) -> None:
        """Nothing is kept."""

    def buffers(self) -> list[Tensor]:
        """Nothing is kept."""
        return []


def ids_of(heads: DraftHeads, columns: Int[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
    """Target ids of score columns."""
    token_map = heads.token_map
    return columns if token_map is None else token_map[columns]


def column_of(heads: DraftHeads, token: int) -> int | None:
    """The score column of a target id, or None where the heads never draft it."""
    if heads.token_map is None:
        return token
    found = torch.nonzero(heads.token_map == token)
    return int(found[0, 0]) if len(found) else None
