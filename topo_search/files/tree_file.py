"""`*.tree.json`: a tree with its mask, probabilities, predicted figures and what it was made from.

The mask is what a verifier needs and follows from the nodes alone; the reader derives it again and refuses a file in
which the two differ.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from topo_search.errors import InputError, shown
from topo_search.files.artefacts import ArtefactRef
from topo_search.files.documents import Document, Length, Positive, published, read_document, write_document
from topo_search.files.reading import naming
from topo_search.identity import HeadsIdentity, RuleIdentity, TargetIdentity, recorded
from topo_search.tree import Tree, canonical_key

TREE_SUFFIX = ".tree.json"
MAX_BYTES = 8 * 2**20
MAX_NODES = 4096
MAX_DEPTH = 64
MAX_RANK = 2**15 - 1  # a trace stores ranks as int16
_MAX_NAME = 200
_ROUNDING = 1e-9

_NODES_SCHEMA = {
    "type": "array",
    "maxItems": MAX_NODES,
    "description": "Rank paths without the root, every prefix listed, sorted by depth, then by ranks.",
    "items": {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_DEPTH,
        "items": {"type": "integer", "minimum": 0, "maximum": MAX_RANK},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What the tree is expected to bring; null where no latency table was at hand."""

    tokens_per_step: Positive | None = None
    tokens_per_step_all_positions: Positive | None = None
    step_ms: Positive | None = None
    tokens_per_s: Positive | None = None
    speedup: Positive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeFrom:
    """Where a tree comes from: models, rule, input files by content, device and mode timed, versions, command, time."""

    target: TargetIdentity | None = None
    heads: HeadsIdentity | None = None
    rule: RuleIdentity | None = None
    trace: ArtefactRef | None = None
    latency: ArtefactRef | None = None
    device: str | None = None
    mode: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    command: str
    created: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeFile:
    """A tree and everything its file says about it.

    Attributes:
        tree: the tree, at most `MAX_NODES` nodes and `MAX_DEPTH` deep.
        name: printable, at most 200 characters.
        probabilities: of a step passing each node, in the order of `tree.paths`; they never rise from parent to child.
        predicted: figures, or null.
        made_from: origin, or null.

    Raises:
        InputError: a limit or one of these rules is broken.
    """

    tree: Tree
    name: str
    probabilities: tuple[float, ...] | None = None
    predicted: Predicted | None = None
    made_from: MadeFrom | None = None

    def __post_init__(self) -> None:
        """Check the rules of the class."""
        if not self.name or not self.name.isprintable() or len(self.name) > _MAX_NAME:
            raise InputError(f"A tree's name is 1 to {_MAX_NAME} printable characters, not {shown(self.name)}.")
        _check_limits(self.tree)
        _check_heads(self)
        if self.probabilities is not None:
            _check_probabilities(self.tree, self.probabilities)


class MaskEntry(Document):
    """Which slot sees which."""

    ancestors: Annotated[
        list[list[Length]],
        Field(
            description="Per slot, root first, the slots it sees: its ancestors from the root (0) down, itself last."
        ),
    ]


class TreeDocument(Document):
    """The file."""

    format: Literal["topo-search/tree"]
    version: Literal[1]
    name: str
    nodes: Annotated[Any, WithJsonSchema(_NODES_SCHEMA)]  # checked by Tree, whose messages name the entry
    mask: MaskEntry
    probabilities: list[Annotated[float, Field(ge=0, le=1)]] | None = None
    predicted: Predicted | None = None
    made_from: MadeFrom | None = None


def write_tree(path: Path, tree_file: TreeFile) -> None:
    """Write a tree file, atomically; equal input gives equal bytes.

    Raises:
        InputError: the file cannot be written, or a figure breaks the schema.
    """
    fields = {
        "format": "topo-search/tree",
        "version": 1,
        "name": tree_file.name,
        "nodes": tree_file.tree.paths,
        "mask": {"ancestors": tree_file.tree.ancestors},
        "probabilities": tree_file.probabilities,
        "predicted": asdict(tree_file.predicted) if tree_file.predicted else None,
        "made_from": _origin(tree_file.made_from) if tree_file.made_from else None,
    }
    write_document(path, TreeDocument, fields, kind="tree")


def read_tree(path: Path | str) -> TreeFile:
    """Read and validate a tree file.

    Raises:
        InputError: the file is missing, too large, no JSON, of another format or version, breaks the schema or a rule
            of `Tree` or `TreeFile`, is out of order, or its mask is not that of its nodes. The message names the file,
            the place and the rule.
    """
    path = Path(path)
    raw, document = read_document(path, TreeDocument, kind="tree", max_bytes=MAX_BYTES)
    with naming(path):
        _check_sizes(raw["nodes"])
        tree = Tree.parse(raw["nodes"])
        _check_limits(tree)
        _check_order(raw["nodes"])
        _check_mask(tree, document.mask.ancestors)
        return TreeFile(
            tree=tree,
            name=document.name,
            probabilities=None if document.probabilities is None else tuple(document.probabilities),
            predicted=document.predicted,
            made_from=document.made_from,
        )


def tree_schema() -> dict[str, Any]:
    """The JSON Schema 2020-12 of a tree file."""
    description = "A verification tree; rules between entries (prefixes, order, mask) are checked by the reader."
    return published(TreeDocument, kind="tree", description=description)


def _origin(made_from: MadeFrom) -> dict[str, Any]:
    rule = made_from.rule
    return asdict(made_from) | {"rule": None if rule is None else recorded(rule)}


def _check_sizes(nodes: Any) -> None:
    """Limits before any work that grows with the square of a hostile size."""
    if not isinstance(nodes, list):
        return
    if len(nodes) > MAX_NODES:
        raise InputError(f"The tree lists {len(nodes)} nodes; at most {MAX_NODES} are allowed.")
    for index, entry in enumerate(nodes):
        if isinstance(entry, list) and len(entry) > MAX_DEPTH:
            raise InputError(f"Tree entry {index} is {len(entry)} ranks deep; at most {MAX_DEPTH} are allowed.")


def _check_limits(tree: Tree) -> None:
    limits = (
        ("draft nodes", tree.num_draft_nodes, MAX_NODES),
        ("levels", tree.depth, MAX_DEPTH),
        ("as its largest rank", tree.max_rank, MAX_RANK),
    )
    for what, size, limit in limits:
        if size > limit:
            raise InputError(f"The tree has {shown(size)} {what}; at most {limit} is allowed.")


def _check_heads(tree_file: TreeFile) -> None:
    heads = tree_file.made_from.heads if tree_file.made_from else None
    if heads and tree_file.tree.depth > heads.num_heads:
        raise InputError(
            f"Node {list(tree_file.tree.paths[-1])} is {tree_file.tree.depth} deep, but heads {heads.name} draft "
            f"{heads.num_heads} tokens; prune the tree to depth {heads.num_heads}."
        )


def _check_probabilities(tree: Tree, probabilities: tuple[float, ...]) -> None:
    if len(probabilities) != tree.num_draft_nodes:
        raise InputError(
            f"The tree has {tree.num_draft_nodes} nodes, but {len(probabilities)} probabilities; list one per node."
        )
    by_slot = (1.0, *probabilities)
    for path, probability in zip(tree.paths, probabilities, strict=True):
        above = by_slot[tree.slots[path[:-1]]]
        if not (math.isfinite(probability) and 0 <= probability <= above + _ROUNDING):
            raise InputError(
                f"Node {list(path)} has probability {probability}; it must lie between 0 and its parent's, {above}."
            )


def _check_order(nodes: list[list[int]]) -> None:
    for index, (before, entry) in enumerate(itertools.pairwise(nodes), start=1):
        if canonical_key(tuple(entry)) < canonical_key(tuple(before)):
            raise InputError(f"Tree entry {index} is {entry}, after {before}; sort nodes by depth, then by ranks.")


def _check_mask(tree: Tree, rows: list[list[int]]) -> None:
    if len(rows) != tree.verify_width:
        raise InputError(f"The mask has {len(rows)} rows; {tree.num_draft_nodes} nodes and the root need one each.")
    for slot, (row, seen) in enumerate(zip(rows, tree.ancestors, strict=True)):
        if row != list(seen):
            node = list(tree.paths[slot - 1]) if slot else "the root"
            raise InputError(
                f"Row {slot} of the mask is {shown(row)}, but {node} sees exactly {shown(list(seen))}; "
                "the mask follows from the nodes, so write the file again."
            )
