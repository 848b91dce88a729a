"""Accuracy tables, ours and the peers'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from factories import goldens

from topo_search.errors import InputError
from topo_search.estimates import independent
from topo_search.files.accuracies import read_accuracies

GOLDENS = goldens()


def written(folder: Path, content: object, name: str = "table.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def medusa_csv(models: dict[str, list[list[float]]]) -> str:
    """A training run's export, columns out of order and among others."""
    heads, ranks = len(next(iter(models.values()))), len(next(iter(models.values()))[0])
    columns = [f"train/medusa{h}_top{k + 1}" for k in range(ranks) for h in range(heads)]
    lines = [",".join(f'"{name}"' for name in ("Name", "train/medusa0_loss", *columns))]
    for name, table in models.items():
        values = [table[h][k] for k in range(ranks) for h in range(heads)]
        lines.append(",".join(f'"{value}"' for value in (name, 1.8, *values)))
    return "\n".join(lines) + "\n"


def test_ours(tmp_path: Path) -> None:
    found = read_accuracies(written(tmp_path, {"rank_table": [[0.6, 0.15], [0.4, 0.1, 0.05]]}))
    assert (found.rank_table, found.repeat_last) == (((0.6, 0.15), (0.4, 0.1, 0.05)), False)


def test_medusas_csv_gives_the_golden_tables_and_tokens_per_step(tmp_path: Path) -> None:
    golden = GOLDENS["medusa_csv"]
    text = medusa_csv({name: model["cumulative_top1_to_top5_by_head"] for name, model in golden.items()})
    path = written(tmp_path, text, "medusa_acc.csv")
    for name, model in golden.items():
        found = read_accuracies(path.with_name(f"medusa_acc.csv#{name}"))
        for row, expected in zip(found.rank_table, model["rank_table"], strict=True):
            assert row == pytest.approx(expected, abs=1e-9)
        best = model["best_tokens_per_step_by_num_draft_nodes"]
        tokens = {n: 1 + float(independent(found.rank_table, int(n)).probabilities.sum()) for n in best}
        assert tokens == pytest.approx(best, abs=5e-5)


def test_sequoias_vector_drops_its_ends_and_serves_every_depth(tmp_path: Path) -> None:
    golden = GOLDENS["sequoia"]
    counts = [*golden["event_counts_rank_1_to_32"], golden["events_none"]]
    found = read_accuracies(written(tmp_path, [0, *(count / sum(counts) for count in counts)]))
    assert (len(found.rank_table), len(found.rank_table[0]), found.repeat_last) == (1, 32, True)
    best = golden["best_tokens_per_step_by_size_including_root_any_rank_order_unbounded_depth"]
    listed = independent(found.rank_table, 63, repeat_last=True)
    assert 1 + float(listed.probabilities.sum()) == pytest.approx(best["64"], abs=5e-5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"rank_table": []}, "at least 1 item"),
        ({"rank_table": [[]]}, "Depth 1 has no ranks"),
        ({"rank_table": [[0.6, 0.2], [0.7, 0.4]]}, "ranks of depth 2 add up to 1.1000"),
        ({"rank_table": [[0.6, 0.7, 0.8], [0.4, 0.5, 0.6]]}, "values that only rise are cumulative"),
        ({"rank_table": [[0.3, 0.45], [0.2, 0.28]]}, "values that only rise are cumulative"),
        ({"rank_table": [[0.05, 0.07, 0.08]]}, "subtract from every value the one before it"),
        ({"rank_table": [[0.5, -0.1]]}, "Depth 1, rank 1 is -0.1"),
        ('{"rank_table": [[NaN]]}', "holds NaN"),
        ('{"rank_table": [[1e999]]}', "too large a number"),
        ({"rank_table": [["0.5"]]}, "rank_table"),
        ({"rank_table": [[0.5]], "depth": 1}, "depth is no known key"),
        ({"accuracies": [[0.5]]}, "It is no accuracy table; expected"),
        ([0.1, 0.5, 0.4], "starts with 0"),
        ([0, 0.5], "is a list of numbers"),
        ([0, 0.5, None], "is a list of numbers"),
        ([0, 0.9, 0.4], "add up to 1.3000"),
        ("", "not valid JSON"),
    ],
)
def test_bad_tables_are_refused_with_place_and_rule(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_accuracies(written(tmp_path, content))
    assert "table.json" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (medusa_csv({"7b": [[0.5]], "33b": [[0.6]]}), "holds 7b, 33b; name one of them after the file, as in FILE#7b"),
        ("Name,loss\n7b,1.0\n", "no columns medusa0_top1"),
        ("Name,medusa0_top1\n", "no row of values"),
        ("Name,medusa1_top1\n7b,0.5\n", "heads count from 0"),
        ("Name,medusa0_top1,medusa0_top3\n7b,0.5,0.6\n", r"head 0 are top \[1, 3\]"),
        ("Name,medusa0_top1,medusa0_top2\n7b,0.5,0.4\n", "accuracies of head 0 fall"),
        ("Name,medusa0_top1\n7b,good\n", "holds 'good', which is no number"),
        ("Name,medusa0_top1\n7b,nan\n", "Depth 1, rank 0 is nan"),
    ],
)
def test_bad_csv_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_accuracies(written(tmp_path, text, "acc.csv"))


def test_a_name_that_the_csv_lacks_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, medusa_csv({"7b": [[0.5]]}), "acc.csv")
    with pytest.raises(InputError, match="no row named 13b; it holds 7b"):
        read_accuracies(path.with_name("acc.csv#13b"))
    with pytest.raises(InputError, match="There is no file"):
        read_accuracies(tmp_path / "absent.json")
