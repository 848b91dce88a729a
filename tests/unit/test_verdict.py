"""What `optimize` tells people to use, in words."""

from __future__ import annotations

import pytest

from topo_search.cli.optimize import _verdict
from topo_search.search.optimize import Alternative, SearchResult
from topo_search.tree import Tree


def alternative(name: str, tree: Tree, speedup: float | None) -> Alternative:
    return Alternative(
        name=name,
        tree=tree,
        probabilities=(0.5,) * tree.num_draft_nodes,
        tokens_per_step=1.5,
        tokens_per_step_all_positions=1.6,
        step_ms=None,
        tokens_per_s=None,
        speedup=speedup,
    )


@pytest.mark.parametrize(
    ("recommended", "tree", "speedup", "words"),
    [
        ("plain", Tree(()), 1.0, "within this budget no tree could be tried"),
        ("plain", Tree.chain(1), 0.9, "No tree or chain"),
        ("best tree", Tree.chain(1), None, "width 2 has no time"),
        ("best tree", Tree.chain(1), 0.5, "plain decoding is faster"),
        ("best tree", Tree.chain(1), 1.2, "1.20 times plain decoding"),
    ],
)
def test_the_verdict_says_what_it_rests_on(recommended: str, tree: Tree, speedup: float | None, words: str) -> None:
    found = (alternative("plain", Tree(()), 1.0), alternative("best tree", tree, speedup))
    assert words in _verdict(SearchResult(alternatives=found, recommended=recommended, sizes=()))
