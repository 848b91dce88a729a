"""The start-up probe: does this model, version and attention backend really treat a tree as separate texts?

(a) Another token in one sibling must leave the logits of every node that cannot see it bit-equal (where experts take
the tokens of a pass in batches, equal but for rounding: who shares a batch decides the order of a sum). (b) Every
node's logits must be those of a plain forward pass over its path, under the model's own mask, on a prompt longer than
any window. (c) The output layer on the last hidden states must choose what the model's own logits choose. A mask that
is added where it should hide, or ignored, or an output layer that is not all of it, fails here instead of changing
text.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from topo_search.decode.plan import plan_tree
from topo_search.decode.step import TreeStep
from topo_search.errors import CheckError
from topo_search.target.adapter import Target
from topo_search.tree import Tree

_PROBE_TREE = Tree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
_PROMPT_TOKENS = 12
# float64 too has parts in fp32: norms, and the softmax of eager attention. In lower precision rounding grows with the
# layers: the demo target's 30 move logits of up to 33 by 0.08 in fp16 and 0.64 in bf16, with int4 weights by 0.11 and
# 0.89. A token that is wrongly seen or misplaced moves them by 10 and more, so twice what was met is allowed.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 7e-2, torch.bfloat16: 6e-1}


def probe(target: Target) -> bool:
    """Check that tree attention is exact for `target`.

    Returns:
        Whether `target.logits` are the model's own in value too, which sampling needs; greedy text needs their order.

    Raises:
        CheckError: an unrelated node's logits moved, a node's logits are not those of its path, or the output layer
            chooses other tokens than the model.
    """
    prompt = _prompt_tokens(target)
    ids = (torch.arange(prompt + _PROBE_TREE.verify_width + 1, device=target.device) * 7919 + 11) % target.known_ids
    tokens, replaced = ids[prompt:-1].clone(), ids[prompt:-1].clone()
    replaced[_PROBE_TREE.slots[(1,)]] = ids[-1]
    with torch.inference_mode():
        try:
            scores = _tree_scores(target, ids[:prompt], tokens)
            moved = _tree_scores(target, ids[:prompt], replaced)
            alone = _path_scores(target, ids[:prompt], tokens)
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise CheckError(f"{target.identity.name} cannot take a 4-D tree mask: {error}") from error
    _require_finite(scores, target)
    _require_isolated(scores, moved, target)
    _require_equal(scores, alone, target)
    return _require_own_choice(target, ids[:_PROMPT_TOKENS])


def _prompt_tokens(target: Target) -> int:
    """More than any span of the configuration that could hide a token, such as GPT-Neo's `window_size`."""
    config = target.model.config.get_text_config().to_dict()  # type: ignore[union-attr,operator]
    limit = target.position_limit or math.inf
    spans = [
        size
        for name, size in config.items()
        if ("window" in name or "chunk" in name) and isinstance(size, int) and size < limit
    ]
    return int(min(max(spans, default=0) + _PROMPT_TOKENS, limit - _PROBE_TREE.depth - 1))


def _tree_scores(
    target: Target, prompt: Int[Tensor, " prompt"], tokens: Int[Tensor, " width"]
) -> Float[Tensor, "width vocab"]:
    plan = plan_tree(_PROBE_TREE, capacity=len(prompt), window=target.window, dtype=target.dtype, device=target.device)
    step = TreeStep(target, None, plan)
    cache = target.new_cache(len(prompt) + plan.verify_width)
    target.hidden_states(prompt[None], cache=cache)
    cache.commit(len(prompt))
    step.input_ids[0] = tokens
    return target.scores(step.tree_states(cache))


def _path_scores(
    target: Target, prompt: Int[Tensor, " prompt"], tokens: Int[Tensor, " width"]
) -> Float[Tensor, "width vocab"]:
    """Each node's scores from a plain forward over prompt and path: no cache, the model's own mask."""
    rows = [
        target.scores(target.hidden_states(torch.cat([prompt, tokens[list(seen)]])[None])[0, -1])
        for seen in _PROBE_TREE.ancestors
    ]
    return torch.stack(rows)


def _require_finite(scores: Float[Tensor, "width vocab"], target: Target) -> None:
    if bool((scores.isnan() | (scores == float("inf"))).any()):
        raise CheckError(
            f"The logits of {target.identity.name} are not finite: its weights or activations overflowed. Try "
            "--dtype float32 or another checkpoint."
        )


def _require_isolated(
    scores: Float[Tensor, "width vocab"], moved: Float[Tensor, "width vocab"], target: Target
) -> None:
    changed = _PROBE_TREE.slots[(1,)]
    unrelated = [slot for slot, seen in enumerate(_PROBE_TREE.ancestors) if changed not in seen]
    related = [slot for slot, seen in enumerate(_PROBE_TREE.ancestors) if changed in seen]
    finite = torch.isfinite(scores[unrelated])
    shift = (scores[unrelated] - moved[unrelated])[finite].abs().max().item()
    if not shift <= (_bound(scores[unrelated][finite], target) if _has_experts(target) else 0.0):
        raise CheckError(
            "The attention mask is not honoured: changing one sibling's token moved the logits of nodes that cannot "
            f"see it by {shift:.2g}. This model, transformers version or attention backend cannot decode trees."
        )
    if torch.equal(scores[related], moved[related]):
        raise CheckError("Changing a node's token left its own logits unchanged: the tree's tokens are not read.")


def _require_equal(scores: Float[Tensor, "width vocab"], alone: Float[Tensor, "width vocab"], target: Target) -> None:
    finite = torch.isfinite(alone)
    gap = (scores[finite] - alone[finite]).abs().max().item()
    bound = _bound(alone[finite], target)
    if not gap <= bound:
        raise CheckError(
            f"Tree logits differ from those of plain forward passes by {gap:.3g} (bound {bound:.3g} for "
            f"{target.identity.dtype}): positions, window or mask are wrong for {target.identity.name}."
        )


def _has_experts(target: Target) -> bool:
    """Whether layers send tokens to experts, by any of the names that configurations have for their number."""
    config = target.model.config.get_text_config().to_dict()  # type: ignore[union-attr,operator]
    return any("experts" in name and isinstance(count, int) and count > 1 for name, count in config.items())


def _require_own_choice(target: Target, ids: Int[Tensor, " prompt"]) -> bool:
    """Scale and soft caps after the output layer keep the order of its scores; anything else is refused.

    Returns:
        Whether the values agree as well.
    """
    with torch.inference_mode():
        hidden = target.hidden_states(ids[None])[0]
        choices, own = target.choose(hidden), target.logits(hidden)[:, : target.known_ids]
        logits = target.model(input_ids=ids[None]).logits[0, :, : target.known_ids].float()
    behind = (logits.max(dim=-1).values - logits.gather(-1, choices[:, None])[:, 0]).max().item()
    if not behind <= _bound(logits, target):
        raise CheckError(
            f"{target.identity.name} ({target.model.config.model_type}) computes its logits otherwise than by its "  # type: ignore[union-attr]
            "output layer on the last hidden states; its text cannot be reproduced."
        )
    return bool((own - logits).abs().max() <= _bound(logits, target))


def _bound(scores: Tensor, target: Target) -> float:
    return _TOLERANCE[target.dtype] * max(1.0, scores.abs().max().item() / 10)
