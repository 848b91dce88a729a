"""A toy target with path-local draft heads, and a decoder that tries a tree token by token.

Slow and literal on purpose: it is what replay must reproduce without running anything.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache

import numpy as np
from factories import HEADS, TARGET

from topo_search.identity import GREEDY
from topo_search.trace import PAST_END, RankTrace, TracePrompt
from topo_search.tree import Path, Tree

Tokens = tuple[int, ...]
VOCAB, END_OF_TEXT, DEPTH, RESOLVED = 16, 7, 3, 4
PROMPTS: tuple[Tokens, ...] = tuple((index, 3, index) for index in range(12))


@cache
def next_token(tokens: Tokens) -> int:
    """The target's own choice."""
    return zlib.crc32(bytes(tokens)) % VOCAB


@cache
def candidates(committed: Tokens, path: Tokens) -> tuple[int, ...]:
    """The head's list after the root and the path's tokens; the target's choice is often near its front."""
    truth, draw = next_token(committed + path), zlib.crc32(bytes((*path, 99, *committed)))
    others = sorted((token for token in range(VOCAB) if token != truth), key=lambda token: (token * 7 + draw) % 31)
    place = (0, 0, 1, 2, 9)[draw % 5]
    return (*others[:place], truth, *others[place:])


def decode(prompt: Tokens, tree: Tree, cap: int) -> tuple[Tokens, list[int]]:
    """The answer and the accepted drafted tokens of every step."""
    answer, accepted = [next_token(prompt)], []
    while answer[-1] != END_OF_TEXT and len(answer) < cap:
        emitted = _step(prompt + tuple(answer[:-1]), answer[-1], tree, cap - len(answer))
        answer += emitted
        accepted.append(len(emitted) - 1)
    return tuple(answer), accepted


def _step(committed: Tokens, root: int, tree: Tree, room: int) -> list[int]:
    path: Path | None = ()
    emitted: list[int] = []
    while path is not None and len(emitted) < room and END_OF_TEXT not in emitted:
        tokens = (root, *emitted)
        truth, listed = next_token(committed + tokens), candidates(committed, tokens)
        children = [child for child in tree.paths if child[:-1] == path]
        path = next((child for child in children if listed[child[-1]] == truth), None)
        emitted.append(truth)
    return emitted


def record(prompts: Sequence[Tokens], cap: int) -> RankTrace:
    """The trace that calibration would write: the rank of the true continuation at every row and depth."""
    answers = [decode(prompt, Tree(()), cap)[0] for prompt in prompts]
    rows = [
        [_rank(prompt + y[:j], y[j:], depth) for depth in range(1, DEPTH + 1)]
        for prompt, y in zip(prompts, answers, strict=True)
        for j in range(len(y) - 1)
    ]
    return RankTrace(
        prompts=tuple(
            TracePrompt(
                id=str(index),
                workload="toy",
                prompt_tokens=len(prompt),
                answer_tokens=len(y),
                end="eos" if y[-1] == END_OF_TEXT else "cap",
            )
            for index, (prompt, y) in enumerate(zip(prompts, answers, strict=True))
        ),
        ranks=np.array(rows, dtype=np.int16).reshape(len(rows), DEPTH),
        resolved_ranks=RESOLVED,
        target=TARGET,
        heads=HEADS,
        rule=GREEDY,
        max_new_tokens=cap,
    )


def _rank(committed: Tokens, rest: Tokens, depth: int) -> int:
    if depth >= len(rest):
        return PAST_END
    return min(candidates(committed, rest[:depth]).index(rest[depth]), RESOLVED)
