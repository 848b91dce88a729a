"""Tree files: what is written is read back, and nothing else is read."""

import json
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factories import HEADS, TARGET, repeatable, trees
from hypothesis import given

from topo_search.errors import InputError
from topo_search.files.artefacts import ArtefactRef, file_ref, newest
from topo_search.files.schema import schema
from topo_search.files.tree_file import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_NODES,
    MadeFrom,
    Predicted,
    TreeFile,
    read_tree,
    write_tree,
)
from topo_search.identity import GREEDY
from topo_search.tree import Tree

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parents[1] / "golden"


def guide() -> TreeFile:
    """A, B, A.1, A.2 and B.1, with everything that a file can say."""
    return TreeFile(
        tree=Tree.parse([[1], [0], [0, 0], [1, 0], [0, 1]]),
        name="guide",
        probabilities=(0.6, 0.25, 0.3, 0.1, 0.05),
        predicted=Predicted(
            tokens_per_step=2.25, tokens_per_step_all_positions=2.3, step_ms=12.5, tokens_per_s=180.0, speedup=1.8
        ),
        made_from=MadeFrom(
            target=TARGET,
            heads=HEADS,
            rule=GREEDY,
            trace=ArtefactRef(file="a.trace.safetensors", sha256="0" * 64),
            latency=ArtefactRef(file="a.latency.json", sha256="f" * 64),
            device="AMD EPYC",
            mode="eager",
            versions={"topo-search": "0.1.0"},
            command="topo-search optimize --budget 6",
            created="2026-11-29T12:00:00+00:00",
        ),
    )


def test_a_tree_file_has_exactly_these_bytes(tmp_path: Path) -> None:
    write_tree(tmp_path / "new" / "guide.tree.json", guide())
    assert (tmp_path / "new" / "guide.tree.json").read_bytes() == (GOLDEN / "guide.tree.json").read_bytes()


def test_everything_written_is_read_back() -> None:
    assert read_tree(GOLDEN / "guide.tree.json") == guide()
    assert read_tree(str(GOLDEN / "guide.tree.json")) == guide()


@repeatable
@given(trees(ranks=4, depth=4))
def test_any_tree_survives_the_file(tmp_path_factory: pytest.TempPathFactory, tree: Tree) -> None:
    path = tmp_path_factory.mktemp("trees") / "any.tree.json"
    write_tree(path, TreeFile(tree=tree, name="any"))
    assert read_tree(path) == TreeFile(tree=tree, name="any")


def test_nan_and_infinity_are_written_as_null(tmp_path: Path) -> None:
    predicted = Predicted(tokens_per_step=2.0, step_ms=math.nan, speedup=math.inf)
    write_tree(tmp_path / "a.tree.json", TreeFile(tree=Tree.chain(1), name="a", predicted=predicted))
    assert read_tree(tmp_path / "a.tree.json").predicted == Predicted(tokens_per_step=2.0)


def test_a_command_with_bytes_that_are_no_text_is_written(tmp_path: Path) -> None:
    made_from = MadeFrom(command="optimize caf\udce9", created="now")
    write_tree(tmp_path / "a.tree.json", TreeFile(tree=Tree.chain(1), name="a", made_from=made_from))
    read = read_tree(tmp_path / "a.tree.json").made_from
    assert read is not None and read.command == "optimize caf?"


def test_a_figure_that_the_reader_would_refuse_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"predicted\.step_ms"):
        write_tree(tmp_path / "a.tree.json", TreeFile(tree=Tree.chain(1), name="a", predicted=Predicted(step_ms=-1.0)))
    assert not list(tmp_path.iterdir())


def test_the_largest_tree_allowed_is_written_and_read(tmp_path: Path) -> None:
    paths = [(rank,) * depth for rank in range(MAX_NODES // MAX_DEPTH) for depth in range(1, MAX_DEPTH + 1)]
    largest = TreeFile(tree=Tree(tuple(paths)), name="largest", probabilities=(0.1,) * MAX_NODES)
    write_tree(tmp_path / "a.tree.json", largest)
    assert read_tree(tmp_path / "a.tree.json") == largest


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([[0], [0], [0, 0]], "entry 1 repeats [0], already entry 0"),
        ([[0], [-1]], "entry 1 is [-1]: rank -1 is negative"),
        ([[0], []], "entry 1 is empty"),
        ([[0], [0.0]], "entry 1 is [0.0]: rank 0.0 is not an integer"),
        ([[0], [True]], "rank True is not an integer"),
        ([[0], "0"], "entry 1 is '0'"),
        ([[0], 3], "entry 1 is 3"),
        ([[0], None], "entry 1 is None"),
        ([[0], [[0]]], "rank [0] is not an integer"),
        ([[0, 0, 0]], "prefix [0, 0] is missing"),
        ([[0], [1, 0]], "entry 1 is [1, 0], but its prefix [1] is missing"),
        ([[0], [0, 0], [1]], "entry 2 is [1], after [0, 0]; sort"),
        ([[1], [0]], "entry 1 is [0], after [1]; sort"),
        ("[[0]]", "A tree is a list of rank paths"),
        ({"0": 1}, "A tree is a list of rank paths"),
        (None, "A tree is a list of rank paths"),
        ([[rank] for rank in range(MAX_NODES + 1)], f"lists {MAX_NODES + 1} nodes; at most {MAX_NODES}"),
        ([[0] * depth for depth in range(1, MAX_DEPTH + 2)], f"entry {MAX_DEPTH} is {MAX_DEPTH + 1} ranks deep"),
        ([[10**30]], "as its largest rank; at most 32767"),
    ],
)
def test_bad_nodes_are_refused_with_file_and_entry(tmp_path: Path, nodes: Any, message: str) -> None:
    path = _tampered(tmp_path, lambda raw: raw | {"nodes": nodes, "mask": {"ancestors": _mask_of(nodes)}})
    with pytest.raises(InputError) as caught:
        read_tree(path)
    assert str(caught.value).startswith(str(path)) and message in str(caught.value)


def test_an_empty_tree_is_plain_decoding(tmp_path: Path) -> None:
    write_tree(tmp_path / "a.tree.json", TreeFile(tree=Tree(()), name="plain", probabilities=()))
    assert read_tree(tmp_path / "a.tree.json").tree.verify_width == 1


@pytest.mark.parametrize(
    ("row", "value", "message"),
    [
        (0, [], "Row 0 of the mask is [], but the root sees exactly [0]"),
        (3, [0, 3], "Row 3 of the mask is [0, 3], but [0, 0] sees exactly [0, 1, 3]"),
        (3, [0, 1, 2, 3], "[0, 0] sees exactly"),
        (4, [0, 2, 4], "[0, 1] sees exactly [0, 1, 4]"),
        (5, [5, 2, 0], "[1, 0] sees exactly [0, 2, 5]"),
    ],
)
def test_a_tampered_mask_is_refused(tmp_path: Path, row: int, value: list[int], message: str) -> None:
    def tamper(raw: dict[str, Any]) -> dict[str, Any]:
        raw["mask"]["ancestors"][row] = value
        return raw

    with pytest.raises(InputError) as caught:
        read_tree(_tampered(tmp_path, tamper))
    assert message in str(caught.value)


def test_a_mask_with_a_row_too_few_is_refused(tmp_path: Path) -> None:
    path = _tampered(tmp_path, lambda raw: raw | {"mask": {"ancestors": raw["mask"]["ancestors"][:-1]}})
    with pytest.raises(InputError, match="The mask has 5 rows; 5 nodes and the root"):
        read_tree(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "topo-search/latency"}, "is no topo-search tree file: its \"format\" is 'topo-search/latency'"),
        ({"format": None}, 'its "format" is None'),
        ({"version": 2}, "has version 2; this topo-search reads version 1"),
        ({"version": "1"}, "has version '1'"),
        ({"version": True}, "has version True"),
        ({"name": ""}, "A tree's name is 1 to 200 printable"),
        ({"name": "a\nb"}, "printable characters, not 'a\\nb'"),
        ({"name": 3}, "name: input should be a valid string, found 3"),
        ({"colour": "red"}, "colour is no known key"),
        ({"mask": {"ancestors": [["0"]]}}, "mask.ancestors[0][0]"),
        ({"probabilities": [0.5]}, "has 5 nodes, but 1 probabilities"),
        ({"probabilities": [0.6, 0.25, 0.7, 0.1, 0.05]}, "Node [0, 0] has probability 0.7"),
        ({"probabilities": [0.6, 0.25, 0.3, 0.1, 1.05]}, "probabilities[4]"),
        ({"probabilities": [0.6, 0.25, 0.3, 0.1, "0"]}, "probabilities[4]"),
        ({"probabilities": [0.6, 0.25, 0.3, 0.1, -0.1]}, "probabilities[4]"),
        ({"predicted": {"step_ms": 0}}, "predicted.step_ms"),
        ({"predicted": {"step_s": 1}}, "predicted.step_s is no known key"),
        ({"made_from": {"created": "now"}}, "made_from.command is missing"),
        (
            {"made_from": {"command": "", "created": "", "trace": {"file": "a", "sha256": "0"}}},
            "made_from.trace.sha256",
        ),
    ],
)
def test_a_broken_rule_is_named_with_its_place(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = _tampered(tmp_path, lambda raw: raw | change)
    with pytest.raises(InputError) as caught:
        read_tree(path)
    assert str(caught.value).startswith(str(path)) and message in str(caught.value)


@pytest.mark.parametrize("key", ["name", "nodes", "mask"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    path = _tampered(tmp_path, lambda raw: {name: value for name, value in raw.items() if name != key})
    with pytest.raises(InputError, match=f"{key} is missing; topo-search schema tree prints the rules"):
        read_tree(path)


def test_a_tree_deeper_than_its_heads_is_refused() -> None:
    made_from = MadeFrom(heads=HEADS, command="", created="")
    with pytest.raises(
        InputError, match=r"Node \[0, 0, 0, 0, 0\] is 5 deep, but heads toy heads draft 4 tokens; prune"
    ):
        TreeFile(tree=Tree.chain(5), name="deep", made_from=made_from)


def test_a_probability_that_is_no_number_is_refused() -> None:
    with pytest.raises(InputError, match="probability nan"):
        TreeFile(tree=Tree.chain(1), name="a", probabilities=(math.nan,))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b'{"format": "topo-search/tree", "version"', "is not valid JSON"),
        (b"\xff\xfe[]", "is not UTF-8"),
        (b"[]", 'its "format" is None'),
        (b'{"format": NaN}', "NaN is no JSON number"),
        (b'{"format": -Infinity}', "-Infinity is no JSON number"),
        (b'{"format": 1e999}', "1e999 is too large a number"),
        (b'{"version": 1, "version": 2}', "key 'version' occurs twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 10_000, "is not valid JSON"),
    ],
)
def test_what_is_no_honest_json_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.tree.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_tree(path)
    assert str(caught.value).startswith(str(path)) and message in str(caught.value)


def test_nan_anywhere_in_a_tree_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tree.json"
    path.write_text((GOLDEN / "guide.tree.json").read_text().replace("12.5", "NaN"))
    with pytest.raises(InputError, match="NaN is no JSON number; write null"):
        read_tree(path)


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "a.tree.json"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(InputError, match=f"has {MAX_BYTES + 1} bytes; such a file has at most {MAX_BYTES}"):
        read_tree(path)


def test_a_path_that_leads_to_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "none.tree.json", tmp_path / "file" / "a.tree.json", tmp_path / "a\0b"):
        with pytest.raises(InputError, match=r"There is no file|Cannot read"):
            read_tree(path)
    with pytest.raises(InputError, match="is not a regular file"):
        read_tree(tmp_path)


def test_writing_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="Cannot write"):
        write_tree(tmp_path / "file" / "a.tree.json", guide())


@pytest.mark.parametrize("path", sorted((ROOT / "trees" / "reference").glob("*.tree.json")), ids=lambda path: path.name)
def test_every_shipped_tree_is_valid(path: Path) -> None:
    assert read_tree(path).name == path.name.removesuffix(".tree.json")


def test_the_reference_trees_are_those_that_the_script_writes(tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "benchmarks" / "reference_trees.py"))["main"](tmp_path)
    shipped = ROOT / "trees" / "reference"
    assert [path.name for path in sorted(shipped.iterdir())] == [path.name for path in sorted(tmp_path.iterdir())]
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (shipped / path.name).read_bytes()


def test_the_medusa_reference_tree_has_the_published_shape() -> None:
    tree = read_tree(ROOT / "trees" / "reference" / "medusa-63.tree.json").tree
    assert [sum(len(path) == depth for path in tree.paths) for depth in (1, 2, 3, 4)] == [10, 28, 23, 2]
    assert len(tree.leaves) == 42 and (0, 0, 0, 1) in tree.slots and (2, 0, 0) in tree.slots


@pytest.mark.parametrize("name", ["tree", "trace", "latency"])
def test_the_published_schemas_name_their_format(name: str) -> None:
    found = schema(name)
    assert found["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert found["$id"] == f"urn:topo-search:schema:{name}:1" and found["title"] == f"topo-search/{name}, version 1"
    assert found["additionalProperties"] is False
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_the_tree_schema_states_the_limits_and_every_key() -> None:
    found = schema("tree")
    assert list(found["properties"]) == list(json.loads((GOLDEN / "guide.tree.json").read_text()))
    assert found["required"] == ["format", "version", "name", "nodes", "mask"]
    assert found["properties"]["nodes"]["maxItems"] == MAX_NODES
    assert found["properties"]["nodes"]["items"]["maxItems"] == MAX_DEPTH


def test_an_unknown_schema_is_refused_with_the_choices() -> None:
    with pytest.raises(InputError, match="no schema 'trees'; choose one of tree, trace, latency"):
        schema("trees")


def test_a_file_is_named_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_ref(tmp_path / "abc") == ArtefactRef(file="abc", sha256=expected)
    with pytest.raises(InputError, match="There is no file"):
        file_ref(tmp_path / "none")


def test_the_newest_file_is_found_by_time_then_name(tmp_path: Path) -> None:
    import os

    assert newest(tmp_path / "none", ".tree.json") is None
    assert newest(tmp_path, ".tree.json") is None
    for name, seconds in (("a.tree.json", 5), ("b.tree.json", 9), ("c.tree.json", 9), ("d.tree.json", 1), ("z", 99)):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (seconds, seconds))
    (tmp_path / "folder.tree.json").mkdir()
    assert newest(tmp_path, ".tree.json") == tmp_path / "c.tree.json"


def _tampered(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    path = folder / "tampered.tree.json"
    path.write_text(json.dumps(change(json.loads((GOLDEN / "guide.tree.json").read_text()))))
    return path


def _mask_of(nodes: Any) -> list[list[int]]:
    return [[0]] * (len(nodes) + 1 if isinstance(nodes, list) else 1)
