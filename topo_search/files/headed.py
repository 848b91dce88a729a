"""Safetensors files of ours: tensors, and one JSON document as an entry of the header.

The metadata holds `format`, `version`, and under the file's kind the JSON text of everything that is no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from topo_search.files.atomic import write_bytes
from topo_search.files.documents import Document, json_text, parse_json, require_format, schema_hint, validated
from topo_search.files.tensors import Layout, read_tensors, safetensors_bytes

MAX_BYTES = 2**30

D = TypeVar("D", bound=Document)


def write_headed(
    path: Path, kind: str, fields: Mapping[str, Any], schema: type[Document], arrays: Mapping[str, np.ndarray]
) -> None:
    """Write `fields` and `arrays` as a file of `kind`, atomically; equal input gives equal bytes.

    Raises:
        InputError: the file cannot be written, or the fields break the schema.
    """
    text = json_text(fields)
    validated(path, text, schema, hint=schema_hint(kind))
    metadata = {"format": f"topo-search/{kind}", "version": "1", kind: text}
    write_bytes(path, safetensors_bytes(arrays, metadata))


def read_headed(
    path: Path, kind: str, schema: type[D], layout: Layout, described: str
) -> tuple[D, dict[str, np.ndarray]]:
    """The document and the arrays of a file of `kind`; see `read_tensors` for the layout and its description.

    Raises:
        InputError: the file is missing, cut off, no safetensors, of another format or version, or breaks the schema.
    """
    metadata, arrays = read_tensors(path, layout, kind=kind, described=described, max_bytes=MAX_BYTES)
    version = metadata.get("version")
    require_format(path, {**metadata, "version": 1 if version == "1" else version}, kind)
    text = metadata.get(kind, "")
    parse_json(f"{path}: the header entry {kind}", text)
    return validated(path, text, schema, hint=schema_hint(kind)), arrays
