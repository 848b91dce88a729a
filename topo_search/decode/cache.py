"""A preallocated key-value cache whose step writes a whole tree and keeps the accepted path in place.

Layout: one tensor `[layers, 2, batch, kv_heads, capacity, head_dim]`. The first `length` slots are committed text;
a forward pass writes its tokens behind them without moving anything; `keep` compacts the accepted ones. Growing,
cropping and copying caches, whose meaning differs between transformers' classes and versions, are never used.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _SlotLayer(CacheLayerMixin):
    """One layer's view of a `SlotCache`, in the form transformers' attention modules call."""

    is_sliding = False

    def __init__(self, owner: SlotCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Weak, since a cycle would keep gigabytes until the garbage collector looks.
        self._owner: SlotCache = weakref.proxy(owner)
        self.keys = owner.storage[index, 0]
        self.values = owner.storage[index, 1]
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the storage exists from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new tokens behind the committed ones and return views of all."""
        assert self.keys is not None and self.values is not None
        start, count = self._owner.length, key_states.shape[-2]
        self.keys.narrow(2, start, count).copy_(key_states)
        self.values.narrow(2, start, count).copy_(value_states)
        return self.keys.narrow(2, 0, start + count), self.values.narrow(2, 0, start + count)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask must cover."""
        return self._owner.length + int(query_length), 0

    def get_seq_length(self) -> int:
        """Committed tokens."""
        return self._owner.length

    def get_max_length(self) -> int:
        """Slots in all."""
        return self._owner.capacity

    get_max_cache_shape = get_max_length  # the name before transformers 5.20


class SlotCache(Cache):
    """The cache of one batch; `length` counts committed tokens, the same for every row (shorter rows are padded)."""

    def __init__(
        self,
        *,
        layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.storage = torch.zeros(layers, 2, batch, kv_heads, capacity, head_dim, dtype=dtype, device=device)
        self.length = 0
        self.capacity = capacity
        super().__init__(layers=[_SlotLayer(self, index) for index in range(layers)])

    def commit(self, count: int) -> None:
        """Keep the first `count` tokens written by the last forward pass: nothing moves."""
        self.length += count

    def keep(self, slots: Int[Tensor, " path"]) -> None:
        """Keep the written tokens at `slots` (ascending, relative to the committed length) and close their gaps."""
        count = slots.shape[0]
        target = self.storage[..., self.length : self.length + count, :]
        target.copy_(self.storage.index_select(4, slots + self.length))
        self.length += count

    def clear(self) -> None:
        """Forget the text; the storage stays."""
        self.length = 0

    def select_rows(self, rows: Int[Tensor, " rows"]) -> SlotCache:
        """A cache of the given batch rows only; used when other rows have ended."""
        layers, _, _, kv_heads, capacity, head_dim = self.storage.shape
        smaller = SlotCache(
            layers=layers,
            batch=rows.shape[0],
            kv_heads=kv_heads,
            head_dim=head_dim,
            capacity=capacity,
            dtype=self.storage.dtype,
            device=self.storage.device,
        )
        smaller.length = self.length
        smaller.storage[..., : self.length, :] = self.storage[..., : self.length, :].index_select(2, rows)
        return smaller
