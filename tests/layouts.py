"""Small checkpoints in other projects' layouts, and each head's formula in a few lines, from the stored tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from models import VOCAB
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

HIDDEN = 64


def drawn(*shape: int) -> Tensor:
    return 0.1 * torch.randn(*shape, dtype=torch.float64)


def medusa_tensors(
    heads: int, layers: int, *, own: bool = True, prefix: str = "", vocab: int = VOCAB
) -> dict[str, Tensor]:
    """Layouts A (own projections), B (without) and, with a prefix, C."""
    tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{prefix}{head}.{layer}.linear.weight"] = drawn(HIDDEN, HIDDEN)
            tensors[f"{prefix}{head}.{layer}.linear.bias"] = drawn(HIDDEN)
        if own:
            tensors[f"{prefix}{head}.{layers}.weight"] = drawn(vocab, HIDDEN)
    return tensors


def vllm_tensors(
    heads: int, layers: int, *, bias: bool = False, prefix: str = "", rows: int = VOCAB
) -> dict[str, Tensor]:
    """Layout D."""
    tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{prefix}blocks.{head}.layers.{layer}.weight"] = drawn(HIDDEN, HIDDEN)
            if bias:
                tensors[f"{prefix}blocks.{head}.layers.{layer}.bias"] = drawn(HIDDEN)
        tensors[f"{prefix}lm_heads.{head}.weight"] = drawn(rows, HIDDEN)
    return tensors


def hydra_tensors(heads: int, layers: int, *, spaced: bool = False) -> dict[str, Tensor]:
    """Hydra `mlp`, grounded; `spaced` numbers dropout modules in between. Layers 2.. are one module, stored anew."""
    first, step, inner = (1, 2, "1.") if spaced else (0, 1, "")
    tensors = {}
    for head in range(heads):
        width, name = (head + 2) * HIDDEN, f"hydra_mlp.{head}"
        for part in ("linear", "res_connection"):
            tensors[f"{name}.{first}.{part}.weight"] = drawn(HIDDEN, width)
            tensors[f"{name}.{first}.{part}.bias"] = drawn(HIDDEN)
        weight, bias = drawn(HIDDEN, HIDDEN), drawn(HIDDEN)
        for layer in range(1, layers):
            tensors[f"{name}.{first + step * layer}.linear.weight"] = weight.clone()
            tensors[f"{name}.{first + step * layer}.linear.bias"] = bias.clone()
        tensors[f"hydra_lm_head.{head}.{inner}weight"] = drawn(VOCAB, HIDDEN)
        tensors[f"hydra_lm_head.{head}.{inner}bias"] = drawn(VOCAB)
    return tensors


def medusa_scores(tensors: dict[str, Tensor], states: Tensor, projection: Tensor | None = None) -> Tensor:
    """`[rows, heads, vocab]`: x + SiLU(W x + b) per layer, then the head's matrix, or `projection`."""
    scores: list[Tensor] = []
    while f"{len(scores)}.0.linear.weight" in tensors:
        head, layer, x = len(scores), 0, states
        while f"{head}.{layer}.linear.weight" in tensors:
            weight, bias = tensors[f"{head}.{layer}.linear.weight"], tensors[f"{head}.{layer}.linear.bias"]
            x = x + functional.silu(x @ weight.T + bias)
            layer += 1
        scores.append(x @ (tensors[f"{head}.{layer}.weight"] if projection is None else projection).T)
    return torch.stack(scores, dim=1)


def vllm_scores(tensors: dict[str, Tensor], states: Tensor, projections: Sequence[Tensor]) -> Tensor:
    """The same with vLLM's names; biases where they are stored."""
    scores = []
    for head, projection in enumerate(projections):
        layer, x = 0, states
        while (weight := tensors.get(f"blocks.{head}.layers.{layer}.weight")) is not None:
            bias = tensors.get(f"blocks.{head}.layers.{layer}.bias", torch.zeros(HIDDEN, dtype=torch.float64))
            x = x + functional.silu(x @ weight.T + bias)
            layer += 1
        scores.append(x @ projection.T)
    return torch.stack(scores, dim=1)


def hydra_scores(tensors: dict[str, Tensor], read: Tensor, embedded: Tensor) -> Tensor:
    """`[rows, heads, vocab]`: R x + r + SiLU(W x + b) over h_t and the path, z + SiLU(W z + b), a biased matrix."""
    scores: list[Tensor] = []
    while any(name.startswith(f"hydra_mlp.{len(scores)}.") for name in tensors):
        head = len(scores)
        mlp, out = f"hydra_mlp.{head}.", f"hydra_lm_head.{head}."
        x = torch.cat([read, embedded[:, : head + 1].flatten(1)], dim=-1)
        for place in sorted({int(name.split(".")[2]) for name in tensors if name.startswith(mlp)}):
            parts = {name: value for name, value in tensors.items() if name.startswith(f"{mlp}{place}.")}
            found = {name.removeprefix(f"{mlp}{place}."): value for name, value in parts.items()}
            kept = x if "res_connection.weight" not in found else x @ found["res_connection.weight"].T
            kept = kept + found.get("res_connection.bias", torch.zeros(HIDDEN, dtype=torch.float64))
            x = kept + functional.silu(x @ found["linear.weight"].T + found["linear.bias"])
        weight, bias = (next(v for n, v in tensors.items() if n.startswith(out) and n.endswith(p)) for p in _PARTS)
        scores.append(x @ weight.T + bias)
    return torch.stack(scores, dim=1)


_PARTS = ("weight", "bias")


def stored(folder: Path, file: str, tensors: dict[str, Tensor], **config: Any) -> Path:
    """A folder with those tensors, as safetensors or as torch saves them, and that config.json."""
    folder.mkdir(exist_ok=True)
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
