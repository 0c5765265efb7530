"""Tests that every command on a page of the documentation exists: its verb, and each of its flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from gpurun.cli.app import OTHER_WORDS, build_app

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
_FENCED = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_TYPED_IN = ("", "sh", "console")
_SPAN = re.compile(r"`(gpurun [^`]+)`")
NOT_TYPED = ("gpurun challenge ",)
"""Text that begins like a command but is not typed: what is hashed into a seed."""


def typed(page: str) -> Iterator[str]:
    """Yield the commands on a page, in blocks and in the text."""
    for kind, block in _FENCED.findall(page):
        for line in block.replace("\\\n", " ").splitlines() if kind in _TYPED_IN else ():
            yield from re.findall(r"(?:^\s*\$? ?|&& |!)(gpurun (?:[^&|#;'\"]|'[^']*'|\"[^\"]*\")+)", line)
    yield from (" ".join(span.split()) for span in _SPAN.findall(_FENCED.sub("", page)))


def wrong_in(words: list[str], command: Any) -> list[str]:
    """Return the words of a command that the command line does not know: its verb, or its flags."""
    context = typer.Context(command, info_name="gpurun")
    while words and hasattr(command, "get_command"):
        if words[0].startswith("-"):
            words = words[1:]
            continue
        found = command.get_command(context, words[0])
        if found is None:
            return [words[0]] if re.fullmatch(r"[a-z][a-z-]+", words[0]) else []
        command, words = found, words[1:]
        context = typer.Context(command, info_name="gpurun", parent=context)
    flags = {flag for option in command.get_params(context) for flag in (*option.opts, *option.secondary_opts)}
    own = words[: words.index("--")] if "--" in words else words
    script = next((place for place, word in enumerate(own) if word.endswith(".py")), len(own))
    return [word for word in own[:script] if word.startswith("-") and word.partition("=")[0] not in {*flags, "-"}]


def test_a_wrong_verb_and_a_wrong_flag_are_found() -> None:
    app = typer.main.get_command(build_app())
    assert wrong_in(["trian", "mini-gpt"], app) == ["trian"]
    assert wrong_in(["auth", "sett", "runpod"], app) == ["sett"]
    assert wrong_in(["--json", "train", "mini-gpt", "--max-costs", "1"], app) == ["--max-costs"]
    assert wrong_in(["run", "--max-cost=2", "train.py", "--epochs", "3"], app) == []


def test_commands_are_found_behind_a_block_of_another_language() -> None:
    page = "```toml\n[a]\n```\n\ngpurun refuses it.\n\n```\ngpurun trian\n```\n"
    assert list(typed(page)) == ["gpurun trian"]


def test_each_verb_that_another_tools_word_stands_for_is_there() -> None:
    app = typer.main.get_command(build_app())
    assert [words for words in OTHER_WORDS.values() if wrong_in(words.split(), app)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_no_verb_and_no_flag_that_is_not_there(page: Path) -> None:
    app = typer.main.get_command(build_app())
    wrong = {}
    for line in typed(page.read_text(encoding="utf-8")):
        if line.startswith(NOT_TYPED):
            continue
        try:
            words = shlex.split(line.replace("…", " "))[1:]
        except ValueError:
            continue
        if bad := wrong_in(words, app):
            wrong[line] = bad
    assert wrong == {}
