"""Calibration: the target answers the prompts, the heads run along the true path, a `RankTrace` comes out.

The hidden states that chose the answer's tokens are those that the heads read, so the target runs once. Finished
batches are kept beside the output: a run that was interrupted continues, and a finished trace of the same identity is
extended by the prompts it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from topo_search.answers import Answer, answer_batch, batches_by_length, digest_of, request_of
from topo_search.decode.sampling import candidate_noise
from topo_search.errors import InputError, MismatchError
from topo_search.files.prompts import Prompt
from topo_search.files.trace_file import read_trace, write_trace
from topo_search.heads.base import DraftHeads, ids_of
from topo_search.heads.projection import with_noise
from topo_search.identity import GREEDY, RuleIdentity
from topo_search.ranking import top_tokens
from topo_search.target.adapter import Target
from topo_search.trace import PAST_END, RankTrace, TracePrompt, merge_traces

RESOLVED_RANKS = 32
_ROWS_AT_ONCE = 64

Progress = Callable[[int, int, int], None]  # prompts done, prompts in all, positions so far


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt as token ids, with the digest that tells whether its text changed."""

    id: str
    workload: str
    tokens: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Hash of the token ids."""
        return digest_of(self.tokens)

    @property
    def request(self) -> int:
        """Number of its sequence for sampling."""
        return request_of(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A recorded trace, and the heads that proposed one and the same token throughout the last batch."""

    trace: RankTrace
    constant_heads: tuple[int, ...]


def encode_prompts(target: Target, prompts: Sequence[Prompt], *, max_new_tokens: int) -> list[EncodedPrompt]:
    """Token ids of every prompt, chats through the tokenizer's own template.

    Raises:
        InputError: there is no prompt, the tokenizer has no template, or a prompt leaves no room for its answer.
    """
    if not prompts:
        raise InputError("No prompt is left to run; check --prompts, --workload and --split.")
    encoded = [
        EncodedPrompt(id=prompt.id, workload=prompt.workload, tokens=tuple(_encode(target, prompt)))
        for prompt in prompts
    ]
    limit = target.position_limit
    for prompt in encoded:
        if not prompt.tokens:
            raise InputError(f"Prompt {prompt.id} has no token.")
        if limit is not None and len(prompt.tokens) + max_new_tokens > limit:
            raise InputError(
                f"Prompt {prompt.id} has {len(prompt.tokens)} tokens; with {max_new_tokens} new ones it exceeds the "
                f"target's context of {limit}. Shorten it or lower --max-new-tokens."
            )
    return encoded


def _encode(target: Target, prompt: Prompt) -> list[int]:
    if prompt.messages is None:
        ids: list[int] = target.tokenizer(prompt.text).input_ids
        return ids
    if not getattr(target.tokenizer, "chat_template", None):
        raise InputError(
            f"Prompt {prompt.id} is a conversation, but the tokenizer of {target.identity.name} has no chat template. "
            'Use an instruct model (or --tokenizer with a template), or give raw text rows: {"text": ...}.'
        )
    return target.encode_chat([dict(message) for message in prompt.messages])


def calibrate(
    target: Target,
    heads: DraftHeads,
    prompts: Sequence[EncodedPrompt],
    *,
    out: Path,
    max_new_tokens: int,
    rule: RuleIdentity = GREEDY,
    batch_size: int = 32,
    provenance: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Record the rank trace of `prompts` in `out`, continuing what an earlier run left.

    Args:
        target, heads: as loaded; the heads must be path-local.
        prompts: what to answer.
        out: trace file; prompts that it or its unfinished part hold already are not run again.
        max_new_tokens: cap of every answer.
        rule: greedy, or sampling; part of the trace's identity.
        batch_size: prompts answered together.
        provenance: recorded in the file.
        progress: called after every batch.

    Raises:
        InputError: the heads' lists depend on more than committed tokens, root and path, so that no replay is exact.
        MismatchError: `out` holds a trace of another identity, or of other prompts under the same ids.
    """
    if not heads.path_local:
        raise InputError(
            f"Heads {heads.identity.name} are not path-local: their lists depend on where earlier steps began, so a "
            "trace cannot be replayed. Race them with topo-search bench instead."
        )
    empty = empty_trace(target, heads, max_new_tokens=max_new_tokens, rule=rule, provenance=provenance or {})
    partial = out.with_name(out.name + ".part")
    trace = merge_traces([empty, *(_readable(path, empty) for path in (out, partial) if path.exists())])
    require_unchanged(trace.prompts, prompts)
    known = {prompt.id for prompt in trace.prompts}
    missing = [prompt for prompt in prompts if prompt.id not in known]
    done, constant = len(prompts) - len(missing), []
    for batch in batches_by_length([len(prompt.tokens) for prompt in missing], batch_size):
        chosen = [missing[index] for index in batch]
        answers = answer_batch(
            target,
            [prompt.tokens for prompt in chosen],
            max_new_tokens=max_new_tokens,
            rule=rule,
            requests=[prompt.request for prompt in chosen],
            keep_prompt_states=heads.reads_prefix,
        )
        trace = merge_traces([trace, trace_of_answers(empty, heads, chosen, answers)])
        write_trace(partial, trace)
        done, constant = done + len(batch), constant_heads(heads, answers)
        if progress:
            progress(done, len(prompts), len(trace.ranks))
    trace = replace(_in_order(trace, prompts), provenance=provenance or {})
    write_trace(out, trace)
    partial.unlink(missing_ok=True)
    return Calibration(trace=trace, constant_heads=tuple(constant))


def empty_trace(
    target: Target,
    heads: DraftHeads,
    *,
    max_new_tokens: int,
    rule: RuleIdentity = GREEDY,
    provenance: dict[str, Any] | None = None,
) -> RankTrace:
    """A trace without prompts: the identity that recorded rows are added to."""
    return RankTrace(
        prompts=(),
        ranks=np.zeros((0, heads.identity.num_heads), dtype=np.int16),
        resolved_ranks=min(RESOLVED_RANKS, target.known_ids if heads.token_map is None else len(heads.token_map)),
        target=target.identity,
        heads=heads.identity,
        rule=rule,
        max_new_tokens=max_new_tokens,
        provenance=provenance or {},
    )


def trace_of_answers(
    identity: RankTrace, heads: DraftHeads, prompts: Sequence[EncodedPrompt], answers: Sequence[Answer]
) -> RankTrace:
    """The trace of given answers, in the identity of `identity`."""
    blocks = [
        true_ranks(
            heads,
            answer_features(heads, answer),
            torch.tensor(answer.tokens),
            identity.resolved_ranks,
            rule=identity.rule,
            request=prompt.request,
            prompt_tokens=len(prompt.tokens),
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return replace(
        identity,
        prompts=tuple(
            TracePrompt(
                id=prompt.id,
                workload=prompt.workload,
                prompt_tokens=len(prompt.tokens),
                answer_tokens=len(answer.tokens),
                end=answer.end,
                digest=prompt.digest,
            )
            for prompt, answer in zip(prompts, answers, strict=True)
        ),
        ranks=np.concatenate([block.numpy() for block in blocks]),
    )


def true_ranks(
    heads: DraftHeads,
    features: Tensor,
    tokens: Int[Tensor, " answer"],
    resolved: int,
    *,
    rule: RuleIdentity = GREEDY,
    request: int = 0,
    prompt_tokens: int = 0,
) -> Int[Tensor, "rows depth"]:
    """Ranks of the true continuation at every row and depth of one answer, int16, with both sentinels.

    Args:
        heads: the draft heads.
        features: `[answer, hidden]`, what the heads read where each token was chosen.
        tokens: y_0 .. y_{N-1}.
        resolved: ranks told apart; a token beyond them gets `resolved`, one past the end -1.
        rule: by which the answer was chosen; its `noise_share` takes part in the ranking.
        request, prompt_tokens: of the answer's sequence, for that share.
    """
    depth, rows = heads.identity.num_heads, tokens.shape[0] - 1
    ranks = torch.full((rows, depth), PAST_END, dtype=torch.int16)
    path = true_paths(tokens, depth)
    observed = torch.arange(1, depth + 1)[None, :] <= (rows - torch.arange(rows))[:, None]
    with torch.inference_mode():
        for start in range(0, rows, _ROWS_AT_ONCE):
            part = slice(start, min(start + _ROWS_AT_ONCE, rows))
            scores = heads.path_scores(features[part], path[part, :-1])
            roots = prompt_tokens + torch.arange(part.start, part.stop, device=scores.device)
            noise = candidate_noise(
                rule, torch.full_like(roots, request), roots, depth=depth, vocab=_ids(heads, scores)
            )
            columns = top_tokens(scores if noise is None else with_noise(scores, noise, heads.token_map), resolved)
            lists = ids_of(heads, columns).cpu()
            hits = lists == path[part, 1:, None]
            found = torch.where(hits.any(dim=-1), hits.to(torch.uint8).argmax(dim=-1), resolved)
            ranks[part] = torch.where(observed[part], found, PAST_END).to(torch.int16)
    return ranks


def _ids(heads: DraftHeads, scores: Tensor) -> int:
    """Target ids that the score columns reach up to."""
    return scores.shape[-1] if heads.token_map is None else int(heads.token_map[-1]) + 1


def answer_features(heads: DraftHeads, answer: Answer) -> Float[Tensor, "answer hidden"]:
    """What the heads read where each of the answer's tokens was chosen."""
    if not heads.reads_prefix:
        return heads.features(answer.states, torch.tensor(answer.tokens))
    assert answer.prompt_states is not None
    states = torch.cat([answer.prompt_states, answer.states])
    following = torch.tensor([*answer.prompt[1:], *answer.tokens])
    with torch.inference_mode():
        return heads.features(states, following)[len(answer.prompt_states) :]


def true_paths(tokens: Int[Tensor, " answer"], depth: int) -> Int[Tensor, "rows depth_plus_one"]:
    """Row j: the root y_j, then y_{j+1} .. y_{j+depth}, zero past the end."""
    padded = torch.cat([tokens, tokens.new_zeros(depth)])
    return padded.unfold(0, depth + 1, 1)[: tokens.shape[0] - 1]


def constant_heads(heads: DraftHeads, answers: Sequence[Answer]) -> list[int]:
    """Depths whose head puts the same token first at every row of `answers`, whatever it reads."""
    constant = set(range(1, heads.identity.num_heads + 1))
    first: Tensor | None = None
    with torch.inference_mode():
        for answer in answers:
            if not constant or len(answer.tokens) < 2:
                continue
            path = true_paths(torch.tensor(answer.tokens), heads.identity.num_heads)[:_ROWS_AT_ONCE, :-1]
            features = answer_features(heads, answer)[: len(path)]
            best = top_tokens(heads.path_scores(features, path), 1)[..., 0].cpu()
            first = best[0] if first is None else first
            constant -= {depth for depth in constant if bool((best[:, depth - 1] != first[depth - 1]).any())}
    return sorted(constant) if first is not None else []


def _readable(path: Path, identity: RankTrace) -> RankTrace:
    trace = read_trace(path)
    try:
        identity.require_same_identity(trace)
    except MismatchError as error:
        raise MismatchError(f"{path} holds a trace that cannot be continued: {error} Give another --out.") from None
    return trace


def require_unchanged(known: Sequence[TracePrompt], prompts: Sequence[EncodedPrompt]) -> None:
    """Refuse to continue with other text under an id that is already recorded.

    Raises:
        MismatchError: names the first such prompt.
    """
    recorded = {prompt.id: prompt.digest for prompt in known}
    for prompt in prompts:
        if recorded.get(prompt.id, prompt.digest) != prompt.digest:
            raise MismatchError(
                f"Prompt {prompt.id} was calibrated with other text before; give it another id or another --out."
            )


def _in_order(trace: RankTrace, prompts: Sequence[EncodedPrompt]) -> RankTrace:
    """The same trace with its prompts in the order asked for, so that the file does not depend on interruptions."""
    wanted = {prompt.id: index for index, prompt in enumerate(prompts)}
    order = sorted(range(len(trace.prompts)), key=lambda i: (wanted.get(trace.prompts[i].id, len(wanted)), i))
    blocks = [trace.ranks[trace.starts[i] : trace.starts[i + 1]] for i in order]
    return replace(trace, prompts=tuple(trace.prompts[i] for i in order), ranks=np.concatenate(blocks))
