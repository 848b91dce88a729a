"""Where a training run stands, in one file that is either whole or the one before it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from topo_search.errors import InputError


def write_checkpoint(path: Path, settings: dict[str, Any], state: dict[str, Any]) -> None:
    """Write `state`, made under `settings`, in the place of the checkpoint before it.

    Raises:
        InputError: the disk is full or the folder cannot be written; the checkpoint before it is untouched.
    """
    scratch = path.with_suffix(".writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"settings": settings, **state}, scratch)
        scratch.replace(path)
    except (OSError, RuntimeError) as error:  # torch's own writer turns a full disk into a RuntimeError
        scratch.unlink(missing_ok=True)
        reason = str(error).splitlines()[0]
        raise InputError(
            f"Checkpoint {path} cannot be written ({reason}); the one before it is untouched. Free space or give "
            "another --work, then start again to continue."
        ) from None


def read_checkpoint(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The state of a run with these settings, or None where there is none.

    Raises:
        InputError: the file is damaged or of a run with other settings.
    """
    if not path.exists():
        return None
    try:
        state: Any = torch.load(path, weights_only=True, map_location="cpu")
        found = dict(state["settings"])
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError) as error:
        # Never torch's words: they advise to unpickle what cannot be trusted.
        reason = type(error).__name__
        raise InputError(f"{path} is no checkpoint of a training run ({reason}); delete it to start anew.") from None
    if found != settings:
        raise InputError(
            f"{path} is of a run with other settings ({', '.join(_differences(found, settings))}); delete it or use "
            "another --work."
        )
    result: dict[str, Any] = state
    return result


def _differences(found: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """What differs: the fields of a recipe with both values, other settings by name."""
    differing = []
    for key in sorted(key for key in {*found, *settings} if found.get(key) != settings.get(key)):
        then, now = found.get(key), settings.get(key)
        if key == "recipe" and isinstance(then, dict) and isinstance(now, dict):
            fields = sorted(field for field in {*then, *now} if then.get(field) != now.get(field))
            differing += [f"{field} {then.get(field)}, now {now.get(field)}" for field in fields]
        else:
            differing.append(key)
    return differing


def require_finite(total: Tensor, norm: Tensor, *, step: int, checkpoint: Path | None) -> None:
    """Refuse a step that would spoil the weights.

    Raises:
        InputError: the loss or its gradient is NaN or infinite.
    """
    if bool(torch.isfinite(total)) and bool(torch.isfinite(norm)):
        return
    kept = f" The last checkpoint, {checkpoint}, is untouched." if checkpoint and checkpoint.exists() else ""
    raise InputError(
        f"The loss is {float(total)} and its gradient {float(norm)} at step {step}: lower --learning-rate, or look for "
        f"broken hidden states.{kept}"
    )
