"""Numpy arrays as safetensors whose bytes depend on the content alone."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
from safetensors.numpy import save


def safetensors_bytes(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file; equal input gives equal bytes.

    Args:
        arrays: by tensor name.
        metadata: string to string, stored in the header.
    """
    saved = save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, metadata=dict(metadata))
    end = 8 + int.from_bytes(saved[:8], "little")
    # safetensors orders metadata by a random hash seed, so equal files would differ in their SHA-256
    header = json.loads(saved[8:end]) | {"__metadata__": dict(sorted(metadata.items()))}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + saved[end:]
