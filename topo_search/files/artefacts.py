"""Naming an artefact by content, and finding the newest one of a folder."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from topo_search.errors import InputError
from topo_search.files.reading import require_file

_MAX_BYTES = 2**33


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtefactRef:
    """A file that something was made from: its name, and the SHA-256 of its bytes in hexadecimal."""

    file: str
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def file_ref(path: Path) -> ArtefactRef:
    """Name a file by its content.

    Raises:
        InputError: the file is missing or cannot be read.
    """
    require_file(path, max_bytes=_MAX_BYTES)
    try:
        with path.open("rb") as file:
            return ArtefactRef(file=path.name, sha256=hashlib.file_digest(file, "sha256").hexdigest())
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror}.") from None


def newest(folder: Path, suffix: str) -> Path | None:
    """The file of the folder whose name ends in `suffix` that was modified last; of equals, the last by name."""
    if not folder.is_dir():
        return None
    found = [path for path in folder.iterdir() if path.name.endswith(suffix) and path.is_file()]
    return max(found, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)
