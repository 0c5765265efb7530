"""Tests that docs/FLAGS.md is what the declared flags produce; GPURUN_UPDATE_GOLDEN=1 writes it again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer

from gpurun.cli.app import VERBS, build_app
from gpurun.cli.help_panels import EVERY_VERB, OPTIONS, PANELS, group_by_panel, long_name

PAGE = Path(__file__).parents[2] / "docs" / "FLAGS.md"
HEAD = """# All flags

This page is generated from the command line: first the flags of every verb, then those of a single verb, then, in
groups, those that `train`, `run` and others share. `gpurun help VERB` shows the same at a terminal.
"""
Flag = tuple[str, str]


def verbs_of(command: Any, name: str = "") -> dict[str, Any]:
    """Return every verb by its whole name."""
    if not hasattr(command, "get_command"):
        return {name: command}
    names = VERBS if not name else sorted(command.commands)
    return {
        whole: verb
        for key in names
        for whole, verb in verbs_of(command.get_command(None, key), f"{name} {key}".strip()).items()
    }


def drawn() -> str:
    """Return the text of the page."""
    takers: dict[str, dict[Flag, list[str]]] = {panel: {} for panel in (EVERY_VERB, *PANELS)}
    for name, verb in verbs_of(typer.main.get_command(build_app())).items():
        context = typer.Context(verb, info_name=name)
        options = [item for item in verb.get_params(context) if item.param_type_name == "option" and not item.hidden]
        for panel, members in group_by_panel(options).items():
            for option in members:
                flag, words = option.get_help_record(context)
                takers[panel].setdefault((flag, words), []).append(name)
    lines = [HEAD]
    for panel, flags in takers.items():
        if not flags:
            continue
        title = {OPTIONS: "A verb's own"}.get(panel, panel)
        lines += [f"## {title}", "", "| flag | what it does | verbs |", "| --- | --- | --- |"]
        for (flag, words), names in flags.items():
            whose = "all" if panel == EVERY_VERB else ", ".join(f"`{name}`" for name in names)
            flag_cell, words_cell = (text.replace("|", "\\|") for text in (flag, words))
            lines.append(f"| `{flag_cell}` | {words_cell} | {whose} |")
        lines.append("")
    return "\n".join(lines)


def test_the_page_of_flags_is_what_the_command_line_declares() -> None:
    if os.environ.get("GPURUN_UPDATE_GOLDEN"):
        PAGE.write_text(drawn(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == drawn()


def test_each_flag_of_a_panel_is_taken_and_has_words() -> None:
    taken = {}
    for name, verb in verbs_of(typer.main.get_command(build_app())).items():
        for option in verb.get_params(typer.Context(verb, info_name=name)):
            if option.param_type_name == "option":
                taken[long_name(option)] = option
    assert not {flag for flags in PANELS.values() for flag in flags} - set(taken)
    assert [flag for flag, option in taken.items() if option.hidden or not option.help] == []


def test_what_several_renting_verbs_take_is_in_a_panel() -> None:
    """A flag without a panel was listed before --gpu, as if it were the most important one."""
    verbs = verbs_of(typer.main.get_command(build_app()))
    own = [
        {long_name(option) for option in verbs[name].get_params(typer.Context(verbs[name], info_name=name))}
        for name in ("train", "run", "dev")
    ]
    assert set.intersection(*own) - {flag for flags in PANELS.values() for flag in flags} == set()
