"""Tokens per millisecond for any measured verify times: Dinkelbach (1967) and a knapsack over the preorder.

A sweep of one node price is not exact here, since the time of a width need not follow any line. So for a price of
lambda tokens per millisecond h[m] is the most that a tree of exactly m nodes brings, draft time paid, and the best
width is read off. h takes one pass over the candidates in preorder; one bit, whether the present group of siblings
has been opened, says whether the next taken sibling pays for the expansion of its parent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from topo_search.estimates import PathProbabilities
from topo_search.search.fastest import RISES, Fastest, expected_tokens, plain
from topo_search.search.forest import Forest
from topo_search.search.step_costs import StepCosts

_CANDIDATES = 4096
_CLOSED, _OPENED = 0, 1


def fastest_by_knapsack(
    estimate: PathProbabilities, costs: StepCosts, *, num_draft_nodes: int, candidates: int = _CANDIDATES
) -> Fastest:
    """The fastest tree of a measured width; exact among the candidates.

    Args:
        estimate: path probabilities.
        costs: verify times by width, draft times per expanded node and per depth.
        num_draft_nodes: the largest size allowed.
        candidates: the likeliest nodes considered; the result bounds what the others could add, a tree padded to its
            width allowed. Time and memory grow with candidates x nodes x depth.
    """
    forest = Forest.of(estimate, max_depth=costs.draft.max_depth, count=candidates)
    sizes = min(num_draft_nodes, max(costs.verify_ms) - 1, len(forest.paths))
    best = plain(costs.verify_ms[1])
    if sizes < 1 or not costs.draft.max_depth:
        return best
    verify_ms = np.array([costs.verify_ms.get(nodes + 1, np.inf) for nodes in range(sizes + 1)])
    verify_ms[0] = np.inf  # the empty tree is plain decoding and pays for no depth
    lost = sizes * forest.left_out
    while True:
        price = best.tokens_per_step / best.step_ms
        tables = _Tables.of(forest, costs, price, sizes)
        worth = tables.best - price * (verify_ms[None, :] + np.array(costs.draft.by_depth[1:])[:, None])
        cap, size = np.unravel_index(int(worth.argmax()), worth.shape)
        if not np.isfinite(worth[cap, size]):
            return best  # no width but plain decoding's was measured
        nodes = tables.nodes(int(cap), int(size))
        tree = forest.tree(nodes)
        found = Fastest(
            tree=tree,
            tokens_per_step=expected_tokens(forest.probabilities[nodes].tolist()),
            step_ms=costs.step_ms(tree),
            tokens_at_most_lost=lost,
        )
        if found.tokens_per_s <= best.tokens_per_s * RISES:
            return Fastest(
                tree=best.tree, tokens_per_step=best.tokens_per_step, step_ms=best.step_ms, tokens_at_most_lost=lost
            )
        best = found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """Best worth of the nodes from each place on.

    Attributes:
        forest: the candidates.
        prices: `[nodes]`, the priced draft time of opening each node's group of siblings.
        worth: `[places, bit, cap, size]`: from that place in preorder on, with the present group of siblings closed or
            opened, under depth cap 1, 2, ..., of exactly so many nodes; -inf where there are none such.
    """

    forest: Forest
    prices: np.ndarray
    worth: np.ndarray

    @classmethod
    def of(cls, forest: Forest, costs: StepCosts, price: float, sizes: int) -> _Tables:
        """One pass from the last candidate to the first, all caps and sizes at once."""
        prices = price * np.array(costs.draft.per_expanded)[forest.depths - 1]
        count = len(forest.paths)
        worth = np.full((count + 1, 2, costs.draft.max_depth, sizes + 1), -np.inf)
        worth[count, :, :, 0] = 0.0
        places = zip(
            forest.depths.tolist(), forest.probabilities.tolist(), prices.tolist(), forest.ends.tolist(), strict=True
        )
        siblings = _next_is_sibling(forest)
        for place, (depth, probability, opening, end) in reversed(list(enumerate(places))):
            taken = worth[place + 1, _OPENED if end == place + 1 else _CLOSED, depth - 1 :, :-1]
            here = worth[place]
            here[_OPENED] = worth[end, _OPENED]
            here[_CLOSED] = worth[end, _CLOSED if siblings[place] else _OPENED]
            for bit, value in ((_OPENED, probability), (_CLOSED, probability - opening)):
                kept = here[bit, depth - 1 :, 1:]
                np.maximum(kept, value + taken, out=kept)
        return cls(forest=forest, prices=prices, worth=worth)

    @property
    def best(self) -> Float[np.ndarray, "caps sizes"]:
        """1 + the most that a tree of each size brings under each cap."""
        best: np.ndarray = 1.0 + self.worth[0, _CLOSED]
        return best

    def nodes(self, cap: int, size: int) -> list[int]:
        """The nodes of the best tree of that size; ties take the earlier node."""
        forest, chosen = self.forest, list[int]()
        siblings = _next_is_sibling(forest)
        place, bit = 0, _CLOSED
        while size:
            end = int(forest.ends[place])
            value = forest.probabilities[place] - (self.prices[place] if bit == _CLOSED else 0.0)
            below = _OPENED if end == place + 1 else _CLOSED
            fits = forest.depths[place] <= cap + 1
            if fits and self.worth[place, bit, cap, size] == value + self.worth[place + 1, below, cap, size - 1]:
                chosen.append(place)
                place, bit, size = place + 1, below, size - 1
            else:
                place, bit = end, bit if siblings[place] else _OPENED
        return chosen


def _next_is_sibling(forest: Forest) -> list[bool]:
    """Whether what follows each node's subtree is its next sibling."""
    parents = np.append(forest.parents, -2)
    follows: list[bool] = (parents[forest.ends] == forest.parents).tolist()
    return follows
