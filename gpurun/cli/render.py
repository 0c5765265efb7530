"""Turns a Result into bytes: its data or its text on standard output, its errors and the way on beside it.

Standard output can be lost: its reader has seen enough, or the disk under it is full.
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
    """Standard output takes nothing more; `why` is empty where its reader has left, which is no trouble."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.why = "" if isinstance(error, BrokenPipeError) else error.strerror or str(error)


def put(text: str) -> None:
    """Write a text and a newline at once; OutputLost where that cannot be."""
    try:
        print(text, flush=True)
    except OSError as error:
        raise make_output_lost(error) from None


def put_bytes(content: bytes) -> int:
    """Write bytes as they are, at once, and return how many; OutputLost where that cannot be."""
    try:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    except OSError as error:
        raise make_output_lost(error) from None
    return len(content)


def write_file(path: Path, text: str, *, flag: str) -> int:
    """Put a text where a flag asks for it, whole or not at all; its size in bytes, or a SetupError."""
    return write_bytes(path, text.encode("utf-8"), flag=flag)


def write_bytes(path: Path, content: bytes, *, flag: str) -> int:
    """The same for what is no text."""
    part = path.parent / f"{path.name}.part"
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if is_stream(path):
            return path.write_bytes(content)
        part.write_bytes(content)
        part.rename(path)
    except OSError as error:
        with suppress(OSError):  # Where it could not be made, it cannot be taken away either.
            part.unlink(missing_ok=True)
        raise SetupError("output.cannot_write", f"{path} cannot be written: {error.strerror}.",
                         hint=f"Choose another place with {flag}, or make room.") from None  # fmt: skip
    return len(content)


def make_output_lost(error: OSError) -> OutputLost:
    """The error for standard output's; what is still in the buffer goes nowhere, or Python would complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OutputLost(error)


def render_result(name: str, as_json: bool, result: Result, session: Session | None) -> int:
    """Show how a verb ended, as text or as the JSON envelope, and return its exit code."""
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
    return _talk(result, session)


def without_output(loss: OutputLost, result: Result, session: Session | None) -> int:
    """End without standard output: silently where its reader has left, else with a sentence; the run's code stays."""
    if not loss.why:
        return _talk(result, session)
    hint = "Make room there, or send it somewhere else."
    error = SetupError("output.lost", f"Standard output cannot be written: {loss.why}.", hint=hint)
    code = result.exit_code or error.exit_code
    return _talk(replace(result, errors=(*result.errors, error), exit_code=code), session)


def _talk(result: Result, session: Session | None) -> int:
    """The errors and the way on, on standard error; where that is lost too there is nobody to tell."""
    from gpurun.view.error_text import error_text
    from gpurun.view.style import probe

    style = probe(sys.stderr, color=session.color if session else "auto")
    said = [error_text(error.what, error.hint, error.code, style) for error in result.errors]
    said += [result.after] if result.after and not (session and session.quiet) else []
    with suppress(OSError):
        for text in said:
            print(text, file=sys.stderr, flush=True)
    return int(result.exit_code)
