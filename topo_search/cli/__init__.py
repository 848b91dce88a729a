"""The command line: `topo-search`, the same as `python -m topo_search`."""

from topo_search.cli.app import main

__all__ = ["main"]
