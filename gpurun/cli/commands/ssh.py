"""`gpurun ssh`: a shell, or a command, on the machine of a run."""

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
        list[str] | None, typer.Argument(metavar="CMD", help="What to run there, after `--`; without: a shell.")
    ] = None,
) -> Result:
    """Log in to a run's machine, or run a command on it, without affecting the run.

    It ends with the command's exit code, 255 where the connection fails.
    """
    from gpurun.cli.openssh import program, ssh_argv
    from gpurun.cli.run_control import meant
    from gpurun.lifecycle.ways_in import config_of, way_to_run

    if session.json:
        hint = "gpurun ssh-config --json says how each run's machine is reached."
        raise UsageError("ssh.json", "gpurun ssh passes on what the machine prints, which is no JSON.", hint=hint)
    argv = _argv(command or [])
    way = way_to_run(session.home, meant(session, run), session.clock)
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    line = way.command(argv, at_terminal=at_terminal)
    if way.entry is None:
        _become(shlex.split(line))
    elif program() is not None:
        _become(ssh_argv(config_of(session.home), way.entry, "-t" if at_terminal else "-T", command=line))
    else:
        from gpurun.cli.terminal_shell import run_here

        sys.exit(run_here(way.entry, line, session.clock, at_terminal=at_terminal))


def _argv(command: list[str]) -> list[str]:
    """Return the command that was typed; UsageError where a flag of gpurun's stands where it would begin."""
    argv = command[1:] if command[:1] == ["--"] else command
    if argv and argv == command and argv[0].startswith("-"):
        hint = "Flags stand before RUN, and the command after `--`: gpurun ssh RUN -- CMD."
        raise UsageError("ssh.flag", f"{argv[0]} stands behind the run.", hint=hint)
    return argv


def _become(argv: list[str]) -> NoReturn:
    """Let another program take this process's place: the terminal, its signals and the exit code are its own."""
    from gpurun.cli.openssh import ssh_environment

    program = shutil.which(argv[0])
    if program is None:
        hint = "Its scheduler is on this machine, as config.toml says: log in where it is."
        raise UsageError("ssh.no_program", f"There is no {argv[0]} here.", hint=hint)
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execve(program, argv, ssh_environment())
