"""Accuracy tables: the probability of each rank at each depth, ours and the peers', as `independent` takes them.

    ours             JSON, {"rank_table": [[0.6, 0.15], [0.4, 0.1]]}: a list per depth, the probability of each rank
    Medusa           CSV of a training run: columns medusa<head>_top<k>, cumulative, a row per model
    Sequoia          JSON list [0, p_1, .., p_W, p_none]: the acceptance vector, one for every depth

The peers' `.pt` files hold the same and need torch: `heads/accuracy_tensors.py` reads them.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from topo_search.errors import InputError, shown
from topo_search.files.documents import Document, parse_json, validated
from topo_search.files.reading import naming, read_text

MAX_BYTES = 16 * 2**20
_TOLERANCE = 1e-3  # published shares are rounded, so their sum may pass 1 by that much
_NOT_FINITE = re.compile(r"\bNaN\b|-?\bInfinity\b")
_CUMULATIVE = re.compile(r"(?:.*/)?medusa(\d+)_top(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyTable:
    """Rank probabilities from a file.

    Attributes:
        rank_table: per depth from 1, the probability of each rank.
        repeat_last: whether depths beyond the table use its last row (Sequoia's one vector for every depth).
        source: what the file was, in words; such a table says nothing about positions or prompts.
    """

    rank_table: tuple[tuple[float, ...], ...]
    repeat_last: bool
    source: str


class RankTableDocument(Document):
    """Our file."""

    rank_table: Annotated[list[list[float]], Field(min_length=1)]


def read_accuracies(path: Path) -> AccuracyTable:
    """An accuracy table, ours or a peer's, by what the file holds.

    A CSV of several models needs the wanted one's name after a `#`: `medusa_acc.csv#7b`.

    Raises:
        InputError: no such file, an unknown layout, or values that are no rank probabilities: empty, negative, not
            finite, adding up to more than 1 at one depth, or cumulative where they must not be.
    """
    file, name = _split_name(path)
    text = read_text(file, max_bytes=MAX_BYTES)
    with naming(path):
        if file.suffix.lower() == ".csv":
            return _from_csv(text, name)
        if (unknown := _NOT_FINITE.search(text)) is not None:
            raise InputError(
                f"It holds {unknown[0]}, but a probability is a number from 0 to 1: write 0 for a rank that is never "
                "right, and leave out a depth that was not measured, with those below it."
            )
        raw = parse_json("The file", text)
        if isinstance(raw, list) and raw and isinstance(raw[0], list):
            raise InputError('It is a bare list of depths; give them their name: {"rank_table": [[...], ...]}.')
        if isinstance(raw, list):
            return acceptance_vector(raw, source="Sequoia's acceptance vector")
        if not isinstance(raw, dict) or "rank_table" not in raw:
            raise InputError(
                'It is no accuracy table; expected {"rank_table": [[0.6, 0.15], [0.4, 0.1]]}, Sequoia\'s list '
                "[0, p_1, .., p_W, p_none], or Medusa's CSV."
            )
        document = validated("The table", text, RankTableDocument, hint="it holds rank_table and nothing else")
        return accuracy_table(document.rank_table, source="rank table")


def accuracy_table(rank_table: Sequence[Sequence[float]], *, source: str) -> AccuracyTable:
    """A checked table.

    Raises:
        InputError: see `read_accuracies`.
    """
    rows = tuple(tuple(float(value) for value in row) for row in rank_table)
    if not rows:
        raise InputError("The rank table is empty; it needs a list per depth.")
    for depth, row in enumerate(rows, start=1):
        _check_values(depth, row)
    if _looks_cumulative(rows):
        raise InputError(
            f"Depth 1 reads {shown(list(rows[0]))}: values that only rise are cumulative (top-1, top-2, ...), but each "
            "rank's own probability is expected; subtract from every value the one before it."
        )
    for depth, row in enumerate(rows, start=1):
        if math.fsum(row) > 1 + _TOLERANCE:
            raise InputError(
                f"The ranks of depth {depth} add up to {math.fsum(row):.4f}; at most one of them can be right at a "
                "position, so at most 1. Are these cumulative values, or counts?"
            )
    return AccuracyTable(rank_table=rows, repeat_last=False, source=source)


def acceptance_vector(values: Sequence[Any], *, source: str) -> AccuracyTable:
    """Sequoia's vector: a leading 0 so that index = child number, and the share that no child took last.

    Raises:
        InputError: the values are no such vector.
    """
    if len(values) < 3 or not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        raise InputError(f"An acceptance vector is a list of numbers [0, p_1, .., p_W, p_none], not {shown(values)}.")
    if values[0] != 0:
        raise InputError(
            f"An acceptance vector starts with 0, so that index = child number, not with {shown(values[0])}."
        )
    checked = accuracy_table([values[1:]], source=source)  # p_none counts towards the sum
    return AccuracyTable(rank_table=(checked.rank_table[0][:-1],), repeat_last=True, source=source)


def _check_values(depth: int, row: Sequence[float]) -> None:
    if not row:
        raise InputError(f"Depth {depth} has no ranks; leave the depth out, or give the probability of each rank.")
    for rank, value in enumerate(row):
        if not math.isfinite(value) or value < 0:
            raise InputError(f"Depth {depth}, rank {rank} is {value}; a probability is a finite number from 0 to 1.")


def _looks_cumulative(rows: Sequence[Sequence[float]]) -> bool:
    """Values that never fall at any depth and somewhere rise, over more than one pair of ranks: no chance then."""
    rises = any(row[-1] > row[0] for row in rows)
    falls = any(after < before for row in rows for before, after in itertools.pairwise(row))
    pairs = sum(len(row) - 1 for row in rows)
    return rises and not falls and pairs > 1 and max(map(max, rows)) <= 1


def _split_name(path: Path) -> tuple[Path, str | None]:
    file, mark, name = path.name.rpartition("#")
    return (path.with_name(file), name) if mark and file else (path, None)


def _from_csv(text: str, name: str | None) -> AccuracyTable:
    rows = list(csv.DictReader(text.splitlines()))
    found = {row.get("Name") or f"row {index}": row for index, row in enumerate(rows, start=1)}
    if not found:
        raise InputError("The CSV has no row of values below its header.")
    if name is None and len(found) > 1:
        raise InputError(
            f"The CSV holds {', '.join(found)}; name one of them after the file, as in FILE#{next(iter(found))}."
        )
    if name is not None and name not in found:
        raise InputError(f"The CSV has no row named {name}; it holds {', '.join(found)}.")
    chosen = name or next(iter(found))
    return accuracy_table(_differences(found[chosen]), source=f"Medusa's cumulative accuracies, {chosen}")


def _differences(row: dict[str, str]) -> list[list[float]]:
    """Rank probabilities from cumulative columns, heads and ranks in order and without a gap."""
    cells = {(int(m[1]), int(m[2])): key for key in row if key and (m := _CUMULATIVE.fullmatch(key))}
    heads = sorted({head for head, _ in cells})
    if not heads or heads != list(range(len(heads))):
        raise InputError("The CSV has no columns medusa0_top1, medusa0_top2, .., medusa1_top1, ..; heads count from 0.")
    table = []
    for head in heads:
        tops = sorted(top for h, top in cells if h == head)
        if tops != list(range(1, len(tops) + 1)):
            raise InputError(f"The CSV's columns of head {head} are top {tops}; every top from 1 up is needed.")
        cumulative = [0.0, *(_number(row[cells[head, top]], cells[head, top]) for top in tops)]
        table.append([after - before for before, after in itertools.pairwise(cumulative)])
        if min(table[-1]) < 0:
            raise InputError(f"The accuracies of head {head} fall, {cumulative[1:]}; top-k accuracies are cumulative.")
    return table


def _number(text: str | None, column: str) -> float:
    try:
        return float(text or "")
    except ValueError:
        raise InputError(f"Column {column} holds {shown(text)}, which is no number.") from None
