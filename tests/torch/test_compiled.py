"""Compiled steps write what eager steps and `generate` write; nothing is compiled unless it was prepared."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from models import NEW_TOKENS, PROMPTS, TREES, needs_compiler, tiny_heads
from test_fused import FUSED, SIZES, pair

from topo_search.compare import divergence
from topo_search.decode.decoder import TreeDecoder
from topo_search.decode.modes import CompiledStep, in_mode
from topo_search.decode.plan import plan_tree
from topo_search.errors import CheckError, InputError
from topo_search.identity import sampling_rule
from topo_search.measure import MeasureGrid, measure
from topo_search.reference import generate_plain
from topo_search.target import Target, compiled, native
from topo_search.target.compiled import CompiledPass, compiled_pass
from topo_search.target.packing import can_pack
from topo_search.tree import Tree

pytestmark = [pytest.mark.skipif(not can_pack(), reason="this torch build cannot pack"), needs_compiler]

HEADS = ((3, 1, 32), (9, 3, 64), (4, 4, 80), (8, 2, 128), (6, 6, 8), (7, 1, 16))  # heads, key-value heads, dimension
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 16, 33, 65)
CONTEXTS = (0, 1, 126, 300)  # before, at and behind the end of a block of keys


def loud(heads: int, kv_heads: int, head_dim: int) -> Target:
    """One layer whose attention decides its output: with weights as small as usual an error would drown."""
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    biases = {"attention_bias": heads % 2 == 1, "mlp_bias": heads % 2 == 1}
    inner = 90 if heads == 4 else 96  # no whole number of vectors: products that torch must do
    settings = SIZES | {"num_hidden_layers": 1, "hidden_size": 16 * heads, "intermediate_size": inner} | shape | biases
    return pair(transformers.LlamaConfig(**settings), scale=5.0)[1]


def step_of(target: Target, width: int, context: int) -> tuple[Any, ...]:
    """A step of random tokens under a random mask, in which every token sees itself, behind random keys and values."""
    ids = torch.randint(target.known_ids, (1, width))
    positions = context + torch.arange(width)[None] // 2
    hidden = torch.rand(width, context + width) < 0.3
    hidden[torch.arange(width), context + torch.arange(width)] = False
    mask = torch.zeros(1, 1, width, 2 + context + width).masked_fill(
        torch.cat([hidden.new_zeros(width, 2), hidden], dim=1), torch.finfo(torch.float32).min
    )
    cache = target.new_cache(context + width + 3)
    cache.storage.normal_()
    cache.commit(context)
    return ids, positions, mask[..., 2:], cache


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_a_pass_computes_what_the_fused_layers_compute(heads: int, kv_heads: int, head_dim: int) -> None:
    """States, and the keys and values left in the cache: torch's attention is the reference."""
    target = loud(heads, kv_heads, head_dim)
    made = compiled_pass(target)
    made.prepare(target)
    for width in WIDTHS:
        for context in CONTEXTS:
            ids, positions, mask, cache = step_of(target, width, context)
            before = cache.storage.clone()
            with torch.inference_mode():
                expected = target.hidden_states(ids, cache=cache, position_ids=positions, attention_mask=mask)
                kept = cache.storage.clone()
                cache.storage.copy_(before)
                found, scores = made(ids, positions, mask, cache)
            assert torch.allclose(found, expected, rtol=0, atol=5e-5 * float(expected.abs().max())), (width, context)
            assert torch.allclose(cache.storage, kept, rtol=0, atol=2e-5 * float(kept.abs().max()))
            assert torch.equal(cache.storage[..., context + width :, :], before[..., context + width :, :])
            assert torch.allclose(scores, target.output_layer(found), rtol=0, atol=2e-5 * float(scores.abs().max()))


def test_heads_share_threads_in_any_split() -> None:
    threads = torch.get_num_threads()
    target = loud(9, 3, 64)
    made = compiled_pass(target)
    made.prepare(target)
    step = step_of(target, 11, 200)
    try:
        with torch.inference_mode():
            results = []
            for count in (1, 2, 3, 5):
                torch.set_num_threads(count)
                results.append(made(*step)[0])
    finally:
        torch.set_num_threads(threads)
    for result in results:
        assert torch.allclose(result, results[0], rtol=0, atol=2e-5 * float(result.abs().max()))


def compilable(name: str) -> tuple[Target, Target]:
    """The same fp32 model with transformers' layers, and in mode compiled."""
    plain, fused = pair(FUSED[name]())
    return plain, replace(fused, mode="compiled")


@pytest.mark.parametrize("name", ["Llama, biases", "Llama, one head each", "Qwen3", "Mistral"])
def test_compiled_steps_write_what_generate_writes(name: str) -> None:
    """Windows, norms of heads, biases; trees of several widths."""
    plain, target = compilable(name)
    heads = tiny_heads(target)
    for tree in (Tree(()), TREES["sparse"], TREES["medusa-63"]):
        decoder = TreeDecoder(target, heads, tree, capacity=60, run_probe=False)
        assert all(type(step) is CompiledStep for step in decoder._steps)
        for prompt in PROMPTS[:2]:
            expected = generate_plain(plain, prompt, max_new_tokens=NEW_TOKENS).tokens
            found = decoder.generate(prompt, max_new_tokens=NEW_TOKENS).tokens
            parted = divergence(target, name, prompt, expected, found)
            assert parted is None or parted.explained


def test_nothing_is_compiled_while_steps_are_timed_or_answers_written(monkeypatch: pytest.MonkeyPatch) -> None:
    _, target = compilable("Llama")
    heads = tiny_heads(target)
    decoders = [TreeDecoder(target, heads, TREES[name], capacity=60) for name in ("empty", "chain", "medusa-63")]
    assert compiled_pass(target).is_ready
    monkeypatch.setattr(compiled, "loaded_library", None)
    for decoder in decoders:
        for prompt in PROMPTS[:2]:
            decoder.generate(prompt, max_new_tokens=NEW_TOKENS, rule=sampling_rule(temperature=0.9, seed=1))
    grid = MeasureGrid(widths=(1, 2, 5, 9), contexts=(8, 24), rounds=1)
    assert measure(target, heads, grid, [token for prompt in PROMPTS for token in prompt]).mode == "compiled"


def test_a_tree_cut_down_near_the_last_position_is_compiled_too() -> None:
    _, target = compilable("Llama")
    limited = replace(target, position_limit=20)
    decoder = TreeDecoder(limited, tiny_heads(limited), TREES["dense"], run_probe=False)
    answer = decoder.generate(PROMPTS[1], max_new_tokens=NEW_TOKENS)
    eager = TreeDecoder(replace(limited, mode="eager"), None, Tree(()), run_probe=False)
    assert answer.tokens == eager.generate(PROMPTS[1], max_new_tokens=NEW_TOKENS).tokens
    assert answer.end == "limit"


def test_a_step_that_was_not_prepared_runs_eagerly() -> None:
    _, target = compilable("Llama")
    plan = plan_tree(TREES["dense"], capacity=30, window=None, dtype=target.dtype, device=target.device)
    step, cache = CompiledStep(target, None, plan), target.new_cache(30 + plan.verify_width)
    with torch.inference_mode():
        eager, scores = step.tree_scores(cache)
        assert not compiled_pass(target).is_ready
        step.prepare(cache)
        found, found_scores = step.tree_scores(cache)
    assert compiled_pass(target).is_ready
    assert torch.allclose(eager, found, rtol=0, atol=2e-5 * float(eager.abs().max()))
    assert torch.allclose(scores, found_scores, rtol=0, atol=2e-5 * float(scores.abs().max()))


def test_a_pass_that_computes_something_else_is_refused() -> None:
    _, target = compilable("Llama")
    run = native.loaded_library(compiled.SOURCE).topo_search_pass

    def spoiled(model: Any, step: Any) -> int:
        done: int = run(model, step)
        states = (ctypes.c_float * target.hidden_size).from_address(step._obj.states)
        states[0] += 0.01
        return done

    made = CompiledPass(target)
    with pytest.raises(CheckError, match=r"compiled step computes something else.*--mode eager or auto"):
        made.prepare(target, run=spoiled)
    with pytest.raises(CheckError, match=r"torch refused an operation.*--mode eager or auto"):
        made.prepare(target, run=lambda model, step: 0)
    assert not made.is_ready
    made.prepare(target)
    assert made.is_ready


def test_a_step_beyond_the_cache_is_refused_before_anything_is_written() -> None:
    target = loud(3, 1, 32)
    made = compiled_pass(target)
    made.prepare(target)
    ids, positions, mask, cache = step_of(target, 5, 10)
    cache.length = 14
    before = cache.storage.clone()
    with pytest.raises(CheckError, match="A cache of 18 tokens cannot take 5 behind 14"):
        made(ids, positions, mask, cache)
    assert torch.equal(before, cache.storage)


def test_a_torch_without_its_c_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _, target = compilable("Llama")
    monkeypatch.setattr(compiled, "_TORCH_FUNCTIONS", ("aoti_torch_no_such_function",))
    with pytest.raises(InputError, match=r"what torch .* lacks \(.*no_such_function.*use --mode eager or auto"):
        CompiledPass(target).prepare(target)


def test_weights_are_given_back_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[compiled._Handles] = []

    class Counted(compiled._Handles):
        def __init__(self, release: int) -> None:
            super().__init__(release)
            made.append(self)

    monkeypatch.setattr(compiled, "_Handles", Counted)
    target = loud(3, 1, 32)
    compiled_pass(target).prepare(target)
    assert (len(made[0]._handles), len(made[0]._plain)) == (9, 5)  # with the biases of four
    del target
    gc.collect()
    assert not made[0]._handles
    assert not made[0]._plain


def test_the_cost_is_said_before_anything_is_compiled() -> None:
    _, target = pair(FUSED["Llama"]())
    said: list[str] = []
    assert in_mode(target, "eager", say=said.append).mode == "eager"
    assert not said
    assert in_mode(target, "compiled", say=said.append).mode == "compiled"
    assert "some seconds the first time on a machine" in said[0]
    assert not compiled_pass(target).is_ready


def test_models_that_the_pass_does_not_know_are_refused() -> None:
    _, odd = pair(transformers.LlamaConfig(**SIZES, head_dim=12))
    with pytest.raises(InputError, match=r"heads of a multiple of 8 numbers, not of 12.*Use --mode eager or auto"):
        in_mode(odd, "compiled", say=print)
    mixed = SIZES | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    _, target = pair(transformers.Qwen2Config(**mixed))
    assert target.is_fused
    with pytest.raises(InputError, match=r"some layers of this one have a window.*Use --mode eager or auto"):
        in_mode(target, "compiled", say=print)
