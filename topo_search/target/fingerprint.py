"""A hash that tells one set of weights from another in milliseconds."""

import hashlib

import torch
from torch import nn

_SAMPLES_PER_TENSOR = 512


def weights_fingerprint(model: nn.Module) -> str:
    """SHA-256 over the name, shape and an even sample of every parameter, shortened to 16 hex digits.

    Samples are rounded to bf16 first, so that one checkpoint has one fingerprint in fp32 and bf16; precision is a
    field of its own in `TargetIdentity`. Any fine-tuning changes it.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().reshape(-1)
        if flat.numel():
            step = max(1, flat.numel() // _SAMPLES_PER_TENSOR)
            sample = flat[::step].to(torch.bfloat16).view(torch.int16).cpu()
            digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]
