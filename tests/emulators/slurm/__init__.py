"""A scripted Slurm: sbatch, srun, squeue, scancel, sinfo, scontrol and sacct as programs; its jobs are real processes.

It keeps what the contract rests on: one job of a name at a time under `--dependency=singleton`, an end by `--time` and
by `--deadline`, whole minutes, COMPLETING before a terminal state, and the death of all that a job has started.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpurun.core.cluster import Cluster

PROGRAM = Path(__file__).with_name("programs.py")
NAMES = ("sbatch", "srun", "squeue", "scancel", "sinfo", "scontrol", "sacct")
ROOT = "0"
REASONS: dict[str, list[str]] = json.loads(Path(__file__).with_name("reasons.json").read_text())
"""Why the real Slurm refuses a job or lets it wait, as `make full` compares it (tests/lifecycle/test_slurm_says.py)."""
_CARDS = r"gpu(:\w+)?:\d+(\(S:[\d-]+\))?"
LINE_OF_SINFO = re.compile(
    r"\w+\*?\|(up|down|drain|inactive)\|(infinite|(\d+-)?[\d:]+)\|(idle|mix|alloc|drain|drng|down|comp)\*?\|\d+\|"
    rf"(\(null\)|{_CARDS}(,{_CARDS})*)"
)
"""One line of what the real sinfo prints in gpurun's columns."""


def form_of(sentence: str) -> str:
    """Return a pattern of a sentence on record, {} being any name."""
    return re.escape(sentence).replace(r"\{\}", r"[\w,-]+")


def is_recorded(knob: str, text: str) -> bool:
    """Return whether the real Slurm says what a test makes the scripted one say."""
    if knob == "sinfo":
        return all(LINE_OF_SINFO.fullmatch(line) for line in text.splitlines())
    if knob not in ("refuse", "hold") or text in ("", "DEADLINE"):
        return True
    return any(re.fullmatch(form_of(sentence), text) for known in REASONS.values() for sentence in known)


class ScriptedSlurm:
    """A cluster in a folder; `knobs` are files by which a test makes it misbehave (`programs.py` names them).

    `profile` is what a login shell on its nodes reads.
    """

    def __init__(self, folder: Path) -> None:
        self.state, self.bin, self.work = folder / "slurm", folder / "slurm" / "bin", folder / "shared"
        self.bin.mkdir(parents=True)
        (self.state / "jobs").mkdir()
        self.profile = self.state / "home" / ".bash_profile"
        self.profile.parent.mkdir()
        # What /etc/profile made of it is a node's own: these programs would not be found there.
        self.profile.write_text(f'PATH="{self.bin}:{os.environ["PATH"]}"\n')
        for name in NAMES:
            program = self.bin / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{PROGRAM}" "{self.state}" {name} "$@"\n')
            program.chmod(0o755)

    @property
    def cluster(self) -> Cluster:
        """Return its table in config.toml."""
        return Cluster(name="lab", host="local", workdir=str(self.work), python=sys.executable)

    @property
    def table(self) -> str:
        """Return that table as text."""
        return f'[slurm.lab]\nhost = "local"\nworkdir = "{self.work}"\npython = "{sys.executable}"\n'

    def set(self, knob: str, value: str = "") -> None:
        """Make it misbehave, in words that the real one has."""
        assert is_recorded(knob, value), f"{value!r} is not on record as Slurm's"
        (self.state / knob).write_text(value)

    def clear(self, knob: str) -> None:
        """Make it behave again."""
        (self.state / knob).unlink(missing_ok=True)

    @property
    def jobs(self) -> list[str]:
        """Return every job that was ever submitted."""
        return sorted(path.name for path in (self.state / "jobs").iterdir())

    def options_of(self, job: str) -> list[str]:
        """Return the options that sbatch received."""
        return (self.state / "jobs" / job / "argv").read_text().splitlines()

    def cancel(self, job: str, by: str = ROOT) -> None:
        """Cancel a job, whether it runs or waits, as this user of the cluster."""
        (self.state / "jobs" / job / "cancelled").write_text(by)

    def end_job(self, job: str, word: str) -> None:
        """Have a job end as its time limit does, and wait until all that it started is gone."""
        (self.state / "jobs" / job / "over").write_text(word)
        while not (self.state / "jobs" / job / "ended").exists():
            time.sleep(0.05)

    def end(self) -> None:
        """End every job's processes, whatever became of it."""
        for keeper in (self.state / "jobs").glob("*/keeper"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(keeper.read_text()), signal.SIGTERM)


@contextmanager
def scripted_slurm(folder: Path) -> Iterator[ScriptedSlurm]:
    """Yield a cluster whose programs are the first in PATH."""
    made, before = ScriptedSlurm(folder), os.environ["PATH"]
    os.environ["PATH"] = f"{made.bin}:{before}"
    try:
        yield made
    finally:
        os.environ["PATH"] = before
        made.end()


def missing_books() -> str:
    """Return why the real Slurm with its accounting cannot be tried here; "" where it can."""
    needed = ("slurmdbd", "mariadbd", "mariadb-install-db")
    lacks = [name for name in needed if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    install = "apt-get install slurm-wlm munge slurmdbd mariadb-server environment-modules"
    return missing() or (f"Slurm's accounting is not installed here ({', '.join(lacks)}): {install}" if lacks else "")


def missing() -> str:
    """Return why the real Slurm cannot be tried here; "" where it can."""
    needed = ("slurmctld", "slurmd", "munged", "sbatch")
    lacks = [name for name in needed if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if lacks:
        return f"Slurm is not installed here ({', '.join(lacks)}): apt-get install slurm-wlm munge"
    is_root = subprocess.run(["id", "-u"], capture_output=True, text=True, check=True).stdout.strip() == "0"
    return "" if is_root else "slurmd is started as root"
