"""The peers' accuracy files in torch's format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from topo_search.errors import InputError
from topo_search.heads.accuracy_tensors import read_accuracy_tensors


def test_rates_are_over_the_rows_of_the_file(tmp_path: Path) -> None:
    """Not over a literal number of samples."""
    hits = torch.tensor([[True, False], [False, True], [False, False], [True, False]])
    for shape in ((4, 2), (4, 1, 2)):
        torch.save([hits.reshape(shape), ~hits.reshape(shape) & False], tmp_path / "heads.pt")
        assert read_accuracy_tensors(tmp_path / "heads.pt").rank_table == ((0.5, 0.25), (0.0, 0.0))


def test_sequoias_vector(tmp_path: Path) -> None:
    torch.save(torch.tensor([0.0, 0.5, 0.25, 0.25]), tmp_path / "vector.pt")
    found = read_accuracy_tensors(tmp_path / "vector.pt")
    assert (found.rank_table, found.repeat_last) == (((0.5, 0.25),), True)


class _Anything:
    pass


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_Anything(), "no torch file of plain tensors"),
        ({"a": 1}, "Expected a list of boolean tensors"),
        ([], "Expected a list of boolean tensors"),
        ([torch.zeros(3)], "Entry 0 is no tensor"),
        ([torch.zeros(0, 5)], "Entry 0 is no tensor"),
        ([torch.ones(3, 2)], "add up to 2.0000"),
        ([torch.full((3, 2), float("nan"))], "is nan"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "bad.pt")
    with pytest.raises(InputError, match=message):
        read_accuracy_tensors(tmp_path / "bad.pt")


def test_a_file_that_is_no_torch_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.pt").write_text("no tensors")
    with pytest.raises(InputError, match="no torch file of plain tensors"):
        read_accuracy_tensors(tmp_path / "bad.pt")
