"""`topo-search optimize`: the fastest tree from a trace and a latency table; needs neither model nor torch."""

from __future__ import annotations

import inspect
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from topo_search.cli import options

if TYPE_CHECKING:
    from topo_search.cli.origins import Origin
    from topo_search.files.accuracies import AccuracyTable
    from topo_search.search.among import Among, Entrant
    from topo_search.search.assess import Assessment
    from topo_search.search.choose import Settings

    # The answer, the files behind it, what a study did, and all heads' answers where there are several.
    Answer = tuple[Assessment, Origin, dict[str, Any] | None, tuple[Among, list[Origin]] | None]


class Objective(StrEnum):
    """What to make best."""

    throughput = "throughput"
    tokens_per_step = "tokens-per-step"
    race = "race"


class Strategy(StrEnum):
    """How to search."""

    greedy = "greedy"
    optuna = "optuna"


class Estimator(StrEnum):
    """How to turn counts into path probabilities."""

    backoff = "backoff"
    joint = "joint"
    independent = "independent"


class Refine(StrEnum):
    """What to do after the sort."""

    none = "none"
    recount = "recount"
    swaps = "swaps"


class Rule(StrEnum):
    """What the engine that will load the tree demands."""

    any = "any"
    contiguous = "contiguous"
    expanded_first = "expanded-first"
    uniform = "uniform"


class Pick(StrEnum):
    """Which size to take."""

    one_se = "one-se"
    best = "best"


_OF_TRACES = {"trace", "workload", "estimator", "refine", "folds", "resamples", "allow_mismatch"}
_OF_TIMES = {"batch_weights", "context_weights"}
_OF_STUDIES = {"trials", "storage"}
_OF_RACES = {"heads", "prompts", "num_prompts", "max_new_tokens", "repeats", "dtype", "device"}
_LISTED = 4096  # paths taken from an accuracy table; more where the budget is larger
_SEARCH, _SURE, _STUDY = "Search", "How sure", "Optuna"

BudgetOption = Annotated[int, typer.Option(help="Most tokens verified per step, root included.")]
TraceFiles = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="<path>",
        help="Rank trace; the newest in ./calibration by default. Given once per heads: chooses among them.",
    ),
]
LatencyFiles = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="<path>",
        help="Latency table; the newest in ./calibration by default. Of several heads, one for each trace.",
    ),
]
AccuraciesOption = Annotated[
    Path | None, typer.Option(help="Accuracy table instead of a trace: per depth the probability of each rank.")
]
ObjectiveOption = Annotated[
    Objective,
    typer.Option(help="Tokens per second; fill the budget; or race trees through the decoder (needs optuna)."),
]
StrategyOption = Annotated[
    Strategy, typer.Option(help="greedy: sort path probabilities, exact for every size; optuna: search on from there.")
]
EstimatorOption = Annotated[Estimator, typer.Option(help="Path probabilities from counts.", rich_help_panel=_SEARCH)]
RefineOption = Annotated[
    Refine, typer.Option(help="Recount where the tree's steps start; then swap nodes.", rich_help_panel=_SEARCH)
]
RuleOption = Annotated[
    Rule, typer.Option(help="Shape that the engine to load the tree demands.", rich_help_panel=_SEARCH)
]
PickOption = Annotated[
    Pick,
    typer.Option(
        help="Smallest tree within one standard error of the best, or the best; tokens-per-step takes the best.",
        rich_help_panel=_SEARCH,
    ),
]
MaxDepthOption = Annotated[int | None, typer.Option(help="No deeper nodes.", rich_help_panel=_SEARCH)]
MaxRankOption = Annotated[int | None, typer.Option(help="No higher ranks; 0 = likeliest.", rich_help_panel=_SEARCH)]
BatchOption = Annotated[int, typer.Option(help="Sequences that one step serves.", rich_help_panel=_SEARCH)]
BatchWeightsOption = Annotated[
    str | None,
    typer.Option(
        help="Share of the tokens decoded with so many sequences in flight, e.g. 1=0.7,4=0.3; instead of --batch.",
        rich_help_panel=_SEARCH,
    ),
]
ContextWeightsOption = Annotated[
    str | None,
    typer.Option(
        help="Step time = weighted mean of times at measured contexts, e.g. 256=0.7,1024=0.3; else each step's own.",
        rich_help_panel=_SEARCH,
    ),
]
FoldsOption = Annotated[int, typer.Option(help="Parts to split the prompts into.", rich_help_panel=_SURE)]
ResamplesOption = Annotated[int, typer.Option(help="Of the prompts, for intervals.", rich_help_panel=_SURE)]
SeedOption = Annotated[int, typer.Option(help="Of folds, resamples and sampler.", rich_help_panel=_SURE)]
TrialsOption = Annotated[int, typer.Option(help="Distinct trees in the whole study.", rich_help_panel=_STUDY)]
StorageOption = Annotated[
    str | None,
    typer.Option(
        help="Optuna URL; a SQLite file in --out by default. The same question continues its study there.",
        rich_help_panel=_STUDY,
    ),
]
RaceTarget = Annotated[str | None, typer.Option(help="Model to race, e.g. demo.", rich_help_panel=_STUDY)]
RaceHeads = Annotated[str, typer.Option(help="Draft heads to race.", rich_help_panel=_STUDY)]
RacePrompts = Annotated[
    Path | None, typer.Option(help="JSONL to race on; topo-search's own sets by default.", rich_help_panel=_STUDY)
]
RaceNumPrompts = Annotated[int, typer.Option(min=1, help="Prompts to race on.", rich_help_panel=_STUDY)]
RaceTokens = Annotated[int, typer.Option(min=2, help="Cap of raced answers.", rich_help_panel=_STUDY)]
RaceRepeats = Annotated[int, typer.Option(min=1, help="Passes per raced tree.", rich_help_panel=_STUDY)]
RaceDtype = Annotated[str, typer.Option(help="Precision of the raced model.", rich_help_panel=_STUDY)]
RaceQuantize = Annotated[
    str | None, typer.Option("--quantize", help="int8 or int4 weights of the raced model.", rich_help_panel=_STUDY)
]
RaceDevice = Annotated[str, typer.Option(help="Device to race on.", rich_help_panel=_STUDY)]
OutOption = Annotated[Path, typer.Option(help="Folder for the tree files.")]


def optimize(
    budget: BudgetOption = options.DEFAULT_BUDGET,
    trace: TraceFiles = None,
    latency: LatencyFiles = None,
    accuracies: AccuraciesOption = None,
    objective: ObjectiveOption = Objective.throughput,
    strategy: StrategyOption = Strategy.greedy,
    estimator: EstimatorOption = Estimator.backoff,
    refine: RefineOption = Refine.none,
    rule: RuleOption = Rule.any,
    acceptance: options.AcceptanceRule = options.Acceptance.exact,
    pick: PickOption = Pick.one_se,
    max_depth: MaxDepthOption = None,
    max_rank: MaxRankOption = None,
    batch: BatchOption = 1,
    batch_weights: BatchWeightsOption = None,
    context_weights: ContextWeightsOption = None,
    workload: options.Workload = None,
    folds: FoldsOption = 5,
    resamples: ResamplesOption = 2000,
    seed: SeedOption = 0,
    trials: TrialsOption = 100,
    storage: StorageOption = None,
    target: RaceTarget = None,
    heads: RaceHeads = "demo-medusa",
    prompts: RacePrompts = None,
    num_prompts: RaceNumPrompts = 8,
    max_new_tokens: RaceTokens = 64,
    repeats: RaceRepeats = 3,
    dtype: RaceDtype = "float32",
    quantize: RaceQuantize = None,
    device: RaceDevice = "cpu",
    out: OutOption = options.TREES_FOLDER,
    as_json: options.Json = False,
    allow_mismatch: options.AllowMismatch = False,
) -> None:
    """Find the fastest tree, the best chain, and say whether plain decoding beats both, and how sure that is.

    Figures are those of prompts that did not choose the tree, with 95 % intervals. A --trace and a --latency for each
    of several heads find the fastest heads too. With --acceptance typical, which changes the text, the tree is found
    from accept masks (--trace) by a heuristic.

    Examples: topo-search optimize --budget 64 | topo-search optimize --objective tokens-per-step --json |
    topo-search optimize --strategy optuna --objective race --target demo
    """
    asked = dict(locals())
    from topo_search.cli.optimized import report
    from topo_search.search.choose import Settings

    _require_consistent(objective, strategy, rule, target)
    _require_used(asked)
    same = ("budget", "max_depth", "max_rank", "batch", "folds", "resamples", "seed")
    settings = Settings(
        objective="tokens-per-step" if objective is Objective.tokens_per_step else "throughput",
        estimator=estimator.value,
        pick="best" if pick is Pick.best else "one-se",
        rule=rule.value,
        refine=refine.value,
        batch_weights=_weights("batch", batch_weights),
        context_weights=_weights("context", context_weights),
        **{name: asked[name] for name in same},
    )
    if acceptance is options.Acceptance.typical:
        _typical(settings, asked)
        return
    found, origin, study, among = (_from_accuracies if accuracies else _from_trace)(settings, asked)
    report(found, origin, out, as_json=as_json, study=study, among=among)


def _require_consistent(objective: Objective, strategy: Strategy, rule: Rule, target: str | None) -> None:
    from topo_search.errors import InputError

    if objective is Objective.race and (strategy is not Strategy.optuna or target is None):
        raise InputError("--objective race runs the decoder: it needs --strategy optuna and --target (e.g. demo).")
    if target is not None and objective is not Objective.race:
        raise InputError("--target is what --objective race runs; without a race, optimize loads no model.")
    if strategy is Strategy.optuna and rule is not Rule.any:
        raise InputError("A study keeps no engine's rule; leave out --rule or --strategy optuna.")


def _require_used(asked: dict[str, Any]) -> None:
    """Refuse options that the others leave without effect.

    Raises:
        InputError: names them and what they need.
    """
    from topo_search.errors import InputError

    defaults = inspect.signature(optimize).parameters
    several = max(len(asked["trace"] or ()), len(asked["latency"] or ())) > 1
    given = {name for name, value in asked.items() if value != defaults[name].default}
    study = {"strategy"} if asked["strategy"] is Strategy.optuna else set()
    if asked["accuracies"] is not None and (idle := sorted(given & _OF_TRACES | study)):
        raise InputError(
            f"--accuracies {asked['accuracies']} stands for a trace and has no prompts, so "
            f"{_named(idle, asked)} would have no effect; leave out one or the other."
        )
    if asked["strategy"] is not Strategy.optuna and (idle := sorted(given & _OF_STUDIES)):
        raise InputError(f"Without --strategy optuna, {_named(idle, asked)} would have no effect; leave it out.")
    if asked["objective"] is Objective.tokens_per_step and (idle := sorted(given & _OF_TIMES)):
        raise InputError(f"--objective tokens-per-step counts no time, so {_named(idle, asked)} would have no effect.")
    if asked["objective"] is Objective.race and "batch_weights" in given:
        raise InputError("A race decodes one sequence at a time; leave out --batch-weights or --objective race.")
    if several and asked["objective"] is Objective.race:
        raise InputError(
            "A race decodes with one heads; choose among heads without it, then race the winner: give one --trace and "
            "one --latency."
        )
    if {"batch", "batch_weights"} <= given:
        raise InputError("--batch and --batch-weights both say what is served at once; leave one out.")
    if asked["objective"] is not Objective.race and (idle := sorted(given & _OF_RACES)):
        raise InputError(f"Without --objective race, {_named(idle, asked)} would have no effect; leave it out.")


def _weights(what: str, text: str | None) -> tuple[tuple[int, float], ...] | None:
    """Pairs such as 256=0.7,1024=0.3, ascending; null where nothing is given.

    Raises:
        InputError: it is no such list, or names a context or batch twice.
    """
    from topo_search.errors import InputError

    if text is None:
        return None
    option, example = f"--{what}-weights {text}", {"batch": "1=0.7,4=0.3", "context": "256=0.7,1024=0.3"}[what]
    try:
        pairs = [(int(at), float(weight)) for at, weight in (part.split("=") for part in text.split(","))]
    except ValueError:
        raise InputError(f"{option} is no list of {what.upper()}=WEIGHT; write it as {example}.") from None
    if len(dict(pairs)) != len(pairs):
        raise InputError(f"{option} names a {what} twice; give each one weight.")
    return tuple(sorted(pairs))


def _named(options_: list[str], asked: dict[str, Any]) -> str:
    shown = {name: asked[name] if isinstance(asked[name], list) else [asked[name]] for name in options_}
    return ", ".join(f"--{name.replace('_', '-')} {value}" for name, values in shown.items() for value in values)


def _typical(settings: Settings, asked: dict[str, Any]) -> None:
    """The search on accept masks, which has no estimate, no engine's rule and no study.

    Raises:
        InputError: an option of the exact search is given.
    """
    from topo_search.cli.covering import masks_for, report_typical
    from topo_search.cli.origins import of_workload, single, table_for
    from topo_search.errors import InputError

    exact_only = {
        "--accuracies": asked["accuracies"] is not None,
        "--strategy optuna": asked["strategy"] is Strategy.optuna,
        "--rule": asked["rule"] is not Rule.any,
        "--refine": asked["refine"] is not Refine.none,
        "--estimator": asked["estimator"] is not Estimator.backoff,
        "--batch-weights": asked["batch_weights"] is not None,
        "--context-weights": asked["context_weights"] is not None,
        "--pick": asked["pick"] is not Pick.one_se,
        "--trace, given more than once,": len(asked["trace"] or ()) > 1,
        "--latency, given more than once,": len(asked["latency"] or ()) > 1,
    }
    given = [name for name, is_given in exact_only.items() if is_given]
    if given:
        raise InputError(f"{given[0]} belongs to the exact search; leave it out with --acceptance typical.")
    masks, path = masks_for(single(asked["trace"]))
    masks = of_workload(masks, asked["workload"])
    table, latency_path = table_for(masks, asked)
    report_typical(masks, path, table, latency_path, settings, asked["out"], as_json=asked["as_json"])


def _from_accuracies(settings: Settings, asked: dict[str, Any]) -> Answer:
    """The search on a table of accuracies, which knows no models: a latency table must be named.

    Raises:
        InputError: several tables are.
    """
    from topo_search.cli.inputs import LATENCY, require_kind
    from topo_search.cli.origins import Origin, single
    from topo_search.errors import InputError
    from topo_search.estimates import independent
    from topo_search.files.latency_file import read_latency
    from topo_search.search.assess import assess_accuracies

    if len(asked["latency"] or ()) > 1:
        raise InputError("--accuracies is of one heads, so it takes one --latency.")
    latency_path = single(asked["latency"])
    if latency_path is not None:
        require_kind(latency_path, LATENCY)
    table = None if latency_path is None else read_latency(latency_path)
    found = _accuracies(asked["accuracies"])
    listed = independent(found.rank_table, max(_LISTED, settings.budget), repeat_last=found.repeat_last)
    origin = Origin(trace=None, trace_path=None, table=table, latency_path=latency_path)
    return assess_accuracies(listed, table, settings), origin, None, None


def _accuracies(path: Path) -> AccuracyTable:
    """The table; only a peer's `.pt` file needs torch."""
    if path.suffix == ".pt":
        from topo_search.heads.accuracy_tensors import read_accuracy_tensors

        return read_accuracy_tensors(path)
    from topo_search.files.accuracies import read_accuracies

    return read_accuracies(path)


def _from_trace(settings: Settings, asked: dict[str, Any]) -> Answer:
    """The search on recorded ranks: of one heads, or of several to choose among."""
    from topo_search.cli.origins import entrants_of, origin_of_one, origins_of_several

    if max(len(asked["trace"] or ()), len(asked["latency"] or ())) > 1:
        origins = origins_of_several(asked, settings)
        among, study = _among(entrants_of(origins), settings, asked)
        return among.best.found, origins[among.chosen], study, (among, origins)
    origin = origin_of_one(asked, settings)
    assert origin.trace is not None
    if asked["strategy"] is Strategy.optuna:
        from topo_search.cli.studying import studied

        assessment, study = studied(origin.trace, origin.table, settings, asked)
        return assessment, origin, study, None
    from topo_search.search.assess import assess

    return assess(origin.trace, origin.table, settings), origin, None, None


def _among(entrants: list[Entrant], settings: Settings, asked: dict[str, Any]) -> tuple[Among, dict[str, Any] | None]:
    """Every heads' answer, compared."""
    if asked["strategy"] is Strategy.optuna:
        from topo_search.cli.studying import studied_among

        return studied_among(entrants, settings, asked)
    from topo_search.search.among import assess_among

    return assess_among(entrants, settings), None
