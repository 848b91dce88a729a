"""Trace files: bytes, round trip, and tensors that contradict their header."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import repeatable, trace_of, traces
from hypothesis import given
from safetensors import safe_open
from safetensors.numpy import save_file

from topo_search.errors import InputError
from topo_search.files.headed import MAX_BYTES
from topo_search.files.trace_file import read_trace, write_trace
from topo_search.trace import RankTrace

GOLDEN = Path(__file__).parents[1] / "golden"


def small_trace() -> RankTrace:
    """Two answers of four and three tokens, and one of a single token, which has no row."""
    trace = trace_of([[0, 1], [2, 3], [1, 0]], [[0, 0], [3, 1]], [], resolved=3)
    return replace(trace, provenance={"command": "topo-search calibrate", "versions": {"numpy": "2"}})


def test_a_trace_file_has_exactly_these_bytes(tmp_path: Path) -> None:
    write_trace(tmp_path / "a.trace.safetensors", small_trace())
    assert (tmp_path / "a.trace.safetensors").read_bytes() == (GOLDEN / "small.trace.safetensors").read_bytes()


def test_equal_traces_have_equal_bytes_in_every_process(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from test_trace_file import small_trace; "
        "from topo_search.files.trace_file import write_trace; write_trace(Path(sys.argv[1]), small_trace())"
    )
    folders = [str(Path(__file__).parents[level]) for level in (0, 1, 2)]
    written = []
    for name in ("a", "b"):
        environment = {"PYTHONPATH": ":".join(folders), "PATH": ""}
        subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], env=environment, check=True)
        written.append((tmp_path / name).read_bytes())
    assert written[0] == written[1] == (GOLDEN / "small.trace.safetensors").read_bytes()


def test_the_tensors_are_as_published() -> None:
    with safe_open(GOLDEN / "small.trace.safetensors", framework="numpy") as file:
        assert file.get_tensor("ranks").tolist() == [[0, 1], [2, 3], [1, -1], [0, 0], [3, -1]]
        assert file.get_tensor("prompt").tolist() == [0, 0, 0, 1, 1]
        assert file.get_tensor("position").tolist() == [0, 1, 2, 0, 1]
        assert [file.get_tensor(name).dtype for name in ("ranks", "prompt", "position")] == ["i2", "i4", "i4"]
        assert file.metadata().keys() == {"format", "version", "trace"}


def test_everything_written_is_read_back() -> None:
    _assert_same(read_trace(GOLDEN / "small.trace.safetensors"), small_trace())


@repeatable
@given(traces())
def test_any_trace_survives_the_file(tmp_path_factory: pytest.TempPathFactory, trace: RankTrace) -> None:
    path = tmp_path_factory.mktemp("traces") / "any.trace.safetensors"
    write_trace(path, trace)
    _assert_same(read_trace(path), trace)


def test_ranks_that_no_int16_holds_are_not_written(tmp_path: Path) -> None:
    trace = small_trace()
    wide = replace(trace, resolved_ranks=40_000, ranks=np.where(trace.ranks == 3, 40_000, trace.ranks.astype(np.int64)))
    with pytest.raises(InputError, match="resolved_ranks"):
        write_trace(tmp_path / "a.trace.safetensors", wide)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -1])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.trace.safetensors"
    path.write_bytes((GOLDEN / "small.trace.safetensors").read_bytes()[:keep])
    with pytest.raises(InputError, match=r"cut\.trace\.safetensors is no readable safetensors file"):
        read_trace(path)


@pytest.mark.parametrize("content", [b"\xff" * 100, b"not a tensor in sight, just text", b"{}" * 50])
def test_garbage_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "garbage.trace.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"garbage\.trace\.safetensors is no readable safetensors file"):
        read_trace(path)


def test_a_path_that_leads_to_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "none", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="There is no file"):
            read_trace(path)
    with pytest.raises(InputError, match="not a regular file"):
        read_trace(tmp_path)


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(InputError, match=f"at most {MAX_BYTES}"):
        read_trace(tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("ranks", np.zeros((5, 2), np.int32)),
        ("ranks", np.zeros(5, np.int16)),
        ("prompt", np.zeros(5, np.int64)),
        ("position", np.zeros((5, 1), np.int32)),
        ("position", None),
        ("extra", np.zeros(5, np.int32)),
    ],
)
def test_other_tensors_are_refused(tmp_path: Path, name: str, array: np.ndarray | None) -> None:
    with pytest.raises(InputError, match="needs exactly the tensors ranks"):
        read_trace(_tampered(tmp_path, tensors={name: array}))


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("prompt", np.array([0, 0, 1, 1, 1], np.int32), "tensor prompt does not follow from its prompts"),
        ("prompt", np.array([0, 0, 0, 1], np.int32), "tensor prompt does not follow"),
        ("position", np.array([0, 1, 2, 3, 4], np.int32), "tensor position does not follow"),
        ("ranks", np.zeros((4, 2), np.int16), "its prompts have 5 rows"),
        ("ranks", np.array([[0, 1], [2, 4], [1, -1], [0, 0], [3, -1]], np.int16), "must lie in -1 .. 3"),
        ("ranks", np.array([[0, 1], [2, 3], [1, 0], [0, 0], [3, -1]], np.int16), "past each answer's end"),
        ("ranks", np.array([[0, 1], [-1, 3], [1, -1], [0, 0], [3, -1]], np.int16), "past each answer's end"),
    ],
)
def test_tensors_that_contradict_the_prompts_are_refused(
    tmp_path: Path, name: str, array: np.ndarray, message: str
) -> None:
    path = _tampered(tmp_path, tensors={name: array})
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path)) and message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "pt"}, "is no topo-search trace file: its \"format\" is 'pt'"),
        ({"version": "2"}, "has version '2'; this topo-search reads version 1"),
        ({"version": None}, "has version None"),
        ({"trace": None}, "is not valid JSON"),
        ({"trace": "{"}, "is not valid JSON"),
        ({"trace": '{"resolved_ranks": NaN}'}, "NaN is no JSON number"),
        ({"trace": "[]"}, "input should be an object"),
    ],
)
def test_another_header_is_refused(tmp_path: Path, change: dict[str, str | None], message: str) -> None:
    path = _tampered(tmp_path, header=change)
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path)) and message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resolved_ranks": 0}, "resolved_ranks"),
        ({"resolved_ranks": "3"}, "resolved_ranks"),
        ({"max_new_tokens": 3}, "Prompt p0 has an answer of 4 tokens, above the trace's cap of 3"),
        ({"heads": {"name": "h", "kind": "medusa", "fingerprint": "f", "num_heads": 1}}, "has 2 depths"),
        ({"heads": {"name": "h", "kind": "medusa", "fingerprint": "f"}}, "heads.num_heads is missing"),
        ({"colour": "red"}, "colour is no known key"),
    ],
)
def test_a_broken_rule_is_named_with_its_place(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_trace(_tampered(tmp_path, trace=change))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer_tokens": 0}, "prompts[0].answer_tokens"),
        ({"answer_tokens": 10**12}, "prompts[0].answer_tokens"),
        ({"answer_tokens": 5}, "its prompts have 6 rows"),
        ({"prompt_tokens": -1}, "prompts[0].prompt_tokens"),
        ({"end": "stop"}, "prompts[0].end"),
        ({"id": "p1"}, "holds a prompt id twice"),
    ],
)
def test_a_broken_prompt_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    prompts = _header()["prompts"]
    with pytest.raises(InputError) as caught:
        read_trace(_tampered(tmp_path, trace={"prompts": [prompts[0] | change, *prompts[1:]]}))
    assert message in str(caught.value)


def _assert_same(read: RankTrace, written: RankTrace) -> None:
    assert np.array_equal(read.ranks, written.ranks) and read.ranks.dtype == np.int16
    names = ("prompts", "resolved_ranks", "target", "heads", "rule", "max_new_tokens", "provenance")
    assert [getattr(read, name) for name in names] == [getattr(written, name) for name in names]


def _header() -> dict[str, Any]:
    with safe_open(GOLDEN / "small.trace.safetensors", framework="numpy") as file:
        found: dict[str, Any] = json.loads(file.metadata()["trace"])
    return found


def _tampered(
    folder: Path,
    *,
    tensors: dict[str, np.ndarray | None] | None = None,
    header: dict[str, str | None] | None = None,
    trace: dict[str, Any] | None = None,
) -> Path:
    with safe_open(GOLDEN / "small.trace.safetensors", framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in ("ranks", "prompt", "position")}
        metadata = file.metadata()
    changed = arrays | (tensors or {})
    entries = metadata | {"trace": json.dumps(_header() | (trace or {}))} | (header or {})
    path = folder / "tampered.trace.safetensors"
    save_file(
        {name: array for name, array in changed.items() if array is not None},
        path,
        metadata={name: text for name, text in entries.items() if text is not None},
    )
    return path
