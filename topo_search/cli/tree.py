"""`topo-search show`, `export` and `schema`: look at a tree, hand it on, publish the formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from topo_search.cli import options

TreeArgument = Annotated[Path, typer.Argument(metavar="TREE", help="A *.tree.json file.")]


def show(tree: TreeArgument) -> None:
    """Draw a tree with each node's probability, and its mask.

    Example: topo-search show trees/best-tree.tree.json
    """
    from topo_search.files.tree_file import read_tree
    from topo_search.report.console import stdout
    from topo_search.report.show import show_tree

    stdout().print(show_tree(read_tree(tree)))


def export(
    tree: TreeArgument,
    to: Annotated[str, typer.Option(help="masks, medusa, dot or graphml.")],
    out: Annotated[
        Path | None, typer.Option(help="Output file; beside the tree by default, in ./trees for a shipped one.")
    ] = None,
) -> None:
    """Write a tree for a decoder or a drawing program.

    Example: topo-search export trees/best-tree.tree.json --to masks
    """
    from topo_search.errors import InputError
    from topo_search.export import EXPORTERS
    from topo_search.files.atomic import write_bytes
    from topo_search.files.tree_file import TREE_SUFFIX, read_tree
    from topo_search.report.console import note
    from topo_search.resources import is_packaged

    if to not in EXPORTERS:
        raise InputError(f"Unknown export {to!r}; choose one of {', '.join(EXPORTERS)}.")
    exporter = EXPORTERS[to]
    folder = options.TREES_FOLDER if is_packaged(tree) else tree.parent
    path = out or folder / (tree.name.removesuffix(TREE_SUFFIX) + exporter.suffix)
    file = read_tree(tree)
    write_bytes(path, exporter.to_bytes(file))
    note(f"Wrote {path}")
    rule = None if file.made_from is None else file.made_from.rule
    if rule is not None and rule.changes_text:
        note(f"This tree was chosen for a rule that changes the text: {rule.in_words}.")


def schema(name: Annotated[str, typer.Argument(help="tree, trace, latency or accepts.")]) -> None:
    """Print the JSON Schema of a file format.

    Example: topo-search schema tree
    """
    from topo_search.files.schema import schema as published

    print(json.dumps(published(name), indent=2))  # noqa: T201
