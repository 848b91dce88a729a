"""Typical acceptance in the decoder: Medusa's rule, its text changed and labelled, its masks scored as it decodes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import random_state_kept, repeatable
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MEDUSA_63, PROMPTS, TREES, VOCAB, encoded, heads_of, must_not_run, target_of

from topo_search.accepts import AcceptTrace
from topo_search.decode.batch import decode_batch
from topo_search.decode.decoder import Decoded, TreeDecoder
from topo_search.decode.plan import plan_tree
from topo_search.decode.sampling import Sampler, choose, filtered, typical_threshold
from topo_search.decode.typical import Acceptable, acceptable
from topo_search.errors import CheckError, InputError, MismatchError
from topo_search.identity import GREEDY, RuleIdentity, sampling_rule, typical_rule
from topo_search.recording import record_accepts
from topo_search.trace import RankTrace
from topo_search.tree import Tree

TARGET, HEADS = target_of("llama"), heads_of("llama")
CAP = 24
RULE = typical_rule(temperature=0.7, epsilon=0.05, delta=0.3, seed=3)
GREEDY_BONUS = typical_rule(temperature=0.7, epsilon=0.05, delta=0.3, bonus="greedy")
RULES = {"sampled": RULE, "greedy": GREEDY_BONUS, "truncated": replace(RULE, bonus="truncated")}


@cache
def decoder_of(tree: Tree) -> TreeDecoder:
    return TreeDecoder(TARGET, HEADS, tree, capacity=64, run_probe=False)


def decoded(tree: Tree, prompt: tuple[int, ...], rule: RuleIdentity = RULE, **settings: Any) -> Decoded:
    return decoder_of(tree).generate(prompt, max_new_tokens=settings.pop("cap", CAP), rule=rule, **settings)


def target_probs(text: tuple[int, ...], rule: RuleIdentity) -> torch.Tensor:
    """The target's law after `text`, by a plain forward pass."""
    with torch.inference_mode():
        scores = TARGET.logits(TARGET.hidden_states(torch.tensor([text]))[0, -1:])
    return torch.softmax(filtered(scores, rule), dim=-1)[0]


# The rule


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("tree", ["dense", "sparse", "medusa-63"])
def test_every_drafted_token_taken_exceeds_the_threshold(name: str, tree: str) -> None:
    """Medusa, section 2.3, checked token by token against plain forward passes over the text that came out."""
    rule, taken, lengths = RULES[name], 0, set[int]()
    for prompt in PROMPTS:
        answer = decoded(TREES[tree], prompt, rule)
        at = 1
        for accepted in answer.accepted:
            for place in range(at, at + accepted):
                law = target_probs((*prompt, *answer.tokens[:place]), rule)
                entropy = -(law * law.clamp(min=1e-300).log()).sum()
                assert law[answer.tokens[place]] > min(rule.epsilon, rule.delta * float(torch.exp(-entropy)))
                taken += 1
            at += accepted + 1
            lengths.add(accepted)
        assert at == len(answer.tokens) == CAP
    assert taken > 5 or name == "truncated"
    assert len(lengths) > 2


def test_it_accepts_more_than_the_exact_rule_at_the_same_settings() -> None:
    """The trade that the rule is made for."""
    exact = sampling_rule(temperature=0.7, seed=3)
    steps = {rule: sum(len(decoded(MEDUSA_63, p, rule).accepted) for p in PROMPTS) for rule in (exact, GREEDY_BONUS)}
    assert steps[GREEDY_BONUS] < 0.8 * steps[exact]


def test_the_deepest_acceptable_node_wins_then_the_likeliest() -> None:
    """MATH 7: deepest first, of equals the largest product of target probabilities, then path order."""
    tree = Tree(((0,), (1,), (2,), (0, 0), (1, 0), (2, 0)))
    plan = plan_tree(tree, capacity=8, window=None, dtype=torch.float64, device=torch.device("cpu"))
    drafted = [9, 0, 1, 2, 3, 4, 5]
    probs = torch.full((7, 8), 1e-12, dtype=torch.float64)
    probs[0, [0, 1, 2]] = torch.tensor([0.3, 0.4, 0.3], dtype=torch.float64)
    probs[1, [3, 6]] = torch.tensor([0.9, 0.1], dtype=torch.float64)  # under (0): 0.3 * 0.9
    probs[2, [4, 6]] = torch.tensor([0.6, 0.4], dtype=torch.float64)  # under (1): 0.4 * 0.6
    probs[3, [5, 6]] = torch.tensor([0.01, 0.99], dtype=torch.float64)  # under (2): not acceptable
    rule = typical_rule(temperature=1.0, epsilon=0.1, delta=0.5)
    found = acceptable(probs.log(), drafted, plan, Sampler(rule=rule), [7, 9])
    assert found == Acceptable(slots=(0, 1, 2, 3, 4, 5), path=(0, 1, 4))
    probs[2, [4, 6]] = torch.tensor([0.675, 0.325], dtype=torch.float64)  # an equal product: the first path
    assert acceptable(probs.log(), drafted, plan, Sampler(rule=rule), [7, 9]).path == (0, 1, 4)
    shallow = typical_rule(temperature=1.0, epsilon=0.95, delta=1e9)  # nothing but certainty is enough
    assert acceptable(probs.log(), drafted, plan, Sampler(rule=shallow), [7, 9]).path == (0,)


def test_the_threshold_is_the_smaller_of_the_two() -> None:
    law = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    found = typical_threshold(law, typical_rule(temperature=1.0, epsilon=0.2, delta=0.3))
    assert found.tolist() == pytest.approx([0.15, 0.2])


@pytest.mark.parametrize("seed", [0, 5])
def test_without_a_tree_the_sampled_bonus_is_exact_sampling(seed: int) -> None:
    """Only drafted tokens move the law: with none drafted, text and noise are those of plain decoding."""
    rule = typical_rule(temperature=0.9, seed=seed, top_k=20)
    for request, prompt in enumerate(PROMPTS):
        plain = decoded(Tree(()), prompt, rule.of_plain_decoding, request=request).tokens
        assert decoded(Tree(()), prompt, rule, request=request).tokens == plain
    assert rule.of_plain_decoding == sampling_rule(temperature=0.9, seed=seed, top_k=20)


def test_the_greedy_bonus_draws_nothing() -> None:
    """Medusa's own choice: the best token after the path; neither seed nor request play a part."""
    assert (GREEDY_BONUS.seed, GREEDY_BONUS.noise, GREEDY_BONUS.samples) == (None, None, False)
    assert typical_rule(temperature=0.7, epsilon=0.05, delta=0.3, bonus="greedy", seed=9) == GREEDY_BONUS
    assert decoded(Tree(()), PROMPTS[0], GREEDY_BONUS).tokens == decoded(Tree(()), PROMPTS[0], GREEDY).tokens
    texts = {decoded(TREES["dense"], PROMPTS[1], GREEDY_BONUS, request=number).tokens for number in range(3)}
    assert len(texts) == 1


def test_the_truncated_bonus_stays_above_the_threshold() -> None:
    """Medusa with fast=False draws the root among the tokens that it would accept."""
    rule = replace(RULE, bonus="truncated", epsilon=0.2, delta=0.9)
    scores = 2 * torch.randn(600, VOCAB, dtype=torch.float64)
    law = torch.softmax(scores / rule.temperature, dim=-1)
    numbers = torch.arange(600)
    drawn = choose(scores, rule, positions=numbers, requests=torch.zeros_like(numbers))
    threshold = torch.minimum(typical_threshold(law, rule), law.amax(dim=-1))
    assert bool((law[numbers, drawn] >= threshold).all())
    assert bool((drawn != law.argmax(dim=-1)).any())


def test_the_text_depends_on_the_tree() -> None:
    """Which is why it is labelled, and why a rank trace of it is refused."""
    texts = {decoded(TREES[name], PROMPTS[3], RULE).tokens for name in ("empty", "chain", "dense", "medusa-63")}
    assert len(texts) > 1
    with pytest.raises(InputError, match="which typical acceptance changes; record accept masks"):
        RankTrace(
            prompts=(),
            ranks=np.zeros((0, 4), dtype=np.int16),
            resolved_ranks=3,
            target=TARGET.identity,
            heads=HEADS.identity,
            rule=RULE,
            max_new_tokens=CAP,
        )


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epsilon": 0.0}, "epsilon is 0.0; it must lie strictly between 0 and 1"),
        ({"epsilon": 1.0}, "epsilon is 1.0"),
        ({"epsilon": -0.1}, "epsilon is -0.1"),
        ({"epsilon": float("nan")}, "epsilon is nan"),
        ({"delta": 0.0}, "delta is 0.0; it must be above 0"),
        ({"delta": -1.0}, "delta is -1.0"),
        ({"delta": float("inf")}, "delta is inf"),
        ({"bonus": "random"}, "bonus is 'random'; it must be sampled, greedy or truncated"),
        ({"top_p": 2.0}, "top_p is 2.0"),
        ({"temperature": 0.0, "epsilon": 3.0}, "epsilon is 3.0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        typical_rule(**{"temperature": 0.7, **settings})


def test_settings_of_another_rule_are_refused() -> None:
    with pytest.raises(InputError, match="belong to typical acceptance"):
        RuleIdentity(rule="sample", temperature=0.7, epsilon=0.1)
    with pytest.raises(InputError, match="noise_share helps to find the draw"):
        replace(RULE, noise_share=0.5)
    with pytest.raises(InputError, match="at temperature 0 is greedy acceptance"):
        replace(RULE, temperature=0.0)


def test_at_temperature_0_it_is_greedy() -> None:
    """As in Medusa: the best token has probability 1, every other one 0, below any threshold."""
    assert typical_rule(temperature=0.0, epsilon=0.2, seed=4) == GREEDY
    cold = typical_rule(temperature=1e-4)
    for prompt in PROMPTS:
        assert decoded(TREES["sparse"], prompt, cold).tokens == decoded(TREES["empty"], prompt, GREEDY).tokens


def test_a_processor_that_may_keep_a_state_is_refused() -> None:
    with pytest.raises(InputError, match="function may keep a state that the paths of a tree would share"):
        decoded(TREES["dense"], PROMPTS[0], RULE, processors=[lambda ids, scores: scores])


def test_processors_are_asked_along_each_path() -> None:
    """A penalty on repeated tokens sees the path's own text: no token that repeats is ever acceptable."""
    from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

    answers = [
        decoded(MEDUSA_63, prompt, GREEDY_BONUS, processors=[NoRepeatNGramLogitsProcessor(1)]) for prompt in PROMPTS
    ]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        text = (*prompt, *answer.tokens)
        assert len(set(text)) == len(set(prompt)) + len(answer.tokens)
    assert any(length for answer in answers for length in answer.accepted)


def test_broken_logits_stop_it_by_name() -> None:
    scores = torch.full((4, 5), float("nan"), dtype=torch.float64)
    plan = plan_tree(Tree.dense([3]), capacity=8, window=None, dtype=torch.float64, device=torch.device("cpu"))
    with pytest.raises(CheckError, match="logits for position 2 are not finite"):
        acceptable(scores, [1, 2, 3, 4], plan, Sampler(rule=RULE), [7, 9])


# Ends and batches


@pytest.mark.parametrize("cap", [1, 2, 3, 7])
def test_the_cap_is_exact(cap: int) -> None:
    for prompt in PROMPTS:
        answer = decoded(MEDUSA_63, prompt, GREEDY_BONUS, cap=cap)
        whole = decoded(MEDUSA_63, prompt, GREEDY_BONUS)
        assert len(answer.tokens) == cap
        assert sum(length + 1 for length in answer.accepted) == cap - 1
        assert answer.tokens[:1] == whole.tokens[:1]


def test_end_of_text_inside_an_accepted_path_ends_the_answer() -> None:
    """FIELD-CASES 3, for a rule whose path is chosen before its end is known."""
    ended_inside = 0
    for prompt in PROMPTS:
        whole = decoded(MEDUSA_63, prompt, GREEDY_BONUS)
        for token in set(whole.tokens[1:12]):
            answer = decoded(MEDUSA_63, prompt, GREEDY_BONUS, eos_token_ids=[token])
            assert token not in answer.tokens[:-1]
            assert sum(length + 1 for length in answer.accepted) == len(answer.tokens) - 1
            assert (answer.end == "eos") == (answer.tokens[-1] == token)
            ended_inside += answer.end == "eos" and answer.accepted[-1:] > (0,)
    assert ended_inside


@pytest.mark.parametrize("name", RULES)
def test_a_batch_writes_what_each_row_writes_alone(name: str) -> None:
    rows = decode_batch(decoder_of(TREES["sparse"]), PROMPTS, max_new_tokens=CAP, rule=RULES[name])
    alone = [decoded(TREES["sparse"], prompt, RULES[name], request=i) for i, prompt in enumerate(PROMPTS)]
    assert [(row.tokens, row.accepted) for row in rows] == [(one.tokens, one.accepted) for one in alone]


# Accept masks


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> AcceptTrace:
    out = tmp_path_factory.mktemp("masks") / "a.accepts.safetensors"
    return record_accepts(decoder_of(MEDUSA_63), encoded(*PROMPTS), rule=RULE, max_new_tokens=CAP, out=out)


def test_the_masks_give_the_recording_tree_its_own_walk(recorded: AcceptTrace) -> None:
    """The wide tree itself is scored exactly, at every step."""
    answers = [decoded(MEDUSA_63, prompt.tokens, RULE, request=prompt.request) for prompt in encoded(*PROMPTS)]
    lengths = [length + 1 for answer in answers for length in answer.accepted]
    assert recorded.emitted(MEDUSA_63).tolist() == lengths
    assert recorded.tokens_per_step(MEDUSA_63) == pytest.approx(sum(lengths) / len(lengths))
    assert [prompt.answer_tokens for prompt in recorded.prompts] == [len(answer.tokens) for answer in answers]


subtrees = st.sets(st.sampled_from(MEDUSA_63.paths), max_size=8)


@given(subtrees, st.sampled_from(sorted(RULES)))
@settings(repeatable, max_examples=25)
def test_a_subtree_accepts_at_the_first_step_what_the_masks_say(chosen: set[tuple[int, ...]], name: str) -> None:
    """FIELD-CASES 37 for this rule, where it can hold: at a step whose text is the same, an answer's first."""
    tree = closed(chosen)
    for prompt in PROMPTS[:2]:
        inside = {MEDUSA_63.slots[path] for path in tree.paths} & set(first_acceptable(prompt, name))
        deepest = max((int(MEDUSA_63.depths[slot]) for slot in inside), default=0)
        assert first_step(tree, prompt, RULES[name]) == deepest


@cache
def first_acceptable(prompt: tuple[int, ...], name: str) -> tuple[int, ...]:
    seen: list[Acceptable] = []
    decoded(MEDUSA_63, prompt, RULES[name], cap=8, observe=seen.append)
    return seen[0].slots


@random_state_kept()
def closed(paths: set[tuple[int, ...]]) -> Tree:
    return Tree(tuple({path[:length] for path in paths for length in range(1, len(path) + 1)}))


@random_state_kept()
def first_step(tree: Tree, prompt: tuple[int, ...], rule: RuleIdentity) -> int:
    """Accepted tokens of the first step; the emission before it is the prefill's."""
    emitted = TreeDecoder(TARGET, HEADS, tree, capacity=16, run_probe=False).stream(prompt, max_new_tokens=8, rule=rule)
    return len([next(emitted), next(emitted)][1]) - 1


def test_an_interrupted_recording_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, prompts, out = decoder_of(TREES["sparse"]), encoded(*PROMPTS), tmp_path / "a.accepts.safetensors"
    settings: dict[str, Any] = {"rule": RULE, "max_new_tokens": CAP}
    whole = record_accepts(decoder, prompts, out=tmp_path / "whole.accepts.safetensors", **settings)

    def stop(done: int, *_: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_accepts(decoder, prompts, out=out, progress=stop, **settings)
    assert not out.exists()
    record_accepts(decoder, prompts, out=out, **settings)
    assert out.read_bytes() == (tmp_path / "whole.accepts.safetensors").read_bytes()
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []
    monkeypatch.setattr(TreeDecoder, "generate", must_not_run)
    again = record_accepts(decoder, prompts[:2], out=out, **settings)
    assert {prompt.id for prompt in again.prompts} == {prompt.id for prompt in whole.prompts}


def test_masks_of_another_rule_or_tree_are_not_continued(tmp_path: Path) -> None:
    """FIELD-CASES 41: rule, epsilon and delta are part of the identity."""
    out = tmp_path / "a.accepts.safetensors"
    settings: dict[str, Any] = {"max_new_tokens": 6, "out": out}
    record_accepts(decoder_of(TREES["chain"]), encoded(PROMPTS[0]), rule=RULE, **settings)
    with pytest.raises(MismatchError, match=r"cannot be continued: .* delta is 0.3, not 0.4.* Give another --out"):
        record_accepts(decoder_of(TREES["chain"]), encoded(PROMPTS[0]), rule=replace(RULE, delta=0.4), **settings)
    with pytest.raises(MismatchError, match="their tree differs"):
        record_accepts(decoder_of(TREES["dense"]), encoded(PROMPTS[0]), rule=RULE, **settings)
    with pytest.raises(MismatchError, match="was calibrated with other text before"):
        record_accepts(decoder_of(TREES["chain"]), encoded(PROMPTS[1]), rule=RULE, **settings)
    with pytest.raises(InputError, match="at least one node"):
        record_accepts(decoder_of(Tree(())), encoded(PROMPTS[0]), rule=RULE, **settings)
    with pytest.raises(InputError, match="no prompt"):
        record_accepts(decoder_of(TREES["chain"]), [], rule=RULE, **settings)
    with pytest.raises(InputError, match="exact rules have a rank trace"):
        record_accepts(decoder_of(TREES["chain"]), encoded(PROMPTS[0]), rule=GREEDY, **settings)
