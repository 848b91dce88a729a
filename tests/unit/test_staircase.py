"""The staircase on the terminal and as a picture."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from factories import latency_table, timing
from rich.console import Console

from topo_search.cost import OUT_OF_MEMORY, LatencyTable, Timing
from topo_search.errors import InputError
from topo_search.report.staircase import jumps, plot_staircase, require_plot, staircase_tables

STAIRS = {1: 10.0, 2: 10.5, 4: 11.0, 5: 30.0, 8: 31.0, 16: 35.0}


def shown(latency: LatencyTable) -> str:
    console = Console(file=io.StringIO(), width=100, no_color=True)
    for table in staircase_tables(latency):
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_jump_is_steep_and_beyond_the_spread() -> None:
    table = latency_table(STAIRS)
    assert jumps(table, 16) == {5}
    table.verify[1, 16, 5] = Timing(median_ms=30.0, p10_ms=10.9, p90_ms=40.0, count=5)  # it may be no slower at all
    assert jumps(table, 16) == set()
    even = latency_table({width: 10.0 + width for width in (1, 2, 3, 4, 48)})
    assert jumps(even, 16) == set()  # a wide gap between measured widths is no jump
    assert jumps(latency_table({1: 10.0}), 16) == set()


def test_widths_that_did_not_fit_have_no_jump() -> None:
    table = latency_table(STAIRS)
    table.verify[1, 16, 5] = Timing(median_ms=None, p10_ms=None, p90_ms=None, count=0, status=OUT_OF_MEMORY)
    assert jumps(table, 16) == {8}
    assert "out of memory" in shown(table)


def test_every_width_context_and_draft_is_shown() -> None:
    table = latency_table(STAIRS, [0.5, 0.75], contexts={64: 1.0, 256: 2.0})
    table.verify[4, 64, 1] = timing(77.0)
    text = shown(table)
    for words in ("batch 1", "batch 4", "at 64 tokens", "at 256 tokens", "77.0 (77.0-77.0)", "0.8 (0.8-0.8)"):
        assert words in text
    rows = [line for line in text.splitlines() if "30.0 (30.0-30.0)" in line]
    assert len(rows) == 1 and rows[0].count("jump") == 2 and "3.00 x" in rows[0]
    bars = {
        ms: next(line.count("━") for line in text.splitlines() if f"{ms:.1f} ({ms:.1f}" in line) for ms in (10.0, 35.0)
    }
    assert bars[35.0] > 2 * bars[10.0] > 0


def test_drafts_by_expanded_nodes_have_a_column_each() -> None:
    table = latency_table({1: 10.0})
    table.draft.clear()
    table.draft.update({(1, 1, 1): timing(2.0), (1, 2, 1): timing(3.0), (1, 2, 16): timing(9.0)})
    text = shown(table)
    assert "nodes expanded at every depth below" in " ".join(text.split())
    row = next(line for line in text.splitlines() if "9.0 (9.0-9.0)" in line)
    assert "3.0 (3.0-3.0)" in row


# The picture


class Drawn:
    """Stands in for matplotlib's figure and axes, and keeps what it is told to draw."""

    last: Drawn

    def __init__(self, **_: Any) -> None:
        self.lines: list[tuple[list[int], list[float], str]] = []
        Drawn.last = self

    def add_subplot(self) -> Drawn:
        return self

    def plot(self, x: list[int], y: list[float], *, marker: str, label: str) -> None:
        del marker
        self.lines.append((x, y, label))

    def savefig(self, file: io.BytesIO, **_: Any) -> None:
        file.write(b"picture")

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@pytest.fixture
def matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of that name, since the real one need not be installed."""
    figure = ModuleType("matplotlib.figure")
    figure.Figure = Drawn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", figure)


@pytest.mark.usefixtures("matplotlib")
def test_a_picture_has_a_line_per_batch_and_context(tmp_path: Path) -> None:
    table = latency_table(STAIRS, contexts={64: 1.0, 256: 2.0})
    table.verify[4, 64, 1] = timing(77.0)
    table.verify[1, 64, 5] = Timing(median_ms=None, p10_ms=None, p90_ms=None, count=0, status=OUT_OF_MEMORY)
    plot_staircase(table, tmp_path / "stairs.png")
    assert (tmp_path / "stairs.png").read_bytes() == b"picture"
    assert [label for *_, label in Drawn.last.lines] == [
        "batch 1, 64 tokens",
        "batch 1, 256 tokens",
        "batch 4, 64 tokens",
    ]
    widths, medians, _ = Drawn.last.lines[0]
    assert (widths, medians) == ([1, 2, 4, 8, 16], [10.0, 10.5, 11.0, 31.0, 35.0])


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"pip install 'topo-search\[plot\]'"):
        plot_staircase(latency_table(STAIRS), tmp_path / "stairs.png")
    with pytest.raises(InputError, match=r"must name a \.png file"):
        require_plot(tmp_path / "stairs.svg")
    assert not list(tmp_path.iterdir())


def test_the_real_matplotlib_draws_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    plot_staircase(latency_table(STAIRS), tmp_path / "stairs.png")
    assert (tmp_path / "stairs.png").read_bytes().startswith(b"\x89PNG")
