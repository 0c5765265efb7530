"""`gpurun logs`: print the local copy of a run's log."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpurun.cli.options import UsualRun
from gpurun.cli.render import put, put_bytes
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.cli.verb import verb
from gpurun.core.errors import UsageError
from gpurun.core.paths import open_regular, read_regular
from gpurun.ledger.run_lock import holder_of

if TYPE_CHECKING:
    from gpurun.ledger.runs import Sight

_PART_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 4 << 20

app = typer.Typer(rich_markup_mode=None)


@verb(app, "logs", examples=["gpurun logs -f", "gpurun logs fox-41 --setup"])
def logs(
    session: Session,
    run: UsualRun = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")] = False,
    setup: Annotated[bool, typer.Option("--setup", help="Print the output of the set-up instead.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Print the raw bytes of the log; not to a terminal.")] = False,
) -> Result:
    """Print a run's log, even after the machine is gone.

    Escape sequences are removed. --json prints JSON Lines; --raw prints the raw bytes, but not to a terminal.
    """
    from gpurun.cli.run_control import find_meant_run
    from gpurun.core.untrusted import safe_line
    from gpurun.readers.run_reader import lines_in
    from gpurun.view.envelope import log_json

    sight = find_meant_run(session, run)
    if raw and sys.stdout.isatty():
        raise UsageError(
            "logs.raw_to_terminal",
            "--raw prints unfiltered bytes of the machine, which could control your terminal.",
            hint="Write them to a file: gpurun logs RUN --raw > run.log",
        )
    if raw and session.json:
        hint = "--json alone streams each line as JSON."
        raise UsageError("logs.two_outputs", "--raw and --json cannot both use standard output.", hint=hint)
    is_empty = True
    for block in _read_setup_logs(sight) if setup else _read_log_lines(session, sight, follow=follow):
        is_empty = False
        if raw:
            put_bytes(block)
        elif session.json:
            put("\n".join(log_json(line) for line in lines_in(block)))
        else:
            put("\n".join(safe_line(line) for line in lines_in(block)))
    if setup:
        after = f"The set-up of {sight.folder.name} has printed nothing." if is_empty else ""
        return Result(data={"run": sight.folder.name, "logs": [str(path) for path in _setup_logs(sight)]}, after=after)
    after = _why_empty(sight) if is_empty else ""
    return Result(data={"run": sight.folder.name, "log": str(sight.folder.log)}, after=after)


def _setup_logs(sight: Sight) -> list[Path]:
    """Return the existing logs of set-ups: first the log of the cluster's own set-up, then the log of --setup."""
    folder = sight.folder
    return [path for path in (folder.table_setup_log, folder.setup_log) if path.exists()]


def _read_setup_logs(sight: Sight) -> Iterator[bytes]:
    """Yield the content of the set-ups' logs; each has at most a few megabytes."""
    for path in _setup_logs(sight):
        if content := read_regular(path):
            yield content


def _why_empty(sight: Sight) -> str:
    """Return a sentence that says where to look if the log is empty."""
    name = sight.folder.name
    if sight.unfinished:
        return f"{name} has printed nothing yet. To see its progress: gpurun attach {name}"
    return f"No output of {name} was downloaded. To see how it ended: gpurun receipt {name}"


def _read_log_lines(session: Session, sight: Sight, *, follow: bool) -> Iterator[bytes]:
    """Yield the log in whole lines; with `follow`, continue until no supervisor drives the run.

    The log is read in parts, because it may be a gigabyte and `head` needs only its first lines. A huge line (from a
    progress bar that never ends its line) is yielded in pieces.
    """
    from gpurun.lifecycle.artifacts.log_copy import resume_offset

    offset, rest = 0, list[bytes]()
    while True:
        owned = holder_of(sight.folder.lock) is not None
        offset = resume_offset(sight.folder.log, offset)
        for part in _read_parts(sight.folder.log, offset):
            offset += len(part)
            whole_lines, newline, begun = part.rpartition(b"\n")
            if newline:
                yield b"".join((*rest, whole_lines, newline))
                rest.clear()
            rest.append(begun)
            if sum(map(len, rest)) >= _LONGEST_LINE_BYTES:
                yield b"".join(rest)
                rest.clear()
        if not follow or not owned:
            break
        session.clock.sleep(0.3)
    if any(rest):
        yield b"".join(rest)


def _read_parts(path: Path, offset: int) -> Iterator[bytes]:
    """Yield the content of a file from an offset, in parts; nothing if the file does not exist."""
    if path.exists():
        with open_regular(path) as content:
            content.seek(offset)
            while part := content.read(_PART_BYTES):
                yield part
