"""A tree as a graph for drawing and graph tools: networkx, Graphviz DOT and GraphML.

Nodes are named by their ranks, `0.2`, and `root`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from topo_search.files.tree_file import TreeFile
from topo_search.tree import Path

if TYPE_CHECKING:
    import networkx


def graph(tree_file: TreeFile) -> networkx.DiGraph[str]:
    """The tree, parents to children, with `rank`, `depth`, `slot` and, where known, `probability` on every node."""
    import networkx

    tree = tree_file.tree
    unnamed = tree.to_networkx()
    named: networkx.DiGraph[str] = networkx.DiGraph()
    for path, slot in tree.slots.items():
        named.add_node(_name(path), **unnamed.nodes[path], slot=slot)
        if path and tree_file.probabilities is not None:
            named.nodes[_name(path)]["probability"] = tree_file.probabilities[slot - 1]
    named.add_edges_from((_name(parent), _name(child)) for parent, child in unnamed.edges)
    return named


def graphml_bytes(tree_file: TreeFile) -> bytes:
    """The graph as GraphML."""
    import networkx

    return ("\n".join(networkx.generate_graphml(graph(tree_file))) + "\n").encode()


def dot_bytes(tree_file: TreeFile) -> bytes:
    """The graph in Graphviz' language, each node with its probability in percent."""
    drawn = graph(tree_file)
    nodes = [f'  "{name}" [label="{_label(name, data.get("probability"))}"];' for name, data in drawn.nodes(data=True)]
    edges = [f'  "{parent}" -> "{child}";' for parent, child in drawn.edges]
    title = tree_file.name.replace("\\", "\\\\").replace('"', '\\"')
    return "\n".join([f'digraph "{title}" {{', *nodes, *edges, "}", ""]).encode()


def _name(path: Path) -> str:
    return ".".join(map(str, path)) or "root"


def _label(name: str, probability: float | None) -> str:
    return name if probability is None else f"{name}\\n{100 * probability:.2f} %"
