"""A hash that tells one set of weights from another in milliseconds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

_SAMPLES_PER_TENSOR = 512


def weights_fingerprint(model: nn.Module) -> str:
    """SHA-256 over the name, shape and an even sample of every parameter, shortened to 16 hex digits.

    Samples are rounded to bf16 first, so that one checkpoint has one fingerprint in fp32 and bf16; precision is a
    field of its own in `TargetIdentity`. Any fine-tuning changes it. Weights that are stored quantised are hashed as
    they are stored.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(_parts(model.state_dict()), key=lambda part: part[0]):
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().reshape(-1)
        if flat.numel():
            step = max(1, flat.numel() // _SAMPLES_PER_TENSOR)
            sample = flat[::step].to(torch.bfloat16 if flat.is_floating_point() else flat.dtype).cpu()
            digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors, and in the place of a wrapper around quantised numbers the tensors behind it."""
    for name, tensor in tensors.items():
        if hasattr(tensor, "__tensor_flatten__"):
            yield from _parts({f"{name}.{inner}": getattr(tensor, inner) for inner in tensor.__tensor_flatten__()[0]})
        else:
            yield name, tensor
