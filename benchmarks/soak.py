"""Ten thousand decode steps with everything drawn at random: is the text ever another than plain decoding's?

A tiny random model in float64, so that equality needs no tolerance. Each round draws a tree, prompts, a cap,
end-of-text ids and a rule, and heads that are scripted: in every step they draw one path of the tree and place the true
tokens on it and nowhere else, so that every acceptance pattern occurs. Each answer is decoded alone and in a batch.
Memory must stay flat: live tensors to the byte, the process's resident set within a few MB of allocator noise.

    python benchmarks/soak.py --steps 10000 --seed 0
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from topo_search.decode.batch import decode_batch
from topo_search.decode.decoder import Decoded, TreeDecoder
from topo_search.decode.plan import TreePlan
from topo_search.heads.base import DraftCost
from topo_search.identity import GREEDY, HeadsIdentity, RuleIdentity, sampling_rule
from topo_search.provenance import provenance
from topo_search.target import Target
from topo_search.target.load import make_target
from topo_search.tree import Path as RankPath
from topo_search.tree import Tree

VOCAB, DEPTH, RANKS = 61, 4, 5
_ROWS, _PROMPT_TOKENS, _CAP = 3, 12, 40
_ALLOWED_GROWTH_BYTES = 1 << 20
_STATM = Path("/proc/self/statm")


@dataclass(slots=True, kw_only=True)
class SoakResult:
    """What a run found.

    Attributes:
        steps: decode steps taken, alone and in batches.
        rounds: drawn trees.
        differences: one line per answer that differs from plain decoding.
        accepted: steps by accepted drafted tokens.
        live_bytes: bytes of live tensors after each tenth of the run.
        resident_bytes: of the whole process at the same moments; empty where the system does not tell.
        seconds: of the whole run.
    """

    steps: int = 0
    rounds: int = 0
    differences: list[str] = field(default_factory=list)
    accepted: Counter[int] = field(default_factory=Counter)
    live_bytes: list[int] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def memory_growth_bytes(self) -> int:
        """Largest growth of live tensors after the first tenth."""
        return max(self.live_bytes, default=0) - self.live_bytes[0] if self.live_bytes else 0

    @property
    def failures(self) -> list[str]:
        """What broke the promise: differing texts, and tensors that pile up."""
        grown = self.memory_growth_bytes
        leaked = [f"live tensors grew by {grown} bytes"] if grown > _ALLOWED_GROWTH_BYTES else []
        return self.differences + leaked


class ScriptedHeads:
    """Heads that know the text: at every position they put the true tokens on one drawn path of the tree."""

    cost = DraftCost.PER_STEP
    path_local = True
    reads_prefix = False
    token_map = None

    def __init__(self, texts: Sequence[Sequence[int]], tree: Tree, seed: int) -> None:
        self.identity = HeadsIdentity(name="scripted", kind="medusa", fingerprint=str(seed), num_heads=DEPTH)
        self._texts, self._seed = [list(text) for text in texts], seed
        self._paths: list[RankPath] = [(), *tree.paths]

    def new_context(self, capacity: int, *, batch: int = 1) -> _Position:
        """See `DraftHeads`; what the heads read is the number of committed tokens."""
        del capacity, batch
        return _Position()

    def features(self, states: Tensor, following: Tensor) -> Tensor:
        """See `DraftHeads`."""
        del following
        return torch.arange(1, len(states) + 1, dtype=states.dtype)[:, None]

    def propose(self, features: Tensor, roots: Tensor, plan: TreePlan, noise: Tensor | None = None) -> Tensor:
        """See `DraftHeads`; a row is known by its root's place in one of the texts."""
        del noise
        rows = [self._lists(int(position), int(root)) for position, root in zip(features[:, 0], roots, strict=True)]
        lists = torch.tensor(rows)
        return lists[:, plan.depth_index, plan.rank_index]

    def path_scores(self, features: Tensor, tokens: Tensor) -> Tensor:
        """See `DraftHeads`; scripted heads score every token alike."""
        del features
        return torch.zeros(*tokens.shape, VOCAB)

    def _lists(self, position: int, root: int) -> list[list[int]]:
        """`[depth, rank]` candidates behind the root at `position`."""
        draw = random.Random(f"{self._seed} {position} {root}")
        texts = [text for text in self._texts if len(text) > position and text[position] == root]
        text, path = draw.choice(texts) if texts else [], draw.choice(self._paths)
        lists = []
        for depth in range(1, DEPTH + 1):
            true = text[position + depth] if position + depth < len(text) else None
            candidates = draw.sample([token for token in range(VOCAB) if token != true], RANKS)
            if true is not None and depth <= len(path):
                candidates[path[depth - 1]] = true
            lists.append(candidates)
        return lists


class _Position:
    """Counts committed tokens."""

    def __init__(self) -> None:
        self._count = 0

    def extend(self, states: Tensor, following: Tensor) -> Tensor:
        """See `DraftContext`."""
        del following
        self._count += states.shape[1]
        return torch.full((states.shape[0], 1), float(self._count), dtype=torch.float64)

    def rewind(self, length: int) -> None:
        """See `DraftContext`."""
        self._count = length

    def buffers(self) -> list[Tensor]:
        """See `DraftContext`."""
        return []


def soak(steps: int, *, seed: int = 0) -> SoakResult:
    """Decode until `steps` steps are taken, comparing every answer with plain decoding."""
    draw, target, result = random.Random(seed), tiny_target(), SoakResult()
    plain = TreeDecoder(target, None, Tree(()), capacity=_PROMPT_TOKENS + _CAP)
    clock, next_look = time.perf_counter(), 0
    while result.steps < steps:
        _one_round(draw, target, plain, result)
        if result.steps >= next_look:
            result.live_bytes.append(_live_bytes())
            result.resident_bytes += _resident_bytes()
            next_look += max(steps // 10, 1)
    result.seconds = time.perf_counter() - clock
    return result


def tiny_target() -> Target:
    """A random Llama of two layers in float64, weights large enough that its text does not settle."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_PROMPT_TOKENS + _CAP,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.25)
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
    return make_target(model, None, name="tiny", dtype="float64")


def _one_round(draw: random.Random, target: Target, plain: TreeDecoder, result: SoakResult) -> None:
    tree, rule = _tree(draw), _rule(draw)
    prompts = [
        [draw.randrange(VOCAB) for _ in range(draw.randint(1, _PROMPT_TOKENS))] for _ in range(draw.randint(1, _ROWS))
    ]
    requests = [draw.randrange(1 << 62) for _ in prompts]
    settings: dict[str, Any] = {
        "max_new_tokens": draw.randint(1, _CAP + 5),  # at times beyond the last position
        "eos_token_ids": draw.sample(range(VOCAB), draw.choice((0, 0, 1, 3))),
        "rule": rule,
    }
    expected = [plain.generate(p, request=r, **settings) for p, r in zip(prompts, requests, strict=True)]
    texts = [[*p, *answer.tokens] for p, answer in zip(prompts, expected, strict=True)]
    decoder = TreeDecoder(
        target, ScriptedHeads(texts, tree, draw.randrange(1 << 30)), tree, capacity=64, run_probe=False
    )
    alone = [decoder.generate(p, request=r, **settings) for p, r in zip(prompts, requests, strict=True)]
    together = decode_batch(decoder, prompts, requests=requests, **settings)
    for kind, answers in (("alone", alone), ("in a batch", together)):
        _compare(f"round {result.rounds}, {kind}, {rule}, tree {tree.paths}", expected, answers, result)
    result.rounds += 1


def _compare(where: str, expected: Sequence[Decoded], found: Sequence[Decoded], result: SoakResult) -> None:
    for row, (one, other) in enumerate(zip(expected, found, strict=True)):
        if (one.tokens, one.end) != (other.tokens, other.end):
            result.differences.append(f"{where}, row {row}: {other.tokens} ({other.end}), not {one.tokens} ({one.end})")
        result.steps += len(other.accepted)
        result.accepted.update(other.accepted)


def _tree(draw: random.Random) -> Tree:
    paths: set[RankPath] = set()
    for _ in range(draw.randint(0, 10)):
        path = tuple(draw.randrange(RANKS) for _ in range(draw.randint(1, DEPTH)))
        paths |= {path[:length] for length in range(1, len(path) + 1)}
    return Tree(tuple(paths))


def _rule(draw: random.Random) -> RuleIdentity:
    if draw.random() < 0.4:
        return GREEDY
    return sampling_rule(
        temperature=draw.choice((0.5, 0.9, 1.4)),
        top_k=draw.choice((None, 3, 20)),
        top_p=draw.choice((None, 0.7, 0.95)),
        min_p=draw.choice((None, 0.05)),
        seed=draw.randrange(1 << 62),
    )


def _live_bytes() -> int:
    gc.collect()
    # by their exact type: stand-ins for tensors, as tracing makes them, hold no memory
    found = [thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in found if tensor.layout == torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _resident_bytes() -> list[int]:
    """The resident set, as one element; none where the system has no /proc."""
    return [int(_STATM.read_text(encoding="ascii").split()[1]) * resource.getpagesize()] if _STATM.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "soak.json")
    options = parser.parse_args()
    result = soak(options.steps, seed=options.seed)
    summary = {
        "seed": options.seed,
        "steps": result.steps,
        "rounds": result.rounds,
        "failures": result.failures,
        "steps_by_accepted_tokens": dict(sorted(result.accepted.items())),
        "live_bytes": result.live_bytes,
        "resident_bytes": result.resident_bytes,
        "seconds": round(result.seconds, 1),
        **provenance(),
    }
    options.out.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=2))
    return 1 if result.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
