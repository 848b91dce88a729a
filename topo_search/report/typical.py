"""The alternatives under typical acceptance, for people."""

from __future__ import annotations

from rich.table import Table

from topo_search.search.intervals import Figure
from topo_search.search.typical import TypicalAssessment

_UNKNOWN = "-"


def typical_table(found: TypicalAssessment) -> Table:
    """Plain decoding, best chain and best tree, scored on the recording tree's steps."""
    table = Table(title=f"Typical acceptance, which changes the text: {found.prompts} prompts, {found.steps} steps")
    for name in ("", "nodes", "depth", "tokens_per_step (95 %)", "step_ms", "tokens/s (95 %)", "over plain (95 %)"):
        table.add_column(name, justify="right" if name else "left")
    for row in found.alternatives:
        own = f"{row.tokens_per_step_own:.3f}, its own score"
        table.add_row(
            row.name + (" *" if row.name == found.recommended else ""),
            str(row.tree.num_draft_nodes),
            str(row.tree.depth),
            own if row.tokens_per_step is None else _figure(row.tokens_per_step, 3),
            _UNKNOWN if row.step_ms is None else f"{row.step_ms:.1f}",
            _figure(row.tokens_per_s, 1),
            _figure(row.speedup, 2),
        )
    return table


def _figure(found: Figure | None, digits: int) -> str:
    if found is None:
        return _UNKNOWN
    if found.interval is None:
        return f"{found.value:.{digits}f}"
    return f"{found.value:.{digits}f} ({found.interval.low:.{digits}f}-{found.interval.high:.{digits}f})"
