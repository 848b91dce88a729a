"""`topo-search heads`: what a checkpoint of draft heads holds, and the same heads for another engine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from topo_search.cli import options


def heads(
    heads: Annotated[str, typer.Argument(metavar="HEADS", help="Folder of draft heads, or a packaged name.")],
    target: options.Target = "demo",
    to: Annotated[str | None, typer.Option(help="Write them as medusa-a or medusa-b.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write them to.")] = None,
    drop_shortlist: Annotated[
        bool, typer.Option("--drop-shortlist", help="Write heads with a shortlist without it.")
    ] = False,
    dtype: options.Dtype = "bfloat16",
    as_json: options.Json = False,
) -> None:
    """Describe draft heads: family, shape, size beside the target's, training; with --to write them for other engines.

    Examples: topo-search heads demo-medusa | topo-search heads my-heads --target NAME --to medusa-a --out for-tgi
    """
    from topo_search.cli.inputs import load_model, require_heads
    from topo_search.errors import InputError
    from topo_search.report.console import note, stdout

    if (to is None) != (out is None):
        raise InputError("--to and --out belong together: a layout and the folder to write it to.")
    require_heads(heads)
    model = load_model(target, dtype=dtype, device="cpu", attention="auto", tokenizer=None, pack=False)

    from topo_search.heads.checkpoints import describe, export_heads, read_checkpoint
    from topo_search.report.tables import heads_table

    checkpoint = read_checkpoint(heads, model)
    if to is not None and out is not None:
        export_heads(checkpoint, model, out, to=to, drop_shortlist=drop_shortlist)
        note(f"Wrote {out}")
        return
    found = describe(checkpoint, model)
    if as_json:
        print(json.dumps(asdict(found) | {"share": found.share}, indent=2))  # noqa: T201
    else:
        stdout().print(heads_table(found))
