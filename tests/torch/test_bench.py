"""The race: same prompts, same settings, rotating order, paired ratios; what differs unexplained is a failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from factories import timing
from models import PROMPTS, TREES, encoded, heads_of, plain_text, target_of, tiny_heads, tiny_llama
from torch import Tensor

from topo_search import bench
from topo_search.bench import Contender, Course, RaceResult, Standing, race
from topo_search.calibrate import empty_trace, trace_of_answers
from topo_search.compare import teacher_forced
from topo_search.cost import WHATEVER_EXPANDED, LatencyTable
from topo_search.decode.decoder import Decoded, TreeDecoder
from topo_search.decode.plan import TreePlan
from topo_search.errors import CheckError, InputError
from topo_search.heads.medusa import MedusaHeads
from topo_search.identity import sampling_rule
from topo_search.reference import generate_plain
from topo_search.replay import replay
from topo_search.report.tables import prediction_lines
from topo_search.target import Target
from topo_search.trace import RankTrace
from topo_search.tree import Tree

TARGET, HEADS = target_of("llama"), heads_of("llama")
CAP, REPEATS = 16, 2  # repeats where times matter, else one
CONTENDERS = (
    Contender(name="generate", tree=None),
    Contender(name="plain", tree=Tree(())),
    Contender(name="best chain", tree=Tree.chain(3)),
    Contender(name="medusa-63", tree=TREES["medusa-63"]),
    Contender(name="best tree", tree=TREES["dense"]),
)
COURSE = Course(target=TARGET, reference=TARGET, heads=HEADS, prompts=encoded(*PROMPTS), max_new_tokens=CAP, repeats=1)
NAMES = [contender.name for contender in CONTENDERS]
FEW = (*CONTENDERS[:2], CONTENDERS[-1])


def standing(result: RaceResult, name: str) -> Standing:
    return next(found for found in result.standings if found.name == name)


def raced(contenders: Sequence[Contender] = CONTENDERS, **changes: Any) -> RaceResult:
    return race(replace(COURSE, **changes), contenders)


def trace_of_prompts() -> RankTrace:
    answers = [
        teacher_forced(TARGET, prompt, plain_text("llama", prompt).tokens, index=index, end="cap")
        for index, prompt in enumerate(PROMPTS)
    ]
    return trace_of_answers(empty_trace(TARGET, HEADS, max_new_tokens=32), HEADS, encoded(*PROMPTS), answers)


def latency(widths: Sequence[int]) -> LatencyTable:
    """Ten milliseconds per verify pass and one per draft, at two contexts."""
    return LatencyTable(
        verify={(1, context, width): timing(10.0) for context in (4, 64) for width in widths},
        draft={(1, depth, WHATEVER_EXPANDED): timing(1.0) for depth in (1, 2, 3, 4)},
        target=TARGET.identity,
        heads=HEADS.identity,
        device={},
        mode="eager",
        attention="sdpa",
    )


def test_a_fair_race_has_equal_text_and_predicted_counts() -> None:
    """MATH 0: plain decoding and `generate` are exactly 1.0; replay predicts every other count exactly."""
    result = raced(calibration=trace_of_prompts(), latency=latency((1, 4, 22)))
    assert result.failures == []
    assert [found.name for found in result.standings] == NAMES
    assert (result.prompts, result.repeats) == (len(PROMPTS), 1)
    for found in result.standings:
        assert found.text_equal
        assert found.stats.tokens == len(PROMPTS) * (CAP - 1)
        assert found.tokens_per_step == found.stats.tokens / found.stats.steps
        if found.name != "generate":
            assert found.predicted_tokens_per_step == pytest.approx(found.tokens_per_step, abs=1e-12)
        low, high = found.tokens_per_s_spread
        assert 0 < low <= found.tokens_per_s <= high
    assert standing(result, "generate").tokens_per_step == standing(result, "plain").tokens_per_step == 1.0
    assert standing(result, "best tree").tokens_per_step > 2.0
    assert standing(result, "generate").predicted_tokens_per_step is None


def test_predicted_rates_come_from_the_latency_table() -> None:
    """MATH 4: all tokens over the summed time of the replayed steps; a width without a time has no rate."""
    result = raced(latency=latency((1, 4, 22)))
    assert standing(result, "plain").predicted_tokens_per_s == pytest.approx(100.0)
    for name in ("best chain", "best tree"):
        found = standing(result, name)
        assert found.predicted_tokens_per_s == pytest.approx(1000 * found.tokens_per_step / 11.0)
    assert standing(result, "medusa-63").predicted_tokens_per_s is None
    assert standing(raced(FEW), "best tree").predicted_tokens_per_s is None


def test_every_prediction_is_set_against_what_was_measured() -> None:
    result = raced(latency=latency((1, 4, 22)))
    lines = prediction_lines(result)
    for name in ("plain", "best chain", "best tree"):
        found = standing(result, name)
        assert found.predicted_tokens_per_s is not None
        assert found.measured_over_predicted == found.tokens_per_s / found.predicted_tokens_per_s
        assert sum(line.startswith(f"{name}: predicted {found.predicted_tokens_per_s:.1f}") for line in lines) == 1
    assert standing(result, "generate").measured_over_predicted is None
    assert prediction_lines(raced(FEW)) == []


@pytest.mark.parametrize(("measured", "words"), [(92.0, "8 % below"), (110.0, "10 % above"), (99.0, None)])
def test_a_machine_that_changed_is_told_by_plain_decoding(measured: float, words: str | None) -> None:
    result = raced(FEW, latency=latency((1, 22)))
    plain = replace(standing(result, "plain"), tokens_per_s=measured)  # the table says 100
    lines = prediction_lines(replace(result, standings=(plain,)))
    assert len(lines) == (1 if words is None else 2)
    assert words is None or (words in lines[0] and f"is itself {words} the latency table" in lines[1])


def test_the_forecast_is_the_replay_of_the_calibration_trace() -> None:
    calibration = trace_of_prompts()
    result = raced(FEW, calibration=calibration)
    expected = replay(calibration, [TREES["dense"]]).tokens_per_step[0]
    assert standing(result, "best tree").forecast_tokens_per_step == expected
    assert standing(result, "generate").forecast_tokens_per_step is None


# Failures


class Misfed(MedusaHeads):
    """Heads that, in the decoder only, read a hidden state other than the last committed token's."""

    def propose(self, features: Tensor, roots: Tensor, plan: TreePlan, *noise: Any) -> Tensor:
        return super().propose(features.flip(-1), roots, plan, *noise)


def test_heads_fed_a_wrong_state_in_the_decoder_are_a_failure() -> None:
    """FIELD-CASES 36: fine offline, about 1.05 tokens per step live; the text is right all the same."""
    heads = tiny_heads(TARGET)
    result = raced(FEW, heads=Misfed(heads.blocks, TARGET, heads.identity))
    found = standing(result, "best tree")
    assert found.text_equal
    assert found.tokens_per_step < 0.9 * found.predicted_tokens_per_step
    assert found.mismatches
    assert any("best tree: p0 accepted" in line and "replay said" in line for line in result.failures)
    assert standing(result, "plain").mismatches == ()


def spoil_best_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the best tree's decoder write one wrong token in the middle of every answer."""
    real = TreeDecoder.generate

    def generate(decoder: TreeDecoder, prompt: Sequence[int], *, max_new_tokens: int, **settings: Any) -> Decoded:
        answer = real(decoder, prompt, max_new_tokens=max_new_tokens, **settings)
        if decoder.tree != TREES["dense"] or max_new_tokens < CAP:
            return answer
        wrong = (answer.tokens[7] + 1) % 61
        return replace(answer, tokens=(*answer.tokens[:7], wrong, *answer.tokens[8:]), accepted=(0,) * (CAP - 1))

    monkeypatch.setattr(TreeDecoder, "generate", generate)


def test_another_text_is_a_failure_that_names_prompt_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_best_tree(monkeypatch)
    result = raced(FEW)
    found = standing(result, "best tree")
    assert not found.text_equal
    assert [point.position for point in found.divergences] == [7] * len(PROMPTS)
    assert found.mismatches == ()  # replay knows the plain text only
    assert len(result.failures) == len(PROMPTS)
    assert result.failures[0].startswith("best tree: text of p0 differs at token 7, ")


def test_near_ties_are_listed_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_best_tree(monkeypatch)
    monkeypatch.setattr("topo_search.compare.NEAR_TIE", 1e9)
    result = raced(FEW)
    assert len(standing(result, "best tree").divergences) == len(PROMPTS)
    assert not standing(result, "best tree").text_equal
    assert result.failures == []


def test_a_tree_deeper_than_the_heads_is_refused() -> None:
    """FIELD-CASES 16."""
    with pytest.raises(InputError, match="5 deep, but there are 4 draft heads"):
        raced((*CONTENDERS, Contender(name="deep", tree=Tree.chain(5))))


def test_the_probe_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not depend on the tree; where it fails nothing is raced."""
    calls: list[Target] = []
    monkeypatch.setattr("topo_search.decode.decoder.probe", calls.append)
    raced(max_new_tokens=2)
    assert calls == [TARGET]

    def fail(target: Target) -> None:
        raise CheckError("the mask is not honoured")

    monkeypatch.setattr("topo_search.decode.decoder.probe", fail)
    with pytest.raises(CheckError):
        raced()


# Order and ratios


def scripted(monkeypatch: pytest.MonkeyPatch, decode_ms: dict[str, Sequence[float]]) -> list[tuple[str, int, int]]:
    """Replace both ways to decode by ones that take `decode_ms` of their contender and repeat; returns their calls."""
    calls: list[tuple[str, int, int]] = []
    named = {contender.tree: contender.name for contender in CONTENDERS}

    def answer(name: str, prompt: Sequence[int], cap: int) -> Decoded:
        timed = [call for call in calls if call[0] == name and call[2] == CAP]
        repeat = min(len(timed) // len(PROMPTS), REPEATS - 1)
        calls.append((name, PROMPTS.index(tuple(prompt)), cap))
        tokens = plain_text("llama", tuple(prompt)).tokens[:cap]
        return Decoded(
            tokens=tokens,
            end="cap",
            accepted=(0,) * (cap - 1),
            prefill_ms=5.0,
            decode_ms=decode_ms.get(name, (1.0,) * REPEATS)[repeat],
        )

    monkeypatch.setattr(
        TreeDecoder,
        "generate",
        lambda decoder, prompt, *, max_new_tokens, **_: answer(named[decoder.tree], prompt, max_new_tokens),
    )
    monkeypatch.setattr(
        bench,
        "generate_plain",
        lambda target, prompt, *, max_new_tokens, **_: answer("generate", prompt, max_new_tokens),
    )
    return calls


def test_everyone_warms_up_and_then_the_start_rotates(monkeypatch: pytest.MonkeyPatch) -> None:
    """FIELD-CASES 47, 48: short warm-up calls first, then interleaved by prompt, so drift hits all alike."""
    calls = scripted(monkeypatch, {})
    seen: list[tuple[int, int]] = []
    race(replace(COURSE, repeats=REPEATS), CONTENDERS, progress=lambda *done: seen.append(done))
    warm_up, timed = calls[: len(NAMES)], calls[len(NAMES) :]
    assert [(name, cap) for name, _, cap in warm_up] == [(name, 4) for name in NAMES]
    groups = [timed[at : at + len(NAMES)] for at in range(0, len(timed), len(NAMES))]
    assert [{prompt for _, prompt, _ in group} for group in groups] == [{0}, {1}, {2}, {3}] * REPEATS
    assert all(sorted(name for name, _, _ in group) == sorted(NAMES) for group in groups)
    assert [group[0][0] for group in groups] == [*NAMES[:4], *NAMES[1:5]]
    assert seen[-1] == (len(timed), len(timed))


def test_ratios_are_paired_by_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """FIELD-CASES 48: the machine slows tenfold between repeats, yet each repeat says 2.0 and 1.25 times."""
    times = {"generate": (20.0, 200.0), "plain": (10.0, 100.0), "best chain": (8.0, 80.0), "best tree": (5.0, 25.0)}
    scripted(monkeypatch, times | {"medusa-63": (10.0, 50.0)})
    result = raced(repeats=REPEATS)
    ratios = {(ratio.of, ratio.over): (ratio.low, ratio.median, ratio.high) for ratio in result.ratios}
    assert ratios["plain", "generate"] == pytest.approx((2.0, 2.0, 2.0))
    assert ratios["best chain", "plain"] == pytest.approx((1.25, 1.25, 1.25))
    assert ratios["best tree", "plain"] == pytest.approx((2.0, 3.0, 4.0))
    assert ratios["best tree", "medusa-63"] == pytest.approx((2.0, 2.0, 2.0))
    assert set(ratios) == {
        ("plain", "generate"),
        *((name, "plain") for name in ("best chain", "medusa-63", "best tree")),
        *(("best tree", name) for name in ("best chain", "medusa-63")),
    }


def test_rates_and_steps_are_medians_over_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {"plain": (10.0, 30.0)})
    found = standing(raced(repeats=REPEATS), "plain")
    tokens = len(PROMPTS) * (CAP - 1)
    rates = [1000 * tokens / (10.0 * len(PROMPTS)), 1000 * tokens / (30.0 * len(PROMPTS))]
    assert found.tokens_per_s == pytest.approx(sum(rates) / 2)
    assert found.tokens_per_s_spread == pytest.approx((rates[1], rates[0]))
    assert found.step_ms == pytest.approx(20.0 * len(PROMPTS) / tokens)
    assert found.prefill_ms == 5.0


def test_answers_of_one_token_have_no_rate_and_no_ratio() -> None:
    """MATH 0: N = 1 adds nothing to tokens and steps."""
    result = raced(max_new_tokens=1)
    assert result.failures == []
    assert result.ratios == ()
    assert {found.tokens_per_s for found in result.standings} == {0.0}
    assert {found.tokens_per_step for found in result.standings} == {1.0}


def test_the_reference_is_the_model_that_generates() -> None:
    """`generate` runs as a transformers user runs it: where its text is another one, all of ours differ."""
    other = tiny_llama(num_hidden_layers=1)
    result = raced(CONTENDERS[:2], reference=other)
    assert [found.text_equal for found in result.standings] == [True, False]
    assert any(line.startswith("plain: text of p0 differs at token") for line in result.failures)


# Sampling


def test_a_race_at_a_temperature_is_as_fair_as_a_greedy_one() -> None:
    """`generate` draws with the noise of our draws, so its text is still the one that every tree must write."""
    result = raced(rule=sampling_rule(temperature=0.8, top_p=0.95, seed=3))
    assert result.failures == []
    for found in result.standings:
        assert found.text_equal
        if found.name != "generate":
            assert found.predicted_tokens_per_step == pytest.approx(found.tokens_per_step, abs=1e-12)
    assert standing(result, "best tree").stats != standing(raced(), "best tree").stats


def test_prompt_lookup_writes_the_same_text_in_fewer_steps() -> None:
    """Its accepted tokens add up to the text after the first step, as ours do."""
    target, prompt = target_of("llama"), PROMPTS[0] * 4
    plain = generate_plain(target, prompt, max_new_tokens=24)
    found = generate_plain(target, (*prompt, *plain.tokens, *prompt), max_new_tokens=24, prompt_lookup=4)
    expected = generate_plain(target, (*prompt, *plain.tokens, *prompt), max_new_tokens=24)
    assert found.tokens == expected.tokens
    assert sum(accepted + 1 for accepted in found.accepted) in range(len(found.tokens) - 5, len(found.tokens))
    assert len(found.accepted) <= len(expected.accepted) == 23
