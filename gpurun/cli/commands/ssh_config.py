"""`gpurun ssh-config`: write an OpenSSH entry for each machine that allows a login."""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gpurun.cli.options import Yes
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import SetupError

if TYPE_CHECKING:
    from gpurun.lifecycle.ways_in import WayIn

app = typer.Typer(rich_markup_mode=None)
_FIRST_BLOCK = re.compile(r"^\s*(Host|Match)\b", re.IGNORECASE | re.MULTILINE)


@verb(app, "ssh-config", examples=["gpurun ssh-config", "gpurun ssh-config --yes", "gpurun ssh-config --json"])
def ssh_config(session: Session, yes: Yes = False) -> Result:
    """Write an ssh entry for each run's machine, for scp, rsync, editors and git.

    gpurun updates them in its own file as runs start and end. Your ~/.ssh/config is changed only after a yes.
    """
    from gpurun.lifecycle.ways_in import config_of, write_entries
    from gpurun.remote.ssh.entry import include_line

    config = config_of(session.home)
    line = include_line(config)
    ways = write_entries(session.home, session.clock)
    users = _users_config()
    is_included = _has_line(users, line)
    text = "\n".join(_describe_ways_in(ways)) or "No run has a machine that you can log in to."
    if not is_included and (yes or session.interactive):
        question = f"{line}\nAdd this line at the top of {users}, so that ssh, scp and editors use the entries? [y/N]"
        is_included = yes or session.ask(question, flag="--yes").lower() in ("y", "yes")
        if is_included:
            put_first(users, line)
    after = (
        ""
        if is_included
        else f"For ssh, scp and editors to find the entries, add this at the top of {users}:\n  {line}"
    )
    data = {
        "config": str(config),
        "include": line,
        "included": is_included,
        "entries": [
            {
                "run": way.run,
                "host": way.entry.alias,
                "address": way.entry.address.place,
                "user": way.entry.address.user,
                "folder": way.folder,
            }
            for way in ways
            if way.entry is not None
        ],
    }
    return Result(data=data, text=text, after=after)


def _describe_ways_in(ways: list[WayIn]) -> list[str]:
    lines = []
    for way in ways:
        if way.entry is None:
            lines.append(f"{way.run}: its scheduler is on this machine; gpurun ssh {way.run}")
            continue
        alias = way.entry.alias
        where = f" (the login node; gpurun ssh {way.run} enters the job)" if way.job else ""
        lines.append(f"{alias}  {way.entry.address.user}@{way.entry.address.place}{where}")
        lines.append(f"  scp {alias}:{way.folder}/NAME .")
        lines.append(f"  code --remote ssh-remote+{alias}")
    return lines


def _users_config() -> Path:
    """Return the user's OpenSSH configuration, which is in the account's home directory, whatever $HOME is."""
    return Path(pwd.getpwuid(os.getuid()).pw_dir) / ".ssh" / "config"


def _has_line(path: Path, line: str) -> bool:
    """Return whether a file has the line before its first Host or Match, where it applies to all hosts."""
    from gpurun.core.paths import read_regular

    try:
        text = read_regular(path).decode("utf-8", "replace")
    except OSError:
        return False
    first = _FIRST_BLOCK.search(text)
    return line in (text_line.strip() for text_line in text[: first.start() if first else None].splitlines())


def put_first(path: Path, line: str) -> None:
    """Insert a line at the top of a file, which may be a link, and leave the rest unchanged."""
    from gpurun.core.paths import read_regular, write_atomic

    target = path.resolve()
    try:
        target.parent.mkdir(mode=0o700, exist_ok=True)
        before = read_regular(target) if target.exists() else b""
        write_atomic(target, f"{line}\n".encode() + before)
    except OSError as error:
        hint = f"Add it yourself as the first line: {line}"
        raise SetupError("ssh_config.unwritable", f"{path} cannot be written: {error.strerror}.", hint=hint) from None
