"""What the `topo-search train` commands share: text, hidden states, training, held-out report, files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topo_search.errors import InputError, MismatchError

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from torch import Tensor, nn

    from topo_search.target import Target
    from topo_search.training.heads import Corpus, HeldOut, Recipe
    from topo_search.training.loss import HeadLoss
    from topo_search.training.states import HiddenStates
    from topo_search.training.text import TrainingText

_LOW_AGREEMENT = 0.8  # greedy text comes to about 1, text sampled at a temperature of 0.7 to about 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every family's command is asked for."""

    target: str
    out: Path
    text: Path | None
    ordinary: list[Path]
    prompts: Path | None
    num_prompts: int
    max_new_tokens: int
    num_heads: int
    shortlist: int
    held_out: float
    recipe: Recipe
    work: Path
    dtype: str
    device: str
    attention: str
    tokenizer: str | None
    quantize: str | None


def job_of(given: dict[str, Any]) -> Job:
    """What a command was asked for, from its options by name.

    Raises:
        InputError: the learning rate is not above 0, or --out or --work is a file.
    """
    from topo_search.training.heads import Recipe

    if not given["learning_rate"] > 0:
        raise InputError(f"--learning-rate is {given['learning_rate']}; it must be above 0.")
    if given["out"].is_file():
        raise InputError(f"--out {given['out']} is a file; give a folder.")
    if given["work"] is not None and given["work"].is_file():
        raise InputError(f"--work {given['work']} is a file; give a folder.")
    of_recipe = (
        "epochs",
        "batch_texts",
        "learning_rate",
        "head_decay",
        "sampled_tokens",
        "distill",
        "learn_prompts",
        "seed",
    )
    same = ("target", "out", "text", "prompts", "num_prompts", "max_new_tokens", "num_heads", "shortlist", "held_out")
    rest = ("dtype", "device", "attention", "tokenizer", "quantize")
    return Job(
        recipe=Recipe(**{name: given[name] for name in of_recipe}),
        ordinary=given["ordinary_text"] or [],
        work=given["work"] or given["out"] / "work",
        **{name: given[name] for name in (*same, *rest)},
    )


def run_training(job: Job, untrained: Callable[[Target, float], nn.Module]) -> None:
    """Train, in the first process with a word about it; the others are silent save for errors."""
    accelerator = _accelerator(job.device)
    is_first = accelerator is None or accelerator.is_main_process
    with nullcontext() if is_first else redirect_stderr(StringIO()):
        _train_and_save(job, untrained, accelerator)


def _train_and_save(job: Job, untrained: Callable[[Target, float], nn.Module], accelerator: Accelerator | None) -> None:
    """Text, states, training, report, checkpoint."""
    import torch

    from topo_search.cli.inputs import load_model
    from topo_search.heads import save_heads
    from topo_search.report.console import note
    from topo_search.training.heads import Corpus, split_held_out
    from topo_search.training.loss import HeadLoss, shorten_projection

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
    with _first(accelerator):
        text = training_text(model, job)
    train_text, held_text = split_held_out(text, job.held_out, seed=job.recipe.seed)
    with _first(accelerator):
        corpora = _corpora(model, job, train_text)
        held_states = states_of(model, job, held_text, "held-out text")
    token_map = _shortlist(train_text, job.shortlist)
    agreement = agreement_of(model, replace(corpora[-1], text=train_text))
    torch.manual_seed(job.recipe.seed)
    sample = corpora[-1].states.rows(torch.arange(min(len(corpora[-1].states), 4096)))
    blocks = untrained(model, float(sample.pow(2).mean().sqrt())).float().to(model.device)
    shorten_projection(blocks, token_map)
    loss = HeadLoss(
        blocks,
        model.output_weight.float(),
        model.input_embeddings,
        token_map=token_map,
        distill=job.recipe.distill,
    )
    checkpoint = job.work / "training.pt"
    seconds = train_with_progress(job, loss, corpora, checkpoint, accelerator)
    if accelerator is not None and not accelerator.is_main_process:
        return
    held = held_out_figures(job, loss, Corpus(text=held_text, states=held_states, epochs=1))
    record = record_of(job, model, loss, text, held, seconds) | {"text_agreement": round(agreement, 4)}
    save_heads(job.out, blocks, record, token_map=token_map, dtype=torch.bfloat16)
    checkpoint.unlink(missing_ok=True)
    report_figures(record, held)
    note(f"Wrote {job.out}. Next: topo-search calibrate --target {job.target} --heads {job.out}")


def require_readable(job: Job) -> None:
    """Refuse a text store, prompts or ordinary text that cannot be read, before the target is loaded for it.

    Raises:
        InputError: it is missing, empty or damaged.
    """
    from topo_search.files.prompts import read_prompts
    from topo_search.training.text import read_ordinary, read_text_store

    read_ordinary(job.ordinary)
    if job.text is not None:
        read_text_store(job.text)
    elif job.prompts is not None:
        read_prompts(job.prompts)


def held_out_figures(job: Job, loss: HeadLoss, corpus: Corpus) -> HeldOut | None:
    """Figures of the heads on held-out text; None where there is none."""
    from topo_search.training.heads import evaluate

    if not len(corpus.text.prompt_lengths):
        return None
    return evaluate(loss, corpus.text, corpus.states, num_heads=job.num_heads)


def agreement_of(model: Target, corpus: Corpus) -> float:
    """How far the text is what the target itself would write, with advice where it is not."""
    from topo_search.report.console import note
    from topo_search.training.states import greedy_agreement

    share = greedy_agreement(model, corpus.text, corpus.states)
    if share < _LOW_AGREEMENT:
        note(
            f"Warning: only {100 * share:.0f} % of the text's answer tokens are the target's own greedy choice, so "
            "heads trained on it would guess other words than it writes. Let the target write: topo-search distill "
            "(without --temperature for greedy text)."
        )
    return share


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


def training_text(model: Target, job: Job) -> TrainingText:
    """The store's text, or what the target writes now.

    Raises:
        MismatchError: another target wrote the store.
    """
    from topo_search.cli.distill import write_text_store
    from topo_search.training.text import read_text_store, store_target

    if job.text is None:
        return write_text_store(
            model,
            job.work / "text",
            job.prompts,
            num_prompts=job.num_prompts,
            max_new_tokens=job.max_new_tokens,
            seed=job.recipe.seed,
        )
    text = read_text_store(job.text)
    if store_target(job.text) != model.identity.fingerprint:
        raise MismatchError(
            f"{job.text} was written by another target ({store_target(job.text)}, not {model.identity.fingerprint}): "
            "heads trained on it would guess that one's words. Run topo-search distill with this target."
        )
    return text


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


def _corpora(model: Target, job: Job, text: TrainingText) -> list[Corpus]:
    from topo_search.training.heads import Corpus
    from topo_search.training.text import ordinary_text

    corpora = []
    if job.ordinary:
        ordinary = ordinary_text(model, job.ordinary)
        states = states_of(model, job, ordinary, "ordinary text")
        learned = _with_prompts(model, job, ordinary, states)
        corpora.append(Corpus(text=learned, states=states, epochs=job.recipe.ordinary_epochs))
    states = states_of(model, job, text, "the target's own text")
    learned = _with_prompts(model, job, text, states) if job.recipe.learn_prompts else text
    return [*corpora, Corpus(text=learned, states=states, epochs=job.recipe.epochs)]


def _with_prompts(model: Target, job: Job, text: TrainingText, states: HiddenStates) -> TrainingText:
    from topo_search.report.console import progress
    from topo_search.training.states import with_prompts

    with progress("Asking the target") as advance:
        return with_prompts(model, text, states, job.work, progress=advance)


def states_of(model: Target, job: Job, text: TrainingText, what: str) -> HiddenStates:
    """The states of `text` in the work folder, their size announced first."""
    from topo_search.report.console import note, progress
    from topo_search.training.states import cached_states, states_bytes

    size = states_bytes(model, text) / 1e6
    note(f"Hidden states of {what}: {len(text.tokens)} positions, {size:.0f} MB in {job.work}")
    with progress("Reading text") as advance:
        return cached_states(model, text, job.work, progress=advance)


def train_with_progress(
    job: Job, loss: HeadLoss, corpora: list[Corpus], checkpoint: Path, accelerator: Accelerator | None = None
) -> float:
    """`train_heads` with a progress bar."""
    from topo_search.report.console import note, progress
    from topo_search.training.heads import TrainingReport, train_heads

    tokens = sum(corpus.text.answer_tokens for corpus in corpora)
    note(f"Training {job.num_heads} heads on {tokens} tokens ...")
    with progress("Training") as advance:

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
        },
        "held_out": None if held is None else asdict(held),
        "training_seconds": round(seconds, 1),
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
    share = 100 * record["share_of_target_parameters"]
    note(
        f"{record['parameters'] / 1e6:.1f} M parameters, {share:.1f} % of the target's (the Hydra guide promises under "
        f"1.5 % for a 7B target); trained in {record['training_seconds'] / 60:.1f} minutes."
    )
