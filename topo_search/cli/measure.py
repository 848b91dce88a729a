"""`topo-search measure`: time the decoder's own step on this device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from topo_search.cli import options

if TYPE_CHECKING:
    from topo_search.cost import LatencyTable
    from topo_search.heads.base import DraftHeads
    from topo_search.measure import MeasureGrid
    from topo_search.target import Target

_BUSY = 0.05  # share of all processors' time that other work may take unnoticed


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
    batches: Annotated[str, typer.Option(help="Sequences that one step serves, e.g. 1,4.")] = "1",
    seed: options.Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Latency file, or folder.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of the staircase; needs the extra `plot`.")] = None,
    dtype: options.Dtype = "float32",
    quantize: options.Quantize = None,
    device: options.Device = "cpu",
    attention: options.Attention = "auto",
    tokenizer: options.Tokenizer = None,
    mode: options.Mode = "auto",
) -> None:
    """Time the decoder's step at every verify width, several contexts and batches, and what drafting costs.

    Each shape is warmed up, then its whole step timed as decoding pays for it, in shuffled order, synchronised. Times
    that other work disturbed are taken again, within a bound. Interrupted and started again it continues.

    Examples: topo-search measure | topo-search measure --quick --contexts 64,256 --batches 1,4
    """
    from topo_search.cli.inputs import artefact_stem, load_draft_heads, load_model, require_heads

    grid = _grid(max_width=max_width, quick=quick, contexts=contexts, rounds=rounds, batches=batches, seed=seed)
    if plot is not None:
        from topo_search.report.staircase import require_plot

        require_plot(plot)
    require_heads(heads)
    model = load_model(
        target, dtype=dtype, device=device, attention=attention, tokenizer=tokenizer, quantize=quantize, mode=mode
    )
    stem = artefact_stem(target, quantize or "", heads)
    found = run_measure(model, load_draft_heads(heads, model, dtype=heads_dtype), grid, out=out, stem=stem)
    if plot is not None:
        from topo_search.report.console import note
        from topo_search.report.staircase import plot_staircase

        plot_staircase(found, plot)
        note(f"Wrote {plot}")


def quick_measure(model: Target, draft_heads: DraftHeads, *, out: Path, stem: str, seed: int) -> None:
    """The quick grid, as `calibrate` ends with it."""
    from topo_search.measure import MeasureGrid

    run_measure(model, draft_heads, MeasureGrid.quick(max_width=64, seed=seed), out=out, stem=stem)


def run_measure(
    model: Target, draft_heads: DraftHeads, grid: MeasureGrid, *, out: Path | None, stem: str
) -> LatencyTable:
    """Measure `grid`, write the table, named `stem` unless `out` is a file, and show it."""
    from topo_search.cli.inputs import output_file
    from topo_search.files.latency_file import LATENCY_SUFFIX, write_latency
    from topo_search.files.prompts import packaged_prompts
    from topo_search.measure import measure as run
    from topo_search.provenance import provenance
    from topo_search.report.console import note, progress, stdout
    from topo_search.report.staircase import staircase_tables

    path = output_file(out, stem, LATENCY_SUFFIX)
    note(
        f"Timing {len(grid.widths)} widths at contexts {', '.join(map(str, grid.contexts))}, batch "
        f"{', '.join(map(str, grid.batches))}, {grid.rounds} rounds; leave the machine otherwise idle ..."
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
    for part in staircase_tables(table):
        stdout().print(part)
    for line in _host_lines(table.provenance["timing"]):
        note(line)
    if model.note:
        note(f"Note: the target is {model.note}.")
    note(f"Wrote {path}")
    return table


def _host_lines(timing: dict[str, Any]) -> list[str]:
    """How quiet the machine was, in words."""
    share, again = timing["host"]["other_cpu_share"], timing["taken_again"]
    lines = [f"{again} times were taken again: other work had disturbed them, or they scattered."] if again else []
    if share is not None and share > _BUSY:
        lines.append(
            f"Warning: other work took {100 * share:.0f} % of this machine's processors meanwhile; times are higher "
            "and scatter more than on an idle one. Stop it and measure again."
        )
    return lines


def _context_text(model: Target, texts: list[str]) -> list[int]:
    """Real text to fill the cache with."""
    ids: list[int] = model.tokenizer("\n".join(texts), add_special_tokens=False).input_ids
    return ids


def _grid(
    *, max_width: int, quick: bool, contexts: str | None, rounds: int | None, batches: str, seed: int
) -> MeasureGrid:
    from dataclasses import replace

    from topo_search.measure import MeasureGrid

    make = MeasureGrid.quick if quick else MeasureGrid.full
    grid = make(max_width=max_width, seed=seed)
    return replace(
        grid,
        contexts=grid.contexts if contexts is None else _numbers("--contexts", contexts, "128,512"),
        rounds=rounds or grid.rounds,
        batches=_numbers("--batches", batches, "1,4"),
    )


def _numbers(option: str, given: str, example: str) -> tuple[int, ...]:
    """Ascending, each once."""
    from topo_search.errors import InputError

    try:
        return tuple(sorted({int(part) for part in given.split(",")}))
    except ValueError:
        raise InputError(f"{option} {given} must be numbers separated by commas, e.g. {example}.") from None
