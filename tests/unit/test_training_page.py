"""The commands of docs/training.md exist, with every option they name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from topo_search.cli.app import command_line

PAGE = (Path(__file__).resolve().parent.parent.parent / "docs/training.md").read_text(encoding="utf-8")
COMMANDS = [
    words
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if (words := shlex.split(line))[0] in ("topo-search", "accelerate")
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_of_the_page_is_real(words: list[str]) -> None:
    """Names and options are the command line's own; values parse."""
    given = words[words.index("topo_search") + 1 :] if words[0] == "accelerate" else words[1:]
    command: Any = typer.main.get_command(command_line())
    while hasattr(command, "commands"):
        command, given = command.commands[given[0]], given[1:]
    command.make_context("page", given)


def test_the_page_goes_all_the_way() -> None:
    used = {word for words in COMMANDS for word in words}
    assert {"distill", "train", "medusa", "hydra", "hydra++", "medusa-2", "further", "calibrate", "measure"} <= used
    assert {"optimize", "bench", "generate", "accelerate"} <= used
    assert "Not yet run on a GPU" in PAGE


def test_options_in_the_text_exist() -> None:
    command: Any = typer.main.get_command(command_line())
    commands = [*command.commands.values(), *command.commands["train"].commands.values()]
    known = {name for one in commands for parameter in one.params for name in parameter.opts}
    ours = re.sub(r"accelerate launch.*", "", PAGE)
    assert set(re.findall(r"--[a-z][a-z-]+", ours)) - {"--cpu"} <= known  # which is accelerate's
