"""What `generate` and `bench` share: a tree file that fits what is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from topo_search.cli.inputs import require_fit
from topo_search.errors import InputError
from topo_search.files.tree_file import TreeFile, read_tree
from topo_search.identity import GREEDY

if TYPE_CHECKING:
    from topo_search.heads.base import DraftHeads
    from topo_search.target import Target


def fitting_tree(path: Path, target: Target, heads: DraftHeads, *, allow_mismatch: bool) -> TreeFile:
    """The tree of `path`, checked against target, heads and rule.

    Raises:
        InputError: the file is missing or broken.
        MismatchError: it was made for something else.
    """
    if not path.exists():
        raise InputError(f"Tree file {path} does not exist; run topo-search optimize, or name one.")
    found = read_tree(path)
    if found.made_from is not None:
        require_fit(f"{path}: its target", found.made_from.target, target.identity, allow_mismatch=allow_mismatch)
        require_fit(f"{path}: its heads", found.made_from.heads, heads.identity, allow_mismatch=allow_mismatch)
        require_fit(f"{path}: its rule", found.made_from.rule, GREEDY, allow_mismatch=allow_mismatch)
    return found
