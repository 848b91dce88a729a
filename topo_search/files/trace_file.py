"""`*.trace.safetensors`: a rank trace as three tensors and one JSON header.

Tensors: `ranks` int16 `[rows, depth]`, `prompt` int32 `[rows]` (index into the prompts), `position` int32 `[rows]`.
Header: `format`, `version`, and `trace`, the JSON of everything else.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, JsonValue

from topo_search.errors import InputError
from topo_search.files.documents import (
    Count,
    Document,
    Length,
    published,
)
from topo_search.files.headed import read_headed, write_headed
from topo_search.files.reading import naming
from topo_search.identity import HeadsIdentity, RuleIdentity, TargetIdentity, recorded
from topo_search.trace import RankTrace, TracePrompt

TRACE_SUFFIX = ".trace.safetensors"
_TENSORS = {"ranks": ("I16", 2), "prompt": ("I32", 1), "position": ("I32", 1)}
_DESCRIBED = "ranks (int16, 2-D), prompt and position (int32, 1-D)"


class PromptEntry(Document):
    """One prompt and how its answer ended."""

    id: Annotated[str, Field(min_length=1)]
    workload: Annotated[str, Field(min_length=1)]
    prompt_tokens: Length
    answer_tokens: Count
    end: Literal["eos", "cap"]
    digest: str = ""


class TraceDocument(Document):
    """The header entry `trace`."""

    prompts: list[PromptEntry]
    resolved_ranks: Annotated[int, Field(ge=1, le=2**15 - 1)]
    target: TargetIdentity
    heads: HeadsIdentity
    rule: RuleIdentity
    max_new_tokens: Count
    provenance: dict[str, JsonValue]


def write_trace(path: Path, trace: RankTrace) -> None:
    """Write a trace, atomically; equal input gives equal bytes.

    Raises:
        InputError: the file cannot be written, or the trace breaks the schema.
    """
    fields = {
        "prompts": [asdict(prompt) for prompt in trace.prompts],
        "resolved_ranks": trace.resolved_ranks,
        "target": asdict(trace.target),
        "heads": asdict(trace.heads),
        "rule": recorded(trace.rule),
        "max_new_tokens": trace.max_new_tokens,
        "provenance": trace.provenance,
    }
    arrays: dict[str, np.ndarray] = {
        "ranks": trace.ranks.astype(np.int16),
        "prompt": trace.prompt_of_row.astype(np.int32),
        "position": trace.positions.astype(np.int32),
    }
    write_headed(path, "trace", fields, TraceDocument, arrays)


def read_trace(path: Path) -> RankTrace:
    """Read and validate a trace.

    Raises:
        InputError: the file is missing, cut off, no safetensors, of another format or version, breaks the schema, or
            its tensors contradict its prompts. The message names the file, the place and the rule.
    """
    document, arrays = read_headed(path, "trace", TraceDocument, _TENSORS, _DESCRIBED)
    with naming(path):
        return _trace(document, arrays)


def trace_schema() -> dict[str, Any]:
    """The JSON Schema 2020-12 of the header entry `trace`."""
    description = (
        "The header entry `trace` of a trace file. Beside it stand format (topo-search/trace), version (1) and the "
        "tensors ranks int16 [rows, depth], prompt int32 [rows] and position int32 [rows]."
    )
    return published(TraceDocument, kind="trace", description=description)


def _trace(document: TraceDocument, arrays: dict[str, np.ndarray]) -> RankTrace:
    _check_prompts(document)
    trace = RankTrace(
        prompts=tuple(TracePrompt(**prompt.model_dump()) for prompt in document.prompts),
        ranks=arrays["ranks"],
        resolved_ranks=document.resolved_ranks,
        target=document.target,
        heads=document.heads,
        rule=document.rule,
        max_new_tokens=document.max_new_tokens,
        provenance=dict(document.provenance),
    )
    if trace.depth > document.heads.num_heads:
        raise InputError(f"The trace has {trace.depth} depths, but its heads draft {document.heads.num_heads} tokens.")
    for name, expected in (("prompt", trace.prompt_of_row), ("position", trace.positions)):
        if not np.array_equal(arrays[name], expected):
            raise InputError(f"The trace's tensor {name} does not follow from its prompts; calibrate again.")
    return trace


def _check_prompts(document: TraceDocument) -> None:
    for prompt in document.prompts:
        if prompt.answer_tokens > document.max_new_tokens:
            raise InputError(
                f"Prompt {prompt.id} has an answer of {prompt.answer_tokens} tokens, above the trace's cap of "
                f"{document.max_new_tokens}; calibrate again."
            )
