"""The drawing of a tree: names, probabilities and mask, as text of fixed width."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from topo_search.files.tree_file import TreeFile, read_tree
from topo_search.report.show import node_name, show_tree
from topo_search.tree import Tree

GOLDEN = Path(__file__).parents[1] / "golden"


def drawn(tree_file: TreeFile, *, encoding: str = "utf-8", width: int = 80) -> str:
    """What a terminal without colour shows."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    Console(file=stream, width=width, color_system=None).print(show_tree(tree_file))
    stream.flush()
    return raw.getvalue().decode(encoding)


def test_the_guides_example_is_drawn_so() -> None:
    assert drawn(read_tree(GOLDEN / "guide.tree.json")) == (GOLDEN / "guide.show.txt").read_text(encoding="utf-8")


def test_every_row_of_the_mask_shows_what_the_slot_sees() -> None:
    guide = read_tree(GOLDEN / "guide.tree.json")
    rows = [line.split() for line in drawn(guide).splitlines() if line.count("■") + line.count("·") == 7]
    assert [row[0] for row in rows] == ["root", "A", "B", "A.1", "A.2", "B.1"]
    for row, seen in zip(rows, guide.tree.mask, strict=True):
        assert row[1] == "■"
        assert [mark == "■" for mark in row[2:]] == seen.tolist()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ((), "root"),
        ((0,), "A"),
        ((25,), "Z"),
        ((26,), "AA"),
        ((27,), "AB"),
        ((701,), "ZZ"),
        ((702,), "AAA"),
        ((1, 0), "B.1"),
        ((0, 1, 9), "A.2.10"),
    ],
)
def test_names_follow_the_ranks(path: tuple[int, ...], name: str) -> None:
    assert node_name(path) == name


def test_a_gap_in_the_ranks_shows_in_the_names() -> None:
    text = drawn(TreeFile(tree=Tree.parse([[2], [2, 4]]), name="gap"))
    assert "C  (2)  slot 1" in text and "C.5  (2, 4)  slot 2" in text and "%" not in text


def test_sizes_are_named_with_and_without_the_root() -> None:
    text = drawn(TreeFile(tree=Tree.chain(1), name="[red]one[/red]"))
    assert text.startswith("[red]one[/red]: root (slot 0) + 1 draft node = verify width 2, depth 1")


def test_plain_decoding_is_drawn() -> None:
    assert "plain: root (slot 0) + 0 draft nodes = verify width 1, depth 0" in drawn(
        TreeFile(tree=Tree(()), name="plain")
    )


@pytest.mark.parametrize(("nodes", "note"), [(38, False), (39, True)])
def test_a_mask_of_more_than_40_columns_is_cut_with_a_note(nodes: int, note: bool) -> None:
    text = drawn(TreeFile(tree=Tree(tuple((rank,) for rank in range(nodes))), name="wide"))
    rows = [line for line in text.splitlines() if line.count("■") + line.count("·") == 40]
    assert len(rows) == 39
    assert ("Drawn are 39 of 40 slots; topo-search export --to masks has all." in text) is note


def test_a_terminal_without_unicode_gets_ascii() -> None:
    text = drawn(read_tree(GOLDEN / "guide.tree.json"), encoding="ascii")
    assert "A.1   x x x . x . ." in text
