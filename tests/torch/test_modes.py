"""Graph steps write what eager steps write, on fixed buffers; what a device cannot run is refused or left to `auto`.

There is no GPU here, so a fake capture stands in for CUDA's: it keeps the results' tensors and runs the call again on
replay, as a graph does at its fixed addresses. What it cannot show is whether every kernel may be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from models import NEW_TOKENS, PROMPTS, TREES, heads_of, plain_text, target_of, tiny_heads, tiny_hydra
from torch import Tensor

from topo_search.cli.decoding import fitting_tree, require_mode
from topo_search.decode import decoder as decoding
from topo_search.decode import modes
from topo_search.decode.decoder import TreeDecoder
from topo_search.decode.modes import CONTEXT_BUCKET, GraphStep, in_mode, ready_mode
from topo_search.decode.plan import TreePlan
from topo_search.errors import InputError, MismatchError
from topo_search.files.tree_file import MadeFrom, TreeFile
from topo_search.heads.base import DraftHeads
from topo_search.identity import GREEDY, sampling_rule
from topo_search.target import Target


class FakeCapture:
    """Counts captures and replays; results lie where the capture left them."""

    def __init__(self) -> None:
        self.captures, self.replays = 0, 0

    def __call__(self, call: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], object], Sequence[Tensor]]:
        self.captures += 1
        results = [result.clone() for result in call()]

        def replay() -> None:
            self.replays += 1
            for kept, fresh in zip(results, call(), strict=True):
                kept.copy_(fresh)

        return replay, results


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> FakeCapture:
    """Every step of a decoder is a graph step with a fake capture, in buckets that texts cross."""
    fake = FakeCapture()

    def step(target: Target, heads: DraftHeads | None, plan: TreePlan) -> GraphStep:
        return GraphStep(target, heads, plan, capture=fake)

    monkeypatch.setattr(decoding, "new_step", step)
    monkeypatch.setattr(modes, "CONTEXT_BUCKET", 16)
    return fake


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("name", ["empty", "dense", "sparse"])
def test_graph_steps_write_what_eager_steps_write(architecture: str, name: str, capture: FakeCapture) -> None:
    """Windows, mixed layers and a context that crosses buckets; nothing is captured while an answer is written."""
    decoder = TreeDecoder(target_of(architecture), heads_of(architecture), TREES[name], capacity=60, run_probe=False)
    drafts = 1 if TREES[name].paths else 0
    width = TREES[name].verify_width
    buckets = len({min(-(-seen // 16) * 16, 60 + width) for seen in range(width, 60 + width + 1)})
    assert capture.captures == buckets
    for prompt in PROMPTS:
        expected = plain_text(architecture, prompt).tokens
        assert decoder.generate(prompt, max_new_tokens=NEW_TOKENS).tokens == expected
    assert capture.captures == buckets + drafts
    assert capture.replays > 4 * len(PROMPTS)


def test_graphs_sample_and_read_prefixes_as_eager_steps_do(
    capture: FakeCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra++ keeps its own context outside the graph; noise in the candidates is drawn anew each step."""
    target = target_of("llama")
    heads = tiny_hydra(target, prefix_attention=True, root_in_prefix=True)
    graph = TreeDecoder(target, heads, TREES["dense"], capacity=60, run_probe=False)
    monkeypatch.undo()
    eager = TreeDecoder(target, heads, TREES["dense"], capacity=60, run_probe=False)
    for rule in (GREEDY, sampling_rule(temperature=0.9, seed=4), sampling_rule(temperature=0.9, noise_share=0.5)):
        answer = partial(TreeDecoder.generate, prompt=PROMPTS[1], max_new_tokens=NEW_TOKENS, rule=rule)
        found, expected = answer(graph), answer(eager)
        assert (found.tokens, found.accepted) == (expected.tokens, expected.accepted)
    assert capture.captures


def test_auto_takes_what_is_ready_and_nothing_else() -> None:
    assert [ready_mode("auto", device) for device in ("cpu", "cuda", "cuda:1")] == ["eager", "graph", "graph"]
    assert ready_mode("eager", "cuda") == "eager"
    with pytest.raises(InputError, match=r"device cpu has not; use --mode eager or auto"):
        ready_mode("graph", "cpu")
    with pytest.raises(InputError, match=r"Unknown mode 'turbo'; choose one of auto, eager, compiled, graph"):
        ready_mode("turbo", "cpu")


def test_compiling_is_refused_where_nothing_can_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler; on a GPU; of a target whose layers are transformers' own. `auto` asks for none of it."""
    with pytest.raises(InputError, match=r"is for a CPU, not for device cuda; use --mode graph"):
        ready_mode("compiled", "cuda")
    with pytest.raises(InputError, match=r"Llama-like models in fp32 on a CPU.*Use --mode eager or auto"):
        in_mode(target_of("llama"), "compiled", say=print)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match=r"no no-such-compiler here; install one.*--mode eager or auto"):
        ready_mode("compiled", "cpu")
    assert ready_mode("auto", "cpu") == "eager"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match=r"needs a C\+\+ compiler"):
        ready_mode("compiled", "cpu")


def test_times_of_another_mode_are_refused() -> None:
    target = target_of("llama")
    require_mode("The table", "eager", target, allow_mismatch=False)
    require_mode("The table", None, target, allow_mismatch=False)
    with pytest.raises(MismatchError, match=r"mode is 'graph', not 'eager'.*measure --mode eager"):
        require_mode("The table", "graph", target, allow_mismatch=False)


def test_a_tree_of_another_mode_is_used_with_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its text is right in every mode; only whether it is the fastest hangs on the times it was chosen on."""
    target = target_of("llama")
    made_from = MadeFrom(mode="graph", command="", created="")
    file = TreeFile(tree=TREES["dense"], name="a", made_from=made_from)
    fitting_tree(tmp_path / "a.tree.json", file, target, tiny_heads(target), allow_mismatch=False)
    words = " ".join(capsys.readouterr().err.split())
    assert "chosen on times of mode graph; this is mode eager" in words
    assert "Decode with --mode graph, or run measure --mode eager and optimize again" in words
    in_graphs = replace(target, mode="graph")
    fitting_tree(tmp_path / "a.tree.json", file, in_graphs, tiny_heads(target), allow_mismatch=False)
    assert not capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: real captures are not tested here")
def test_cuda_graphs_replay_on_new_contents() -> None:
    numbers = torch.arange(CONTEXT_BUCKET, device="cuda", dtype=torch.float32)
    replay, (doubled,) = modes.cuda_capture(lambda: (numbers * 2,))
    numbers.fill_(3)
    replay()
    assert bool((doubled == 6).all())
