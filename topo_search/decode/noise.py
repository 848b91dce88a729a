"""Gumbel noise that is a function of (seed, request, position, token id) and of nothing else.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) gives the same words on every
device, in any order and at any batch size: key = the seed's two words, counter = (id // 4, position, request's low and
high word), word id % 4. The words become Gumbel(0, 1) in float64: in fp32 one word in 2**25 would round to
infinite noise and emit an arbitrary token.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Four pseudo-random 32-bit words per counter.

    Args:
        counter: four int64 tensors of 32-bit words, of shapes that broadcast.
        key: two 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products of two words wrap, which leaves both halves right once the sign bits are masked off.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((second >> 32) & _WORD) ^ c1 ^ k0,
            second & _WORD,
            ((first >> 32) & _WORD) ^ c3 ^ k1,
            first & _WORD,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def gumbel_rows(
    seed: int, requests: Int[Tensor, " rows"], positions: Int[Tensor, " rows"], vocab: int
) -> Float[Tensor, "rows vocab"]:
    """Noise of ids 0 .. vocab - 1 at every row's place."""
    blocks = torch.arange((vocab + 3) // 4, device=positions.device)
    words = _words(seed, blocks[None, :], requests[:, None], positions[:, None])
    return _gumbel(torch.stack(words, dim=-1).flatten(1)[:, :vocab])


def gumbel_at(
    seed: int, requests: Int[Tensor, " ids"], positions: Int[Tensor, " ids"], ids: Int[Tensor, " ids"]
) -> Float[Tensor, " ids"]:
    """Noise of single ids, each at its own place: what `gumbel_rows` gives there."""
    words = torch.stack(_words(seed, ids // 4, requests, positions), dim=-1)
    return _gumbel(words.gather(-1, (ids % 4)[:, None])[:, 0])


def _words(seed: int, blocks: Tensor, requests: Tensor, positions: Tensor) -> Words:
    counter = (blocks, positions & _WORD, requests & _WORD, (requests >> 32) & _WORD)
    return philox(counter, (seed & _WORD, (seed >> 32) & _WORD))


def _gumbel(words: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
    uniform = (words.double() + 0.5) / 2**32
    return -torch.log(-torch.log(uniform))
