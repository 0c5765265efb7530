"""Runs `gpurun` in this process: a shell's result, without the half second of CPU time that each start takes."""

from __future__ import annotations

import io
import subprocess
import sys
from unittest import mock

from gpurun.cli.app import build_app, run_app


def gpurun(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command line with `given` as its standard input, which is not a terminal."""
    streams = {name: io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for name in ("stdout", "stderr")}
    with mock.patch.multiple(sys, argv=["gpurun", *words], stdin=io.StringIO(given), **streams):
        try:
            code = run_app(build_app())
        except SystemExit as left:
            code = int(left.code or 0)
    out, err = (stream.buffer.getvalue().decode() for stream in streams.values())  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(words, code, out, err)
