"""The decoder's own step at every shape, ready to be timed again and again.

A timed step is what serving pays for, from the last emitted tokens to the next ones on the host: the draft context
takes in what the step before committed, the heads draft, the target verifies, the accepted path is kept, and the answer
is checked for its end. Its two halves are timed within that one step. A draft is timed right after a verify pass, as in
decoding, never warm from another draft. Every round fills the caches with another stretch of the text.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Int
from torch import Tensor

from topo_search.cost import WHATEVER_EXPANDED
from topo_search.decode.batch import Batch, Row
from topo_search.decode.cache import SlotCache
from topo_search.decode.decoder import until_end
from topo_search.decode.ending import Ending
from topo_search.decode.modes import CompiledStep, new_step
from topo_search.decode.plan import TreePlan, plan_tree
from topo_search.decode.rows import RowCache
from topo_search.decode.sampling import Sampler
from topo_search.decode.step import DecodeState, TreeStep
from topo_search.estimates import independent
from topo_search.heads.base import DraftContext, DraftCost, DraftHeads
from topo_search.search.frontier import frontier
from topo_search.target.adapter import Target
from topo_search.tree import Path, Tree

VERIFY, DRAFT = "verify", "draft"
_RANKS_TIMED = 10  # ranks per expanded node in a timed draft; ranking more of them costs next to nothing
_FRESH = 2  # tokens that the step before committed: one accepted and the target's own, as trees typically do
# Any falling rank table spreads the timed trees over ranks and depths; only their width and depth cost time.
_SPREAD = (0.5, 0.2, 0.1, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01, 0.008)
_ENDLESS = Ending(prompt_tokens=0, max_new_tokens=1 << 40, position_limit=None, eos_token_ids=frozenset())

Half = Callable[[], object]


class Cell(NamedTuple):
    """One shape: `verify` at a batch, context and width, or `draft` at a batch, depth and count of expanded nodes."""

    kind: str
    batch: int
    first: int
    size: int

    @property
    def name(self) -> str:
        """For files."""
        return "-".join(str(part) for part in self)


@dataclass(slots=True, kw_only=True)
class TimedSteps:
    """Decode states at each batch and the plans of each shape.

    Attributes:
        target, heads: as they will serve.
        text: token ids that fill the caches.
        longest: the longest context.
        trees: the tree of every cell.
        rows: the sequences of each batch; a batch that does not fit the memory is missing.
        failed: cells that ran out of memory.
    """

    target: Target
    heads: DraftHeads
    text: Sequence[int]
    longest: int
    trees: dict[Cell, Tree]
    rows: dict[int, _Rows] = field(default_factory=dict)
    failed: set[Cell] = field(default_factory=set)
    _plans: dict[Tree, TreePlan] = field(default_factory=dict)
    _after_draft: bool = True

    @classmethod
    def of(
        cls,
        target: Target,
        heads: DraftHeads,
        text: Sequence[int],
        *,
        batches: Sequence[int],
        contexts: Sequence[int],
        widths: Sequence[int],
        expanded: Sequence[int],
    ) -> TimedSteps:
        """Make caches and trees ready; `fill` must come before the first `time`."""
        depth = heads.identity.num_heads
        columns = target.known_ids if heads.token_map is None else len(heads.token_map)
        drafts = _draft_shapes(heads, expanded, columns)
        trees = {
            **{Cell(VERIFY, b, c, w): timed_tree(w - 1, depth) for b in batches for c in contexts for w in widths},
            **{Cell(DRAFT, b, *shape): _drafted_tree(*shape, columns) for b in batches for shape in drafts},
        }
        steps = cls(target=target, heads=heads, text=list(text), longest=max(contexts), trees=trees)
        slots = steps.longest + max(widths)
        for batch in batches:
            make = _Alone.build if batch == 1 else _Together.build
            try:
                steps.rows[batch] = make(target, heads, batch, slots)
            except (RuntimeError, MemoryError) as error:
                steps._give_up(batch, error)
        return steps

    def cells(self) -> list[Cell]:
        """Every shape, in a fixed order."""
        return list(self.trees)

    def fill(self, number: int) -> None:
        """Commit the `number`-th stretch of the text, one to each sequence of each batch."""
        for batch, rows in list(self.rows.items()):
            try:
                rows.fill(self._stretches(batch, number))
            except (RuntimeError, MemoryError) as error:
                self._give_up(batch, error)

    def time(self, cell: Cell) -> float | None:
        """Milliseconds of one shape, or None where it ran out of memory."""
        if cell in self.failed:
            return None
        try:
            return self._time_draft(cell) if cell.kind == DRAFT else self._time_verify(cell)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.failed.add(cell)
            gc.collect()
            return None

    def _time_verify(self, cell: Cell) -> float:
        rows, plan = self.rows[cell.batch], self._plan(cell)
        draft, verify = rows.step(plan, cell.first)
        written = rows.storage[..., cell.first : cell.first + plan.verify_width, :]
        kept = written.clone()
        _, elapsed = timed_halves(draft, verify, self.target.device)
        # Put back what the step wrote, so that longer contexts keep their text.
        written.copy_(kept)
        self._after_draft = False
        return elapsed

    def _time_draft(self, cell: Cell) -> float:
        if self._after_draft:
            self._time_verify(min(other for other in self.trees if other.kind == VERIFY and other.batch == cell.batch))
        draft, _ = self.rows[cell.batch].step(self._plan(cell), self.longest)
        self._after_draft = True
        return timed_ms(draft, self.target.device)

    def _plan(self, cell: Cell) -> TreePlan:
        tree = self.trees[cell]
        if tree not in self._plans:
            target = self.target
            self._plans[tree] = plan_tree(
                tree, capacity=self.longest, window=target.window, dtype=target.dtype, device=target.device
            )
        return self._plans[tree]

    def _stretches(self, batch: int, number: int) -> Int[Tensor, "batch tokens"]:
        """Tokens of each sequence, the root of the longest context included; the text is repeated if it is short."""
        starts = torch.arange(number * batch, (number + 1) * batch) * (self.longest // 2 + 1)
        places = (starts[:, None] + torch.arange(self.longest + 1)) % len(self.text)
        return torch.tensor(self.text)[places].to(self.target.device)

    def _give_up(self, batch: int, error: Exception) -> None:
        if not is_out_of_memory(error):
            raise error
        self.rows.pop(batch, None)
        self.failed |= {cell for cell in self.trees if cell.batch == batch}
        gc.collect()


class _Rows(Protocol):
    """The sequences of one batch."""

    @property
    def storage(self) -> Tensor:
        """The target's cache, slots in the last dimension but one."""

    def fill(self, texts: Int[Tensor, "batch tokens"]) -> None:
        """Commit all but the last token of each text."""

    def step(self, plan: TreePlan, context: int) -> tuple[Half, Half]:
        """The two halves of a step that starts with `context` committed tokens."""


@dataclass(slots=True)
class _Alone:
    """One sequence, as `TreeDecoder` decodes it."""

    target: Target
    heads: DraftHeads
    cache: SlotCache
    context: DraftContext
    steps: dict[Tree, TreeStep] = field(default_factory=dict)  # kept: a captured graph is replayed
    texts: Tensor | None = None
    states: Tensor | None = None

    @classmethod
    def build(cls, target: Target, heads: DraftHeads, batch: int, slots: int) -> _Alone:
        """`batch` is 1."""
        return cls(target, heads, target.new_cache(slots, batch=batch), heads.new_context(slots))

    @property
    def storage(self) -> Tensor:
        """See `_Rows`."""
        return self.cache.storage

    def fill(self, texts: Int[Tensor, "batch tokens"]) -> None:
        """See `_Rows`."""
        self.cache.clear()
        self.context.rewind(0)
        self.texts, self.states = texts, self.target.hidden_states(texts[:, :-1], cache=self.cache)
        self.context.extend(self.states, texts[:, 1:])

    def step(self, plan: TreePlan, context: int) -> tuple[Half, Half]:
        """See `_Rows`."""
        assert self.texts is not None and self.states is not None
        fresh = min(_FRESH, context)
        self.cache.length = context
        self.context.rewind(context - fresh)
        sampler = Sampler(ending=_ENDLESS)
        text = self.texts[0, : context + 1].tolist()
        state = DecodeState(
            root=self.texts[0, context : context + 1],
            fresh=self.states[0, context - fresh : context],
            following=self.texts[0, context - fresh + 1 : context + 1],
            cache=self.cache,
            context=self.context,
            sampler=sampler,
            text=list(text),
        )
        if plan.tree not in self.steps:
            self.steps[plan.tree] = new_step(self.target, self.heads, plan)
        step = self.steps[plan.tree]
        if isinstance(step, CompiledStep):  # graphs are captured by the calls that warm a shape up
            step.prepare(self.cache)
        return lambda: step.draft(state), lambda: until_end(text, step.verify(state).tolist(), sampler)


@dataclass(slots=True)
class _Together:
    """Several sequences, as `decode_batch` decodes them while every row is still being written."""

    target: Target
    heads: DraftHeads
    cache: RowCache
    contexts: list[DraftContext]
    texts: Tensor | None = None
    states: Tensor | None = None

    @classmethod
    def build(cls, target: Target, heads: DraftHeads, batch: int, slots: int) -> _Together:
        """Caches of `batch` sequences."""
        contexts = [heads.new_context(slots) for _ in range(batch)]
        return cls(target, heads, RowCache(target, batch=batch, capacity=slots), contexts)

    @property
    def storage(self) -> Tensor:
        """See `_Rows`."""
        return self.cache.storage

    def fill(self, texts: Int[Tensor, "batch tokens"]) -> None:
        """See `_Rows`."""
        self._commit(0)
        self.texts, self.states = texts, self.target.hidden_states(texts[:, :-1], cache=self.cache)
        for context, states, text in zip(self.contexts, self.states, texts, strict=True):
            context.rewind(0)
            context.extend(states[None], text[None, 1:])

    def step(self, plan: TreePlan, context: int) -> tuple[Half, Half]:
        """See `_Rows`."""
        assert self.texts is not None and self.states is not None
        fresh = min(_FRESH, context)
        self._commit(context)
        rows = []
        for index, (text, states, kept) in enumerate(zip(self.texts, self.states, self.contexts, strict=True)):
            kept.rewind(context - fresh)
            row = Row(index=index, text=text[: context + 1].tolist(), sampler=Sampler(request=index, ending=_ENDLESS))
            row.fresh, row.context = states[context - fresh : context], kept
            rows.append(row)
        batch = Batch(
            target=self.target, heads=self.heads, plan=plan, cache=self.cache, rows=rows, clock=time.perf_counter()
        )
        drafted: list[Tensor] = []
        return lambda: drafted.append(batch.draft()), lambda: batch.verify(drafted[-1])

    def _commit(self, length: int) -> None:
        self.cache.lengths = torch.full_like(self.cache.lengths, length)
        self.cache.longest = length


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device, or torch's allocator on a CPU (which raises a plain RuntimeError), ran out of memory."""
    named = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return named or "can't allocate memory" in str(error)


def timed_halves(draft: Half, verify: Half, device: torch.device) -> tuple[float, float]:
    """Milliseconds of a step's draft and of the rest of it.

    On a GPU the draft is timed by events, between which nothing waits, and the whole step by the host's clock, since
    its emitted tokens are read by the host.
    """
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize(device)
        clock = time.perf_counter()
        events[0].record()
        draft()
        events[1].record()
        verify()
        torch.cuda.synchronize(device)
        elapsed = 1000 * (time.perf_counter() - clock)
        draft_ms: float = events[0].elapsed_time(events[1])
        return draft_ms, elapsed - draft_ms
    clock = time.perf_counter()
    draft()
    between = time.perf_counter()
    verify()
    return 1000 * (between - clock), 1000 * (time.perf_counter() - between)


def timed_ms(call: Half, device: torch.device) -> float:
    """Milliseconds of one call: device events on a GPU, a monotonic clock elsewhere; synchronised on both ends."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        elapsed: float = start.elapsed_time(end)
        return elapsed
    clock = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - clock)


def timed_tree(num_draft_nodes: int, depth: int) -> Tree:
    """A tree of that many nodes, at most `depth` deep, spread over ranks as a real one is."""
    # Ranks beyond the table come last: without them few heads could not fill a wide tree.
    spread = (*_SPREAD, *(1e-6 * 0.99**rank for rank in range(num_draft_nodes)))
    estimate = independent([spread] * depth, num_draft_nodes)
    return frontier(estimate, num_draft_nodes=num_draft_nodes).tree(num_draft_nodes)


def _draft_shapes(heads: DraftHeads, expanded: Sequence[int], columns: int) -> list[tuple[int, int]]:
    """Depth and expanded nodes below the root of every draft to be timed, as `cost.DraftTimes` reads them."""
    depths = range(1, heads.identity.num_heads + 1)
    if heads.cost == DraftCost.PER_STEP:
        return [(depth, WHATEVER_EXPANDED) for depth in depths]
    counts = sorted({1, *(min(count, columns) for count in expanded)})
    return [(1, 1), *((depth, count) for depth in depths[1:] for count in counts)]


def _drafted_tree(depth: int, expanded: int, columns: int) -> Tree:
    """A tree that expands `max(expanded, 1)` nodes at every depth below the root and ranks as many as a real one."""
    level: list[Path] = [(rank,) for rank in range(max(expanded, 1))]
    paths = list(level)
    for _ in range(depth - 1):
        level = [(*path, 0) for path in level]
        paths += level
    wide = [(*(0,) * above, rank) for above in range(depth) for rank in range(1, min(_RANKS_TIMED, columns))]
    return Tree(tuple({*paths, *wide}))
