"""What `generate` and `bench` share: a tree file that fits what is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from topo_search.cli.inputs import refuse_mismatch, require_fit
from topo_search.errors import InputError
from topo_search.files.tree_file import TreeFile, read_tree
from topo_search.identity import GREEDY, RuleIdentity
from topo_search.report.console import note
from topo_search.tree import Tree

if TYPE_CHECKING:
    from topo_search.heads.base import DraftHeads
    from topo_search.target import Target


def stored_tree(path: Path, *, rule: RuleIdentity = GREEDY, allow_mismatch: bool = False) -> TreeFile:
    """The tree of `path`, checked against the rule (whatever its seed) before a model is loaded for it.

    Raises:
        InputError: the file is missing or broken.
        MismatchError: it was made for another rule.
    """
    if not path.exists():
        raise InputError(f"Tree file {path} does not exist; run topo-search optimize, or name one.")
    found = read_tree(path)
    require_fit(
        f"{path}: its rule",
        None if found.made_from is None else found.made_from.rule,
        rule,
        allow_mismatch=allow_mismatch,
        way_out="calibrate and optimize at these settings",
        ignore=("seed",),  # another seed is another sample of the same law
    )
    return found


def fitting_tree(path: Path, found: TreeFile, target: Target, heads: DraftHeads, *, allow_mismatch: bool) -> Tree:
    """The tree read from `path`, checked against target, heads and device.

    Raises:
        MismatchError: it was made for something else.
    """
    origin = found.made_from
    if origin is not None:
        require_fit(f"{path}: its target", origin.target, target.identity, allow_mismatch=allow_mismatch)
        if origin.heads is not None:
            require_fit(
                f"{path}: its heads",
                origin.heads,
                heads.identity,
                allow_mismatch=allow_mismatch,
                way_out=f"name its heads ({origin.heads.name}) with --heads, or calibrate and optimize with these",
            )
        require_device(f"{path}: its latency table", origin.device, target, allow_mismatch=allow_mismatch)
        if origin.mode not in (None, target.mode):
            note(
                f"{path} was chosen on times of mode {origin.mode}; this is mode {target.mode}, where another tree may "
                f"be faster. Decode with --mode {origin.mode}, or run measure --mode {target.mode} and optimize again."
            )
    return found.tree


def require_mode(what: str, mode: str | None, target: Target, *, allow_mismatch: bool) -> None:
    """Refuse, or with the flag warn about, times of another execution mode than the decoder's; unknown fits.

    Raises:
        MismatchError: the modes differ and the flag is off.
    """
    if mode is not None and mode != target.mode:
        refuse_mismatch(
            what,
            [f"mode is {mode!r}, not {target.mode!r}"],
            allow_mismatch=allow_mismatch,
            way_out=f"run topo-search measure --mode {target.mode}, or decode with --mode {mode}",
        )


def require_device(what: str, device: str | None, target: Target, *, allow_mismatch: bool) -> None:
    """Refuse, or with the flag warn about, times that were measured on another device; unknown fits.

    Raises:
        MismatchError: the devices differ and the flag is off.
    """
    from topo_search.device import device_record

    here = device_record(target)["name"]
    if device is not None and device != here:
        refuse_mismatch(
            what,
            [f"device is {device!r}, not {here!r}"],
            allow_mismatch=allow_mismatch,
            way_out="run topo-search measure and topo-search optimize here",
        )
