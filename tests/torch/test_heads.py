"""Medusa heads: untrained ones repeat the target, all follow the formula, proposals are the lists calibration ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import VOCAB, as_target, llama_config, target_of, tiny_heads, tiny_model
from torch import Tensor

from topo_search.decode.plan import plan_tree
from topo_search.heads.base import DraftCost, DraftHeads, LastState, column_of, ids_of
from topo_search.heads.medusa import MedusaBlocks, MedusaHeads, untrained_blocks
from topo_search.heads.projection import shortlist_of
from topo_search.identity import HeadsIdentity
from topo_search.ranking import top_tokens
from topo_search.target import Target
from topo_search.tree import Tree

TARGET = target_of("llama")
LAYOUTS = pytest.mark.parametrize("shared", [False, True], ids=["layout A", "layout B"])


def drawn_blocks(*, shared: bool, num_heads: int = 3, num_layers: int = 2) -> MedusaBlocks:
    """Blocks whose every number is drawn."""
    blocks = untrained_blocks(TARGET, num_heads=num_heads, num_layers=num_layers, share_projection=shared)
    with torch.no_grad():
        for parameter in blocks.parameters():
            parameter.normal_(std=0.1)
    return blocks


def bound(blocks: MedusaBlocks, target: Target = TARGET, **settings: Tensor | torch.dtype | None) -> MedusaHeads:
    identity = HeadsIdentity(name="drawn", kind="medusa", fingerprint="", num_heads=blocks.num_heads)
    return MedusaHeads(blocks, target, identity, **settings)  # type: ignore[arg-type]


# Scores


@LAYOUTS
def test_untrained_heads_give_the_targets_own_scores(shared: bool) -> None:
    """Blocks start at zero, the projection is the output layer (then exactly so) or a copy of it."""
    states = torch.randn(5, TARGET.hidden_size, dtype=torch.float64)
    heads = bound(untrained_blocks(TARGET, num_heads=3, num_layers=2, share_projection=shared))
    scores, own = heads.scores(states, 3), TARGET.scores(states.repeat(3, 1, 1))
    assert scores.shape == (3, 5, VOCAB)
    assert torch.equal(scores, own) if shared else torch.allclose(scores, own, rtol=0, atol=1e-12)
    assert torch.equal(top_tokens(scores, 10), top_tokens(own, 10))


@LAYOUTS
def test_scores_are_those_of_the_formula(shared: bool) -> None:
    """h + SiLU(W h + b) per block, then the projection (Medusa, section 2.1)."""
    blocks = drawn_blocks(shared=shared)
    states = torch.randn(4, TARGET.hidden_size, dtype=torch.float64)
    heads = bound(blocks)
    for head in range(3):
        features = states
        for layer in range(2):
            inner = features @ blocks.weight[head, layer].T + blocks.bias[head, layer]
            features = features + inner * torch.sigmoid(inner)
        projection = TARGET.output_weight if blocks.projection is None else blocks.projection[head]
        assert torch.allclose(heads.scores(states, 3)[head], features @ projection.T, rtol=0, atol=1e-12)


def test_fewer_heads_score_alike() -> None:
    """A shallow tree runs its own heads only."""
    heads = bound(drawn_blocks(shared=False))
    states = torch.randn(4, TARGET.hidden_size, dtype=torch.float64)
    assert torch.equal(heads.scores(states, 2), heads.scores(states, 3)[:2])


def test_proposals_are_the_nodes_ranks_in_the_list_of_their_depth() -> None:
    """The lists that calibration ranks the true tokens in; every row of a batch has lists of its own."""
    heads, tree = tiny_heads(TARGET), Tree(((0,), (5,), (0, 1), (5, 0), (0, 1, 7)))
    plan = plan_tree(tree, capacity=4, window=None, dtype=torch.float64, device=TARGET.device)
    states = torch.randn(2, TARGET.hidden_size, dtype=torch.float64)
    proposed = heads.propose(states, torch.tensor([3, 8]), plan)
    lists = top_tokens(heads.path_scores(states, torch.zeros(2, 4, dtype=torch.long)), 10)
    expected = [[int(lists[row, len(path) - 1, path[-1]]) for path in tree.paths] for row in range(2)]
    assert proposed.tolist() == expected


def test_lists_do_not_depend_on_where_steps_begin() -> None:
    """MATH 1: replay is exact for path-local heads only, so a row's scores are those of the row alone."""
    heads = tiny_heads(TARGET)
    states, tokens = torch.randn(6, TARGET.hidden_size, dtype=torch.float64), torch.randint(0, VOCAB, (6, 4))
    together = heads.path_scores(states, tokens)
    for row in range(6):
        alone = heads.path_scores(states[row : row + 1], tokens[row : row + 1])[0]
        assert torch.equal(top_tokens(alone, 10), top_tokens(together[row], 10))


@LAYOUTS
def test_ids_beyond_the_tokenizer_score_minus_infinity(shared: bool) -> None:
    """FIELD-CASES 79."""
    target = replace(TARGET, known_ids=50)
    heads = bound(drawn_blocks(shared=shared), target)
    scores = heads.scores(torch.randn(4, TARGET.hidden_size, dtype=torch.float64), 3)
    assert bool((scores[..., 50:] == float("-inf")).all())
    assert bool(torch.isfinite(scores[..., :50]).all())


def test_medusa_heads_are_draft_heads() -> None:
    heads = tiny_heads(TARGET)
    assert isinstance(heads, DraftHeads)
    assert (heads.cost, heads.path_local, heads.reads_prefix) == (DraftCost.PER_STEP, True, False)
    states, following = torch.randn(3, TARGET.hidden_size, dtype=torch.float64), torch.arange(3)
    assert torch.equal(heads.features(states, following), states)
    context = heads.new_context(8)
    assert isinstance(context, LastState)
    assert torch.equal(context.extend(states[None], following[None]), states[-1:])


@LAYOUTS
def test_a_shortlist_scores_its_own_tokens_and_maps_them_to_target_ids(shared: bool) -> None:
    """The columns are the rows of a smaller table; ids are the target's before anything is compared."""
    shortlist = torch.tensor([2, 3, 17, 40, 60])
    whole, blocks = bound(drawn_blocks(shared=shared)), drawn_blocks(shared=shared)
    for one, other in zip(blocks.parameters(), whole.blocks.parameters(), strict=True):
        one.data.copy_(other)
    if not shared:
        blocks.projection = torch.nn.Parameter(blocks.projection[:, shortlist].detach())
    heads = bound(blocks, token_map=shortlist)
    states, tokens = torch.randn(4, TARGET.hidden_size, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.long)
    scores = heads.path_scores(states, tokens)
    assert torch.allclose(scores, whole.path_scores(states, tokens)[..., shortlist], rtol=0, atol=1e-12)
    plan = plan_tree(Tree.dense([3, 2]), capacity=4, window=None, dtype=torch.float64, device=TARGET.device)
    lists = shortlist[top_tokens(scores, 3)]
    proposed = heads.propose(states[:1], torch.tensor([1]), plan)[0]
    assert proposed.tolist() == [int(lists[0, len(path) - 1, path[-1]]) for path in plan.tree.paths]
    assert ids_of(heads, torch.tensor([1, 4])).tolist() == [3, 60]
    assert (column_of(heads, 40), column_of(heads, 41), column_of(whole, 41)) == (3, None, 41)


def test_the_shortlist_holds_the_most_frequent_ids() -> None:
    assert shortlist_of(torch.tensor([5, 0, 9, 5, 1]), 3).tolist() == [0, 2, 3]


@LAYOUTS
def test_heads_in_bf16_serve_a_target_in_fp32(shared: bool) -> None:
    """Issue: a smaller precision beside an fp32 or quantised target; scores are compared in fp32 all the same."""
    target = as_target(tiny_model(llama_config(), dtype=torch.float32), dtype="float32")
    blocks = untrained_blocks(target, num_heads=2, num_layers=1, share_projection=shared)
    heads = bound(blocks, target, dtype=torch.bfloat16)
    states = torch.randn(5, target.hidden_size)
    scores = heads.path_scores(states, torch.zeros(5, 2, dtype=torch.long))
    assert {parameter.dtype for parameter in heads.blocks.parameters()} == {torch.bfloat16}
    assert scores.dtype == torch.float32
    assert torch.allclose(scores[:, 0], target.scores(states), rtol=0.02, atol=0.3)
