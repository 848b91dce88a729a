"""Files that are either whole or absent: written beside their place, then moved there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from topo_search.errors import InputError


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` so that a reader or a crash never meets half a file; makes missing folders.

    Raises:
        InputError: the path lies below a file, or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except (NotADirectoryError, FileExistsError):
        raise InputError(
            f"Cannot write {path}: {path.parent} is a file or lies below one; give another path."
        ) from None
    except OSError as error:
        raise InputError(f"Cannot write {path}: {error.strerror}.") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        umask = os.umask(0)
        os.umask(umask)
        Path(scratch).chmod(0o666 & ~umask)
        Path(scratch).replace(path)
    except OSError as error:
        Path(scratch).unlink(missing_ok=True)
        raise InputError(f"Cannot write {path}: {error.strerror}.") from None


def write_text(path: Path, content: str) -> None:
    """`write_bytes` for UTF-8 text."""
    write_bytes(path, content.encode("utf-8"))
