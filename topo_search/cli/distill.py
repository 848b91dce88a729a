"""`topo-search distill`: let the target write the text that draft heads are trained on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topo_search.cli import options
from topo_search.identity import GREEDY, RuleIdentity

if TYPE_CHECKING:
    from topo_search.target import Target
    from topo_search.training.text import TrainingText


def distill(
    out: Annotated[Path, typer.Option(help="Folder for the text; continued where it exists.")],
    target: options.Target = "demo",
    prompts: options.Prompts = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Prompts the target invents, where --prompts names none.")
    ] = options.DEFAULT_TRAINING_PROMPTS,
    max_new_tokens: options.MaxNewTokens = options.DEFAULT_MAX_NEW_TOKENS,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 64,
    seed: options.Seed = 0,
    dtype: options.Dtype = "float32",
    quantize: options.Quantize = None,
    device: options.Device = "cpu",
    attention: options.Attention = "auto",
    tokenizer: options.Tokenizer = None,
) -> None:
    """Let the target answer prompts, its own or yours, into a store that `topo-search train` reads.

    Interrupted and started again it continues; asked for more prompts it adds them.

    Example: topo-search distill --target demo --num-prompts 2000 --out text
    """
    from topo_search.cli.inputs import chosen_rule, load_model
    from topo_search.files.prompts import read_prompts
    from topo_search.report.console import note

    rule = chosen_rule(temperature, top_k, top_p, min_p, 0.0, seed)
    if prompts is not None:
        read_prompts(prompts)  # a bad file is named before the model is loaded
    model = load_model(target, dtype=dtype, device=device, attention=attention, tokenizer=tokenizer, quantize=quantize)
    text = write_text_store(
        model,
        out,
        prompts,
        num_prompts=num_prompts,
        max_new_tokens=max_new_tokens,
        rule=rule,
        batch_size=batch_size,
        seed=seed,
    )
    note(f"{out} holds {len(text.prompt_lengths)} answers, {text.answer_tokens} tokens.")
    note(f"Next: topo-search train medusa --target {target} --text {out} --out my-heads")


def write_text_store(
    model: Target,
    store: Path,
    prompts: Path | None,
    *,
    num_prompts: int,
    max_new_tokens: int,
    rule: RuleIdentity = GREEDY,
    batch_size: int = 64,
    seed: int = 0,
) -> TrainingText:
    """The text of `store`, written as far as it is missing."""
    from topo_search.calibrate import encode_prompts
    from topo_search.files.prompts import read_prompts
    from topo_search.report.console import progress
    from topo_search.training.text import invent_prompts, open_store, packaged_openings, user_turns, write_answers

    if prompts is None:
        open_store(model, store, max_new_tokens=max_new_tokens, seed=seed, rule=rule)
        with progress("Inventing prompts") as advance:
            turns = invent_prompts(
                model, packaged_openings(), count=num_prompts, seed=seed, store=store, progress=advance
            )
        asked = user_turns(turns)
    else:
        asked = read_prompts(prompts)
    encoded = encode_prompts(model, asked, max_new_tokens=max_new_tokens)  # before anything of theirs is written
    with progress("Writing answers") as advance:
        return write_answers(
            model,
            [prompt.tokens for prompt in encoded],
            max_new_tokens=max_new_tokens,
            store=store,
            seed=seed,
            rule=rule,
            batch_size=batch_size,
            progress=advance,
        )
