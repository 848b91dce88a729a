"""A tree on the terminal: its branches with probabilities, and the mask by which it is verified.

Nodes are lettered at depth 1 and numbered below: rank path (0, 1) is A.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text
from rich.tree import Tree as Branches

from topo_search.files.tree_file import TreeFile
from topo_search.tree import Path, Tree

MAX_COLUMNS = 40
_SPACED_COLUMNS = 24
_MARKS = ("■", "·")
_ASCII_MARKS = ("x", ".")


def show_tree(tree_file: TreeFile) -> RenderableType:
    """The tree's branches above its mask; the mask stops at 40 columns and says so."""
    known = [Text("%: share of positions at which the text takes the node's path, as estimated")]
    return Group(_branches(tree_file), *(known if tree_file.probabilities else []), Text(""), _Mask(tree_file.tree))


def node_name(path: Path) -> str:
    """A, B, .. Z, AA, .. by rank at depth 1, then .1, .2, .. by rank below."""
    if not path:
        return "root"
    return ".".join([_letters(path[0]), *(str(rank + 1) for rank in path[1:])])


def _letters(rank: int) -> str:
    above, letter = divmod(rank, 26)
    return (_letters(above - 1) if above else "") + chr(ord("A") + letter)


def _branches(tree_file: TreeFile) -> Branches:
    tree = tree_file.tree
    probabilities = tree_file.probabilities or (None,) * tree.num_draft_nodes
    root = Branches(Text(_title(tree_file)))
    branch_of: dict[Path, Branches] = {(): root}
    for path, probability in zip(tree.paths, probabilities, strict=True):
        label = f"{node_name(path)}  {_path_text(path)}  slot {tree.slots[path]}"
        if probability is not None:
            label += f"  {100 * probability:.2f} %"
        branch_of[path] = branch_of[path[:-1]].add(Text(label))
    return root


def _title(tree_file: TreeFile) -> str:
    tree = tree_file.tree
    nodes = "1 draft node" if tree.num_draft_nodes == 1 else f"{tree.num_draft_nodes} draft nodes"
    return f"{tree_file.name}: root (slot 0) + {nodes} = verify width {tree.verify_width}, depth {tree.depth}"


def _path_text(path: Path) -> str:
    return f"({', '.join(map(str, path))})"


@dataclass(frozen=True, slots=True)
class _Mask:
    """The mask, in characters that the console can show."""

    tree: Tree

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Caption, matrix and, where it is cut, a note."""
        sees, hidden = _ASCII_MARKS if options.ascii_only else _MARKS
        drawn = min(self.tree.verify_width, MAX_COLUMNS - 1)
        yield Text(f"Mask: a row's token sees the columns marked {sees}")
        yield _matrix(self.tree, drawn, sees, hidden)
        if drawn < self.tree.verify_width:
            yield Text(f"Drawn are {drawn} of {self.tree.verify_width} slots; topo-search export --to masks has all.")


def _matrix(tree: Tree, drawn: int, sees: str, hidden: str) -> Table:
    names = [node_name(path) for path in ((), *tree.paths)[:drawn]]
    spacing = 1 if drawn < _SPACED_COLUMNS else 0
    table = Table(box=None, padding=(0, spacing, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ["prompt", *names]:
        table.add_column(Text("\n".join(name)), vertical="bottom", no_wrap=True)
    for name, seen in zip(names, tree.ancestors, strict=False):
        table.add_row(f"{name} ", sees, *(sees if slot in seen else hidden for slot in range(drawn)))
    return table
