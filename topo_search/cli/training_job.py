"""What the `topo-search train` commands are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topo_search.errors import InputError

if TYPE_CHECKING:
    from topo_search.training.heads import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every family's command is asked for."""

    target: str
    out: Path
    texts: list[Path]
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
    earlier: dict[str, Any] | None = None  # of the heads that the run goes on from: how they came to be


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
    same = ("target", "out", "prompts", "num_prompts", "max_new_tokens", "num_heads", "shortlist", "held_out")
    rest = ("dtype", "device", "attention", "tokenizer", "quantize")
    return Job(
        recipe=Recipe(**{name: given[name] for name in of_recipe}),
        texts=given["text"] or [],
        ordinary=given["ordinary_text"] or [],
        work=given["work"] or given["out"] / "work",
        **{name: given[name] for name in (*same, *rest)},
    )
