"""A program that drives one run with the tiny trainer: `python drive.py HOME RUN`. Tests kill it at crash points."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from gpurun.core.clock import SystemClock
from gpurun.core.errors import GpurunError
from gpurun.core.paths import Home
from gpurun.core.records import Instance
from gpurun.lifecycle.supervisor import supervise
from gpurun.remote.client import FarSide
from gpurun.remote.local_machine import LocalMachine

TINY = Path(__file__).parents[1] / "emulators" / "tiny"


def reach(home: Home, instance: Instance) -> FarSide:
    assert instance.address is not None
    machine = LocalMachine(home.root / instance.address.folder, token=instance.token)
    return FarSide(machine, python=str(tiny_python(home.root)))


def tiny_python(home: Path) -> Path:
    """Return the path of a Python that imports the tiny torch, which takes milliseconds instead of seconds."""
    script = home / "tiny-python"
    if not script.exists():
        made = home / f"tiny-python.{id(script)}"
        made.write_text(f'#!/bin/sh\nPYTHONPATH={TINY}:. exec {sys.executable} "$@"\n')
        made.chmod(0o755)
        made.rename(script)
    return script


def drive(home: Home, run: str) -> int:
    """Drive the run to its end, and return the exit code that a supervisor process would have."""
    try:
        way = None if home.config.exists() else partial(reach, home)  # A cluster's table names its own Python.
        return int(supervise(home, run, SystemClock(), reach=way, trainer=TINY / "trainer"))
    except GpurunError as error:
        print(f"{error.code}: {error.what}", file=sys.stderr)
        return int(error.exit_code)


def drive_forked(home: Path, run: str, environment: dict[str, str], errors: Path) -> None:
    """Drive a run in this forked process, with this environment and error file, and exit with the run's exit code."""
    os.environ.clear()
    os.environ.update(environment)
    with open(errors, "wb") as out:
        os.dup2(out.fileno(), sys.stderr.fileno())
    sys.exit(drive(Home(home), run))


if __name__ == "__main__":
    sys.exit(drive(Home(Path(sys.argv[1])), sys.argv[2]))
