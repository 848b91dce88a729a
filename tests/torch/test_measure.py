"""Measuring: every shape warmed up, in shuffled order, its median recorded; shapes that do not fit are skipped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import heads_of, must_not_run, target_of
from torch import Tensor

from topo_search import measure as measure_module
from topo_search.cost import OK, OUT_OF_MEMORY, LatencyTable
from topo_search.decode.decoder import TreeDecoder
from topo_search.decode.step import DecodeState, TreeStep
from topo_search.errors import InputError
from topo_search.files.latency_file import read_latency, write_latency
from topo_search.heads.medusa import MedusaHeads
from topo_search.measure import MeasureGrid, measure, timed_ms, timed_tree
from topo_search.tree import Tree

TARGET, HEADS = target_of("llama"), heads_of("llama")
WIDTHS, CONTEXTS, ROUNDS, WARM_UPS = (1, 2, 5), (4, 9), 3, 2
GRID = MeasureGrid(widths=WIDTHS, contexts=CONTEXTS, rounds=ROUNDS)
SHAPES = [(width, context) for context in CONTEXTS for width in WIDTHS]
TEXT = list(range(1, 12))
REAL_VERIFY, REAL_PROPOSE = TreeStep.verify, MedusaHeads.propose


def measured(grid: MeasureGrid = GRID, **settings: Any) -> LatencyTable:
    return measure(TARGET, HEADS, grid, TEXT, **settings)


def spied_verify(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], object] = lambda width: None) -> list[Any]:
    """(width, context) of every verify pass from now on; `before` runs first."""
    shapes: list[tuple[int, int]] = []

    def verify(step: TreeStep, state: DecodeState) -> Tensor:
        shapes.append((step.plan.verify_width, state.cache.length))
        before(step.plan.verify_width)
        return REAL_VERIFY(step, state)

    monkeypatch.setattr(TreeStep, "verify", verify)
    return shapes


def test_every_shape_has_a_time_and_its_spread(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    table = measured(provenance={"by": "test"}, progress=lambda *done: calls.append(done))
    assert set(table.verify) == {(1, context, width) for width, context in SHAPES}
    assert set(table.draft) == {(1, depth) for depth in (1, 2, 3, 4)}
    for timing in (*table.verify.values(), *table.draft.values()):
        assert (timing.count, timing.status) == (ROUNDS, OK)
        assert 0 < timing.p10_ms <= timing.median_ms <= timing.p90_ms
    assert calls == [(1, 3), (2, 3), (3, 3)]
    assert (table.mode, table.attention) == ("eager", "sdpa")
    assert (table.target, table.heads) == (TARGET.identity, HEADS.identity)
    assert table.device["threads"] == torch.get_num_threads()
    write_latency(tmp_path / "t.latency.json", table)
    assert read_latency(tmp_path / "t.latency.json").verify == table.verify


def test_medians_are_over_rounds_and_warm_ups_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """FIELD-CASES 47: a first call 30 times too slow leaves no trace."""
    calls: Counter[int] = Counter()

    def clock(call: Callable[[], object], device: torch.device) -> float:
        call()
        calls["all"] += 1  # type: ignore[index]
        warming_up = calls["all"] <= WARM_UPS * (len(SHAPES) + 4)  # type: ignore[index]
        return 300.0 if warming_up else float(calls["all"])  # type: ignore[index]

    monkeypatch.setattr(measure_module, "timed_ms", clock)
    table = measured(MeasureGrid(widths=(1,), contexts=(4,), rounds=5))
    times = [timing.median_ms for timing in (*table.verify.values(), *table.draft.values())]
    assert all(time is not None and time < 300 for time in times)
    assert [timing.count for timing in table.verify.values()] == [5]


def test_every_shape_is_warmed_up_then_timed_in_shuffled_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """FIELD-CASES 47."""
    shapes = spied_verify(monkeypatch)
    measured(replace(GRID, rounds=4))
    warm_up, timed = shapes[: WARM_UPS * len(SHAPES)], shapes[WARM_UPS * len(SHAPES) :]
    assert Counter(warm_up) == dict.fromkeys(SHAPES, WARM_UPS)
    rounds = [tuple(timed[at : at + len(SHAPES)]) for at in range(0, len(timed), len(SHAPES))]
    assert len(rounds) == 4
    assert all(sorted(order) == sorted(SHAPES) for order in rounds)
    assert len(set(rounds)) > 1
    first = list(shapes)
    shapes.clear()
    measured(replace(GRID, rounds=4))
    assert shapes == first  # the seed decides the order
    shapes.clear()
    measured(replace(GRID, rounds=4, seed=1))
    assert shapes != first


def test_a_step_is_timed_over_the_text_of_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short context's step writes into the slots of a longer one, whose text must be put back."""
    fresh = TARGET.new_cache(len(TEXT))
    TARGET.hidden_states(torch.tensor([TEXT]), cache=fresh)
    seen: set[int] = set()

    def verify(step: TreeStep, state: DecodeState) -> Tensor:
        committed = state.cache.storage[..., : state.cache.length, :]
        assert torch.allclose(committed, fresh.storage[..., : state.cache.length, :], rtol=0, atol=1e-12)
        assert state.root.tolist() == [TEXT[state.cache.length]]
        seen.add(state.cache.length)
        return REAL_VERIFY(step, state)

    monkeypatch.setattr(TreeStep, "verify", verify)
    measured()
    assert seen == set(CONTEXTS)


def test_width_1_runs_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """MATH 4: plain decoding, which every figure is compared with, pays for no draft."""
    widths: Counter[int] = Counter()

    def propose(heads: MedusaHeads, features: Tensor, roots: Tensor, plan: Any) -> Tensor:
        widths[plan.verify_width] += 1
        return REAL_PROPOSE(heads, features, roots, plan)

    monkeypatch.setattr(MedusaHeads, "propose", propose)
    measured()
    assert 1 not in widths
    assert widths[2] == widths[5] == len(CONTEXTS) * (WARM_UPS + ROUNDS)
    monkeypatch.setattr(MedusaHeads, "propose", must_not_run)
    TreeDecoder(TARGET, HEADS, Tree(()), run_probe=False).generate([1, 2], max_new_tokens=4)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError(), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_a_width_that_runs_out_of_memory_is_recorded_and_skipped(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(width: int) -> None:
        if width == 5:
            raise error

    shapes = spied_verify(monkeypatch, full)
    table = measured()
    for width, context in SHAPES:
        timing = table.verify[1, context, width]
        assert (timing.status, timing.count) == ((OUT_OF_MEMORY, 0) if width == 5 else (OK, ROUNDS))
        assert (timing.median_ms is None) == (width == 5)
    assert Counter(width for width, _ in shapes)[5] == WARM_UPS * len(CONTEXTS)
    assert table.widths() == [1, 2]


def test_memory_that_ends_in_a_later_round_is_recorded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[int] = Counter()

    def full(width: int) -> None:
        calls[width] += 1
        if width == 2 and calls[width] > 2 * WARM_UPS + 3:
            raise torch.OutOfMemoryError

    spied_verify(monkeypatch, full)
    table = measured()
    assert {timing.status for (_, _, width), timing in table.verify.items() if width == 2} == {OUT_OF_MEMORY}
    assert table.widths() == [1, 5]


def test_a_killed_run_continues_with_the_rounds_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = tmp_path / "t.latency.json.part"

    def kill(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(partial=partial, progress=kill)
    kept = json.loads(partial.read_text())["samples"]
    assert {len(times) for times in kept.values()} == {2}
    shapes, rounds = spied_verify(monkeypatch), []
    table = measured(partial=partial, progress=lambda done, total: rounds.append((done, total)))
    assert rounds == [(3, 3)]
    assert len(shapes) == (WARM_UPS + 1) * len(SHAPES)
    assert {timing.count for timing in table.verify.values()} == {ROUNDS}
    assert not partial.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"key": "other", "samples": {}}', "is of a measurement with other settings; delete it"),
        ("{", "is no unfinished measurement; delete it"),
        ("[]", "is no unfinished measurement; delete it"),
        ("{}", "is no unfinished measurement; delete it"),
    ],
)
def test_a_partial_file_of_something_else_is_refused(content: str, message: str, tmp_path: Path) -> None:
    partial = tmp_path / "t.latency.json.part"
    partial.write_text(content)
    with pytest.raises(InputError, match=message):
        measured(partial=partial)


def test_the_rounds_of_other_settings_are_refused(tmp_path: Path) -> None:
    partial = tmp_path / "t.latency.json.part"

    def kill(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(partial=partial, progress=kill)
    for other in (replace(GRID, widths=(1, 2)), replace(GRID, contexts=(4,)), replace(GRID, seed=5)):
        with pytest.raises(InputError, match="is of a measurement with other settings"):
            measured(other, partial=partial)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"widths": (2, 3)}, "widths must start at 1: width 1 is plain decoding"),
        ({"widths": (0, 1)}, "widths must start at 1"),
        ({"contexts": (4, 1020)}, r"contexts \(4, 1020\) must lie between 1 and the target's positions \(1024\)"),
        ({"contexts": (0, 4)}, "must lie between 1"),
    ],
)
def test_grids_that_cannot_be_measured_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        measured(replace(GRID, **changes))


def test_grids() -> None:
    assert MeasureGrid.full(max_width=5).widths == (1, 2, 3, 4, 5)
    quick = MeasureGrid.quick(max_width=40).widths
    assert quick[0] == 1
    assert quick[-1] == 40
    assert {15, 16, 17, 31, 32, 33} <= set(quick)
    assert list(quick) == sorted(set(quick))


@pytest.mark.parametrize("nodes", [0, 1, 4, 20, 63, 200])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_timed_trees_have_the_width_asked_for(nodes: int, depth: int) -> None:
    """Else a width's time would be that of a narrower step."""
    tree = timed_tree(nodes, depth)
    assert tree.num_draft_nodes == nodes
    assert tree.depth <= depth
    assert (len(tree.leaves) > 1) == (nodes > 2 or (depth == 1 and nodes > 1))


def test_a_shorter_text_is_repeated() -> None:
    table = measure(TARGET, HEADS, MeasureGrid(widths=(1,), contexts=(30,), rounds=1), [3, 4])
    assert table.verify[1, 30, 1].count == 1


def test_times_are_milliseconds() -> None:
    assert timed_ms(lambda: torch.ones(3).sum(), torch.device("cpu")) < 1000
    assert timed_ms(lambda: [None for _ in range(10**6)], torch.device("cpu")) > 1
