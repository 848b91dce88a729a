"""What a step of a tree costs, as the ratio solvers see it: verify time by width, draft time by node and depth.

step_ms(T) = verify_ms(width) + sum over expanded nodes u, the root included, of draft_ms[depth of u] + depth_ms[depth
of T]. Plain decoding is verify_ms(1): no head runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from topo_search.errors import InputError
from topo_search.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCosts:
    """Draft times in milliseconds.

    Attributes:
        per_expanded: per expanded node by its depth, from 0, the root, up; one less than `by_depth`.
        by_depth: of a tree by its depth, from 0 (plain decoding, always 0.0) up; must not fall. Trees are no deeper.

    Raises:
        InputError: a time is negative or not finite, `by_depth` falls or starts above 0, or the lengths disagree.
    """

    per_expanded: tuple[float, ...]
    by_depth: tuple[float, ...]

    def __post_init__(self) -> None:
        if any(not math.isfinite(ms) or ms < 0 for ms in (*self.per_expanded, *self.by_depth)):
            raise InputError("Draft times must be finite and not negative.")
        if self.by_depth[:1] != (0.0,) or any(b < a for a, b in itertools.pairwise(self.by_depth)):
            raise InputError(
                f"Draft times by depth must start at 0.0, plain decoding, and never fall: {self.by_depth}."
            )
        if len(self.per_expanded) != len(self.by_depth) - 1:
            raise InputError(
                f"There are draft times for {len(self.by_depth) - 1} depths, but times per expanded node for "
                f"{len(self.per_expanded)}; both must reach equally deep."
            )

    @property
    def max_depth(self) -> int:
        """The deepest tree that has a draft time."""
        return len(self.per_expanded)

    @property
    def per_node(self) -> bool:
        """Whether it matters which nodes below the root are expanded."""
        return any(self.per_expanded[1:])

    def of(self, tree: Tree) -> float:
        """Draft time of one step of `tree`, no deeper than `max_depth`."""
        expanded = {path[:-1] for path in tree.paths}
        return math.fsum(self.per_expanded[len(path)] for path in expanded) + self.by_depth[tree.depth]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Measured verify times; a width without one cannot win.

    Attributes:
        verify_ms: by verify width; width 1, plain decoding, must be among them.
        draft: see `DraftCosts`.

    Raises:
        InputError: width 1 is missing, or a time is not positive and finite.
    """

    verify_ms: Mapping[int, float]
    draft: DraftCosts

    def __post_init__(self) -> None:
        if 1 not in self.verify_ms:
            raise InputError("The verify times lack width 1, plain decoding; run topo-search measure again.")
        for width, ms in self.verify_ms.items():
            if not math.isfinite(ms) or ms <= 0:
                raise InputError(f"The verify time of width {width} is {ms} ms; times must be positive and finite.")

    def step_ms(self, tree: Tree) -> float:
        """Time of one step of a tree.

        Raises:
            InputError: the tree's width was not measured.
        """
        if tree.verify_width not in self.verify_ms:
            raise InputError(
                f"Width {tree.verify_width} was not measured; measured: {', '.join(map(str, sorted(self.verify_ms)))}."
            )
        return self.verify_ms[tree.verify_width] + self.draft.of(tree)


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineCosts:
    """A verify time that rises evenly: fixed_ms + per_node_ms x draft nodes.

    Attributes:
        fixed_ms: plain decoding's step, positive.
        per_node_ms: of each draft node, not negative.
        draft: see `DraftCosts`.

    Raises:
        InputError: a time is out of range.
    """

    fixed_ms: float
    per_node_ms: float
    draft: DraftCosts

    def __post_init__(self) -> None:
        if not (math.isfinite(self.fixed_ms) and self.fixed_ms > 0):
            raise InputError(f"Plain decoding's step takes {self.fixed_ms} ms; it must be positive and finite.")
        if not (math.isfinite(self.per_node_ms) and self.per_node_ms >= 0):
            raise InputError(f"A draft node takes {self.per_node_ms} ms; it must be finite and not negative.")

    def step_ms(self, tree: Tree) -> float:
        """Time of one step of any tree."""
        return self.fixed_ms + self.per_node_ms * tree.num_draft_nodes + self.draft.of(tree)

    def at_every_width(self, num_draft_nodes: int) -> StepCosts:
        """The same times as a table of all widths up to so many draft nodes."""
        times = {nodes + 1: self.fixed_ms + self.per_node_ms * nodes for nodes in range(num_draft_nodes + 1)}
        return StepCosts(verify_ms=times, draft=self.draft)
