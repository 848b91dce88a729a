"""The commands as a user types them, on a tiny target: the whole flow, and each bad input once."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from folders import save_tiny_heads, save_tiny_target
from models import must_not_run
from safetensors.numpy import load_file

from topo_search.cli.app import main
from topo_search.resources import packaged

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    target, other = save_tiny_target(root / "target"), save_tiny_target(root / "other", seed=9)
    return {
        "target": target,
        "other": other,
        "heads": save_tiny_heads(root / "heads", target),
        "shallow": save_tiny_heads(root / "shallow", target, num_heads=1),
    }


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["topo-search", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        code = ended.value.code
        return code if isinstance(code, int) else 0, printed.out, printed.err

    return call


@pytest.fixture
def model(tiny_folders: dict[str, Path]) -> list[object]:
    return ["--target", tiny_folders["target"], "--heads", tiny_folders["heads"]]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"prompt": f"w{n} w{n + 1} w3"} for n in range(6)]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture
def calibrated(run: Run, model: list[object], prompts: Path) -> list[object]:
    code, _, err = run("calibrate", *model, "--prompts", prompts, "--max-new-tokens", 12, "--no-measure")
    assert code == 0, err
    grid = ["--quick", "--max-width", 5, "--contexts", "8,16", "--rounds", 2]
    code, _, err = run("measure", *model, *grid)
    assert code == 0, err
    return model


def test_the_whole_flow(run: Run, calibrated: list[object], prompts: Path, tmp_path: Path) -> None:
    code, out, err = run("optimize", "--budget", 5, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert set(result) >= {
        *("name", "tree_file", "paths", "num_draft_nodes", "verify_width", "depth", "tokens_per_step"),
        *("tokens_per_step_all_positions", "step_ms", "tokens_per_s", "speedup", "recommended", "alternatives"),
    }
    assert [row["name"] for row in result["alternatives"]] == ["plain", "best chain", "best tree"]
    assert result["recommended"] == result["name"]
    assert result["alternatives"][0]["tree_file"] is None
    assert result["alternatives"][0]["tokens_per_step"] == 1.0
    for row in result["alternatives"][1:]:
        assert (tmp_path / row["tree_file"]).is_file()
        assert row["verify_width"] == row["num_draft_nodes"] + 1 == len(row["paths"]) + 1 <= 5

    code, out, err = run("show", "trees/best-tree.tree.json")
    assert code == 0
    assert "root" in out
    code, _, err = run("export", "trees/best-tree.tree.json", "--to", "masks")
    assert code == 0, err
    assert load_file(tmp_path / "trees/best-tree.masks.safetensors")["attention_mask"].dtype == bool

    code, out, err = run("generate", "w1 w2", *calibrated, "--max-new-tokens", 10)
    assert code == 0, err
    assert "tokens per step" in err
    race = ["--prompts", prompts, "--max-new-tokens", 12, "--repeats", 2, "--json"]
    code, out, err = run("bench", *calibrated, *race)
    assert code == 0, err
    contenders = json.loads(out)["contenders"]
    assert [row["name"] for row in contenders] == ["generate", "plain", "best chain", "medusa-63", "best tree"]
    for row in contenders:
        assert row["text_equal"] is True
        assert row["first_divergence"] is None
    for row in contenders[1:]:
        assert row["predicted_tokens_per_step"] == pytest.approx(row["tokens_per_step"])
        assert row["forecast_tokens_per_step"] is not None
        if row["predicted_tokens_per_s"] is not None:
            expected = row["tokens_per_s"] / row["predicted_tokens_per_s"]
            assert row["measured_over_predicted"] == pytest.approx(expected)


def test_tokens_per_step_needs_no_table(run: Run, model: list[object], prompts: Path) -> None:
    run("calibrate", *model, "--prompts", prompts, "--max-new-tokens", 12, "--no-measure")
    trace = next(Path("calibration").glob("*.trace.safetensors"))
    code, out, _ = run("optimize", "--trace", trace, "--objective", "tokens-per-step", "--budget", 4, "--json")
    result = json.loads(out)
    assert code == 0
    assert result["recommended"] == "best tree"
    assert result["name"] == "best tree"


def test_optimize_asks_optuna(run: Run, calibrated: list[object], tmp_path: Path) -> None:
    """Computed: stored in the output folder and continued; measured: the tiny model races."""
    asked = ["optimize", "--budget", 5, "--strategy", "optuna", "--trials", 4, "--json"]
    code, out, err = run(*asked)
    assert code == 0, err
    first = json.loads(out)
    assert first["study"]["tried"] <= 4
    assert (tmp_path / "trees/study.db").is_file()
    code, out, _ = run(*asked)
    tried = first["study"]["tried"]
    assert first["study"]["known"] == 0
    assert json.loads(out)["study"] == first["study"] | {"known": tried}
    assert json.loads(out)["paths"] == first["paths"]
    code, _, err = run(*asked[:-1])
    assert code == 0, err
    assert not tried or f"went on from {tried} trees tried before" in err
    race = ["--objective", "race", "--prompts", "mine.jsonl", "--max-new-tokens", 6]
    code, out, err = run(*asked, *race, "--repeats", 1, *calibrated)
    assert code == 0, err
    study = json.loads(out)["study"]
    assert study["tried"] == 0 or "remeasured_over_seed" in study


def test_optimize_from_an_accuracy_table(run: Run, tmp_path: Path) -> None:
    """Expected, not replayed: no interval, and a table that breaks a rule is named."""
    table = tmp_path / "mine.json"
    table.write_text(json.dumps({"rank_table": [[0.6, 0.15, 0.05], [0.4, 0.1, 0.05]]}))
    asked = ["optimize", "--accuracies", table, "--objective", "tokens-per-step", "--budget", 4, "--json"]
    code, out, err = run(*asked)
    assert code == 0, err
    result = json.loads(out)
    assert result["paths"] == [[0], [1], [0, 0]]
    assert result["tokens_per_step"] == pytest.approx(1.99)
    assert (result["intervals"], result["tokens_per_s"]) == (None, None)
    assert result["assumptions"]["law"] == "every position alike, each depth independent of the path"
    code, out, err = run(*asked[:-1])
    assert code == 0, err
    assert "own" not in out
    assert max(map(len, out.splitlines())) <= 80
    table.write_text('{"rank_table": [[0.6, NaN]]}')
    _refused(run(*asked), "mine.json", "holds NaN", "write 0")
    table.write_text("[[0.6, 0.2], [0.4]]")
    _refused(run(*asked), "mine.json", '{"rank_table": [[...], ...]}')
    table.write_text(json.dumps({"rank_table": [[0.6, 0.5]]}))
    _refused(run(*asked), "mine.json", "add up to 1.1")
    _refused(run("optimize", "--accuracies", table, "--budget", 4), "mine.json")


def test_optimize_says_which_file_was_given_for_which(run: Run) -> None:
    folder = packaged("calibration/demo")
    trace, latency = folder / "demo.trace.safetensors", folder / "demo.latency.json"
    _refused(run("optimize", "--trace", latency), "demo.latency.json is a latency table", "give it as --latency")
    _refused(run("optimize", "--latency", trace), "demo.trace.safetensors is a rank trace", "give it as --trace")


def test_export_writes_nothing_into_the_installation(run: Run, tmp_path: Path) -> None:
    shipped = next(packaged("trees/reference").rglob("*.tree.json"))
    before = sorted(shipped.parent.iterdir())
    code, _, err = run("export", shipped, "--to", "dot")
    assert code == 0, err
    assert sorted(shipped.parent.iterdir()) == before
    assert [path.suffix for path in (tmp_path / "trees").iterdir()] == [".dot"]


def test_optimize_refuses_what_does_not_go_together(run: Run, calibrated: list[object], tmp_path: Path) -> None:
    _refused(run("optimize", "--objective", "race"), "--strategy optuna", "--target")
    _refused(run("optimize", "--target", "demo"), "--objective race")
    _refused(run("optimize", "--accuracies", "a.json", "--strategy", "optuna"), "--accuracies")
    table = tmp_path / "mine.json"
    table.write_text('{"rank_table": [[0.6, 0.1]]}')
    idle = ["--trace", "x.trace.safetensors", "--refine", "swaps", "--workload", "code"]
    _refused(run("optimize", "--accuracies", table, *idle), "mine.json", "--trace x.trace.safetensors", "swaps", "code")
    _refused(run("optimize", "--trials", 5), "--strategy optuna", "--trials 5")
    _refused(run("optimize", "--num-prompts", 5), "--objective race", "--num-prompts 5")
    _refused(run("optimize", "--context-weights", "128:1"), "128:1", "256=0.7,1024=0.3")
    _refused(run("optimize", "--context-weights", "128=1,128=2"), "twice")
    _refused(run("optimize", "--context-weights", "128=-1"), "context weights", "negative")
    steps = ["--objective", "tokens-per-step", "--context-weights", "128=1"]
    _refused(run("optimize", *steps), "tokens-per-step", "--context-weights")
    _refused(run("optimize", "--batch-weights", "1:1"), "1:1", "BATCH=WEIGHT", "1=0.7,4=0.3")
    _refused(run("optimize", "--batch-weights", "1=1,1=2"), "twice")
    _refused(run("optimize", "--batch-weights", "1=0"), "batch weights", "not all 0")
    _refused(run("optimize", "--batch-weights", "1=1", "--batch", 2), "--batch and --batch-weights", "leave one out")
    _refused(run("optimize", *steps[:2], "--batch-weights", "1=1"), "tokens-per-step", "--batch-weights")
    race = ["--strategy", "optuna", "--objective", "race", "--target", "demo"]
    _refused(run("optimize", *race, "--batch-weights", "1=1"), "one sequence at a time")
    _refused(run("optimize", "--folds", 1), "folds", "at least 2")
    _refused(run("optimize", "--max-depth", 0), "max depth")
    _refused(run("optimize", "--batch", 2, "--budget", 4), "batch 2", "--batch one of these")
    _refused(run("optimize", "--strategy", "optuna", "--trials", 0, "--budget", 4), "--trials")
    storage = ["--strategy", "optuna", "--storage", "nonsense://x", "--budget", 4]
    _refused(run("optimize", *storage), "nonsense", "sqlite:///")


HEADS = Path(__file__).parents[1] / "benchmarks/results/heads"


def _of_heads(*names: str, suffix: str) -> list[object]:
    option = "--trace" if suffix == "trace.safetensors" else "--latency"
    return [word for name in names for word in (option, HEADS / f"{name}.{suffix}")]


def test_shipped_files_are_named_in_words_and_json(run: Run) -> None:
    code, out, err = run("optimize", "--budget", 9, "--resamples", 100)
    assert code == 0, err
    words = ["The trace is the demo's shipped one", "The step times are the demo's shipped ones"]
    assert all(word in " ".join(err.split()) for word in words)
    code, out, _ = run("optimize", "--budget", 9, "--resamples", 100, "--json")
    assert [warning.split(",")[0] for warning in json.loads(out)["warnings"]][:2] == words


def test_optimize_chooses_among_the_shipped_heads(run: Run, tmp_path: Path) -> None:
    """Each trace finds the table of its heads in whatever order; the winner's answer is the one it gets alone."""
    traces = _of_heads("demo-medusa", "demo-hydra", suffix="trace.safetensors")
    tables = _of_heads("demo-hydra", "demo-medusa", suffix="compiled.latency.json")
    asked = ["optimize", "--workload", "math", "--budget", 16]
    code, out, err = run(*asked, *traces, *tables, "--json")
    assert code == 0, err
    found = json.loads(out)
    rows = {row["heads"]["name"]: row for row in found["among"]}
    assert list(rows) == ["demo-medusa", "demo-hydra"]
    chosen = found["heads"]["name"]
    assert [name for name, row in rows.items() if row["chosen"]] == [chosen]
    assert all(Path(row["latency"]).name == f"{name}.compiled.latency.json" for name, row in rows.items())
    (other,) = (row for row in rows.values() if not row["chosen"])
    low, high = other["chosen_over"]["interval"]
    assert low < other["chosen_over"]["value"] < high
    assert other["chosen_over"]["value"] == pytest.approx(found["tokens_per_s"] / other["tokens_per_s"])
    assert rows[chosen]["chosen_over"] is None
    assert f"Fastest heads: {chosen}" in found["verdict"]
    made_from = json.loads((tmp_path / "trees/best-tree.tree.json").read_text())["made_from"]
    assert made_from["heads"]["name"] == chosen
    alone = [*_of_heads(chosen, suffix="trace.safetensors"), *_of_heads(chosen, suffix="compiled.latency.json")]
    code, out, err = run(*asked, *alone, "--json")
    assert code == 0, err
    single = json.loads(out)
    assert (single["heads"], single["among"]) == (found["heads"], [])
    changed = {"among", "verdict", "warnings"}
    assert {k: v for k, v in single.items() if k not in changed} == {k: v for k, v in found.items() if k not in changed}
    code, out, err = run(*asked, *traces, *tables, "--strategy", "optuna", "--trials", 4)
    assert code == 0, err
    assert "Heads, each with its recommended alternative" in out
    assert "4 trees" in err and "Fastest heads" in err


def test_the_next_command_names_heads_and_mode(run: Run) -> None:
    """As it is printed it must serve the tree: defaults are other heads and eager steps."""
    hydra = _of_heads("demo-hydra", suffix="trace.safetensors")
    table = _of_heads("demo-hydra", suffix="compiled.latency.json")
    _, _, err = run("optimize", "--budget", 8, "--resamples", 100, *hydra, *table)
    said = " ".join(err.split())
    assert "topo-search generate --heads demo-hydra --mode compiled --tree " in said
    assert "topo-search bench --heads demo-hydra --mode compiled --tree " in said


def test_heads_and_tables_that_do_not_pair_are_named(run: Run, tmp_path: Path) -> None:
    both = _of_heads("demo-medusa", "demo-hydra", suffix="trace.safetensors")
    tables = _of_heads("demo-medusa", "demo-hydra", suffix="compiled.latency.json")
    _refused(run("optimize", *both), "demo-medusa.trace.safetensors", "no --latency", "topo-search measure")
    _refused(run("optimize", *both, *tables[:2]), "demo-hydra.trace.safetensors", "no --latency")
    _refused(run("optimize", *both[:2], *tables), "demo-hydra.compiled.latency.json", "there is no --trace")
    _refused(run("optimize", *both, *both[:2], *tables), "same heads, demo-medusa", "--trace")
    _refused(run("optimize", *both, *tables, *tables[2:]), "same heads, demo-hydra", "--latency")
    _refused(run("optimize", *both, *tables[:2], *both[2:]), "--trace")
    race = ["--strategy", "optuna", "--objective", "race", "--target", "demo"]
    _refused(run("optimize", *both, *tables, *race), "one heads", "race the winner")
    _refused(run("optimize", *both, "--acceptance", "typical"), "--trace, given more than once")
    table = tmp_path / "mine.json"
    table.write_text('{"rank_table": [[0.6, 0.1]]}')
    _refused(run("optimize", "--accuracies", table, *tables), "one --latency")
    other = json.loads((HEADS / "demo-hydra.compiled.latency.json").read_text())
    other["mode"] = "graph"
    (tmp_path / "graph.latency.json").write_text(json.dumps(other))
    mixed = [*tables[:2], "--latency", tmp_path / "graph.latency.json"]
    _refused(run("optimize", *both, *mixed), "mode is 'graph', not 'compiled'", "one device in one mode")
    shipped = packaged("calibration/demo")  # the same heads on other prompts
    other["mode"] = "eager"  # as the shipped table
    (tmp_path / "eager.latency.json").write_text(json.dumps(other))
    hydra = [*both[2:], "--latency", tmp_path / "eager.latency.json"]
    demo = ["--trace", shipped / "demo.trace.safetensors", "--latency", shipped / "demo.latency.json"]
    _refused(run("optimize", *hydra, *demo), "demo-medusa", "demo-hydra cannot be compared", "prompt")


def test_plain_decoding_has_no_tree_file(run: Run, tmp_path: Path) -> None:
    """A tree of no node could be written, but nobody could serve it."""
    code, out, err = run("optimize", "--budget", 1, "--json")
    assert code == 0, err
    rows = json.loads(out)["alternatives"]
    assert [(row["num_draft_nodes"], row["tree_file"]) for row in rows] == [(0, None)] * 3
    assert not list(tmp_path.rglob("*.tree.json"))
    code, _, err = run("optimize", "--budget", 1)
    assert code == 0, err
    assert "No tree file" in err and "plain decoding" in err and "Next:" not in err


def test_calibrating_again_continues(run: Run, calibrated: list[object], prompts: Path) -> None:
    trace = next(Path("calibration").glob("*.trace.safetensors"))
    before = load_file(trace)["ranks"]
    code, _, _ = run("calibrate", *calibrated, "--prompts", prompts, "--max-new-tokens", 12, "--no-measure")
    assert code == 0
    assert (load_file(trace)["ranks"] == before).all()


def test_heads_are_described_and_written_for_other_engines(run: Run, tiny_folders: dict[str, Path]) -> None:
    about = [tiny_folders["heads"], "--target", tiny_folders["target"]]
    code, out, err = run("heads", *about, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["kind"], found["shape"]["num_heads"], found["projection"]) == ("medusa", 3, "target")
    assert found["num_parameters"] == 3 * (64 * 64 + 64)
    assert found["share"] == found["num_parameters"] / found["target_parameters"]
    assert found["record"]["base_model_name_or_path"] == "tiny"
    code, out, err = run("heads", *about)
    assert code == 0, err
    assert "parameters" in out
    assert "claimed for a 7B target" in out
    for layout in ("medusa-a", "medusa-b"):
        code, _, err = run("heads", *about, "--to", layout, "--out", layout)
        assert code == 0, err
        code, out, err = run("heads", layout, *about[1:], "--json")
        assert json.loads(out)["layout"] == "Medusa A, B or C"
        assert json.loads(out)["projection"] == ("own" if layout == "medusa-a" else "target")
    _refused(run("heads", *about, "--to", "medusa-a"), "--to", "--out")
    _refused(run("heads", *about, "--to", "eagle", "--out", "x"), "eagle", "medusa-a")
    _refused(run("heads", "medusa-a", *about[1:], "--to", "medusa-b", "--out", "x"), "layout B", "--to medusa-a")


def test_heads_run_in_a_precision_of_their_own(run: Run, model: list[object]) -> None:
    tree = ["--tree", packaged("trees/reference/medusa-63.tree.json"), "--prune-depth", 2, "--max-new-tokens", 4]
    code, _, err = run("generate", "w1 w2", *model, *tree, "--heads-dtype", "bfloat16")
    assert code == 0, err
    assert "tokens per step" in err
    _refused(run("generate", "w1", *model, *tree, "--heads-dtype", "int3"), "int3", "bfloat16")


def test_training_writes_heads_that_calibrate(
    run: Run, tiny_folders: dict[str, Path], prompts: Path, tmp_path: Path
) -> None:
    target = ["--target", tiny_folders["target"]]
    settings = ["--max-new-tokens", 12, "--num-heads", 2, "--epochs", 2, "--batch-texts", 8, "--sampled-tokens", 0]
    code, _, err = run("train", "medusa", "--out", "mine", *target, "--prompts", prompts, *settings)
    assert code == 0, err
    config = json.loads((tmp_path / "mine/config.json").read_text())
    assert config["shape"]["num_heads"] == 2
    assert config["recipe"]["seed"] == 0
    rows = ["--prompts", prompts, "--max-new-tokens", 8, "--no-measure"]
    code, out, err = run("calibrate", *target, "--heads", "mine", *rows)
    assert code == 0, err
    assert "accuracy_given_path" in out


def _refused(result: tuple[int, str, str], *words: str) -> None:
    code, out, err = result
    assert code == 2, err
    last = err.strip().splitlines()[-1]
    assert last.startswith("Error: ")
    assert "Traceback" not in err
    for word in words:
        assert word in last, last
    assert not out


def _tree(path: Path, nodes: Any, **changes: Any) -> Path:
    content = {"format": "topo-search/tree", "version": 1, "name": "t", "nodes": nodes, "mask": {"ancestors": []}}
    path.write_text(json.dumps(content | changes))
    return path


@pytest.mark.parametrize(
    ("nodes", "word"),
    [([[0, 0]], "prefix [0]"), ([[0], [0]], "entry 1 repeats"), ([[-1]], "negative"), ([[0.5]], "integer")],
)
def test_bad_trees_are_named(run: Run, tmp_path: Path, nodes: Any, word: str) -> None:
    _refused(run("show", _tree(tmp_path / "bad.tree.json", nodes)), "bad.tree.json", word)


def test_a_file_that_is_no_tree(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.tree.json").write_text("{]")
    _refused(run("show", "a.tree.json"), "a.tree.json", "JSON")
    _refused(run("show", _tree(tmp_path / "b.tree.json", [[0]], format="other")), "format")
    _refused(run("show", _tree(tmp_path / "c.tree.json", [[0]], version=9)), "version 9")
    _refused(run("show", "none.tree.json"), "none.tree.json")


def test_a_tree_deeper_than_the_heads(run: Run, calibrated: list[object], tiny_folders: dict[str, Path]) -> None:
    run("optimize", "--budget", 5, "--objective", "tokens-per-step")
    deep = ["--tree", "trees/best-chain.tree.json", "--target", tiny_folders["target"]]
    shallow = ["--heads", tiny_folders["shallow"], "--allow-mismatch"]
    _refused(run("generate", "w1", *deep, *shallow[:2]), "its heads", f"name its heads ({tiny_folders['heads']})")
    refused = run("generate", "w1", *deep, *shallow)
    assert "Warning: trees/best-chain.tree.json: its heads" in refused[2]
    _refused(refused, "deep", "1 draft heads", "--prune-depth 1")


def test_artefacts_of_another_target_or_heads(
    run: Run, calibrated: list[object], tiny_folders: dict[str, Path]
) -> None:
    run("optimize", "--budget", 5)
    others = ["--target", tiny_folders["other"], "--heads", tiny_folders["heads"]]
    _refused(run("generate", "w1", *others), "trained for target")
    shallow = ["--target", tiny_folders["target"], "--heads", tiny_folders["shallow"]]
    _refused(run("generate", "w1", *shallow), "heads", "--allow-mismatch")
    trace = next(Path("calibration").glob("*.trace.safetensors"))
    _refused(run("bench", *shallow, "--trace", trace), "something else")
    rows = ["--max-new-tokens", 12, "--no-measure", "--out", trace, "--prompts", "mine.jsonl"]
    _refused(run("calibrate", *shallow, *rows), "cannot be continued", "--out")


def test_bad_prompts(run: Run, model: list[object], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    _refused(run("calibrate", *model, "--prompts", "empty.jsonl"), "empty.jsonl")
    _refused(run("calibrate", *model, "--prompts", "none.jsonl"), "none.jsonl")
    _refused(run("calibrate", *model, "--workload", "poetry"), "poetry", "chat")
    _refused(run("calibrate", *model, "--num-prompts", 0), "--num-prompts")
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "w1 " * 140}))
    _refused(run("calibrate", *model, "--prompts", "long.jsonl"), "context of 128", "long")


def test_bad_numbers_and_places(run: Run, model: list[object], calibrated: list[object], tmp_path: Path) -> None:
    _refused(run("optimize", "--budget", 0), "budget", "at least 1")
    (tmp_path / "file").write_text("")
    _refused(run("optimize", "--budget", 4, "--out", "file/trees"), "file")
    short = ["--prompts", "mine.jsonl", "--max-new-tokens", 4, "--no-measure"]
    _refused(run("calibrate", *model, *short, "--out", "file/traces"), "file")
    _refused(run("measure", *model, "--contexts", "a,b"), "--contexts")
    _refused(run("export", "trees/none.tree.json", "--to", "vllm"), "vllm", "masks")
    _refused(run("schema", "poem"), "poem", "tree")


def test_a_truncated_trace(run: Run, calibrated: list[object], tmp_path: Path) -> None:
    trace = next(Path("calibration").glob("*.trace.safetensors"))
    (tmp_path / "cut.trace.safetensors").write_bytes(trace.read_bytes()[:-40])
    _refused(run("optimize", "--trace", "cut.trace.safetensors"), "cut.trace.safetensors", "safetensors")


def test_batches_are_measured_and_searched(run: Run, model: list[object], prompts: Path) -> None:
    """FIELD-CASES 28: one result per batch size, and none for a batch that was not timed."""
    run("calibrate", *model, "--prompts", prompts, "--max-new-tokens", 12, "--no-measure")
    grid = ["--quick", "--max-width", 4, "--contexts", 8, "--rounds", 2, "--batches", "2,1"]
    code, out, err = run("measure", *model, *grid, "--out", "both.latency.json")
    assert code == 0, err
    assert "batch 1, 2" in err
    assert "Verify times, batch 1" in out and "Verify times, batch 2" in out

    def study(*words: object) -> object:
        code, out, err = run(*words, "--strategy", "optuna", "--trials", 1, "--json")
        assert code == 0, err
        return json.loads(out)["study"].get("name")

    for batch in (1, 2):
        code, out, err = run("optimize", "--budget", 4, "--latency", "both.latency.json", "--batch", batch, "--json")
        assert code == 0, err
        plain = json.loads(out)["alternatives"][0]
        assert plain["tokens_per_s"] == pytest.approx(1000 * batch / plain["step_ms"])
        assert f"batch {batch}" in json.loads(out)["verdict"]
        assert ("every row still being written" in json.loads(out)["verdict"]) == (batch > 1)
    mixed = ["optimize", "--budget", 4, "--latency", "both.latency.json", "--batch-weights"]
    code, out, err = run(*mixed, "1=0.25,2=0.75", "--json")
    assert code == 0, err
    plain = json.loads(out)["alternatives"][0]
    assert plain["tokens_per_s"] == pytest.approx(1000 / plain["step_ms"] / (0.25 + 0.75 / 2))
    assert "batch 1 for 25 % of the tokens and batch 2 for 75 %" in json.loads(out)["verdict"]
    assert json.loads(out)["assumptions"]["batch_weights"] == [[1, 0.25], [2, 0.75]]
    names = [study(*mixed, weights) for weights in ("1=1,2=1", "1=1,2=2")] + [study(*mixed[:-1])]
    assert len(set(names)) == 3
    _refused(run(*mixed[:-1], "--batch", 3), "no time at batch 3", "1, 2")
    _refused(run(*mixed, "1=1,3=1"), "no time at batch 3", "1, 2", "--batch-weights")
    _refused(run("measure", *model, *grid[:-1], "1,x"), "--batches 1,x")
    _refused(run("measure", *model, *grid[:-1], "0"), "batches are (0,)")


def test_a_picture_is_refused_before_anything_is_timed(run: Run, model: list[object]) -> None:
    _refused(run("measure", *model, "--plot", "stairs.pdf"), "must name a .png file")


def test_a_busy_machine_is_told() -> None:
    from topo_search.cli.measure import _host_lines

    assert _host_lines({"taken_again": 0, "host": {"other_cpu_share": 0.01}}) == []
    assert _host_lines({"taken_again": 0, "host": {"other_cpu_share": None}}) == []
    again, busy = _host_lines({"taken_again": 3, "host": {"other_cpu_share": 0.31}})
    assert again.startswith("3 times were taken again")
    assert "Warning: other work took 31 %" in busy


def test_no_table_names_measure(run: Run, model: list[object], prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("calibrate", *model, "--prompts", prompts, "--max-new-tokens", 12, "--no-measure")
    monkeypatch.setattr(
        "topo_search.cli.inputs._SHIPPED", dict.fromkeys((".trace.safetensors", ".latency.json"), "none")
    )
    _refused(run("optimize", "--budget", 4), "topo-search measure", "--objective tokens-per-step")


def test_missing_models_are_named(run: Run, tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    _refused(run("calibrate", "--target", "./nowhere"), "./nowhere")
    _refused(run("calibrate", "--target", "nowhere.gguf"), "nowhere.gguf")
    _refused(run("calibrate", "--target", tiny_folders["target"], "--heads", "./nowhere"), "./nowhere")
    _refused(run("calibrate", "--target", tiny_folders["target"], "--dtype", "int3"), "int3", "float32")


def test_sampling_from_calibration_to_text(run: Run, model: list[object], prompts: Path, tmp_path: Path) -> None:
    """A tree made at one temperature serves any seed there, and is refused elsewhere (FIELD-CASES 41)."""
    drawn = ["--temperature", 0.7, "--top-k", 20]
    rows = ["--prompts", prompts, "--max-new-tokens", 10]
    code, _, err = run("calibrate", *model, *rows, *drawn, "--seed", 3, "--no-measure")
    assert code == 0, err
    trace = next(Path("calibration").glob("*_T0.7_k20_seed3.trace.safetensors"))
    _refused(
        run("calibrate", *model, *rows, "--no-measure", "--out", trace), "cannot be continued", "temperature is 0.7"
    )
    code, _, err = run("optimize", "--trace", trace, "--objective", "tokens-per-step", "--budget", 4)
    assert code == 0, err
    greedy, sampled = "greedy acceptance at temperature 0", "sample acceptance at temperature 0.7, top-k 20"
    assert "best-tree.tree.json was a tree for" not in err
    quick = ["--objective", "tokens-per-step", "--budget", 4]
    assert run("optimize", *quick, "--trace", packaged("calibration/demo/demo.trace.safetensors"))[0] == 0
    _, _, err = run("optimize", *quick, "--trace", trace)
    assert f"trees/best-tree.tree.json was a tree for {greedy}, and is now one for {sampled}." in " ".join(err.split())
    asked = ["generate", "w1 w2", *model, "--max-new-tokens", 12]
    code, first, err = run(*asked, *drawn, "--seed", 5)
    assert code == 0, err
    assert "tokens per step" in err
    assert "tokens/s" in err
    assert run(*asked, *drawn, "--seed", 5)[1] == first
    assert run(*asked, *drawn, "--seed", 5, "--prune-depth", 0)[1] == first
    assert run(*asked, *drawn, "--seed", 5, "--tree", "none")[1] == first
    _refused(refused := run(*asked), "its rule", "temperature is 0.7", "--allow-mismatch")
    assert "Loading target" not in refused[2]
    code, _, err = run(*asked, "--tree", "none", "--top-k", 5, "--noise-share", 0.5)
    assert code == 0, err
    assert "--top-k 5, --noise-share 0.5 changes nothing at temperature 0" in err
    _refused(run(*asked, "--temperature", 0.9, "--top-k", 20), "its rule", "temperature is 0.7, not 0.9")
    race = ["bench", *model, *rows, "--repeats", 1, "--json", *drawn, "--seed", 1]
    code, out, err = run(*race)
    assert code == 0, err
    assert all(row["text_equal"] for row in json.loads(out)["contenders"])


def test_prompts_of_an_earlier_run_are_named(run: Run, model: list[object], prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"id": "other", "text": "w3 w4"}\n')
    rows = ["--max-new-tokens", 6, "--no-measure"]
    code, _, err = run("calibrate", *model, *rows, "--prompts", prompts, "--out", "a.trace.safetensors")
    assert code == 0, err
    assert "other prompts" not in err
    assert "Next: topo-search optimize --budget 64 --trace a.trace.safetensors" in err
    code, _, err = run("calibrate", *model, *rows, "--prompts", "one.jsonl", "--out", "a.trace.safetensors")
    assert code == 0, err
    assert "a.trace.safetensors held " in err
    assert " other prompts, which stay in it" in err
    code, _, err = run("calibrate", *model, *rows, "--prompts", "one.jsonl")
    assert code == 0, err
    assert "other prompts" not in err
    assert next(Path("calibration").glob("*_one_6.trace.safetensors"))


@pytest.mark.parametrize("command", [["generate", "w1"], ["bench"], ["calibrate"]])
@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (["--temperature", -1], "temperature is -1"),
        (["--temperature", 1, "--top-p", 1.5], "top_p is 1.5; it must be above 0 and at most 1"),
        (["--temperature", 1, "--top-p", 0], "top_p is 0"),
        (["--temperature", 1, "--top-k", -2], "top_k is -2"),
        (["--temperature", 1, "--min-p", 2], "min_p is 2"),
        (["--temperature", 1, "--seed", -1], "seed is -1"),
    ],
)
def test_bad_sampling_settings(
    run: Run, model: list[object], command: list[str], settings: list[Any], word: str
) -> None:
    _refused(run(*command, *model, *settings), word)


def test_a_chat_answers_every_turn(
    run: Run, calibrated: list[object], prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("optimize", "--budget", 4)
    monkeypatch.setattr("sys.stdin", io.StringIO("w1 w2\nw3\n"))
    code, out, err = run("generate", *calibrated, "--max-new-tokens", 6)
    assert code == 0, err
    assert out.count("you:") == 3
    assert err.count("tokens per step") == 2
    _refused(run("generate", *calibrated, "--raw"), "--raw continues a text")


def test_stop_strings_end_the_answer(run: Run, calibrated: list[object]) -> None:
    run("optimize", "--budget", 4)
    code, out, err = run("generate", "w1 w2", *calibrated, "--max-new-tokens", 12)
    assert code == 0, err
    second = out.split()[1]
    code, cut, err = run("generate", "w1 w2", *calibrated, "--max-new-tokens", 12, "--stop", second)
    assert code == 0, err
    end = next(index for index, word in enumerate(out.split()) if second in word)
    assert cut.split() == out.split()[: end + 1]


def test_optimize_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['topo-search', 'optimize', '--budget', '64'];"
        "from topo_search.cli import main\n"
        "try: main()\n"
        "finally: print([name for name in ('torch', 'transformers', 'optuna', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_the_module_is_the_same_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "topo_search", "--help"], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    for command in ("calibrate", "measure", "optimize", "show", "export", "schema", "generate", "bench", "train"):
        assert command in done.stdout


def test_cheap_faults_are_named_before_the_model_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("topo_search.target.load_target", must_not_run)
    good = packaged("trees/reference/medusa-63.tree.json")
    broken = _tree(tmp_path / "broken.tree.json", [[0, 0]])
    (tmp_path / "empty.jsonl").write_text("")
    _refused(run("generate", "w1", "--tree", "none.tree.json"), "none.tree.json does not exist")
    _refused(run("generate", "w1", "--tree", broken), "broken.tree.json", "prefix [0]")
    _refused(run("generate", "w1", "--tree", good, "--heads", "./nowhere"), "Heads folder ./nowhere does not exist")
    _refused(run("generate", " ", "--tree", good), "The prompt is empty")
    _refused(run("generate", "w1", "--temperature", -1), "temperature is -1.0; it must be 0 (greedy) or above")
    for top_p in (0, 1.5):
        _refused(run("generate", "w1", "--temperature", 1, "--top-p", top_p), f"top_p is {float(top_p)}")
    for command in (["heads", "./nowhere"], ["measure", "--heads", "./nowhere"], ["calibrate", "--heads", "./nowhere"]):
        _refused(run(*command), "Heads folder ./nowhere does not exist")
    _refused(run("bench", "--tree", good, "--chain", "none.tree.json"), "none.tree.json does not exist")
    _refused(run("train", "medusa", "--text", "none", "--out", "out"), "none is no text store")
    _refused(run("train", "medusa-2", "--prompts", "none.jsonl", "--out", "out"), "none.jsonl")
    for bad in ("none.jsonl", "empty.jsonl"):
        _refused(run("distill", "--prompts", bad, "--out", "text"), bad)
    assert not (tmp_path / "text").exists()
    code, _, err = run("generate", "w1", "--max-new-tokens", -3)
    assert (code, "--max-new-tokens" in err, "greater than or equal" in err) == (2, True, True)


def test_prompts_that_do_not_fit_leave_no_store(run: Run, tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "w1 " * 140}))
    asked = ["distill", "--target", tiny_folders["target"], "--prompts", "long.jsonl", "--out", "text"]
    _refused(run(*asked), "context of 128")
    assert not (tmp_path / "text").exists()


def test_a_batch_beyond_the_table(run: Run, calibrated: list[object]) -> None:
    _refused(run("optimize", "--budget", 4, "--batch", 8), "no time at batch 8, only at 1", "--batch")


def test_weights_that_are_not_numbers_stop_cleanly(run: Run, tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """Named as what they are, not as a mask that is not honoured; exit code 1, nothing is written."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_folders["target"])
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    shutil.copytree(tiny_folders["target"], tmp_path / "broken")
    model.save_pretrained(tmp_path / "broken")
    heads = save_tiny_heads(tmp_path / "heads", tmp_path / "broken")
    good = packaged("trees/reference/medusa-63.tree.json")
    code, out, err = run("generate", "w1", "--target", "broken", "--heads", heads, "--tree", good, "--prune-depth", 3)
    assert (code, out) == (1, ""), err
    assert "The logits of broken are not finite: its weights or activations overflowed" in err
    rows = ["--prompts", "mine.jsonl", "--max-new-tokens", 4, "--no-measure"]
    (tmp_path / "mine.jsonl").write_text(json.dumps({"prompt": "w1"}))
    code, _, err = run("calibrate", "--target", "broken", "--heads", heads, *rows)
    assert code == 1
    assert "logits for position" in err
    assert not list(tmp_path.glob("calibration/*.safetensors"))


def test_an_artefact_of_the_unquantised_target_is_refused_beside_the_quantised_one(
    run: Run, calibrated: list[object]
) -> None:
    """FIELD-CASES 29, 30: never carried over silently; with the flag it serves, with a warning."""
    pytest.importorskip("torchao", reason="the extra quant is not installed")
    run("optimize", "--budget", 5, "--objective", "tokens-per-step")
    asked = ["generate", "w1", *calibrated, "--tree", "trees/best-chain.tree.json", "--quantize", "int8"]
    words = ("its target", "quantization is None, not 'torchao Int8WeightOnly PerRow'", "--allow-mismatch")
    _refused(run(*asked), *words)
    code, _, err = run(*asked, "--allow-mismatch", "--max-new-tokens", 6)
    assert code == 0, err
    assert "Warning: trees/best-chain.tree.json: its target" in err
    rows = ["--prompts", "mine.jsonl", "--max-new-tokens", 8]
    code, _, err = run("calibrate", *calibrated, *rows, "--no-measure", "--quantize", "int8")
    assert code == 0, err
    assert len(list(Path("calibration").glob("*int8*.trace.safetensors"))) == 1
    race = ["bench", *calibrated, *rows, "--repeats", 1, "--quantize", "int8", "--trace"]
    _refused(run(*race, next(Path("calibration").glob("target_heads*.trace.safetensors"))), "quantization is None")


TYPICAL = ["--acceptance", "typical", "--temperature", "0.9", "--epsilon", "0.05", "--seed", "2"]


def test_typical_acceptance_from_masks_to_race(run: Run, calibrated: list[object], prompts: Path) -> None:
    """The whole flow of the rule that changes the text: labelled in every file and on every page."""
    cap = ["--max-new-tokens", 12]
    record = ["calibrate", *calibrated, "--prompts", prompts, *cap, *TYPICAL, "--no-measure"]
    code, _, err = run(*record)
    assert code == 0, err
    assert "changes the text" in err
    code, out, err = run("optimize", "--acceptance", "typical", "--budget", 5, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["heuristic"] is True
    assert "changes the text" in result["acceptance"]
    assert [row["changes_text"] for row in result["alternatives"]] == [False, True, True]
    assert all(row["verify_width"] <= 5 for row in result["alternatives"])
    tree, chain = "trees/typical-tree.tree.json", "trees/typical-chain.tree.json"
    rule = json.loads(Path(tree).read_text())["made_from"]["rule"]
    assert (rule["rule"], rule["epsilon"], rule["delta"], rule["bonus"]) == ("typical", 0.05, 0.3, "sampled")

    code, _, err = run(*record, "--tree", tree)
    assert code == 0, err
    assert "Decoded with the tree itself" in err
    assert "The masks of the wide tree predicted" in err
    code, _, err = run("generate", "w1 w2", *calibrated, *cap, *TYPICAL, "--tree", tree)
    assert code == 0, err
    assert err.count("changes the text") >= 2
    race = ["bench", *calibrated, "--prompts", prompts, *cap, "--repeats", 1, "--tree", tree, "--chain", chain]
    code, out, err = run(*race, *TYPICAL, "--json")
    assert code == 0, err
    raced = json.loads(out)
    assert raced["changes_text"] is True
    assert raced["failures"] == []
    by_name = {row["name"]: row for row in raced["contenders"]}
    assert by_name["plain"]["text_equal"] is True
    assert by_name["plain"]["predicted_tokens_per_step"] == 1.0
    assert by_name["medusa-63"]["changes_text"] is True
    assert by_name["medusa-63"]["predicted_tokens_per_step"] is None
    code, out, _ = run(*race, *TYPICAL)
    assert code == 0
    assert out.count("changes") == 3

    code, _, err = run(*race, "--temperature", "0.9", "--seed", 2)
    assert code == 2
    assert "its rule was made for something else" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "w1", "--epsilon", "0.1"], "belong to --acceptance typical"),
        (["generate", "w1", "--bonus", "greedy"], "belong to --acceptance typical"),
        (["generate", "w1", *TYPICAL, "--delta", "0"], "delta is 0.0; it must be above 0"),
        (["bench", *TYPICAL, "--epsilon", "1"], "epsilon is 1.0; it must lie strictly between"),
        (["generate", "w1", *TYPICAL, "--noise-share", "0.5"], "--noise-share finds the draw"),
        (["calibrate", "--tree", "trees/none.tree.json"], "a rank trace needs none"),
        (["calibrate", *TYPICAL, "--tree", "trees/none.tree.json"], "There is no file"),
        (["optimize", "--acceptance", "typical"], "No accept masks in ./calibration"),
        (
            ["optimize", "--acceptance", "typical", "--batch-weights", "1=1"],
            "--batch-weights belongs to the exact search",
        ),
        (["optimize", "--acceptance", "typical", "--refine", "swaps"], "--refine belongs to the exact search"),
        (["optimize", "--acceptance", "typical", "--strategy", "optuna"], "--strategy optuna belongs to the exact"),
    ],
)
def test_bad_words_about_typical_acceptance(run: Run, words: list[object], message: str) -> None:
    code, out, err = run(*words)
    assert code == 2
    assert message in " ".join(err.split())
    assert out == ""


def test_typical_acceptance_at_temperature_0_is_greedy(run: Run, calibrated: list[object]) -> None:
    run("optimize", "--budget", 3)
    code, typical, err = run("generate", "w1 w2", *calibrated, "--max-new-tokens", 8, "--acceptance", "typical")
    assert code == 0, err
    assert "the text is plain decoding's" in " ".join(err.split())
    assert typical == run("generate", "w1 w2", *calibrated, "--max-new-tokens", 8)[1]
