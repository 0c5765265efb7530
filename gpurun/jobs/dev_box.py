"""Defines the job of `gpurun dev`: a machine to work on by hand, in a copy of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from gpurun.core.job_terms import DEV_BOX, JobTerms
from gpurun.core.run_plan import Job, Plan, Workload
from gpurun.jobs.command import CommandJob

IDLE_S, SYNC_S = 1800, 300
"""Default seconds until an idle dev box is ended, and between downloads of its changed files."""
KEEP = ("sleep", "2147483647")
"""A command that runs until the user or gpurun ends the box."""
JUPYTER_PORT = 8888
JUPYTER_FOLDER = "jupyter"
"""The folder, below the run's folder on the machine, for Jupyter's port and token. Only its user can read it."""
# Jupyter is restarted if it ends, because a notebook that uses up all memory must not end the box. SIGTERM goes to the
# shell and the server. The shell exits after the server, because a process that outlives the command is reported as
# lost.
_JUPYTER = f"""\
umask 077
trap 'exit 143' TERM
export JUPYTER_RUNTIME_DIR="$PWD/../../{JUPYTER_FOLDER}"
while :; do
    JUPYTER_TOKEN=$("$0" -c 'import secrets; print(secrets.token_hex(24))')
    export JUPYTER_TOKEN
    "$0" -m jupyterlab --no-browser --allow-root --ip=127.0.0.1 --port={JUPYTER_PORT}
    sleep 5
done"""
JUPYTER = ("sh", "-c", _JUPYTER, "{python}")


class DevBoxJob(CommandJob):
    """A `command` that only keeps the machine running, so that people can work on it.

    `git` is the address of the repository that the machine clones, at the commit `at_commit` if that is not empty.
    Changed files are downloaded every `sync_s` seconds.
    """

    kind: ClassVar[str] = "dev_box"
    terms: ClassVar[JobTerms] = DEV_BOX
    is_attended: ClassVar[bool] = True

    git: str = ""
    at_commit: str = ""
    jupyter: bool = False
    sync_s: int = SYNC_S

    @property
    def imports(self) -> tuple[str, ...]:
        """See `Job.imports`."""
        return ("jupyterlab",) if self.jupyter else ()

    @property
    def argv(self) -> tuple[str, ...]:
        """See `Job.argv`: empty, because the user did not type the command that keeps the box running."""
        return ()

    def workload(self, plan: Plan, trainer: Path, cpus: int) -> Workload:
        """See `Job.workload`."""
        workload = super().workload(plan, trainer, cpus)
        name = "bundle/command.json"
        order = workload.uploads[name]
        assert isinstance(order, bytes)
        more = {"sync_s": self.sync_s, "clone": [self.git, self.at_commit] if self.git else []}
        uploads = {**workload.uploads, name: json.dumps(json.loads(order) | more, indent=2, sort_keys=True).encode()}
        return Workload(workload.argv, uploads, workload.env, has_runner=True, allowed=workload.allowed)

    def opened(self) -> dict[str, Any]:
        """See `Job.opened`."""
        return Job.opened(self)

    def flat(self) -> dict[str, Any]:
        """See `Job.flat`."""
        return Job.flat(self)

    def headline(self) -> list[str]:
        """See `Job.headline`."""
        parts = ["a machine to work on"]
        if self.git:
            parts.append(f"a clone of {self.git}")
        if self.jupyter:
            parts.append("with JupyterLab")
        return parts

    def cargo(self, plan: Plan) -> tuple[list[str], list[str]]:
        """See `Job.cargo`."""
        shipped, digests = super().cargo(plan)
        return ([self.git], []) if self.git and not self.command.folder else (shipped, digests)
