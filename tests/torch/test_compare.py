"""Equal or not, and if not, whether a near-tie explains it: the first divergence, the first differing step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from models import NEW_TOKENS, PROMPTS, VOCAB, heads_of, plain_text, target_of

from topo_search import compare
from topo_search.answers import answer_batch
from topo_search.compare import Divergence, divergence, first_difference, step_mismatch, teacher_forced
from topo_search.decode.noise import gumbel_rows
from topo_search.decode.sampling import draws_at_edges
from topo_search.identity import sampling_rule
from topo_search.reference import generate_plain

TARGET, HEADS, PROMPT = target_of("llama"), heads_of("llama"), PROMPTS[0]
TOKENS = plain_text("llama", PROMPT).tokens


def changed(at: int) -> tuple[int, ...]:
    """The plain text with another token at one place, and other ones after it."""
    return TOKENS[:at] + tuple((token + 1) % VOCAB for token in TOKENS[at:])


def found_divergence(expected: Sequence[int], found: Sequence[int]) -> Divergence:
    point = divergence(TARGET, "p", PROMPT, expected, found)
    assert point is not None
    return point


@pytest.mark.parametrize(
    ("expected", "found", "index"),
    [
        ([], [], None),
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], 1),
        ([0, 2], [1, 2], 0),
        ([1, 2], [1], 1),
        ([1], [1, 2], 1),
        ([], [1], 0),
        ([1, 2, 3], [1, 5], 1),
    ],
)
def test_the_first_difference(expected: list[int], found: list[int], index: int | None) -> None:
    assert first_difference(expected, found) == index


def test_equal_texts_do_not_diverge() -> None:
    assert divergence(TARGET, "p", PROMPT, TOKENS, TOKENS) is None


@pytest.mark.parametrize("at", [0, 1, 7, NEW_TOKENS - 1])
def test_a_divergence_names_its_place_and_the_gap_of_the_two_best_scores(at: int) -> None:
    point = found_divergence(TOKENS, changed(at))
    logits = TARGET.model(torch.tensor([[*PROMPT, *TOKENS[:at]]])).logits[0, -1].sort(descending=True)
    assert (point.prompt, point.position) == ("p", at)
    assert (point.expected, point.found) == (TOKENS[at], (TOKENS[at] + 1) % VOCAB)
    assert point.gap == pytest.approx(float(logits.values[0] - logits.values[1]), abs=1e-9)
    assert int(logits.indices[0]) == TOKENS[at]


def test_only_a_gap_below_the_bound_is_a_near_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    point = found_divergence(TOKENS, changed(5))
    assert not point.near_tie
    monkeypatch.setattr(compare, "NEAR_TIE", point.gap * 1.01)
    assert found_divergence(TOKENS, changed(5)).near_tie
    monkeypatch.setattr(compare, "NEAR_TIE", point.gap * 0.99)
    assert not found_divergence(TOKENS, changed(5)).near_tie


def test_the_gap_of_a_draw_is_in_logits_and_has_its_noise() -> None:
    """MATH 2.3: the two best of score plus noise, times the temperature."""
    rule = sampling_rule(temperature=0.5, seed=4)
    drawn = generate_plain(TARGET, PROMPT, max_new_tokens=6, rule=rule, request=2).tokens
    other = (*drawn[:3], (drawn[3] + 1) % VOCAB, *drawn[4:])
    point = divergence(TARGET, "p", PROMPT, drawn, other, rule=rule, request=2)
    assert point is not None
    assert (point.position, point.expected, point.near_tie, point.filter_edge) == (3, drawn[3], False, False)
    logits = TARGET.model(torch.tensor([[*PROMPT, *drawn[:3]]])).logits[0, -1].double()
    place = torch.tensor([len(PROMPT) + 3])
    noisy = (logits / 0.5 + gumbel_rows(4, torch.tensor([2]), place, VOCAB)[0]).sort(descending=True)
    assert int(noisy.indices[0]) == drawn[3]
    assert point.gap == pytest.approx(0.5 * float(noisy.values[0] - noisy.values[1]), abs=1e-6)


@pytest.mark.parametrize(
    ("filters", "edge"),
    [({"top_k": 2}, True), ({"top_k": 1}, False), ({"top_p": 0.9}, False), ({"top_k": 3}, False)],
)
def test_only_a_token_that_rounding_takes_in_or_out_is_at_an_edge(filters: dict[str, float], edge: bool) -> None:
    """Scores 4, 1, 1 - 1e-7 and 0: between the second and the third the k-th place hangs on rounding."""
    scores = torch.tensor([[4.0, 1.0, 1.0 - 1e-7, 0.0]], dtype=torch.float64)
    found = {
        len(
            draws_at_edges(
                scores,
                sampling_rule(temperature=6.0, seed=seed, **filters),
                position=torch.tensor([5]),
                request=torch.tensor([0]),
            )
        )
        for seed in range(40)
    }
    assert found == ({1, 2} if edge else {1})


@pytest.mark.parametrize(("expected", "found"), [(TOKENS, TOKENS[:9]), (TOKENS[:9], TOKENS)])
def test_a_text_that_ends_early_or_goes_on_is_never_a_near_tie(
    expected: tuple[int, ...], found: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both texts agree up to the end of one, so no choice between two tokens explains the rest."""
    monkeypatch.setattr(compare, "NEAR_TIE", 1e9)
    point = found_divergence(expected, found)
    assert point.position == 9
    assert [point.expected, point.found].count(None) == 1
    assert not point.near_tie


def test_teacher_forcing_gives_the_states_of_the_answer() -> None:
    answer = answer_batch(TARGET, [PROMPT], max_new_tokens=9)[0]
    forced = teacher_forced(TARGET, PROMPT, answer.tokens, index=3, end="cap")
    assert (forced.tokens, forced.end, forced.prompt_index) == (answer.tokens, "cap", 3)
    assert torch.allclose(forced.states, answer.states, rtol=0, atol=1e-9)
    one = teacher_forced(TARGET, PROMPT, answer.tokens[:1], index=0, end="cap")
    assert one.states.shape == (1, TARGET.hidden_size)


@pytest.mark.parametrize(
    ("replayed", "decoded", "row", "depth"),
    [
        ([2, 0, 1], [2, 0, 3], 4, 1),
        ([2, 0, 1], [2, 0, 0], 4, 0),
        ([0, 4], [3, 1], 0, 0),
        ([1, 1], [1], 2, 0),
        ([1], [1, 2], 2, 0),
    ],
)
def test_a_mismatch_names_its_row_and_the_gap_in_rank(
    replayed: list[int], decoded: list[int], row: int, depth: int
) -> None:
    """The gap is that of the first depth at which one accepts and the other does not."""
    answer = teacher_forced(TARGET, PROMPT, TOKENS, index=0, end="cap")
    step = step_mismatch(HEADS, "p", answer, replayed, decoded)
    assert step is not None
    assert (step.prompt, step.row) == ("p", row)
    at = first_difference(replayed, decoded)
    assert at is not None
    assert step.replayed == (replayed[at] if at < len(replayed) else -1)
    assert step.decoded == (decoded[at] if at < len(decoded) else -1)
    scores = HEADS.scores(answer.states[row : row + 1], 4)[depth, 0]
    true = TOKENS[row + depth + 1]
    gaps = [abs(float(scores[other] - scores[true])) for other in range(VOCAB) if other != true]
    assert step.gap == pytest.approx(min(gaps), abs=1e-12)
    assert step.near_tie == (step.gap < compare.NEAR_TIE)


def test_steps_that_agree_are_no_mismatch() -> None:
    answer = teacher_forced(TARGET, PROMPT, TOKENS, index=0, end="cap")
    assert step_mismatch(HEADS, "p", answer, [1, 0, 2], (1, 0, 2)) is None


def test_a_mismatch_at_the_very_end_has_a_gap() -> None:
    """The last row observes one depth only."""
    short = teacher_forced(TARGET, PROMPT, TOKENS[:2], index=0, end="cap")
    step = step_mismatch(HEADS, "p", short, [0], [0, 0])
    assert step is not None
    assert step.gap >= 0


def test_plain_decoding_times_the_first_token_apart() -> None:
    plain = generate_plain(TARGET, PROMPT, max_new_tokens=6)
    assert plain.tokens == TOKENS[:6]
    assert plain.accepted == (0,) * 5
    assert plain.stats.tokens_per_step == 1.0
    assert plain.prefill_ms > 0
    assert plain.decode_ms > 0
    assert generate_plain(TARGET, PROMPT, max_new_tokens=1).accepted == ()
