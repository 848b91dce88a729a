"""`topo-search distill` and `train` as a user types them, on a tiny target: every family, its record, each refusal."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import save_tiny_target
from safetensors.torch import load_file

from topo_search.cli.app import main
from topo_search.heads import load_heads
from topo_search.target import load_target
from topo_search.training.text import MANIFEST, read_text_store

Run = Callable[..., tuple[int, str]]
ROWS = [{"prompt": f"w{n} w{n + 1} w3"} for n in range(12)]
SHORT = ("--num-heads", 2, "--epochs", 2, "--batch-texts", 4, "--held-out", 0.4)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, another one, prompts."""
    root = tmp_path_factory.mktemp("train")
    save_tiny_target(root / "target")
    save_tiny_target(root / "other", seed=9)
    (root / "mine.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    return root


@pytest.fixture
def run(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line beside the target: exit code and stderr."""
    monkeypatch.chdir(root)

    def call(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["topo-search", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return code if isinstance(code, int) else 0, capsys.readouterr().err

    return call


@pytest.fixture
def text(root: Path, run: Run) -> Path:
    """A store that the target wrote."""
    if not (root / "text").exists():
        code, err = run("distill", "--target", "target", "--out", "text", "--prompts", "mine.jsonl", *_cap(12))
        assert code == 0, err
        assert "text holds 12 answers" in err
    return root / "text"


def _cap(tokens: int) -> tuple[object, ...]:
    return "--max-new-tokens", tokens


def _refused(result: tuple[int, str], *words: str) -> None:
    code, err = result
    assert code == 2, err
    last = err.strip().splitlines()[-1]
    assert last.startswith("Error: ")
    assert "Traceback" not in err
    for word in words:
        assert word in last, last


FAMILIES: dict[str, tuple[object, ...]] = {
    "medusa": ("medusa",),
    "hydra": ("hydra", "--shortlist", 30, "--own-projection"),
    "guide": ("hydra", "--arch", "guide", "--blind-first"),
    "last": ("hydra", "--sees", "last"),
    "fusion": ("hydra++", "--sees", "fusion", "--num-layers", 1),
    "hydra++": ("hydra++", "--num-layers", 2, "--shortlist", 30),
    "rooted": ("hydra++", "--num-layers", 1, "--root-in-prefix", "--distill", 0),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_and_loads(family: str, run: Run, text: Path, root: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads"
    code, err = run("train", *FAMILIES[family], "--target", "target", "--text", "text", "--out", out, *SHORT)
    assert code == 0, err
    assert "Hidden states of the target's own text: " in err and " MB in " in err
    assert "Head 2 on held-out text: loss" in err
    assert "% of the target's" in err
    rows = json.loads((out / "config.json").read_text())["held_out"]["rows"]
    assert f"Warning: {rows} rows were held out, so these accuracies are known to {98 / rows**0.5:.0f} points" in err
    config = json.loads((out / "config.json").read_text())
    assert config["recipe"]["seed"] == 0
    assert config["text_agreement"] > 0.95
    assert config["training_text"]["digest"] == read_text_store(text).digest
    assert len(config["held_out"]["loss"]) == len(config["held_out"]["accuracy_given_path"]) == 2
    assert config["parameters"] == sum(
        tensor.numel() for name, tensor in load_file(out / "heads.safetensors").items() if name != "token_map"
    )
    target = load_target(str(root / "target"))
    assert config["target_fingerprint"] == target.identity.fingerprint
    heads = load_heads(str(out), target)
    assert heads.identity.num_heads == 2
    tokens = torch.tensor([[5, 6]] * 3)
    scores = heads.path_scores(heads.features(torch.randn(3, target.hidden_size), tokens[:, 0]), tokens)
    shortlisted = "--shortlist" in FAMILIES[family]
    assert scores.shape == (3, 2, 30 if shortlisted else target.known_ids)
    assert (heads.token_map is not None) == shortlisted
    assert not (out / "work/training.pt").exists()


@pytest.mark.parametrize("words", [("hydra++", "--num-layers", 1), ("medusa-2", "--num-texts", 8)])
def test_a_target_in_bf16_trains_heads(words: tuple[object, ...], run: Run, text: Path, tmp_path: Path) -> None:
    """FIELD-CASES 30: the base in the precision that will serve; text and heads fit it in any."""
    model = ("--target", "target", "--dtype", "bfloat16", "--text", "text")
    code, err = run("train", *words, *model, "--out", tmp_path, *SHORT)
    assert code == 0, err
    assert list((tmp_path / "work").glob("states-*-bfloat16-*.f16"))
    out = tmp_path / "heads" if words[0] == "medusa-2" else tmp_path
    served = load_target(str(tmp_path / "target" if words[0] == "medusa-2" else "target"), dtype="bfloat16")
    assert load_heads(str(out), served).identity.num_heads == 2


def test_hydra_heads_raise_embeddings_to_the_size_of_the_states(run: Run, text: Path, tmp_path: Path) -> None:
    """Beside states many times as large they would be learned from as many times slower."""
    words = ("--target", "target", "--text", "text", "--out", tmp_path, *SHORT, "--held-out", 0)
    code, err = run("train", "hydra", *words)
    assert code == 0, err
    (path,) = (tmp_path / "work").glob("states-*.f16")
    states = torch.from_numpy(np.fromfile(path, dtype=np.float16).astype(np.float32))
    table = load_target("target").input_embeddings.weight
    ratio = states.square().mean().sqrt() / table.detach().square().mean().sqrt()
    gain = json.loads((tmp_path / "config.json").read_text())["shape"]["embedding_gain"]
    assert gain == pytest.approx(float(ratio), rel=0.05)
    assert load_heads(str(tmp_path), load_target("target")).blocks.shape.embedding_gain == gain


def test_the_saved_heads_are_the_trained_ones(run: Run, text: Path, tmp_path: Path) -> None:
    """Their held-out figures come back from the files, within bf16."""
    from topo_search.heads.checkpoints import read_checkpoint
    from topo_search.training.heads import evaluate, split_held_out
    from topo_search.training.loss import HeadLoss
    from topo_search.training.states import cached_states

    words = ("--own-projection", "--shortlist", 30, "--learning-rate", 1e-2)
    code, err = run("train", "hydra", "--target", "target", "--text", "text", "--out", tmp_path, *SHORT, *words)
    assert code == 0, err
    held = json.loads((tmp_path / "config.json").read_text())["held_out"]
    target = load_target("target")
    stored = read_checkpoint(str(tmp_path), target)
    loss = HeadLoss(stored.blocks.float(), target.output_weight, target.input_embeddings, token_map=stored.token_map)
    _, held_text = split_held_out(read_text_store(text), 0.4, seed=0)
    states = cached_states(target, held_text, tmp_path / "work")
    found = evaluate(loss, held_text, states, num_heads=2)
    assert found.loss == pytest.approx(held["loss"], rel=0.02)
    assert found.rows == held["rows"]


def test_without_a_store_the_target_writes_one_and_ordinary_text_comes_first(run: Run, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(" ".join(f"w{n % 50}" for n in range(300)))
    words = ("--prompts", "mine.jsonl", *_cap(8), "--ordinary-text", tmp_path / "book.txt", "--held-out", 0)
    code, err = run("train", "medusa", "--target", "target", "--out", tmp_path, *words, "--num-heads", 2)
    assert code == 0, err
    assert "Hidden states of ordinary text: 300 positions" in err
    assert "No text was held out" in err
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["held_out"] is None
    assert config["training_text"]["ordinary"] == [sha256((tmp_path / "book.txt").read_bytes()).hexdigest()[:16]]
    assert len(read_text_store(tmp_path / "work/text").prompt_lengths) == 12


def test_ordinary_text_is_read_before_the_target_is_loaded(run: Run, tmp_path: Path) -> None:
    words = ("--target", "target", "--out", tmp_path / "out", "--ordinary-text", tmp_path / "missing.txt")
    code, err = run("train", "medusa", *words)
    assert code == 2 and "missing.txt cannot be read: No such file" in " ".join(err.split())
    assert "Loading" not in err and not (tmp_path / "out").exists()


def test_prompts_are_learned_from_too(run: Run, text: Path, tmp_path: Path) -> None:
    """Held-out figures stay those of answers."""
    records, tokens = [], []
    for name, more in (("plain", ()), ("prompts", ("--learn-prompts",))):
        out = tmp_path / name
        code, err = run("train", "hydra", "--target", "target", "--text", text, "--out", out, *SHORT, *more)
        assert code == 0, err
        tokens += map(int, re.findall(r"Training 2 heads on (\d+) tokens", err))
        records.append(json.loads((out / "config.json").read_text()))
    assert tokens[1] > tokens[0] > 0
    plain, prompts = records
    assert (plain["recipe"]["learn_prompts"], prompts["recipe"]["learn_prompts"]) == (False, True)
    assert plain["held_out"]["rows"] == prompts["held_out"]["rows"]
    assert plain["held_out"]["loss"] != prompts["held_out"]["loss"]


def test_text_of_another_target_is_refused(run: Run, text: Path, tmp_path: Path) -> None:
    """FIELD-CASES 87."""
    refused = run("train", "medusa", "--target", "other", "--text", "text", "--out", tmp_path, *SHORT)
    _refused(refused, "text was written by another target", "topo-search distill")


def test_text_that_the_target_would_not_write_is_told(run: Run, tmp_path: Path) -> None:
    """FIELD-CASES 87: sampled hot, the text agrees with no greedy choice; the share is recorded."""
    hot = ("--temperature", 5.0, "--top-p", 1.0, "--prompts", "mine.jsonl", *_cap(12))
    code, err = run("distill", "--target", "target", "--out", tmp_path / "hot", *hot)
    assert code == 0, err
    code, err = run("train", "medusa", "--target", "target", "--text", tmp_path / "hot", "--out", tmp_path, *SHORT)
    assert code == 0, err
    assert "of the text's answer tokens are the target's own greedy choice" in err
    assert "topo-search distill" in err
    assert json.loads((tmp_path / "config.json").read_text())["text_agreement"] < 0.8


def test_an_unknown_id_is_refused(run: Run, text: Path, tmp_path: Path) -> None:
    """FIELD-CASES 84: the store's text has a token that the target's table lacks."""
    from safetensors.torch import save_file

    store = tmp_path / "store"
    store.mkdir()
    (store / MANIFEST).write_text((text / MANIFEST).read_text())
    for shard in text.glob("text-*.safetensors"):
        tensors = load_file(shard)
        tensors["tokens"][5] = 32000
        save_file(tensors, store / shard.name)
    words = ("--text", store, "--shortlist", 10, "--out", tmp_path)
    _refused(run("train", "medusa", "--target", "target", *words), "token id 32000, beyond the 61 rows")


def test_bad_settings_are_named(run: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = ("--target", "target", "--text", "text")
    _refused(run("train", "medusa", *target, "--out", tmp_path, "--learning-rate", 0), "--learning-rate is 0")
    (tmp_path / "file").write_text("")
    _refused(run("train", "hydra", *target, "--out", tmp_path / "file"), "file is a file; give a folder")
    work = ("--out", tmp_path / "out", "--work", tmp_path / "file")
    _refused(run("train", "hydra", *target, *work), "--work", "file is a file; give a folder")
    _refused(run("train", "hydra", "--target", "target", "--text", tmp_path, "--out", tmp_path), "is no text store")
    _refused(run("distill", "--target", "target", "--out", tmp_path, "--top-p", 0), "top_p is 0")
    _refused(
        run("train", "medusa", *target, "--out", tmp_path, "--learning-rate", 1e30, *SHORT), "lower --learning-rate"
    )
    more = ("--prompts", "mine.jsonl", "--max-new-tokens", 9)
    _refused(run("distill", "--target", "target", "--out", "text", *more), "holds text of another run")
    monkeypatch.setenv("WORLD_SIZE", "2")
    _refused(run("train", "medusa-2", *target, "--out", tmp_path), "one process", "accelerate launch")


def test_one_process_where_two_were_meant_is_told(
    run: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate launch --cpu --num_processes 2` starts one process and says nothing."""
    words = ("train", "medusa", "--target", "target", "--text", "text", "--out", tmp_path, *SHORT)
    assert "one process only" not in run(*words)[1]
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_PORT", "29500")
    code, err = run(*words)
    assert code == 0, err
    assert "Warning: accelerate launch --cpu starts one process only; several on CPUs need --multi_gpu" in err


@pytest.mark.parametrize(
    ("words", "trains"),
    [
        (("hydra",), "topo_search.training.heads.train_heads"),
        (("medusa-2", "--warmup-epochs", 1), "topo_search.training.joint.train_jointly"),
    ],
)
def test_an_interrupted_training_says_how_to_go_on(
    words: tuple[str, ...], trains: str, run: Run, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trains, interrupted)
    code, err = run("train", *words, "--target", "target", "--text", "text", "--out", tmp_path, "--num-heads", 2)
    assert code == 130
    assert "Interrupted; the same command goes on from the last checkpoint." in err
    assert not (tmp_path / "config.json").exists()


# Further


@pytest.fixture
def more(root: Path, run: Run, text: Path) -> Path:
    """A second store, two of whose prompts are answered in the first."""
    if not (root / "more").exists():
        rows = [*ROWS[:2], *({"prompt": f"w{n} w7 w{n + 2}"} for n in range(8))]
        (root / "others.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        code, err = run("distill", "--target", "target", "--out", "more", "--prompts", "others.jsonl", *_cap(12))
        assert code == 0, err
    return root / "more"


@pytest.mark.parametrize("family", ["medusa", "hydra", "hydra++", "rooted"])
def test_trained_heads_are_trained_further(family: str, run: Run, more: Path, tmp_path: Path) -> None:
    """Shape, shortlist and what was held out stay; the record tells both trainings; the old heads stay too."""
    first, second = tmp_path / "first", tmp_path / "second"
    code, err = run("train", *FAMILIES[family], "--target", "target", "--text", "text", "--out", first, *SHORT)
    assert code == 0, err
    before, old = (first / "heads.safetensors").read_bytes(), load_heads(str(first), load_target("target"))
    texts = ("--text", "text", "--text", "more")
    words = ("--target", "target", "--heads", first, *texts, "--work", first / "work", "--out", second, *SHORT[2:])
    code, err = run("train", "further", *words)
    assert code == 0, err
    assert "2 of 10 prompts of more are answered in a store before it and left out" in " ".join(err.split())
    assert "may know some" not in err
    assert (first / "heads.safetensors").read_bytes() == before
    new = load_heads(str(second), load_target("target"))
    assert new.blocks.shape == old.blocks.shape
    assert new.identity.fingerprint != old.identity.fingerprint
    assert (new.token_map is None and old.token_map is None) or torch.equal(new.token_map, old.token_map)
    one, two = (json.loads((folder / "config.json").read_text()) for folder in (first, second))
    assert two["recipe"]["started_from"] == old.identity.fingerprint
    history = ("recipe", "training_text", "held_out", "training_seconds", "provenance")
    assert two["earlier"] == {key: one[key] for key in history}
    assert two["training_text"]["answers"] == 20
    caches = sorted(path.name for path in (first / "work").glob("states-*.f16"))
    assert len(caches) == 4, "each store's states are kept for themselves"


def test_every_text_of_several_stores_is_learned_beside_its_own_states(
    run: Run, more: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the target would have said in its prompts is what it says of them."""
    learned: list[Any] = []

    def look(_: object, corpora: list[Any], *__: object, **___: object) -> None:
        learned.extend(corpora)
        raise KeyboardInterrupt

    monkeypatch.setattr("topo_search.training.heads.train_heads", look)
    texts = ("--text", "text", "--text", "more", "--learn-prompts")
    code, err = run("train", "medusa", "--target", "target", *texts, "--out", tmp_path, *SHORT)
    assert code == 130, err
    (corpus,), target = learned, load_target("target")
    assert len(corpus.states.parts) == 2
    for start, end, shared in zip(corpus.text.starts, corpus.text.starts[1:], corpus.text.prompt_lengths, strict=False):
        with torch.inference_mode():
            states = target.hidden_states(corpus.text.tokens[start:end][None])[0]
            choices = target.choose(states)
        torch.testing.assert_close(corpus.states.rows(torch.arange(start, end)), states, rtol=1e-2, atol=1e-2)
        assert torch.equal(corpus.text.choices[start + shared : end - 1], choices[shared:-1])


def test_training_further_begins_with_the_weights_given(run: Run, text: Path, tmp_path: Path) -> None:
    """At a learning rate of almost 0 the figures on held-out text come back, within bf16."""
    first, second = tmp_path / "first", tmp_path / "second"
    words = ("--target", "target", "--text", "text")
    code, err = run("train", *FAMILIES["hydra"], *words, "--out", first, *SHORT, "--learning-rate", 1e-2)
    assert code == 0, err
    still = ("--learning-rate", 1e-12)
    code, err = run("train", "further", "--heads", first, *words, "--out", second, *SHORT[2:], *still)
    assert code == 0, err
    one, two = (json.loads((folder / "config.json").read_text())["held_out"] for folder in (first, second))
    assert two["loss"] == pytest.approx(one["loss"], rel=0.02)
    assert two["rows"] == one["rows"]


def test_training_further_refuses_and_warns(run: Run, text: Path, tmp_path: Path) -> None:
    words = ("--target", "target", "--text", "text", "--out", tmp_path / "out", *SHORT[2:])
    missing = run("train", "further", "--heads", tmp_path / "nothing", *words)
    _refused(missing, "nothing")
    assert "Loading" not in missing[1]
    code, err = run("train", "medusa", "--target", "target", "--text", "text", "--out", tmp_path / "first", *SHORT)
    assert code == 0, err
    other = run("train", "further", "--heads", tmp_path / "first", *words, "--target", "other")
    _refused(other, "trained for target")
    first = ("train", "further", "--heads", tmp_path / "first", *words)
    _refused(run(*first, "--out", tmp_path / "first"), "--out", "give another folder")
    _refused(run(*first, "--heads", tmp_path / "first/config.json"), "give its folder")
    _refused(run(*first, "--text", "./text/"), "names a store twice")


@pytest.mark.parametrize(
    ("changed", "then"),
    [
        (("--seed", 4), "--seed 0 --held-out 0.4"),
        (("--held-out", 0.45), "--seed 0 --held-out 0.4"),
        (("--held-out", 0.1), None),
        (("--seed", 4, "--held-out", 0), None),
    ],
)
def test_heads_that_may_know_what_is_held_out_are_told(
    changed: tuple[object, ...], then: str | None, run: Run, text: Path, tmp_path: Path
) -> None:
    first, words = tmp_path / "first", ("--target", "target", "--text", "text")
    code, err = run("train", "medusa", *words, "--out", first, *SHORT)
    assert code == 0, err
    code, err = run("train", "further", "--heads", first, *words, "--out", tmp_path / "out", *SHORT[2:], *changed)
    assert code == 0, err
    assert ("may know some of the text that is held out now" in err) == (then is not None)
    assert then is None or f"when they were trained: {then}." in " ".join(err.split())


@pytest.mark.parametrize("strange", ["recipe", "training_text"])
def test_heads_without_a_record_are_told(strange: str, run: Run, text: Path, tmp_path: Path) -> None:
    """Those of an earlier training count, and a record may hold anything."""
    first, words = tmp_path / "first", ("--target", "target", "--text", "text")
    code, err = run("train", "medusa", *words, "--out", first, *SHORT)
    assert code == 0, err
    config = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps(config | {"earlier": {**config, strange: "by hand"}}))
    code, err = run("train", "further", "--heads", first, *words, "--out", tmp_path / "out", *SHORT[2:])
    assert code == 0, err
    assert "nobody recorded which texts were held out" in " ".join(err.split())


def test_a_store_within_another_adds_nothing(run: Run, text: Path, root: Path, tmp_path: Path) -> None:
    (root / "few.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS[:4]))
    code, err = run("distill", "--target", "target", "--out", tmp_path / "few", "--prompts", "few.jsonl", *_cap(12))
    assert code == 0, err
    words = ("--target", "target", "--text", "text", "--text", tmp_path / "few", "--out", tmp_path, *SHORT)
    code, err = run("train", "medusa", *words)
    assert code == 0, err
    assert "4 of 4 prompts of" in err and "0 positions" not in err
    assert json.loads((tmp_path / "config.json").read_text())["training_text"]["digest"] == read_text_store(text).digest


# Medusa-2


@pytest.fixture
def joint_options(text: Path) -> tuple[object, ...]:
    return ("--target", "target", "--text", "text", "--lora-rank", 4, "--backbone-learning-rate", 1e-3, *SHORT[2:])


def test_medusa_2_writes_a_target_and_its_heads(
    run: Run, joint_options: tuple[object, ...], root: Path, tmp_path: Path
) -> None:
    code, err = run("train", "medusa-2", *joint_options, "--num-heads", 2, "--num-texts", 10, "--out", tmp_path)
    assert code == 0, err
    assert "Training together: 4/4 language loss" in err
    assert "Drift from the original target on held-out text: mean KL" in err
    config = json.loads((tmp_path / "heads/config.json").read_text())
    new, original = load_target(str(tmp_path / "target")), load_target(str(root / "target"))
    assert config["target_fingerprint"] == new.identity.fingerprint != original.identity.fingerprint
    assert config["original_target"]["fingerprint"] == original.identity.fingerprint
    assert config["training_text"]["answers"] == 10
    assert config["drift"]["kl"] > 0
    assert config["drift"]["prompts"] == 4
    assert 0 <= config["drift"]["equal_text"] <= config["drift"]["equal_leading_tokens"] <= 1
    assert config["recipe"]["heads_weight"] == 0.2
    assert config["warmup_recipe"]["epochs"] == 2
    model = ("--target", tmp_path / "target", "--heads", tmp_path / "heads")
    rows = ("--prompts", "mine.jsonl", *_cap(8), "--no-measure", "--out", tmp_path)
    code, err = run("calibrate", *model, *rows)
    assert code == 0, err
    _refused(run("calibrate", "--target", "target", *model[2:], *rows), "trained for target")
    assert not list((tmp_path / "work").glob("*.pt"))


@pytest.mark.parametrize("family", ["hydra++", "hydra"])
def test_medusa_2_continues_from_trained_heads(
    family: str, run: Run, joint_options: tuple[object, ...], tmp_path: Path
) -> None:
    words = ("--target", "target", "--text", "text", "--out", tmp_path / "first", *SHORT)
    code, err = run("train", *FAMILIES[family], *words)
    assert code == 0, err
    code, err = run("train", "medusa-2", *joint_options, "--heads", tmp_path / "first", "--out", tmp_path / "joint")
    assert code == 0, err
    config: dict[str, Any] = json.loads((tmp_path / "joint/heads/config.json").read_text())
    first = load_heads(str(tmp_path / "first"), load_target("target"))
    assert config["recipe"]["started_from"] == first.identity.fingerprint
    assert config["warmup_recipe"] is None
    assert config["earlier"]["training_text"]["held_out_share"] == 0.4
    assert config["kind"] == "hydra"
    heads = load_heads(str(tmp_path / "joint/heads"), load_target(str(tmp_path / "joint/target")))
    assert torch.equal(heads.token_map, first.token_map)


def test_medusa_2_without_peft_is_refused_at_once(
    run: Run, joint_options: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    _refused(run("train", "medusa-2", *joint_options, "--out", tmp_path), "extra `lora`", "pip install")
    assert not list(tmp_path.iterdir())
