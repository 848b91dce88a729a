"""`topo-search generate`: decode one prompt with a tree and stream the text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from topo_search.cli import options


def generate(
    prompt: Annotated[str, typer.Argument(help="The user's message.")],
    tree: Annotated[Path, typer.Option(help="A *.tree.json file.")] = options.TREES_FOLDER / "best-tree.tree.json",
    target: options.Target = "demo",
    heads: options.Heads = "demo-medusa",
    heads_dtype: options.HeadsDtype = None,
    max_new_tokens: options.MaxNewTokens = options.DEFAULT_MAX_NEW_TOKENS,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    prune_depth: Annotated[int | None, typer.Option(min=0, help="Leave out deeper nodes of the tree.")] = None,
    allow_mismatch: options.AllowMismatch = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    attention: options.Attention = "sdpa",
    tokenizer: options.Tokenizer = None,
) -> None:
    """Decode one prompt; the text equals plain greedy decoding.

    Example: topo-search generate "Explain why the sky is blue." --tree trees/best-tree.tree.json
    """
    from topo_search.cli.decoding import fitting_tree
    from topo_search.cli.inputs import load_draft_heads, load_model
    from topo_search.files.prompts import Prompt
    from topo_search.report.console import note

    message = ({"role": "user", "content": prompt},)
    asked = Prompt(
        id="prompt", workload="default", split=None, messages=None if raw else message, text=prompt if raw else None
    )
    model = load_model(target, dtype=dtype, device=device, attention=attention, tokenizer=tokenizer)
    draft_heads = load_draft_heads(heads, model, dtype=heads_dtype)
    shape = fitting_tree(tree, model, draft_heads, allow_mismatch=allow_mismatch).tree

    from topo_search.calibrate import encode_prompts
    from topo_search.decode.decoder import TreeDecoder
    from topo_search.stats import DecodeStats

    ids = encode_prompts(model, [asked], max_new_tokens=1)[0].tokens
    decoder = TreeDecoder(model, draft_heads, shape if prune_depth is None else shape.pruned(prune_depth))
    written: list[int] = []
    accepted: list[int] = []
    for emitted in decoder.stream(ids, max_new_tokens=max_new_tokens):
        if written:
            accepted.append(len(emitted) - 1)
        shown = model.tokenizer.decode(written, skip_special_tokens=True)
        written += emitted
        sys.stdout.write(model.tokenizer.decode(written, skip_special_tokens=True)[len(shown) :])
        sys.stdout.flush()
    sys.stdout.write("\n")
    stats = DecodeStats.of(accepted)
    note(
        f"{len(written)} tokens in {stats.steps} steps after the first: {stats.tokens_per_step:.2f} tokens per step "
        f"({stats.accepted_per_step:.2f} accepted drafts); steps by accepted drafts: {list(stats.histogram)}"
    )
