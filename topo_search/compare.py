"""Is the text the same, and if not, why: the first divergence and the gap of the two best scores there.

In fp32 the same sum in another order moves scores by up to 6e-5, so about one token in a million flips between runs
of different width. Only a gap below `NEAR_TIE` at the first divergence is such a flip, or a token on the edge of a
filter; anything else is a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from topo_search.answers import Answer
from topo_search.calibrate import answer_features, true_paths
from topo_search.decode.sampling import drawn_scores, draws_at_edges
from topo_search.heads.base import DraftHeads, column_of
from topo_search.identity import GREEDY, RuleIdentity
from topo_search.target.adapter import Target

NEAR_TIE = 2e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where two texts of one prompt part.

    Attributes:
        prompt: id of the prompt.
        position: index of the first differing answer token.
        expected, found: the tokens there; null where one text has ended.
        gap: difference of the target's two best scores there, in logits: with noise where tokens are drawn.
        near_tie: whether the gap is below `NEAR_TIE`, which explains two tokens, never a text that goes on or ends.
        filter_edge: whether a filter's border lies so near a token that rounding decides between the two tokens.
    """

    prompt: str
    position: int
    expected: int | None
    found: int | None
    gap: float
    near_tie: bool
    filter_edge: bool = False

    @property
    def explained(self) -> bool:
        """Whether rounding explains it."""
        return self.near_tie or self.filter_edge


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
) -> Divergence | None:
    """The first divergence of two answers to one prompt under a rule, or None."""
    position = first_difference(expected, found)
    if position is None:
        return None
    ids = torch.tensor([[*prompt, *expected[:position]]], device=target.device)
    place, sequence = (torch.tensor([number], device=target.device) for number in (ids.shape[1], request))
    with torch.inference_mode():
        scores = target.logits(target.hidden_states(ids)[0, -1:])
        best = torch.topk(drawn_scores(scores, rule, positions=place, requests=sequence)[0], 2).values
        edges = draws_at_edges(scores, rule, position=place, request=sequence)
    gap = float(best[0] - best[1]) * (rule.temperature or 1.0)
    two_tokens = position < min(len(expected), len(found))
    return Divergence(
        prompt=prompt_id,
        position=position,
        expected=expected[position] if position < len(expected) else None,
        found=found[position] if position < len(found) else None,
        gap=gap,
        near_tie=gap < NEAR_TIE and two_tokens,
        filter_edge=two_tokens and {expected[position], found[position]} <= edges,
    )


def teacher_forced(target: Target, prompt: Sequence[int], tokens: Sequence[int], *, index: int, end: str) -> Answer:
    """A known answer with the states that choose its tokens, from one forward pass over prompt and answer."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=target.device)
    with torch.inference_mode():
        states = target.hidden_states(ids)[0]
    start = len(prompt) - 1
    return Answer(
        prompt_index=index, tokens=tuple(tokens), end=end, states=states[start:], prompt_states=states[:start]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMismatch:
    """A step whose accepted length differs between replay and decoder.

    Attributes:
        prompt: id of the prompt.
        row: the step's start.
        replayed, decoded: accepted tokens by each.
        gap: distance of the true token's draft score to its nearest neighbour in rank, at the depth in question.
        near_tie: whether the gap is below `NEAR_TIE`.
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
    gap = _rank_gap(heads, answer, min(row, len(answer.tokens) - 2), depth)
    return StepMismatch(prompt=prompt_id, row=row, replayed=pair[0], decoded=pair[1], gap=gap, near_tie=gap < NEAR_TIE)


def _rank_gap(heads: DraftHeads, answer: Answer, row: int, depth: int) -> float:
    """How near the true token's score at (row, depth) is to the scores ranked just above and below it."""
    path = true_paths(torch.tensor(answer.tokens), heads.identity.num_heads)[row]
    with torch.inference_mode():
        features = answer_features(heads, answer)[row : row + 1]
        scores = heads.path_scores(features, path[None, :-1])[0, depth]
    column = column_of(heads, int(path[depth + 1]))
    if column is None:
        return float("inf")
    others = torch.cat([scores[:column], scores[column + 1 :]])
    return float((others - scores[column]).abs().min())
