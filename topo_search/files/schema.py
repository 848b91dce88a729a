"""The published schemas of the file formats, by name."""

from __future__ import annotations

from typing import Any

from topo_search.errors import InputError
from topo_search.files.accepts_file import accepts_schema
from topo_search.files.latency_file import latency_schema
from topo_search.files.trace_file import trace_schema
from topo_search.files.tree_file import tree_schema

SCHEMAS = {"tree": tree_schema, "trace": trace_schema, "latency": latency_schema, "accepts": accepts_schema}


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema 2020-12 of a format.

    Raises:
        InputError: no such format; the message names the choices.
    """
    if name not in SCHEMAS:
        raise InputError(f"There is no schema {name!r}; choose one of {', '.join(SCHEMAS)}.")
    return SCHEMAS[name]()
