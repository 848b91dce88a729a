"""Measuring: every shape warmed up, in shuffled order, its median recorded; shapes that do not fit are skipped."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import heads_of, must_not_run, target_of, tiny_hydra
from torch import Tensor

from topo_search import device, timed_steps
from topo_search import measure as measure_module
from topo_search.cost import OK, OUT_OF_MEMORY, WHATEVER_EXPANDED, LatencyTable, expanded_by_depth
from topo_search.decode.batch import Batch
from topo_search.decode.decoder import TreeDecoder
from topo_search.decode.step import DecodeState, TreeStep
from topo_search.errors import InputError
from topo_search.files.latency_file import read_latency, write_latency
from topo_search.heads.hydra import HydraBlocks
from topo_search.heads.medusa import MedusaHeads
from topo_search.measure import MeasureGrid, disturbed, in_turn, measure
from topo_search.timed_steps import DRAFT, VERIFY, Cell, TimedSteps, timed_ms, timed_tree
from topo_search.tree import Tree

TARGET, HEADS = target_of("llama"), heads_of("llama")
WIDTHS, CONTEXTS, ROUNDS, WARM_UPS = (1, 2, 5), (4, 9), 3, 2
GRID = MeasureGrid(widths=WIDTHS, contexts=CONTEXTS, rounds=ROUNDS)
SHAPES = [(width, context) for context in CONTEXTS for width in WIDTHS]
TEXT = list(range(1, 12))
REAL_VERIFY, REAL_PROPOSE = TreeStep.verify, MedusaHeads.propose


def measured(grid: MeasureGrid = GRID, **settings: Any) -> LatencyTable:
    return measure(TARGET, HEADS, grid, TEXT, **settings)


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Tiny steps scatter wildly: nothing is timed again but where a test is about it."""
    if "again" not in request.node.name:
        monkeypatch.setattr(measure_module, "_EXTRA_SHARE", 0.0)


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
    assert set(table.draft) == {(1, depth, WHATEVER_EXPANDED) for depth in (1, 2, 3, 4)}
    for timing in (*table.verify.values(), *table.draft.values()):
        assert (timing.count, timing.status) == (ROUNDS, OK)
        assert 0 < timing.p10_ms <= timing.median_ms <= timing.p90_ms
        assert timing.mean_ms is not None and timing.p10_ms / 10 < timing.mean_ms
    assert calls == [(1, 3), (2, 3), (3, 3)]
    assert (table.mode, table.attention) == ("eager", "sdpa")
    assert (table.target, table.heads) == (TARGET.identity, HEADS.identity)
    assert table.device["threads"] == torch.get_num_threads()
    write_latency(tmp_path / "t.latency.json", table)
    assert read_latency(tmp_path / "t.latency.json").verify == table.verify


def clocked(
    monkeypatch: pytest.MonkeyPatch,
    verify_ms: Callable[[int], float],
    draft_ms: Callable[[int], float] = lambda call: 1.0,
) -> None:
    """Steps really run, but take what is told: of the n-th verify, or draft, that is timed, from 1."""
    calls: Counter[str] = Counter()

    def halves(draft: Callable[[], object], verify: Callable[[], object], device: torch.device) -> tuple[float, float]:
        draft(), verify()
        calls[VERIFY] += 1
        return 1.0, verify_ms(calls[VERIFY])

    def whole(call: Callable[[], object], device: torch.device) -> float:
        call()
        calls[DRAFT] += 1
        return draft_ms(calls[DRAFT])

    monkeypatch.setattr(timed_steps, "timed_halves", halves)
    monkeypatch.setattr(timed_steps, "timed_ms", whole)


def test_medians_are_over_rounds_and_warm_ups_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """FIELD-CASES 47: a first call 30 times too slow leaves no trace."""
    clocked(monkeypatch, lambda call: 300.0 if call <= WARM_UPS * len(SHAPES) else float(call))
    table = measured(replace(GRID, rounds=5))
    for timing in table.verify.values():
        assert timing.count == 5
        assert timing.median_ms is not None and timing.p90_ms is not None and timing.p90_ms < 300


def test_every_shape_is_warmed_up_then_timed_in_shuffled_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """FIELD-CASES 47."""
    shapes = spied_verify(monkeypatch)
    measured(replace(GRID, rounds=4))
    warm_up, timed = shapes[: -4 * len(SHAPES)], shapes[-4 * len(SHAPES) :]
    assert all(Counter(warm_up)[shape] >= WARM_UPS for shape in SHAPES)
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
    seen: set[tuple[int, ...]] = set()

    def verify(step: TreeStep, state: DecodeState) -> Tensor:
        length = state.cache.length
        assert len(state.text) == length + 1
        assert state.root.tolist() == state.text[-1:]
        fresh = TARGET.new_cache(length)
        TARGET.hidden_states(torch.tensor([state.text[:-1]]), cache=fresh)
        committed = state.cache.storage[..., :length, :]
        assert torch.allclose(committed, fresh.storage, rtol=0, atol=1e-12)
        seen.add((length, *state.text))
        return REAL_VERIFY(step, state)

    monkeypatch.setattr(TreeStep, "verify", verify)
    measured()
    assert {length for length, *_ in seen} == set(CONTEXTS)
    assert len(seen) == ROUNDS * len(CONTEXTS)  # every round has a text of its own


def test_a_step_takes_in_what_the_step_before_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafted token and the target's own: the draft context reads two states, as it does in decoding."""
    counts: Counter[int] = Counter()
    real = TreeStep.draft

    def draft(step: TreeStep, state: DecodeState) -> None:
        counts[state.fresh.shape[0]] += 1
        real(step, state)

    monkeypatch.setattr(TreeStep, "draft", draft)
    measured()
    assert set(counts) == {2}
    counts.clear()
    measured(replace(GRID, contexts=(1,)))
    assert set(counts) == {1}  # there is no more text than that


def test_the_whole_step_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `TreeDecoder` does between two steps, checking for the end included, lies within the timed halves."""
    log: list[str] = []

    def logged(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            log.append(name)
            return real(*args, **named)

        return call

    def halves(draft: Callable[[], object], verify: Callable[[], object], device: torch.device) -> tuple[float, float]:
        log.append("start")
        draft(), verify()
        log.append("stop")
        return 1.0, 1.0

    monkeypatch.setattr(timed_steps, "timed_halves", halves)
    monkeypatch.setattr(timed_steps, "until_end", logged("end", timed_steps.until_end))
    for name in ("draft", "verify"):
        monkeypatch.setattr(TreeStep, name, logged(name, getattr(TreeStep, name)))
    measured(MeasureGrid(widths=(1,), contexts=(4,), rounds=1))
    first = log.index("start")
    assert log[first : first + 5] == ["start", "draft", "verify", "end", "stop"]


def test_the_clock_stops_between_draft_and_verify() -> None:
    draft_ms, verify_ms = timed_steps.timed_halves(
        lambda: time.sleep(0.01), lambda: time.sleep(0.03), torch.device("cpu")
    )
    assert 10 <= draft_ms < 25
    assert 30 <= verify_ms < 60


def test_a_draft_is_timed_right_after_a_verify_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in decoding: its weights were not read just before. Five drafts for one verify need passes of their own."""
    log: list[str] = []
    real = TimedSteps._time_verify

    def verify(steps: TimedSteps, cell: Cell) -> float:
        log.append(VERIFY)
        return real(steps, cell)

    monkeypatch.setattr(TimedSteps, "_time_verify", verify)
    monkeypatch.setattr(timed_steps, "timed_ms", lambda call, device: (log.append(DRAFT), call(), 1.0)[2])
    measured(MeasureGrid(widths=(1,), contexts=(4,), rounds=2))
    assert log.count(DRAFT) == 4 * (WARM_UPS + 2)
    assert all(before == VERIFY for before, now in itertools.pairwise(log) if now == DRAFT)


@pytest.mark.parametrize(("verifies", "drafts"), [(5, 3), (3, 5), (4, 4), (1, 0)])
def test_turns_hold_every_cell_and_part_the_drafts(verifies: int, drafts: int) -> None:
    cells = [Cell(VERIFY, 1, 4, n + 1) for n in range(verifies)] + [Cell(DRAFT, 1, n + 1, 1) for n in range(drafts)]
    orders = {tuple(in_turn(cells, random.Random(seed))) for seed in range(20)}
    assert len(orders) > 1 or len(cells) == 1
    for order in orders:
        assert sorted(order) == sorted(cells)
        touching = sum(a.kind == b.kind == DRAFT for a, b in itertools.pairwise(order))
        assert touching == max(0, drafts - verifies)


def test_width_1_runs_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """MATH 4: plain decoding, which every figure is compared with, pays for no draft."""
    widths: Counter[int] = Counter()

    def propose(heads: MedusaHeads, features: Tensor, roots: Tensor, plan: Any, *noise: Any) -> Tensor:
        widths[plan.verify_width] += 1
        return REAL_PROPOSE(heads, features, roots, plan, *noise)

    monkeypatch.setattr(MedusaHeads, "propose", propose)
    measured()
    assert 1 not in widths
    assert widths[2] >= len(CONTEXTS) * (WARM_UPS + ROUNDS)
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
    assert Counter(width for width, _ in shapes)[5] == len(CONTEXTS)  # once each, then never again
    assert table.widths() == [1, 2]


def test_memory_that_ends_in_a_later_round_is_recorded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[int] = Counter()

    def full(width: int) -> None:
        calls[width] += 1
        if width == 2 and calls[width] > 2 * WARM_UPS + 3:  # in a later round
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
    assert Counter(shapes)[5, 9] == WARM_UPS + 1
    assert {timing.count for timing in table.verify.values()} == {ROUNDS}
    assert not partial.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"key": "other", "samples": {}, "taken_again": 0}', "is of a measurement with other settings; delete it"),
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
        ({"batches": (1, 0)}, r"batches are \(1, 0\); each must be at least 1"),
        ({"rounds": 0}, "rounds are"),
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
    with pytest.raises(InputError, match="has no token"):
        measure(TARGET, HEADS, GRID, [])


def test_times_are_milliseconds() -> None:
    assert timed_ms(lambda: torch.ones(3).sum(), torch.device("cpu")) < 1000
    assert timed_ms(lambda: [None for _ in range(10**6)], torch.device("cpu")) > 1


# Heads that pay for expanded nodes


HYDRA = tiny_hydra(TARGET)
BY_EXPANDED = MeasureGrid(widths=(1, 9), contexts=(4,), rounds=2, expanded=(1, 2, 4))
REAL_TREES = (
    Tree.chain(4),
    Tree(((0,), (1,), (2,), (0, 0), (1, 0), (2, 0), (0, 0, 0))),
    Tree(((0,), (1,), (2,), (3,), (0, 0), (1, 0), (2, 0), (3, 1))),
)


def test_drafts_are_timed_by_depth_and_expanded_nodes() -> None:
    table = measure(TARGET, HYDRA, BY_EXPANDED, TEXT)
    assert set(table.draft) == {(1, 1, 1), *((1, depth, n) for depth in (2, 3, 4) for n in (1, 2, 4))}
    assert all(timing.count == 2 for timing in table.draft.values())
    for tree in REAL_TREES:
        assert table.draft_times().of(tree) > 0


def test_a_timed_draft_expands_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = TimedSteps.of(TARGET, HYDRA, TEXT, batches=(1,), contexts=(4,), widths=(1,), expanded=(1, 2, 4))
    for cell, tree in steps.trees.items():
        if cell.kind == DRAFT:
            assert expanded_by_depth(tree) == [1, *[cell.size] * (cell.first - 1)]
            assert all(max(path[-1] for path in tree.paths if len(path) == d + 1) >= 9 for d in range(tree.depth))


def test_the_price_of_a_real_tree_is_the_time_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that counts rows: each call over n expanded nodes takes 1 + n / 2, and the price of any tree is that."""
    spent = 0.0

    def head(blocks: HydraBlocks, number: int, features: Tensor, path: Tensor) -> Tensor:
        nonlocal spent
        spent += 1.0 + features.shape[-2] / 2
        return real(blocks, number, features, path)

    def clock(call: Callable[[], object], device: torch.device) -> float:
        nonlocal spent
        spent = 0.0
        call()
        return spent

    real = HydraBlocks.head
    monkeypatch.setattr(HydraBlocks, "head", head)
    monkeypatch.setattr(timed_steps, "timed_ms", clock)
    times = measure(TARGET, HYDRA, BY_EXPANDED, TEXT).draft_times()
    for tree in REAL_TREES:
        expected = sum(1 + n / 2 for n in expanded_by_depth(tree))
        assert times.of(tree) == pytest.approx(expected)
    assert times.of(REAL_TREES[1]) > times.of(Tree.chain(3)) + 0.9  # the narrow chain's price is too low for it
    decoder = TreeDecoder(TARGET, HYDRA, REAL_TREES[1], run_probe=False)
    spent = 0.0
    steps = len(decoder.generate([1, 2, 3], max_new_tokens=8).accepted)
    assert spent == pytest.approx(steps * times.of(REAL_TREES[1]))  # what serving spends


def test_grids_reach_what_a_tree_can_expand() -> None:
    assert MeasureGrid.quick(max_width=64).expanded == (1, 2, 4, 8, 16, 31)
    assert MeasureGrid.full(max_width=2).expanded == (1,)
    widest = Tree(tuple((r,) for r in range(31)) + tuple((r, 0) for r in range(31)))
    assert widest.verify_width <= 64
    assert expanded_by_depth(widest)[1] == max(MeasureGrid.full(max_width=64).expanded)


# Batches


def test_batches_are_timed_as_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[tuple[int, int, int]] = Counter()
    real = Batch.verify

    def verify(batch: Batch, tokens: Tensor) -> None:
        assert len({tuple(row.text) for row in batch.rows}) == len(batch.rows) == tokens.shape[0]  # other text each
        assert tokens[:, 0].tolist() == [row.text[-1] for row in batch.rows]
        seen[len(batch.rows), batch.cache.longest, tokens.shape[1]] += 1
        real(batch, tokens)
        assert len(batch.rows) == tokens.shape[0]  # every row goes on

    monkeypatch.setattr(Batch, "verify", verify)
    table = measured(replace(GRID, batches=(1, 3)))
    assert set(table.verify) == {(b, c, w) for b in (1, 3) for c in CONTEXTS for w in WIDTHS}
    assert set(table.draft) == {(b, depth, WHATEVER_EXPANDED) for b in (1, 3) for depth in (1, 2, 3, 4)}
    assert set(seen) == {(3, c, w) for c in CONTEXTS for w in WIDTHS}
    assert table.step_ms(timed_tree(4, 4), batch=3).shape == (2,)


def test_a_batch_starts_from_its_own_text_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one shape wrote and dropped must not be another's prefix."""
    real = Batch.verify

    def verify(batch: Batch, tokens: Tensor) -> None:
        for index, row in enumerate(batch.rows):
            fresh = TARGET.new_cache(len(row.text) - 1)
            TARGET.hidden_states(torch.tensor([row.text[:-1]]), cache=fresh)
            committed = batch.cache.storage[:, :, index : index + 1, :, : len(row.text) - 1]
            assert torch.allclose(committed, fresh.storage, rtol=0, atol=1e-12)
        real(batch, tokens)

    monkeypatch.setattr(Batch, "verify", verify)
    measured(replace(GRID, batches=(2,)))


def test_hydra_pays_for_expanded_nodes_at_every_batch() -> None:
    table = measure(TARGET, HYDRA, replace(BY_EXPANDED, batches=(2,), rounds=1), TEXT)
    assert {batch for batch, _, _ in table.draft} == {2}
    assert table.draft_times(2).of(REAL_TREES[2]) > 0


def test_a_batch_that_does_not_fit_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(timed_steps, "RowCache", full)
    table = measured(replace(GRID, batches=(1, 2)))
    assert table.widths() == list(WIDTHS)
    assert table.widths(2) == []
    assert {timing.status for key, timing in table.verify.items() if key[0] == 2} == {OUT_OF_MEMORY}


# Stability


def test_outliers_are_five_deviations_above_the_median() -> None:
    assert disturbed([10.0, 10.1, 9.9, 10.05, 9.95]) == []
    assert disturbed([10.0, 10.1, 30.0, 9.9, 12.0]) == [4, 2]
    assert disturbed([10.0, 10.0, 10.0, 10.4]) == []  # agreeing by chance makes no outlier of 4 %
    assert disturbed([10.0, 2.0, 10.1, 9.9]) == []  # too fast is no disturbance


def test_a_disturbed_time_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """FIELD-CASES 48: one pause of 30 times a step must leave neither median, spread nor mean."""
    real, rounds = TimedSteps._time_verify, 5
    calls: Counter[int] = Counter()

    def verify(steps: TimedSteps, cell: Cell) -> float:
        real(steps, cell)
        calls[cell.size] += 1
        pauses = cell.size == 2 and calls[2] == WARM_UPS + 3
        return 3000.0 if pauses else 100.0 + 0.1 * (calls[cell.size] % 3)

    monkeypatch.setattr(TimedSteps, "_time_verify", verify)
    monkeypatch.setattr(timed_steps, "timed_ms", lambda call, device: 1.0)
    table = measured(MeasureGrid(widths=(1, 2), contexts=(4,), rounds=rounds))
    assert table.provenance["timing"]["taken_again"] == 1
    for timing in table.verify.values():
        assert timing.count == rounds
        assert timing.mean_ms == pytest.approx(100.1, abs=0.1)
        assert timing.p90_ms == pytest.approx(100.1, abs=0.2)


def test_a_scattered_shape_is_timed_again_and_keeps_all_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose times jump between two levels gets more rounds; its scatter is not made to look smaller."""
    real = TimedSteps._time_verify
    calls: Counter[int] = Counter()

    def verify(steps: TimedSteps, cell: Cell) -> float:
        real(steps, cell)
        calls[cell.size] += 1
        return 100.0 + (40.0 * (calls[5] % 2) if cell.size == 5 else 0.2 * (calls[cell.size] % 2))

    monkeypatch.setattr(TimedSteps, "_time_verify", verify)
    monkeypatch.setattr(timed_steps, "timed_ms", lambda call, device: 1.0)
    table = measured(MeasureGrid(widths=(1, 2, 3, 4, 5), contexts=(4,), rounds=6))
    again = table.provenance["timing"]["taken_again"]
    assert again > 0
    assert table.verify[1, 4, 5].count == 6 + again
    assert table.verify[1, 4, 5].p90_ms == 140.0
    assert {table.verify[1, 4, width].count for width in (1, 2, 3, 4)} == {6}


def test_timing_again_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where everything scatters, extra time is spent on a fifth of all timings at most."""
    noise = random.Random(0)
    clocked(monkeypatch, lambda call: 10.0 * noise.paretovariate(0.7), lambda call: noise.paretovariate(0.7))
    table = measured(replace(GRID, rounds=10))
    counted = sum(timing.count for timing in (*table.verify.values(), *table.draft.values()))
    assert 0 < table.provenance["timing"]["taken_again"] <= 0.2 * 10 * 10
    assert 100 <= counted <= 120


def test_two_runs_agree_within_their_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of 3 % and a pause now and then: medians differ by less than either run's spread says."""

    def run(seed: int) -> LatencyTable:
        noise = random.Random(seed)
        clocked(monkeypatch, lambda call: 100.0 * noise.gauss(1, 0.03) * (8 if noise.random() < 0.03 else 1))
        return measured(replace(GRID, rounds=9))

    monkeypatch.setattr(measure_module, "_EXTRA_SHARE", 0.2)
    one, other = run(1), run(2)
    for key, timing in one.verify.items():
        low = min(timing.p10_ms or 0, other.verify[key].p10_ms or 0)
        high = max(timing.p90_ms or 0, other.verify[key].p90_ms or 0)
        assert high / low < 1.25
        assert abs((timing.median_ms or 0) - (other.verify[key].median_ms or 0)) < high - low


def test_what_the_host_did_meanwhile_is_recorded(tmp_path: Path) -> None:
    table = measured(provenance={"by": "test"})
    host = table.provenance["timing"]["host"]
    assert table.provenance["by"] == "test"
    assert host["other_cpu_share"] is None or 0 <= host["other_cpu_share"] <= 1
    write_latency(tmp_path / "t.latency.json", table)
    assert read_latency(tmp_path / "t.latency.json").provenance["timing"] == table.provenance["timing"]


def test_other_work_is_told_from_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 busy seconds of 10 on two cores, 5 of them ours: others took 7 of 20."""
    busy, own, clock = iter([100.0, 112.0]), iter([3.0, 8.0]), iter([0.0, 10.0])
    monkeypatch.setattr(device, "_busy_seconds", lambda: next(busy))
    monkeypatch.setattr(device.time, "process_time", lambda: next(own))
    monkeypatch.setattr(device.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(device.os, "cpu_count", lambda: 2)
    assert device.HostWatch.start().load().other_cpu_share == 0.35
    monkeypatch.setattr(device, "_busy_seconds", lambda: None)
    for name in ("process_time", "monotonic"):
        monkeypatch.setattr(device.time, name, lambda: 1.0)
    assert device.HostWatch.start().load().other_cpu_share is None
