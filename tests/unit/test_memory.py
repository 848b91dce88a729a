"""Freed memory stays with the process, where the C library lets it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from topo_search import memory

# Faults while 6 blocks of 16 MiB are taken, written and freed, 50 times.
_COUNTED = """
import ctypes, resource, sys
from topo_search.memory import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    blocks = [libc.malloc(16 << 20) for _ in range(6)]
    for block in blocks:
        ctypes.memset(block, 1, 16 << 20)
    for block in blocks:
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(how: str) -> int:
    command = [sys.executable, "-c", _COUNTED, how]
    return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


@pytest.mark.skipif(not memory._is_glibc(), reason="only glibc has these settings")
def test_a_freed_block_is_not_faulted_in_again():
    faults = {how: _faults(how) for how in ("kept", "freed")}
    assert faults["kept"] < 3 * 6 * (16 << 20) // 4096  # their pages once or twice
    assert faults["freed"] > 5 * faults["kept"]


def test_other_c_libraries_are_left_alone(monkeypatch):
    for missing in (ValueError("unrecognized configuration name"), OSError(22, "invalid")):

        def refuse(name, error=missing):
            raise error

        monkeypatch.setattr(os, "confstr", refuse, raising=False)
        assert not memory.keep_freed_memory()
    monkeypatch.setattr(os, "confstr", lambda name: None, raising=False)
    assert not memory.keep_freed_memory()
