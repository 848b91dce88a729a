"""The measured objective: paired passes, equal text, a winner that must win again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from models import PROMPTS, TREES, encoded, heads_of, target_of

from topo_search.decode.decoder import Decoded, TreeDecoder
from topo_search.errors import CheckError, InputError
from topo_search.estimates import independent
from topo_search.race_objective import RaceObjective
from topo_search.search.study import Arm, Hopeless, Space, StudySettings, run_study
from topo_search.tree import Tree

TARGET, HEADS = target_of("llama"), heads_of("llama")
SEED = Tree.chain(2)


def race(**changes: object) -> RaceObjective:
    settings = {"prompts": encoded(*PROMPTS[:2]), "seed": SEED, "max_new_tokens": 8, "repeats": 2} | changes
    return RaceObjective(target=TARGET, heads=HEADS, **settings)  # type: ignore[arg-type]


def ignore(step: int, value: float) -> None:
    """A report that lets everything go on."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, float]]:
    """Milliseconds per answer by the decoder's number of nodes, instead of the real ones."""
    times: dict[int, float] = {}
    generate = TreeDecoder.generate

    def timed(self: TreeDecoder, *args: object, **kwargs: object) -> Decoded:
        run = generate(self, *args, **kwargs)  # type: ignore[arg-type]
        ms = times[self.tree.num_draft_nodes]
        return Decoded(tokens=run.tokens, end=run.end, accepted=run.accepted, prefill_ms=0.0, decode_ms=ms)

    monkeypatch.setattr(TreeDecoder, "generate", timed)
    yield times


def test_the_value_is_the_ratio_to_the_seed(clock: dict[int, float]) -> None:
    clock.update({2: 10.0, 21: 8.0})
    rounds: list[tuple[int, float]] = []
    value = race()(TREES["dense"], lambda step, so_far: rounds.append((step, so_far)))
    assert value == pytest.approx(1.25)
    assert rounds == [(0, pytest.approx(1.25)), (1, pytest.approx(1.25))]
    assert race()(SEED, ignore) == 1.0


def test_a_hopeless_tree_stops_after_a_pass() -> None:
    passes: list[int] = []

    def stop(step: int, value: float) -> None:
        passes.append(step)
        raise Hopeless

    with pytest.raises(Hopeless):
        race(repeats=5)(TREES["dense"], stop)
    assert passes == [0]


def test_a_winner_must_win_again(clock: dict[int, float]) -> None:
    """The winner of many noisy times looks better than it is: only fresh, paired passes replace the seed."""
    clock.update({2: 10.0, 21: 9.0})
    faster, ratios = race().confirmed(TREES["dense"])
    assert faster
    assert ratios == pytest.approx([10 / 9] * 3)
    clock[21] = 10.5
    assert race().confirmed(TREES["dense"])[0] is False
    assert race().confirmed(SEED) == (False, [])


def test_real_times_and_a_study(tmp_path: object) -> None:
    """End to end on a tiny target: stored, resumed without racing again."""
    space = Space(estimate=independent([[0.6, 0.2], [0.5, 0.1]], 10), sizes=(1, 2, 3), depth=2, ranks=2)
    study = StudySettings(name="race", storage=f"sqlite:///{tmp_path}/study.db", trials=3, seed=0)
    found = run_study({"toy": Arm(space=space, objective=race(repeats=1), seeds=[SEED])}, study)
    assert found.tried == 3
    assert found.value >= found.seed_value == 1.0

    class MustNotRun(RaceObjective):
        def __call__(self, tree: Tree, report: object) -> float:
            raise AssertionError("raced again")

    again = MustNotRun(target=TARGET, heads=HEADS, prompts=encoded(PROMPTS[0]), seed=SEED, max_new_tokens=4, repeats=1)
    resumed = run_study({"toy": Arm(space=space, objective=again, seeds=[SEED])}, study)
    assert (resumed.known, replace(resumed, known=0)) == (3, found)


def test_another_text_is_a_broken_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    raced = race()
    generate = TreeDecoder.generate

    def other(self: TreeDecoder, *args: object, **kwargs: object) -> Decoded:
        run = generate(self, *args, **kwargs)  # type: ignore[arg-type]
        tokens = (*run.tokens[:-1], (run.tokens[-1] + 1) % 61) if self.tree != SEED else run.tokens
        return Decoded(tokens=tokens, end=run.end, accepted=run.accepted, prefill_ms=1.0, decode_ms=1.0)

    monkeypatch.setattr(TreeDecoder, "generate", other)
    with pytest.raises(CheckError, match="must not change the text"):
        raced(TREES["dense"], ignore)


def test_repeated_prompts_and_empty_answers_are_refused() -> None:
    """FIELD-CASES 46."""
    with pytest.raises(InputError, match="repeated prompt"):
        race(prompts=encoded(PROMPTS[0], PROMPTS[0]))
    with pytest.raises(InputError, match="prompts that differ"):
        race(prompts=[])
    with pytest.raises(InputError, match="one token long"):
        race(max_new_tokens=1)(TREES["dense"], ignore)
