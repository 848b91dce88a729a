"""Compiled steps write what eager steps and `generate` write; nothing is compiled unless it was prepared.

Most tests put torch's backend "eager" in inductor's place: the graph is traced, its width symbolic, and its nodes run
one by one, which takes a second. One test compiles for real.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import NEW_TOKENS, PROMPTS, TREES, tiny_heads
from test_fused import FUSED, pair

from topo_search.compare import divergence
from topo_search.decode.decoder import TreeDecoder
from topo_search.decode.modes import CompiledStep, in_mode, ready_mode
from topo_search.errors import CheckError, InputError
from topo_search.identity import sampling_rule
from topo_search.measure import MeasureGrid, measure
from topo_search.reference import generate_plain
from topo_search.target import Target
from topo_search.target.compiled import CompiledPass, compiled_pass
from topo_search.target.packing import can_pack
from topo_search.tree import Tree

pytestmark = pytest.mark.skipif(not can_pack(), reason="this torch build cannot pack")


def can_compile() -> bool:
    """Whether this machine has a C++ compiler."""
    try:
        ready_mode("compiled", "cpu")
    except InputError:
        return False
    return True


def one_layer(name: str) -> Any:
    """Tracing takes its time by the layer."""
    config = FUSED[name]()
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    return config


def compilable(name: str, backend: str) -> tuple[Target, Target]:
    """The same fp32 model with transformers' layers, and in mode compiled."""
    plain, fused = pair(one_layer(name))
    compiled_pass(fused, backend=backend)
    return plain, replace(fused, mode="compiled")


@pytest.fixture(autouse=True)
def _nothing_traced_before() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["Llama, biases", "Llama, one head each", "Qwen3", "Mistral"])
def test_compiled_steps_write_what_generate_writes(name: str) -> None:
    """Windows, norms of heads, biases; trees of several widths on two graphs."""
    plain, compiled = compilable(name, "eager")
    heads = tiny_heads(compiled)
    for tree in (Tree(()), TREES["sparse"]):
        decoder = TreeDecoder(compiled, heads, tree, capacity=60, run_probe=False)
        assert all(type(step) is CompiledStep for step in decoder._steps)
        for prompt in PROMPTS[:2]:
            expected = generate_plain(plain, prompt, max_new_tokens=NEW_TOKENS).tokens
            found = decoder.generate(prompt, max_new_tokens=NEW_TOKENS).tokens
            parted = divergence(compiled, name, prompt, expected, found)
            assert parted is None or parted.explained


def test_two_graphs_serve_every_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts and widths grow without another graph, and no answer or timing makes one."""
    _, compiled = compilable("Llama", "eager")
    heads = tiny_heads(compiled)
    decoders = [TreeDecoder(compiled, heads, TREES[name], capacity=60) for name in ("empty", "chain", "medusa-63")]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 2
    for decoder in decoders:
        for prompt in PROMPTS[:2]:
            decoder.generate(prompt, max_new_tokens=NEW_TOKENS, rule=sampling_rule(temperature=0.9, seed=1))
    grid = MeasureGrid(widths=(1, 2, 5, 9), contexts=(8, 24), rounds=1)
    assert measure(compiled, heads, grid, [token for prompt in PROMPTS for token in prompt]).mode == "compiled"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_a_step_that_was_not_prepared_runs_eagerly() -> None:
    """Near the last position a decoder prunes its tree down to the root, whose width nobody asked to compile."""
    _, compiled = compilable("Llama", "eager")
    limited = replace(compiled, position_limit=20)
    decoder = TreeDecoder(limited, tiny_heads(limited), TREES["dense"], run_probe=False)
    answer = decoder.generate(PROMPTS[1], max_new_tokens=NEW_TOKENS)
    eager = TreeDecoder(replace(limited, mode="eager"), None, Tree(()), run_probe=False)
    assert answer.tokens == eager.generate(PROMPTS[1], max_new_tokens=NEW_TOKENS).tokens
    assert answer.end == "limit"
    assert not compiled_pass(compiled).is_ready(1)


def test_a_graph_that_computes_something_else_is_refused() -> None:
    def wrong(graph: Any, _inputs: Any) -> Any:
        return lambda *inputs: [result * 1.01 for result in graph(*inputs)]

    _, fused = pair(one_layer("Llama"))
    with pytest.raises(CheckError, match=r"compiled step computes something else.*--mode eager or auto"):
        CompiledPass(fused, backend=wrong).prepare(fused, 4)


def test_a_compiler_that_fails_is_named() -> None:
    def failing(_graph: Any, _inputs: Any) -> Any:
        raise RuntimeError("g++ said no")

    _, fused = pair(one_layer("Llama"))
    with pytest.raises(InputError, match=r"torch.compile failed here: .*g\+\+ said no.*Use --mode eager or auto"):
        CompiledPass(fused, backend=failing).prepare(fused, 4)


def test_the_cost_is_said_before_anything_is_compiled() -> None:
    _, fused = pair(one_layer("Llama"))
    said: list[str] = []
    assert in_mode(fused, "eager", say=said.append).mode == "eager"
    assert not said
    assert in_mode(fused, "compiled", say=said.append).mode == "compiled"
    assert "half a minute" in said[0]
    assert not any(compiled_pass(fused).is_ready(width) for width in (1, 2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of its own parts
@pytest.mark.skipif(not can_compile(), reason="no C++ compiler here")
def test_inductor_compiles_a_step_that_agrees() -> None:
    """The real compiler, on one layer; another width reuses its graph."""
    plain, fused = pair(one_layer("Qwen3"))
    compiled = replace(fused, mode="compiled")
    heads = tiny_heads(compiled)
    for tree in (TREES["dense"], TREES["sparse"]):
        decoder = TreeDecoder(compiled, heads, tree, capacity=60, run_probe=False)
        expected = generate_plain(plain, PROMPTS[0], max_new_tokens=NEW_TOKENS).tokens
        assert decoder.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS).tokens == expected
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
