"""Defines the flags of `gpurun sweep`, and builds a Request for a recipe, a command or a name in gpurun.toml."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.command_options import COMMAND, command_request
from gpurun.cli.options import REQUEST, make_from_option, make_text_option, request_from, usual_providers
from gpurun.cli.session import Session
from gpurun.cli.verb import Shared

if TYPE_CHECKING:
    from gpurun.core.run_plan import Request
    from gpurun.core.sweep import Axis

_OPTIONS = ("trials", "sampler", "prune", "keep", "at_once", "seed")
_OF_A_COMMAND = (
    "upload", "outputs", "env", "secret", "pip", "total_steps", "include", "exclude", "grace", "output_gb", "disk",
)  # fmt: skip
"""The flags that apply only to a command, not to a recipe."""
_NOT_OF_A_TRIAL = ("resume_arg", "checkpoint_glob", "stop_signal", "challenge")
"""The flags that a sweep does not have: an interrupted trial starts again, and a challenge seeds a single run."""


def sweep_request(session: Session, **typed: Any) -> Request:
    """Return the checked request for a sweep; UsageError if there is nothing to try."""
    from gpurun.core.errors import UsageError
    from gpurun.core.sweep import make_sweep, parse_axis

    space, options = _axes_by_name(map(parse_axis, typed.pop("settings"))), {name: typed.pop(name) for name in _OPTIONS}
    words, continues = typed["command"], typed["continues"]
    typed = {**{name: usual for name, (_, usual) in COMMAND.flags.items()}, **typed}
    if continues is not None:
        return _continued_sweep_request(session, typed, space, options)
    if not words:
        hint = (
            "gpurun sweep mini-gpt --set lr=1e-3,3e-4; or gpurun sweep --set lr=1e-3,3e-4 -- python train.py --lr {lr}"
        )
        raise UsageError("sweep.nothing", "A sweep needs a recipe or a command.", hint=hint)
    if len(words) == 1 and not _is_command(words):
        if (named := _read_sweep_table(session, words[0])) is not None:
            in_table = dict(named)
            space = {**_parse_space(in_table.pop("set", {})), **space}
            options = {**in_table, **{name: value for name, value in options.items() if value}}
            request = command_request(session, **typed, is_sweep=True)
            return request.model_copy(update={"sweep": make_sweep(space, options)})
        return _recipe_sweep_request(session, typed, words[0], space, options)
    if not _is_command(words):
        what = f"{words[0]} is followed by more words, but a command must come after --."
        raise UsageError("sweep.words", what, hint=f"gpurun sweep --set … -- {' '.join(words)}")
    request = command_request(session, **typed)
    return request.model_copy(update={"sweep": make_sweep(space, options)})


def _recipe_sweep_request(
    session: Session, typed: dict[str, Any], recipe: str, space: Mapping[str, Axis], options: Mapping[str, Any]
) -> Request:
    """Return the request for a sweep of a recipe; a setting with a single value applies to all trials."""
    from gpurun.core.errors import UsageError
    from gpurun.core.sweep import make_sweep

    if own := [name for name in _OF_A_COMMAND if name in session.typed]:
        what = f"--{own[0].replace('_', '-')} applies only to a command, but {recipe} is a recipe."
        raise UsageError("sweep.option", what, hint="Leave it out, or put a command after --.")
    fixed = {name: axis[0] for name, axis in space.items() if isinstance(axis, tuple) and len(axis) == 1}
    sweep = make_sweep({name: axis for name, axis in space.items() if name not in fixed}, options)
    usual = {name: value for name, (_, value) in REQUEST.flags.items()}
    given = {name: value for name, value in typed.items() if name in usual}
    sets = [f"{name}={value}" for name, value in fixed.items()]
    request = request_from(session, **{**usual, **given, "recipe": recipe, "overrides": sets})
    return request.model_copy(update={"sweep": sweep})


def _continued_sweep_request(
    session: Session, typed: dict[str, Any], space: Mapping[str, Axis], options: Mapping[str, Any]
) -> Request:
    """Return the request for a sweep that continues an earlier sweep."""
    from gpurun.cli.options import build_request_fields
    from gpurun.core.run_plan import Request
    from gpurun.jobs.earlier_sweep import make_other_sweep, sweep_as_before

    if other := [*typed["command"], *space, *(name for name, value in options.items() if value)]:
        raise make_other_sweep(typed["continues"], other[0])
    return sweep_as_before(
        Request(recipe="", **build_request_fields(session, **typed)), session.home, usual_providers(session)
    )


def _read_sweep_table(session: Session, name: str) -> dict[str, Any] | None:
    """Return the `sweep` table of [run.NAME] in gpurun.toml; None if there is no [run.NAME].

    UsageError if [run.NAME] has no `sweep`, or an invalid one.
    """
    from gpurun.core.errors import UsageError
    from gpurun.core.settings import PROJECT_FILE, project_runs

    tables = project_runs(Path.cwd())
    if name not in tables:
        return None
    found = tables[name].get("sweep") if isinstance(tables[name], dict) else None
    if not isinstance(found, dict):
        what = f"[run.{name}] of {PROJECT_FILE} has no sweep."
        raise UsageError("sweep.no_table", what, hint='Write one there: sweep = { set = { lr = ["1e-3", "3e-4"] } }')
    if unknown := sorted(set(found) - {"set", *_OPTIONS}):
        what = f"sweep in [run.{name}] of {PROJECT_FILE} has the unknown key {unknown[0]!r}."
        raise UsageError("sweep.table", what, hint=f"Known keys: set, {', '.join(_OPTIONS)}.")
    wrong = [key for key in ("trials", "keep", "at_once", "seed") if key in found and type(found[key]) is not int]
    wrong += [key for key in ("sampler", "prune") if not isinstance(found.get(key, ""), str)]
    if wrong or not isinstance(found.get("set", {}), dict):
        what = f"{(wrong or ['set'])[0]} of the sweep in [run.{name}] has the wrong type."
        raise UsageError("sweep.table", what, hint="docs/SWEEPS.md shows which keys are numbers, words and lists.")
    return found


def _parse_space(table: Mapping[str, Any]) -> dict[str, Axis]:
    """Return the settings in a table by name, each given as a list of values or as a text in the syntax of --set."""
    from gpurun.core.sweep import axis_of, parse_axis

    found: dict[str, Axis] = {}
    for name, value in table.items():
        texts = [str(choice) for choice in value] if isinstance(value, list) else None
        found |= {name: axis_of(name, texts)} if texts else dict([parse_axis(f"{name}={value}")])
    return found


def _axes_by_name(axes: Any) -> dict[str, Axis]:
    """Return the settings by name; UsageError if a name is given twice."""
    from gpurun.core.errors import UsageError

    found: dict[str, Axis] = {}
    for name, axis in axes:
        if name in found:
            what = f"--set {name} is given twice."
            raise UsageError("sweep.set", what, hint=f"Give all its values at once: --set {name}=VALUE,VALUE")
        found[name] = axis
    return found


def _is_command(words: Sequence[str]) -> bool:
    """Return whether the words were typed after `--`."""
    return sys.argv[-len(words) - 1 :][:1] == ["--"]


def _number_option(name: str, metavar: str, help_text: str, **bounds: Any) -> Any:
    return Annotated[int, typer.Option(name, metavar=metavar, help=help_text, show_default=False, **bounds)]


SWEEP = Shared(
    "request",
    {
        "command": (
            Annotated[
                list[str],
                typer.Argument(metavar="WHAT", help="A recipe, a name in gpurun.toml, or any command after --."),
            ],
            [],
        ),
        "settings": (
            Annotated[
                list[str], typer.Option("--set", metavar="NAME=V,V", help="Try these values, or a range: 1e-4..1e-2.")
            ],
            [],
        ),
        "trials": (_number_option("--trials", "N", "Run N trials (default: the full grid, or 20).", min=0), 0),
        "sampler": (make_text_option("--sampler", "NAME", "Choose trials by grid, random or tpe (optuna's)."), ""),
        "prune": (make_text_option("--prune", "NAME", "Use asha to end trials early that fall behind."), ""),
        "keep": (_number_option("--keep", "K", "Download the K best (default 1).", min=0, max=100), 0),
        "at_once": (
            _number_option("--at-once", "N", "Run N trials per GPU (default: as many as fit).", min=0, max=64),
            0,
        ),
        "seed": (_number_option("--seed", "N", "Seed the sampler with this number.", min=0), 0),
        **{name: kind for name, kind in COMMAND.flags.items() if name not in ("command", *_NOT_OF_A_TRIAL)},
        "continues": (make_from_option("Run the remaining trials of an earlier sweep."), None),
    },
    sweep_request,
)
"""The flags that define the trials; the renting flags are shared with `train`."""
