"""`topo-search measure`: time the decoder's own step on this device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topo_search.cli import options

if TYPE_CHECKING:
    from topo_search.heads.base import DraftHeads
    from topo_search.measure import MeasureGrid
    from topo_search.target import Target


def measure(
    target: options.Target = "demo",
    heads: options.Heads = "demo-medusa",
    heads_dtype: options.HeadsDtype = None,
    max_width: Annotated[int, typer.Option(min=1, help="Largest verify width, root included.")] = 64,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the widths at which cost jumps, and neighbours.")
    ] = False,
    contexts: Annotated[str | None, typer.Option(help="Context lengths in tokens, e.g. 128,512.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Timings per shape.")] = None,
    seed: options.Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Latency file, or folder.")] = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    attention: options.Attention = "auto",
    tokenizer: options.Tokenizer = None,
    mode: options.Mode = "auto",
) -> None:
    """Time the decoder's step at every verify width and several contexts.

    Each shape is warmed up, timed in shuffled order and synchronised. Interrupted and started again it continues.

    Examples: topo-search measure | topo-search measure --quick --contexts 64,256
    """
    from topo_search.cli.inputs import load_draft_heads, load_model

    grid = _grid(max_width=max_width, quick=quick, contexts=contexts, rounds=rounds, seed=seed)
    model = load_model(target, dtype=dtype, device=device, attention=attention, tokenizer=tokenizer, mode=mode)
    run_measure(model, load_draft_heads(heads, model, dtype=heads_dtype), grid, out=out, target=target, heads=heads)


def quick_measure(model: Target, draft_heads: DraftHeads, *, out: Path, target: str, heads: str, seed: int) -> None:
    """The quick grid, as `calibrate` ends with it."""
    from topo_search.measure import MeasureGrid

    run_measure(model, draft_heads, MeasureGrid.quick(max_width=64, seed=seed), out=out, target=target, heads=heads)


def run_measure(
    model: Target, draft_heads: DraftHeads, grid: MeasureGrid, *, out: Path | None, target: str, heads: str
) -> None:
    """Measure `grid`, write the table and show it."""
    from topo_search.cli.inputs import artefact_stem, output_file
    from topo_search.files.latency_file import LATENCY_SUFFIX, write_latency
    from topo_search.files.prompts import packaged_prompts
    from topo_search.measure import measure as run
    from topo_search.provenance import provenance
    from topo_search.report.console import note, progress, stdout
    from topo_search.report.tables import latency_table

    path = output_file(out, artefact_stem(target, heads), LATENCY_SUFFIX)
    note(
        f"Timing {len(grid.widths)} widths at contexts {', '.join(map(str, grid.contexts))}, {grid.rounds} rounds; "
        "leave the machine otherwise idle ..."
    )
    with progress("Measuring") as advance:
        table = run(
            model,
            draft_heads,
            grid,
            _context_text(
                model,
                [m["content"] for p in packaged_prompts(workload=None, split="calibration") for m in p.messages or ()],
            ),
            partial=path.with_name(path.name + ".part"),
            provenance=provenance(),
            progress=lambda done, total: advance(done, total, "rounds"),
        )
    write_latency(path, table)
    stdout().print(latency_table(table))
    if model.note:
        note(f"Note: the target is {model.note}.")
    note(f"Wrote {path}")


def _context_text(model: Target, texts: list[str]) -> list[int]:
    """Real text to fill the cache with."""
    ids: list[int] = model.tokenizer("\n".join(texts), add_special_tokens=False).input_ids
    return ids


def _grid(*, max_width: int, quick: bool, contexts: str | None, rounds: int | None, seed: int) -> MeasureGrid:
    from topo_search.errors import InputError
    from topo_search.measure import MeasureGrid

    make = MeasureGrid.quick if quick else MeasureGrid.full
    grid = make(max_width=max_width, seed=seed)
    try:
        lengths = grid.contexts if contexts is None else tuple(sorted({int(part) for part in contexts.split(",")}))
    except ValueError:
        raise InputError(f"--contexts {contexts} must be numbers separated by commas, e.g. 128,512.") from None
    return MeasureGrid(widths=grid.widths, contexts=lengths, rounds=rounds or grid.rounds, seed=seed)
