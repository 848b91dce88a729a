"""From a head's features to scores: the target's own output layer, a copy of it, or a shortlist of its rows.

On a small target the projection is most of what drafting costs, and most of a large vocabulary is never drafted.
A shortlist scores some tokens only; its columns are mapped to target ids before anything is compared.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from topo_search.ranking import top_tokens
from topo_search.target.adapter import Target
from topo_search.target.packing import PackedLinear, can_pack


class Projection:
    """Scores of every head's features, bound to a target.

    Args:
        target: whose output layer is used where there are no own matrices.
        weight: `[heads, columns, hidden]` own matrices, used in their own precision, or None for the target's.
        bias: `[heads, columns]`, or None.
        token_map: `[columns]` target ids, ascending, or None for the whole vocabulary.
    """

    def __init__(
        self,
        target: Target,
        *,
        weight: Float[Tensor, "heads columns hidden"] | None = None,
        bias: Float[Tensor, "heads columns"] | None = None,
        token_map: Int[Tensor, " columns"] | None = None,
    ) -> None:
        self.target = target
        self.weight = None if weight is None else weight.to(target.device)
        self.bias = None if bias is None else bias.to(target.device)
        self.token_map = None if token_map is None else token_map.to(target.device)
        self._shortlist = None
        if weight is None and self.token_map is not None:
            self._shortlist = _packed(target.output_weight[self.token_map].to(target.dtype))

    @property
    def columns(self) -> int:
        """Scored tokens that a head can draft."""
        return self.target.known_ids if self.token_map is None else self.token_map.shape[0]

    def scores(
        self, features: Float[Tensor, "heads rows hidden"], *, first_head: int = 0
    ) -> Float[Tensor, "heads rows columns"]:
        """Scores in fp32 or better; `features[i]` are those of head `first_head + i`, counted from 0."""
        if self.weight is not None:
            heads = slice(first_head, first_head + features.shape[0])
            scores = torch.bmm(features.to(self.weight.dtype), self.weight[heads].transpose(1, 2))
            if self.bias is not None:
                scores = scores + self.bias[heads, None, :]
        elif self._shortlist is not None:
            scores = self._shortlist(features.to(self.target.dtype))
        else:
            return self.target.scores(features.to(self.target.dtype))
        scores = scores if scores.dtype == torch.float64 else scores.float()
        if self.token_map is None:
            scores[..., self.target.known_ids :] = float("-inf")
        return scores

    def top(
        self,
        features: Float[Tensor, "heads rows hidden"],
        count: int,
        *,
        first_head: int = 0,
        noise: Float[Tensor, "heads rows vocab"] | None = None,
    ) -> Int[Tensor, "heads rows count"]:
        """Target ids of the best `count` tokens of each row, best first, ties by lower id.

        `noise` is added to the scores of the ids it is for.
        """
        scores = self.scores(features, first_head=first_head)
        if noise is not None:
            scores = with_noise(scores, noise, self.token_map)
        columns = top_tokens(scores, count)
        return columns if self.token_map is None else self.token_map[columns]


def with_noise(
    scores: Float[Tensor, "*rows columns"], noise: Float[Tensor, "*rows vocab"], token_map: Tensor | None
) -> Float[Tensor, "*rows columns"]:
    """Scores plus their tokens' noise, in float64 as the noise is: the order must not hang on rounding."""
    shared = noise[..., : scores.shape[-1]] if token_map is None else noise[..., token_map]
    return scores.double() + shared


def shortlist_of(counts: Int[Tensor, " vocab"], size: int) -> Int[Tensor, " columns"]:
    """The `size` most frequent ids, ascending; ties by lower id."""
    return torch.sort(torch.sort(counts, descending=True, stable=True).indices[:size]).values


def _packed(weight: Float[Tensor, "columns hidden"]) -> nn.Module:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return PackedLinear(linear) if on_cpu and can_pack() else linear
