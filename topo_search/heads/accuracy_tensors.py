"""The peers' accuracy files in torch's format, read without running what they hold.

Medusa's `<name>_heads_accuracy.pt` and PPD's `<name>_accuracy.pt`: a list of boolean tensors, per head [samples, ranks]
or [samples, 1, ranks], whether each rank was right; Sequoia's acceptance vector: one float tensor.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from topo_search.errors import InputError
from topo_search.files.accuracies import AccuracyTable, acceptance_vector, accuracy_table
from topo_search.files.reading import naming, require_file

_MAX_BYTES = 2**30


def read_accuracy_tensors(path: Path) -> AccuracyTable:
    """An accuracy table from a `.pt` file.

    Rates are over the rows that the file has, whatever number of samples its maker divided by.

    Raises:
        InputError: no such file, more than tensors in it, an unknown layout, or values that are no rank probabilities.
    """
    require_file(path, max_bytes=_MAX_BYTES)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise InputError(f"{path} is no torch file of plain tensors: {str(error).splitlines()[0]}") from None
    with naming(path):
        if isinstance(content, torch.Tensor) and content.dim() == 1:
            return acceptance_vector(content.tolist(), source="Sequoia's acceptance vector")
        if isinstance(content, list) and content:
            return accuracy_table([_rates(head, found) for head, found in enumerate(content)], source="head accuracies")
        raise InputError("Expected a list of boolean tensors, one per head, or Sequoia's acceptance vector.")


def _rates(head: int, found: Any) -> list[float]:
    """Column means of one head's hits."""
    if not isinstance(found, torch.Tensor) or found.dim() not in (2, 3) or not found.numel():
        raise InputError(f"Entry {head} is no tensor [samples, ranks] or [samples, 1, ranks] with rows.")
    rates: list[float] = found.reshape(-1, found.shape[-1]).double().mean(dim=0).tolist()
    return rates
