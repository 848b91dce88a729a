"""What a measurement ran on, as tables record it."""

from __future__ import annotations

import platform
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


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
