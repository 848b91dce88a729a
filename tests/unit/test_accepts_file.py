"""Accept-mask files: round trip, equal bytes, and headers and tensors that contradict each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from test_coverage import masks

from topo_search.accepts import AcceptTrace
from topo_search.errors import InputError
from topo_search.files.accepts_file import read_accepts, write_accepts
from topo_search.files.schema import schema


def small() -> AcceptTrace:
    return replace(masks({(0,), (0, 1)}, set(), {(1,)}), provenance={"command": "topo-search calibrate"})


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_accepts(tmp_path / "a.accepts.safetensors", small())
    return tmp_path / "a.accepts.safetensors"


def test_everything_written_is_read_back(written: Path) -> None:
    found, wanted = read_accepts(written), small()
    for name in ("prompts", "tree", "target", "heads", "rule", "max_new_tokens", "provenance"):
        assert getattr(found, name) == getattr(wanted, name)
    for name in ("accepted", "prompt_of_step", "remaining"):
        assert np.array_equal(getattr(found, name), getattr(wanted, name))
    write_accepts(written.with_name("again"), found)
    assert written.with_name("again").read_bytes() == written.read_bytes()


def test_the_header_names_the_rule_that_changes_the_text(written: Path) -> None:
    with safe_open(written, framework="numpy") as file:
        rule = json.loads(file.metadata()["accepts"])["rule"]
    assert rule["rule"] == "typical"
    assert (rule["epsilon"], rule["delta"], rule["bonus"]) == (0.09, 0.3, "sampled")


def test_the_schema_is_published() -> None:
    found = schema("accepts")
    assert found["$id"] == "urn:topo-search:schema:accepts:1"
    assert set(found["required"]) >= {"prompts", "nodes", "rule"}


def rewritten(path: Path, change_header: Any = None, **tensors: np.ndarray) -> None:
    with safe_open(path, framework="numpy") as file:
        header, metadata = json.loads(file.metadata()["accepts"]), file.metadata()
        arrays = {name: file.get_tensor(name) for name in file.keys()} | tensors  # noqa: SIM118
    if change_header:
        change_header(header)
    save_file(arrays, path, metadata | {"accepts": json.dumps(header)})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"accepted": np.full((3, 6), 2, np.uint8)}, "something else than 0 and 1"),
        ({"accepted": np.zeros((3, 6), np.int16)}, "exactly the tensors accepted"),
        ({"accepted": np.zeros((3, 5), np.uint8)}, "have shape"),
        ({"prompt": np.array([0, 1, 3], np.int32)}, "outside the 3 of the header"),
        ({"prompt": np.array([0, 1, -1], np.int32)}, "outside the 3 of the header"),
        ({"prompt": np.array([1, 0, 2], np.int32)}, "do not add up"),
        ({"remaining": np.array([3, 2, 2], np.int32)}, "do not add up"),
        ({"extra": np.zeros(1, np.int32)}, "exactly the tensors accepted"),
    ],
)
def test_tensors_that_contradict_the_header_are_refused(
    written: Path, tensors: dict[str, np.ndarray], message: str
) -> None:
    rewritten(written, **tensors)
    with pytest.raises(InputError, match=f"a.accepts.safetensors.*{message}"):
        read_accepts(written)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header["nodes"].reverse(), "canonical order"),
        (lambda header: header["nodes"].append([-1]), "greater than or equal to 0"),
        (lambda header: header["rule"].pop("epsilon"), "epsilon is None"),
        (lambda header: header["rule"].update(rule="greedy", temperature=0.0), "belong to typical acceptance"),
        (lambda header: header.update(more=1), "more"),
    ],
)
def test_headers_that_break_a_rule_are_refused(written: Path, change: Any, message: str) -> None:
    rewritten(written, change)
    with pytest.raises(InputError, match=f"a.accepts.safetensors.*{message}"):
        read_accepts(written)


def test_a_file_that_was_cut_off_is_refused(written: Path) -> None:
    written.write_bytes(written.read_bytes()[:-3])
    with pytest.raises(InputError, match="no readable safetensors file"):
        read_accepts(written)
