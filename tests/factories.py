"""Small traces, latency tables and trees for the tests."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from topo_search.cost import WHATEVER_EXPANDED, LatencyTable, Timing
from topo_search.identity import GREEDY, HeadsIdentity, TargetIdentity
from topo_search.trace import PAST_END, RankTrace, TracePrompt
from topo_search.tree import Path, Tree

TARGET = TargetIdentity(name="toy", fingerprint="t0", dtype="float32")
HEADS = HeadsIdentity(name="toy heads", kind="medusa", fingerprint="h0", num_heads=4)

# FIELD-CASES, table A: per depth, the probability of each rank.
TABLE_A = ((0.60, 0.15, 0.05), (0.40, 0.10, 0.05), (0.25, 0.10, 0.05))

repeatable = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def goldens() -> dict[str, Any]:
    """Figures that others published or measured."""
    return json.loads(FilePath(__file__).with_name("goldens.json").read_text())


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Hypothesis forbids `random` inside strategies, and beartype's checks sample with it."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


@random_state_kept()
def trace_of(
    *answers: Sequence[Sequence[int]],
    resolved: int = 3,
    depth: int | None = None,
    prompt_tokens: Sequence[int] | None = None,
    cap: int = 64,
) -> RankTrace:
    """A trace of prompts p0, p1, ..., each given by its rows; entries past the answer's end become -1."""
    rows = [row for answer in answers for row in answer]
    ranks = np.array(rows, dtype=np.int16).reshape(len(rows), depth or len(rows[0]))
    remaining = np.array([len(answer) - row for answer in answers for row in range(len(answer))], dtype=np.int64)
    ranks[np.arange(1, ranks.shape[1] + 1) > remaining[:, None]] = PAST_END
    lengths = prompt_tokens or [10] * len(answers)
    prompts = [
        TracePrompt(id=f"p{i}", workload="code", prompt_tokens=length, answer_tokens=len(answer) + 1, end="eos")
        for i, (answer, length) in enumerate(zip(answers, lengths, strict=True))
    ]
    return RankTrace(
        prompts=tuple(prompts),
        ranks=ranks,
        resolved_ranks=resolved,
        target=TARGET,
        heads=HEADS,
        rule=GREEDY,
        max_new_tokens=cap,
    )


def drawn_trace(rank_table: Sequence[Sequence[float]], *, prompts: int, rows: int, seed: int = 0) -> RankTrace:
    """Independent draws from a rank table: steps start at rows like any other, so E[tokens] = 1 + sum of P."""
    rng = np.random.default_rng(seed)
    columns = [rng.choice(len(p) + 1, size=prompts * rows, p=[*p, 1 - sum(p)]) for p in rank_table]
    ranks = np.stack(columns, axis=1).reshape(prompts, rows, len(rank_table))
    return trace_of(*ranks.tolist(), resolved=len(rank_table[0]), cap=rows + 1)


def timing(median_ms: float | None) -> Timing:
    return Timing(median_ms=median_ms, p10_ms=median_ms, p90_ms=median_ms, count=5)


def latency_table(
    verify_ms: Mapping[int, float],
    draft_ms: Sequence[float] = (0.0, 0.0, 0.0, 0.0),
    *,
    contexts: Mapping[int, float] | None = None,
) -> LatencyTable:
    """Step times by width, times a factor per context, plus draft times by depth from 1 up, whatever is expanded."""
    factors = contexts or {16: 1.0}
    return LatencyTable(
        verify={(1, c, width): timing(ms * factor) for c, factor in factors.items() for width, ms in verify_ms.items()},
        draft={(1, depth, WHATEVER_EXPANDED): timing(ms) for depth, ms in enumerate(draft_ms, start=1)},
        target=TARGET,
        heads=HEADS,
        device={"name": "test"},
        mode="eager",
        attention="sdpa",
    )


@random_state_kept()
def closed(paths: Iterable[Path]) -> Tree:
    """The smallest tree with all these paths."""
    return Tree(tuple({path[:length] for path in paths for length in range(1, len(path) + 1)}))


def all_subtrees(ranks: int, depth: int) -> list[tuple[Path, ...]]:
    """Every prefix-closed set of paths with so many ranks and so deep at most, the empty one included."""
    if depth == 0:
        return [()]
    below = all_subtrees(ranks, depth - 1)
    branches = [[(), *([(rank,), *((rank, *path) for path in tree)] for tree in below)] for rank in range(ranks)]
    return [tuple(itertools.chain(*choice)) for choice in itertools.product(*branches)]


def trees(ranks: int, depth: int) -> st.SearchStrategy[Tree]:
    path = st.lists(st.integers(0, ranks - 1), min_size=1, max_size=depth).map(tuple)
    return st.sets(path, max_size=6).map(closed)


@st.composite
def traces(draw: st.DrawFn, *, resolved: int = 3, depth: int = 3, rows: int = 8) -> RankTrace:
    """Traces of up to four answers, answers of one token and shorter than the heads are deep included."""
    rank = st.integers(0, resolved)
    answer = st.lists(st.lists(rank, min_size=depth, max_size=depth), max_size=rows)
    return trace_of(*draw(st.lists(answer, min_size=1, max_size=4)), resolved=resolved, depth=depth)
