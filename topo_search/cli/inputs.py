"""What commands load: the model, its heads, prompts, and the newest trace and table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from topo_search.cli.options import CALIBRATION_FOLDER, Acceptance, Bonus
from topo_search.errors import InputError, MismatchError
from topo_search.files.artefacts import newest
from topo_search.files.latency_file import LATENCY_SUFFIX
from topo_search.files.prompts import Prompt, packaged_prompts, read_prompts, select_prompts
from topo_search.files.trace_file import TRACE_SUFFIX
from topo_search.identity import DELTA, EPSILON, RuleIdentity, differing_fields, sampling_rule, typical_rule
from topo_search.report.console import note
from topo_search.resources import packaged

if TYPE_CHECKING:
    from topo_search.heads.base import DraftHeads
    from topo_search.target import Target

_SHIPPED = {
    TRACE_SUFFIX: "calibration/demo/demo.trace.safetensors",
    LATENCY_SUFFIX: "calibration/demo/demo.latency.json",
}
_SNIFFED = 4096  # bytes of a file's head in which its format is named
TRACE, LATENCY = "rank trace", "latency table"
_MARKS = {TRACE: b"topo-search/trace", LATENCY: b'"topo-search/latency"', "tree": b'"topo-search/tree"'}
_OPTION = {TRACE: "--trace", LATENCY: "--latency", "tree": "a tree (show, export, bench --tree)"}
T = TypeVar("T")


def load_model(
    target: str,
    *,
    dtype: str,
    device: str,
    attention: str,
    tokenizer: str | None,
    quantize: str | None = None,
    mode: str = "auto",
    pack: bool = True,
) -> Target:
    """The target, ready to decode in `mode`, with a word about what happens while it loads.

    Raises:
        InputError: the target cannot be loaded, or cannot decode in that mode.
    """
    from topo_search.decode.modes import in_mode, ready_mode

    ready = ready_mode(mode, device)
    weights = dtype if quantize is None else f"{quantize} weights, {dtype}"
    note(f"Loading target {target} ({weights}, {device}, {ready}) ...")
    from transformers.utils import logging

    from topo_search.target import load_target

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    loaded = load_target(
        target, dtype=dtype, device=device, attention=attention, tokenizer=tokenizer, quantize=quantize, pack=pack
    )
    return in_mode(loaded, ready, say=note)


def require_heads(spec: str) -> None:
    """Refuse heads that do not exist, before a model is loaded for them.

    Raises:
        InputError: there is no such folder.
    """
    from topo_search.heads.checkpoints import heads_folder

    heads_folder(spec)


def load_draft_heads(heads: str, target: Target, *, dtype: str | None = None) -> DraftHeads:
    """The draft heads, in the target's precision unless told otherwise."""
    from topo_search.heads import load_heads
    from topo_search.target.load import known_dtype

    return load_heads(heads, target, dtype=None if dtype is None else known_dtype(dtype))


def chosen_prompts(
    prompts: Path | None, *, workload: str | None, split: str | None, default_split: str, num_prompts: int | None
) -> list[Prompt]:
    """The prompts that the options name, in order; `default_split` is for topo-search's own sets.

    Raises:
        InputError: the file, workload or split is unknown, or nothing is left.
    """
    if num_prompts is not None and num_prompts < 1:
        raise InputError(f"--num-prompts is {num_prompts}; it must be at least 1.")
    if prompts is None:
        found = packaged_prompts(workload=workload, split=split or default_split)
    else:
        found = select_prompts(read_prompts(prompts), workload, split or "all")
    return found if num_prompts is None else evenly(found, num_prompts)


def evenly(prompts: list[Prompt], count: int) -> list[Prompt]:
    """`count` prompts, the same number from every workload as far as they go, in their order."""
    seen: dict[str, int] = {}
    turns = []
    for index, prompt in enumerate(prompts):
        turns.append((seen.get(prompt.workload, 0), index))
        seen[prompt.workload] = seen.get(prompt.workload, 0) + 1
    chosen = sorted(index for _, index in sorted(turns)[:count])
    return [prompts[index] for index in chosen]


def chosen_rule(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None, noise_share: float, seed: int
) -> RuleIdentity:
    """The decoding rule that the options name.

    Raises:
        InputError: a value is out of range.
    """
    rule = sampling_rule(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, noise_share=noise_share
    )
    given = {"--top-k": top_k, "--top-p": top_p, "--min-p": min_p, "--noise-share": noise_share or None}
    idle = [f"{name} {value:g}" for name, value in given.items() if value is not None]
    if idle and not rule.samples:
        note(f"Warning: {', '.join(idle)} changes nothing at temperature 0, which is greedy; add --temperature.")
    return rule


def accepting_rule(
    drawn: RuleIdentity, acceptance: Acceptance, epsilon: float | None, delta: float | None, bonus: Bonus | None
) -> RuleIdentity:
    """The rule of `chosen_rule` as the acceptance options change it, with a word where the text changes.

    Raises:
        InputError: a value is out of range, or belongs to another rule.
    """
    if acceptance is Acceptance.exact:
        if (epsilon, delta, bonus) != (None, None, None):
            raise InputError("--epsilon, --delta and --bonus belong to --acceptance typical; add it or leave them out.")
        return drawn
    if drawn.noise_share:
        raise InputError("--noise-share finds the draw, which typical acceptance does not look for; leave it out.")
    rule = typical_rule(
        temperature=drawn.temperature,
        epsilon=EPSILON if epsilon is None else epsilon,
        delta=DELTA if delta is None else delta,
        bonus=(bonus or Bonus.sampled).value,
        top_k=drawn.top_k,
        top_p=drawn.top_p,
        min_p=drawn.min_p,
        seed=drawn.seed or 0,
    )
    if rule.changes_text:
        note(f"Rule: {rule.in_words}. The text is not plain decoding's, and depends on the tree.")
    else:
        note("At temperature 0 typical acceptance is greedy acceptance, as in Medusa: the text is plain decoding's.")
    return rule


def output_file(out: Path | None, stem: str, suffix: str) -> Path:
    """Where a result goes: `out` as a file, in `out` as a folder, or in ./calibration."""
    if out is not None and out.name.endswith(suffix):
        return out
    if out is not None and out.suffix and not out.is_dir():
        raise InputError(f"--out {out} must be a folder or end in {suffix}.")
    return (out or CALIBRATION_FOLDER) / (stem + suffix)


def artefact_stem(*about: object) -> str:
    """A file name from what an artefact is about."""
    words = (re.sub(r"[^A-Za-z0-9.]+", "-", Path(str(part)).name).strip("-") for part in about)
    return "_".join(word for word in words if word)


def newest_or_shipped(given: Path | None, suffix: str) -> Path | None:
    """The file given, else the newest in ./calibration, else the one shipped for the demo, else None."""
    if given is not None:
        return given
    found = newest(CALIBRATION_FOLDER, suffix)
    if found is not None:
        return found
    try:
        return packaged(_SHIPPED[suffix])
    except InputError:
        return None


def require_kind(path: Path, wanted: str) -> None:
    """Refuse a file that is one of ours, but of another kind: two options were swapped.

    Raises:
        InputError: says what the file is, and which option takes it.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_SNIFFED)
    except OSError:
        return  # the reader says what is wrong
    found = next((kind for kind, mark in _MARKS.items() if mark in head), wanted)
    if found != wanted:
        raise InputError(f"{path} is a {found}, but {_OPTION[wanted]} takes a {wanted}; give it as {_OPTION[found]}.")


def is_shipped(path: Path) -> bool:
    """Whether a trace or table is the demo's own, that came with topo-search."""
    return path.parent == packaged("calibration/demo")


def require_fit(
    what: str,
    given: Any,
    loaded: Any,
    *,
    allow_mismatch: bool,
    way_out: str = "make it for this one",
    ignore: tuple[str, ...] = ("name",),
) -> None:
    """Refuse, or with the flag warn about, an artefact made for something else; unknown (None) fits.

    Raises:
        MismatchError: the identities differ and the flag is off.
    """
    if given is None or not (differing := differing_fields(given, loaded, ignore=ignore)):
        return
    refuse_mismatch(what, differing, allow_mismatch=allow_mismatch, way_out=way_out)


def refuse_mismatch(what: str, differing: list[str], *, allow_mismatch: bool, way_out: str) -> None:
    """Refuse, or with the flag warn about, what differs.

    Raises:
        MismatchError: the flag is off.
    """
    message = f"{what} was made for something else: {'; '.join(differing)}."
    if not allow_mismatch:
        raise MismatchError(f"{message} Way out: {way_out}, or pass --allow-mismatch.")
    note(f"Warning: {message}")
