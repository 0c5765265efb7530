"""Turns a function into a command: adds the common flags, calls the function, and renders its result.

Errors have the same output format: with `--json`, even a wrong flag prints the envelope.
"""

from __future__ import annotations

import errno
import inspect
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer

from gpurun.cli.help_panels import PanelledCommand
from gpurun.cli.render import OutputLost, make_output_lost, render_result, without_output
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.unfinished import SILENT, note_unfinished
from gpurun.core.errors import ExitCode, GpurunError, Interrupted, SetupError, UsageError
from gpurun.core.paths import Home, default_home, home_at

COMMON: dict[str, tuple[Any, Any]] = {
    "json": (Annotated[bool, typer.Option("--json", help="Print JSON, with an envelope at the end.")], False),
    "quiet": (Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors.")], False),
    "verbose": (Annotated[bool, typer.Option("--verbose", "-v", help="Print more details.")], False),
    "color": (Annotated[str, typer.Option("--color", help="Use color: auto, always or never.", metavar="WHEN")], ""),
    "no_input": (Annotated[bool, typer.Option("--no-input", help="Never ask; a missing answer is an error.")], False),
    "home": (Annotated[str, typer.Option("--home", help="Use this folder for runs and keys.", metavar="DIR")], ""),
    "no_progress": (
        Annotated[bool, typer.Option("--no-progress", help="Print plain lines instead of a live view.")],
        False,
    ),
}
"""The flags of every command, with type and default; `gpurun` also accepts them before the command's name."""

Verb = Callable[..., Result]


@dataclass(frozen=True)
class Shared:
    """Flags that several commands share. `make` builds a value from them, which is passed to the argument `name`."""

    name: str
    flags: Mapping[str, tuple[Any, Any]]
    make: Callable[..., Any]


# Errors from an unusable path (no access, too long, not a folder), and from a failing or missing disk.
_SHUT = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR),
    *(errno.EIO, errno.ESTALE, errno.ENOTCONN),
)


def verb(
    app: typer.Typer, name: str, *, examples: Sequence[str], shares: Sequence[Shared] = (), takes_command: bool = False
) -> Callable[[Verb], Verb]:
    """Return a decorator that registers `function(session, …) -> Result` as a command; its help begins with examples.

    The command's name is the last word of `name`. The command also has the flags in `shares`, and gets the values built
    from them. With `takes_command`, everything after the first argument belongs to the command that the user typed.
    """
    given_by_us = ("session", *(shared.name for shared in shares))

    def register(function: Verb) -> Verb:
        types, written = get_type_hints(function, include_extras=True), inspect.signature(function).parameters
        own = {p.name: (types[p.name], p.default) for p in written.values() if p.name not in given_by_us}

        def command(context: typer.Context, **given: Any) -> int:
            before = context.find_root().params
            common = {key: given.pop(key) or before.get(key, usual) for key, (_, usual) in COMMON.items()}
            try:
                _refuse_blanks(context.find_root())
                _refuse_blanks(context)
                session = _session(common, _typed_names(context))
            except GpurunError as error:
                return render_result(name, common["json"], Result(errors=(error,), exit_code=error.exit_code), None)

            def run() -> Result:
                for shared in shares:
                    given[shared.name] = shared.make(session, **{flag: given.pop(flag) for flag in shared.flags})
                return function(session, **given)

            return _finish(name, session, run)

        flags = {
            "context": (typer.Context, inspect.Parameter.empty),
            **{flag: kind for shared in shares for flag, kind in shared.flags.items()},
            **own,
            **COMMON,
        }
        with_flags(command, flags)
        first = (function.__doc__ or "").strip().splitlines()[0]
        lines = "\n".join(f"  $ {example}" for example in examples)
        settings = {"allow_interspersed_args": not takes_command}
        help_text = f"\b\n{lines}\n\n{first}"
        registered = app.command(
            name.split()[-1], cls=PanelledCommand, context_settings=settings, help=help_text, short_help=first
        )
        registered(command)
        return function

    return register


def with_flags(command: Callable[..., Any], flags: Mapping[str, tuple[Any, Any]]) -> None:
    """Give a function with `**given` the signature that Typer reads: these flags, with type and default."""
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(flag, kind, default=d, annotation=a) for flag, (a, d) in flags.items()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}


def _refuse_blanks(context: Any) -> None:
    """Raise UsageError if a flag's value is empty, which is probably an unset variable in a script."""
    typed = _typed_names(context)
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in typed and parameter.default == "" and not str(context.params[name]).strip():
            label = parameter.opts[0] if parameter.opts[0].startswith("-") else name.upper()
            hint = "Give it a value or leave it out; a variable in your script may be unset."
            raise UsageError("usage.blank", f"{label} is empty.", hint=hint)


def _typed_names(context: Any) -> frozenset[str]:
    """Return the parameters that were typed on the command line, even with their default value."""
    names = (parameter.name or "" for parameter in context.command.params)
    return frozenset(name for name in names if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE")


def _session(common: dict[str, Any], typed: frozenset[str] = frozenset()) -> Session:
    home = common.pop("home")
    root = home_at(home) if home else default_home()
    common["color"] = common["color"] or _usual_color(Home(root))
    return Session(home=Home(root), typed=typed, **common)


def _usual_color(home: Home) -> str:
    """Return the colour setting; `auto` if the settings cannot be read, because that must not prevent `destroy`."""
    if os.environ.get("NO_COLOR"):  # Only the flag overrides NO_COLOR.
        return "auto"
    try:
        return Session(home=home).settings["color"].value
    except (GpurunError, OSError):
        return "auto"


def _finish(name: str, session: Session, call: Callable[[], Result]) -> int:
    """Call the function and render its result; an unexpected exception is rendered as a bug, with a trace in a file."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # SIGINT was blocked until there was a handler.
        if session.color not in ("auto", "always", "never"):
            raise UsageError("usage.color", f"--color {session.color!r} is not one of auto, always, never.",
                             hint="Leave the flag out, or choose one of the three.")  # fmt: skip
        if session.bounds:
            from gpurun.cli.mandate_door import require_allowed

            require_allowed(session.bounds, name)
        elif name not in SILENT and not session.json:
            note_unfinished(session)
        result = call()
    except GpurunError as error:
        result = Result(errors=(error,), exit_code=error.exit_code)
    except KeyboardInterrupt:  # Typer would exit without printing anything for --json.
        left = Interrupted("interrupted", "Interrupted.", hint="gpurun ps shows what runs.")
        result = Result(errors=(left,), exit_code=left.exit_code)
    except OutputLost as loss:
        return without_output(loss, Result(), session)
    except BrokenPipeError as error:
        return without_output(make_output_lost(error), Result(), session)
    except Exception as bug:  # noqa: BLE001 - for any bug, write the trace to a file and a sentence to the terminal.
        known = _outside_error(session, bug)
        result = Result(errors=(known,), exit_code=known.exit_code) if known else _bug_result(session, bug)
    return render_result(name, session.json, result, session)


def _outside_error(session: Session, fault: Exception) -> GpurunError | None:
    """Return the error for a cause outside gpurun (disk, path, missing package), for which a trace would not help."""
    if isinstance(fault, RuntimeError) and "home directory" in str(fault):  # pathlib's error for ~NAME.
        what = "A path begins with ~ and a user name that does not exist on this machine."
        return UsageError("usage.path", what, hint="Write the full path, or ./~NAME for a folder with that name.")
    if isinstance(fault, ImportError):
        from gpurun.core.installed_files import broken_installation

        return broken_installation(fault)
    where = getattr(fault, "filename", None)
    if not isinstance(fault, OSError):
        return None
    if fault.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"There is no space left to write {where or session.home.root}."
        return SetupError("disk.full", what, hint="Free some space, then try again.")
    if where and fault.errno in _SHUT:
        return SetupError(
            "path.unusable", f"{where} cannot be used: {fault.strerror}.", hint="Repair that path, or name another."
        )
    return None


def _bug_result(session: Session, bug: Exception) -> Result:
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="gpurun-bug-", suffix=".txt", delete=False) as trace:
        traceback.print_exception(bug, file=trace)
    what = f"gpurun itself failed: {type(bug).__name__}: {bug}."
    error = GpurunError("bug", what, hint=f"The trace is in {trace.name}; please report it.")
    return Result(errors=(error,), exit_code=ExitCode.BUG)
