"""Numpy arrays as safetensors whose bytes depend on the content alone, and back, checked before they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from topo_search.errors import InputError
from topo_search.files.reading import require_file

Layout = Mapping[str, tuple[str, int]]  # tensor name -> safetensors' type name and number of dimensions


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


def read_tensors(
    path: Path, layout: Layout, *, kind: str, described: str, max_bytes: int
) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """The metadata and arrays of a file that holds exactly the tensors of `layout`.

    Args:
        path: the file.
        layout: what it must hold.
        kind: of file, for the message.
        described: the layout in words, for the message.
        max_bytes: size limit.

    Raises:
        InputError: the file is missing, too large, no safetensors, or holds other tensors.
    """
    require_file(path, max_bytes=max_bytes)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            _require_layout(path, slices, layout, kind, described)
            return metadata, {name: file.get_tensor(name) for name in layout}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is no readable safetensors file: {error}. Calibrate or copy it again.") from None


def _require_layout(path: Path, slices: dict[str, Any], layout: Layout, kind: str, described: str) -> None:
    found = {name: (part.get_dtype(), len(part.get_shape())) for name, part in slices.items()}
    if found != dict(layout):
        raise InputError(
            f"{path} is no topo-search {kind} file: it needs exactly the tensors {described}; found "
            f"{', '.join(sorted(found)) or 'none'} as {list(found.values())}."
        )
