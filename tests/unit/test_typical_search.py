"""From accept masks to a tree: sizes by step time, figures on prompts that did not choose, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from factories import latency_table
from test_coverage import masks

from topo_search.accepts import AcceptTrace
from topo_search.errors import InputError
from topo_search.search.choose import Settings
from topo_search.search.typical import assess_typical, chosen_typical
from topo_search.tree import Path, Tree

FILL = Settings(budget=3, objective="tokens-per-step", resamples=200)


def drawn(prompts: int = 60, seed: int = 0) -> AcceptTrace:
    """(0) and (1) together on 90 % of steps, (0, 0) on 50 %."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(prompts):
        step: set[Path] = {(0,), (1,)} if rng.random() < 0.9 else set()
        steps.append(step | {(0, 0)} if step and rng.random() < 0.55 else step)
    return masks(*steps)


def test_the_tree_that_covers_most_is_chosen_not_the_largest_sum() -> None:
    found = assess_typical(drawn(), None, FILL)
    assert found["best tree"].tree == Tree(((0,), (0, 0)))
    assert found["best chain"].tree == Tree.chain(2)
    assert found.recommended == "best tree"
    assert found["plain"].tokens_per_step_own == 1.0


def test_figures_are_those_of_prompts_that_did_not_choose() -> None:
    """With noise only, the winner's own score is too high; the cross-fitted one is lower and has an interval."""
    rng = np.random.default_rng(3)
    wide = Tree.dense([6])
    trace = masks(*[{path for path in wide.paths if rng.random() < 0.15} for _ in range(40)], wide=wide)
    found = assess_typical(trace, None, Settings(budget=2, objective="tokens-per-step", resamples=200))["best tree"]
    assert found.tokens_per_step is not None and found.tokens_per_step.interval is not None
    assert found.tokens_per_step.value < found.tokens_per_step_own
    interval = found.tokens_per_step.interval
    assert interval.low < found.tokens_per_step.value < interval.high
    assert found.speedup is None


def test_step_times_choose_the_size_and_plain_decoding_may_win() -> None:
    trace, settings = drawn(), Settings(budget=4, resamples=200)
    cheap = assess_typical(trace, latency_table({1: 10.0, 2: 10.5, 3: 11.0, 4: 60.0}), settings)
    assert cheap["best tree"].tree == Tree(((0,), (0, 0)))
    assert cheap.recommended in ("best chain", "best tree")
    assert cheap["best tree"].step_ms == pytest.approx(11.0)
    speedup = cheap["best tree"].speedup
    assert speedup is not None
    assert speedup.value == pytest.approx(cheap["best tree"].tokens_per_step.value * 10 / 11)  # type: ignore[union-attr]
    dear = assess_typical(trace, latency_table({1: 10.0, 2: 90.0, 3: 90.0, 4: 90.0}), settings)
    assert dear.recommended == "plain"


def test_a_width_that_was_not_measured_cannot_win() -> None:
    trees = chosen_typical(drawn(), latency_table({1: 10.0, 2: 10.5}), Settings(budget=4))
    assert all(tree.verify_width <= 2 for tree in trees)


def test_caps_hold() -> None:
    trees = chosen_typical(drawn(), None, Settings(budget=4, objective="tokens-per-step", max_depth=1, max_rank=0))
    assert [tree.paths for tree in trees] == [(), ((0,),), ((0,),)]


def test_one_prompt_gives_no_figure_on_others() -> None:
    found = assess_typical(masks({(0,)}), None, FILL)
    assert found["best tree"].tokens_per_step is None
    assert found["best tree"].tokens_per_step_own == 2.0


def test_masks_without_a_step_and_searches_without_times_are_refused() -> None:
    empty = masks({(0,)}).select(lambda prompt: False)
    with pytest.raises(InputError, match="have no step"):
        assess_typical(empty, None, FILL)
    with pytest.raises(InputError, match="No latency table"):
        assess_typical(drawn(), None, Settings(budget=4))
