"""`topo-search bench`: race generate, plain decoding, chain, Medusa's tree and the best tree."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from topo_search.cli import options

if TYPE_CHECKING:
    from topo_search.bench import Contender, Course, RaceResult
    from topo_search.cost import LatencyTable
    from topo_search.files.prompts import Prompt
    from topo_search.files.tree_file import TreeFile
    from topo_search.heads.base import DraftHeads
    from topo_search.identity import RuleIdentity
    from topo_search.target import Target
    from topo_search.trace import RankTrace


def bench(
    tree: Annotated[Path, typer.Option(help="The best tree.")] = options.TREES_FOLDER / "best-tree.tree.json",
    chain: Annotated[Path, typer.Option(help="The best chain.")] = options.TREES_FOLDER / "best-chain.tree.json",
    target: options.Target = "demo",
    heads: options.Heads = "demo-medusa",
    heads_dtype: options.HeadsDtype = None,
    prompts: options.Prompts = None,
    workload: options.Workload = None,
    split: options.Split = None,
    num_prompts: options.NumPrompts = None,
    max_new_tokens: options.MaxNewTokens = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Passes over all prompts.")] = 3,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    noise_share: options.NoiseShare = 0.0,
    seed: options.Seed = 0,
    acceptance: options.AcceptanceRule = options.Acceptance.exact,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    bonus: options.BonusToken = None,
    trace: options.TraceFile = None,
    latency: options.LatencyFile = None,
    as_json: options.Json = False,
    allow_mismatch: options.AllowMismatch = False,
    dtype: options.Dtype = "float32",
    quantize: options.Quantize = None,
    device: options.Device = "cpu",
    attention: options.Attention = "auto",
    tokenizer: options.Tokenizer = None,
    mode: options.Mode = "auto",
) -> None:
    """Race the contenders on the same prompts, check the text and the predicted counts.

    Exit code 1 where a text or a count differs and no near-tie explains it. With --acceptance typical trees change the
    text, which is said and not compared; generate and plain decoding stay exact.

    Examples: topo-search bench | topo-search bench --num-prompts 8 --repeats 3 --json
    """
    given: dict[str, Any] = dict(locals())
    from topo_search.cli import inputs
    from topo_search.cli.decoding import stored_tree

    exact = inputs.chosen_rule(temperature, top_k, top_p, min_p, noise_share, seed)
    rule = inputs.accepting_rule(exact, acceptance, epsilon, delta, bonus)
    files = [(path, stored_tree(path, rule=rule, allow_mismatch=allow_mismatch)) for path in (chain, tree)]
    inputs.require_heads(heads)
    which = {name: given[name] for name in ("workload", "split", "num_prompts")}
    found = inputs.chosen_prompts(prompts, default_split="evaluation", **which)
    loaded = {name: given[name] for name in ("dtype", "device", "attention", "tokenizer", "quantize")}
    model = inputs.load_model(target, **loaded, mode=mode)
    draft_heads = inputs.load_draft_heads(heads, model, dtype=heads_dtype)
    course: dict[str, Any] = {
        **_figures(trace, latency, model, draft_heads, rule, allow_mismatch=allow_mismatch),
        "reference": _reference(target, model, loaded),
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "rule": rule,
    }
    contenders = _contenders(files, model, draft_heads, allow_mismatch=allow_mismatch)
    _race(_course(model, draft_heads, found, course), contenders, as_json=as_json)


def _course(target: Target, heads: DraftHeads, prompts: list[Prompt], settings: dict[str, Any]) -> Course:
    from topo_search.bench import Course
    from topo_search.calibrate import encode_prompts

    encoded = encode_prompts(target, prompts, max_new_tokens=settings["max_new_tokens"])
    return Course(target=target, heads=heads, prompts=encoded, **settings)


def _reference(name: str, model: Target, settings: dict[str, Any]) -> Target:
    """The model as a transformers user runs it in `generate`: without our packed weights and our attention."""
    from topo_search.cli.inputs import load_model

    if not model.packed:
        return model
    theirs = "sdpa" if settings["attention"] == "auto" else settings["attention"]
    return load_model(name, **settings | {"attention": theirs}, pack=False)


def _race(course: Course, contenders: list[Contender], *, as_json: bool) -> None:
    """Run, report, and fail where a promise is broken.

    Raises:
        CheckError: a text or a count differs and rounding does not explain it.
    """
    from topo_search.bench import race
    from topo_search.errors import CheckError
    from topo_search.reference import neutralised
    from topo_search.report.console import note, progress

    settings = _settings(course.target, course.rule.of_plain_decoding, course.max_new_tokens)
    sides = f"generate and plain decoding (trees: {course.rule.in_words})" if course.rule.changes_text else "All sides"
    note(f"{sides} decode with {settings}; ignored: {neutralised(course.target) or 'nothing'}")
    with progress("Racing") as advance:
        result = race(course, contenders, progress=lambda done, total: advance(done, total, "answers"))
    _report(result, mode=course.target.mode, as_json=as_json)
    if result.failures:
        raise CheckError("The race broke a promise:\n  " + "\n  ".join(result.failures))


def _settings(model: Target, rule: RuleIdentity, max_new_tokens: int) -> dict[str, Any]:
    """What `generate` is given, and the rule by which both sides draw."""
    from topo_search.identity import GREEDY, recorded
    from topo_search.reference import greedy_settings

    if rule == GREEDY:
        return greedy_settings(model, max_new_tokens)
    drawn = {name: value for name, value in recorded(rule).items() if value is not None}
    return greedy_settings(model, max_new_tokens) | {"do_sample": True} | drawn


def _contenders(
    files: list[tuple[Path, TreeFile]], model: Target, heads: DraftHeads, *, allow_mismatch: bool
) -> list[Contender]:
    """`generate`, plain decoding, the chain, Medusa's tree (as deep as there are heads) and the tree.

    Args:
        files: the chain's and the tree's, each with its path.
        model, heads: as loaded.
        allow_mismatch: warn where a tree was made for something else.
    """
    from topo_search.bench import GENERATE, PLAIN, Contender
    from topo_search.cli.decoding import fitting_tree
    from topo_search.files.tree_file import read_tree
    from topo_search.resources import packaged
    from topo_search.search.optimize import CHAIN, TREE
    from topo_search.tree import Tree

    chain, tree = (fitting_tree(*file, model, heads, allow_mismatch=allow_mismatch) for file in files)
    medusa = read_tree(packaged("trees/reference/medusa-63.tree.json")).tree
    return [
        Contender(name=GENERATE, tree=None),
        Contender(name=PLAIN, tree=Tree(())),
        Contender(name=CHAIN, tree=chain),
        Contender(name="medusa-63", tree=medusa.pruned(heads.identity.num_heads)),
        Contender(name=TREE, tree=tree),
    ]


def _figures(
    trace: Path | None,
    latency: Path | None,
    model: Target,
    heads: DraftHeads,
    rule: RuleIdentity,
    *,
    allow_mismatch: bool,
) -> dict[str, Any]:
    """Trace and table for forecast and predicted rate; one that nobody named is left out where it does not fit.

    Raises:
        MismatchError: one was named and is of another target, other heads, another rule, device or mode.
    """
    import torch

    from topo_search.cli.decoding import require_device, require_mode
    from topo_search.cli.inputs import newest_or_shipped, require_fit
    from topo_search.errors import MismatchError
    from topo_search.files.latency_file import LATENCY_SUFFIX, read_latency
    from topo_search.files.trace_file import TRACE_SUFFIX, read_trace
    from topo_search.report.console import note

    trace_path, table_path = newest_or_shipped(trace, TRACE_SUFFIX), newest_or_shipped(latency, LATENCY_SUFFIX)
    calibration = None if trace_path is None else read_trace(trace_path)
    table = None if table_path is None else read_latency(table_path)
    try:
        _require_same_models(calibration, model, heads, allow_mismatch=allow_mismatch)
        if calibration is not None:
            require_fit(
                "The trace's rule",
                calibration.rule,
                rule.of_plain_decoding,
                allow_mismatch=allow_mismatch,
                way_out="calibrate at these settings",
                ignore=("seed",),
            )
    except MismatchError as error:
        if trace is not None:
            raise
        note(f"No forecast from {trace_path}: {error}")
        calibration = None
    try:
        _require_same_models(table, model, heads, allow_mismatch=allow_mismatch)
        device = {} if table is None else table.device
        require_device("The latency table", device.get("name"), model, allow_mismatch=allow_mismatch)
        require_mode("The latency table", None if table is None else table.mode, model, allow_mismatch=allow_mismatch)
    except MismatchError as error:
        if latency is not None:
            raise
        note(f"No rate predicted from {table_path}: {error}")
        table = None
    threads = None if table is None else table.device.get("threads")
    if threads not in (None, torch.get_num_threads()):
        note(f"{table_path} was timed with {threads} threads, and here are {torch.get_num_threads()}: measure again.")
    return {"calibration": calibration, "latency": table}


def _require_same_models(
    found: RankTrace | LatencyTable | None, model: Target, heads: DraftHeads, *, allow_mismatch: bool
) -> None:
    from topo_search.cli.inputs import require_fit

    if found is not None:
        require_fit("The file named", found.target, model.identity, allow_mismatch=allow_mismatch)
        require_fit("The file named", found.heads, heads.identity, allow_mismatch=allow_mismatch)


def _report(result: RaceResult, *, mode: str, as_json: bool) -> None:
    from topo_search.report.console import note, stdout
    from topo_search.report.tables import prediction_lines, race_table, ratio_lines

    if as_json:
        print(json.dumps(_as_json(result) | {"mode": mode}, indent=2))  # noqa: T201
        return
    stdout().print(race_table(result))
    for line in (*ratio_lines(result), *prediction_lines(result)):
        note(line)
    for standing in result.standings:
        for point in standing.divergences:
            kind = "near-tie" if point.near_tie else "filter edge" if point.filter_edge else "DIFFERENCE"
            gaps = "" if point.gaps is None else f" ({point.gaps[0]:.2g} in generate, {point.gaps[1]:.2g} here)"
            note(
                f"{kind}: {standing.name}, {point.prompt}, token {point.position}: {point.found}, not "
                f"{point.expected}; two best logits {point.gap:.2g} apart{gaps}, rounding explains {point.bound:.2g}"
            )
        for step in standing.mismatches:
            kind = "near-tie" if step.near_tie else "MISMATCH"
            counts = f"{step.decoded} accepted, replay {step.replayed}"
            note(f"{kind}: {standing.name}, {step.prompt}, row {step.row}: {counts}")


def _as_json(result: RaceResult) -> dict[str, Any]:
    from topo_search.identity import recorded

    rows = []
    for standing in result.standings:
        row = asdict(standing)
        first = row["divergences"][0] if row["divergences"] else None
        row["text_equal"] = None if standing.changes_text else standing.text_equal
        row["stats"] = {"accepted_histogram": list(standing.stats.histogram), "steps": standing.stats.steps}
        rows.append({**row, "measured_over_predicted": standing.measured_over_predicted, "first_divergence": first})
    return {
        "rule": recorded(result.rule),
        "changes_text": result.rule.changes_text,
        "contenders": rows,
        "ratios": [asdict(ratio) for ratio in result.ratios],
        "prompts": result.prompts,
        "repeats": result.repeats,
        "failures": result.failures,
    }
