"""How fast the search's parts are, in processor time of one core, spread over repeats; traces and costs are random.

python benchmarks/search.py
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from topo_search.estimates import backoff, independent, joint
from topo_search.identity import GREEDY, HeadsIdentity, TargetIdentity
from topo_search.prefixes import PrefixTable
from topo_search.provenance import provenance
from topo_search.replay import replay
from topo_search.search.frontier import frontier
from topo_search.search.knapsack import fastest_by_knapsack
from topo_search.search.refine import refine
from topo_search.search.slots import ordered_slots
from topo_search.search.step_costs import DraftCosts, StepCosts
from topo_search.trace import PAST_END, RankTrace, TracePrompt

RUNS, ROWS, DEPTH, RANKS = 5, 100, 4, 32
FALL = (0.75, 0.8, 0.85, 0.9)  # each depth's rank probabilities fall by such a factor
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    small, large = random_trace(prompts=500), random_trace(prompts=10_000)
    small_table, large_table = PrefixTable.of(small), PrefixTable.of(large)
    tree = frontier(joint(large_table), num_draft_nodes=63).tree(63)
    small_tree = frontier(backoff(small_table), num_draft_nodes=63).tree(63)
    replay_s = seconds(lambda: replay(large, [tree], table=large_table))
    vector = [0.63 * 0.6**slot for slot in range(32)]
    costs = StepCosts(
        verify_ms={width: 20.0 + 0.1 * width + 3.0 * (width > 33) for width in range(1, 66)},
        draft=DraftCosts(per_expanded=(0.2, 0.1, 0.1, 0.1), by_depth=(0.0, 0.1, 0.2, 0.3, 0.4)),
    )
    candidates = independent([[0.5 * fall**rank for rank in range(RANKS)] for fall in FALL], 4236)
    figures = {
        "positions": {"small": len(small.ranks), "large": len(large.ranks)},
        "replay_million_positions_per_s": {
            "median": len(large.ranks) / replay_s["median"] / 1e6,
            "min": len(large.ranks) / replay_s["max"] / 1e6,
            "max": len(large.ranks) / replay_s["min"] / 1e6,
        },
        "frontier_256_of_large_s": seconds(
            lambda: frontier(joint(PrefixTable.of(large)), num_draft_nodes=256).expected_tokens()
        ),
        "backoff_of_small_s": seconds(lambda: backoff(small_table)),
        "slots_128_nodes_10_levels_32_slots_s": seconds(lambda: ordered_slots([vector] * 10, num_draft_nodes=127)),
        "knapsack_4236_candidates_64_nodes_s": seconds(
            lambda: fastest_by_knapsack(candidates, costs, num_draft_nodes=64, candidates=4236)
        ),
        "refine_63_nodes_of_small_s": seconds(lambda: refine(small, small_table, small_tree), runs=2),
        **provenance(),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "search.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=2))


def random_trace(*, prompts: int, seed: int = 0) -> RankTrace:
    """Answers of `ROWS` rows with geometric ranks per depth, the deeper the flatter."""
    rng = np.random.default_rng(seed)
    shape = (prompts, ROWS)
    columns = [np.minimum(rng.geometric(1 - fall, size=shape) - 1, RANKS) for fall in FALL]
    ranks = np.stack(columns, axis=2).astype(np.int16)
    past = np.arange(1, DEPTH + 1)[None, :] > np.arange(ROWS, 0, -1)[:, None]
    ranks[:, past] = PAST_END
    return RankTrace(
        prompts=tuple(
            TracePrompt(id=str(index), workload="random", prompt_tokens=10, answer_tokens=ROWS + 1, end="cap")
            for index in range(prompts)
        ),
        ranks=ranks.reshape(-1, DEPTH),
        resolved_ranks=RANKS,
        target=TargetIdentity(name="random", fingerprint="none", dtype="float32"),
        heads=HeadsIdentity(name="random", kind="medusa", fingerprint="none", num_heads=DEPTH),
        rule=GREEDY,
        max_new_tokens=ROWS + 1,
    )


def seconds(task: Callable[[], object], runs: int = RUNS) -> dict[str, float]:
    """Median and range of the processor time, after one run that warms up."""
    task()
    spent = []
    for _ in range(runs):
        start = time.process_time()
        task()
        spent.append(time.process_time() - start)
    return {"median": statistics.median(spent), "min": min(spent), "max": max(spent)}


if __name__ == "__main__":
    main()
