"""`Target`: the few things the rest of the package asks of a decoder-only model.

Everything that differs between transformers versions (the name of the cache argument, the shape of masks for models
whose layers differ) is decided here, once.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache

from topo_search.decode.cache import SlotCache
from topo_search.errors import InputError
from topo_search.identity import TargetIdentity
from topo_search.ranking import best_token
from topo_search.target.fused import fused_states, has_fused_layers
from topo_search.target.quantization import dense

EAGER, GRAPH, COMPILED = "eager", "graph", "compiled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A loaded decoder-only model with what tree decoding needs to know of it.

    Attributes:
        model: the transformers model, in evaluation mode.
        tokenizer: its tokenizer, or None for models used without text.
        identity: name, weights' fingerprint and precision, as artefacts record them.
        eos_token_ids: every id that ends an answer.
        window: sliding-window length in tokens of the layers that have one, else None.
        mixes_layer_types: whether some layers have a window and others see everything; such models take one mask each.
        position_limit: positions the model was built for, or None when it states none.
        known_ids: ids below it exist in the tokenizer; ids above are padding of the vocabulary and never proposed.
        kv_shape: (layers, key-value heads, head dimension) of the cache.
        packed: whether linear weights were packed for oneDNN.
        note: what a reader of latencies must know of how the weights are held, or None.
        logit_scale: factor between the output layer and the model's own logits.
        logit_cap: soft cap behind it, or None.
        mode: execution mode of its decode steps, see `decode.modes`.
        is_fused: whether its layers are those of `target.fused`.
    """

    model: nn.Module
    tokenizer: Any
    identity: TargetIdentity
    eos_token_ids: tuple[int, ...]
    window: int | None
    mixes_layer_types: bool
    position_limit: int | None
    known_ids: int
    kv_shape: tuple[int, int, int]
    packed: bool = False
    note: str | None = None
    logit_scale: float = 1.0
    logit_cap: float | None = None
    mode: str = EAGER
    _cache_argument: str = field(init=False, default="")
    is_fused: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_cache_argument", cache_argument(self.body))
        object.__setattr__(self, "is_fused", has_fused_layers(self.body))

    @property
    def body(self) -> nn.Module:
        """The model without its output layer."""
        body: nn.Module = self.model.base_model  # type: ignore[assignment]
        return body

    @property
    def output_layer(self) -> nn.Module:
        """The projection from hidden states to the vocabulary."""
        layer: nn.Module = self.model.get_output_embeddings()  # type: ignore[operator]
        return layer

    @property
    def output_weight(self) -> Float[Tensor, "vocab hidden"]:
        """The projection's matrix, de-quantised where it is quantised.

        Raises:
            InputError: it is quantised in a way that only its layer can read.
        """
        weight: Tensor = self.output_layer.weight  # type: ignore[assignment]
        return dense(weight, self.identity.name)

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer, those that no tokenizer entry backs included."""
        return self._output_shape[0]

    @property
    def _output_shape(self) -> tuple[int, int]:
        layer: Any = self.output_layer
        if layer.weight.is_floating_point():
            vocab, hidden = layer.weight.shape
            return vocab, hidden
        return layer.out_features, layer.in_features  # quantised weights have the shape of their packing

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the model's activations."""
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    @property
    def attention(self) -> str:
        """The attention backend, as transformers names it."""
        name: str = self.model.config._attn_implementation  # type: ignore[union-attr,assignment]
        return name

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states that the output layer reads; OPT-350m's blocks are wider."""
        return self._output_shape[1]

    def new_cache(self, capacity: int, *, batch: int = 1) -> SlotCache:
        """A preallocated cache of `capacity` tokens per row."""
        layers, kv_heads, head_dim = self.kv_shape
        return SlotCache(
            layers=layers,
            batch=batch,
            kv_heads=kv_heads,
            head_dim=head_dim,
            capacity=capacity,
            dtype=self.dtype,
            device=self.device,
        )

    def hidden_states(
        self,
        input_ids: Int[Tensor, "batch width"],
        *,
        cache: Cache | None = None,
        position_ids: Int[Tensor, "batch width"] | None = None,
        attention_mask: Any = None,
    ) -> Float[Tensor, "batch width hidden"]:
        """Final hidden states of the given tokens; with a cache they are written behind its committed ones.

        `attention_mask` is None (the model's own causal mask), a 2-D padding mask, or a 4-D additive mask (a mapping
        of layer type to mask where layers differ).
        """
        is_4d = isinstance(attention_mask, Tensor) and attention_mask.ndim == 4
        if self.is_fused and cache is not None and position_ids is not None and is_4d:
            return fused_states(self.body, input_ids, position_ids=position_ids, mask=attention_mask, cache=cache)
        arguments: dict[str, Any] = {"input_ids": input_ids, "use_cache": cache is not None}
        if cache is not None:
            arguments[self._cache_argument] = cache
        if position_ids is not None:
            arguments["position_ids"] = position_ids
        if attention_mask is not None:
            arguments["attention_mask"] = attention_mask
        hidden: Tensor = self.body(**arguments).last_hidden_state
        return hidden

    def scores(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        """Output-layer scores, compared in fp32 or better; ids that no tokenizer entry backs score -infinity."""
        return self._comparable(self.output_layer(hidden))

    def logits(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        """The model's own logits: `scores`, scaled and soft-capped as it does, which keeps their order but not odds."""
        return self.logits_of(self.output_layer(hidden))

    def logits_of(self, logits: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
        """The same of the output layer's scores."""
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_cap is not None:
            logits = torch.tanh(logits / self.logit_cap) * self.logit_cap
        return self._comparable(logits)

    def _comparable(self, scores: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
        if scores.dtype not in (torch.float32, torch.float64):
            scores = scores.float()
        if self.known_ids < scores.shape[-1]:
            scores[..., self.known_ids :] = float("-inf")
        return scores

    def embed(self, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows embedding"]:
        """The target's own input embeddings: a look-up in its frozen table, scaled as it scales them."""
        embedded: Tensor = self.input_embeddings(ids)
        return embedded

    @property
    def input_embeddings(self) -> nn.Module:
        """The frozen table behind `embed`."""
        table: nn.Module = self.model.get_input_embeddings()  # type: ignore[operator]
        return table

    def choose(self, hidden: Float[Tensor, "*rows hidden"]) -> Int[Tensor, "*rows"]:
        """The greedy next token of each hidden state, ties by lower id."""
        return best_token(self.scores(hidden))

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's own template, ready for the assistant's turn.

        Raises:
            InputError: `messages` is no conversation, or there is no template.
        """
        _require_messages(messages)
        if not getattr(self.tokenizer, "chat_template", None):
            missing = "tokenizer" if self.tokenizer is None else "chat template"
            raise InputError(
                f"{self.identity.name} has no {missing}, so a conversation cannot be encoded. Load an instruct model, "
                "or one with load_target(..., tokenizer=...) that has a template, or decode token ids of raw text."
            )
        encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: list[int] = self.tokenizer(encoded, add_special_tokens=False).input_ids
        return ids


def _require_messages(messages: Any) -> None:
    example = '[{"role": "user", "content": "Hello"}]'
    if not isinstance(messages, list | tuple) or not messages:
        found = "empty" if isinstance(messages, list | tuple) else f"a {type(messages).__name__}"
        raise InputError(f"messages is {found}; a conversation is a list of messages such as {example}.")
    for index, message in enumerate(messages):
        missing = [key for key in ("role", "content") if not isinstance(message, dict) or key not in message]
        if missing:
            raise InputError(f"messages[{index}] has no {missing[0]}; a message has both, as in {example}.")


def cache_argument(body: nn.Module) -> str:
    """How this transformers version names the cache: `cache` since 5.2x, `past_key_values` before."""
    parameters = inspect.signature(body.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
