"""A scripted Slurm: sbatch, srun, squeue, scancel, sinfo, scontrol and sacct as programs; its jobs are real processes.

It keeps the promises that gpurun depends on: jobs of the same name run one at a time under `--dependency=singleton`;
`--time` and `--deadline` end a job, in whole minutes; a job is COMPLETING before its terminal state; and every process
that it started dies with it.
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
"""Why the real Slurm refuses a job or lets it wait; `make full` checks this (tests/lifecycle/test_slurm_says.py)."""
_CARDS = r"gpu(:\w+)?:\d+(\(S:[\d-]+\))?"
LINE_OF_SINFO = re.compile(
    r"\w+\*?\|(up|down|drain|inactive)\|(infinite|(\d+-)?[\d:]+)\|(idle|mix|alloc|drain|drng|down|comp)\*?\|\d+\|"
    rf"(\(null\)|{_CARDS}(,{_CARDS})*)"
)
"""One line of the real sinfo with the columns that gpurun requests."""


def form_of(sentence: str) -> str:
    """Return a regular expression for a recorded sentence, in which {} stands for any name."""
    return re.escape(sentence).replace(r"\{\}", r"[\w,-]+")


def is_recorded(knob: str, text: str) -> bool:
    """Return whether the real Slurm prints this text of a knob; True for a knob that prints nothing."""
    if knob == "sinfo":
        return all(LINE_OF_SINFO.fullmatch(line) for line in text.splitlines())
    if knob not in ("refuse", "hold") or text in ("", "DEADLINE"):
        return True
    return any(re.fullmatch(form_of(sentence), text) for known in REASONS.values() for sentence in known)


class ScriptedSlurm:
    """A cluster in a folder. `knobs` are files by which a test makes it misbehave (`programs.py` lists them).

    `profile` is the file that a login shell on its nodes reads.
    """

    def __init__(self, folder: Path) -> None:
        self.state, self.bin, self.work = folder / "slurm", folder / "slurm" / "bin", folder / "shared"
        self.bin.mkdir(parents=True)
        (self.state / "jobs").mkdir()
        self.profile = self.state / "home" / ".bash_profile"
        self.profile.parent.mkdir()
        # A login shell gets its PATH from the node's /etc/profile, which does not have these programs.
        self.profile.write_text(f'PATH="{self.bin}:{os.environ["PATH"]}"\n')
        for name in NAMES:
            program = self.bin / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{PROGRAM}" "{self.state}" {name} "$@"\n')
            program.chmod(0o755)

    @property
    def cluster(self) -> Cluster:
        """Return the cluster's table in config.toml."""
        return Cluster(name="lab", host="local", workdir=str(self.work), python=sys.executable)

    @property
    def table(self) -> str:
        """Return the same table as TOML."""
        return f'[slurm.lab]\nhost = "local"\nworkdir = "{self.work}"\npython = "{sys.executable}"\n'

    def set(self, knob: str, value: str = "") -> None:
        """Set a knob, so that the cluster misbehaves; assert that the real Slurm prints such a text."""
        assert is_recorded(knob, value), f"{value!r} is not on record as Slurm's"
        (self.state / knob).write_text(value)

    def clear(self, knob: str) -> None:
        """Remove a knob, so that the cluster behaves again."""
        (self.state / knob).unlink(missing_ok=True)

    @property
    def jobs(self) -> list[str]:
        """Return the numbers of all jobs that were ever submitted."""
        return sorted(path.name for path in (self.state / "jobs").iterdir())

    def options_of(self, job: str) -> list[str]:
        """Return the options that sbatch received for a job."""
        return (self.state / "jobs" / job / "argv").read_text().splitlines()

    def cancel(self, job: str, by: str = ROOT) -> None:
        """Cancel a running or waiting job as the user with the number `by`."""
        (self.state / "jobs" / job / "cancelled").write_text(by)

    def end_job(self, job: str, word: str) -> None:
        """End a running job in the state `word`, and wait until every process that it started is gone."""
        (self.state / "jobs" / job / "over").write_text(word)
        while not (self.state / "jobs" / job / "ended").exists():
            time.sleep(0.05)

    def end(self) -> None:
        """Cancel every job, so that no process is left."""
        for keeper in (self.state / "jobs").glob("*/keeper"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(keeper.read_text()), signal.SIGTERM)


@contextmanager
def scripted_slurm(folder: Path) -> Iterator[ScriptedSlurm]:
    """Yield a cluster whose programs come first in PATH."""
    made, before = ScriptedSlurm(folder), os.environ["PATH"]
    os.environ["PATH"] = f"{made.bin}:{before}"
    try:
        yield made
    finally:
        os.environ["PATH"] = before
        made.end()


def missing_books() -> str:
    """Return why the real Slurm with its accounting cannot run here; "" if it can."""
    needed = ("slurmdbd", "mariadbd", "mariadb-install-db")
    lacks = [name for name in needed if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    install = "apt-get install slurm-wlm munge slurmdbd mariadb-server environment-modules"
    return missing() or (f"Slurm's accounting is not installed here ({', '.join(lacks)}): {install}" if lacks else "")


def missing() -> str:
    """Return why the real Slurm cannot run here; "" if it can."""
    needed = ("slurmctld", "slurmd", "munged", "sbatch")
    lacks = [name for name in needed if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if lacks:
        return f"Slurm is not installed here ({', '.join(lacks)}): apt-get install slurm-wlm munge"
    is_root = subprocess.run(["id", "-u"], capture_output=True, text=True, check=True).stdout.strip() == "0"
    return "" if is_root else "slurmd is started as root"
