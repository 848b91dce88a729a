"""Record accept masks: decode prompts with a wide tree under typical acceptance, and keep what each step could take.

One prompt at a time, since the steps of a wide tree leave a batch nothing to gain. Finished prompts are kept beside the
output: a run that was interrupted continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from topo_search.accepts import AcceptTrace, joined_accepts
from topo_search.calibrate import EncodedPrompt, require_unchanged
from topo_search.decode.decoder import Decoded, TreeDecoder
from topo_search.decode.typical import Acceptable
from topo_search.errors import InputError, MismatchError
from topo_search.files.accepts_file import read_accepts, write_accepts
from topo_search.identity import RuleIdentity
from topo_search.trace import TracePrompt

Progress = Callable[[int, int, int], None]  # prompts done, prompts in all, steps so far


def record_accepts(
    decoder: TreeDecoder,
    prompts: Sequence[EncodedPrompt],
    *,
    rule: RuleIdentity,
    max_new_tokens: int,
    out: Path,
    provenance: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> AcceptTrace:
    """Decode every prompt with the decoder's tree and write the masks to `out`.

    Args:
        decoder: its tree is the wide one.
        prompts: at least one.
        rule: typical acceptance.
        max_new_tokens: cap of every answer.
        out: masks that are there, of the same identity, are extended by the prompts they lack.
        provenance: recorded in the file.
        progress: called after every prompt.

    Raises:
        InputError: the rule is an exact one, the tree is empty or there is no prompt.
        MismatchError: `out` holds masks of another identity, or of other prompts under the same ids.
    """
    if not prompts:
        raise InputError("There is no prompt to record accept masks on.")
    if not decoder.tree.paths:
        raise InputError("Accept masks need a tree with at least one node.")
    empty = accepts_of(decoder, (), (), rule=rule, max_new_tokens=max_new_tokens)
    partial = out.with_name(out.name + ".part")
    found = joined_accepts([empty, *(_readable(path, empty) for path in (out, partial) if path.exists())])
    require_unchanged(found.prompts, prompts)
    known = {prompt.id for prompt in found.prompts}
    for number, prompt in enumerate(prompts, start=1):
        if prompt.id not in known:
            seen: list[Acceptable] = []
            answer = decoder.generate(
                prompt.tokens, max_new_tokens=max_new_tokens, rule=rule, request=prompt.request, observe=seen.append
            )
            part = accepts_of(decoder, [(prompt, answer)], [seen], rule=rule, max_new_tokens=max_new_tokens)
            found = joined_accepts([found, part])
            write_accepts(partial, found)
        if progress:
            progress(number, len(prompts), len(found.prompt_of_step))
    wanted = {prompt.id: index for index, prompt in enumerate(prompts)}
    order = sorted(found.prompts, key=lambda prompt: wanted.get(prompt.id, len(wanted)))
    found = joined_accepts([empty, *(found.select(lambda p, id=one.id: p.id == id) for one in order)])  # type: ignore[misc]
    found = replace(found, provenance=provenance or {})
    write_accepts(out, found)
    partial.unlink(missing_ok=True)
    return found


def accepts_of(
    decoder: TreeDecoder,
    answers: Sequence[tuple[EncodedPrompt, Decoded]],
    seen: Sequence[Sequence[Acceptable]],
    *,
    rule: RuleIdentity,
    max_new_tokens: int,
) -> AcceptTrace:
    """The masks of given answers and of what their steps found acceptable."""
    assert decoder.heads is not None
    masks, prompt_of_step, remaining, entries = [], [], [], []
    for index, ((prompt, answer), steps) in enumerate(zip(answers, seen, strict=True)):
        left = len(answer.tokens) - 1
        entries.append(
            TracePrompt(
                id=prompt.id,
                workload=prompt.workload,
                prompt_tokens=len(prompt.tokens),
                answer_tokens=len(answer.tokens),
                end="eos" if answer.end == "eos" else "cap",
                digest=prompt.digest,
            )
        )
        for step, accepted in zip(steps, answer.accepted, strict=True):
            mask = np.zeros(decoder.tree.verify_width, dtype=np.bool_)
            mask[list(step.slots)] = True
            masks.append(mask[1:])
            prompt_of_step.append(index)
            remaining.append(left)
            left -= accepted + 1
    return AcceptTrace(
        prompts=tuple(entries),
        tree=decoder.tree,
        accepted=np.stack(masks) if masks else np.zeros((0, decoder.tree.num_draft_nodes), dtype=np.bool_),
        prompt_of_step=np.array(prompt_of_step, dtype=np.int64),
        remaining=np.array(remaining, dtype=np.int64),
        target=decoder.target.identity,
        heads=decoder.heads.identity,
        rule=rule,
        max_new_tokens=max_new_tokens,
    )


def _readable(path: Path, identity: AcceptTrace) -> AcceptTrace:
    found = read_accepts(path)
    try:
        identity.require_same_identity(found)
    except MismatchError as error:
        raise MismatchError(
            f"{path} holds accept masks that cannot be continued: {error} Give another --out."
        ) from None
    return found
