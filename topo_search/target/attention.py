"""Masked attention that copies no prefix: grouped queries folded onto their key-value head.

Under a mask transformers' `sdpa` first repeats keys and values for every query head (`repeat_kv`): a copy of the whole
prefix in every layer of every step. Queries that share a key-value head can instead stand behind one another as rows
of one attention: only the small mask is repeated. Exact, since rows of an attention do not see each other.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "grouped"


def grouped_attention(
    module: nn.Module,
    query: Float[Tensor, "batch heads width head_dim"],
    key: Float[Tensor, "batch kv_heads seen head_dim"],
    value: Float[Tensor, "batch kv_heads seen head_dim"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface; without a mask, or with one per head, the same as `sdpa`.

    A mask that `folded_mask` made is used as it is.
    """
    batch, heads, width, _ = query.shape
    kv_heads = key.shape[1]
    shared_mask = attention_mask is not None and attention_mask.shape[1] == 1
    if heads == kv_heads or not shared_mask or rest.get("position_bias") is not None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **rest
        )
        return output
    assert attention_mask is not None
    groups = heads // kv_heads
    rows = query.reshape(batch, kv_heads, groups * width, query.shape[-1])
    mask = attention_mask if attention_mask.shape[2] == rows.shape[2] else folded_mask(attention_mask, groups)
    attended = functional.scaled_dot_product_attention(
        rows, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    return attended.reshape(batch, heads, width, value.shape[-1]).transpose(1, 2).contiguous(), None


def folded_mask(mask: Shaped[Tensor, "batch 1 width seen"], groups: int) -> Shaped[Tensor, "batch 1 rows seen"]:
    """The mask of `groups` queries that stand behind one another as rows of one attention; made once for all layers."""
    return mask if groups == 1 else mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)


def suited_attention(config: Any) -> str:
    """The backend that serves a model of this text configuration best under a tree mask."""
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "eager"  # the others refuse soft-capped scores
    heads, kv_heads = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    return GROUPED if kv_heads is not None and heads is not None and kv_heads < heads else "sdpa"


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)  # masks are made as for `sdpa`
