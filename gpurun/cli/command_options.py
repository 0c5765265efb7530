"""Defines the flags of `gpurun run`, and builds the Request of a command from them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpurun.cli.options import RENTING, bound_challenge, build_request_fields, make_text_option, usual_providers
from gpurun.cli.session import Session
from gpurun.cli.verb import Shared

if TYPE_CHECKING:
    from gpurun.core.command import Command
    from gpurun.core.run_plan import Request

_ALONE = (".py", ".ipynb")
"""The kinds of script that are uploaded without their folder, unless --upload names a folder."""
_SIGNALS = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2")
_OUTPUT_ROOTS = ("~/", "/workspace/", "/root/", "/home/")
"""The only folders outside the command's folder where outputs may be; the machine replaces ~ by its own home."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def command_request(session: Session, **typed: Any) -> Request:
    """Return the checked request for a command; with --from, missing values are taken from the earlier run."""
    from gpurun.core.errors import UsageError
    from gpurun.core.run_plan import Request

    if typed["command"]:
        from gpurun.cli.named_run import with_named

        typed = with_named(session, typed, COMMAND.flags)
    renting = build_request_fields(session, **typed)
    request = Request(recipe="", **renting)
    if typed["command"]:
        request = request.model_copy(update={"command": _make_command(typed)})
    elif typed["continues"] is None:
        hint = "For example: gpurun run --gpu 1xT4 --max-cost 2 train.py, or gpurun run … -- torchrun train.py."
        raise UsageError("run.no_command", "There is no command to run.", hint=hint)
    if typed["dry_run"] and typed["hours"] is None:
        request = request.model_copy(update={"hours": typed["dry_run_seconds"] / 3600})
    if typed["continues"] is not None:
        from gpurun.jobs.commands.continued_command import command_as_before

        request = command_as_before(request, session.home, usual_providers(session))
    if session.bounds:
        session.bounds.require_below_root(
            "--pip", [path for word in typed["pip"] if (path := Path(word).expanduser()).exists()]
        )
    command = _add_pip_requirements(request, typed["pip"])
    if command and typed["challenge"]:
        command = command.model_copy(update={"challenge": bound_challenge(session, typed["challenge"])})
    return request.model_copy(update={"command": command})


def _make_command(typed: dict[str, Any]) -> Command:
    """Return the Command that the typed words and flags define."""
    from gpurun.core.command import EVERYTHING, Command
    from gpurun.core.errors import UsageError

    argv = tuple(typed["command"])
    signal = typed["stop_signal"].upper().removeprefix("SIG")
    if signal not in _SIGNALS:
        what = f"--stop-signal {typed['stop_signal']!r} is not one of {', '.join(_SIGNALS)}."
        raise UsageError("run.signal", what, hint="Leave it out; the default is TERM.")
    return Command(
        argv=_call_script_by_file_name(argv),
        folder=_upload_path(argv, typed["upload"]),
        outputs=parse_globs("--outputs", typed["outputs"], is_wide=True) or EVERYTHING,
        checkpoints=next(iter(parse_globs("--checkpoint-glob", [typed["checkpoint_glob"]])), ""),
        resume_arg=typed["resume_arg"],
        env=dict(_split_variable(text) for text in typed["env"]),
        secrets=tuple(_require_variable_name("--secret", text) for text in typed["secret"]),
        include=parse_upload_globs("--include", typed["include"]),
        exclude=parse_upload_globs("--exclude", typed["exclude"]),
        total_steps=typed["total_steps"],
        stop_signal=signal,
        grace_s=typed["grace"],
        output_bytes=int(1e9 * typed["output_gb"]),
        disk_gb=typed["disk"],
    )


def _call_script_by_file_name(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command's words; a single script is called by its file name, because its folder is not uploaded."""
    first = Path(argv[0])
    return (first.name, *argv[1:]) if first.suffix in _ALONE else tuple(argv)


def _upload_path(argv: Sequence[str], upload: str) -> str:
    """Return the path to upload: the folder of --upload, else a single script, else the working folder."""
    from gpurun.core.errors import UsageError

    if upload:
        place = Path(upload).expanduser().absolute()
        if not place.is_dir():
            raise UsageError("run.upload", f"There is no folder {place}.", hint="Name an existing folder: --upload .")
        return str(place)
    script = Path(argv[0]).expanduser().absolute()
    if script.suffix not in _ALONE:
        return str(Path.cwd())
    if not script.is_file():
        raise UsageError("run.no_script", f"There is no script {script}.", hint="Check its path.")
    return str(script)


def parse_globs(flag: str, typed: Sequence[str], *, is_wide: bool = False) -> tuple[str, ...]:
    """Return the globs in a flag's values, which may be separated by commas.

    UsageError if a glob is outside the command's folder; with `is_wide`, globs below the machine's home or /workspace
    are also allowed. If the local shell has expanded `~` to this computer's home, that is reverted.
    """
    from gpurun.core.errors import UsageError

    found, here = list[str](), str(Path.home()).rstrip("/") + "/"
    for glob in (glob.strip().removeprefix("./") for words in typed for glob in words.split(",") if glob.strip()):
        shown = f"~/{glob.removeprefix(here)}" if is_wide and here != "/" and glob.startswith(here) else glob
        parts = PurePosixPath(shown).parts
        is_elsewhere = ".." in parts or shown.startswith(("/", "~"))
        is_allowed = is_wide and ".." not in parts and len(parts) > 1 and shown.startswith(_OUTPUT_ROOTS)
        if is_elsewhere and not is_allowed:
            where = ", or below ~ or /workspace" if is_wide else ", where --from looks for it"
            what = f"{flag} {glob!r} is not in the command's folder{where}, so it would not be downloaded."
            raise UsageError("run.glob", what, hint=f"Let the command write into its folder: {flag} 'out/**'")
        hidden = [part for part in parts if part.startswith(".") and part != ".cache"] if is_elsewhere else []
        if hidden:  # Hidden folders contain keys and logins.
            what = f"{flag} {glob!r} names {hidden[0]}: ~/.cache is the only hidden folder that is downloaded."
            raise UsageError("run.glob", what, hint=f"Let the command write elsewhere: {flag} 'out/**'")
        found.append(shown)
    return tuple(found)


def parse_upload_globs(flag: str, globs: Sequence[str]) -> tuple[str, ...]:
    """Return a flag's globs, in the syntax of .gitignore; UsageError if one is outside the command's folder."""
    from gpurun.core.errors import UsageError

    for glob in globs:
        if (
            glob.startswith(("/", "~", "!", "#"))
            or ".." in PurePosixPath(glob).parts
            or "\n" in glob
            or not glob.strip()
        ):
            what = f"{flag} {glob!r} does not name a path in the command's folder."
            raise UsageError(
                "run.glob",
                what,
                hint=f"Name it relative to that folder: {flag} 'data/**'; for other files use --data PATH.",
            )
    return tuple(glob.removeprefix("./") for glob in globs)


def _split_variable(text: str) -> tuple[str, str]:
    """Split NAME=VALUE; UsageError if there is no value."""
    from gpurun.core.errors import UsageError

    name, sign, value = text.partition("=")
    if not sign:
        raise UsageError("run.env", f"--env {text!r} has no value.", hint="Write NAME=VALUE; for a key: --secret NAME.")
    return _require_variable_name("--env", name), value


def _require_variable_name(flag: str, name: str) -> str:
    """Return a variable's name after checking it; UsageError for invalid names, and names that gpurun reserves."""
    from gpurun.core.errors import UsageError

    if not _NAME.fullmatch(name) or name.startswith("GPURUN_"):
        what = f"{flag} {name!r} is not a valid variable name."
        raise UsageError("run.env", what, hint="Use letters, digits and _; names with GPURUN_ are reserved.")
    return name


def _add_pip_requirements(request: Request, requirements: Sequence[str]) -> Command | None:
    """Return the command with the requirements of --pip."""
    from gpurun.jobs.requirements import requirement_lines

    if not requirements or request.command is None:
        return request.command
    if not request.dry_run:
        rehearse = ", or use --dry-run, which installs it in a separate environment"
        refuse_pip_here(request, f"Install it yourself, and leave --pip out{rehearse}.")
    lines = tuple(line for text in requirements for line in requirement_lines(text))
    return request.command.model_copy(update={"pip": lines})


def refuse_pip_here(request: Request, hint: str) -> None:
    """Raise UsageError if --pip would install packages on this computer."""
    from gpurun.core.errors import UsageError
    from gpurun.core.places import place_kinds

    if place_kinds(request.providers) == {"here"}:
        raise UsageError("run.pip_here", "--pip installs packages on another machine, not on this computer.", hint=hint)


def repeated_flag(name: str, metavar: str, help_text: str) -> Any:
    """Return the type of a flag that may be repeated, for Typer."""
    return Annotated[list[str], typer.Option(name, metavar=metavar, help=help_text)]


def number_flag(kind: type, name: str, metavar: str, help_text: str, **bounds: Any) -> Any:
    """Return the type of a flag that takes a number within bounds, for Typer."""
    return Annotated[kind, typer.Option(name, metavar=metavar, help=help_text, show_default=False, **bounds)]


COMMAND = Shared(
    "request",
    {
        "command": (
            Annotated[list[str], typer.Argument(metavar="COMMAND", help="A Python script, or any command after --.")],
            [],
        ),
        **RENTING,
        "data": (make_text_option("--data", "PATH", "Provide a folder, s3:// or hf: at $GPURUN_DATA."), ""),
        "stage": (
            make_text_option("--stage", "s3://BUCKET", "Move large uploads and outputs through this bucket."),
            "",
        ),
        "upload": (make_text_option("--upload", "DIR", "Run in a copy of this folder."), ""),
        "outputs": (repeated_flag("--outputs", "GLOBS", "Download these files (default: all new)."), []),
        "checkpoint_glob": (
            make_text_option("--checkpoint-glob", "GLOB", "Continue from outputs that match this glob."),
            "",
        ),
        "resume_arg": (
            make_text_option("--resume-arg", "TEXT", "Add this argument with --from; {} is the checkpoint."),
            "",
        ),
        "env": (repeated_flag("--env", "NAME=VALUE", "Set a variable for the command; may be repeated."), []),
        "challenge": (
            make_text_option("--challenge", "C", "Derive $GPURUN_SEED from your teacher's challenge."),
            "",
        ),
        "secret": (repeated_flag("--secret", "NAME", "Pass a variable from here; it is never stored."), []),
        "pip": (repeated_flag("--pip", "WHAT", "Install a package or a requirements.txt first."), []),
        "total_steps": (
            Annotated[
                int,
                typer.Option(
                    "--total-steps",
                    metavar="N",
                    min=0,
                    show_default=False,
                    help="Estimate when the run ends from this step count.",
                ),
            ],
            0,
        ),
        "include": (repeated_flag("--include", "GLOB", "Upload this even if .gitignore excludes it."), []),
        "exclude": (repeated_flag("--exclude", "GLOB", "Do not upload this."), []),
        "stop_signal": (
            make_text_option("--stop-signal", "NAME", "Stop the command with this signal."),
            "TERM",
        ),
        "grace": (
            number_flag(int, "--grace", "S", "Let it save for so many seconds (default 60).", min=0, max=3600),
            60,
        ),
        "output_gb": (
            number_flag(float, "--output-gb", "GB", "Download at most this much (default 2).", min=0.001, max=10_000),
            2.0,
        ),
        "disk": (number_flag(int, "--disk", "GB", "Rent a disk this large (default 50).", min=1, max=16_000), 50),
        "dry_run_seconds": (
            number_flag(
                int, "--dry-run-seconds", "S", "Stop a rehearsal after this long (default 60).", min=1, max=3600
            ),
            60,
        ),
    },
    command_request,
)
"""The flags that define a command; the renting flags are shared with `train`."""
