from __future__ import annotations

import pytest

from topo_search.stats import DecodeStats


def test_a_depth_is_reached_when_all_above_it_were_accepted() -> None:
    """FIELD-CASES 19: matches 1, 0, 1, 0: depth 1 passed, depth 2 reached and failed, 3 and 4 never reached."""
    stats = DecodeStats.of([1])
    assert [stats.reached(depth) for depth in (1, 2, 3, 4)] == [1, 1, 0, 0]
    assert [stats.passed(depth) for depth in (1, 2, 3, 4)] == [1, 0, 0, 0]


def test_reached_and_passed_over_several_steps() -> None:
    stats = DecodeStats.of([0, 2, 1, 0, 3])
    assert stats.histogram == (2, 1, 1, 1)
    assert [stats.reached(depth) for depth in (1, 2, 3, 4, 5)] == [5, 3, 2, 1, 0]
    assert [stats.passed(depth) for depth in (1, 2, 3, 4, 5)] == [3, 2, 1, 0, 0]


def test_accepted_drafts_and_emitted_tokens_are_two_figures() -> None:
    """FIELD-CASES 31: ten steps, 15 accepted: 1.5 drafts and 2.5 tokens per step."""
    stats = DecodeStats.of([3, 1, 0, 2, 1, 0, 4, 1, 2, 1])
    assert (stats.steps, stats.accepted_tokens, stats.tokens) == (10, 15, 25)
    assert (stats.accepted_per_step, stats.tokens_per_step) == (1.5, 2.5)


def test_the_mean_is_over_all_steps_with_its_spread() -> None:
    """FIELD-CASES 32: steps accept 3, 1, 1, 1; the last one alone says 1."""
    stats = DecodeStats.of([3, 1, 1, 1])
    assert (stats.steps, stats.accepted_per_step) == (4, 1.5)
    assert stats.accepted_spread == pytest.approx(0.75**0.5)


def test_utilisation_is_by_node_and_length_by_step() -> None:
    """FIELD-CASES 33: 12 nodes, 4 steps, 6 accepted; a chain of 7 drafts whose steps emit 3.78 tokens uses 0.397."""
    stats = DecodeStats.of([3, 2, 1, 0])
    assert (stats.utilisation(12), stats.accepted_per_step, stats.tokens_per_step) == (6 / 48, 1.5, 2.5)
    chain = DecodeStats.of([3] * 78 + [2] * 22)
    assert chain.tokens_per_step == pytest.approx(3.78)
    assert chain.utilisation(7) == pytest.approx(0.397, abs=5e-4)
    assert (DecodeStats.of([]).utilisation(7), stats.utilisation(0)) == (0.0, 0.0)


def test_no_step_is_plain_decoding() -> None:
    stats = DecodeStats.of([])
    assert (stats.steps, stats.tokens, stats.tokens_per_step, stats.accepted_spread) == (0, 0, 1.0, 0.0)


def test_stats_add_up_whatever_their_depths() -> None:
    assert DecodeStats.of([0, 2]) + DecodeStats.of([1]) == DecodeStats.of([0, 2, 1])
    assert DecodeStats.of([]) + DecodeStats.of([1, 3]) == DecodeStats.of([1, 3])
