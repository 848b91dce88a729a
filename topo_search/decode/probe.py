"""The start-up probe: does this model, version and attention backend really treat a tree as separate texts?

(a) Another token in one sibling must leave the logits of every node that cannot see it bit-equal. (b) Every node's
logits must be those of a plain forward pass over its path, under the model's own mask, on a prompt longer than any
window. A mask that is added where it should hide, or ignored, fails here instead of changing the text.
"""

from __future__ import annotations

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
# float64 too has parts in fp32: norms, and the softmax of eager attention.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 2e-1}


def probe(target: Target) -> None:
    """Check that tree attention is exact for `target`.

    Raises:
        CheckError: an unrelated node's logits moved, or a node's logits are not those of its path.
    """
    prompt = _PROMPT_TOKENS if target.window is None else target.window + _PROMPT_TOKENS
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
    _require_isolated(scores, moved)
    _require_equal(scores, alone, target)


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


def _require_isolated(scores: Float[Tensor, "width vocab"], moved: Float[Tensor, "width vocab"]) -> None:
    changed = _PROBE_TREE.slots[(1,)]
    unrelated = [slot for slot, seen in enumerate(_PROBE_TREE.ancestors) if changed not in seen]
    related = [slot for slot, seen in enumerate(_PROBE_TREE.ancestors) if changed in seen]
    if not torch.equal(scores[unrelated], moved[unrelated]):
        raise CheckError(
            "The attention mask is not honoured: changing one sibling's token moved the logits of nodes that cannot "
            "see it. This model, transformers version or attention backend cannot decode trees."
        )
    if torch.equal(scores[related], moved[related]):
        raise CheckError("Changing a node's token left its own logits unchanged: the tree's tokens are not read.")


def _require_equal(scores: Float[Tensor, "width vocab"], alone: Float[Tensor, "width vocab"], target: Target) -> None:
    finite = torch.isfinite(alone)
    gap = (scores[finite] - alone[finite]).abs().max().item()
    scale = max(1.0, alone[finite].abs().max().item() / 10)
    bound = _TOLERANCE[target.dtype] * scale
    if not gap <= bound:
        raise CheckError(
            f"Tree logits differ from those of plain forward passes by {gap:.3g} (bound {bound:.3g} for "
            f"{target.identity.dtype}): positions, window or mask are wrong for {target.identity.name}."
        )
