"""The one ranking of tokens, for calibration and decoder alike.

A token's rank is the number of larger scores plus the number of equal scores with a smaller id, on fp32 scores
(float64 stays float64). `torch.topk` leaves the order of ties open, which on bf16 changes even the set of tokens.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

_ID_BITS = 32
_BLOCKS = (256, 128, 64, 32)
_BLOCKWISE = 8192  # below this vocabulary `argmax` is as fast
_SPARE = 8  # candidates beyond the wanted ones that settle most ties without ranking the whole vocabulary


def top_tokens(scores: Float[Tensor, "*rows vocab"], count: int) -> Int[Tensor, "*rows count"]:
    """The `count` best token ids of each row, best first, ties by lower id.

    Scores of any floating type; float64 is compared as such, all others in fp32.
    """
    if scores.dtype != torch.float64:
        scores = scores.float()
    # Whether ties reach beyond the candidates must be read back, which on an accelerator would stall it.
    on_cpu = scores.device.type == "cpu"
    found = _among_candidates(scores, count) if on_cpu and count + _SPARE < scores.shape[-1] else None
    if found is not None:
        return found
    if scores.dtype == torch.float64:
        # A stable sort keeps lower ids first.
        return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]
    return _by_unique_keys(scores, count)


def best_token(scores: Float[Tensor, "*rows vocab"]) -> Int[Tensor, "*rows"]:
    """The token of rank 0 of each row: the target's greedy choice; one that is no number comes before all others.

    On a CPU `argmax` compares number by number; maxima of blocks are vectorised.
    """
    vocab = scores.shape[-1]
    block = next((size for size in _BLOCKS if vocab % size == 0), 0) if scores.device.type == "cpu" else 0
    if vocab < _BLOCKWISE or not block:
        return scores.argmax(dim=-1)  # documented to be the first of equal maxima
    blocks = scores.unflatten(-1, (-1, block))
    first = blocks.amax(dim=-1).argmax(dim=-1)
    inside = blocks.gather(-2, first[..., None, None].expand(*first.shape, 1, block))[..., 0, :].argmax(dim=-1)
    token: Tensor = first * block + inside
    return token


def _among_candidates(scores: Float[Tensor, "*rows vocab"], count: int) -> Int[Tensor, "*rows count"] | None:
    """Order the first few of `torch.topk`; None where a tie reaches past them, so that they may be the wrong set."""
    values, ids = torch.topk(scores, count + _SPARE, dim=-1)
    if bool((values[..., count - 1] == values[..., -1]).any()):
        return None
    ids, by_id = torch.sort(ids, dim=-1)
    by_score = torch.sort(values.gather(-1, by_id), dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, by_score)[..., :count]


def _by_unique_keys(scores: Float[Tensor, "*rows vocab"], count: int) -> Int[Tensor, "*rows count"]:
    """One unique integer per token: the order of fp32 scores in the high half, the complement of the id below."""
    bits = (scores + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(scores.shape[-1], device=scores.device)
    keys = (ordered << _ID_BITS) | ((1 << _ID_BITS) - 1 - ids)
    return torch.topk(keys, count, dim=-1, sorted=True).indices
