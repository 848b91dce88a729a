"""Libraries are compiled once, kept where nobody else can write, and made again when they are not what was written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from models import needs_compiler

from topo_search.errors import InputError
from topo_search.target.native import loaded_library, require_compiler

CODE = 'extern "C" int answer() { return 42; }\n'


class Place:
    """A source, an empty cache folder, and a compiler that counts its calls."""

    def __init__(self, folder: Path) -> None:
        self.source, self.cache, self.calls = folder / "code.cpp", folder / "cache", folder / "calls"
        self.compiler = folder / "compiler"
        self.source.write_text(CODE)
        self.compile_with(f'echo call >> {self.calls}\nexec g++ "$@"')

    def compile_with(self, script: str) -> None:
        self.compiler.write_text(f"#!/bin/sh\n{script}\n")
        self.compiler.chmod(0o755)

    @property
    def compilations(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0

    @property
    def libraries(self) -> list[Path]:
        """Whatever lies in the cache folder."""
        return sorted((self.cache / "topo-search" / "compiled").iterdir())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    found = Place(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(found.cache))
    monkeypatch.setenv("CXX", f"env LC_ALL=C {found.compiler}")
    umask = os.umask(0o002)  # folders that a group may write to are what many systems make
    yield found
    os.umask(umask)


@needs_compiler
def test_a_library_is_compiled_once(place: Place) -> None:
    assert [loaded_library(place.source).answer() for _ in range(2)] == [42, 42]
    assert place.compilations == 1
    assert [path.suffix for path in place.libraries] == [".so"]
    assert place.libraries[0].parent.stat().st_mode & 0o077 == 0


@needs_compiler
def test_another_source_or_command_is_another_library(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded_library(place.source)
    place.source.write_text(CODE.replace("42", "43"))
    assert loaded_library(place.source).answer() == 43
    monkeypatch.setenv("CXX", f"{place.compiler} -g0")
    assert loaded_library(place.source).answer() == 43
    assert (place.compilations, len(place.libraries)) == (3, 3)


@needs_compiler
@pytest.mark.parametrize("content", [b"", b"half", None])
def test_a_damaged_library_is_compiled_again(place: Place, content: bytes | None) -> None:
    """Loading a library that was cut short can end the process, so its digest is compared first."""
    place.source.write_text(CODE.replace("42", "44"))
    loaded_library(place.source)
    path = place.libraries[0]
    whole = path.read_bytes()
    path.unlink()  # the process still has it mapped
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    assert loaded_library(place.source).answer() == 44
    assert place.compilations == 2
    assert [found.read_bytes() for found in place.libraries] == [whole]


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(place: Place) -> None:
    place.compile_with('echo "code.cpp:1: error: no such luck" >&2\nexit 1')
    with pytest.raises(InputError, match=r"cannot compile code.cpp: .*no such luck.*CXX, or use --mode eager or auto"):
        loaded_library(place.source)
    assert place.libraries == []
    place.compile_with("exit 0")
    with pytest.raises(InputError, match="no word why"):
        loaded_library(place.source)


def test_a_library_that_does_not_load_is_named(place: Place) -> None:
    place.compile_with('while [ "$1" != -o ]; do shift; done\necho nonsense > "$2"')
    with pytest.raises(InputError, match=r"code-.*\.so was just compiled and cannot be loaded; use --mode eager"):
        loaded_library(place.source)


def test_a_folder_that_others_can_write_to_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place.cache / "topo-search" / "compiled"
    folder.mkdir(parents=True)
    for mode in (0o775, 0o757):  # by the group, by all others
        folder.chmod(mode)
        with pytest.raises(InputError, match=r"can be written to by others.*chmod go-w .*or use --mode eager or auto"):
            loaded_library(place.source)
    folder.chmod(0o755)
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(InputError, match=r"belongs to another user"):
        loaded_library(place.source)
    assert place.compilations == 0


def test_a_cache_that_cannot_be_made_is_named(place: Place) -> None:
    place.cache.write_text("a file where the folder should be")
    with pytest.raises(InputError, match=r"cannot be made \(.*\); set XDG_CACHE_HOME to a folder of yours"):
        loaded_library(place.source)


def test_no_compiler_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(InputError, match=r"no no-such-compiler here; install one or name it in CXX"):
        loaded_library(place.source)
    monkeypatch.setenv("CXX", " ")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match=r"there is no g\+\+ here"):
        require_compiler()
