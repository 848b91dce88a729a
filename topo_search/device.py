"""What a measurement ran on, as tables record it."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from topo_search.target.adapter import Target


def device_record(target: Target) -> dict[str, Any]:
    """Name, kind and threads of the device, and how the target's weights are held there."""
    kind = target.device.type
    return {
        "kind": kind,
        "name": _cpu_name() if kind == "cpu" else torch.cuda.get_device_name(target.device),
        "threads": torch.get_num_threads() if kind == "cpu" else None,
        "system": platform.platform(terse=True),
        "packed_weights": target.packed,
        "weights": target.note,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLoad:
    """What else a host did while something was timed.

    Attributes:
        load_before: processes that ran or waited in the minute before; null where the system does not say.
        other_cpu_share: share of all cores' time that other processes, or other guests of the same machine, took.
    """

    load_before: float | None
    other_cpu_share: float | None


@dataclass(frozen=True, slots=True)
class HostWatch:
    """Started before a measurement; tells afterwards whether it had the host for itself."""

    load_before: float | None
    _busy: float | None
    _own: float
    _clock: float

    @classmethod
    def start(cls) -> HostWatch:
        """From now on."""
        load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
        return cls(load, _busy_seconds(), time.process_time(), time.monotonic())

    def load(self) -> HostLoad:
        """Until now."""
        busy, elapsed = _busy_seconds(), time.monotonic() - self._clock
        share = None
        if busy is not None and self._busy is not None and elapsed > 0:
            others = busy - self._busy - (time.process_time() - self._own)
            share = round(max(others, 0.0) / (elapsed * (os.cpu_count() or 1)), 4)
        return HostLoad(load_before=self.load_before, other_cpu_share=share)


def _busy_seconds() -> float | None:
    """Time that all cores together spent at work since the start, stolen time included; Linux alone tells."""
    try:
        first = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()
        user, nice, system, _idle, _iowait, *rest = (int(ticks) for ticks in first[1:9])
    except (OSError, ValueError, IndexError):
        return None
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
