"""`*.latency.json`: measured step times of one target, heads, device and execution mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, model_validator

from topo_search.cost import OK, WHATEVER_EXPANDED, LatencyTable, Timing
from topo_search.files.documents import Count, Document, Length, Positive, published, read_document, write_document
from topo_search.identity import HeadsIdentity, TargetIdentity

LATENCY_SUFFIX = ".latency.json"
MAX_BYTES = 64 * 2**20


class TimedEntry(Document):
    """One shape's repeated timing."""

    median_ms: Positive | None
    mean_ms: Positive | None
    p10_ms: Positive | None
    p90_ms: Positive | None
    count: Length
    status: Literal["ok", "out of memory"]

    @model_validator(mode="after")
    def _check(self) -> TimedEntry:
        times = [time for time in (self.p10_ms, self.median_ms, self.p90_ms) if time is not None]
        if self.status != OK and (times or self.mean_ms or self.count):
            raise ValueError("a shape that ran out of memory has null times and count 0")
        if self.status == OK and (len(times) < 3 or not self.count):
            raise ValueError("a shape whose status is ok has median, p10 and p90 and a count of at least 1")
        if times != sorted(times):
            raise ValueError("p10_ms, median_ms and p90_ms must not fall in this order")
        return self

    def timing(self) -> Timing:
        """The row without its key."""
        return Timing(**{name: getattr(self, name) for name in TimedEntry.model_fields})


class VerifyEntry(TimedEntry):
    """Tree forward, acceptance, cache commit and bookkeeping at one batch, context and width, in milliseconds."""

    batch: Count
    context_tokens: Length
    verify_width: Count

    @property
    def key(self) -> tuple[int, int, int]:
        """What the row is the time of."""
        return self.batch, self.context_tokens, self.verify_width


class DraftEntry(TimedEntry):
    """Draft heads and their ranking down to one depth, in milliseconds.

    `expanded_nodes` is how many nodes the timed tree expands at every depth below the root (1 at depth 1, where only
    the root is expanded), or null for heads that draft all depths in one call, whatever is expanded.
    """

    batch: Count
    depth: Count
    expanded_nodes: Count | None

    @property
    def key(self) -> tuple[int, int, int]:
        """What the row is the time of."""
        return self.batch, self.depth, self.expanded_nodes or WHATEVER_EXPANDED


class LatencyDocument(Document):
    """The file."""

    format: Literal["topo-search/latency"]
    version: Literal[1]
    target: TargetIdentity
    heads: HeadsIdentity
    device: dict[str, JsonValue]
    mode: Annotated[str, Field(min_length=1)]
    attention: Annotated[str, Field(min_length=1)]
    verify: Annotated[list[VerifyEntry], Field(min_length=1)]
    draft: list[DraftEntry]
    provenance: dict[str, JsonValue]

    @model_validator(mode="after")
    def _check(self) -> LatencyDocument:
        _check_distinct("verify", "batch, context_tokens, verify_width", [row.key for row in self.verify])
        _check_distinct("draft", "batch, depth, expanded_nodes", [row.key for row in self.draft])
        if len({row.expanded_nodes is None for row in self.draft}) > 1:
            raise ValueError("draft has rows with and rows without expanded_nodes; heads pay for them or do not")
        deepest = max((row.depth for row in self.draft), default=0)
        if deepest > self.heads.num_heads:
            raise ValueError(f"draft has depth {deepest}, but the heads draft {self.heads.num_heads} tokens")
        return self


def write_latency(path: Path, table: LatencyTable) -> None:
    """Write a latency table, atomically, rows sorted by their key.

    Raises:
        InputError: the file cannot be written, or the table breaks the schema.
    """
    fields = {
        "format": "topo-search/latency",
        "version": 1,
        "target": asdict(table.target),
        "heads": asdict(table.heads),
        "device": table.device,
        "mode": table.mode,
        "attention": table.attention,
        "verify": _rows(("batch", "context_tokens", "verify_width"), table.verify.items()),
        "draft": [
            row | {"expanded_nodes": row["expanded_nodes"] or None}
            for row in _rows(("batch", "depth", "expanded_nodes"), table.draft.items())
        ],
        "provenance": table.provenance,
    }
    write_document(path, LatencyDocument, fields, kind="latency")


def read_latency(path: Path) -> LatencyTable:
    """Read and validate a latency table.

    Raises:
        InputError: the file is missing, too large, no JSON, of another format or version, or breaks the schema. The
            message names the file, the place and the rule.
    """
    _, document = read_document(path, LatencyDocument, kind="latency", max_bytes=MAX_BYTES)
    return LatencyTable(
        verify={row.key: row.timing() for row in document.verify},
        draft={row.key: row.timing() for row in document.draft},
        target=document.target,
        heads=document.heads,
        device=dict(document.device),
        mode=document.mode,
        attention=document.attention,
        provenance=dict(document.provenance),
    )


def latency_schema() -> dict[str, Any]:
    """The JSON Schema 2020-12 of a latency table."""
    description = "Measured step times; each key is listed once, and a shape that ran out of memory has null times."
    return published(LatencyDocument, kind="latency", description=description)


def _rows(names: Sequence[str], timings: Iterable[tuple[tuple[int, ...], Timing]]) -> list[dict[str, Any]]:
    ordered = sorted(timings, key=lambda item: item[0])
    return [dict(zip(names, key, strict=True)) | asdict(timing) for key, timing in ordered]


def _check_distinct(where: str, names: str, keys: Sequence[tuple[int, ...]]) -> None:
    for key, times in Counter(keys).most_common(1):
        if times > 1:
            raise ValueError(f"{where} lists {names} = {key} {times} times")
