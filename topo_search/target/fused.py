"""Llama-like decoder layers with few, large operations: packed products, and little between them.

On a CPU what lies between a step's matrix products costs as much as half of them: transformers' layer runs about
seventy small operations. `FusedLayer` is the same arithmetic in about twenty. Queries, keys and values are one product,
and so are the two halves of the gated layer; residual sums ride on products. Rows of the query and key weights are
reordered so that the two numbers that a rotary angle turns lie side by side: one complex product turns all heads, and
attention, which sums over the same reordering of both, does not notice. Keys in a cache are in that order too, so a
cache belongs to the target that filled it.

`fused_states` runs a step through them without transformers' pass around the layers: the mask is repeated for queries
that share keys once per step, not once per layer. `target.compiled` runs the same layers in C++.

Inference in fp32 on a CPU only, like the packed weights it is made of; every other model keeps transformers' layers.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache

from topo_search.target.attention import GROUPED, folded_mask, grouped_attention
from topo_search.target.packing import PackedLinear, can_pack, is_packable

_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # whose layers compute what `FusedLayer` does, and no more
_TOLERANCE = 1e-4  # of a layer's output, relative to its largest number


class FusedLayer(nn.Module):
    """One decoder layer; stands where transformers' own stood. Releases nothing of the layer it was made from."""

    is_causal = True  # read by transformers' attention where there is no mask

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx, self.head_dim, self.scaling = attention.layer_idx, attention.head_dim, attention.scaling
        self.heads = attention.q_proj.out_features // self.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        self.num_key_value_groups = self.heads // self.kv_heads
        query, key = (_side_by_side(linear, self.head_dim) for linear in (attention.q_proj, attention.k_proj))
        self.qkv = PackedLinear(_stacked([query, key, attention.v_proj]))
        self.output = PackedLinear(attention.o_proj)
        self.gate_up = PackedLinear(_stacked([mlp.gate_proj, mlp.up_proj]))
        self.down = PackedLinear(mlp.down_proj)
        self.input_norm = FusedNorm(layer.input_layernorm)
        self.post_attention_norm = FusedNorm(layer.post_attention_layernorm)
        self.head_norms = None
        if hasattr(attention, "q_norm"):
            norms = (FusedNorm(norm, head_dim=self.head_dim) for norm in (attention.q_norm, attention.k_norm))
            self.head_norms = nn.ModuleList(norms)

    def forward(
        self,
        hidden_states: Float[Tensor, "batch width hidden"],
        attention_mask: Tensor | None = None,
        position_embeddings: Complex[Tensor, "rows width 1 half"] | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Float[Tensor, "batch width hidden"]:
        """As transformers calls a layer, with the angles of `FusedRotary`."""
        assert position_embeddings is not None
        batch, width, _hidden = hidden_states.shape
        rotated = self.heads + self.kv_heads
        projected = self.qkv(self.input_norm(hidden_states)).view(batch, width, -1, self.head_dim)
        turned, values = self.normed_heads(projected[:, :, :rotated]), projected[:, :, rotated:]
        torch.view_as_complex(turned.unflatten(-1, (-1, 2))).mul_(position_embeddings)
        kept = cache if cache is not None else past_key_values
        hidden_states = self.attend(turned, values, hidden_states, attention_mask, kept)
        gate, up = self.gate_up(self.post_attention_norm(hidden_states)).chunk(2, dim=-1)
        return self.down.plus(functional.silu(gate).mul_(up), hidden_states)

    __call__ = forward  # without torch's hooks

    def attend(
        self,
        turned: Float[Tensor, "batch width heads head_dim"],
        values: Float[Tensor, "batch width kv_heads head_dim"],
        residual: Float[Tensor, "batch width hidden"],
        mask: Tensor | None,
        cache: Any,
    ) -> Float[Tensor, "batch width hidden"]:
        """Write keys and values to the cache, if there is one, attend, project and add `residual`.

        `turned` holds the queries and behind them the keys, all turned by their angles.
        """
        queries, keys = turned[:, :, : self.heads].transpose(1, 2), turned[:, :, self.heads :].transpose(1, 2)
        values = values.transpose(1, 2)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        attended, _weights = grouped_attention(self, queries, keys, values, mask, scaling=self.scaling)
        return self.output.plus(attended.flatten(2), residual)

    def normed_heads(
        self, rotated: Float[Tensor, "batch width heads head_dim"]
    ) -> Float[Tensor, "batch width heads head_dim"]:
        """Queries and keys, each head with its norm where the model has one."""
        if self.head_norms is None:
            return rotated
        parts = (rotated[:, :, : self.heads], rotated[:, :, self.heads :])
        return torch.cat([norm(part) for norm, part in zip(self.head_norms, parts, strict=True)], dim=2)


class FusedNorm(nn.Module):
    """RMSNorm in five operations on the fewest numbers; over heads, with its weights in the order of their numbers."""

    def __init__(self, norm: Any, *, head_dim: int | None = None) -> None:
        super().__init__()
        weight = norm.weight.detach()
        self.weight = nn.Parameter(
            weight if head_dim is None else weight.view(2, -1).T.flatten().clone(), requires_grad=False
        )
        self.share, self.epsilon = 1.0 / weight.numel(), float(norm.variance_epsilon)
        eps = torch.tensor(norm.variance_epsilon, dtype=weight.dtype)
        self._operands = (self.weight, eps)  # a tuple is found at once, where torch looks parameters up by name

    def forward(self, inputs: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        """As the norm it was made from."""
        weight, eps = self._operands
        length = torch.linalg.vector_norm(inputs, dim=-1, keepdim=True)
        scale = torch.addcmul(eps, length, length, value=self.share).rsqrt_()
        return (inputs * scale).mul_(weight)

    __call__ = forward  # without torch's hooks


class FusedRotary(nn.Module):
    """The model's own rotary angles, as the complex numbers that `FusedLayer` multiplies by."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, inputs: Tensor, position_ids: Tensor) -> Complex[Tensor, "rows width 1 half"]:
        """Cosine and sine of every position."""
        cos, sin = self.rotary(inputs, position_ids=position_ids)
        half = cos.shape[-1] // 2
        return torch.complex(cos[..., :half], sin[..., :half])[..., None, :]


def has_fused_layers(body: Any) -> bool:
    """Whether the layers of a model's body are `FusedLayer`s."""
    return isinstance(getattr(body, "rotary_emb", None), FusedRotary)


def fused_states(
    body: Any,
    input_ids: Int[Tensor, "batch width"],
    *,
    position_ids: Int[Tensor, "rows width"],
    mask: Float[Tensor, "batch 1 width seen"],
    cache: Cache,
) -> Float[Tensor, "batch width hidden"]:
    """Final hidden states of a step's tokens, written behind the cache's committed ones, as the model's own pass."""
    hidden: Tensor = body.embed_tokens(input_ids)
    return through_layers(body, hidden, position_ids=position_ids, mask=mask, cache=cache)


def through_layers(
    body: Any,
    hidden: Float[Tensor, "batch width hidden"],
    *,
    position_ids: Int[Tensor, "rows width"],
    mask: Float[Tensor, "batch 1 width seen"],
    cache: Cache | None,
) -> Float[Tensor, "batch width hidden"]:
    """Final hidden states of given embeddings."""
    angles = body.rotary_emb(hidden, position_ids)
    repeated = folded_mask(mask, body.layers[0].num_key_value_groups)
    for layer in body.layers:
        hidden = layer(hidden, repeated, angles, cache)
    normed: Tensor = body.norm(hidden)
    return normed


def fuse_layers(model: Any) -> int:
    """Replace the decoder layers of a Llama-like fp32 model on a CPU; returns how many, zero for every other model."""
    weight = getattr(model.get_input_embeddings(), "weight", None)
    is_fp32 = weight is not None and weight.dtype == torch.float32 and weight.device.type == "cpu"
    return fuse_body(model.base_model) if is_fp32 else 0


def fuse_body(body: Any) -> int:
    """The same for a model without embeddings and output layer, such as the one layer of Hydra++ heads."""
    if not _can_fuse(body):
        return 0
    rotary = FusedRotary(body.rotary_emb)
    if not _agree(body.layers[0], FusedLayer(body.layers[0]), body.rotary_emb, rotary):
        return 0
    for index, layer in enumerate(body.layers):
        body.layers[index] = FusedLayer(layer)
    body.norm = FusedNorm(body.norm)
    body.rotary_emb = rotary
    return len(body.layers)


def _can_fuse(body: Any) -> bool:
    config = body.config
    if not (can_pack() and config.model_type in _MODEL_TYPES and config.hidden_act == "silu"):
        return False
    if config._attn_implementation not in (GROUPED, "sdpa"):
        return False
    linears = (linear for layer in body.layers for linear in _linears(layer))
    return all(type(linear) is nn.Linear and is_packable(linear.weight) for linear in linears)


def _linears(layer: Any) -> list[nn.Module]:
    """The seven matrices of a layer; adapters and quantised layers are of other types."""
    attention, mlp = layer.self_attn, layer.mlp
    attending = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*attending, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def _agree(layer: Any, fused: FusedLayer, rotary: nn.Module, fused_rotary: FusedRotary) -> bool:
    """Whether the fused layer computes what the layer does; another transformers version may mean something else."""
    hidden = layer.input_layernorm.weight.numel()
    inputs = torch.randn(1, 5, hidden, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(5)[None] + 3
    mask = torch.full((5, 5), torch.finfo(inputs.dtype).min).triu(1)[None, None]
    try:
        with torch.inference_mode():
            expected = layer(inputs, attention_mask=mask, position_embeddings=rotary(inputs, position_ids=positions))
            found = fused(inputs, attention_mask=mask, position_embeddings=fused_rotary(inputs, positions))
    except (RuntimeError, TypeError, AttributeError, ValueError):
        return False
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _stacked(linears: list[nn.Linear]) -> nn.Linear:
    """One layer whose output is theirs side by side."""
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    weights: list[Tensor] = [linear.weight for linear in linears]
    assert len(biases) in (0, len(linears))
    return _linear(torch.cat(weights), torch.cat(biases) if biases else None)


def _side_by_side(linear: nn.Linear, head_dim: int) -> nn.Linear:
    """The layer with the rows of every head reordered from (0, half), (1, half + 1), ... to neighbours."""
    order = torch.arange(linear.out_features).view(-1, 2, head_dim // 2).transpose(1, 2).flatten()
    return _linear(linear.weight[order], None if linear.bias is None else linear.bias[order])


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    linear.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
    return linear
