"""Tensors and configuration of a checkpoint folder. Nothing is ever unpickled: `.pt` files load tensors only."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from topo_search.errors import InputError
from topo_search.files.documents import parse_json
from topo_search.files.reading import read_text

CONFIG_FILE = "config.json"
_CONFIG_BYTES = 16 * 2**20
# In order of preference: our own layout, heads alone, then whole models and their shards.
_WEIGHTS = (
    "heads.safetensors",
    "medusa_lm_head.safetensors",
    "hydra_lm_head.safetensors",
    "medusa_lm_head.pt",
    "hydra_lm_head.pt",
    "model.safetensors",
    "model-*.safetensors",
    "pytorch_model.bin",
    "pytorch_model-*.bin",
)
# A model with heads in it: only these of its tensors are read, the rest belongs to the target.
_HEADS_IN_A_MODEL = ("medusa_head.", "medusa_heads.")
_KEPT_OF_A_MODEL = (*_HEADS_IN_A_MODEL, "lm_head.weight", "token_map")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the heads in a folder, on the CPU, by the name it is stored under.

    Raises:
        InputError: the folder holds no known weights, they are cut off, or they hold more than tensors.
    """
    for pattern in _WEIGHTS:
        if files := sorted(folder.glob(pattern)):
            break
    else:
        held = sorted(path.name for path in folder.iterdir())[:8]
        raise InputError(
            f"Heads folder {folder} holds no weights; expected one of {', '.join(_WEIGHTS)}, found {held}."
        )
    entries: dict[str, Callable[[], Tensor]] = {}
    for file in files:
        entries |= _safetensors(file) if file.suffix == ".safetensors" else _pickled(file)
    return {name: entries[name]() for name in _of_heads(list(entries))}


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json, empty where there is none.

    Raises:
        InputError: it is no JSON object.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        return {}
    config = parse_json(path, read_text(path, max_bytes=_CONFIG_BYTES))
    if not isinstance(config, dict):
        raise InputError(f"{path} must hold a JSON object.")
    return config


def _safetensors(path: Path) -> dict[str, Callable[[], Tensor]]:
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path} is no whole safetensors file ({error}); copy it again.") from None
    return {name: partial(file.get_tensor, name) for name in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118


def _pickled(path: Path) -> dict[str, Callable[[], Tensor]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle's version, where the error below says what matters
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        reason = str(error).split("\n")[0][:200]
        raise InputError(
            f"{path} holds more than tensors or is cut off, and is not unpickled ({reason}). Convert it to safetensors."
        ) from None
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise InputError(f"{path} is no dictionary of tensors; store the heads' state dict.")
    return {name: partial(loaded.__getitem__, name) for name in loaded}


def _of_heads(names: list[str]) -> list[str]:
    """The names to read: of a whole model with heads, the heads and what proves whose they are."""
    if not any(name.startswith(_HEADS_IN_A_MODEL) for name in names):
        return names
    return [name for name in names if name.startswith(_KEPT_OF_A_MODEL)]
