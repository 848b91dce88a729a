"""Is the text the same, and if not, why: the first divergence and the gap of the two best scores there.

In fp32 the same sum in another order moves scores by up to 6e-5, so about one token in a million flips between runs
of different width; in bf16 and fp16 they move by a few units in the last place. Only a gap below that bound
(`near_tie_bound`) at the first divergence is such a flip, or a token on the edge of a filter; anything else is a
failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from topo_search.answers import Answer
from topo_search.calibrate import answer_features, true_paths
from topo_search.decode.sampling import drawn_scores, draws_at_edges
from topo_search.heads.base import DraftHeads, column_of
from topo_search.identity import GREEDY, RuleIdentity
from topo_search.target.adapter import Target

NEAR_TIE = 2e-4
# Between passes of different width bf16 moved the demo target's logits by 3.1 ulps of the largest, fp16 by 2.4, and
# int4 weights by 4.3: the most that any of 49,152 logits moved, where two have to.
_NEAR_TIE_ULPS = 4

Rerun = Callable[[int, Any], object]
"""Decodes the same answer again: at most so many tokens, with a logits processor that sees every token's logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where two texts of one prompt part.

    Attributes:
        prompt: id of the prompt.
        position: index of the first differing answer token.
        expected, found: the tokens there; null where one text has ended.
        gap: difference of the target's two best scores there, in logits: with noise where tokens are drawn. The larger
            of `gaps` where both runs were seen, else that of one pass over the text.
        near_tie: whether the gap is below `bound`, which explains two tokens, never a text that goes on or ends.
        bound: what rounding can do at this precision and size of logits.
        gaps: that difference in the run of the one text and in the run of the other, or null.
        filter_edge: whether a filter's border lies so near a token that rounding decides between the two tokens.
    """

    prompt: str
    position: int
    expected: int | None
    found: int | None
    gap: float
    near_tie: bool
    filter_edge: bool = False
    bound: float = NEAR_TIE
    gaps: tuple[float, float] | None = None

    @property
    def explained(self) -> bool:
        """Whether rounding explains it."""
        return self.near_tie or self.filter_edge


def near_tie_bound(dtype: torch.dtype, score: float) -> float:
    """How near a score must be to the best one, `score`, to take its place by rounding: 4 ulps in bf16 and fp16."""
    if dtype in (torch.bfloat16, torch.float16):
        return _NEAR_TIE_ULPS * torch.finfo(dtype).eps * max(abs(score), 1.0)
    return NEAR_TIE


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Index of the first differing element, the shorter length where one is a prefix of the other, None if equal."""
    for index, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return index
    return None if len(expected) == len(found) else min(len(expected), len(found))


def divergence(
    target: Target,
    prompt_id: str,
    prompt: Sequence[int],
    expected: Sequence[int],
    found: Sequence[int],
    *,
    rule: RuleIdentity = GREEDY,
    request: int = 0,
    reruns: tuple[Rerun, Rerun] | None = None,
) -> Divergence | None:
    """The first divergence of two answers to one prompt under a rule, or None.

    `reruns` decode the one text and the other again, so that the gap is that of both runs and not of a third pass.
    """
    position = first_difference(expected, found)
    if position is None:
        return None
    ids = torch.tensor([[*prompt, *expected[:position]]], device=target.device)
    place, sequence = (torch.tensor([number], device=target.device) for number in (ids.shape[1], request))
    two_tokens = position < min(len(expected), len(found))

    def gap_of(logits: Float[Tensor, "1 vocab"]) -> float:
        best = torch.topk(drawn_scores(logits, rule, positions=place, requests=sequence)[0], 2).values
        return float(best[0] - best[1]) * (rule.temperature or 1.0)

    with torch.inference_mode():
        scores = target.logits(target.hidden_states(ids)[0, -1:])
        edges = draws_at_edges(scores, rule, position=place, request=sequence)
        seen = None if reruns is None or not two_tokens else [_seen(again, position, ids[0]) for again in reruns]
        gaps = None if seen is None else (gap_of(seen[0]), gap_of(seen[1]))
        gap = gap_of(scores) if gaps is None else max(gaps)
    bound = near_tie_bound(target.dtype, float(scores.max()))
    return Divergence(
        prompt=prompt_id,
        position=position,
        expected=expected[position] if position < len(expected) else None,
        found=found[position] if position < len(found) else None,
        gap=gap,
        near_tie=gap < bound and two_tokens,
        filter_edge=two_tokens and {expected[position], found[position]} <= edges,
        bound=bound,
        gaps=gaps,
    )


def _seen(again: Rerun, position: int, text: Tensor) -> Float[Tensor, "1 vocab"]:
    """The logits that a run chose the answer's token `position` from, `text` being all before it."""
    logits: list[Tensor] = []

    def keep(ids: Tensor, scores: Tensor) -> Tensor:
        if torch.equal(ids[0], text):
            logits.append(scores.clone())
        return scores

    again(position + 1, keep)
    return logits[-1]


def teacher_forced(target: Target, prompt: Sequence[int], tokens: Sequence[int], *, index: int, end: str) -> Answer:
    """A known answer with the states that choose its tokens, from one forward pass over prompt and answer."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=target.device)
    with torch.inference_mode():
        states = target.hidden_states(ids)[0]
    start = len(prompt) - 1
    return Answer(
        prompt_index=index,
        tokens=tuple(tokens),
        end=end,
        states=states[start:],
        prompt_states=states[:start],
        prompt=tuple(prompt),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMismatch:
    """A step whose accepted length differs between replay and decoder.

    Attributes:
        prompt: id of the prompt.
        row: the step's start.
        replayed, decoded: accepted tokens by each.
        gap: distance of the true token's draft score to its nearest neighbour in rank, at the depth in question.
        near_tie: whether the gap is below what rounding can do (`near_tie_bound`).
    """

    prompt: str
    row: int
    replayed: int
    decoded: int
    gap: float
    near_tie: bool


def step_mismatch(
    heads: DraftHeads, prompt_id: str, answer: Answer, replayed: Sequence[int], decoded: Sequence[int]
) -> StepMismatch | None:
    """The first step of one prompt at which replay and decoder disagree, or None."""
    at = first_difference(replayed, decoded)
    if at is None:
        return None
    row = sum(length + 1 for length in replayed[:at])
    pair = tuple(lengths[at] if at < len(lengths) else -1 for lengths in (replayed, decoded))
    depth = min(max(min(pair), 0), heads.identity.num_heads - 1)
    gap, bound = _rank_gap(heads, answer, min(row, len(answer.tokens) - 2), depth)
    return StepMismatch(prompt=prompt_id, row=row, replayed=pair[0], decoded=pair[1], gap=gap, near_tie=gap < bound)


def _rank_gap(heads: DraftHeads, answer: Answer, row: int, depth: int) -> tuple[float, float]:
    """How near the true token's score at (row, depth) is to those ranked just above and below it, and the bound."""
    path = true_paths(torch.tensor(answer.tokens), heads.identity.num_heads)[row]
    with torch.inference_mode():
        features = answer_features(heads, answer)[row : row + 1]
        scores = heads.path_scores(features, path[None, :-1])[0, depth]
    column = column_of(heads, int(path[depth + 1]))
    if column is None:
        return float("inf"), NEAR_TIE
    others = torch.cat([scores[:column], scores[column + 1 :]])
    bound = near_tie_bound(answer.states.dtype, float(scores[column]))
    return float((others - scores[column]).abs().min()), bound
