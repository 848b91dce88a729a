"""The commands, and the one place where errors become a line on stderr and an exit code.

Nothing heavy is imported before a command runs, so that help is instant and `optimize` never loads torch.
"""

from __future__ import annotations

import gc
import importlib
import logging
import sys
import warnings
from typing import Any

import typer

from topo_search import NOISY_LOGGERS
from topo_search.errors import InputError, TopoSearchError
from topo_search.memory import keep_freed_memory

_YOUNG_OBJECTS = 500_000  # a search makes many objects and no cycles: the default looks for them every 700

_MODULES = {
    "calibrate": "calibrate",
    "measure": "measure",
    "optimize": "optimize",
    "show": "tree",
    "export": "tree",
    "schema": "tree",
    "generate": "generate",
    "bench": "bench",
    "heads": "heads",
    "distill": "distill",
    "train": "train",
}


def command_line(*names: str) -> typer.Typer:
    """The commands named, all by default; the options of the others need not be read for one that runs."""
    app = typer.Typer(
        help="Find, prove and serve the verification tree that is fastest for your model, heads, prompts and device.",
        epilog="Start with: topo-search calibrate, then topo-search optimize --budget 64.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(lambda: None)  # without one, typer makes a single command the whole program
    for name in names or _MODULES:
        module = importlib.import_module(f"topo_search.cli.{_MODULES[name]}")
        if name == "train":
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(getattr(module, name))
    return app


def main() -> None:
    """Run the command line; exit code 2 for bad input, 1 for a broken promise."""
    gc.set_threshold(_YOUNG_OBJECTS)
    keep_freed_memory()
    warnings.showwarning = _show_warning
    for noisy in NOISY_LOGGERS:
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        command_line(*(name for name in sys.argv[1:2] if name in _MODULES))()
    except InputError as error:
        _complain(error)
        sys.exit(2)
    except TopoSearchError as error:
        _complain(error)
        sys.exit(1)


def _complain(error: TopoSearchError) -> None:
    print(f"Error: {error}", file=sys.stderr)  # noqa: T201


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"Warning: {message}", file=sys.stderr)  # noqa: T201
