"""What every artefact records of its making: versions, command, time."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

_RECORDED = ("topo-search", "torch", "transformers", "numpy", "safetensors")


def provenance() -> dict[str, Any]:
    """Versions, command line and creation time (UTC)."""
    return {"versions": versions(), "command": command(), "created": now()}


def versions() -> dict[str, str]:
    """Python and the installed versions of the packages that decide figures."""
    found = {"python": platform.python_version()}
    for name in _RECORDED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def command() -> str:
    """The command line as the user could repeat it."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def now() -> str:
    """The present time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
