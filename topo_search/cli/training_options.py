"""Options that the `topo-search train` commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Out = Annotated[Path, typer.Option(help="Folder for the trained heads.")]
Text = Annotated[
    list[Path] | None,
    typer.Option(help="Store written by topo-search distill, repeatable; without it the target writes one first."),
]
OrdinaryText = Annotated[
    list[Path] | None, typer.Option(help="A UTF-8 file to learn from before the target's own text, once; repeatable.")
]
NumPrompts = Annotated[int, typer.Option(min=1, help="Without --text and --prompts: prompts that the target invents.")]
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
LearnPrompts = Annotated[
    bool,
    typer.Option("--learn-prompts", help="Learn from the prompts too: what the target would say after each token."),
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
IntermediateSize = Annotated[
    int | None, typer.Option(min=1, help="Feed-forward width of the attention layer; that of the target's by default.")
]
RootInPrefix = Annotated[
    bool,
    typer.Option(
        "--root-in-prefix",
        help="The prefix layer reads each state with the token after it, the root last (EAGLE's input).",
    ),
]
BlindFirst = Annotated[bool, typer.Option("--blind-first", help="Head 1 sees the hidden state alone, not the root.")]
