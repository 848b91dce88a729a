"""Plain decoding by transformers' own `generate`: the baseline whose text every tree must reproduce.

One settings object is resolved here for both sides. `generate` would otherwise take sampling, penalties and limits
from the model's generation config, so it is given a neutral one. To sample, it is given transformers' own warpers and,
behind them, the noise that our draws use: the largest of their sum is the draw.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from topo_search.decode.decoder import Decoded
from topo_search.decode.noise import gumbel_rows
from topo_search.identity import GREEDY, RuleIdentity
from topo_search.target.adapter import Target


def greedy_settings(target: Target, max_new_tokens: int) -> dict[str, Any]:
    """What both sides decode with: everything else in the model's generation config is neutralised."""
    eos = list(target.eos_token_ids)
    return {
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "eos_token_id": eos or None,
        "pad_token_id": eos[0] if eos else 0,
    }


def neutralised(target: Target) -> dict[str, Any]:
    """Fields of the model's generation config that would change greedy text, with the values that are ignored."""
    config: Any = target.model.generation_config
    if config is None:
        return {}
    ignored = (
        "eos_token_id",
        "bos_token_id",
        "pad_token_id",
        "transformers_version",
        "use_cache",
        "_from_model_config",
    )
    return {
        name: value
        for name, value in config.to_diff_dict().items()
        if name not in ignored and not name.startswith("output_") and value not in (None, False)
    }


def generate_plain(
    target: Target,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    rule: RuleIdentity = GREEDY,
    request: int = 0,
    processors: Sequence[Any] = (),
    prompt_lookup: int | None = None,
) -> Decoded:
    """transformers' text for one prompt under a rule, with the time of the first step apart.

    `prompt_lookup` drafts that many tokens from the text so far (transformers' `prompt_lookup_num_tokens`).
    """
    clock = _Steps()
    ids = torch.tensor([list(prompt)], device=target.device)
    settings = greedy_settings(target, max_new_tokens)
    if prompt_lookup is not None:
        settings["prompt_lookup_num_tokens"] = prompt_lookup
    with _only(target, settings):
        start = time.perf_counter()
        output = target.model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            stopping_criteria=[clock],
            logits_processor=[*processors, *_drawing(rule, request)],
        )
    tokens = tuple(output[0, len(prompt) :].tolist())
    end = time.perf_counter()
    return Decoded(
        tokens=tokens,
        end="eos" if tokens[-1] in target.eos_token_ids else "cap",
        accepted=tuple(after - before - 1 for before, after in pairwise(clock.lengths)),
        prefill_ms=1000 * (clock.first - start),
        decode_ms=1000 * (end - clock.first),
    )


def _drawing(rule: RuleIdentity, request: int) -> list[Any]:
    """transformers' warpers of the rule's settings, in its order, and the noise behind them."""
    from transformers.generation import logits_process

    if not rule.samples:
        return []
    assert rule.seed is not None
    found: list[Any] = [logits_process.TemperatureLogitsWarper(rule.temperature)]
    if rule.top_k is not None:
        found.append(logits_process.TopKLogitsWarper(rule.top_k))
    if rule.top_p is not None:
        found.append(logits_process.TopPLogitsWarper(rule.top_p))
    if rule.min_p is not None:
        found.append(logits_process.MinPLogitsWarper(rule.min_p))
    return [*found, _Noise(seed=rule.seed, request=request)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Noise:
    """A logits processor that adds the noise of the next position."""

    seed: int
    request: int

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        device = scores.device
        request, position = (torch.tensor([n], device=device) for n in (self.request, input_ids.shape[1]))
        return scores.double() + gumbel_rows(self.seed, request, position, scores.shape[-1])


@contextmanager
def _only(target: Target, settings: dict[str, Any]) -> Iterator[None]:
    """Put `settings` in the place of the model's own generation config, which `generate` reads for what is unset."""
    from transformers import GenerationConfig

    model: Any = target.model
    own = model.generation_config
    model.generation_config = GenerationConfig(**settings)
    try:
        yield
    finally:
        model.generation_config = own


@dataclass(slots=True)
class _Steps:
    """A stopping criterion that stops nothing; it notes when the first step was over and the text's length at each."""

    first: float = 0.0
    lengths: list[int] = field(default_factory=list)

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        self.first = self.first or time.perf_counter()
        self.lengths.append(input_ids.shape[1])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
