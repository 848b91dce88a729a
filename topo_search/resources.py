"""Find the files that ship with topo-search: prompt sets, trained heads, reference trees, the demo's measurements.

In a wheel they lie in the package's own `_data` folder; in an editable install they are the repository's top-level
folders. One function hides the difference.
"""

from pathlib import Path

from topo_search.errors import InputError

_PACKAGE = Path(__file__).resolve().parent
_SHIPPED = ("calibration", "heads", "trees")


def packaged(name: str) -> Path:
    """The path of a shipped file or folder, e.g. `calibration/prompts/chat.jsonl`.

    Raises:
        InputError: this installation lacks it.
    """
    for root in (_PACKAGE / "_data", _PACKAGE.parent):
        if (root / name).exists():
            return root / name
    raise InputError(f"This installation of topo-search lacks its file {name}; reinstall it.")


def is_packaged(path: Path) -> bool:
    """Whether a file came with topo-search, so that nothing may be written beside it."""
    whole = path.resolve()
    roots = (_PACKAGE / "_data", _PACKAGE.parent)
    return any(whole.is_relative_to(root / folder) for root in roots for folder in _SHIPPED)
