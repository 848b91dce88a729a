"""Which token follows: one function for plain decoding, tree decoding and calibration.

A token is drawn as argmax(score / T + noise) with noise that belongs to the seed, the sequence and the token's
position (`decode.noise`). The draw follows the target's distribution exactly, and it is the same draw wherever the
token is verified: at a node of any tree, in any batch slot, or in plain decoding. So text depends on the seed only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from topo_search.decode.ending import Ending
from topo_search.decode.noise import gumbel_at, gumbel_rows
from topo_search.errors import CheckError
from topo_search.identity import GREEDY, RuleIdentity
from topo_search.ranking import best_token

if TYPE_CHECKING:
    from topo_search.decode.typical import Acceptable

_SPARSE = 4  # noise comes in blocks of four ids, so single ids pay below a quarter of the vocabulary
_EDGE = 1e-5  # of probabilities and scores: what fp32 sums in another order move


def choose(
    scores: Float[Tensor, "rows vocab"],
    rule: RuleIdentity,
    *,
    positions: Int[Tensor, " rows"],
    requests: Int[Tensor, " rows"],
) -> Int[Tensor, " rows"]:
    """The token that the rule takes at each row, ties by lower id.

    Args:
        scores: output-layer scores, in fp32 or better.
        rule: greedy, or sampling with its filters and seed.
        positions: index of the token drawn in its unpadded sequence: prompt tokens + answer index.
        requests: number of each row's sequence, whatever its batch slot.

    Raises:
        CheckError: the best score of a row is no finite number; the message names the position.
    """
    final = drawn_scores(scores, rule, positions=positions, requests=requests)
    tokens = best_token(final)
    require_finite(final.gather(-1, tokens[:, None])[:, 0], positions)
    return tokens


def drawn_scores(
    scores: Float[Tensor, "rows vocab"],
    rule: RuleIdentity,
    *,
    positions: Int[Tensor, " rows"],
    requests: Int[Tensor, " rows"],
) -> Float[Tensor, "rows vocab"]:
    """What the rule's choice is the largest of: the scores, or in float64 the filtered ones plus their noise."""
    if not rule.samples:
        return scores
    kept = filtered(scores, rule)
    if rule.bonus == "truncated":
        kept = _above_threshold(kept, rule)
    assert rule.seed is not None
    alive = torch.isfinite(kept)
    if int(alive.sum()) * _SPARSE > kept.numel():
        return kept.double() + gumbel_rows(rule.seed, requests, positions, kept.shape[-1])
    rows, ids = torch.nonzero(alive, as_tuple=True)
    noisy = kept.double()
    noisy[rows, ids] += gumbel_at(rule.seed, requests[rows], positions[rows], ids)
    return noisy


def filtered(scores: Float[Tensor, "rows vocab"], rule: RuleIdentity) -> Float[Tensor, "rows vocab"]:
    """Scores over the temperature, -infinity where a filter takes a token out.

    As transformers' warpers define them, in their order: temperature, top-k (ties with the k-th stay), top-p (ids of
    the smallest probabilities go while their sum is at most 1 - top_p), min-p (below that share of the largest).
    """
    scores = scores / rule.temperature
    if rule.top_k is not None:
        kth = torch.topk(scores, min(rule.top_k, scores.shape[-1])).values[..., -1:]
        scores = scores.masked_fill(scores < kth, float("-inf"))
    if rule.top_p is not None:
        scores = scores.masked_fill(_beyond_top_p(scores, rule.top_p), float("-inf"))
    if rule.min_p is not None:
        probs = torch.softmax(scores, dim=-1)
        scores = scores.masked_fill(probs < rule.min_p * probs.amax(dim=-1, keepdim=True), float("-inf"))
    return scores


def typical_threshold(law: Float[Tensor, "rows vocab"], rule: RuleIdentity) -> Float[Tensor, " rows"]:
    """What a drafted token's target probability must exceed: min(epsilon, delta * exp(-entropy of the law))."""
    assert rule.epsilon is not None and rule.delta is not None
    entropy = torch.special.entr(law).sum(dim=-1)
    return (rule.delta * torch.exp(-entropy)).clamp(max=rule.epsilon)


def require_finite(scores: Float[Tensor, " rows"], positions: Int[Tensor, " rows"]) -> None:
    """Stop where a chosen score is NaN or infinite: every comparison with NaN is false, so it would be chosen.

    Raises:
        CheckError: names the first such position.
    """
    broken = ~torch.isfinite(scores)
    if bool(broken.any()):
        row = int(torch.nonzero(broken)[0, 0])
        raise CheckError(
            f"The target's logits for position {int(positions[row])} are not finite ({float(scores[row])}): its "
            "weights or activations overflowed. Try --dtype float32 or another checkpoint."
        )


def draws_at_edges(
    scores: Float[Tensor, "1 vocab"], rule: RuleIdentity, *, position: Int[Tensor, " one"], request: Int[Tensor, " one"]
) -> set[int]:
    """Every token that is drawn when each filter's border moves by what rounding can move it: one, save at an edge."""
    if not rule.samples:
        return {int(best_token(scores)[0])}
    cases = [(scores, rule), *((scores, other) for other in _neighbours(rule)), *_swapped(scores, rule)]
    return {int(choose(row, one, positions=position, requests=request)[0]) for row, one in cases}


def candidate_noise(
    rule: RuleIdentity, requests: Int[Tensor, " rows"], roots: Int[Tensor, " rows"], *, depth: int, vocab: int
) -> Float[Tensor, "rows depth vocab"] | None:
    """What is added to the heads' scores before candidates are ranked, or None where they are ranked as they are.

    A share of the very noise by which the target will draw at the candidate's position, in the heads' logits (arXiv
    2408.07978, 2506.05632): the draw stays what it was, so the text does, and is found among fewer candidates. It
    depends on sequence and position only, so lists stay path-local and traces replay.

    Args:
        rule: its `noise_share` is the weight.
        requests: number of each row's sequence.
        roots: position of each row's root in its sequence; candidates of depth k stand k behind it.
        depth: depths wanted.
        vocab: ids wanted.
    """
    if not rule.samples or not rule.noise_share:
        return None
    assert rule.seed is not None
    positions = roots[:, None] + torch.arange(1, depth + 1, device=roots.device)
    places = torch.stack([requests.repeat_interleave(depth), positions.flatten()], dim=1)
    distinct, at = torch.unique(places, dim=0, return_inverse=True)  # consecutive rows share all places but one
    noise = gumbel_rows(rule.seed, distinct[:, 0], distinct[:, 1], vocab)[at]
    return rule.noise_share * rule.temperature * noise.view(len(roots), depth, vocab)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """How the tokens of one sequence are chosen.

    Attributes:
        rule: greedy or sampling.
        request: the sequence's number.
        processors: logits processors, each called with `[1, tokens]` ids and `[1, vocab]` scores.
        ending: what ends the answer, or None; nothing is chosen after its end.
        observe: called with what every step of typical acceptance finds acceptable, or None.
    """

    rule: RuleIdentity = GREEDY
    request: int = 0
    processors: tuple[Any, ...] = ()
    ending: Ending | None = None
    observe: Callable[[Acceptable], None] | None = None

    @property
    def needs_text(self) -> bool:
        """Whether a choice depends on more than a node's scores."""
        return self.rule.samples or bool(self.processors)

    def is_over(self, text: Sequence[int]) -> bool:
        """Whether the answer ends with the last token of `text`."""
        return self.ending is not None and self.ending.reason(text) is not None

    def next_token(self, scores: Float[Tensor, " vocab"], text: Sequence[int]) -> int:
        """The token after `text`, the whole unpadded sequence so far."""
        row = self.processed(scores, text)
        place = torch.tensor([len(text)], device=scores.device)
        request = torch.tensor([self.request], device=scores.device)
        return int(choose(row, self.rule, positions=place, requests=request))

    def processed(self, scores: Float[Tensor, " vocab"], text: Sequence[int]) -> Float[Tensor, "1 vocab"]:
        """The scores after `text` as the logits processors leave them."""
        row = scores[None]
        if self.processors:
            ids = torch.tensor([list(text)], device=scores.device)
            for processor in self.processors:
                row = processor(ids, row)
        return row


def _above_threshold(scores: Float[Tensor, "rows vocab"], rule: RuleIdentity) -> Float[Tensor, "rows vocab"]:
    """The scores without the tokens below the threshold of typical acceptance; the best one always stays."""
    law = torch.softmax(scores.double(), dim=-1)
    threshold = torch.minimum(typical_threshold(law, rule), law.amax(dim=-1))
    return scores.masked_fill(law < threshold[:, None], float("-inf"))


def _neighbours(rule: RuleIdentity) -> list[RuleIdentity]:
    """The same rule with the borders of top-p and min-p moved by rounding."""
    found = []
    for shift in (-_EDGE, _EDGE):
        if rule.top_p is not None:
            found.append(replace(rule, top_p=min(max(rule.top_p + shift, _EDGE), 1.0)))
        if rule.min_p is not None:
            found.append(replace(rule, min_p=min(rule.min_p * (1 + shift), 1.0)))
    return found


def _swapped(scores: Float[Tensor, "1 vocab"], rule: RuleIdentity) -> list[tuple[Tensor, RuleIdentity]]:
    """The case in which the k-th and the next score, if rounding can swap them, are swapped."""
    if rule.top_k is None or rule.top_k >= scores.shape[-1]:
        return []
    best, ids = torch.topk(scores[0], rule.top_k + 1)
    if (best[-2] - best[-1]) / rule.temperature >= _EDGE:
        return []
    swapped = scores.clone()
    swapped[0, ids[-2:]] = best[-2:].flip(0)
    return [(swapped, rule)]


def _beyond_top_p(scores: Float[Tensor, "rows vocab"], top_p: float) -> Bool[Tensor, "rows vocab"]:
    ascending, ids = torch.sort(scores, dim=-1, stable=True)
    removed = torch.softmax(ascending, dim=-1).cumsum(dim=-1) <= 1 - top_p
    removed[..., -1:] = False
    return torch.zeros_like(removed).scatter(-1, ids, removed)
