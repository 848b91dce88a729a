"""`topo-search train medusa-2`: heads and target together, into a new target and its heads."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from topo_search.cli import options, training_options
from topo_search.cli.training_job import Job, job_of
from topo_search.cli.training_run import (
    held_out_figures,
    record_of,
    report_figures,
    told_when_interrupted,
    train_with_progress,
    trained_heads,
)
from topo_search.cli.training_texts import agreement_of, corpus_of, require_readable, split_each, training_texts
from topo_search.errors import InputError

if TYPE_CHECKING:
    from topo_search.target import Target
    from topo_search.training.heads import Corpus
    from topo_search.training.joint import Adapted, Drift, JointRecipe
    from topo_search.training.loss import HeadLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joint:
    """What Medusa-2 is asked for beside what every kind of training is."""

    recipe: JointRecipe
    heads: str | None
    num_texts: int
    num_layers: int
    own_projection: bool


def medusa_2(
    out: Annotated[Path, typer.Option(help="Folder for the new target (OUT/target) and its heads (OUT/heads).")],
    target: options.Target = "demo",
    text: training_options.Text = None,
    prompts: options.Prompts = None,
    num_prompts: training_options.NumPrompts = options.DEFAULT_TRAINING_PROMPTS,
    max_new_tokens: options.MaxNewTokens = options.DEFAULT_MAX_NEW_TOKENS,
    num_texts: Annotated[int, typer.Option(min=0, help="Use at most this many of the texts; 0: all.")] = 0,
    heads: Annotated[
        str | None, typer.Option(help="Start from these trained heads, of any family, instead of warming up new ones.")
    ] = None,
    num_heads: training_options.NumHeads = 5,
    num_layers: training_options.NumLayers = 1,
    own_projection: training_options.OwnProjection = False,
    warmup_epochs: Annotated[int, typer.Option(min=1, help="Passes with the target frozen, heads alone.")] = 2,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the text, heads and target together.")] = 1,
    batch_texts: training_options.BatchTexts = 8,
    learning_rate: training_options.LearningRate = 1e-3,
    backbone_learning_rate: Annotated[float, typer.Option(min=0.0, help="Peak learning rate of the target.")] = 2.5e-4,
    heads_weight: Annotated[
        float, typer.Option(min=0.0, help="Weight of the heads' losses beside the language loss.")
    ] = 0.2,
    head_decay: training_options.HeadDecay = 0.8,
    language_loss: Annotated[
        Literal["original", "text"],
        typer.Option(help="KL from the original target, or the text's tokens (where they are its training text)."),
    ] = "original",
    lora_rank: Annotated[int, typer.Option(min=1, help="Rank of the target's adapters.")] = 32,
    lora_alpha: Annotated[int, typer.Option(min=1, help="Scale of the target's adapters times their rank.")] = 16,
    sampled_tokens: training_options.SampledTokens = 2048,
    held_out: training_options.HeldOutShare = 0.05,
    seed: options.Seed = 0,
    work: training_options.Work = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    attention: options.Attention = "auto",
    tokenizer: options.Tokenizer = None,
) -> None:
    """Train Medusa heads and the target together (Medusa-2, arXiv 2401.10774, section 2.2.2) into a new target.

    The target learns through low-rank adapters (extra `lora`), which are merged in the end. Its drift from the
    original is reported. Interrupted and started again it continues.

    Example: topo-search train medusa-2 --target demo --heads demo-medusa --text text --num-texts 300 --out joint
    """
    from topo_search.training.joint import JointRecipe, require_peft

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("Medusa-2 trains in one process; start it without accelerate launch.")
    require_peft()
    given = locals()
    shared = {"shortlist": 0, "ordinary_text": None, "distill": 0.0, "learn_prompts": False, "quantize": None}
    job = job_of(given | shared | {"epochs": warmup_epochs})
    names = (
        *("epochs", "batch_texts", "learning_rate", "backbone_learning_rate", "heads_weight", "head_decay"),
        *("language_loss", "lora_rank", "lora_alpha", "sampled_tokens", "seed"),
    )
    joint = _Joint(
        recipe=JointRecipe(**{name: given[name] for name in names}),
        heads=heads,
        num_texts=num_texts,
        num_layers=num_layers,
        own_projection=own_projection,
    )
    _run(job, joint)


def _run(job: Job, joint: _Joint) -> None:
    """Text, states, both stages, then the files."""
    from topo_search.cli.inputs import load_model
    from topo_search.training.joint import Adapted
    from topo_search.training.text import join_texts

    require_readable(job)
    model = load_model(
        job.target, dtype=job.dtype, device=job.device, attention=job.attention, tokenizer=job.tokenizer, pack=False
    )
    texts = training_texts(model, job)
    if joint.num_texts:
        whole = join_texts(texts)
        texts = [whole.select(range(min(joint.num_texts, len(whole.prompt_lengths))))]
    kept_texts, held_texts = split_each(job, texts)
    corpus = corpus_of(model, job, kept_texts, "the training text", epochs=job.recipe.epochs)
    held = corpus_of(model, job, held_texts, "held-out text")
    agreement = agreement_of(model, corpus)
    warm, together = job.work / "warmup.pt", job.work / "joint.pt"
    if joint.heads is None:
        loss = _fresh_heads(job, joint, model)
        seconds, recipe = train_with_progress(job, loss, [corpus], warm), joint.recipe
    else:
        job, loss, fingerprint = trained_heads(job, joint.heads, model)
        seconds, recipe = 0.0, replace(joint.recipe, started_from=fingerprint)
    adapted = Adapted(model, rank=recipe.lora_rank, alpha=recipe.lora_alpha, seed=recipe.seed)
    seconds += _train_together(job, recipe, adapted, loss, corpus, together)
    _finish(
        job, recipe, adapted, loss, held, {"answers": join_texts(texts), "agreement": agreement, "seconds": seconds}
    )
    for checkpoint in (warm, together):
        checkpoint.unlink(missing_ok=True)


def _fresh_heads(job: Job, joint: _Joint, model: Target) -> HeadLoss:
    from topo_search.heads.medusa import untrained_blocks
    from topo_search.training.loss import HeadLoss

    blocks = untrained_blocks(
        model, num_heads=job.num_heads, num_layers=joint.num_layers, share_projection=not joint.own_projection
    )
    return HeadLoss(blocks.float().to(model.device), model.output_weight.float(), model.input_embeddings)


def _train_together(
    job: Job, recipe: JointRecipe, adapted: Adapted, loss: HeadLoss, corpus: Corpus, checkpoint: Path
) -> float:
    from topo_search.report.console import note, progress
    from topo_search.training.joint import JointReport, train_jointly

    weights = sum(weight.numel() for weight in adapted.weights.values())
    note(f"Training heads and target together, the target through {weights / 1e6:.1f} M adapter weights ...")
    with progress("Training together") as advance, told_when_interrupted():

        def report(at: JointReport) -> None:
            losses = " ".join(f"{value:.3f}" for value in at.loss_per_head)
            advance(at.step, at.steps, f"language loss {at.language_loss:.4f}, loss per head {losses}")

        return train_jointly(
            adapted, loss, corpus, recipe, num_heads=job.num_heads, checkpoint=checkpoint, report=report
        )


def _finish(
    job: Job, recipe: JointRecipe, adapted: Adapted, loss: HeadLoss, held: Corpus, about: dict[str, Any]
) -> None:
    """Merge, measure the drift, write target and heads, report."""
    import torch

    from topo_search.heads import save_heads
    from topo_search.report.console import note
    from topo_search.training.joint import drift, greedy_texts, save_target

    original = adapted.target.identity
    with adapted.original():
        original_texts = greedy_texts(adapted.target, held.text)
    model = adapted.merged(str(job.out / "target"))
    moved, new = None, corpus_of(model, job, [held.text], "held-out text, by the new target")
    if len(held.text.prompt_lengths):
        moved = drift(model, held.text, original_states=held.states, states=new.states, original_texts=original_texts)
    figures = held_out_figures(job, loss, new)
    record = record_of(job, model, loss, about["answers"], figures, about["seconds"]) | {
        "text_agreement": round(about["agreement"], 4),
        "warmup_recipe": asdict(job.recipe) if recipe.started_from is None else None,
        "recipe": asdict(recipe),
        "original_target": asdict(original),
        "drift": None if moved is None else asdict(moved),
    }
    save_target(model, job.out / "target")
    save_heads(job.out / "heads", loss.blocks, record, token_map=loss.token_map, dtype=torch.bfloat16)
    report_figures(record, figures)
    _report_drift(moved)
    where = f"--target {job.out / 'target'} --heads {job.out / 'heads'}"
    note(f"Wrote {job.out}. Next: topo-search calibrate {where}")


def _report_drift(moved: Drift | None) -> None:
    from topo_search.report.console import note

    if moved is None:
        note("No text was held out, so the drift from the original target is unknown.")
        return
    note(
        f"Drift from the original target on held-out text: mean KL {moved.kl:.2g} nats over {moved.positions} "
        f"positions; {100 * moved.equal_text:.0f} % of {moved.prompts} greedy texts of {moved.new_tokens} tokens are "
        f"equal, {100 * moved.equal_leading_tokens:.0f} % of their leading tokens."
    )
