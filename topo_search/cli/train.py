"""`topo-search train`: train draft heads of each family, the target frozen."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from topo_search.cli import options
from topo_search.errors import InputError, MismatchError

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from torch import Tensor, nn

    from topo_search.heads.hydra import HydraShape
    from topo_search.target import Target
    from topo_search.training.heads import Corpus, HeldOut, Recipe
    from topo_search.training.loss import HeadLoss
    from topo_search.training.text import TrainingText

_LOW_AGREEMENT = 0.8  # greedy text comes to about 1, text sampled at a temperature of 0.7 to about 0.8

app = typer.Typer(help="Train draft heads, the target frozen.", no_args_is_help=True)

Out = Annotated[Path, typer.Option(help="Folder for the trained heads.")]
Text = Annotated[
    Path | None, typer.Option(help="Store written by topo-search distill; without it the target writes one first.")
]
OrdinaryText = Annotated[
    list[Path] | None, typer.Option(help="A text file to learn from before the target's own text; repeatable.")
]
TrainingPrompts = Annotated[
    int, typer.Option(min=1, help="Without --text and --prompts: prompts that the target invents.")
]
NumHeads = Annotated[int, typer.Option(min=1, help="Draft heads, one per depth.")]
NumLayers = Annotated[int, typer.Option(min=1, help="Layers per head.")]
OwnProjection = Annotated[
    bool, typer.Option("--own-projection", help="A trained projection per head instead of the target's own.")
]
Shortlist = Annotated[
    int, typer.Option(min=0, help="Draft only the N tokens most frequent in the text; 0: every token.")
]
Epochs = Annotated[int, typer.Option(min=1, help="Passes over the target's own text.")]
BatchTexts = Annotated[int, typer.Option(min=1, help="Texts per step.")]
LearningRate = Annotated[float, typer.Option(help="Peak learning rate.")]
HeadDecay = Annotated[float, typer.Option(help="Loss weight of head k is this to the power of k - 1.")]
SampledTokens = Annotated[int, typer.Option(min=0, help="Negatives per step; 0: every drafted token.")]
Distill = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Share of the target's distribution in the loss; 0: its token alone.")
]
HeldOutShare = Annotated[float, typer.Option(min=0.0, max=0.5, help="Share of texts held out to report on.")]
Work = Annotated[Path | None, typer.Option(help="Folder for text, states and checkpoint; OUT/work by default.")]
Arch = Annotated[
    Literal["mlp", "guide"],
    typer.Option(help="First layer: the paper's with a linear shortcut, or two linear layers with a norm between."),
]
Sees = Annotated[
    Literal["path", "last", "fusion"],
    typer.Option(help="What a head sees of the path: all embeddings, the last one, or attention over them."),
]
BlindFirst = Annotated[bool, typer.Option("--blind-first", help="Head 1 sees the hidden state alone, not the root.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
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


@app.callback()
def train() -> None:
    """Train draft heads, the target frozen.

    With several processes: accelerate launch -m topo_search train medusa ...
    """


@app.command()
def medusa(
    out: Out,
    target: options.Target = "demo",
    text: Text = None,
    ordinary_text: OrdinaryText = None,
    prompts: options.Prompts = None,
    num_prompts: TrainingPrompts = options.DEFAULT_TRAINING_PROMPTS,
    max_new_tokens: options.MaxNewTokens = options.DEFAULT_MAX_NEW_TOKENS,
    num_heads: NumHeads = 5,
    num_layers: NumLayers = 1,
    own_projection: OwnProjection = False,
    shortlist: Shortlist = 0,
    epochs: Epochs = 4,
    batch_texts: BatchTexts = 8,
    learning_rate: LearningRate = 1e-3,
    head_decay: HeadDecay = 0.9,
    sampled_tokens: SampledTokens = 2048,
    distill: Distill = 0.0,
    held_out: HeldOutShare = 0.05,
    seed: options.Seed = 0,
    work: Work = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    attention: options.Attention = "sdpa",
    tokenizer: options.Tokenizer = None,
) -> None:
    """Train Medusa heads (Medusa-1, arXiv 2401.10774): blind to the path, cheapest to draft with.

    Interrupted and started again it continues.

    Example: topo-search train medusa --target demo --text text --out my-heads
    """
    from topo_search.heads.medusa import untrained_blocks

    job = _job(locals())
    _run(
        job,
        lambda model, _: untrained_blocks(
            model, num_heads=num_heads, num_layers=num_layers, share_projection=not own_projection
        ),
    )


@app.command()
def hydra(
    out: Out,
    target: options.Target = "demo",
    text: Text = None,
    ordinary_text: OrdinaryText = None,
    prompts: options.Prompts = None,
    num_prompts: TrainingPrompts = options.DEFAULT_TRAINING_PROMPTS,
    max_new_tokens: options.MaxNewTokens = options.DEFAULT_MAX_NEW_TOKENS,
    num_heads: NumHeads = 5,
    num_layers: NumLayers = 1,
    arch: Arch = "mlp",
    sees: Sees = "path",
    blind_first: BlindFirst = False,
    own_projection: OwnProjection = False,
    shortlist: Shortlist = 0,
    epochs: Epochs = 4,
    batch_texts: BatchTexts = 8,
    learning_rate: LearningRate = 1e-3,
    head_decay: HeadDecay = 0.9,
    sampled_tokens: SampledTokens = 2048,
    distill: Distill = 0.0,
    held_out: HeldOutShare = 0.05,
    seed: options.Seed = 0,
    work: Work = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    attention: options.Attention = "sdpa",
    tokenizer: options.Tokenizer = None,
) -> None:
    """Train Hydra heads (arXiv 2402.05109): each sees the drafted tokens before it.

    Interrupted and started again it continues.

    Example: topo-search train hydra --target demo --text text --out my-heads
    """
    job = _job(locals())
    _run_hydra(job, num_layers, arch, sees, blind_first, own_projection, prefix_attention=False)


@app.command("hydra++")
def hydra_plus_plus(
    out: Out,
    target: options.Target = "demo",
    text: Text = None,
    ordinary_text: OrdinaryText = None,
    prompts: options.Prompts = None,
    num_prompts: TrainingPrompts = options.DEFAULT_TRAINING_PROMPTS,
    max_new_tokens: options.MaxNewTokens = options.DEFAULT_MAX_NEW_TOKENS,
    num_heads: NumHeads = 5,
    num_layers: NumLayers = 4,
    arch: Arch = "mlp",
    sees: Sees = "path",
    blind_first: BlindFirst = False,
    own_projection: OwnProjection = False,
    shortlist: Shortlist = 0,
    epochs: Epochs = 4,
    batch_texts: BatchTexts = 8,
    learning_rate: LearningRate = 1e-3,
    head_decay: HeadDecay = 0.9,
    sampled_tokens: SampledTokens = 2048,
    distill: Distill = 0.7,
    held_out: HeldOutShare = 0.05,
    seed: options.Seed = 0,
    work: Work = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    attention: options.Attention = "sdpa",
    tokenizer: options.Tokenizer = None,
) -> None:
    """Train Hydra++ heads (arXiv 2402.05109, section 4): deeper, distilled, with attention over the committed tokens.

    Interrupted and started again it continues.

    Example: topo-search train hydra++ --target demo --text text --out my-heads
    """
    job = _job(locals())
    _run_hydra(job, num_layers, arch, sees, blind_first, own_projection, prefix_attention=True)


def _job(given: dict[str, Any]) -> _Job:
    from topo_search.training.heads import Recipe

    recipe = Recipe(
        **{
            name: given[name]
            for name in (
                "epochs",
                "batch_texts",
                "learning_rate",
                "head_decay",
                "sampled_tokens",
                "distill",
                "seed",
            )
        }
    )
    if not given["learning_rate"] > 0:
        raise InputError(f"--learning-rate is {given['learning_rate']}; it must be above 0.")
    same = ("target", "out", "text", "prompts", "num_prompts", "max_new_tokens", "num_heads", "shortlist", "held_out")
    rest = ("dtype", "device", "attention", "tokenizer")
    return _Job(
        recipe=recipe,
        ordinary=given["ordinary_text"] or [],
        work=given["work"] or given["out"] / "work",
        **{name: given[name] for name in (*same, *rest)},
    )


def _run_hydra(
    job: _Job, num_layers: int, arch: Any, sees: Any, blind_first: bool, own: bool, *, prefix_attention: bool
) -> None:
    from topo_search.heads.attention import LayerShape
    from topo_search.heads.hydra import HydraShape, untrained_hydra

    def blocks(model: Target, gain: float) -> nn.Module:
        shape: HydraShape = HydraShape(
            hidden=model.hidden_size,
            num_heads=job.num_heads,
            num_layers=num_layers,
            arch=arch,
            sees=sees,
            root_in_first=not blind_first,
            prefix_attention=prefix_attention,
            layer=LayerShape.of(model) if prefix_attention or sees == "fusion" else None,
        )
        return untrained_hydra(model, shape, share_projection=not own, gain=gain)

    _run(job, blocks)


def _run(job: _Job, untrained: Callable[[Target, float], nn.Module]) -> None:
    """Train, in the first process with a word about it; the others are silent save for errors."""
    accelerator = _accelerator(job.device)
    is_first = accelerator is None or accelerator.is_main_process
    with nullcontext() if is_first else redirect_stderr(StringIO()):
        _train_and_save(job, untrained, accelerator)


def _train_and_save(
    job: _Job, untrained: Callable[[Target, float], nn.Module], accelerator: Accelerator | None
) -> None:
    """Text, states, training, report, checkpoint."""
    import torch

    from topo_search.cli.inputs import load_model
    from topo_search.report.console import note
    from topo_search.training.heads import Corpus, split_held_out
    from topo_search.training.loss import HeadLoss, shorten_projection

    device = job.device if accelerator is None else str(accelerator.device)
    model = load_model(job.target, dtype=job.dtype, device=device, attention=job.attention, tokenizer=job.tokenizer)
    with _first(accelerator):
        text = _text(model, job)
    train_text, held_text = split_held_out(text, job.held_out, seed=job.recipe.seed)
    with _first(accelerator):
        corpora = _corpora(model, job, train_text)
        held_states = _states(model, job, held_text, "held-out text")
    token_map = _shortlist(train_text, job.shortlist)
    agreement = _agreement(model, corpora[-1])
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
    seconds = _train(job, loss, corpora, accelerator)
    if accelerator is not None and not accelerator.is_main_process:
        return
    held = _held_out(job, loss, Corpus(text=held_text, states=held_states, epochs=1))
    record = _record(job, model, loss, text, held, seconds) | {"text_agreement": round(agreement, 4)}
    _save(job, loss, record, token_map)
    _checkpoint(job).unlink(missing_ok=True)
    _report(record, held)
    note(f"Wrote {job.out}. Next: topo-search calibrate --target {job.target} --heads {job.out}")


def _held_out(job: _Job, loss: HeadLoss, corpus: Corpus) -> HeldOut | None:
    from topo_search.training.heads import evaluate

    if not len(corpus.text.prompt_lengths):
        return None
    return evaluate(loss, corpus.text, corpus.states, num_heads=job.num_heads)


def _checkpoint(job: _Job) -> Path:
    return job.work / "training.pt"


def _agreement(model: Target, corpus: Corpus) -> float:
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
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    from accelerate import Accelerator

    return Accelerator(cpu=device == "cpu")


def _first(accelerator: Accelerator | None) -> Any:
    """The first process writes what the others then read."""
    return nullcontext() if accelerator is None else accelerator.main_process_first()


def _text(model: Target, job: _Job) -> TrainingText:
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


def _corpora(model: Target, job: _Job, text: TrainingText) -> list[Corpus]:
    from topo_search.training.heads import Corpus
    from topo_search.training.text import ordinary_text

    corpora = []
    if job.ordinary:
        ordinary = ordinary_text(model, job.ordinary)
        states = _states(model, job, ordinary, "ordinary text")
        corpora.append(Corpus(text=ordinary, states=states, epochs=job.recipe.ordinary_epochs))
    states = _states(model, job, text, "the target's own text")
    return [*corpora, Corpus(text=text, states=states, epochs=job.recipe.epochs)]


def _states(model: Target, job: _Job, text: TrainingText, what: str) -> Any:
    from topo_search.report.console import note, progress
    from topo_search.training.states import cached_states, states_bytes

    size = states_bytes(model, text) / 1e6
    note(f"Hidden states of {what}: {len(text.tokens)} positions, {size:.0f} MB in {job.work}")
    with progress("Reading text") as advance:
        return cached_states(model, text, job.work, progress=advance)


def _train(job: _Job, loss: HeadLoss, corpora: list[Corpus], accelerator: Accelerator | None) -> float:
    from topo_search.report.console import note, progress
    from topo_search.training.heads import TrainingReport, train_heads

    tokens = sum(corpus.text.answer_tokens for corpus in corpora)
    note(f"Training {job.num_heads} heads on {tokens} tokens ...")
    with progress("Training") as advance:

        def report(at: TrainingReport) -> None:
            losses = " ".join(f"{value:.3f}" for value in at.loss_per_head)
            advance(at.step, at.steps, f"loss per head {losses}")

        return train_heads(
            loss,
            corpora,
            job.recipe,
            num_heads=job.num_heads,
            checkpoint=_checkpoint(job),
            report=report,
            accelerator=accelerator,
        )


def _record(
    job: _Job, model: Target, loss: HeadLoss, text: TrainingText, held: HeldOut | None, seconds: float
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
            "ordinary_files": len(job.ordinary),
            "held_out_share": job.held_out,
        },
        "held_out": None if held is None else asdict(held),
        "training_seconds": round(seconds, 1),
        "parameters": parameters,
        "share_of_target_parameters": round(parameters / parameter_count(model.model), 4),
        "provenance": provenance(),
    }


def _save(job: _Job, loss: HeadLoss, record: dict[str, Any], token_map: Tensor | None) -> None:
    import torch

    from topo_search.heads import save_heads

    save_heads(job.out, loss.blocks, record, token_map=token_map, dtype=torch.bfloat16)


def _report(record: dict[str, Any], held: HeldOut | None) -> None:
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
