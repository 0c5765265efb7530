"""Resolves `gpurun run NAME`, for a name that a table in gpurun.toml defines.

The name's command is shown, a table that was not approved needs the user's yes, and typed flags take precedence.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from gpurun.cli.options import STARTING, usual_providers
from gpurun.cli.session import Session
from gpurun.cli.verb import COMMON
from gpurun.core.errors import Declined, UsageError
from gpurun.core.places import place_kinds
from gpurun.jobs.commands.named_command import (
    NamedCommand,
    approve,
    find_named,
    is_approved,
    refuse_unknown,
    require_clone,
)

if TYPE_CHECKING:
    from gpurun.view.styled_text import Cell, Line

_ADDED = ("env", "secret")
"""Flags whose typed values are added to the table's; only a value of the same name is replaced."""
_ROWS = {
    "Uploads": ("upload", "data", "include", "exclude"),
    "Installs": ("pip", "image"),
    "Brings home": ("outputs", "checkpoint_glob", "resume_arg"),
    "Asks for": ("gpu", "spot", "max_cost", "hours", "disk", "output_gb", "total_steps", "stop_signal", "grace", "idle",
                 "silent"),
}  # fmt: skip


def with_named(session: Session, typed: dict[str, Any], flags: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Return the typed values; if the command is a name, replace it by the flags in the name's table.

    Typed flags take precedence. A word with a `/` or a dot is always a file, and words after `--` are always a command.
    """
    first, *more = typed["command"] or [""]
    is_command = sys.argv[-len(more) - 2 :][:1] == ["--"]
    if not first or "/" in first or "." in first or is_command:
        return typed
    named = find_named(first, Path.cwd(), _flag_names(flags))
    if named is None:
        if not more and shutil.which(first) is None:
            raise refuse_unknown(first, Path.cwd())
        return typed
    if more:
        what = f"{first} does not take arguments, but got {shlex.join(more)}."
        raise UsageError("run.named_words", what, hint=f"Flags come first: gpurun run --max-cost 60 … {first}; to run "
                         f"a program of that name: gpurun run … -- {first}")  # fmt: skip
    if bool(named.sweep) != typed.get("is_sweep", False):
        what = f"{named.place} defines a sweep, so its command cannot run without a trial's settings."
        raise UsageError("run.is_sweep", what, hint=f"gpurun sweep {first}")
    upload = typed["upload"] or named.upload or "."
    if named.repository:
        require_clone(named, Path(upload).expanduser().absolute())
    values = named.flags
    _require_within_bounds(named, values, flags)
    own = [name for name in values if name in session.typed and name not in ("command", *_ADDED)]
    cap = {} if "max_cost" in own else _lowered_cap(session, named)
    _show_and_ask(session, named, typed, own)
    merged = {name: value for name, value in values.items() if name not in own}
    merged |= {name: [*values[name], *typed[name]] for name in _ADDED if name in values}
    return {**typed, **merged, "max_cost": typed["max_cost"], **cap, "upload": upload}


def _lowered_cap(session: Session, named: NamedCommand) -> dict[str, str]:
    """Return the table's cap if it is below the user's own cap; UsageError if it is above.

    If the user has no cap, the table's cap is ignored, because a stranger's folder must not decide what is spent.
    """
    from gpurun.core.money import parse_usd

    own = session.settings["max_cost"]
    if not named.max_cost:
        return {}
    cap = parse_usd(named.max_cost, name=f"max_cost in {named.place}", example="max_cost = 5")
    if not own.value:
        return {}
    if cap > parse_usd(own.value):
        what = f"max_cost in {named.place} is {named.max_cost}, above your cap of {own.value} ({own.source})."
        raise UsageError("run.not_in_a_table", what, hint=f"Type the cap that you want: --max-cost {own.value}")
    return {"max_cost": named.max_cost, "cap_from": named.place}


def _require_within_bounds(named: NamedCommand, values: dict[str, Any], flags: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise UsageError for a number in the name's table that is outside the bounds of its flag."""
    for name, value in values.items():
        option = get_args(flags[name][0])[1]
        if (option.min is not None and value < option.min) or (option.max is not None and value > option.max):
            most = "" if option.max is None else f" to {option.max}"
            what = f"{name} in {named.place} is {value}, but the allowed range is from {option.min}{most}."
            raise UsageError("run.table", what, hint="Write a number within these bounds.")


def _flag_names(flags: Mapping[str, tuple[Any, Any]]) -> set[str]:
    """Return the name that each flag of `gpurun run` has in a table."""
    groups = (flags, STARTING.flags, COMMON)
    options = (get_args(kind)[1] for group in groups for kind, _ in group.values())
    words = (
        str(word) for option in options for word in (option.default, *(option.param_decls or ()))
    )  # The names as Typer stores them.
    return {word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}


def _show_and_ask(session: Session, named: NamedCommand, typed: dict[str, Any], own: Sequence[str]) -> None:
    """Show what the name would run; ask at a terminal before using a table that was not approved."""
    is_new = not named.comes_with_gpurun and not is_approved(named, session.home)
    if is_new and not session.interactive:
        what = f"{named.place} must be approved at a terminal; --yes is not enough."
        verb = "sweep" if named.sweep else "run"
        hint = f"Read it, then run once at a terminal: gpurun {verb} --dry-run {named.name}"
        raise UsageError("run.not_approved", what, hint=hint)
    shown = session.draw(_draw_named_command(session, named, typed, own))
    if not is_new:
        if not session.json:
            session.say(shown)
        return
    providers = tuple(typed["provider"]) or usual_providers(session)
    is_here = typed["dry_run"] or place_kinds(providers) == {"here"}
    where = "on this computer, with your rights" if is_here else "on the rented machine"
    print(shown, file=sys.stderr, flush=True)  # Even with --quiet, the user must see what they approve.
    question = f"Run this {where}? You will be asked again only if the table changes. [y/N]"
    if session.ask(question, flag="an answer at a terminal").lower() not in ("y", "yes"):
        raise Declined("run.declined", "Nothing was uploaded, installed or started.", hint="Use another command.")
    approve(named, session.home)


def _draw_named_command(session: Session, named: NamedCommand, typed: dict[str, Any], own: Sequence[str]) -> list[Line]:
    """Return lines with what would be run, uploaded, installed and passed on; only the names of variables are shown."""
    from gpurun.view.styled_text import Span, line
    from gpurun.view.table import fields

    folder = Path(typed["upload"] or named.upload or ".").expanduser().absolute()
    words = shlex.join(named.command).split("\n")
    rows: list[tuple[str, Sequence[Cell]]] = [
        (named.name, [Span(named.place, "title"), named.about]),
        *[("" if number else "Runs", [part]) for number, part in enumerate(words)],
        ("Tries", [f"{name} {value}" for name, value in named.sweep.get("set", {}).items()]),
        ("In a copy of", [str(folder)]),
        *[(title, list(_describe_set_keys(named, keys))) for title, keys in _ROWS.items()],
        ("Variables", sorted(named.env)),
        ("Your secrets", [Span(f"{name}: its value is passed on", "warn") for name in named.secret]),
        (
            "You typed",
            [_describe_typed_flag(name, typed, named) for name in (*own, *(name for name in _ADDED if typed[name]))],
        ),
    ]
    if named.max_cost and not session.settings["max_cost"].value and "max_cost" not in own:
        rows.append(("Cap", ["max_cost is ignored, because you have no cap: set one, or use --max-cost"]))
    return [line(), *fields(rows, session.style, label=16), line()]


def _describe_set_keys(named: NamedCommand, keys: Sequence[str]) -> Iterator[str]:
    """Yield each key that the table sets, with its value."""
    for key in keys:
        if key in named.model_fields_set and (value := getattr(named, key)) not in ("", ()):
            yield f"{key} {', '.join(value) if isinstance(value, tuple) else value}"


def _describe_typed_flag(name: str, typed: dict[str, Any], named: NamedCommand) -> str:
    """Return a typed flag and the table's value that it overrides; only the names of variables are shown."""
    flag = f"--{name.replace('_', '-')}"
    if name in _ADDED:
        return f"{flag} {', '.join(word.partition('=')[0] for word in typed[name])}"
    shown = ", ".join(typed[name]) if isinstance(typed[name], list) else typed[name]
    return f"{flag} {shown}, instead of {next(_describe_set_keys(named, [name]), 'nothing')}"
