"""Renders a Result: data or text on standard output, errors and the next command on standard error.

Writing to standard output can fail, because its reader has closed the pipe or the disk is full.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.core.errors import SetupError
from gpurun.core.paths import is_stream


class OutputLost(Exception):
    """Raised when writing to standard output fails; `why` is empty if its reader has closed the pipe."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.why = "" if isinstance(error, BrokenPipeError) else error.strerror or str(error)


def put(text: str) -> None:
    """Write a text and a newline, and flush; OutputLost if that fails."""
    try:
        print(text, flush=True)
    except OSError as error:
        raise make_output_lost(error) from None


def put_bytes(content: bytes) -> int:
    """Write bytes, flush, and return their number; OutputLost if that fails."""
    try:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    except OSError as error:
        raise make_output_lost(error) from None
    return len(content)


def write_file(path: Path, text: str, *, flag: str) -> int:
    """Write a text atomically to the file that `flag` names, and return its size; SetupError if that fails."""
    return write_bytes(path, text.encode("utf-8"), flag=flag)


def write_bytes(path: Path, content: bytes, *, flag: str) -> int:
    """Write bytes to the file that `flag` names, like `write_file`."""
    part = path.parent / f"{path.name}.part"
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if is_stream(path):
            return path.write_bytes(content)
        part.write_bytes(content)
        part.rename(path)
    except OSError as error:
        with suppress(OSError):  # There may be no file to remove.
            part.unlink(missing_ok=True)
        raise SetupError("output.cannot_write", f"{path} cannot be written: {error.strerror}.",
                         hint=f"Choose another path with {flag}, or free some space.") from None  # fmt: skip
    return len(content)


def make_output_lost(error: OSError) -> OutputLost:
    """Return the error for a failed standard output; discard the buffer, so that Python does not fail at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OutputLost(error)


def render_result(name: str, as_json: bool, result: Result, session: Session | None) -> int:
    """Print a command's result, as text or as the JSON envelope, and return the exit code."""
    try:
        if as_json:
            from gpurun.view.envelope import envelope_json

            errors = [error.as_record() for error in result.errors]
            put(envelope_json(name, dict(result.data), errors, int(result.exit_code)))
            return int(result.exit_code)
        if result.text:
            put(result.text)
    except OutputLost as loss:
        return without_output(loss, result, session)
    return _print_errors(result, session)


def without_output(loss: OutputLost, result: Result, session: Session | None) -> int:
    """Return the exit code after standard output failed; print an error unless its reader closed the pipe.

    An exit code that reports a failure of the run is kept.
    """
    if not loss.why:
        return _print_errors(result, session)
    hint = "Free some space, or write to another disk."
    error = SetupError("output.lost", f"Standard output cannot be written: {loss.why}.", hint=hint)
    code = result.exit_code or error.exit_code
    return _print_errors(replace(result, errors=(*result.errors, error), exit_code=code), session)


def _print_errors(result: Result, session: Session | None) -> int:
    """Print errors and the next command on standard error; ignore a failure to do so."""
    from gpurun.view.error_text import error_text
    from gpurun.view.style import probe

    style = probe(sys.stderr, color=session.color if session else "auto")
    said = [error_text(error.what, error.hint, error.code, style) for error in result.errors]
    said += [result.after] if result.after and not (session and session.quiet) else []
    with suppress(OSError):
        for text in said:
            print(text, file=sys.stderr, flush=True)
    return int(result.exit_code)
