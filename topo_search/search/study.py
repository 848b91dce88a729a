"""Optuna, for what has no closed form: the measured race, and caps per depth where steps start where they start.

The exact frontier is the first trial, so a study never ends below it; on the additive objective nothing can beat it.
A tree is tried once, however many trials propose it, also by several processes that share a storage. With one process
and a computed objective the same seed gives the same trials, interrupted or not: the sampler is seeded by trial number.
Processes that work at the same time see each other's pending trees, and their history is not reproducible.
With several heads to choose among, the heads are one more, categorical parameter, and a trial is a tree of some heads.

Optuna is imported inside functions: `optimize` without it stays instant.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from topo_search.errors import InputError
from topo_search.estimates import PathProbabilities
from topo_search.search.frontier import frontier
from topo_search.tree import Tree

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

Report = Callable[[int, float], None]  # round, value so far; raises `Hopeless`
Progress = Callable[[int, int, str], None]

_ASKS_PER_TREE = 25  # proposals of trees already known, in a row, after which the space counts as exhausted
_PRUNE_AFTER = 5  # finished trials before a trial can be hopeless for being below their median
_TREE, _HEADS, _TWIN, _WORKER, _ALONGSIDE = "tree", "heads", "twin_of", "worker", "alongside"


class Hopeless(Exception):
    """A trial that cannot win any more; an objective lets it pass through."""


@runtime_checkable
class Objective(Protocol):
    """What a study makes largest: computed by replay and table, or measured by a race."""

    def __call__(self, tree: Tree, report: Report) -> float:
        """The value of a tree, larger is better; `report` may stop a measurement between its rounds."""

    def ceiling(self, tree: Tree) -> float | None:
        """What the tree can reach at most, where that is known without trying it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The trees a study may propose: best ones under caps on depth, on ranks per depth and on size.

    Attributes:
        estimate: path probabilities to sort by.
        sizes: numbers of draft nodes allowed, ascending, without 0.
        depth: the deepest allowed.
        ranks: ranks a depth may use at most.
    """

    estimate: PathProbabilities
    sizes: tuple[int, ...]
    depth: int
    ranks: int

    def tree(self, max_depth: int, ranks_per_depth: Sequence[int], num_draft_nodes: int) -> Tree:
        """The best tree under the caps, cut to the largest allowed size; the empty one where there is none."""
        family = frontier(
            self.estimate, num_draft_nodes=num_draft_nodes, max_depth=max_depth, ranks_per_depth=ranks_per_depth
        )
        fitting = [size for size in self.sizes if size <= len(family.order)]
        return family.tree(fitting[-1]) if fitting else Tree(())

    def suggested(self, trial: Trial, prefix: str = "") -> Tree:
        """The tree that a trial's parameters, whose names start with `prefix`, stand for."""
        depth = trial.suggest_int(f"{prefix}max_depth", 1, self.depth)
        ranks = [trial.suggest_int(f"{prefix}ranks_at_{level}", 1, self.ranks, log=True) for level in self._levels]
        return self.tree(depth, ranks, trial.suggest_int(f"{prefix}num_draft_nodes", self.sizes[0], self.sizes[-1]))

    def parameters(self, tree: Tree, prefix: str = "") -> dict[str, int]:
        """Parameters whose caps allow `tree`; they stand for it where it is the best tree under them."""
        used = [
            max((path[level - 1] for path in tree.paths if len(path) >= level), default=0) for level in self._levels
        ]
        ranks = {f"{prefix}ranks_at_{level}": rank + 1 for level, rank in zip(self._levels, used, strict=True)}
        size = max(tree.num_draft_nodes, self.sizes[0])
        return {f"{prefix}max_depth": max(tree.depth, 1), **ranks, f"{prefix}num_draft_nodes": size}

    @property
    def _levels(self) -> range:
        return range(1, self.depth + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One heads' part of a study.

    Attributes:
        space: what may be proposed.
        objective: what to make largest; comparable with those of other heads.
        seeds: tried before anything else.
    """

    space: Space
    objective: Objective
    seeds: Sequence[Tree]


Arms = Mapping[str, Arm]  # by the heads' name; the first arm's first seed is the tree to beat
Candidate = tuple[str, Tree]  # heads, tree


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySettings:
    """Where a study lives and how long it runs.

    Attributes:
        name: of the study in its storage: one question, one name.
        storage: Optuna storage URL; null keeps the study in memory.
        trials: distinct trees in all, those of earlier and other processes included.
        seed: of the sampler.
    """

    name: str
    storage: str | None
    trials: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """What a study found.

    Attributes:
        heads, tree, value: the best tree tried and its heads; the earliest of equals, so the seed unless something
            beats it.
        best_of: the best tree tried of each heads.
        seed_value: of the first seed.
        known: distinct trees that earlier runs had tried.
        tried, pruned: distinct trees finished, and how many of them were given up as hopeless.
        reproducible: false where several processes worked at the same time.
    """

    heads: str
    tree: Tree
    value: float
    best_of: Mapping[str, Tree]
    seed_value: float
    known: int
    tried: int
    pruned: int
    reproducible: bool


def run_study(arms: Arms, settings: StudySettings, *, progress: Progress | None = None) -> StudyResult:
    """Try trees until the study holds `settings.trials` distinct ones, or proposes no new one.

    Args:
        arms: what may be proposed and how it is valued, by heads; all seeds are tried, so the study ends below none.
        settings: storage, name, length and seed.
        progress: called after each tree with trees finished, wanted, and a remark.

    Raises:
        InputError: the storage cannot be opened, or fewer than one trial is wanted.
    """
    if settings.trials < 1:
        raise InputError(f"A study of {settings.trials} trials is none; give --trials of at least 1.")
    study = open_study(settings)
    known = len(_distinct(study))
    abandoned = _release_abandoned(study, arms)
    for index, candidate in _seeds_to_try(study, arms):
        _try(study, _enqueued(study, arms, candidate, seed=index), candidate, arms)
    for candidate in abandoned:
        _try(study, _enqueued(study, arms, candidate), candidate, arms)
    while (done := len(_distinct(study))) < settings.trials:
        asked = ask_new_tree(study, arms, settings.seed)
        if asked is None:
            break
        _try(study, *asked, arms)
        if progress:
            progress(done + 1, settings.trials, f"best {study.best_value:.4g}")
    return _result(study, arms, known)


def _seeds_to_try(study: Study, arms: Arms) -> list[tuple[int, Candidate]]:
    """Seeds by number that were not finished before and that no process is at; the first one must be finished."""
    numbered = list(enumerate((heads, tree) for heads, arm in arms.items() for tree in arm.seeds))
    finished = {trial.user_attrs.get("seed") for trial in _distinct(study)}
    running = {t.user_attrs.get("seed") for t in study.get_trials(deepcopy=False) if not t.state.is_finished()}
    return [(index, seed) for index, seed in numbered if index not in finished | (running - {0})]


def open_study(settings: StudySettings) -> Study:
    """The study of that name, made where it is missing.

    Raises:
        InputError: the storage cannot be opened.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=_PRUNE_AFTER, n_warmup_steps=1)
    try:
        return optuna.create_study(
            study_name=settings.name,
            storage=settings.storage,
            load_if_exists=True,
            direction="maximize",
            pruner=pruner,
            sampler=_sampler(settings.seed, 0),
        )
    except Exception as error:  # noqa: BLE001  (any driver's own error, or a missing driver)
        raise InputError(
            f"Cannot open the study's storage {settings.storage}: {str(error).splitlines()[0]}. Give --storage a URL "
            "such as sqlite:///trees/study.db."
        ) from None


def ask_new_tree(study: Study, arms: Arms, seed: int) -> tuple[Trial, Candidate] | None:
    """A trial whose tree no other of the same heads has, pending ones included; None where the space seems exhausted.

    A proposal of a known tree is told the known value at once, so that the sampler learns from it. A sampler that keeps
    to heads whose trees are all known leaves others unexplored, so each heads' space is then drawn from at random.
    """
    from optuna.trial import TrialState

    names = sorted(arms)
    drawn = names * _ASKS_PER_TREE if len(names) > 1 else []
    for heads in [None] * _ASKS_PER_TREE + drawn:
        study.sampler = _sampler(seed, len(study.get_trials(deepcopy=False)), at_random=heads is not None)
        if heads is not None:
            study.enqueue_trial({_HEADS: heads})
        trial = study.ask()
        candidate = _suggested(arms, trial)
        _claim(study, trial, candidate, arms)
        twin = _earlier_twin(study, trial, _claimed_by(candidate, arms))
        if twin is None and candidate[1].paths:
            return trial, candidate
        trial.set_user_attr(_TWIN, -1 if twin is None else twin.number)
        if twin is not None and twin.state == TrialState.COMPLETE:
            study.tell(trial, twin.value)
        else:
            study.tell(trial, state=TrialState.FAIL)
    return None


def _sampler(seed: int, number: int, *, at_random: bool = False) -> Any:
    from optuna.samplers import RandomSampler, TPESampler

    return (RandomSampler if at_random else TPESampler)(seed=(seed * 1_000_003 + number) % 2**32)


def _suggested(arms: Arms, trial: Trial) -> Candidate:
    """The heads and the tree that a trial's parameters stand for."""
    heads = next(iter(arms)) if len(arms) == 1 else str(trial.suggest_categorical(_HEADS, sorted(arms)))
    return heads, arms[heads].space.suggested(trial, _prefix(arms, heads))


def _prefix(arms: Arms, heads: str) -> str:
    """Every heads have parameters of their own: their depths and ranks reach differently far."""
    return "" if len(arms) == 1 else f"{heads} "


def _enqueued(study: Study, arms: Arms, candidate: Candidate, *, seed: int | None = None) -> Trial:
    """A trial that stands for the given tree, whatever tree its parameters would give; `seed` numbers the seeds."""
    heads, tree = candidate
    choice = {} if len(arms) == 1 else {_HEADS: heads}
    study.enqueue_trial({**choice, **arms[heads].space.parameters(tree, _prefix(arms, heads))})
    trial = study.ask()
    _suggested(arms, trial)  # reads the queued parameters, so that the sampler knows where the seed lies
    _claim(study, trial, candidate, arms)
    if seed is not None:
        trial.set_user_attr("seed", seed)
    return trial


def _claimed_by(candidate: Candidate, arms: Arms) -> dict[str, str]:
    """The tree, and where there are several the heads, as a trial stores them: no two trials may try the same."""
    heads, tree = candidate
    return {_TREE: json.dumps(tree.paths), **({} if len(arms) == 1 else {_HEADS: heads})}


def _claim(study: Study, trial: Trial, candidate: Candidate, arms: Arms) -> None:
    for name, value in _claimed_by(candidate, arms).items():
        trial.set_user_attr(name, value)
    trial.set_user_attr(_WORKER, f"{socket.gethostname()}:{os.getpid()}")
    mine = trial.user_attrs[_WORKER]
    running = (other for other in study.get_trials(deepcopy=False) if not other.state.is_finished())
    trial.set_user_attr(_ALONGSIDE, any(other.user_attrs.get(_WORKER, mine) != mine for other in running))


def _earlier_twin(study: Study, trial: Trial, mine: dict[str, str]) -> FrozenTrial | None:
    """The first other trial of that tree and heads: finished, or pending with a lower number, so one of two goes on."""
    from optuna.trial import TrialState

    for other in study.get_trials(deepcopy=False):
        same = all(other.user_attrs.get(name) == value for name, value in mine.items())
        if same and other.number < trial.number and other.state != TrialState.FAIL:
            return other
    return None


def _try(study: Study, trial: Trial, candidate: Candidate, arms: Arms) -> None:
    """Value a tree, or give it up: at once where its ceiling is below the best, or between rounds."""
    from optuna.trial import TrialState

    heads, tree = candidate
    objective = arms[heads].objective

    def report(step: int, value: float) -> None:
        trial.report(value, step)
        if trial.should_prune():
            raise Hopeless

    best = max((found.value for found in _distinct(study) if found.value is not None), default=None)
    ceiling = objective.ceiling(tree)
    if ceiling is not None and best is not None and ceiling <= best and "seed" not in trial.user_attrs:
        study.tell(trial, state=TrialState.PRUNED)
        return
    try:
        study.tell(trial, objective(tree, report))
    except Hopeless:
        study.tell(trial, state=TrialState.PRUNED)
    except BaseException:
        study.tell(trial, state=TrialState.FAIL)
        raise


def _distinct(study: Study) -> list[FrozenTrial]:
    """Finished trials that stand for a tree of their own."""
    from optuna.trial import TrialState

    finished = (TrialState.COMPLETE, TrialState.PRUNED)
    return [t for t in study.get_trials(deepcopy=False, states=finished) if _TWIN not in t.user_attrs]


def _release_abandoned(study: Study, arms: Arms) -> list[Candidate]:
    """Give up pending trials of this machine whose process has ended; returns their trees, to be tried again."""
    from optuna.trial import TrialState

    found = []
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        host, _, pid = str(trial.user_attrs.get(_WORKER, "")).rpartition(":")
        if host == socket.gethostname() and not _alive(int(pid)):
            study.tell(trial.number, state=TrialState.FAIL)
            if "seed" not in trial.user_attrs:
                found.append(_candidate(trial, arms))
    return found


def _candidate(trial: FrozenTrial, arms: Arms) -> Candidate:
    return trial.user_attrs.get(_HEADS, next(iter(arms))), Tree.parse(json.loads(trial.user_attrs[_TREE]))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _result(study: Study, arms: Arms, known: int) -> StudyResult:
    found = _distinct(study)
    complete = [trial for trial in found if trial.value is not None and trial.state.name == "COMPLETE"]
    ranked = sorted(complete, key=lambda trial: (trial.value, -trial.number))
    best_of = dict(_candidate(trial, arms) for trial in ranked)  # the last of each heads stays
    best = ranked[-1]
    heads, tree = _candidate(best, arms)
    seed = next(trial for trial in complete if trial.user_attrs.get("seed") == 0)
    assert best.value is not None
    assert seed.value is not None
    return StudyResult(
        heads=heads,
        tree=tree,
        value=best.value,
        best_of=best_of,
        seed_value=seed.value,
        known=known,
        tried=len(found),
        pruned=len(found) - len(complete),
        reproducible=not any(trial.user_attrs.get(_ALONGSIDE) for trial in found),
    )
