"""Tests of the frozen command tree: a new, removed or renamed verb or flag is a decision, not an accident."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from gpurun.cli.app import GROUPS, VERBS, build_app

GOLDEN = Path(__file__).with_name("command_tree.txt")


def tree(command: Any, name: str = "gpurun") -> list[str]:
    """Return a line for each verb: its name, then its arguments and options as typed."""
    children = getattr(command, "commands", {})
    if children:
        return [line for key in sorted(children) for line in tree(command.get_command(None, key), f"{name} {key}")]
    parts = [parameter.opts for parameter in command.params if parameter.param_type_name == "option"]
    arguments = [_as_typed(parameter) for parameter in command.params if parameter.param_type_name == "argument"]
    return [" ".join([name, *arguments, *sorted("|".join(sorted(opts)) for opts in parts)])]


def _as_typed(argument: Any) -> str:
    """Return an argument as a usage line shows it.

    Its name must not contain brackets or dots, because they would then appear twice.
    """
    name = argument.metavar or argument.name
    assert argument.hidden or name.isalpha(), name
    return (name if argument.required else f"[{name}]") + ("..." if argument.nargs != 1 else "")


def test_the_command_tree_is_the_one_that_was_agreed_on() -> None:
    drawn = "\n".join(tree(typer.main.get_command(build_app()))) + "\n"
    if os.environ.get("GPURUN_UPDATE_GOLDEN"):
        GOLDEN.write_text(drawn)
    assert drawn == GOLDEN.read_text()


@pytest.mark.parametrize("line", GOLDEN.read_text().splitlines() if GOLDEN.exists() else [])
def test_every_verb_takes_the_common_flags(line: str) -> None:
    for flag in ("--json", "--quiet|-q", "--verbose|-v", "--color", "--no-input", "--home", "--no-progress"):
        assert flag in line.split()


def test_every_help_begins_with_an_example_and_its_lines_fit() -> None:
    from typer.testing import CliRunner

    for line in GOLDEN.read_text().splitlines():
        words = line.split()[1:]
        verb = words[:2] if words[0] in ("recipes", "config", "auth", "aws", "data", "roster", "mandate") else words[:1]
        shown = CliRunner().invoke(build_app(), [*verb, "--help"]).output
        assert f"$ gpurun {' '.join(verb)}" in shown or "$ GPURUN" in shown
        assert max(len(line) for line in shown.splitlines() if "$ gpurun" not in line) <= 80
        assert len(shown.splitlines()) <= (110 if verb[0] in ("train", "run", "dev", "sweep", "plan") else 50)


def test_the_list_of_verbs_says_of_each_what_it_says_itself() -> None:
    group: Any = typer.main.get_command(build_app())
    assert {name: group.get_command(None, name).get_short_help_str(len(line)) for name, line in VERBS.items()} == VERBS


def test_the_help_has_each_verb_once_under_what_it_is_for() -> None:
    from typer.testing import CliRunner

    shown = CliRunner().invoke(build_app(), ["--help"]).output
    lines = re.findall(r"^(?:(\S.*):|  ([a-z-]+)  +\S)", shown, re.MULTILINE)
    listed = [title or name for title, name in lines]
    assert listed[listed.index("Rent and train") :] == [
        word for group in GROUPS.items() for word in (group[0], *group[1])
    ]
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(VERBS)


@pytest.mark.parametrize(
    ("words", "verbs"), [(["--help"], []), (["trian"], []), (["ps", "--help"], ["ps"]), (["auth"], ["auth"])]
)
def test_a_verb_is_imported_only_when_it_is_named(words: list[str], verbs: list[str]) -> None:
    code = (
        "import atexit, sys\n"
        "room = 'gpurun.cli.commands.'\n"
        "atexit.register(lambda: print([name[len(room):] for name in sys.modules if name.startswith(room)]))\n"
        "from gpurun.cli.app import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == str(verbs)
