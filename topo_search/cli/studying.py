"""The study behind `optimize --strategy optuna`: computed from trace and table, or measured by racing the decoder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topo_search.errors import InputError
from topo_search.report.console import note, progress
from topo_search.search.among import Among, Entrant, assess_among_improved
from topo_search.search.assess import Assessment, assess_improved
from topo_search.search.choose import Choice, Settings, allowed_widths, merit
from topo_search.search.judge import ReplayJudge
from topo_search.search.replay_objective import ReplayObjective
from topo_search.search.study import Arm, Objective, Space, StudyResult, StudySettings, run_study
from topo_search.tree import Tree

if TYPE_CHECKING:
    from topo_search.cost import LatencyTable
    from topo_search.race_objective import RaceObjective
    from topo_search.trace import RankTrace

STUDY_FILE = "study.db"


def studied(
    trace: RankTrace, latency: LatencyTable | None, settings: Settings, asked: dict[str, Any]
) -> tuple[Assessment, dict[str, Any]]:
    """Search on from the exact frontier, and say what the study did.

    Args:
        trace, latency, settings: as for `assess`.
        asked: the options of `optimize`.

    Raises:
        InputError: the storage cannot be opened, or the race lacks prompts.
        CheckError: a race changed the text.
    """
    told: dict[str, Any] = {}

    def improve(judge: ReplayJudge, choice: Choice) -> Tree:
        seed = choice.trees[-1]
        space = _space(judge, choice, settings)
        if space is None or not seed.paths:
            told["tried"] = 0
            return seed
        race = _race(judge.trace, seed, asked) if asked["objective"].value == "race" else None
        objective: Objective = race or ReplayObjective(judge=judge, settings=settings)
        arm = Arm(space=space, objective=objective, seeds=_seeds(choice))
        found = _run({trace.heads.name: arm}, _study_name([judge], settings, asked, race), settings, asked, told)
        return found.tree if race is None else _confirmed(race, seed, found.tree, told)

    return assess_improved(trace, latency, settings, improve), told


def studied_among(
    entrants: Sequence[Entrant], settings: Settings, asked: dict[str, Any]
) -> tuple[Among, dict[str, Any]]:
    """Search on from every heads' exact frontier in one study, and compare the best tree of each on other prompts.

    Args:
        entrants, settings: as for `assess_among`.
        asked: the options of `optimize`.

    Raises:
        InputError: the storage cannot be opened.
        MismatchError: the traces cannot be compared.
    """
    told: dict[str, Any] = {}

    def improve(parts: Sequence[tuple[ReplayJudge, Choice]]) -> list[Tree]:
        exact = {entrant.name: part for entrant, part in zip(entrants, parts, strict=True)}
        by_merit = sorted(exact, key=lambda name: (-float(merit(exact[name][1].alternatives, settings)[-1]), name))
        arms = {}
        for name in by_merit:
            judge, choice = exact[name]
            space = _space(judge, choice, settings)
            if space is not None and choice.trees[-1].paths:
                objective = ReplayObjective(judge=judge, settings=settings)
                arms[name] = Arm(space=space, objective=objective, seeds=_seeds(choice))
        if not arms:
            told["tried"] = 0
            return [choice.trees[-1] for _, choice in parts]
        name = _study_name([judge for judge, _ in parts], settings, asked, None)
        best_of = _run(arms, name, settings, asked, told).best_of
        return [best_of.get(name, choice.trees[-1]) for name, (_, choice) in exact.items()]

    return assess_among_improved(entrants, settings, improve), told


def _seeds(choice: Choice) -> list[Tree]:
    """The exact search's tree, then its chain."""
    return [choice.trees[-1], *([choice.trees[1]] if choice.trees[1].paths else [])]


def _run(
    arms: dict[str, Arm], name: str, settings: Settings, asked: dict[str, Any], told: dict[str, Any]
) -> StudyResult:
    """Run the study of that name, and note in `told` what it did."""
    study = StudySettings(name=name, storage=_storage(asked), trials=asked["trials"], seed=settings.seed)
    with progress("Trees tried") as advance:
        found = run_study(arms, study, progress=advance)
    told.update({"name": study.name, "storage": study.storage, **asdict(found)})
    del told["tree"], told["best_of"]
    if not found.reproducible:
        note("Several processes took part in this study at once: its history is not reproducible.")
    return found


def _space(judge: ReplayJudge, choice: Choice, settings: Settings) -> Space | None:
    sizes = tuple(width - 1 for width in sorted(allowed_widths(judge, settings)) if width > 1)
    if not sizes:
        return None
    ranks = judge.trace.resolved_ranks if settings.max_rank is None else settings.max_rank + 1
    return Space(
        estimate=choice.estimate,
        sizes=sizes,
        depth=min(settings.max_depth or judge.depth, judge.depth),
        ranks=min(ranks, judge.trace.resolved_ranks),
    )


def _confirmed(race: RaceObjective, seed: Tree, winner: Tree, told: dict[str, Any]) -> Tree:
    """The winner where fresh passes say that it is faster than the seed, else the seed."""
    faster, ratios = race.confirmed(winner)
    told.update({"remeasured_over_seed": ratios, "replaced_seed": faster})
    if winner != seed:
        shown = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        note(f"Winner re-measured against the exact search's tree: {shown} times; {'kept' if faster else 'not kept'}.")
    return winner if faster else seed


def _storage(asked: dict[str, Any]) -> str:
    if asked["storage"] is not None:
        return str(asked["storage"])
    folder: Path = asked["out"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"Cannot make the folder {folder}: {error.strerror}; give another --out.") from None
    return f"sqlite:///{folder / STUDY_FILE}"


def _study_name(
    judges: Sequence[ReplayJudge], settings: Settings, asked: dict[str, Any], race: RaceObjective | None
) -> str:
    """One name per question, so that a study is only ever continued with the question that began it."""
    question: dict[str, Any] = {"settings": asdict(settings)}
    digest = hashlib.sha256()
    for judge in sorted(judges, key=lambda judge: judge.trace.heads.fingerprint):  # in whatever order they were given
        digest.update(judge.trace.ranks.tobytes())
        digest.update(repr(judge.trace.prompts).encode())
        if race is None:
            times = judge.times
            digest.update(repr((times.contexts, sorted(times.draft.ms.items()))).encode())
            digest.update(repr([(width, ms.tolist()) for width, ms in sorted(times.verify_ms.items())]).encode())
    if race is not None:
        from topo_search.device import device_record

        question["race"] = [asked["max_new_tokens"], asked["repeats"], [p.digest for p in race.prompts]]
        question["models"] = [asdict(race.target.identity), asdict(race.heads.identity), device_record(race.target)]
        question["seed_tree"] = race.seed.paths
    digest.update(json.dumps(question, sort_keys=True, default=str).encode())
    return f"topo-search-{digest.hexdigest()[:16]}"


def _race(trace: RankTrace, seed: Tree, asked: dict[str, Any]) -> RaceObjective:
    """Target, heads and prompts; of topo-search's own sets only prompts that the choice may see."""
    from topo_search.cli.inputs import chosen_prompts, evenly, load_draft_heads, load_model, require_fit

    found = chosen_prompts(
        asked["prompts"], workload=asked["workload"], split=None, default_split="calibration", num_prompts=None
    )
    if asked["prompts"] is None:
        seen = {prompt.id for prompt in trace.prompts}
        found = [prompt for prompt in found if prompt.id in seen] or found
    model = load_model(
        asked["target"],
        dtype=asked["dtype"],
        device=asked["device"],
        attention="auto",
        tokenizer=None,
        quantize=asked["quantize"],
    )
    heads = load_draft_heads(asked["heads"], model)
    for what, given, loaded in (
        ("The trace's target", trace.target, model.identity),
        ("The trace's heads", trace.heads, heads.identity),
    ):
        require_fit(what, given, loaded, allow_mismatch=asked["allow_mismatch"])

    from topo_search.calibrate import encode_prompts
    from topo_search.race_objective import RaceObjective

    return RaceObjective(
        target=model,
        heads=heads,
        prompts=encode_prompts(model, evenly(found, asked["num_prompts"]), max_new_tokens=asked["max_new_tokens"]),
        seed=seed,
        max_new_tokens=asked["max_new_tokens"],
        repeats=asked["repeats"],
    )
