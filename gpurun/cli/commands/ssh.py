"""`gpurun ssh`: open a shell or run a command on the machine of a run."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from typing import Annotated, NoReturn

import typer

from gpurun.cli.options import RunArgument
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import UsageError

app = typer.Typer(rich_markup_mode=None)


@verb(app, "ssh", examples=["gpurun ssh fox-41", "gpurun ssh fox-41 -- nvidia-smi"], takes_command=True)
def ssh(
    session: Session,
    run: RunArgument,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="CMD", help="The command to run, after `--` (default: a shell).")
    ] = None,
) -> Result:
    """Log in to a run's machine, or run a command on it, without affecting the run.

    Exits with the command's exit code, or 255 if the connection fails.
    """
    from gpurun.cli.openssh import program, ssh_argv
    from gpurun.cli.run_control import resolve_run_name
    from gpurun.lifecycle.ways_in import config_of, way_to_run

    if session.json:
        hint = "gpurun ssh-config --json shows how to reach each run's machine."
        raise UsageError("ssh.json", "gpurun ssh prints what the machine prints, which is not JSON.", hint=hint)
    argv = _parse_command(command or [])
    way = way_to_run(session.home, resolve_run_name(session, run), session.clock)
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    line = way.command(argv, at_terminal=at_terminal)
    if way.entry is None:
        _exec_program(shlex.split(line))
    elif program() is not None:
        _exec_program(ssh_argv(config_of(session.home), way.entry, "-t" if at_terminal else "-T", command=line))
    else:
        from gpurun.cli.terminal_shell import run_here

        sys.exit(run_here(way.entry, line, session.clock, at_terminal=at_terminal))


def _parse_command(command: list[str]) -> list[str]:
    """Return the typed command; UsageError if one of gpurun's flags follows the run."""
    argv = command[1:] if command[:1] == ["--"] else command
    if argv and argv == command and argv[0].startswith("-"):
        hint = "Put flags before RUN, and the command after `--`: gpurun ssh RUN -- CMD."
        raise UsageError("ssh.flag", f"The flag {argv[0]} comes after the run.", hint=hint)
    return argv


def _exec_program(argv: list[str]) -> NoReturn:
    """Replace this process with another program, which gets the terminal, the signals and the exit code."""
    from gpurun.cli.openssh import ssh_environment

    program = shutil.which(argv[0])
    if program is None:
        hint = "config.toml says that the scheduler is on this machine; log in to the machine that has it."
        raise UsageError("ssh.no_program", f"{argv[0]} is not installed here.", hint=hint)
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execve(program, argv, ssh_environment())
