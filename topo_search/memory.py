"""Memory that a process has freed stays with it, for the tensors of its next step.

glibc hands large blocks back to the system as soon as they are freed, and every page of the next one is then faulted in
and cleared anew. Answering a batch of prompts or training heads frees and takes some hundred megabytes a second: in a
virtual machine half of the processor's time went into that.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of malloc.h
_LARGEST_KEPT = 32 << 20  # glibc's own bound; what is larger is rare, and goes back
_GROWTH = 64 << 20


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, for good; false where the C library is not glibc.

    Its resident memory then stays at the highest use so far, save for blocks of more than 32 MiB.
    """
    if not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_MMAP_THRESHOLD, _LARGEST_KEPT), (_TRIM_THRESHOLD, (1 << 31) - 1), (_TOP_PAD, _GROWTH))
    answers = [mallopt(name, value) for name, value in settings]  # every one is made, whatever another answers
    return answers == [1, 1, 1]


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # no such function, no such name, no such value
        return False
