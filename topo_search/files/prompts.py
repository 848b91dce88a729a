"""Prompt sets: JSON lines, the user's own or the ones that ship with the package.

A row holds exactly one of `messages` (a chat), `prompt` (one user turn) and `text` (raw text, no chat template), and
optionally `id`, `workload` and `split`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from topo_search.errors import InputError
from topo_search.files.documents import Document, parse_json, validated
from topo_search.files.reading import read_text
from topo_search.resources import packaged

WORKLOADS = ("chat", "code", "math", "json")
SPLITS = ("calibration", "evaluation", "all")
_MAX_BYTES = 64 * 2**20
_HINT = 'a row is such as {"prompt": "Hello"}, with messages or text in its place, and optional id, workload and split'


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: a chat or raw text, never both.

    Attributes:
        id: unique within its file.
        workload: e.g. `code`.
        split: `calibration`, `evaluation`, or null where the row names none.
        messages: the chat, each message with `role` and `content`; null for raw text.
        text: raw text for the target as it stands; null for a chat.
    """

    id: str
    workload: str
    split: str | None
    messages: tuple[dict[str, str], ...] | None
    text: str | None


def _filled(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


_Text = Annotated[str, AfterValidator(_filled)]


class _Message(Document):
    role: _Text
    content: _Text


class _Row(Document):
    messages: Annotated[list[_Message], Field(min_length=1)] | None = None
    prompt: _Text | None = None
    text: _Text | None = None
    id: _Text | None = None
    workload: _Text = "default"
    split: Literal["calibration", "evaluation"] | None = None

    @model_validator(mode="after")
    def _check(self) -> _Row:
        given = [name for name in ("messages", "prompt", "text") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"must hold exactly one of messages, prompt and text, not {' and '.join(given) or 'none'}")
        return self

    def chat(self) -> tuple[dict[str, str], ...] | None:
        """The row's messages; a `prompt` is one user turn."""
        if self.prompt is not None:
            return ({"role": "user", "content": self.prompt},)
        return None if self.messages is None else tuple(message.model_dump() for message in self.messages)


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a JSON lines file, in order; blank lines are skipped.

    A row without `id` is named `<file stem>-<line number>`; one without `workload` gets `default`.

    Raises:
        InputError: the file is missing, empty or not UTF-8, a row breaks a rule, or an id occurs twice; the message
            names the file, the line and the rule.
    """
    lines = read_text(path, max_bytes=_MAX_BYTES).split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise InputError(f"{path} holds no prompt; {_HINT}.")
    prompts = [_prompt(path, number, line) for number, line in numbered]
    _check_ids(path, prompts, [number for number, _ in numbered])
    return prompts


def packaged_prompts(*, workload: str | None, split: str) -> list[Prompt]:
    """The shipped prompts of one workload (all of them for null) and split.

    Args:
        workload: one of `WORKLOADS`, or null.
        split: one of `SPLITS`.

    Raises:
        InputError: an unknown workload or split; the message names the choices.
    """
    if workload is not None and workload not in WORKLOADS:
        raise InputError(f"There is no packaged workload {workload!r}; choose one of {', '.join(WORKLOADS)}.")
    folder = packaged("calibration/prompts")
    names = WORKLOADS if workload is None else (workload,)
    prompts = [prompt for name in names for prompt in read_prompts(folder / f"{name}.jsonl")]
    return select_prompts(prompts, None, split)


def select_prompts(prompts: Sequence[Prompt], workload: str | None, split: str) -> list[Prompt]:
    """The prompts of one workload (any for null) and split (`all` takes those without one too).

    Raises:
        InputError: an unknown split, or no prompt is left; the message names the choices.
    """
    if split not in SPLITS:
        raise InputError(f"There is no split {split!r}; choose one of {', '.join(SPLITS)}.")
    of_workload = [prompt for prompt in prompts if workload in (None, prompt.workload)]
    if not of_workload:
        raise InputError(f"No prompt has workload {workload!r}; found: {_listed(p.workload for p in prompts)}.")
    chosen = [prompt for prompt in of_workload if split in ("all", prompt.split)]
    if not chosen:
        found = _listed(p.split or "no split" for p in of_workload)
        raise InputError(f"No prompt has split {split!r}; found: {found}. Name the split in each row, or take all.")
    return chosen


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names))) or "none"


def _prompt(path: Path, number: int, line: str) -> Prompt:
    where = f"{path}, line {number}"
    parse_json(where, line)
    row = validated(where, line, _Row, hint=_HINT)
    return Prompt(
        id=row.id or f"{path.stem}-{number}",
        workload=row.workload,
        split=row.split,
        messages=row.chat(),
        text=row.text,
    )


def _check_ids(path: Path, prompts: Sequence[Prompt], numbers: Sequence[int]) -> None:
    line_of: dict[str, int] = {}
    for prompt, number in zip(prompts, numbers, strict=True):
        if prompt.id in line_of:
            raise InputError(
                f"{path}, line {number}: id {prompt.id!r} is already that of line {line_of[prompt.id]}; "
                "give each prompt its own."
            )
        line_of[prompt.id] = number
