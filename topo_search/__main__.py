"""`python -m topo_search`: the command line."""

from topo_search.cli import main

main()
