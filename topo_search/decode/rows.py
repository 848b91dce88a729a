"""A key-value cache whose rows have committed lengths of their own, for sequences that are decoded together.

Layout as in `decode.cache`: `[layers, 2, batch, kv_heads, capacity, head_dim]`. Every row starts at slot 0; a forward
pass writes each row's tokens right behind that row's text. Rows that have ended are dropped: the rest moves up, in
place, and what follows costs nothing for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from topo_search.target.adapter import Target


class _RowLayer(CacheLayerMixin):
    """One layer's view of a `RowCache`, in the form transformers' attention modules call."""

    is_sliding = False

    def __init__(self, owner: RowCache, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner
        self._index = index
        self.keys = owner.storage[index, 0]
        self.values = owner.storage[index, 1]
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the storage exists from the start."""

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write each row's new tokens behind its own text and return views of all rows."""
        owner, width = self._owner, key_states.shape[-2]
        rows = torch.arange(key_states.shape[0], device=key_states.device)[:, None]
        slots = owner.lengths[:, None] + torch.arange(width, device=key_states.device)
        layer = owner.storage[self._index, :, : key_states.shape[0]]
        layer[0][rows, :, slots] = key_states.transpose(1, 2)
        layer[1][rows, :, slots] = value_states.transpose(1, 2)
        end = owner.longest + width
        return layer[0, :, :, :end], layer[1, :, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask must cover."""
        return self._owner.longest + int(query_length), 0

    def get_seq_length(self) -> int:
        """Committed tokens of the longest row."""
        return self._owner.longest

    def get_max_length(self) -> int:
        """Slots per row."""
        return int(self._owner.storage.shape[4])

    get_max_cache_shape = get_max_length  # the name before transformers 5.20


class RowCache(Cache):
    """The cache of a batch; `lengths` counts each row's committed tokens.

    Args:
        target: whose keys and values are kept.
        batch: rows at the start.
        capacity: slots per row.
    """

    def __init__(self, target: Target, *, batch: int, capacity: int) -> None:
        layers, kv_heads, head_dim = target.kv_shape
        shape = (layers, 2, batch, kv_heads, capacity, head_dim)
        self.storage = torch.zeros(shape, dtype=target.dtype, device=target.device)
        self.lengths = torch.zeros(batch, dtype=torch.long, device=target.device)
        self.longest = 0
        super().__init__(layers=[_RowLayer(self, index) for index in range(layers)])

    def commit(self, counts: Sequence[int]) -> None:
        """Keep the first `counts[row]` tokens that the last forward pass wrote in each row: nothing moves."""
        self._advance(counts)

    def keep(self, paths: Sequence[Tensor]) -> None:
        """Keep each row's written tokens at its slots (ascending, relative to its length) and close their gaps."""
        for row, slots in enumerate(paths):
            start = int(self.lengths[row])
            text = self.storage[:, :, row]
            text[:, :, :, start : start + len(slots)] = text.index_select(3, slots + start)
        self._advance([len(slots) for slots in paths])

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Forget all rows but these, which move up in their order."""
        kept = torch.tensor(list(rows), dtype=torch.long, device=self.storage.device)
        moved = self.storage[..., : self.longest, :].index_select(2, kept)
        self.storage[:, :, : len(rows), :, : self.longest] = moved
        self.lengths = self.lengths[kept]
        self._advance([0] * len(rows))

    def _advance(self, counts: Sequence[int]) -> None:
        self.lengths = self.lengths + torch.tensor(list(counts), dtype=torch.long, device=self.lengths.device)
        self.longest = int(self.lengths.max()) if len(self.lengths) else 0
