"""How long `topo-search optimize --budget 64`, the same with swaps, and `--help` take as whole processes.

The trace has 50,000 positions, or as few more as whole prompts allow: the demo's own, repeated under new prompt ids.
Medians over fresh processes:

    python benchmarks/optimize_time.py
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from topo_search.files.trace_file import read_trace, write_trace
from topo_search.provenance import provenance
from topo_search.resources import packaged
from topo_search.trace import RankTrace

POSITIONS, RUNS = 50_000, 7
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    demo = read_trace(packaged("calibration/demo/demo.trace.safetensors"))
    trace = of_length(repeated(demo, -(-POSITIONS // len(demo.ranks))), POSITIONS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "long.trace.safetensors"
        write_trace(path, trace)
        latency = packaged("calibration/demo/demo.latency.json")
        asked = ["optimize", "--budget", "64", "--trace", str(path), "--latency", str(latency)]
        figures = {
            "positions": len(trace.ranks),
            "optimize_s": timed(asked, folder),
            "optimize_swaps_s": timed([*asked, "--refine", "swaps", "--resamples", "2000"], folder),
            "help_s": timed(["--help"], folder),
            **provenance(),
        }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "optimize_time.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=2))


def repeated(trace: RankTrace, times: int) -> RankTrace:
    """The trace several times over, each time under new prompt ids."""
    prompts = [replace(prompt, id=f"{prompt.id}-{turn}") for turn in range(times) for prompt in trace.prompts]
    return replace(trace, prompts=tuple(prompts), ranks=np.concatenate([trace.ranks] * times))


def of_length(trace: RankTrace, positions: int) -> RankTrace:
    """The first prompts that have so many positions together."""
    enough = int(np.searchsorted(np.cumsum([max(prompt.rows, 0) for prompt in trace.prompts]), positions)) + 1
    return trace.of_prompts(np.arange(len(trace.prompts)) < enough)


def timed(arguments: list[str], folder: str) -> dict[str, float]:
    """Median and range over fresh processes, in seconds."""
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "topo_search", *arguments], check=True, capture_output=True, cwd=folder)
        seconds.append(time.perf_counter() - start)
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


if __name__ == "__main__":
    main()
