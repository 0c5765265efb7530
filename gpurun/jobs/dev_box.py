"""A machine that is rented to be worked on by hand, in a copy of a folder: the job of `gpurun dev`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from gpurun.core.job_terms import DEV_BOX, JobTerms
from gpurun.core.run_plan import Job, Plan, Workload
from gpurun.jobs.command import CommandJob

IDLE_S, SYNC_S = 1800, 300
"""How long a dev box may be idle, and how often its changed files are brought home, where nothing else is said."""
KEEP = ("sleep", "2147483647")
"""What runs until somebody or something ends the box."""
JUPYTER_PORT = 8888
JUPYTER_FOLDER = "jupyter"
"""Where its server notes its port and its token, below the run's folder on the machine, for its own user alone."""
# It is started again where it has ended: a notebook that took all memory must not end the box that others work on. A
# stop goes to all of them, and is over once the server has ended: what is left behind would be told as a loss.
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
    """A `command` that only keeps the box, and what people do there beside it.

    `git` is the address that the machine clones its folder from, at `at_commit` where that is said; `sync_s` is how
    often what changed is brought home.
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
        """See `Job.argv`: nobody typed what keeps it."""
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
