"""Typical acceptance (Medusa, arXiv 2401.10774, section 2.3): a rule that changes the text.

A drafted token is taken where its target probability exceeds min(epsilon, delta * exp(-entropy)) of the target's law at
its parent. Several siblings can be; the deepest acceptable node wins, of equally deep ones that of the largest product
of target probabilities, then the first in path order. So the text depends on the tree, and nothing here is exact:
between the drafts' tokens and the target's law stands only the threshold. Medusa's code adds 1e-5 inside the entropy's
logarithm; the paper does not, nor do we.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from topo_search.decode.plan import TreePlan
from topo_search.decode.sampling import Sampler, filtered, require_finite, typical_threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptable:
    """One step's acceptable nodes.

    Attributes:
        slots: of every acceptable node, the root first, ascending.
        path: of the chosen one's, from the root down.
    """

    slots: tuple[int, ...]
    path: tuple[int, ...]


def typical_path(
    scores: Float[Tensor, "width vocab"],
    tokens: Int[Tensor, " width"],
    plan: TreePlan,
    sampler: Sampler,
    text: list[int],
) -> tuple[Int[Tensor, " path"], Int[Tensor, " one"]]:
    """Slots of the accepted path whose tokens are committed, and the token after it, which is the next root.

    `text` is the sequence up to the root; the emitted tokens are appended. Where the path ends the answer its last
    token takes the place of the bonus token, so that none is drawn behind the end.

    Raises:
        CheckError: the scores that decide are not finite.
    """
    drafted = tokens.tolist()
    found = acceptable(scores, drafted, plan, sampler, text)
    if sampler.observe is not None:
        sampler.observe(found)
    slots = list(found.path)
    text += [drafted[slot] for slot in slots[1:]]
    if sampler.is_over(text):
        token = drafted[slots.pop()]
    else:
        token = sampler.next_token(scores[slots[-1]], text)
        text.append(token)
    return torch.tensor(slots, device=tokens.device), torch.tensor([token], device=tokens.device)


def acceptable(
    scores: Float[Tensor, "width vocab"], drafted: list[int], plan: TreePlan, sampler: Sampler, text: list[int]
) -> Acceptable:
    """Every node whose ancestors and itself are acceptable, and the one to take; nothing follows an answer's end."""
    parents = [-1, *plan.parents.tolist()]
    path_texts, log_probs = {0: list(text)}, {0: 0.0}
    for slot in range(plan.verify_width):  # ascending slots: parents come before their children
        if slot not in log_probs or not plan.children[slot] or (slot and sampler.is_over(path_texts[slot])):
            continue
        probs, threshold = target_law(scores[slot], sampler, path_texts[slot])
        for child in plan.children[slot]:
            prob = probs[drafted[child]]
            if prob > threshold:
                path_texts[child] = [*path_texts[slot], drafted[child]]
                log_probs[child] = log_probs[slot] + float(prob.log())
    depths = {slot: len(path_texts[slot]) for slot in log_probs}
    best = min(log_probs, key=lambda slot: (-depths[slot], -round(log_probs[slot], 12), slot))
    path = [best]
    while path[-1]:
        path.append(parents[path[-1]])
    return Acceptable(slots=tuple(sorted(log_probs)), path=tuple(reversed(path)))


def target_law(scores: Float[Tensor, " vocab"], sampler: Sampler, text: list[int]) -> tuple[Tensor, Tensor]:
    """The target's probabilities after `text`, temperature and filters included, and the threshold they set.

    Raises:
        CheckError: they are not finite.
    """
    law = torch.softmax(filtered(sampler.processed(scores, text), sampler.rule).double(), dim=-1)
    require_finite(law.amax(dim=-1), torch.tensor([len(text)]))
    return law[0], typical_threshold(law, sampler.rule)[0]
