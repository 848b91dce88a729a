"""bf16 and fp16: a flip by rounding is told from a real difference, by the logits of both runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models import PROMPTS, VOCAB, as_target, llama_config, tiny_heads, tiny_model

from topo_search.bench import GENERATE, PLAIN, Contender, Course, race
from topo_search.calibrate import EncodedPrompt
from topo_search.compare import divergence, near_tie_bound
from topo_search.decode.decoder import TreeDecoder
from topo_search.heads.medusa import MedusaHeads
from topo_search.reference import generate_plain
from topo_search.target import Target
from topo_search.tree import Tree

LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
PROMPT, AT, CAP = PROMPTS[1], 3, 10


def low_target(dtype: str) -> Target:
    return as_target(tiny_model(llama_config(), dtype=LOW[dtype]), dtype=dtype)


def plain(target: Target) -> tuple[int, ...]:
    return generate_plain(target, PROMPT, max_new_tokens=CAP).tokens


def race_of(target: Target, heads: Any, tree: Tree) -> Any:
    prompts = [EncodedPrompt(id="p", workload="code", tokens=PROMPT)]
    course = Course(target=target, reference=target, heads=heads, prompts=prompts, max_new_tokens=CAP, repeats=1)
    contenders = [
        Contender(name=GENERATE, tree=None),
        Contender(name=PLAIN, tree=Tree(())),
        Contender(name="t", tree=tree),
    ]
    return race(course, contenders)


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 20 * 4 / 128), ("float16", 20 * 4 / 1024)])
def test_the_bound_is_four_units_in_the_last_place_of_the_best_logit(dtype: str, bound: float) -> None:
    assert near_tie_bound(LOW[dtype], -20.0) == near_tie_bound(LOW[dtype], 20.0) == bound
    assert near_tie_bound(LOW[dtype], 0.1) == bound / 20
    assert near_tie_bound(torch.float32, 20.0) == near_tie_bound(torch.float64, 1.0) == 2e-4


def nudged(target: Target, rival: int, ulps: float) -> None:
    """Let token `rival` score as the chosen one at `AT`, less so many ulps of it."""
    chosen, weight = plain(target)[AT], target.model.lm_head.weight  # type: ignore[union-attr,index]
    ids = torch.tensor([[*PROMPT, *plain(target)[:AT]]])
    with torch.inference_mode():
        best = float(target.scores(target.hidden_states(ids)[0, -1]).max())
    share = 1 - ulps * torch.finfo(target.dtype).eps * max(abs(best), 1.0) / abs(best)
    with torch.no_grad():
        weight[rival] = weight[chosen] * share  # type: ignore[index]


@pytest.mark.parametrize("dtype", LOW)
def test_a_forced_near_tie_is_reported_with_both_gaps_and_is_no_failure(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rival's logit lies two ulps below the best one: a run that takes it differs by rounding."""
    target = low_target(dtype)
    rival = next(token for token in range(VOCAB) if token not in plain(target))
    nudged(target, rival, 2.0)
    text = plain(target)
    assert text[AT] != rival
    flipping(monkeypatch, rival)
    result = race_of(target, tiny_heads(low_target(dtype)), Tree.dense([2, 2]))
    (point,) = result.standings[2].divergences
    assert (point.position, point.expected, point.found) == (AT, text[AT], rival)
    assert point.near_tie
    assert point.gaps is not None
    assert 0 < max(point.gaps) == point.gap < point.bound
    assert result.failures == []


@pytest.mark.parametrize("dtype", LOW)
def test_a_forced_real_divergence_is_a_failure_that_names_both_tokens(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rival's logit lies six ulps below: past the bound, so the decoder is at fault."""
    target = low_target(dtype)
    rival = next(token for token in range(VOCAB) if token not in plain(target))
    nudged(target, rival, 6.0)
    text = plain(target)
    flipping(monkeypatch, rival)
    result = race_of(target, tiny_heads(low_target(dtype)), Tree.dense([2, 2]))
    (point,) = result.standings[2].divergences
    assert not point.near_tie
    assert point.gap > point.bound
    (line,) = [line for line in result.failures if line.startswith("t: text of p")]
    assert f"differs at token {AT}, {rival} and not {text[AT]}" in line
    assert "rounding explains" in line


def flipping(monkeypatch: pytest.MonkeyPatch, rival: int) -> None:
    """Let tree decoding, not plain decoding, write the rival at `AT`; its logits stay what they are."""
    own = TreeDecoder.generate

    def flipped(self: TreeDecoder, *args: Any, **settings: Any) -> Any:
        answer = own(self, *args, **settings)
        if not self.tree.paths:
            return answer
        return replace(answer, tokens=(*answer.tokens[:AT], rival, *answer.tokens[AT + 1 :]))

    monkeypatch.setattr(TreeDecoder, "generate", flipped)


@pytest.mark.parametrize("dtype", LOW)
def test_reruns_see_the_logits_of_their_own_run(dtype: str) -> None:
    target = low_target(dtype)
    heads: MedusaHeads = tiny_heads(target)
    text = plain(target)
    other = (*text[:AT], (text[AT] + 1) % VOCAB)
    decoder = TreeDecoder(target, heads, Tree.dense([3, 2]))
    point = divergence(
        target,
        "p",
        PROMPT,
        text,
        other,
        reruns=(
            lambda cap, keep: generate_plain(target, PROMPT, max_new_tokens=cap, processors=[keep]),
            lambda cap, keep: decoder.generate(PROMPT, max_new_tokens=cap, processors=[keep]),
        ),
    )
    assert point is not None
    assert point.gaps is not None
    assert point.gap == max(point.gaps)
    assert point.gaps[0] == pytest.approx(point.gaps[1], abs=point.bound)
