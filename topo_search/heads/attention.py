"""One decoder layer, as transformers builds a Llama layer: the attention of Hydra++ heads.

Prefix attention runs it over the committed tokens' hidden states (Hydra, arXiv 2402.05109, section 4.3), fusion
attention over h_t and the candidates' embeddings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from topo_search.decode.cache import SlotCache
from topo_search.target.adapter import Target, cache_argument
from topo_search.target.fused import fuse_body, has_fused_layers, through_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What decides the layer beside its weights; as in the target's own layers unless told otherwise."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    norm_eps: float = 1e-6

    @classmethod
    def of(cls, target: Target) -> LayerShape:
        """The shape of the target's layers, as far as its configuration names it."""
        config = target.model.config.get_text_config()  # type: ignore[union-attr,operator]
        _, kv_heads, head_dim = target.kv_shape
        heads = int(getattr(config, "num_attention_heads", target.hidden_size // head_dim))
        rope = getattr(config, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") if isinstance(rope.get("rope_theta"), int | float) else None
        return cls(
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * target.hidden_size),
            rope_theta=float(theta or 10000.0),
            norm_eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        )


class DecoderLayer(nn.Module):
    """A causal layer with its final norm; starts as the identity up to that norm's gain."""

    def __init__(self, hidden: int, shape: LayerShape, *, gain: float = 1.0) -> None:
        super().__init__()
        self.shape = shape
        sizes = asdict(shape)
        rope = {"rope_type": "default", "rope_theta": sizes.pop("rope_theta")}
        sizes["rms_norm_eps"] = sizes.pop("norm_eps")
        sizes |= {"hidden_size": hidden, "num_hidden_layers": 1, "vocab_size": 1, "rope_parameters": rope}
        config = LlamaConfig(bos_token_id=None, eos_token_id=None, **sizes)
        config._attn_implementation = "sdpa"
        model = LlamaModel(config)
        model.embed_tokens = nn.Identity()  # type: ignore[assignment]  # it is only ever given embeddings
        layer: Any = model.layers[0]
        with torch.no_grad():
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            model.norm.weight.fill_(gain)
        self.model = model
        self._cache_argument = cache_argument(model)

    def forward(
        self,
        inputs: Float[Tensor, "batch positions hidden"],
        *,
        mask: Tensor | None = None,
        cache: SlotCache | None = None,
    ) -> Float[Tensor, "batch positions hidden"]:
        """Causal attention over `inputs`, with a cache behind its committed positions.

        `mask` is None (causal), a 2-D padding mask or a 4-D additive one.
        """
        if has_fused_layers(self.model):
            assert mask is None, "only training, which does not fuse, has masks of its own"
            return self._fused(inputs, cache)
        arguments: dict[str, Any] = {}
        if cache is not None:
            positions = torch.arange(cache.length, cache.length + inputs.shape[1], device=inputs.device)[None]
            arguments = {self._cache_argument: cache, "position_ids": positions}
        elif mask is None:
            # Left to itself transformers reads positions back, to look for several texts packed into one row.
            mask = _causal_mask(inputs, 0)
        output = self.model(inputs_embeds=inputs, attention_mask=mask, use_cache=cache is not None, **arguments)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def fuse(self) -> None:
        """From here on inference alone, in few operations, where this precision and device have them."""
        fuse_body(self.model)

    def _fused(
        self, inputs: Float[Tensor, "batch positions hidden"], cache: SlotCache | None
    ) -> Float[Tensor, "batch positions hidden"]:
        start = 0 if cache is None else cache.length
        positions = torch.arange(start, start + inputs.shape[1])[None]
        mask = _causal_mask(inputs, start)
        return through_layers(self.model, inputs, position_ids=positions, mask=mask, cache=cache)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # A cast to bf16 would round the rotary frequencies with the weights, and far positions would lose their angle.
        rotary: Any = self.model.rotary_emb.rotary if has_fused_layers(self.model) else self.model.rotary_emb
        exact = rotary.inv_freq
        applied = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        rotary.inv_freq = exact.to(rotary.inv_freq.device)
        return applied

    def new_cache(self, capacity: int, *, batch: int, dtype: torch.dtype, device: torch.device) -> SlotCache:
        """A cache for this one layer."""
        return SlotCache(
            layers=1,
            batch=batch,
            kv_heads=self.shape.num_key_value_heads,
            head_dim=self.shape.head_dim,
            capacity=capacity,
            dtype=dtype,
            device=device,
        )


def _causal_mask(inputs: Float[Tensor, "batch width hidden"], start: int) -> Float[Tensor, "batch 1 width seen"]:
    """What `inputs` behind `start` committed positions may see, as an additive mask."""
    batch, width, _ = inputs.shape
    return inputs.new_full((batch, 1, width, start + width), torch.finfo(inputs.dtype).min).triu(start + 1)


class PrefixContext:
    """Prefix attention, step by step: its cache holds every committed position.

    `inputs` makes what the layer reads from states and the tokens after them; `beside_state` hands the layer's output
    on behind the state, not in its place.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        inputs: Callable[[Tensor, Tensor], Tensor],
        capacity: int,
        *,
        beside_state: bool,
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._layer, self._inputs, self._beside_state = layer, inputs, beside_state
        self._cache = layer.new_cache(capacity, batch=batch, dtype=dtype, device=device)

    def extend(
        self, states: Float[Tensor, "batch count hidden"], following: Int[Tensor, "batch count"]
    ) -> Float[Tensor, "batch read"]:
        """See `DraftContext`."""
        output: Tensor = self._layer(self._inputs(states, following), cache=self._cache)
        self._cache.commit(states.shape[1])
        if not self._beside_state:
            return output[:, -1]
        return torch.cat([states[:, -1].to(output.dtype), output[:, -1]], dim=-1)

    def rewind(self, length: int) -> None:
        """See `DraftContext`."""
        self._cache.length = length

    def buffers(self) -> list[Tensor]:
        """See `DraftContext`."""
        return [self._cache.storage]
