"""Regenerate `trees/reference/`: published tree shapes, rebuilt here from rank tables.

python benchmarks/reference_trees.py
"""

from __future__ import annotations

from pathlib import Path

from topo_search.estimates import independent
from topo_search.files.tree_file import MadeFrom, TreeFile, write_tree
from topo_search.search.frontier import frontier

FOLDER = Path(__file__).resolve().parents[1] / "trees" / "reference"

MEDUSA_63_RANKS = (
    (0.95123, 0.0076, 0.00452, 0.0037, 0.00303, 0.00291, 0.00279, 0.00269, 0.00258, 0.00248),
    (0.66365, 0.00791, 0.00647, 0.00434, 0.00417, 0.00401, 0.00385, 0.00315, 0.00258, 0.00248),
    (0.00975, 0.0058, 0.00389, 0.00315, 0.00303, 0.00291, 0.00279, 0.00269, 0.00258, 0.00248),
    (0.00494, 0.00475, 0.00248),
)
_COMMAND = (
    "python benchmarks/reference_trees.py (the 63 likeliest paths of an independent rank table that linear "
    "programming found, so that they are the nodes of Medusa's published mc_sim_7b_63; the table is no measurement, "
    "hence no probabilities)"
)


def medusa_63() -> TreeFile:
    """The tree that Medusa publishes as mc_sim_7b_63."""
    family = frontier(independent(MEDUSA_63_RANKS, 63), num_draft_nodes=63)
    made_from = MadeFrom(command=_COMMAND, created="2026-11-29T00:00:00+00:00")
    return TreeFile(tree=family.tree(63), name="medusa-63", made_from=made_from)


def main(folder: Path = FOLDER) -> None:
    """Write every reference tree into `folder`."""
    write_tree(folder / "medusa-63.tree.json", medusa_63())


if __name__ == "__main__":
    main()
