"""`topo-search generate`: decode one prompt with a tree and stream the text, or chat."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from topo_search.cli import options

if TYPE_CHECKING:
    from rich.console import Console

    from topo_search.calibrate import EncodedPrompt
    from topo_search.decode.decoder import DecodeSettings, TreeDecoder

_NO_TREE = "none"
TreeOption = Annotated[Path, typer.Option(help="A *.tree.json file; none for plain decoding.")]


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The user's message; without it you chat.")] = None,
    tree: TreeOption = options.TREES_FOLDER / "best-tree.tree.json",
    target: options.Target = "demo",
    heads: options.Heads = "demo-medusa",
    heads_dtype: options.HeadsDtype = None,
    max_new_tokens: options.MaxNewTokens = options.DEFAULT_MAX_NEW_TOKENS,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    noise_share: options.NoiseShare = 0.0,
    seed: options.Seed = 0,
    acceptance: options.AcceptanceRule = options.Acceptance.exact,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    bonus: options.BonusToken = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer once it holds this; repeatable.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    prune_depth: Annotated[int | None, typer.Option(min=0, help="Leave out deeper nodes of the tree.")] = None,
    allow_mismatch: options.AllowMismatch = False,
    dtype: options.Dtype = "float32",
    quantize: options.Quantize = None,
    device: options.Device = "cpu",
    attention: options.Attention = "auto",
    tokenizer: options.Tokenizer = None,
    mode: options.Mode = "auto",
) -> None:
    """Decode one prompt, or chat; the text is that of plain decoding, greedy or drawn with the same seed.

    With --acceptance typical it is another text, which depends on the tree.

    Examples: topo-search generate "Explain why the sky is blue." | topo-search generate --temperature 0.7 --seed 1
    """
    from topo_search.cli.decoding import fitting_tree, stored_tree
    from topo_search.cli.inputs import accepting_rule, chosen_rule, load_draft_heads, load_model, require_heads
    from topo_search.report.console import note, stdout

    _require_text(prompt, raw=raw)
    drawn = chosen_rule(temperature, top_k, top_p, min_p, noise_share, seed)
    rule = accepting_rule(drawn, acceptance, epsilon, delta, bonus)
    file = None if str(tree) == _NO_TREE else stored_tree(tree, rule=rule, allow_mismatch=allow_mismatch)
    require_heads(heads)
    model = load_model(
        target, dtype=dtype, device=device, attention=attention, tokenizer=tokenizer, quantize=quantize, mode=mode
    )
    draft_heads = load_draft_heads(heads, model, dtype=heads_dtype)

    from topo_search.decode.decoder import TreeDecoder
    from topo_search.tree import Tree

    shape = Tree(()) if file is None else fitting_tree(tree, file, model, draft_heads, allow_mismatch=allow_mismatch)

    decoder = TreeDecoder(model, draft_heads, shape if prune_depth is None else shape.pruned(prune_depth))
    session = _Session(
        decoder=decoder,
        max_new_tokens=max_new_tokens,
        settings={"rule": rule, "stop_strings": tuple(stop or ())},
        console=stdout(),
    )
    if prompt is None:
        note("An empty line or the end of the input ends the chat.")
        session.chat()
    else:
        session.answer([{"role": "user", "content": prompt}], text=prompt if raw else None)


def _require_text(prompt: str | None, *, raw: bool) -> None:
    from topo_search.errors import InputError

    if raw and prompt is None:
        raise InputError("--raw continues a text, and there is none; give the text, or leave --raw out to chat.")
    if prompt is not None and not prompt.strip():
        raise InputError("The prompt is empty; give a message, or leave it out to chat.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """A decoder, what every answer is asked with, and where it is shown."""

    decoder: TreeDecoder
    max_new_tokens: int
    settings: DecodeSettings
    console: Console

    def chat(self) -> None:
        """Answer turn after turn, each with all turns before it."""
        from topo_search.report.stream import ask

        messages: list[dict[str, str]] = []
        while asked := (ask(self.console) or "").strip():
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": self.answer(messages)})

    def answer(self, messages: list[dict[str, str]], *, text: str | None = None) -> str:
        """Stream the answer to a chat, or the continuation of a raw text, and say how fast it came."""
        from topo_search.report.console import note
        from topo_search.report.stream import TextPieces, summary, write_piece
        from topo_search.stats import DecodeStats

        encoded = self._encoded(messages, text)
        tokenizer = self.decoder.target.tokenizer
        pieces = TextPieces(lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True))
        accepted: list[int] = []
        started = 0.0
        asked: DecodeSettings = {**self.settings, "request": encoded.request}
        for emitted in self.decoder.stream(encoded.tokens, max_new_tokens=self.max_new_tokens, **asked):
            if pieces.tokens:
                accepted.append(len(emitted) - 1)
            else:
                started = time.perf_counter()
            write_piece(self.console, pieces.add(emitted))
        seconds = time.perf_counter() - started
        write_piece(self.console, pieces.rest() + "\n")
        rule = self.settings["rule"]
        label = f"; {rule.in_words}" if rule.changes_text else ""
        note(summary(DecodeStats.of(accepted), len(pieces.tokens), seconds) + label)
        return pieces.shown

    def _encoded(self, messages: list[dict[str, str]], text: str | None) -> EncodedPrompt:
        from topo_search.calibrate import encode_prompts
        from topo_search.files.prompts import Prompt

        chat = tuple(messages) if text is None else None
        prompt = Prompt(id="prompt", workload="default", split=None, messages=chat, text=text)
        return encode_prompts(self.decoder.target, [prompt], max_new_tokens=1)[0]
