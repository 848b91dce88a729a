"""The two places where people read: stderr for progress and notes, stdout for results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_MIN_WIDTH = 100  # tables stay whole in a log file
_QUIET_SECONDS = 15.0  # without a terminal a bar cannot be redrawn: a line now and then instead

Advance = Callable[..., None]  # done, total, optional remark


def stdout() -> Console:
    """For results."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _MIN_WIDTH))


def stderr() -> Console:
    """For progress, notes and warnings."""
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=max(console.width, _MIN_WIDTH))


def note(text: str) -> None:
    """One line for people."""
    stderr().print(text, highlight=False, soft_wrap=True, markup=False)


@contextmanager
def progress(title: str) -> Iterator[Advance]:
    """A progress bar on stderr; yields a function to call with what is done, the total and a remark."""
    console = stderr()
    if not console.is_terminal:
        yield _line_progress(console, title)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[remark]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=None, remark="")

        def advance(done: int, total: int, remark: str = "") -> None:
            bar.update(task, completed=done, total=total, remark=remark)

        yield advance


def _line_progress(console: Console, title: str) -> Advance:
    last = time.monotonic()

    def advance(done: int, total: int, remark: str = "") -> None:
        nonlocal last
        if done >= total or time.monotonic() - last > _QUIET_SECONDS:
            last = time.monotonic()
            console.print(f"{title}: {done}/{total} {remark}".rstrip(), highlight=False, markup=False)

    return advance
