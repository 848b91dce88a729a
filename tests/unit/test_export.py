"""Exports: exact bytes, the published example's figures, and paths recovered from what was exported."""

import ast
import io
import json
import subprocess
import sys
from pathlib import Path

import networkx
import numpy as np
import pytest
from factories import repeatable, trees
from hypothesis import given
from safetensors import safe_open
from safetensors.numpy import load

from topo_search.errors import InputError
from topo_search.export import EXPORTERS
from topo_search.export.masks import masks
from topo_search.export.medusa import medusa_buffers
from topo_search.files.tree_file import TreeFile, read_tree
from topo_search.tree import Path as RankPath
from topo_search.tree import Tree

GOLDEN = Path(__file__).parents[1] / "golden"
EXAMPLE = Tree.parse([[0], [1], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]])


@pytest.mark.parametrize("name", ["masks", "medusa", "dot"])
def test_an_export_has_exactly_these_bytes(name: str) -> None:
    exporter = EXPORTERS[name]
    written = exporter.to_bytes(read_tree(GOLDEN / "guide.tree.json"))
    assert written == (GOLDEN / f"guide{exporter.suffix}").read_bytes()


def test_the_exports_are_these_four() -> None:
    assert {name: exporter.suffix for name, exporter in EXPORTERS.items()} == {
        "masks": ".masks.safetensors",
        "medusa": ".medusa.json",
        "dot": ".dot",
        "graphml": ".graphml",
    }


def test_masks_of_the_example() -> None:
    arrays = masks(EXAMPLE)
    assert arrays["token_indices"].tolist() == [0, 1, 2, 4, 5, 6, 4, 5, 6]
    assert arrays["position_offsets"].tolist() == [0, 1, 1, 2, 2, 2, 2, 2, 2]
    expected = [[0, 1, 3], [0, 1, 4], [0, 1, 5], [0, 2, 6], [0, 2, 7], [0, 2, 8]]
    assert arrays["retrieve_indices"].tolist() == expected
    assert arrays["path_lengths"].tolist() == [2] * 6


def test_a_node_sees_its_ancestors_and_itself_only() -> None:
    """FIELD-CASES 67: node 2 does not see 1, and node 4 sees neither 1 nor 3."""
    mask = masks(Tree.parse([[0], [1], [0, 0], [1, 0]]))["attention_mask"]
    assert mask.dtype == np.bool_ and mask.shape == (5, 5)
    assert [np.flatnonzero(row).tolist() for row in mask] == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]


def test_padding_lies_beyond_each_path_length() -> None:
    arrays = masks(Tree.parse([[0], [1], [0, 0], [0, 0, 0]]))
    assert arrays["retrieve_indices"].tolist() == [[0, 2, -1, -1], [0, 1, 3, 4]]
    assert arrays["path_lengths"].tolist() == [1, 3]


def test_masks_of_plain_decoding() -> None:
    arrays = masks(Tree(()))
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "attention_mask": [[True]],
        "position_offsets": [0],
        "token_indices": [0],
        "retrieve_indices": [[0]],
        "path_lengths": [0],
    }


@repeatable
@given(trees(ranks=4, depth=4))
def test_the_masks_file_gives_the_paths_back(tmp_path_factory: pytest.TempPathFactory, tree: Tree) -> None:
    path = tmp_path_factory.mktemp("masks") / "any.masks.safetensors"
    path.write_bytes(EXPORTERS["masks"].to_bytes(TreeFile(tree=tree, name="any")))
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    arrays = load(path.read_bytes())
    assert {"int64"} == {str(array.dtype) for name, array in arrays.items() if name != "attention_mask"}
    assert metadata["verify_width"] == str(tree.verify_width)
    assert metadata["num_draft_nodes"] == str(tree.num_draft_nodes)
    width = int(metadata["ranks_per_depth"])
    found = {
        tuple(_ranks(arrays["token_indices"], row[1 : stop + 1], width))
        for row, length in zip(arrays["retrieve_indices"], arrays["path_lengths"], strict=True)
        for stop in range(1, length + 1)
    }
    assert found == set(tree.paths)


def test_medusa_buffers_of_the_example() -> None:
    buffers = medusa_buffers(EXAMPLE)
    assert buffers["tree_indices"].tolist() == [0, 1, 2, 11, 12, 13, 11, 12, 13]
    assert buffers["medusa_position_ids"].tolist() == [0, 1, 1, 2, 2, 2, 2, 2, 2]
    expected = [[0, 2, 8], [0, 2, 7], [0, 2, 6], [0, 1, 5], [0, 1, 4], [0, 1, 3]]
    assert buffers["retrieve_indices"].tolist() == expected
    mask = buffers["medusa_attn_mask"]
    assert mask.dtype == np.float32 and mask.shape == (1, 1, 9, 9)
    assert mask[0, 0, 6].tolist() == [1, 0, 1, 0, 0, 0, 1, 0, 0]


@repeatable
@given(trees(ranks=10, depth=3).filter(lambda tree: tree.num_draft_nodes > 0))
def test_medusa_choices_go_to_buffers_and_back(tree: Tree) -> None:
    choices = json.loads(EXPORTERS["medusa"].to_bytes(TreeFile(tree=tree, name="any")))
    buffers = medusa_buffers(Tree.parse(choices))
    found: set[RankPath] = set()
    for row in buffers["retrieve_indices"]:
        slots = row[row >= 0][1:]
        found |= {tuple(_ranks(buffers["tree_indices"], slots[:stop], 10)) for stop in range(1, len(slots) + 1)}
    assert found == set(tree.paths)
    assert np.array_equal(buffers["medusa_attn_mask"][0, 0].sum(axis=1), buffers["medusa_position_ids"] + 1)


def test_medusa_choices_are_a_python_literal_of_lists_too() -> None:
    text = EXPORTERS["medusa"].to_bytes(TreeFile(tree=EXAMPLE, name="example")).decode()
    assert ast.literal_eval(text) == [list(path) for path in EXAMPLE.paths]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (Tree.parse([[0], [0, 10]]), r"Node \[0, 10\] has rank 10; Medusa ranks 10 candidates per head, 0 to 9"),
        (Tree(()), "Medusa takes no empty list"),
    ],
)
def test_what_medusa_would_read_wrongly_is_refused(tree: Tree, message: str) -> None:
    with pytest.raises(InputError, match=message):
        EXPORTERS["medusa"].to_bytes(TreeFile(tree=tree, name="any"))
    with pytest.raises(InputError, match=message):
        medusa_buffers(tree)


def test_rank_9_is_medusas_last() -> None:
    assert EXPORTERS["medusa"].to_bytes(TreeFile(tree=Tree.parse([[9]]), name="any")) == b"[[9]]\n"


def test_graphml_is_read_back_by_networkx() -> None:
    guide = read_tree(GOLDEN / "guide.tree.json")
    graph = networkx.read_graphml(io.BytesIO(EXPORTERS["graphml"].to_bytes(guide)))
    assert set(graph.edges) == {("root", "0"), ("root", "1"), ("0", "0.0"), ("0", "0.1"), ("1", "1.0")}
    assert graph.nodes["0.1"] == {"rank": 1, "depth": 2, "slot": 4, "probability": 0.1}
    assert graph.nodes["root"] == {"rank": -1, "depth": 0, "slot": 0}


def test_graphs_without_probabilities_have_none() -> None:
    chain = TreeFile(tree=Tree.chain(1), name='a "quoted" \\ name')
    assert b"probability" not in EXPORTERS["graphml"].to_bytes(chain)
    expected = (
        b'digraph "a \\"quoted\\" \\\\ name" {\n  "root" [label="root"];\n  "0" [label="0"];\n  "root" -> "0";\n}\n'
    )
    assert EXPORTERS["dot"].to_bytes(chain) == expected


def test_files_exports_and_drawings_load_no_torch() -> None:
    code = (
        "import sys; import topo_search.export, topo_search.files.schema, topo_search.files.prompts, "
        "topo_search.report.show; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    root = str(Path(__file__).parents[2])
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def _ranks(token_indices: np.ndarray, slots: np.ndarray, ranks_per_depth: int) -> list[int]:
    places = token_indices[slots] - 1
    assert (places // ranks_per_depth).tolist() == list(range(len(slots)))
    return [int(place) % ranks_per_depth for place in places]
