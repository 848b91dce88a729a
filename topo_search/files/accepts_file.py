"""`*.accepts.safetensors`: accept masks as three tensors and one JSON header.

Tensors: `accepted` uint8 0 or 1 `[steps, nodes]`, `prompt` int32 `[steps]` (index into the prompts), `remaining` int32
`[steps]`. Header: `format`, `version`, and `accepts`, the JSON of everything else.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, JsonValue

from topo_search.accepts import AcceptTrace
from topo_search.errors import InputError
from topo_search.files.documents import (
    Count,
    Document,
    published,
)
from topo_search.files.headed import read_headed, write_headed
from topo_search.files.reading import naming
from topo_search.files.trace_file import PromptEntry
from topo_search.files.tree_file import MAX_DEPTH, MAX_NODES, MAX_RANK
from topo_search.identity import HeadsIdentity, RuleIdentity, TargetIdentity, recorded
from topo_search.trace import TracePrompt
from topo_search.tree import Tree

ACCEPTS_SUFFIX = ".accepts.safetensors"
_TENSORS = {"accepted": ("U8", 2), "prompt": ("I32", 1), "remaining": ("I32", 1)}
_DESCRIBED = "accepted (uint8, 2-D), prompt and remaining (int32, 1-D)"

Ranks = Annotated[list[Annotated[int, Field(ge=0, le=MAX_RANK)]], Field(min_length=1, max_length=MAX_DEPTH)]


class AcceptsDocument(Document):
    """The header entry `accepts`."""

    prompts: list[PromptEntry]
    nodes: Annotated[list[Ranks], Field(min_length=1, max_length=MAX_NODES)]
    target: TargetIdentity
    heads: HeadsIdentity
    rule: RuleIdentity
    max_new_tokens: Count
    provenance: dict[str, JsonValue]


def write_accepts(path: Path, accepts: AcceptTrace) -> None:
    """Write accept masks, atomically; equal input gives equal bytes.

    Raises:
        InputError: the file cannot be written, or the masks break the schema.
    """
    fields = {
        "prompts": [asdict(prompt) for prompt in accepts.prompts],
        "nodes": accepts.tree.paths,
        "target": asdict(accepts.target),
        "heads": asdict(accepts.heads),
        "rule": recorded(accepts.rule),
        "max_new_tokens": accepts.max_new_tokens,
        "provenance": accepts.provenance,
    }
    arrays: dict[str, np.ndarray] = {
        "accepted": accepts.accepted.astype(np.uint8),
        "prompt": accepts.prompt_of_step.astype(np.int32),
        "remaining": accepts.remaining.astype(np.int32),
    }
    write_headed(path, "accepts", fields, AcceptsDocument, arrays)


def read_accepts(path: Path) -> AcceptTrace:
    """Read and validate accept masks.

    Raises:
        InputError: the file is missing, cut off, no safetensors, of another format or version, breaks the schema, or
            its tensors contradict its header. The message names the file, the place and the rule.
    """
    document, arrays = read_headed(path, "accepts", AcceptsDocument, _TENSORS, _DESCRIBED)
    with naming(path):
        return _accepts(document, arrays)


def accepts_schema() -> dict[str, Any]:
    """The JSON Schema 2020-12 of the header entry `accepts`."""
    description = (
        "The header entry `accepts` of an accept-mask file. Beside it stand format (topo-search/accepts), version (1) "
        "and the tensors accepted uint8 [steps, nodes], prompt int32 [steps] and remaining int32 [steps]. Nodes are "
        "rank paths in canonical order: by depth, then by ranks."
    )
    return published(AcceptsDocument, kind="accepts", description=description)


def _accepts(document: AcceptsDocument, arrays: dict[str, np.ndarray]) -> AcceptTrace:
    tree = Tree.parse(document.nodes)
    if [list(path) for path in tree.paths] != document.nodes:
        raise InputError("The nodes are not in canonical order, by depth, then by ranks; record the masks again.")
    if arrays["accepted"].max(initial=0) > 1:
        raise InputError("The tensor accepted holds something else than 0 and 1; record the masks again.")
    count, prompts = len(document.prompts), arrays["prompt"]
    if prompts.size and not (prompts.min() >= 0 and prompts.max() < count):
        raise InputError(f"The tensor prompt names a prompt outside the {count} of the header; record the masks again.")
    return AcceptTrace(
        prompts=tuple(TracePrompt(**prompt.model_dump()) for prompt in document.prompts),
        tree=tree,
        accepted=arrays["accepted"].astype(np.bool_),
        prompt_of_step=prompts.astype(np.int64),
        remaining=arrays["remaining"].astype(np.int64),
        target=document.target,
        heads=document.heads,
        rule=document.rule,
        max_new_tokens=document.max_new_tokens,
        provenance=dict(document.provenance),
    )
