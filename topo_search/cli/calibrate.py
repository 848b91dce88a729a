"""`topo-search calibrate`: profile the draft heads on prompts, then time the step on the same device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from topo_search.cli import options

if TYPE_CHECKING:
    from topo_search.calibrate import Calibration, EncodedPrompt
    from topo_search.files.prompts import Prompt
    from topo_search.heads.base import DraftHeads
    from topo_search.identity import RuleIdentity
    from topo_search.target import Target


def calibrate(
    target: options.Target = "demo",
    heads: options.Heads = "demo-medusa",
    heads_dtype: options.HeadsDtype = None,
    prompts: options.Prompts = None,
    workload: options.Workload = None,
    split: options.Split = None,
    num_prompts: options.NumPrompts = None,
    max_new_tokens: options.MaxNewTokens = options.DEFAULT_MAX_NEW_TOKENS,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts answered together.")] = 32,
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
    out: Annotated[Path | None, typer.Option(help="Trace file, or folder for trace and table.")] = None,
    tree: Annotated[
        Path | None,
        typer.Option(help="With typical acceptance: the wide tree to record with; Medusa's 63 nodes by default."),
    ] = None,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Do not time the step afterwards.")] = False,
    dtype: options.Dtype = "float32",
    quantize: options.Quantize = None,
    device: options.Device = "cpu",
    attention: options.Attention = "auto",
    tokenizer: options.Tokenizer = None,
    mode: options.Mode = "auto",
) -> None:
    """Let the target answer prompts and record where its tokens rank in the heads' lists.

    With --acceptance typical, which changes the text, decode with a wide tree and record what it could accept instead.
    Interrupted and started again it continues. Ends with a quick `measure`.

    Examples: topo-search calibrate | topo-search calibrate --prompts mine.jsonl --temperature 0.7 --seed 1
    """
    from topo_search.cli import inputs

    drawn = inputs.chosen_rule(temperature, top_k, top_p, min_p, noise_share, seed)
    rule = inputs.accepting_rule(drawn, acceptance, epsilon, delta, bonus)
    asked = "" if prompts is None else prompts.stem
    path = _output(out, _stem(rule, target, quantize or "", heads, asked, max_new_tokens), rule, tree)
    found = inputs.chosen_prompts(
        prompts, workload=workload, split=split, default_split="calibration", num_prompts=num_prompts
    )
    inputs.require_heads(heads)
    model = inputs.load_model(
        target, dtype=dtype, device=device, attention=attention, tokenizer=tokenizer, quantize=quantize, mode=mode
    )
    draft_heads = inputs.load_draft_heads(heads, model, dtype=heads_dtype)
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "rule": rule}
    _profile(model, draft_heads, found, path, settings, tree=tree, batch_size=batch_size)
    if not no_measure:
        from topo_search.cli.measure import quick_measure

        stem = inputs.artefact_stem(target, quantize or "", heads)
        quick_measure(model, draft_heads, out=path.parent, stem=stem, seed=seed)


def _output(out: Path | None, stem: str, rule: RuleIdentity, tree: Path | None) -> Path:
    """Where the trace goes, or the masks.

    Raises:
        InputError: a tree is named for a rule that needs none.
    """
    from topo_search.cli.inputs import output_file
    from topo_search.cli.masks import mask_file
    from topo_search.errors import InputError
    from topo_search.files.trace_file import TRACE_SUFFIX

    if rule.changes_text:
        return mask_file(out, stem, rule, tree)
    if tree is not None:
        raise InputError("--tree names the tree that typical acceptance records with; a rank trace needs none.")
    return output_file(out, stem, TRACE_SUFFIX)


def _profile(
    model: Target,
    heads: DraftHeads,
    prompts: list[Prompt],
    path: Path,
    settings: dict[str, Any],
    *,
    tree: Path | None,
    batch_size: int,
) -> None:
    """Answer the prompts and write the trace, or with a rule that changes the text the masks."""
    from topo_search.calibrate import encode_prompts
    from topo_search.cli.masks import record_masks
    from topo_search.report.console import note

    cap = settings["max_new_tokens"]
    encoded = encode_prompts(model, prompts, max_new_tokens=cap)
    note(f"Answering {len(encoded)} prompts, at most {cap} tokens each ...")
    if settings["rule"].changes_text:
        record_masks(model, heads, encoded, tree=tree, out=path, **settings)
        return
    result = _recorded(model, heads, encoded, path, settings | {"batch_size": batch_size})
    _report(result, vocabulary=model.known_ids)
    others = len(result.trace.prompts) - len({prompt.id for prompt in encoded})
    if others:
        note(f"{path} held {others} other prompts, which stay in it and count; give another --out to keep them apart.")
    note(f"Wrote {path}")
    note(f"Next: topo-search optimize --budget 64{_named(path)}")


def _stem(rule: RuleIdentity, *words: object) -> str:
    """The trace's name: what was calibrated, and how its text was drawn where it was."""
    from topo_search.cli.inputs import artefact_stem

    if not rule.samples:
        return artefact_stem(*words)
    filters = {"k": rule.top_k, "p": rule.top_p, "min": rule.min_p, "share": rule.noise_share or None}
    drawn = [f"{name}{value:g}" for name, value in filters.items() if value is not None]
    return artefact_stem(*words, f"T{rule.temperature:g}", *drawn, f"seed{rule.seed}")


def _named(path: Path) -> str:
    """The option that makes `optimize` read the trace, where it would not look for it by itself."""
    from topo_search.cli.options import CALIBRATION_FOLDER

    return "" if path.parent == CALIBRATION_FOLDER else f" --trace {path}"


def _recorded(
    model: Target, heads: DraftHeads, prompts: list[EncodedPrompt], out: Path, settings: dict[str, Any]
) -> Calibration:
    """Calibrate behind a progress bar."""
    from topo_search.calibrate import calibrate as run
    from topo_search.device import device_record
    from topo_search.provenance import provenance
    from topo_search.report.console import progress

    with progress("Calibrating") as advance:
        return run(
            model,
            heads,
            prompts,
            out=out,
            provenance=provenance() | {"device": device_record(model)["name"]},
            progress=lambda done, total, rows: advance(done, total, f"prompts, {rows} positions"),
            **settings,
        )


def _report(result: Calibration, *, vocabulary: int) -> None:
    from topo_search.accuracy import near_chance_heads
    from topo_search.report.console import note, stdout
    from topo_search.report.tables import accuracy_table

    stdout().print(accuracy_table(result.trace))
    for depth in result.constant_heads:
        note(f"Warning: head {depth} always proposes the same token, whatever it reads; it only costs time.")
    for depth in near_chance_heads(result.trace, vocabulary):
        note(f"Warning: head {depth} finds the true token no more often than chance; was it trained for this target?")
