"""Options that several commands share: one name, one help text, one default."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

DEFAULT_MAX_NEW_TOKENS = 128
DEFAULT_BUDGET = 64
DEFAULT_TRAINING_PROMPTS = 2000
CALIBRATION_FOLDER, TREES_FOLDER = Path("calibration"), Path("trees")


class Acceptance(StrEnum):
    """When a drafted token is taken."""

    exact = "exact"
    typical = "typical"


class Bonus(StrEnum):
    """What follows the path that typical acceptance takes."""

    sampled = "sampled"
    greedy = "greedy"
    truncated = "truncated"


Target = Annotated[str, typer.Option(help="Hub name, folder, .gguf file, or demo.", rich_help_panel="Model")]
Heads = Annotated[
    str,
    typer.Option(help="Folder of draft heads, or demo-medusa, demo-hydra, demo-hydra++.", rich_help_panel="Model"),
]
HeadsDtype = Annotated[
    str | None,
    typer.Option("--heads-dtype", help="Precision of the heads; the target's by default.", rich_help_panel="Model"),
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.", rich_help_panel="Model")]
Quantize = Annotated[
    str | None,
    typer.Option("--quantize", help="int8 or int4 weights, by torchao (extra quant).", rich_help_panel="Model"),
]
Device = Annotated[str, typer.Option(help="Torch device, e.g. cpu or cuda.", rich_help_panel="Model")]
Attention = Annotated[str, typer.Option(help="auto, grouped, sdpa or eager.", rich_help_panel="Model")]
Mode = Annotated[
    str,
    typer.Option(
        help="auto, eager, compiled (C++), graph (CUDA graphs); auto: the fastest that compiles nothing.",
        rich_help_panel="Model",
    ),
]
Tokenizer = Annotated[
    str | None, typer.Option(help="Hub name or folder of another tokenizer.", rich_help_panel="Model")
]
Prompts = Annotated[
    Path | None, typer.Option(help="JSONL of messages, prompt or text; topo-search's own sets by default.")
]
Workload = Annotated[str | None, typer.Option(help="Only prompts of this workload: chat, code, math, json.")]
Split = Annotated[
    str | None,
    typer.Option(help="calibration, evaluation or all; of your own --prompts all by default."),
]
NumPrompts = Annotated[int | None, typer.Option(help="At most this many prompts, taken evenly from the workloads.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Cap of every answer, in tokens.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Temperature = Annotated[
    float, typer.Option(help="0: greedy; above: sampled, the same text for every tree.", rich_help_panel="Sampling")
]
TopK = Annotated[int | None, typer.Option(help="Draw from this many best tokens.", rich_help_panel="Sampling")]
TopP = Annotated[
    float | None, typer.Option(help="Draw from the best tokens that hold this probability.", rich_help_panel="Sampling")
]
MinP = Annotated[
    float | None,
    typer.Option(help="Draw from tokens with this share of the best one's probability.", rich_help_panel="Sampling"),
]
NoiseShare = Annotated[
    float,
    typer.Option(
        help="Weight of the draw's own noise in ranking candidates, e.g. 0.5; changes speed, never text.",
        rich_help_panel="Sampling",
    ),
]
_TYPICAL = "Typical acceptance"
AcceptanceRule = Annotated[
    Acceptance,
    typer.Option(
        help="exact: the text of plain decoding; typical: Medusa's rule, which CHANGES THE TEXT.",
        rich_help_panel=_TYPICAL,
    ),
]
Epsilon = Annotated[
    float | None,
    typer.Option(
        help="Take a drafted token of probability above min(epsilon, delta * exp(-entropy)); 0.09 by default.",
        rich_help_panel=_TYPICAL,
    ),
]
Delta = Annotated[float | None, typer.Option(help="The other bound; 0.3 by default.", rich_help_panel=_TYPICAL)]
BonusToken = Annotated[
    Bonus | None,
    typer.Option(
        help="Token after the path: sampled as without a tree (default), the best one, or drawn above the bound.",
        rich_help_panel=_TYPICAL,
    ),
]
TraceFile = Annotated[Path | None, typer.Option("--trace", help="Rank trace; the newest in ./calibration by default.")]
LatencyFile = Annotated[
    Path | None, typer.Option("--latency", help="Latency table; the newest in ./calibration by default.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
AllowMismatch = Annotated[
    bool, typer.Option("--allow-mismatch", help="Warn where tree, trace or table were made for something else.")
]
