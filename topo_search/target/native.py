"""A C++ source of this package as a loaded library: compiled once for a user, kept in their cache folder.

A library's name holds a hash of everything that it hangs on (the source, the compiler's command, the machine) and one
of the library itself, so that one cut short is noticed and compiled again. It is moved into place when it is whole, and
never loaded from a folder that another user can write to.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import platformdirs
import torch

from topo_search.errors import InputError

_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-Wno-psabi")
_CAPABILITY_FLAGS = {"AVX2": ("-mavx2", "-mfma"), "AVX512": ("-mavx2", "-mfma")}  # by torch's name; no other has any
_SHOWN_LINES = 3
_WAY_OUT = "use --mode eager or auto"


def require_compiler() -> list[str]:
    """The command of the C++ compiler: what `CXX` names, or `g++`.

    Raises:
        InputError: there is none.
    """
    named = os.environ.get("CXX", "").strip() or "g++"
    command = shlex.split(named)
    if sys.platform == "win32":
        raise InputError(f"Mode compiled needs Linux and its C++ compilers; {_WAY_OUT} on Windows.")
    if shutil.which(command[0]) is None:
        raise InputError(
            f"Mode compiled needs a C++ compiler, and there is no {command[0]} here; install one or name it in CXX, "
            f"or {_WAY_OUT}."
        )
    return command


def loaded_library(source: Path) -> ctypes.CDLL:
    """The compiled `source`, from the cache folder where it lies there.

    Raises:
        InputError: the compiler is missing or fails, or the cache folder cannot be trusted or written to.
    """
    command = [*require_compiler(), *_FLAGS, *_CAPABILITY_FLAGS.get(torch.backends.cpu.get_cpu_capability(), ())]
    parts = "\0".join([source.read_text(encoding="utf-8"), platform.machine(), *command])
    name = f"{source.stem}-{_digest(parts.encode())}"
    folder = _own_folder()
    for path in sorted(folder.glob(f"{name}-*.so")):
        found = _load(path)
        if found is not None:
            return found
        path.unlink(missing_ok=True)  # cut short or damaged
    path = _compiled(command, source, folder, name)
    found = _load(path)
    if found is None:
        raise InputError(f"{path} was just compiled and cannot be loaded; {_WAY_OUT}.")
    return found


def _own_folder() -> Path:
    """The folder for libraries: what lies there is run, so nobody else may be able to write to it."""
    folder = platformdirs.user_cache_path("topo-search") / "compiled"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise InputError(
            f"Mode compiled keeps a library in {folder}, which cannot be made ({error.strerror}); set XDG_CACHE_HOME "
            f"to a folder of yours, or {_WAY_OUT}."
        ) from None
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InputError(
            f"{folder} belongs to another user or can be written to by others, and mode compiled would run what lies "
            f"there. Remove it, or run `chmod go-w {folder}` if it is yours, or {_WAY_OUT}."
        )
    return folder


def _load(path: Path) -> ctypes.CDLL | None:
    """The library, if it is what its name says and can be loaded here."""
    try:
        return ctypes.CDLL(str(path)) if path.stem.endswith(f"-{_digest(path.read_bytes())}") else None
    except OSError:
        return None


def _compiled(command: list[str], source: Path, folder: Path, name: str) -> Path:
    """The new library, under a name that ends with its own digest: whole or absent, whoever else compiles meanwhile."""
    try:
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder) as scratch:
            made = Path(scratch) / "made.so"
            call = [*command, str(source), "-o", str(made)]
            done = subprocess.run(call, capture_output=True, text=True, errors="replace", check=False)
            if done.returncode != 0 or not made.is_file():
                said = [" ".join(line.split()) for line in (done.stderr or done.stdout).splitlines() if line.strip()]
                raise InputError(
                    f"{command[0]} cannot compile {source.name}: {'; '.join(said[:_SHOWN_LINES]) or 'no word why'}. "
                    f"Name another compiler in CXX, or {_WAY_OUT}."
                )
            return made.replace(folder / f"{name}-{_digest(made.read_bytes())}.so")
    except OSError as error:
        raise InputError(f"Cannot compile into {folder}: {error.strerror}; {_WAY_OUT}.") from None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
