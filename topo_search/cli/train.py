"""`topo-search train`: train draft heads of each family, the target frozen, or with it (Medusa-2)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from topo_search.cli import medusa_2, options, training_options
from topo_search.cli.training_job import Job, job_of
from topo_search.cli.training_run import run_further, run_training

if TYPE_CHECKING:
    from torch import nn

    from topo_search.target import Target

app = typer.Typer(help="Train draft heads, the target frozen, or with it.", no_args_is_help=True)


@app.callback()
def train() -> None:
    """Train draft heads, the target frozen, or with it (medusa-2).

    With several processes: accelerate launch -m topo_search train medusa ...
    """


@app.command()
def medusa(
    out: training_options.Out,
    target: options.Target = "demo",
    text: training_options.Text = None,
    ordinary_text: training_options.OrdinaryText = None,
    prompts: options.Prompts = None,
    num_prompts: training_options.NumPrompts = options.DEFAULT_TRAINING_PROMPTS,
    max_new_tokens: options.MaxNewTokens = options.DEFAULT_MAX_NEW_TOKENS,
    num_heads: training_options.NumHeads = 5,
    num_layers: training_options.NumLayers = 1,
    own_projection: training_options.OwnProjection = False,
    shortlist: training_options.Shortlist = 0,
    epochs: training_options.Epochs = 4,
    batch_texts: training_options.BatchTexts = 8,
    learning_rate: training_options.LearningRate = 1e-3,
    head_decay: training_options.HeadDecay = 0.9,
    sampled_tokens: training_options.SampledTokens = 2048,
    distill: training_options.Distill = 0.0,
    learn_prompts: training_options.LearnPrompts = False,
    held_out: training_options.HeldOutShare = 0.05,
    seed: options.Seed = 0,
    work: training_options.Work = None,
    dtype: options.Dtype = "float32",
    quantize: options.Quantize = None,
    device: options.Device = "cpu",
    attention: options.Attention = "auto",
    tokenizer: options.Tokenizer = None,
) -> None:
    """Train Medusa heads (Medusa-1, arXiv 2401.10774): blind to the path, cheapest to draft with.

    Interrupted and started again it continues.

    Example: topo-search train medusa --target demo --text text --out my-heads
    """
    from topo_search.heads.medusa import untrained_blocks

    job = job_of(locals())
    run_training(
        job,
        lambda model, _: untrained_blocks(
            model, num_heads=num_heads, num_layers=num_layers, share_projection=not own_projection
        ),
    )


@app.command()
def hydra(
    out: training_options.Out,
    target: options.Target = "demo",
    text: training_options.Text = None,
    ordinary_text: training_options.OrdinaryText = None,
    prompts: options.Prompts = None,
    num_prompts: training_options.NumPrompts = options.DEFAULT_TRAINING_PROMPTS,
    max_new_tokens: options.MaxNewTokens = options.DEFAULT_MAX_NEW_TOKENS,
    num_heads: training_options.NumHeads = 5,
    num_layers: training_options.NumLayers = 1,
    arch: training_options.Arch = "mlp",
    sees: training_options.Sees = "path",
    blind_first: training_options.BlindFirst = False,
    intermediate_size: training_options.IntermediateSize = None,
    own_projection: training_options.OwnProjection = False,
    shortlist: training_options.Shortlist = 0,
    epochs: training_options.Epochs = 4,
    batch_texts: training_options.BatchTexts = 8,
    learning_rate: training_options.LearningRate = 1e-3,
    head_decay: training_options.HeadDecay = 0.9,
    sampled_tokens: training_options.SampledTokens = 2048,
    distill: training_options.Distill = 0.0,
    learn_prompts: training_options.LearnPrompts = False,
    held_out: training_options.HeldOutShare = 0.05,
    seed: options.Seed = 0,
    work: training_options.Work = None,
    dtype: options.Dtype = "float32",
    quantize: options.Quantize = None,
    device: options.Device = "cpu",
    attention: options.Attention = "auto",
    tokenizer: options.Tokenizer = None,
) -> None:
    """Train Hydra heads (arXiv 2402.05109): each sees the drafted tokens before it.

    Interrupted and started again it continues.

    Example: topo-search train hydra --target demo --text text --out my-heads
    """
    job = job_of(locals())
    shape = {"num_layers": num_layers, "arch": arch, "sees": sees, "root_in_first": not blind_first}
    shape["prefix_attention"] = False
    _run_hydra(job, shape, own_projection=own_projection, intermediate_size=intermediate_size)


@app.command("hydra++")
def hydra_plus_plus(
    out: training_options.Out,
    target: options.Target = "demo",
    text: training_options.Text = None,
    ordinary_text: training_options.OrdinaryText = None,
    prompts: options.Prompts = None,
    num_prompts: training_options.NumPrompts = options.DEFAULT_TRAINING_PROMPTS,
    max_new_tokens: options.MaxNewTokens = options.DEFAULT_MAX_NEW_TOKENS,
    num_heads: training_options.NumHeads = 5,
    num_layers: training_options.NumLayers = 4,
    arch: training_options.Arch = "mlp",
    sees: training_options.Sees = "path",
    blind_first: training_options.BlindFirst = False,
    root_in_prefix: training_options.RootInPrefix = False,
    intermediate_size: training_options.IntermediateSize = None,
    own_projection: training_options.OwnProjection = False,
    shortlist: training_options.Shortlist = 0,
    epochs: training_options.Epochs = 4,
    batch_texts: training_options.BatchTexts = 8,
    learning_rate: training_options.LearningRate = 1e-3,
    head_decay: training_options.HeadDecay = 0.9,
    sampled_tokens: training_options.SampledTokens = 2048,
    distill: training_options.Distill = 0.7,
    learn_prompts: training_options.LearnPrompts = False,
    held_out: training_options.HeldOutShare = 0.05,
    seed: options.Seed = 0,
    work: training_options.Work = None,
    dtype: options.Dtype = "float32",
    quantize: options.Quantize = None,
    device: options.Device = "cpu",
    attention: options.Attention = "auto",
    tokenizer: options.Tokenizer = None,
) -> None:
    """Train Hydra++ heads (arXiv 2402.05109, section 4): deeper, distilled, with attention over the committed tokens.

    Interrupted and started again it continues.

    Example: topo-search train hydra++ --root-in-prefix --distill 0 --target demo --text text --out my-heads
    """
    job = job_of(locals())
    shape = {"num_layers": num_layers, "arch": arch, "sees": sees, "root_in_first": not blind_first}
    shape |= {"prefix_attention": True, "root_in_prefix": root_in_prefix}
    _run_hydra(job, shape, own_projection=own_projection, intermediate_size=intermediate_size)


@app.command()
def further(
    heads: Annotated[str, typer.Option(help="Trained heads of any family, whose shape and shortlist are kept.")],
    out: training_options.Out,
    target: options.Target = "demo",
    text: training_options.Text = None,
    ordinary_text: training_options.OrdinaryText = None,
    prompts: options.Prompts = None,
    num_prompts: training_options.NumPrompts = options.DEFAULT_TRAINING_PROMPTS,
    max_new_tokens: options.MaxNewTokens = options.DEFAULT_MAX_NEW_TOKENS,
    epochs: training_options.Epochs = 2,
    batch_texts: training_options.BatchTexts = 8,
    learning_rate: training_options.LearningRate = 5e-4,
    head_decay: training_options.HeadDecay = 0.9,
    sampled_tokens: training_options.SampledTokens = 2048,
    distill: training_options.Distill = 0.0,
    learn_prompts: training_options.LearnPrompts = False,
    held_out: training_options.HeldOutShare = 0.05,
    seed: options.Seed = 0,
    work: training_options.Work = None,
    dtype: options.Dtype = "float32",
    quantize: options.Quantize = None,
    device: options.Device = "cpu",
    attention: options.Attention = "auto",
    tokenizer: options.Tokenizer = None,
) -> None:
    """Train heads further that were trained before, with more text or with text of your own; the old ones stay.

    Their shape and shortlist are kept, the other settings are those given here. Give the text they learned from again,
    lest they forget it; under the same --seed and --held-out no text changes sides. Interrupted and started again it
    continues.

    Example: topo-search train further --heads demo-hydra --text text --text my-text --out my-heads
    """
    run_further(job_of(locals() | {"num_heads": 0, "shortlist": 0}), heads)


def _run_hydra(job: Job, shape: dict[str, Any], *, own_projection: bool, intermediate_size: int | None) -> None:
    """Train heads of a `HydraShape` with the given fields."""
    from topo_search.heads.attention import LayerShape
    from topo_search.heads.hydra import HydraShape, embedding_size, untrained_hydra

    def blocks(model: Target, gain: float) -> nn.Module:
        layer = LayerShape.of(model)
        if intermediate_size is not None:
            layer = replace(layer, intermediate_size=intermediate_size)
        attends = shape["prefix_attention"] or shape["sees"] == "fusion"
        whole = HydraShape(
            hidden=model.hidden_size,
            num_heads=job.num_heads,
            embedding_gain=round(gain / embedding_size(model), 3),
            layer=layer if attends else None,
            **shape,
        )
        return untrained_hydra(model, whole, share_projection=not own_projection, gain=gain)

    run_training(job, blocks)


app.command("medusa-2")(medusa_2.medusa_2)
