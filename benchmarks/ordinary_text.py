"""Write ordinary text to learn from before the target's own: what Python's standard library says of itself.

Its language reference (`pydoc_data.topics`) is prose; signatures with their docstrings are prose beside code. Heads
learn there what the target would have said, so nothing of it needs to sound like the target.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

_SHORTEST = 500  # characters of a docstring worth reading


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("ordinary.txt"), help="file to write")
    out: Path = parser.parse_args().out
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in library.rglob("*.py") if _is_read(path.relative_to(library)))
    parts = [*topics.values(), *(part for file in files for part in _documented(file))]
    out.write_text("\n\n\n".join(dict.fromkeys(part.strip() for part in parts)), encoding="utf-8")
    print(f"Wrote {out}: {out.stat().st_size / 1e6:.1f} MB.")


def _is_read(path: Path) -> bool:
    return not {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"} & set(path.parts)


def _documented(file: Path) -> Iterator[str]:
    """A module's docstring, and every function or class that has one, as far as its docstring."""
    try:
        source = file.read_text(encoding="utf-8")
        module = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError):
        return
    lines = source.splitlines()
    for node in ast.walk(module):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        text = ast.get_docstring(node)
        if text is None or len(text) < _SHORTEST:
            continue
        if isinstance(node, ast.Module):
            yield text
        else:
            yield "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])


if __name__ == "__main__":
    main()
