"""What the `topo-search train` commands share: heads new or trained, training, held-out report, files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topo_search.cli.training_job import Job
from topo_search.cli.training_texts import (
    agreement_of,
    corpus_of,
    learned_from,
    require_readable,
    split_each,
    training_texts,
)
from topo_search.errors import InputError

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from torch import Tensor, nn

    from topo_search.target import Target
    from topo_search.training.heads import Corpus, HeldOut
    from topo_search.training.loss import HeadLoss
    from topo_search.training.text import TrainingText

    _Heads = Callable[[TrainingText, float], HeadLoss]  # by the text to learn from and the size of its states

_HISTORY = ("recipe", "training_text", "held_out", "training_seconds", "provenance", "earlier")
_TOLD = ("recipe", "training_text")
_HELD_OUT_BY = "prompt"  # what decides whether a text is held out, beside the seed
_WIDE_MARGIN = 5.0  # points by which a share of the held-out rows may be off, at 95 %, before it is said


def run_training(job: Job, untrained: Callable[[Target, float], nn.Module]) -> None:
    """Train new heads; `untrained` makes them for a target whose states have the given size."""
    _run(job, lambda model: (job, lambda text, gain: _new_heads(job, untrained, model, text, gain)))


def run_further(job: Job, heads: str) -> None:
    """Train the heads that `heads` names further.

    Raises:
        InputError: there are none of that name, they have a bias in their projection, or --out is their folder.
    """
    from topo_search.heads.checkpoints import heads_folder

    if heads_folder(heads).resolve() == job.out.resolve():
        raise InputError(f"--out {job.out} holds the heads that --heads names; give another folder, lest they be lost.")

    def begin(model: Target) -> tuple[Job, _Heads]:
        going_on, loss, fingerprint = trained_heads(job, heads, model)
        recipe = replace(job.recipe, started_from=fingerprint)
        return replace(going_on, recipe=recipe), lambda _, __: loss

    _run(job, begin)


def _run(job: Job, begin: Callable[[Target], tuple[Job, _Heads]]) -> None:
    """Train, in the first process with a word about it; the others are silent save for errors."""
    accelerator = _accelerator(job.device)
    is_first = accelerator is None or accelerator.is_main_process
    with nullcontext() if is_first else redirect_stderr(StringIO()):
        _train_and_save(job, begin, accelerator)


def _train_and_save(job: Job, begin: Callable[[Target], tuple[Job, _Heads]], accelerator: Accelerator | None) -> None:
    """Text, states, training, report, checkpoint."""
    import torch

    from topo_search.cli.inputs import load_model
    from topo_search.heads import save_heads
    from topo_search.report.console import note
    from topo_search.training.text import join_texts

    require_readable(job)
    device = job.device if accelerator is None else str(accelerator.device)
    model = load_model(
        job.target,
        dtype=job.dtype,
        device=device,
        attention=job.attention,
        tokenizer=job.tokenizer,
        quantize=job.quantize,
    )
    job, heads = begin(model)
    with _first(accelerator):
        texts = training_texts(model, job)
    kept, held = split_each(job, texts)
    with _first(accelerator):
        own = corpus_of(model, job, kept, "the target's own text", epochs=job.recipe.epochs)
        corpora = learned_from(model, job, kept, own)
        held_out = corpus_of(model, job, held, "held-out text")
    agreement = agreement_of(model, own)
    torch.manual_seed(job.recipe.seed)
    sample = own.states.rows(torch.arange(min(len(own.states), 4096)))
    loss = heads(own.text, float(sample.pow(2).mean().sqrt()))
    checkpoint = job.work / "training.pt"
    seconds = train_with_progress(job, loss, corpora, checkpoint, accelerator)
    if accelerator is not None and not accelerator.is_main_process:
        return
    figures = held_out_figures(job, loss, held_out)
    record = record_of(job, model, loss, join_texts(texts), figures, seconds) | {"text_agreement": round(agreement, 4)}
    save_heads(job.out, loss.blocks, record, token_map=loss.token_map, dtype=torch.bfloat16)
    checkpoint.unlink(missing_ok=True)
    report_figures(record, figures)
    note(f"Wrote {job.out}. Next: topo-search calibrate --target {job.target} --heads {job.out}")


def held_out_figures(job: Job, loss: HeadLoss, corpus: Corpus) -> HeldOut | None:
    """Figures of the heads on held-out text; None where there is none."""
    from topo_search.training.heads import evaluate

    if not len(corpus.text.prompt_lengths):
        return None
    return evaluate(loss, corpus.text, corpus.states, num_heads=job.num_heads)


def _accelerator(device: str) -> Accelerator | None:
    """Where `accelerate launch` started several processes."""
    from topo_search.report.console import note

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        if {"ACCELERATE_USE_CPU", "MASTER_PORT"} <= os.environ.keys():
            note("Warning: accelerate launch --cpu starts one process only; several on CPUs need --multi_gpu instead.")
        return None
    from accelerate import Accelerator

    return Accelerator(cpu=device == "cpu")


def _first(accelerator: Accelerator | None) -> Any:
    """The first process writes what the others then read."""
    return nullcontext() if accelerator is None else accelerator.main_process_first()


def _new_heads(
    job: Job, untrained: Callable[[Target, float], nn.Module], model: Target, text: TrainingText, gain: float
) -> HeadLoss:
    from topo_search.training.loss import HeadLoss, shorten_projection

    token_map = _shortlist(text, job.shortlist)
    blocks = untrained(model, gain).float().to(model.device)
    shorten_projection(blocks, token_map)
    return HeadLoss(
        blocks,
        model.output_weight.float(),
        model.input_embeddings,
        token_map=token_map,
        distill=job.recipe.distill,
    )


def trained_heads(job: Job, spec: str, model: Target) -> tuple[Job, HeadLoss, str]:
    """A job that goes on from trained heads, their loss and fingerprint; warns where they may know what is held out.

    Raises:
        InputError: there are none of that name, or they have a bias in their projection.
        MismatchError: they belong to another target.
    """
    from topo_search.heads.checkpoints import read_checkpoint
    from topo_search.training.loss import HeadLoss

    checkpoint = read_checkpoint(spec, model)
    if getattr(checkpoint.blocks, "projection_bias", None) is not None:
        raise InputError(f"Heads {spec} have a bias in their projection, which is not trained; train new ones.")
    blocks, token_map = checkpoint.blocks.float().to(model.device), checkpoint.token_map
    loss = HeadLoss(
        blocks, model.output_weight.float(), model.input_embeddings, token_map=token_map, distill=job.recipe.distill
    )
    _warn_of_text_known(job, spec, checkpoint.config)
    earlier = {key: checkpoint.config[key] for key in _HISTORY if key in checkpoint.config}
    return replace(job, num_heads=loss.num_heads, earlier=earlier), loss, checkpoint.fingerprint


def _warn_of_text_known(job: Job, heads: str, config: dict[str, Any]) -> None:
    """Say where heads may have learned from what is held out now, in any of the trainings they went through."""
    from topo_search.report.console import note

    record: Any = config
    while job.held_out > 0 and isinstance(record, dict):
        recipe, text = (found if isinstance(found := record.get(key), dict) else {} for key in _TOLD)
        known = text.get("held_out_by") == _HELD_OUT_BY
        seed, share = (recipe.get("seed"), text.get("held_out_share")) if known else (None, None)
        if not isinstance(share, int | float) or seed != job.recipe.seed or share < job.held_out:
            told = seed is not None and share is not None
            how = f"--seed {seed} --held-out {share}" if told else "nobody recorded which texts were held out"
            note(
                f"Warning: heads {heads} may know some of the text that is held out now, and figures on it would "
                f"flatter them; when they were trained: {how}."
            )
            return
        record = record.get("earlier")


def _shortlist(text: TrainingText, size: int) -> Tensor | None:
    """The most frequent answer tokens of the training texts."""
    if size == 0:
        return None
    import torch

    from topo_search.heads.projection import shortlist_of
    from topo_search.report.console import note
    from topo_search.training.text import answer_positions

    answers = text.tokens[answer_positions(text)]
    counts = torch.bincount(answers)
    token_map = shortlist_of(counts, size)
    share = float(counts[token_map].sum() / counts.sum())
    note(f"Drafting from {len(token_map)} tokens, which are {100 * share:.2f} % of the training answers.")
    return token_map


def train_with_progress(
    job: Job, loss: HeadLoss, corpora: list[Corpus], checkpoint: Path, accelerator: Accelerator | None = None
) -> float:
    """`train_heads` with a progress bar."""
    from topo_search.report.console import note, progress
    from topo_search.training.heads import TrainingReport, train_heads

    tokens = sum(corpus.text.answer_tokens for corpus in corpora)
    note(f"Training {job.num_heads} heads on {tokens} tokens ...")
    with progress("Training") as advance, told_when_interrupted():

        def report(at: TrainingReport) -> None:
            losses = " ".join(f"{value:.3f}" for value in at.loss_per_head)
            advance(at.step, at.steps, f"loss per head {losses}" if losses else "continued from the checkpoint")

        return train_heads(
            loss,
            corpora,
            job.recipe,
            num_heads=job.num_heads,
            checkpoint=checkpoint,
            report=report,
            accelerator=accelerator,
        )


@contextmanager
def told_when_interrupted() -> Iterator[None]:
    """Say that nothing is lost by an interruption."""
    from topo_search.report.console import note

    try:
        yield
    except KeyboardInterrupt:
        note("Interrupted; the same command goes on from the last checkpoint.")
        raise


def record_of(
    job: Job, model: Target, loss: HeadLoss, text: TrainingText, held: HeldOut | None, seconds: float
) -> dict[str, Any]:
    """How the heads came to be."""
    from topo_search.provenance import provenance
    from topo_search.training.states import parameter_count

    parameters = sum(parameter.numel() for parameter in loss.blocks.parameters())
    return {
        "base_model_name_or_path": model.identity.name,
        "target_fingerprint": model.identity.fingerprint,
        "recipe": asdict(job.recipe),
        "training_text": {
            "digest": text.digest,
            "answers": len(text.prompt_lengths),
            "answer_tokens": text.answer_tokens,
            "ordinary": [hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in job.ordinary],
            "held_out_share": job.held_out,
            "held_out_by": _HELD_OUT_BY,
        },
        "held_out": None if held is None else asdict(held),
        "training_seconds": round(seconds, 1),
        **({} if job.earlier is None else {"earlier": job.earlier}),
        "parameters": parameters,
        "share_of_target_parameters": round(parameters / parameter_count(model.model), 4),
        "provenance": provenance(),
    }


def report_figures(record: dict[str, Any], held: HeldOut | None) -> None:
    """Say how good the heads are and what they cost."""
    from topo_search.report.console import note

    if held is None:
        note("No text was held out, so loss and accuracy on unseen text are unknown; more prompts or --held-out help.")
    depths = [] if held is None else zip(held.loss, held.accuracy, held.accuracy_given_path, strict=True)
    for depth, figures in enumerate(depths, start=1):
        loss, accuracy, given = figures
        note(
            f"Head {depth} on held-out text: loss {loss:.3f}, accuracy {100 * accuracy:.1f} %, "
            f"given the path {100 * given:.1f} %"
        )
    if held is not None and (margin := 98 / max(held.rows, 1) ** 0.5) > _WIDE_MARGIN:
        note(
            f"Warning: {held.rows} rows were held out, so these accuracies are known to {margin:.0f} points at best; "
            "more prompts or a larger --held-out help."
        )
    share = 100 * record["share_of_target_parameters"]
    note(
        f"{record['parameters'] / 1e6:.1f} M parameters, {share:.1f} % of the target's (the Hydra guide promises under "
        f"1.5 % for a 7B target); trained in {record['training_seconds'] / 60:.1f} minutes."
    )
