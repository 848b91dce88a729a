"""Hydra and Hydra++ heads, every option: formula, one call per depth, path-locality, text and replay in the decoder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    PROMPTS,
    TREES,
    VOCAB,
    as_target,
    as_users_run_it,
    bound_hydra,
    drawn_hydra,
    encoded,
    hydra_shape,
    llama_config,
    must_not_run,
    plain_text,
    target_of,
    tiny_hydra,
    tiny_model,
)
from torch import Tensor
from torch.nn import functional

from topo_search.answers import answer_batch
from topo_search.calibrate import answer_features, calibrate, empty_trace, trace_of_answers
from topo_search.compare import teacher_forced
from topo_search.decode.decoder import TreeDecoder
from topo_search.decode.plan import TreePlan, plan_tree
from topo_search.errors import InputError
from topo_search.heads.attention import DecoderLayer, LayerShape
from topo_search.heads.base import DraftCost, DraftHeads, ids_of
from topo_search.heads.hydra import HydraBlock, HydraBlocks, HydraHeads, HydraShape, untrained_hydra
from topo_search.heads.projection import Projection
from topo_search.identity import HeadsIdentity
from topo_search.ranking import top_tokens
from topo_search.replay import replay
from topo_search.target.fused import has_fused_layers
from topo_search.tree import Tree

TARGET = target_of("llama")
SHAPES: dict[str, dict[str, Any]] = {
    "mlp": {},
    "layers": {"num_layers": 3},
    "guide": {"arch": "guide", "num_layers": 2},
    "last": {"sees": "last"},
    "rootless": {"root_in_first": False},
    "fusion": {"sees": "fusion"},
    "prefix": {"prefix_attention": True},
    "rooted prefix": {"prefix_attention": True, "root_in_prefix": True},
    "gain": {"embedding_gain": 7.0},
    "rooted fusion": {"prefix_attention": True, "root_in_prefix": True, "sees": "fusion", "num_layers": 2},
    "all": {"arch": "guide", "num_layers": 2, "sees": "fusion", "root_in_first": False, "prefix_attention": True}
    | {"embedding_gain": 0.5},
}
OPTIONS = SHAPES | {"shortlist": {"shortlist": 30}, "prefix shortlist": {"prefix_attention": True, "shortlist": 30}}
EACH_SHAPE = pytest.mark.parametrize("option", SHAPES)
EACH_OPTION = pytest.mark.parametrize("option", OPTIONS)
BUSHY = Tree(((0,), (1,), (4,), (0, 0), (0, 2), (1, 1), (4, 0), (0, 0, 1), (0, 2, 0), (1, 1, 0), (0, 0, 1, 2)))


@cache
def fitted(option: str) -> HydraHeads:
    """Heads that are right now and then, shared by all tests."""
    return tiny_hydra(TARGET, **OPTIONS[option])


def drawn(option: str) -> HydraBlocks:
    return drawn_hydra(TARGET, hydra_shape(TARGET, **SHAPES[option]))


def plan_of(tree: Tree) -> TreePlan:
    return plan_tree(tree, capacity=4, window=None, dtype=torch.float64, device=TARGET.device)


def rows(count: int) -> tuple[Tensor, Tensor]:
    """States, and a root with three tokens after it, of that many rows."""
    return torch.randn(count, TARGET.hidden_size, dtype=torch.float64), torch.randint(0, VOCAB, (count, 4))


def read_rows(shape: HydraShape, count: int) -> tuple[Tensor, Tensor]:
    """What such heads read, and a root with three tokens after it, of that many rows."""
    states, tokens = rows(count)
    return torch.cat([states, rows(count)[0]], dim=1) if shape.root_in_prefix else states, tokens


# Scores


@EACH_SHAPE
@pytest.mark.parametrize("shared", [False, True], ids=["own projection", "target's projection"])
def test_untrained_heads_give_the_targets_own_scores(option: str, shared: bool) -> None:
    """Exactly so; prefix attention starts as the identity up to its norm, whose gain is the states' size."""
    states, tokens = rows(5)
    gain = float(states.square().mean().sqrt())
    shape = hydra_shape(TARGET, **SHAPES[option])
    heads = bound_hydra(untrained_hydra(TARGET, shape, share_projection=shared, gain=gain), TARGET)
    read = heads.features(states, tokens[:, 0])
    first, last = read[:, : TARGET.hidden_size], read[:, -TARGET.hidden_size :]
    if not heads.reads_prefix or shape.root_in_prefix:
        assert torch.equal(first, states)
    if heads.reads_prefix:
        normed = gain * functional.rms_norm(states, (TARGET.hidden_size,), eps=1e-6)
        assert torch.allclose(last, normed, rtol=0, atol=1e-6)
    scores = heads.path_scores(read, tokens)
    own = torch.stack([TARGET.scores(first), *[TARGET.scores(last)] * 3], dim=1)
    assert torch.allclose(scores, own, rtol=0, atol=1e-12)
    assert torch.equal(top_tokens(scores, 10), top_tokens(own, 10))


def silu(values: Tensor) -> Tensor:
    return values / (1 + torch.exp(-values))


def llama_layer(layer: DecoderLayer, shape: LayerShape, inputs: Tensor) -> Tensor:
    """One causal Llama layer and the final norm over `[positions, hidden]`, from its weights alone."""
    weights = {name.removeprefix("model.layers.0."): value for name, value in layer.state_dict().items()}
    count, width = inputs.shape[0], shape.head_dim

    def norm(values: Tensor, gain: Tensor) -> Tensor:
        values = values.float()  # as Llama does, whatever its precision
        return gain * (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + shape.norm_eps)).double()

    def turned(values: Tensor) -> Tensor:
        frequencies = 1.0 / shape.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles = torch.arange(count, dtype=torch.float32)[:, None, None] * torch.cat([frequencies, frequencies])
        halves = torch.cat([-values[..., width // 2 :], values[..., : width // 2]], dim=-1)
        return values * angles.cos().double() + halves * angles.sin().double()

    normed = norm(inputs, weights["input_layernorm.weight"])
    query, key, value = (
        (normed @ weights[f"self_attn.{name}_proj.weight"].T).view(count, -1, width) for name in ("q", "k", "v")
    )
    query, key = turned(query), turned(key)
    mixed = []
    for head in range(shape.num_attention_heads):
        group = head * shape.num_key_value_heads // shape.num_attention_heads
        scores = query[:, head] @ key[:, group].T / width**0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
        mixed.append(scores.softmax(-1) @ value[:, group])
    hidden = inputs + torch.cat(mixed, dim=-1) @ weights["self_attn.o_proj.weight"].T
    normed = norm(hidden, weights["post_attention_layernorm.weight"])
    gate = silu(normed @ weights["mlp.gate_proj.weight"].T) * (normed @ weights["mlp.up_proj.weight"].T)
    return norm(hidden + gate @ weights["mlp.down_proj.weight"].T, weights["model.norm.weight"])


def reference_head(blocks: HydraBlocks, head: int, read: Tensor, embedded: Tensor) -> Tensor:
    """What head number `head` hands on for one row, from h_t and the embeddings of root and path (section 3).

    `read` is h_t, or what stands in its place, or both, of which head 1 alone reads h_t.
    """
    shape, block = blocks.shape, blocks.heads[head]
    weights = dict(block.state_dict())
    path = embedded[: head + 1] * shape.embedding_gain
    if shape.sees == "fusion":
        assert shape.layer is not None
        path = llama_layer(blocks.fusion, shape.layer, torch.cat([read[None, -shape.hidden :], path]))[-1:]
    read = read[: shape.hidden] if head == 0 else read[-shape.hidden :]
    if shape.sees == "last":
        path = path[-1:]
    if head == 0 and not shape.root_in_first:
        path = path[:0]
    seen = torch.cat([read, *path])
    inner = silu(weights["linear.weight"] @ seen + weights["linear.bias"])
    if shape.arch == "mlp":
        features = weights["shortcut.weight"] @ seen + weights["shortcut.bias"] + inner
    else:
        normed = functional.layer_norm(inner, inner.shape, weights["norm.weight"], weights["norm.bias"])
        features = read + weights["second.weight"] @ normed + weights["second.bias"]
    for layer in range(shape.num_layers - 1):
        features = features + silu(weights[f"layers.{layer}.weight"] @ features + weights[f"layers.{layer}.bias"])
    return features


@EACH_SHAPE
def test_scores_are_those_of_the_formula(option: str) -> None:
    """R x + r + SiLU(W x + b) with x = concat(h_t, e(root), .., e(last drafted)), or the guide's block on it."""
    blocks = drawn(option)
    heads = bound_hydra(blocks, TARGET)
    states, tokens = rows(5)
    read = heads.features(states, tokens[:, 0])
    if blocks.prefix is not None:
        assert blocks.shape.layer is not None
        inputs = states
        if blocks.prefix_root is not None:
            roots = TARGET.embed(tokens[:, 0])
            inputs = states + (roots / roots.square().mean(dim=1, keepdim=True).sqrt()) @ blocks.prefix_root.weight.T
        output = llama_layer(blocks.prefix, blocks.shape.layer, inputs)
        expected = torch.cat([states, output], dim=1) if blocks.shape.root_in_prefix else output
        assert torch.allclose(read, expected, rtol=0, atol=1e-9)
    scores, embedded = heads.path_scores(read, tokens), TARGET.embed(tokens)
    for row in range(5):
        for head in range(4):
            expected = TARGET.output_weight @ reference_head(blocks, head, read[row], embedded[row])
            assert torch.allclose(scores[row, head], expected, rtol=0, atol=1e-9)


def test_own_projections_have_a_bias_where_one_is_stored() -> None:
    blocks = drawn_hydra(TARGET, hydra_shape(TARGET), own_projection=True)
    states, tokens = rows(3)
    plain = bound_hydra(blocks, TARGET).path_scores(states, tokens)
    blocks.projection_bias = torch.nn.Parameter(torch.randn(4, VOCAB, dtype=torch.float64))
    heads = bound_hydra(blocks, TARGET)
    assert torch.allclose(heads.path_scores(states, tokens), plain + blocks.projection_bias, rtol=0, atol=1e-12)
    plan = plan_of(Tree.chain(4))
    chain = torch.cat([tokens[:1, :1], heads.propose(states[:1], tokens[:1, 0], plan)], dim=1)
    ranked = heads.path_scores(states[:1], chain[:, :-1])[0].argmax(-1)
    assert chain[0, 1:].tolist() == ranked.tolist()


@EACH_SHAPE
def test_training_and_drafting_hand_on_the_same(option: str) -> None:
    """`true_path` runs all heads over the true path at once, `head` one over the drafted paths of its depth."""
    blocks = drawn(option)
    read, tokens = read_rows(blocks.shape, 6)
    embedded = TARGET.embed(tokens)
    for heads in (1, 3, 4):
        together = blocks.true_path(read, embedded, heads)
        for head in range(heads):
            alone = blocks.head(head, read, embedded[:, : head + 1])
            assert torch.allclose(together[head], alone, rtol=0, atol=1e-12)


# Proposals


@EACH_OPTION
def test_proposals_are_the_nodes_ranks_in_the_list_of_their_path(option: str) -> None:
    """Along every drafted path, for each of two rows."""
    heads, plan = fitted(option), plan_of(BUSHY)
    read, tokens = read_rows(heads.blocks.shape, 2)
    proposed = heads.propose(read, tokens[:, 0], plan)
    for row in range(2):
        drafted = {(): int(tokens[row, 0])} | dict(zip(BUSHY.paths, proposed[row].tolist(), strict=True))
        for path in BUSHY.paths:
            seen = [drafted[path[:depth]] for depth in range(len(path))]
            ids = torch.tensor([seen + [0] * (4 - len(seen))])
            scores = heads.path_scores(read[row : row + 1], ids)[0, len(path) - 1]
            assert drafted[path] == int(ids_of(heads, top_tokens(scores, 5))[path[-1]])


@EACH_OPTION
def test_every_depth_is_one_batched_call(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 3, claim 4: all expanded nodes of a depth go through head and projection together."""
    heads, plan = fitted(option), plan_of(BUSHY)
    blocks, projections, attentions = [], [], []
    real_block, real_scores, real_layer = HydraBlock.forward, Projection.scores, DecoderLayer.forward

    def block(module: HydraBlock, state: Tensor, seen: Tensor) -> Tensor:
        blocks.append(tuple(state.shape[:-1]))
        return real_block(module, state, seen)

    def scores(projection: Projection, features: Tensor, *, first_head: int = 0) -> Tensor:
        projections.append((first_head, *features.shape[:-1]))
        return real_scores(projection, features, first_head=first_head)

    def layer(module: DecoderLayer, inputs: Tensor, **settings: Any) -> Tensor:
        attentions.append(tuple(inputs.shape[:-1]))
        return real_layer(module, inputs, **settings)

    monkeypatch.setattr(HydraBlock, "forward", block)
    monkeypatch.setattr(Projection, "scores", scores)
    monkeypatch.setattr(DecoderLayer, "forward", layer)
    read, tokens = read_rows(heads.blocks.shape, 2)
    heads.propose(read, tokens[:, 0], plan)
    expanded = [1, 3, 3, 1]
    assert [len(level.paths) for level in plan.levels] == expanded
    assert blocks == [(2, nodes) for nodes in expanded]
    assert projections == [(head, 1, 2 * nodes) for head, nodes in enumerate(expanded)]
    fused = [(2 * nodes, head + 2) for head, nodes in enumerate(expanded)]
    assert attentions == (fused if heads.blocks.shape.sees == "fusion" else [])


@contextmanager
def no_read_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forbid what makes an accelerator wait for its results."""
    with monkeypatch.context() as patch, as_users_run_it():
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "numpy", "cpu"):
            patch.setattr(Tensor, name, must_not_run)
        patch.setattr("topo_search.ranking._among_candidates", lambda *_: None)  # the fast path of CPUs, which may
        patch.setattr(torch, "nonzero", must_not_run)
        yield


@EACH_OPTION
def test_drafting_reads_nothing_back(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, plan = fitted(option), plan_of(BUSHY)
    states, tokens = rows(3)
    context, following = heads.new_context(16), tokens[None, :, 0]
    context.extend(states[None], following)
    with torch.inference_mode(), no_read_back(monkeypatch):
        heads.propose(context.extend(states[None], following), tokens[:1, 0], plan)


# Path-locality


@EACH_OPTION
def test_lists_do_not_depend_on_where_steps_began(option: str) -> None:
    """MATH 1: one text cut into steps in several ways; what the heads read, and so every list, is the same."""
    heads = fitted(option)
    states, tokens = rows(23)
    whole = heads.features(states, tokens[:, 0])
    for cuts in ([1] * 23, [5, 1, 3, 1, 4, 9], [23], [22, 1], [1, 22]):
        context, start = heads.new_context(24), 0
        for count in cuts:
            part = slice(start, start + count)
            read = context.extend(states[None, part], tokens[None, part, 0])[0]
            start += count
            assert torch.allclose(read, whole[start - 1], rtol=0, atol=1e-12)
            lists = top_tokens(heads.path_scores(read[None], tokens[start - 1 : start]), 20)
            assert torch.equal(
                lists, top_tokens(heads.path_scores(whole[start - 1 : start], tokens[start - 1 : start]), 20)
            )


@pytest.mark.parametrize("option", ["prefix", "rooted prefix"])
def test_a_context_forgets_what_is_rewound(option: str) -> None:
    heads = fitted(option)
    states, tokens = rows(9)
    following, kept = tokens[:, 0], [0, 1, 2, 3, 7, 8]
    context = heads.new_context(16)
    context.extend(states[None], following[None])
    context.rewind(4)
    read = context.extend(states[None, [7, 8]], following[None, [7, 8]])[0]
    assert torch.allclose(read, heads.features(states[kept], following[kept])[-1], rtol=0, atol=1e-12)


def test_what_prefix_heads_read_depends_on_the_prompt() -> None:
    """Its first token included: a trace made without the prompt's states would be another decoder's."""
    heads = fitted("prefix")
    answer = answer_batch(TARGET, [PROMPTS[1]], max_new_tokens=6, keep_prompt_states=True)[0]
    assert answer.prompt_states is not None
    read = answer_features(heads, answer)
    shorter = answer_features(heads, replace(answer, prompt_states=answer.prompt_states[1:], prompt=answer.prompt[1:]))
    assert read.shape == shorter.shape == answer.states.shape
    assert (read - shorter).abs().max() > 1e-6


def test_prompts_of_a_padded_batch_keep_their_own_states() -> None:
    """Rows of lengths 3, 5, 2 and 1: the states before the last prompt token, padding left out."""
    together = answer_batch(TARGET, PROMPTS, max_new_tokens=5, keep_prompt_states=True)
    for prompt, answer in zip(PROMPTS, together, strict=True):
        forced = teacher_forced(TARGET, prompt, answer.tokens, index=0, end="cap")
        assert answer.prompt_states is not None and forced.prompt_states is not None
        assert answer.prompt_states.shape == (len(prompt) - 1, TARGET.hidden_size)
        assert torch.allclose(answer.prompt_states, forced.prompt_states, rtol=0, atol=1e-9)
        assert torch.allclose(answer.states, forced.states, rtol=0, atol=1e-9)


def test_calibration_refuses_heads_that_are_not_path_local(tmp_path: Path) -> None:
    """MATH 1: with a step-dependent head the text stays right and replay is wrong."""

    class StepDependent(HydraHeads):
        path_local = False

    heads = fitted("mlp")
    stateful = StepDependent(heads.blocks, TARGET, heads.identity)
    with pytest.raises(InputError, match=r"tiny are not path-local.*cannot be replayed.*topo-search bench"):
        calibrate(TARGET, stateful, encoded(*PROMPTS), out=tmp_path / "t.trace.safetensors", max_new_tokens=4)


# Decoder


@EACH_OPTION
def test_text_is_that_of_generate_and_replay_is_the_decoder(option: str) -> None:
    """Issue 3, claim 2: five trees, every step's accepted length; FIELD-CASES 36: in the loop as offline."""
    heads, cap = fitted(option), 20
    answers = answer_batch(TARGET, PROMPTS, max_new_tokens=cap, keep_prompt_states=heads.reads_prefix)
    trace = trace_of_answers(empty_trace(TARGET, heads, max_new_tokens=cap), heads, encoded(*PROMPTS), answers)
    walks, found = replay(trace, TREES.values()), set()
    for index, tree in enumerate(TREES.values()):
        decoder = TreeDecoder(TARGET, heads, tree, capacity=64, run_probe=False)
        decoded = [decoder.generate(prompt, max_new_tokens=cap) for prompt in PROMPTS]
        assert [answer.tokens for answer in decoded] == [plain_text("llama", prompt).tokens[:cap] for prompt in PROMPTS]
        assert walks.accepted(index) == [list(answer.accepted) for answer in decoded]
        found |= {length for answer in decoded for length in answer.accepted}
    assert found >= {0, 1, 2, 3}


def test_the_position_limit_and_the_next_prompt_leave_prefix_heads_right() -> None:
    """Near the limit the tree is trimmed away and heads stop reading; the next prompt starts afresh."""
    heads, target = fitted("prefix"), replace(TARGET, position_limit=20)
    decoder = TreeDecoder(target, heads, TREES["dense"], capacity=20, run_probe=False)
    once = [decoder.generate(prompt, max_new_tokens=100) for prompt in PROMPTS]
    again = [decoder.generate(prompt, max_new_tokens=100) for prompt in PROMPTS]
    assert [(a.tokens, a.accepted) for a in once] == [(a.tokens, a.accepted) for a in again]
    for prompt, answer in zip(PROMPTS, once, strict=True):
        assert answer.tokens == plain_text("llama", prompt).tokens[: 20 - len(prompt)]
        assert answer.end == "limit"


def test_the_contexts_buffers_stay_where_they_are() -> None:
    """FIELD-CASES 49: the prefix layer's cache is preallocated and kept in step with the committed text."""
    decoder = TreeDecoder(TARGET, fitted("prefix"), TREES["dense"], capacity=128, run_probe=False)
    assert decoder._context is not None
    (storage,) = decoder._context.buffers()
    assert any(buffer is storage for buffer in decoder.buffers())
    addresses = [buffer.data_ptr() for buffer in decoder.buffers()]
    for emitted in decoder.stream(PROMPTS[0], max_new_tokens=100):
        # What the last step committed is read when the next one drafts.
        assert decoder._cache is not None
        assert decoder._context._cache.length == decoder._cache.length - len(emitted)  # type: ignore[attr-defined]
    assert [buffer.data_ptr() for buffer in decoder.buffers()] == addresses


def test_ranks_beyond_a_shortlist_are_refused_before_any_work() -> None:
    heads = tiny_hydra(TARGET, shortlist=3)
    with pytest.raises(InputError, match=r"rank 4.*3 tokens.*rank"):
        TreeDecoder(TARGET, heads, BUSHY, run_probe=False)


def test_hydra_heads_are_draft_heads() -> None:
    heads = fitted("prefix")
    assert isinstance(heads, DraftHeads)
    assert (heads.cost, heads.path_local, heads.reads_prefix) == (DraftCost.PER_DEPTH, True, True)
    assert not fitted("mlp").reads_prefix


# Refusals and precision


def test_ids_beyond_the_embedding_table_are_refused_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FIELD-CASES 84: an added pad id is one past the table; a device assert would end the whole process."""
    heads = fitted("mlp")
    states, tokens = rows(2)
    tokens[1, 2] = VOCAB
    monkeypatch.setattr(type(TARGET), "embed", must_not_run)
    with pytest.raises(InputError, match=rf"token id {VOCAB}, outside the target's {VOCAB} embeddings"):
        heads.path_scores(states, tokens)


def test_heads_in_bf16_serve_a_target_in_fp32() -> None:
    """Rotary angles stay in fp32: rounded to bf16 a position of a thousand would be off by whole turns."""
    target = as_target(tiny_model(llama_config(), dtype=torch.float32), dtype="float32")
    shape = hydra_shape(target, prefix_attention=True, sees="fusion")
    blocks = untrained_hydra(target, shape, share_projection=True)
    identity = HeadsIdentity(name="tiny", kind="hydra", fingerprint="", num_heads=4)
    heads = HydraHeads(blocks, target, identity, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in heads.blocks.parameters()} == {torch.bfloat16}
    assert heads.blocks.prefix is not None
    assert heads.blocks.prefix.model.rotary_emb.inv_freq.dtype == torch.float32
    decoder = TreeDecoder(target, heads, TREES["dense"], capacity=64, run_probe=False)
    assert decoder.generate(PROMPTS[0], max_new_tokens=8).tokens == (
        TreeDecoder(target, None, Tree(()), run_probe=False).generate(PROMPTS[0], max_new_tokens=8).tokens
    )


@pytest.mark.parametrize("option", ["prefix", "rooted prefix", "rooted fusion", "gain"])
def test_packed_heads_score_as_plain_ones(option: str) -> None:
    """On a CPU in fp32 the heads' layers are packed for oneDNN, and attention runs in few operations."""
    target = as_target(tiny_model(llama_config(), dtype=torch.float32), dtype="float32")
    shape = hydra_shape(target, **SHAPES[option])
    identity = HeadsIdentity(name="tiny", kind="hydra", fingerprint="", num_heads=4)
    packed = HydraHeads(drawn_hydra(target, shape), target, identity)
    exact = HydraHeads(drawn_hydra(target, shape), target, identity, dtype=torch.float64)
    states, tokens = torch.randn(5, 64), torch.randint(0, VOCAB, (5, 4))
    expected = exact.path_scores(exact.features(states, tokens[:, 0]), tokens)
    found = packed.path_scores(packed.features(states, tokens[:, 0]), tokens)
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3)
    attending = [layer for layer in (packed.blocks.prefix, packed.blocks.fusion) if layer is not None]
    assert all(has_fused_layers(layer.model) for layer in attending)
    assert not any(has_fused_layers(layer.model) for layer in (exact.blocks.prefix, exact.blocks.fusion) if layer)


def test_a_fused_prefix_layer_reads_step_by_step_what_it_reads_at_once() -> None:
    """Steps of one and of several tokens, two rows at a time, with a step taken back in between."""
    target = as_target(tiny_model(llama_config(), dtype=torch.float32), dtype="float32")
    identity = HeadsIdentity(name="tiny", kind="hydra", fingerprint="", num_heads=4)
    shape = hydra_shape(target, prefix_attention=True, root_in_prefix=True)
    heads = HydraHeads(drawn_hydra(target, shape), target, identity)
    states, following = torch.randn(2, 9, 64), torch.randint(0, VOCAB, (2, 9))
    context = heads.new_context(12, batch=2)
    context.extend(states[:, :4].flip(1), following[:, :4])
    context.rewind(0)
    start = 0
    for count in (4, 1, 3, 1):
        read = context.extend(states[:, start : start + count], following[:, start : start + count])
        start += count
        for row in range(2):
            whole = heads.features(states[row, :start], following[row, :start])
            assert torch.allclose(read[row], whole[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 0}, "num_heads"),
        ({"num_layers": 0}, "num_layers"),
        ({"prefix_attention": True}, "need the shape of their attention layer"),
        ({"root_in_prefix": True}, "root_in_prefix need prefix_attention"),
        ({"sees": "fusion"}, "need the shape of their attention layer"),
        ({"embedding_gain": 0.0}, "embedding_gain above 0"),
        ({"embedding_gain": float("nan")}, "embedding_gain above 0"),
    ],
)
def test_shapes_that_make_no_heads_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        HydraShape(**({"hidden": 64, "num_heads": 4} | changes))
