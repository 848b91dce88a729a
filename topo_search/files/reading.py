"""Bytes of untrusted files, within a size limit, and errors that name the file they come from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from topo_search.errors import InputError


def require_file(path: Path, *, max_bytes: int) -> None:
    """Refuse what is no regular file, or is larger than any honest one.

    Raises:
        InputError: no such file, a folder or device, not readable, or above `max_bytes`.
    """
    try:
        is_file, size_bytes = path.is_file(), path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"There is no file {path}; check the path.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"Cannot read {path}: {error}.") from None
    if not is_file:
        raise InputError(f"{path} is not a regular file; give the path of a file.")
    if size_bytes > max_bytes:
        raise InputError(f"{path} has {size_bytes} bytes; such a file has at most {max_bytes}. Is it the right file?")


def read_bytes(path: Path, *, max_bytes: int) -> bytes:
    """The file's content.

    Raises:
        InputError: see `require_file`.
    """
    require_file(path, max_bytes=max_bytes)
    try:
        with path.open("rb") as file:
            return file.read(max_bytes)
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror}.") from None


def read_text(path: Path, *, max_bytes: int) -> str:
    """The file's UTF-8 text; a byte order mark is dropped.

    Raises:
        InputError: see `require_file`; also when the bytes are not UTF-8.
    """
    try:
        return read_bytes(path, max_bytes=max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8.") from None


@contextmanager
def naming(where: object) -> Iterator[None]:
    """Put the file's name before the message of any input error raised inside."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"{where}: {error}") from None
