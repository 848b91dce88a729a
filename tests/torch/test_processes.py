"""Several processes train the heads that one process trains; started as users start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from folders import save_tiny_target
from process_training import FAMILIES, trained
from safetensors.torch import load_file

TESTS = Path(__file__).resolve().parent.parent
# `--cpu` would start one process: accelerate knows several on CPUs through MPI only. This starts two on any device.
LAUNCH = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
QUIET = ("--mixed_precision", "no", "--dynamo_backend", "no")


def run(words: Sequence[object], cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=110, check=False)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that two processes trained in."""
    folder = tmp_path_factory.mktemp("together")
    done = run([*LAUNCH, *QUIET, TESTS / "process_training.py", folder], folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_end_in_the_weights_of_one(family: str, together: Path, tmp_path: Path) -> None:
    """Nine texts in steps of four: equal shares, and a last step of one text, of which one process has none."""
    alone = trained(family, tmp_path / "alone.pt").state_dict()
    found = load_file(together / f"{family}.safetensors")
    assert alone.keys() == found.keys()
    for name, weight in alone.items():
        assert torch.allclose(weight, found[name], rtol=1e-3, atol=5e-5), name
    theirs, ours = (torch.load(path, weights_only=True) for path in (together / f"{family}.pt", tmp_path / "alone.pt"))
    assert theirs["settings"] == ours["settings"]  # what two processes began, one continues
    assert theirs["blocks"].keys() == ours["blocks"].keys()


def test_the_command_line_in_two_processes(tmp_path: Path) -> None:
    """Text and states are written by the first process alone, and so are checkpoint, heads and words."""
    save_tiny_target(tmp_path / "target")
    rows = [{"prompt": f"w{n} w{n + 1} w3"} for n in range(10)]
    (tmp_path / "mine.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    command = ["-m", "topo_search", "train", "hydra", "--out", "heads", "--target", "target", "--prompts", "mine.jsonl"]
    settings = ["--max-new-tokens", 12, "--num-heads", 2, "--epochs", 2, "--held-out", 0.4]
    done = run([*LAUNCH, *QUIET, *command, *settings], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Wrote heads.") == 1
    assert done.stderr.count("Head 1 on held-out text") == 1
    config = json.loads((tmp_path / "heads/config.json").read_text())
    assert config["kind"] == "hydra"
    assert len(list((tmp_path / "heads/work/text").glob("text-*.safetensors"))) == 1
    assert not (tmp_path / "heads/work/training.pt").exists()
