"""A short soak: the long one is `benchmarks/soak.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_soak() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_random_trees_prompts_caps_and_acceptance_patterns_change_no_text() -> None:
    """FIELD-CASES 1, 3, 4, 70: alone and in batches, greedy and sampled; every accepted length occurs, memory flat."""
    result = load_soak().soak(600, seed=1)
    assert result.failures == []
    assert set(result.accepted) == {0, 1, 2, 3, 4}


def test_a_soak_that_finds_something_says_so() -> None:
    soak = load_soak()
    clean = soak.SoakResult(live_bytes=[5, 5, 4])
    assert clean.failures == []
    found = soak.SoakResult(differences=["round 3: [1], not [2]"], live_bytes=[5, 5 + (2 << 20)])
    assert found.failures == ["round 3: [1], not [2]", "live tensors grew by 2097152 bytes"]
