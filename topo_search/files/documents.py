"""JSON documents: one strict schema per format, used alike for reading, for writing and for publication.

What is written was validated as the reader will validate it. NaN and infinities are written as null and refused on
reading, as are repeated keys.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from topo_search.errors import InputError, shown
from topo_search.files.atomic import write_text
from topo_search.files.reading import naming, read_text

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Length = Annotated[int, Field(ge=0, le=2**31 - 1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Document(BaseModel):
    """Base of every schema: exact types, no unknown key."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


DocumentT = TypeVar("DocumentT", bound=Document)
T = TypeVar("T")


def read_document(path: Path, schema: type[DocumentT], *, kind: str, max_bytes: int) -> tuple[Any, DocumentT]:
    """The file's raw JSON and the same content validated.

    Args:
        path: the file.
        schema: its schema, with the keys `format` and `version`.
        kind: `tree` or `latency`; the format is `topo-search/<kind>`.
        max_bytes: size limit.

    Raises:
        InputError: the file is missing, too large, not UTF-8, not JSON, of another format or version, or breaks the
            schema; the message names the file, the place and the rule.
    """
    text = read_text(path, max_bytes=max_bytes)
    raw = parse_json(path, text)
    require_format(path, raw, kind)
    return raw, validated(path, text, schema, hint=schema_hint(kind))


def write_document(path: Path, schema: type[Document], fields: Mapping[str, Any], *, kind: str) -> None:
    """Write `fields` as JSON, atomically, once they pass the schema.

    Raises:
        InputError: a field breaks the schema, or the file cannot be written.
    """
    text = json_text(fields)
    validated(path, text, schema, hint=schema_hint(kind))
    write_text(path, text + "\n")


def published(schema: type[Document], *, kind: str, description: str) -> dict[str, Any]:
    """The JSON Schema 2020-12 of a format, with identifier and title."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:topo-search:schema:{kind}:1",
        **schema.model_json_schema(),
        "title": f"topo-search/{kind}, version 1",
        "description": description,
    }


def schema_hint(kind: str) -> str:
    """Where a user finds the rules of a format."""
    return f"topo-search schema {kind} prints the rules"


def parse_json(where: object, text: str) -> Any:
    """Strict JSON: no NaN, no infinity, no repeated key.

    Raises:
        InputError: the text is not such JSON; the message starts with `where`.
    """
    try:
        return json.loads(
            text, parse_constant=_no_constant, parse_float=_finite_float, object_pairs_hook=_distinct_keys
        )
    except RecursionError:
        raise InputError(f"{where} is not valid JSON for this tool: it is nested too deeply.") from None
    except ValueError as error:
        cut = " It may be cut off; write it again." if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(f"{where} is not valid JSON: {error}.{cut}") from None


def require_format(where: object, raw: Any, kind: str) -> None:
    """Refuse JSON that is not `topo-search/<kind>`, version 1.

    Raises:
        InputError: names the format or version found and the one expected.
    """
    found = raw.get("format") if isinstance(raw, dict) else None
    if found != f"topo-search/{kind}":
        raise InputError(f'{where} is no topo-search {kind} file: its "format" is {shown(found)}.')
    version = raw.get("version")
    if version != 1 or isinstance(version, bool):
        raise InputError(
            f"{where} has version {shown(version)}; this topo-search reads version 1. Use the release that wrote it."
        )


def validated(where: object, text: str, schema: type[DocumentT], *, hint: str) -> DocumentT:
    """JSON text as an instance of `schema`.

    Raises:
        InputError: names the first place that breaks a rule, what was found there, and how many more there are.
    """
    try:
        with naming(where):  # a dataclass inside refuses its values by itself
            return schema.model_validate_json(text)
    except ValidationError as error:
        details = error.errors(include_url=False)
        more = f" ({len(details) - 1} more)" if len(details) > 1 else ""
        raise InputError(f"{where}: {_explained(details[0])}{more}; {hint}.") from None


def as_dataclass(where: object, value: Any, kind: type[T]) -> T:
    """A JSON object as the dataclass whose fields it gives, all of them and no other.

    Raises:
        InputError: names the first place that breaks a rule; the message starts with `where`.
    """
    try:
        found = TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise InputError(f"{where}: {_explained(error.errors(include_url=False)[0])}.") from None
    expected = asdict(found)  # type: ignore[call-overload]
    if differing := sorted(key for key in value.keys() | expected.keys() if value.get(key) != expected.get(key)):
        raise InputError(f"{where}: {', '.join(differing)} must be given, with known keys only.")
    return found


def json_text(value: Any) -> str:
    """JSON in which a list or object of plain values keeps to one line; NaN and infinities become null."""
    return _laid_out(_plain(value), "")


def _explained(detail: ErrorDetails) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"]).lstrip(".")
    if detail["type"] == "missing":
        return f"{place} is missing"
    if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{place} is no known key"
    rule = detail["msg"].removeprefix("Value error, ")
    return f"{place + ': ' if place else ''}{rule[0].lower()}{rule[1:]}, found {shown(detail['input'])}"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number; write null where a figure is unknown")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large a number")
    return number


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        (repeated, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {shown(repeated)} occurs twice in one object")
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child) for child in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    # a command line with bytes that are no UTF-8 carries lone surrogates, which no UTF-8 file can hold
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _laid_out(value: Any, indent: str) -> str:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(child, dict | list) for child in children):
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    inner = indent + "  "
    if isinstance(value, dict):
        rows = [f"{json.dumps(key, ensure_ascii=False)}: {_laid_out(child, inner)}" for key, child in value.items()]
    else:
        rows = [_laid_out(child, inner) for child in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return opening + "\n" + ",\n".join(inner + row for row in rows) + "\n" + indent + closing
