"""Tiny random models from their configs, in float64 so that equality needs no tolerance, and heads that half know them.

Gemma 2 attends eagerly, with a softmax in fp32 whatever the model's precision, so it runs in fp32 throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jaxtyping
import pytest
import torch
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
)

from topo_search.answers import Answer
from topo_search.calibrate import EncodedPrompt, true_paths
from topo_search.compare import teacher_forced
from topo_search.decode.decoder import Decoded
from topo_search.errors import InputError
from topo_search.files.tree_file import read_tree
from topo_search.heads.attention import LayerShape
from topo_search.heads.hydra import HydraBlocks, HydraHeads, HydraShape, untrained_hydra
from topo_search.heads.medusa import MedusaBlocks, MedusaHeads
from topo_search.heads.projection import shortlist_of
from topo_search.identity import HeadsIdentity
from topo_search.reference import generate_plain
from topo_search.resources import packaged
from topo_search.target import Target
from topo_search.target.load import make_target
from topo_search.target.native import require_compiler
from topo_search.tree import Tree


def _has_compiler() -> bool:
    try:
        require_compiler()
    except InputError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="no C++ compiler here")

VOCAB = 61
WINDOW = 4
POSITIONS = 48  # of the tiny GPT-2
PROMPTS = ((1, 2, 3), (5, 9, 7, 11, 20), (60, 30), (44,))
NEW_TOKENS = 32

MEDUSA_63 = read_tree(packaged("trees/reference/medusa-63.tree.json")).tree
SPARSE = Tree(((0,), (1,), (4,), (0, 0), (0, 2), (1, 1), (4, 0), (0, 0, 1), (0, 2, 0), (1, 1, 0), (0, 0, 1, 2)))
TREES = {
    "empty": Tree(()),
    "chain": Tree.chain(4),
    "dense": Tree.dense([3, 2, 2]),
    "medusa-63": MEDUSA_63,
    "sparse": SPARSE,
}


def tiny_model(config: Any, *, dtype: torch.dtype = torch.float64, attention: str = "sdpa") -> Any:
    """A random model of `config`, its weights large enough that its text does not settle on one token."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.4 if "embed" in name or "lm_head" in name else 0.15)
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    return model


def _sizes(**changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "eos_token_id": None,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    }
    return settings | changes


def llama_config(**changes: Any) -> LlamaConfig:
    """Eight attention heads on two key-value heads."""
    return LlamaConfig(**_sizes(**changes))


def mistral_config(**changes: Any) -> MistralConfig:
    """Every layer sees only the last `WINDOW` tokens."""
    return MistralConfig(**_sizes(**({"sliding_window": WINDOW} | changes)))


def gemma2_config() -> Gemma2Config:
    """Layers with and without a window in turn; attention and output scores are soft-capped."""
    return Gemma2Config(**_sizes(sliding_window=WINDOW, head_dim=8, query_pre_attn_scalar=8))


def gemma3_config() -> Gemma3TextConfig:
    """Layers with and without a window, each kind with rotary angles of its own."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3TextConfig(
        **_sizes(sliding_window=WINDOW, head_dim=8, query_pre_attn_scalar=8, num_hidden_layers=3, layer_types=types)
    )


def gpt2_config() -> GPT2Config:
    """Learned positions, and few of them."""
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}
    return GPT2Config(vocab_size=VOCAB, eos_token_id=None, bos_token_id=None, tie_word_embeddings=False, **sizes)


_CONFIGS = {
    "llama": llama_config,
    "mistral": mistral_config,
    "gemma2": gemma2_config,
    "gemma3": gemma3_config,
    "gpt2": gpt2_config,
}
ARCHITECTURES = tuple(_CONFIGS)


def as_target(model: Any, *, name: str = "tiny", dtype: str = "float64", tokenizer: Any = None) -> Target:
    """A target made of a model in memory."""
    return make_target(model, tokenizer, name=name, dtype=dtype)


def tiny_llama(**changes: Any) -> Target:
    """A tiny Llama target of its own, free to be changed."""
    return as_target(tiny_model(llama_config(**changes)))


@cache
def target_of(architecture: str) -> Target:
    """The tiny target of an architecture, shared by all tests."""
    if architecture == "gemma2":
        model = tiny_model(gemma2_config(), dtype=torch.float32, attention="eager")
        return make_target(model, None, name=architecture, dtype="float32", pack=False)
    return as_target(tiny_model(_CONFIGS[architecture]()), name=architecture)


@cache
def heads_of(architecture: str) -> MedusaHeads:
    """Fitted heads of that target, shared by all tests."""
    return tiny_heads(target_of(architecture))


@cache
def plain_text(architecture: str, prompt: tuple[int, ...]) -> Decoded:
    """transformers' own greedy text of a prompt."""
    return generate_plain(target_of(architecture), prompt, max_new_tokens=NEW_TOKENS)


def tiny_heads(target: Target, *, num_heads: int = 4, noise: float = 1.0) -> MedusaHeads:
    """Heads fitted to the target's answers to `PROMPTS` by least squares, then blurred: they are right now and then.

    On these prompts steps of four heads accept any number of drafted tokens from 0 to 4.
    """
    states = torch.cat([answer.states[:-1].double() for answer in _answered(target)])
    maps = _blurred(_fitted([states] * num_heads, _following(target, num_heads)), noise)
    blocks = MedusaBlocks(num_heads=num_heads, num_layers=1, hidden=target.hidden_size)
    blocks.projection = torch.nn.Parameter(maps)
    identity = HeadsIdentity(name="tiny", kind="medusa", fingerprint="tiny", num_heads=num_heads)
    return MedusaHeads(blocks, target, identity)


def hydra_shape(target: Target, *, num_heads: int = 4, **options: Any) -> HydraShape:
    """A shape with the given options, its attention layers, if any, shaped as the target's."""
    attends = options.get("prefix_attention") or options.get("sees") == "fusion"
    layer = LayerShape.of(target) if attends else None
    return HydraShape(hidden=target.hidden_size, num_heads=num_heads, layer=layer, **options)


def drawn_hydra(target: Target, shape: HydraShape, *, own_projection: bool = False) -> HydraBlocks:
    """Blocks whose every number is moved from its starting point."""
    torch.manual_seed(11)
    blocks = untrained_hydra(target, shape, share_projection=not own_projection).double()
    with torch.no_grad():
        for parameter in blocks.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return blocks


def bound_hydra(blocks: HydraBlocks, target: Target, *, token_map: torch.Tensor | None = None) -> HydraHeads:
    """Blocks as draft heads."""
    identity = HeadsIdentity(name="tiny", kind="hydra", fingerprint="tiny", num_heads=blocks.num_heads)
    return HydraHeads(blocks, target, identity, token_map=token_map)


def tiny_hydra(target: Target, *, shortlist: int | None = None, noise: float = 0.5, **options: Any) -> HydraHeads:
    """Drawn Hydra heads whose own projections are fitted like those of `tiny_heads`, over the path they see."""
    blocks = drawn_hydra(target, hydra_shape(target, **options))
    features, paths = [], []
    with torch.no_grad():
        for answer in _answered(target):
            states = torch.cat([answer.prompt_states, answer.states])
            following = target.embed(torch.tensor([*answer.prompt[1:], *answer.tokens]))
            read = blocks.read_prefix(states[None], following[None])[0]
            features.append(read[len(answer.prompt_states) : -1])
            paths.append(true_paths(torch.tensor(answer.tokens), blocks.num_heads)[:, :-1])
        embedded = target.embed(torch.cat(paths))
        handed = blocks.true_path(torch.cat(features), embedded, blocks.num_heads)
    following = _following(target, blocks.num_heads)
    token_map = None if shortlist is None else shortlist_of(torch.bincount(following[:, 0], minlength=VOCAB), shortlist)
    maps = _blurred(_fitted(list(handed), following), noise)
    blocks.projection = torch.nn.Parameter(maps if token_map is None else maps[:, token_map])
    return bound_hydra(blocks, target, token_map=token_map)


def _fitted(inputs: list[torch.Tensor], following: torch.Tensor) -> torch.Tensor:
    """One map per head, `[heads, vocab, hidden]`, from what its projection reads to the token it should draft."""
    maps = []
    for depth, rows in enumerate(inputs):
        gram = rows.T @ rows
        gram += 0.1 * gram.diagonal().mean() * torch.eye(rows.shape[1], dtype=torch.float64)
        wanted = functional.one_hot(following[:, depth], VOCAB).double()
        maps.append(torch.linalg.solve(gram, rows.T @ wanted).T)
    return torch.stack(maps)


def _blurred(maps: torch.Tensor, noise: float) -> torch.Tensor:
    torch.manual_seed(3)
    return maps + noise * maps.std() * torch.randn_like(maps)


def _following(target: Target, num_heads: int) -> torch.Tensor:
    """The tokens that follow the root at every row of the answers."""
    return torch.cat([true_paths(torch.tensor(answer.tokens), num_heads)[:, 1:] for answer in _answered(target)])


@cache
def _answered(target: Target) -> list[Answer]:
    """The target's answers to `PROMPTS`, with their states."""
    answers = []
    for index, prompt in enumerate(PROMPTS):
        tokens = generate_plain(target, prompt, max_new_tokens=NEW_TOKENS + 8).tokens
        answers.append(teacher_forced(target, prompt, tokens, index=index, end="cap"))
    return answers


def encoded(*prompts: tuple[int, ...]) -> list[EncodedPrompt]:
    """Prompts by their token ids, named p0, p1, ..."""
    return [EncodedPrompt(id=f"p{i}", workload="code", tokens=tokens) for i, tokens in enumerate(prompts)]


def must_not_run(*_: Any, **__: Any) -> None:
    """Put in the place of what a test forbids."""
    raise AssertionError("this must not run")


@contextmanager
def as_users_run_it() -> Iterator[None]:
    """Without the shape and type checks, which exist under pytest only: our own messages must do."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
