"""The shape of the code itself: layers, public names, function length, the README's map."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import topo_search

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "topo_search"
# Layer of every part of the package; a part may import its own layer and those before it (DESIGN section 8).
LAYERS = (
    {
        *("errors", "identity", "tree", "trace", "prefixes", "replay", "estimates", "cost", "special", "stats"),
        *("accuracy", "search", "files", "export", "resources", "provenance", "accepts", "memory"),
    },
    {
        *("ranking", "target", "heads", "decode", "training", "answers", "calibrate", "measure", "device"),
        *("compare", "reference", "bench", "race_objective", "recording", "timed_steps"),
    },
    {"report", "cli", "__main__"},
)
TORCH_FREE = ("torch", "transformers")


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _layer(part: str) -> int:
    return next(index for index, parts in enumerate(LAYERS) if part in parts)


def _imports(path: Path) -> set[str]:
    """Every module named in an import statement that runs, typing-only ones aside."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_imports_go_one_way() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in _modules()
        if path != PACKAGE / "__init__.py"
        for name in _imports(path)
        if name.startswith("topo_search.") and _layer(name.split(".")[1]) > _layer(_part(path))
    ]
    assert not wrong


def test_the_first_layer_imports_no_torch() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in _modules()
        if path != PACKAGE / "__init__.py" and _layer(_part(path)) == 0
        for name in _imports(path)
        if name.split(".")[0] in TORCH_FREE
    ]
    assert not wrong


@pytest.mark.parametrize(("library", "allowed"), [("typer", {"cli"}), ("pydantic", {"files"}), ("rich", {"report"})])
def test_each_library_stays_in_its_field(library: str, allowed: set[str]) -> None:
    users = {_part(path) for path in _modules() for name in _imports(path) if name.split(".")[0] == library}
    assert users == allowed


def test_public_names_exist_and_are_listed_once() -> None:
    assert sorted(topo_search.__all__) == topo_search.__all__
    assert set(topo_search.__all__) == set(topo_search._HOME)
    for name in topo_search.__all__:
        assert getattr(topo_search, name).__name__ == name
    with pytest.raises(AttributeError):
        _ = topo_search.no_such_name


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, topo_search, topo_search.search.optimize, topo_search.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"


def test_every_module_imports_alone() -> None:
    for path in _modules():
        if path.name != "__main__.py":
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))


def test_functions_are_short() -> None:
    """No function over 60 lines without its docstring; nine of ten under 30 (STYLE 5.1)."""
    lengths = {}
    for path in _modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.end_lineno:
                doc = ast.get_docstring(node)
                span = node.end_lineno - node.lineno + 1 - (doc.count("\n") + 1 if doc else 0)
                lengths[f"{path.relative_to(ROOT)}:{node.name}"] = span
    ordered = sorted(lengths.values())
    assert {name: span for name, span in lengths.items() if span > 60} == {}
    assert ordered[int(0.9 * len(ordered))] < 30


def test_the_readme_map_is_the_folder() -> None:
    """Every file and folder of the README's tree exists, and every top-level entry and module is in it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```text\n(topo-search/\n.*?)```", readme, re.DOTALL)
    assert block, "README.md has no annotated file tree"
    listed = _listed_paths(block[1].splitlines()[1:])
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    top = {path.split("/")[0] for path in tracked if not path.startswith(".")}
    parts = {"/".join(path.split("/")[:2]) for path in tracked if path.startswith("topo_search/")}
    wanted = top | {part for part in parts if not part.endswith(("__init__.py", "__main__.py", "py.typed"))}
    assert wanted - listed == set()
    assert {path for path in listed if not (ROOT / path).exists()} == set()


def _listed_paths(lines: list[str]) -> set[str]:
    """Paths of an indented tree: two spaces a level, a name, then its remark."""
    stack: list[str] = []
    found = set()
    for line in lines:
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        stack = [*stack[:depth], line.split()[0].rstrip("/")]
        found.add("/".join(stack))
    return found
