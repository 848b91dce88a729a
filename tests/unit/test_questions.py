"""`benchmarks/questions.py`: every form can be filled, and none of its questions is a prompt that ships."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from topo_search.files.prompts import WORKLOADS, packaged_prompts

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from questions import questions

CONTENT = json.loads((Path(__file__).parents[2] / "benchmarks/questions.json").read_text(encoding="utf-8"))


def _questions(count: int, seed: int = 0) -> list[dict[str, str]]:
    return questions(CONTENT["forms"], CONTENT["slots"], count=count, seed=seed)


def test_every_workload_and_form_is_asked_in_turn() -> None:
    rows = _questions(400)
    assert [row["workload"] for row in rows[:8]] == [*WORKLOADS, *WORKLOADS]
    assert len({row["prompt"] for row in rows}) == 400
    assert not [row for row in rows if re.search(r"\{[a-z_]+\}|\d\.\.\d", row["prompt"])]
    assert _questions(400) == rows
    assert _questions(400, seed=1) != rows


def test_none_ships_as_a_prompt() -> None:
    """Heads must not learn from what trees are chosen or judged on."""
    prompts = packaged_prompts(workload=None, split="all")
    shipped = {turn["content"] for prompt in prompts for turn in prompt.messages or ()}
    assert len(shipped) > 200
    assert not shipped & {row["prompt"] for row in _questions(3200)}
    form = min(text for text in shipped if "{" not in text)
    with pytest.raises(SystemExit, match="makes only 0 distinct questions of 1"):
        questions({"chat": [form]}, {}, count=1, seed=0)


def test_too_many_are_refused() -> None:
    with pytest.raises(SystemExit, match="makes only 3 distinct questions of 9"):
        questions({"math": ["Add {n}."]}, {"n": ["1..3"]}, count=9, seed=0)
