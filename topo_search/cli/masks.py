"""`calibrate --acceptance typical`: record accept masks, or decode with the tree that was found from them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from topo_search.accepts import AcceptTrace
from topo_search.cli.inputs import output_file
from topo_search.files.accepts_file import ACCEPTS_SUFFIX
from topo_search.files.tree_file import TreeFile, read_tree
from topo_search.identity import RuleIdentity
from topo_search.report.console import note, progress
from topo_search.resources import packaged

if TYPE_CHECKING:
    from topo_search.calibrate import EncodedPrompt
    from topo_search.heads.base import DraftHeads
    from topo_search.target import Target

REROLLED_SUFFIX = ".rerolled-accepts.safetensors"  # not what optimize looks for by itself: its tree is not wide


def mask_file(out: Path | None, stem: str, rule: RuleIdentity, tree: Path | None) -> Path:
    """Where the masks go: the file name tells epsilon, delta, bonus and a tree of one's own apart."""
    words = [stem, "typical", f"{rule.epsilon:g}", f"{rule.delta:g}", rule.bonus]
    suffix = ACCEPTS_SUFFIX
    if tree is not None and _predicted_by_masks(read_tree(tree)) is not None:
        suffix = REROLLED_SUFFIX
    if tree is not None:
        words.append(tree.name.split(".")[0])
    return output_file(out, "_".join(map(str, words)), suffix)


def record_masks(
    target: Target,
    heads: DraftHeads,
    prompts: list[EncodedPrompt],
    *,
    rule: RuleIdentity,
    max_new_tokens: int,
    tree: Path | None,
    out: Path,
) -> None:
    """Decode the prompts with the tree, write the masks, and say what the tree itself brought."""
    from topo_search.decode.decoder import TreeDecoder
    from topo_search.device import device_record
    from topo_search.provenance import provenance
    from topo_search.recording import record_accepts

    file = read_tree(tree or packaged("trees/reference/medusa-63.tree.json"))
    shape = file.tree if tree else file.tree.pruned(heads.identity.num_heads)
    longest = max(len(prompt.tokens) for prompt in prompts)
    decoder = TreeDecoder(target, heads, shape, capacity=longest + max_new_tokens)
    with progress("Recording") as advance:
        masks = record_accepts(
            decoder,
            prompts,
            rule=rule,
            max_new_tokens=max_new_tokens,
            out=out,
            provenance=provenance() | {"device": device_record(target)["name"]},
            progress=lambda done, total, steps: advance(done, total, f"prompts, {steps} steps"),
        )
    _report(masks, file, out)


def _report(masks: AcceptTrace, file: TreeFile, out: Path) -> None:
    measured = masks.tokens_per_step(masks.tree)
    words = f"{measured:.3f} tokens per step over {len(masks.prompt_of_step)} steps, {masks.rule.in_words}"
    predicted = _predicted_by_masks(file)
    if predicted is not None:
        note(f"Decoded with the tree itself: {words}. The masks of the wide tree predicted {predicted:.3f}.")
        note(f"Wrote {out}")
        return
    note(f"The recording tree of {masks.tree.num_draft_nodes} nodes: {words}.")
    note(f"Wrote {out}")
    note(f"Next: topo-search optimize --acceptance typical --trace {out}")


def _predicted_by_masks(file: TreeFile) -> float | None:
    """What masks predicted for a tree that was found from them; None for any other tree."""
    origin: Any = file.made_from
    if origin is None or origin.rule is None or not origin.rule.changes_text or file.predicted is None:
        return None
    return file.predicted.tokens_per_step
