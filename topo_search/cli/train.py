"""`topo-search train medusa`: train draft heads on text that the target writes itself."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from topo_search.cli import options

if TYPE_CHECKING:
    from topo_search.heads.medusa import MedusaBlocks
    from topo_search.target import Target
    from topo_search.training.medusa import MedusaRecipe, TrainingReport
    from topo_search.training.text import TrainingText

app = typer.Typer(help="Train draft heads, the target frozen.", no_args_is_help=True)


@app.callback()
def train() -> None:
    """Train draft heads, the target frozen."""


@app.command()
def medusa(
    out: Annotated[Path, typer.Option(help="Folder for the trained heads.")],
    target: options.Target = "demo",
    prompts: options.Prompts = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Prompts the target invents, where --prompts names none.")
    ] = 2000,
    max_new_tokens: options.MaxNewTokens = options.DEFAULT_MAX_NEW_TOKENS,
    num_heads: Annotated[int, typer.Option(min=1, help="Draft heads, one per depth.")] = 4,
    num_layers: Annotated[int, typer.Option(min=1, help="Residual blocks per head.")] = 1,
    own_projection: Annotated[
        bool, typer.Option("--own-projection", help="A trained projection per head instead of the target's.")
    ] = False,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the text.")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="Positions per step.")] = 512,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    sampled_tokens: Annotated[int, typer.Option(min=0, help="Negatives per step; 0: the whole vocabulary.")] = 4096,
    seed: options.Seed = 0,
    work: Annotated[
        Path | None, typer.Option(help="Folder for text, states and checkpoint; OUT/work by default.")
    ] = None,
    device: options.Device = "cpu",
    attention: options.Attention = "sdpa",
    tokenizer: options.Tokenizer = None,
) -> None:
    """Train Medusa heads (Medusa-1): the target writes the text, then the heads learn to run ahead of it.

    Interrupted and started again it continues.

    Example: topo-search train medusa --target demo --out my-heads
    """
    from topo_search.cli.inputs import load_model
    from topo_search.report.console import note
    from topo_search.training.medusa import MedusaRecipe

    recipe = MedusaRecipe(
        num_heads=num_heads,
        num_layers=num_layers,
        epochs=epochs,
        batch=batch,
        learning_rate=learning_rate,
        sampled_tokens=sampled_tokens,
        seed=seed,
    )
    model = load_model(target, dtype="float32", device=device, attention=attention, tokenizer=tokenizer)
    store = work or out / "work"
    text = _text(model, prompts, num_prompts=num_prompts, max_new_tokens=max_new_tokens, seed=seed, store=store)
    note(f"Training {num_heads} heads on {text.tokens.shape[0]} tokens of the target's own text ...")
    blocks, losses = _train(model, text, recipe, share_projection=not own_projection, store=store)
    _save(out, blocks, model, text, recipe, losses)
    note(f"Wrote {out}. Next: topo-search calibrate --target {target} --heads {out}")


def _text(
    model: Target, prompts: Path | None, *, num_prompts: int, max_new_tokens: int, seed: int, store: Path
) -> TrainingText:
    from topo_search.calibrate import encode_prompts
    from topo_search.files.prompts import read_prompts
    from topo_search.report.console import progress
    from topo_search.training.text import invent_prompts, packaged_openings, same_store, user_turns, write_answers

    same_store(store, {"target": model.identity.fingerprint, "max_new_tokens": max_new_tokens, "seed": seed})
    if prompts is None:
        with progress("Inventing prompts") as advance:
            turns = invent_prompts(
                model, packaged_openings(), count=num_prompts, seed=seed, store=store, progress=advance
            )
        asked = user_turns(turns)
    else:
        asked = read_prompts(prompts)
    encoded = encode_prompts(model, asked, max_new_tokens=max_new_tokens)
    with progress("Writing answers") as advance:
        return write_answers(
            model, [prompt.tokens for prompt in encoded], max_new_tokens=max_new_tokens, store=store, progress=advance
        )


def _train(
    model: Target, text: TrainingText, recipe: MedusaRecipe, *, share_projection: bool, store: Path
) -> tuple[MedusaBlocks, list[float]]:
    from topo_search.heads.medusa import untrained_blocks
    from topo_search.report.console import progress
    from topo_search.training.medusa import train_medusa

    blocks = untrained_blocks(
        model, num_heads=recipe.num_heads, num_layers=recipe.num_layers, share_projection=share_projection
    )
    last: list[float] = []
    with progress("Training") as advance:

        def report(at: TrainingReport) -> None:
            last[:] = [round(loss, 4) for loss in at.loss_per_head]
            advance(at.step, at.steps, "loss per head " + " ".join(f"{loss:.3f}" for loss in last))

        train_medusa(blocks, model.output_weight, text, recipe, checkpoint=store / "training.pt", report=report)
    return blocks, last


def _save(
    out: Path, blocks: MedusaBlocks, model: Target, text: TrainingText, recipe: MedusaRecipe, losses: list[float]
) -> None:
    """Write the heads with the record of their making."""
    import torch

    from topo_search.heads import save_medusa
    from topo_search.provenance import provenance

    record: dict[str, Any] = {
        "base_model_name_or_path": model.identity.name,
        "target_fingerprint": model.identity.fingerprint,
        "recipe": asdict(recipe),
        "training_tokens": int(text.tokens.shape[0]),
        "training_prompts": int(text.answer_of[-1]) + 1,
        "final_loss_per_head": losses,
        "provenance": provenance(),
    }
    save_medusa(out, blocks, record, dtype=torch.bfloat16)
