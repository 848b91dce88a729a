"""What a tree chosen on one workload loses on another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from topo_search.search.choose import Settings, choose, merit
from topo_search.search.judge import ReplayJudge
from topo_search.search.selection import chosen_trees, fold_of_prompts, hold_out
from topo_search.tree import Tree

_FOLDS = 2  # of one workload: enough to score its own choice fairly, and each fold keeps half of few prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRow:
    """One workload: the tree chosen on it, what it brings there, and on every other one.

    Attributes:
        workload, prompts: its name and number of prompts.
        tree: the best tree of all its prompts.
        tokens_per_step: of its own choice, cross-fitted within the workload; null for a single prompt.
        loss_on: by workload, 1 - rate of this tree over the rate of that workload's own choice, cross-fitted there; a
            negative one wins. Null where that is unknown. The rate is tokens/s, or tokens per step without a table.
    """

    workload: str
    prompts: int
    tree: Tree
    tokens_per_step: float | None
    loss_on: dict[str, float | None]


def workload_rows(judge: ReplayJudge, settings: Settings) -> list[WorkloadRow]:
    """A row per workload that has a row of ranks, by name; none where there is only one workload."""
    workloads = np.array([prompt.workload for prompt in judge.trace.prompts])
    names = sorted({prompt.workload for prompt in judge.trace.prompts if prompt.rows})
    if len(names) < 2:
        return []
    judges = {name: judge.among(workloads == name) for name in names}
    trees = {name: choose(part, settings, shortlist=True).trees[-1] for name, part in judges.items()}
    own = {name: _own(part, settings) for name, part in judges.items()}
    rates = {on: merit(part.score(list(trees.values())), settings) for on, part in judges.items()}
    return [
        WorkloadRow(
            workload=name,
            prompts=len(judges[name].trace.prompts),
            tree=trees[name],
            tokens_per_step=own[name][0],
            loss_on={on: _loss(float(rates[on][index]), own[on][1]) for on in names if on != name},
        )
        for index, name in enumerate(names)
    ]


def _own(judge: ReplayJudge, settings: Settings) -> tuple[float | None, float | None]:
    """Tokens per step and rate of a workload's own choice, on its prompts that did not make it."""
    fold = fold_of_prompts(judge.trace.prompts, _FOLDS, settings.seed)
    held = hold_out(judge, chosen_trees(settings), fold)
    if held is None:
        return None, None
    per_step = float(held.tokens.sum() / held.steps[-1].sum())
    if settings.objective == "tokens-per-step":
        return per_step, per_step
    return per_step, float(held.tokens.sum() / held.ms[-1].sum())


def _loss(rate: float, own: float | None) -> float | None:
    return None if own is None or not own > 0 else 1 - rate / own
