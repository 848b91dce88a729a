"""One ranking for calibration and decoder: larger scores first, equal ones by lower id (MATH section 1, tie rule)."""

from __future__ import annotations

import pytest
import torch
from factories import repeatable
from hypothesis import given
from hypothesis import strategies as st

from topo_search.ranking import _SPARE, _among_candidates, _by_unique_keys, best_token, top_tokens

INF = float("inf")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FEW_SCORES = (-INF, -2.0, -1e-3, -0.0, 0.0, 1e-3, 0.5, 1.0, 1.0 + 2**-20, 2.0, INF)


def by_definition(row: torch.Tensor, count: int) -> list[int]:
    """Rank = number of larger scores + number of equal scores with a smaller id."""
    scores = row.tolist()
    ranks = [sum(other > score for other in scores) + scores[:token].count(score) for token, score in enumerate(scores)]
    return [ranks.index(rank) for rank in range(count)]


def assert_ranked(scores: torch.Tensor, count: int) -> None:
    expected = [by_definition(row, count) for row in scores]
    assert top_tokens(scores, count).tolist() == expected
    assert best_token(scores).tolist() == [row[0] for row in expected]


@st.composite
def tied_rows(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Rows of few distinct scores, on either side of the fast path's size, and a count."""
    vocab = draw(st.integers(1, 48))
    score = st.sampled_from(FEW_SCORES)
    rows = draw(st.lists(st.lists(score, min_size=vocab, max_size=vocab), min_size=1, max_size=3))
    return torch.tensor(rows).to(draw(st.sampled_from(DTYPES))), draw(st.integers(1, vocab))


@repeatable
@given(case=tied_rows())
def test_ranks_are_those_of_the_definition(case: tuple[torch.Tensor, int]) -> None:
    assert_ranked(*case)


@repeatable
@given(case=tied_rows())
def test_both_code_paths_agree_with_the_definition(case: tuple[torch.Tensor, int]) -> None:
    scores, count = case[0].float(), case[1]
    expected = [by_definition(row, count) for row in scores]
    assert _by_unique_keys(scores, count).tolist() == expected
    if count + _SPARE < scores.shape[-1]:
        fast = _among_candidates(scores, count)
        assert fast is None or fast.tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 10, 32])
def test_drawn_scores_of_every_precision(dtype: torch.dtype, count: int) -> None:
    """In bf16 most rows of this size have a tie among the first ten."""
    assert_ranked(torch.randn(4, 400).to(dtype), count)


def test_ordinary_scores_are_settled_among_the_candidates() -> None:
    scores = torch.randn(3, 500)
    found = _among_candidates(scores, 32)
    assert found is not None
    assert torch.equal(found, _by_unique_keys(scores, 32))


@pytest.mark.parametrize("beyond", [1, 5, 60])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_that_reach_past_the_candidates(dtype: torch.dtype, beyond: int) -> None:
    """`torch.topk` may then return the wrong set: the lowest ids must win."""
    count = 4
    scores = torch.zeros(1, 100, dtype=dtype)
    scores[0, -(count + _SPARE + beyond) :] = 1.0
    if dtype == torch.float32:
        assert _among_candidates(scores, count) is None
    assert_ranked(scores, count)


def test_a_tie_at_the_last_wanted_rank_is_settled_within_the_candidates() -> None:
    scores = torch.arange(100, 0, -1).float()[None]
    scores[0, 50] = scores[0, 3]  # the fourth place is shared by ids 3 and 50
    found = _among_candidates(scores, 4)
    assert found is not None
    assert found.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [6, 40])
def test_negative_zero_equals_zero(dtype: torch.dtype, vocab: int) -> None:
    scores = torch.full((2, vocab), -1.0, dtype=dtype)
    scores[0, 1:5] = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    scores[1, 1:5] = torch.tensor([0.0, -0.0, 0.0, -0.0])
    assert top_tokens(scores, 4).tolist() == [[1, 2, 3, 4], [1, 2, 3, 4]]
    assert best_token(scores).tolist() == [1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_minus_infinity_comes_last_by_id(dtype: torch.dtype) -> None:
    scores = torch.full((1, 30), -INF, dtype=dtype)
    scores[0, [7, 20]] = torch.tensor([-1e4, 2.0], dtype=dtype)
    assert top_tokens(scores, 5).tolist() == [[20, 7, 0, 1, 2]]


def test_float64_is_not_rounded_to_fp32() -> None:
    scores = torch.zeros(1, 40, dtype=torch.float64)
    scores[0, 30] = 1e-12
    assert top_tokens(1.0 + scores, 2).tolist() == [[30, 0]]


def test_any_leading_shape() -> None:
    scores = torch.randn(2, 3, 50)
    found = top_tokens(scores, 5)
    assert found.shape == (2, 3, 5)
    assert found[1, 2].tolist() == by_definition(scores[1, 2], 5)
    assert top_tokens(scores[0, 0], 5).tolist() == by_definition(scores[0, 0], 5)
    assert best_token(scores)[0, 1] == by_definition(scores[0, 1], 1)[0]


@pytest.mark.parametrize("vocab", [8192, 8224, 8193])
def test_the_best_of_a_wide_vocabulary_is_that_of_argmax(vocab: int) -> None:
    """By blocks where they divide the vocabulary: ties in and across blocks, infinities, and what is no number."""
    drawn = torch.Generator().manual_seed(3)
    scores = torch.randint(-40, 3, (2, 12, vocab), generator=drawn).float()
    scores[0, 0], scores[0, 1, 5000], scores[0, 2, [70, 4000]], scores[0, 3, 300] = -INF, 9.0, 9.0, INF
    scores[0, 4, [4500, 8000]], scores[0, 5, vocab - 1] = float("nan"), float("nan")
    for dtype in DTYPES:
        assert torch.equal(best_token(scores.to(dtype)), scores.to(dtype).argmax(dim=-1))
        assert int(best_token(scores[0, 2].to(dtype))) == 70
