"""Latency files: bytes, round trip, and rows that break a rule."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import HEADS, TARGET

from topo_search.cost import OUT_OF_MEMORY, WHATEVER_EXPANDED, LatencyTable, Timing
from topo_search.errors import InputError
from topo_search.files.latency_file import read_latency, write_latency
from topo_search.files.schema import schema

GOLDEN = Path(__file__).parents[1] / "golden"
FINE = Timing(median_ms=1.0, mean_ms=1.0, p10_ms=1.0, p90_ms=1.0, count=3)
OUT = Timing(median_ms=None, p10_ms=None, p90_ms=None, count=0, status=OUT_OF_MEMORY)


def small_table() -> LatencyTable:
    """Two widths, one of them too large for the device, and one draft depth; keys out of order."""
    return LatencyTable(
        verify={
            (1, 128, 64): OUT,
            (1, 128, 1): Timing(median_ms=10.5, mean_ms=10.75, p10_ms=10.0, p90_ms=12.0, count=20),
        },
        draft={(1, 1, WHATEVER_EXPANDED): Timing(median_ms=0.25, p10_ms=0.25, p90_ms=0.5, count=20)},
        target=TARGET,
        heads=HEADS,
        device={"name": "test", "threads": 2},
        mode="eager",
        attention="sdpa",
        provenance={"command": "topo-search measure", "versions": {"numpy": "2"}},
    )


def test_a_latency_file_has_exactly_these_bytes(tmp_path: Path) -> None:
    write_latency(tmp_path / "a.latency.json", small_table())
    assert (tmp_path / "a.latency.json").read_bytes() == (GOLDEN / "small.latency.json").read_bytes()


def test_everything_written_is_read_back() -> None:
    assert read_latency(GOLDEN / "small.latency.json") == small_table()


def test_a_time_that_the_reader_would_refuse_is_not_written(tmp_path: Path) -> None:
    bad = replace(small_table(), draft={(1, 1, 1): Timing(median_ms=0.0, p10_ms=0.0, p90_ms=0.0, count=1)})
    with pytest.raises(InputError, match=r"draft\[0\]\.median_ms: input should be greater than 0"):
        write_latency(tmp_path / "a.latency.json", bad)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"median_ms": -1.0}, "verify[0].median_ms: input should be greater than 0, found -1.0"),
        ({"median_ms": 0}, "verify[0].median_ms"),
        ({"median_ms": "10.5"}, "verify[0].median_ms"),
        ({"median_ms": None}, "verify[0]: a shape whose status is ok has median, p10 and p90"),
        ({"count": 0}, "verify[0]: a shape whose status is ok has median, p10 and p90 and a count"),
        ({"status": "out of memory"}, "verify[0]: a shape that ran out of memory has null times"),
        ({"status": "fast"}, "verify[0].status"),
        ({"p10_ms": 11.0}, "verify[0]: p10_ms, median_ms and p90_ms must not fall"),
        ({"p90_ms": 10.2}, "verify[0]: p10_ms, median_ms and p90_ms must not fall"),
        ({"verify_width": 0}, "verify[0].verify_width"),
        ({"verify_width": 64}, "verify lists batch, context_tokens, verify_width = (1, 128, 64) 2 times"),
        ({"batch": True}, "verify[0].batch"),
        ({"context_tokens": -1}, "verify[0].context_tokens"),
        ({"mean_ms": -1.0}, "verify[0].mean_ms"),
        ({"max_ms": 10.0}, "verify[0].max_ms is no known key"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = _tampered(tmp_path, lambda raw: raw | {"verify": [raw["verify"][0] | change, raw["verify"][1]]})
    with pytest.raises(InputError) as caught:
        read_latency(path)
    assert str(caught.value).startswith(str(path)) and message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 5}, "draft has depth 5, but the heads draft 4 tokens"),
        ({"depth": 0}, "draft[0].depth"),
        ({"expanded_nodes": 0}, "draft[0].expanded_nodes"),
    ],
)
def test_a_broken_draft_row_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = _tampered(tmp_path, lambda raw: raw | {"draft": [raw["draft"][0] | change]})
    with pytest.raises(InputError) as caught:
        read_latency(path)
    assert message in str(caught.value)


def test_draft_rows_are_by_expanded_nodes_or_are_not(tmp_path: Path) -> None:
    table = replace(small_table(), draft={(1, 1, 1): FINE, (1, 2, 1): FINE, (1, 2, 16): FINE})
    write_latency(tmp_path / "a.latency.json", table)
    assert read_latency(tmp_path / "a.latency.json") == table
    for draft, message in (
        ({(1, 1, 1): FINE, (1, 2, WHATEVER_EXPANDED): FINE}, "with and rows without expanded_nodes"),
        ({(1, 5, 1): FINE}, "depth 5, but the heads draft 4"),
    ):
        with pytest.raises(InputError, match=message):
            write_latency(tmp_path / "b.latency.json", replace(table, draft=draft))
    twice = _tampered(tmp_path, lambda raw: raw | {"draft": raw["draft"] * 2})
    with pytest.raises(InputError, match=r"draft lists batch, depth, expanded_nodes = \(1, 1, 0\) 2 times"):
        read_latency(twice)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "topo-search/tree"}, "is no topo-search latency file"),
        ({"version": 0}, "has version 0"),
        ({"verify": []}, "verify"),
        ({"mode": ""}, "mode"),
        ({"device": "gpu"}, "device"),
        ({"target": None}, "target"),
    ],
)
def test_a_broken_rule_is_named_with_its_place(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_latency(_tampered(tmp_path, lambda raw: raw | change))
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["target", "heads", "device", "mode", "attention", "verify", "draft", "provenance"])
def test_every_key_is_needed(tmp_path: Path, key: str) -> None:
    path = _tampered(tmp_path, lambda raw: {name: value for name, value in raw.items() if name != key})
    with pytest.raises(InputError, match=f"{key} is missing; topo-search schema latency prints the rules"):
        read_latency(path)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "1e999"])
def test_a_time_that_is_no_number_is_refused(tmp_path: Path, word: str) -> None:
    path = tmp_path / "a.latency.json"
    path.write_text((GOLDEN / "small.latency.json").read_text().replace("10.5", word))
    with pytest.raises(InputError, match=f"{word} is "):
        read_latency(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"There is no file .*none\.latency\.json"):
        read_latency(tmp_path / "none.latency.json")


def test_the_schema_lists_every_key() -> None:
    written = json.loads((GOLDEN / "small.latency.json").read_text())
    found = schema("latency")
    assert list(found["properties"]) == list(written)
    assert found["$defs"]["VerifyEntry"]["properties"].keys() == written["verify"][0].keys()
    assert found["$defs"]["DraftEntry"]["properties"].keys() == written["draft"][0].keys()


def _tampered(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    path = folder / "tampered.latency.json"
    path.write_text(json.dumps(change(json.loads((GOLDEN / "small.latency.json").read_text()))))
    return path
