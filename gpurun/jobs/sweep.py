"""Defines the job of `gpurun sweep`: trials of one recipe or one command with different settings, on one machine.

On the machine the command is `remote/agent/runner/sweep.py`, which starts the trials. The sweep's checkpoint consists
of its table of trials and the files of the best trials. The rest of gpurun treats a sweep as a command with a few
outputs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field

from gpurun.core.command import DIGEST_BYTES_PER_S, PUBLISH_START_S
from gpurun.core.job_terms import SWEEP, JobTerms
from gpurun.core.run_plan import Job, Mode, Plan, Workload
from gpurun.core.sweep import EARLIER, END_S, Range, Sweep
from gpurun.jobs.command import HERE_LOOK_S, LOOK_S, CommandJob, checkpoint_of, runner_uploads
from gpurun.jobs.trainer import TrainerJob
from gpurun.remote.agent.runner.sweep import FOLDER, TABLE

_START = b"from gpurun.remote.agent.runner.sweep import main\n\nraise SystemExit(main())\n"
_MAIN = ("{python}", "../start_sweep.py", "../sweep.json")


class SweepJob(Job):
    """A `sweep` over one kind of `trial`; `at_once` is the number of trials that run at the same time on all GPUs.

    `installs` are the packages that the sampler needs on a rented machine. Without them, it chooses settings randomly.
    """

    kind: ClassVar[str] = "sweep"
    terms: ClassVar[JobTerms] = SWEEP

    sweep: Sweep
    at_once: int
    installs: tuple[str, ...] = ()
    trial: Annotated[CommandJob | TrainerJob, Field(union_mode="left_to_right")]

    @property
    def needs_torch(self) -> bool:
        """See `Job.needs_torch`."""
        return self.trial.needs_torch

    @property
    def is_estimated(self) -> bool:
        """See `Job.is_estimated`."""
        return self.trial.is_estimated

    @property
    def steps(self) -> int:
        """Return the number of trials: a finished trial counts as one step of the sweep."""
        return self.sweep.trials

    @property
    def disk_gb(self) -> int:
        """Return the GB for one trial, plus the checkpoints of the other running trials and of the best trials."""
        return self.trial.disk_gb + ceil(self.trial.trials_bytes(self.at_once, self.sweep.keep) / 2**30)

    @property
    def home_bytes(self) -> int:
        """Return the bytes to download for the best trials that are kept."""
        return self.trial.kept_bytes(self.sweep.keep)

    @property
    def save_s(self) -> int:
        """Return the seconds that all running trials and their runner need to save when they are stopped together."""
        grace_s = self.trial.trials_save_s(self.at_once)
        return grace_s + END_S + PUBLISH_START_S + int(self.home_bytes / DIGEST_BYTES_PER_S)

    @property
    def can_resume(self) -> bool:
        """See `Job.can_resume`: finished trials are not run again."""
        return True

    @property
    def checkpoint_every(self) -> int:
        """See `Job.checkpoint_every`: the table is written each time a trial ends."""
        return 1

    @property
    def secrets(self) -> tuple[str, ...]:
        """See `Job.secrets`."""
        return self.trial.secrets

    @property
    def imports(self) -> tuple[str, ...]:
        """See `Job.imports`."""
        return (*self.trial.imports, *(("optuna",) if self.sweep.sampler == "tpe" and not self.installs else ()))

    @property
    def python(self) -> str:
        """See `Job.python`."""
        return self.trial.python

    @property
    def pip(self) -> tuple[str, ...]:
        """See `Job.pip`."""
        return (*self.trial.pip, *self.installs)

    @property
    def env(self) -> dict[str, str]:
        """See `Job.env`."""
        return self.trial.env

    @property
    def argv(self) -> tuple[str, ...]:
        """See `Job.argv`."""
        return self.trial.argv

    @property
    def challenge(self) -> str:
        """See `Job.challenge`."""
        return self.trial.challenge

    def workload(self, plan: Plan, trainer: Path, cpus: int) -> Workload:
        """See `Job.workload`: the sweep's own program, which reads the trial's program from sweep.json."""
        trial = self.trial.workload(plan.model_copy(update={"processes": 1, "leg": None}), trainer, cpus)
        trial_order = self.trial.trial_order(trial)
        grace_s = self.trial.trials_save_s(self.at_once)
        order = {
            "outputs": [f"{FOLDER}/**"],
            "checkpoints": FOLDER,
            "total_steps": self.sweep.trials,
            "secrets": self.secrets,
            "stop_signal": "TERM",
            "grace_s": grace_s + END_S,
            "executable": trial_order.pop("executable"),
            "imports": (),
            "argv": _MAIN,
            "look_s": LOOK_S if plan.mode is Mode.PAID else HERE_LOOK_S,
        }
        sweep = {
            "space": {name: axis.model_dump() if isinstance(axis, Range) else axis for name, axis in self._axes()},
            **self.sweep.model_dump(include={"trials", "sampler", "prune", "keep", "seed"}),
            **trial_order,
            "at_once": self.at_once,
            "jobs": plan.offer.jobs,
            "cards": max(0, plan.offer.gpus_per_node),
            "secrets": self.secrets,
            "env": sorted(trial.env),
            "grace_s": grace_s,
            "earlier": [f"../{EARLIER}", f"../../data/{EARLIER}"],
        }
        uploads = {
            **trial.uploads,
            **runner_uploads(),
            **self._earlier_results(plan),
            "bundle/command.json": json.dumps(order, indent=2, sort_keys=True).encode(),
            "bundle/sweep.json": json.dumps(sweep, indent=2, sort_keys=True).encode(),
            "bundle/start_sweep.py": _START,
        }
        argv = ("{python}", "-m", "gpurun.remote.agent.runner.run_command", "command.json")
        return Workload(argv, uploads, trial.env, has_runner=True, allowed=trial.allowed)

    def _earlier_results(self, plan: Plan) -> dict[str, Path | bytes]:
        """Return the results to upload: of this run's earlier machine, or of the sweep that this one continues."""
        if plan.leg is None or not plan.leg.files:
            return self.trial.earlier_sweep_uploads(plan)
        files = [(name.removeprefix(f"{FOLDER}/"), path) for name, path in checkpoint_of(plan.leg)]
        return {f"bundle/{EARLIER}/{name}": path for name, path in files}

    def _axes(self) -> Iterator[tuple[str, Any]]:
        """Yield the settings sorted by name, so a grid's order does not depend on the version that wrote the plan."""
        yield from sorted(self.sweep.space.items())

    def digest(self, plan: Plan, trainer: Path) -> str:
        """See `Job.digest`: the digest of the trial's trainer or folder, which users compare between runs."""
        return self.trial.digest(plan, trainer)

    def program(self, plan: Plan, trainer: Path) -> Path:
        """See `Job.program`."""
        return self.trial.program(plan, trainer)

    def shipped(self, digest: str) -> Self:
        """See `Job.shipped`."""
        trial = self.trial.shipped(digest)
        return self.model_copy(update={"trial": trial, "trainer": trial.trainer})

    def code(self, plan: Plan, beside: Path) -> list[tuple[str, str]]:
        """See `Job.code`."""
        return self.trial.code(plan, beside)

    def headline(self) -> list[str]:
        """Return phrases for the number of trials, their settings, the pruning, and how many trials are kept."""
        sweep = self.sweep
        pruned = [f"a trial that falls behind ends early ({sweep.prune})"] if sweep.prune else []
        kept = "the best trial is downloaded" if sweep.keep == 1 else f"the best {sweep.keep} trials are downloaded"
        return [f"{sweep.trials} trials ({sweep.sampler}) of {self.trial.headline()[0]}", *sweep.words(), *pruned, kept]

    def cargo(self, plan: Plan) -> tuple[list[str], list[str]]:
        """See `Job.cargo`."""
        return self.trial.cargo(plan)

    def cures(self, message: str, log: str) -> Iterator[str]:
        """See `Job.cures`."""
        yield from self.trial.cures(message, log)

    def with_settings(self, params: dict[str, str]) -> TrainerJob | None:
        """Return the job that trains one trial of a recipe as a stand-alone run; None if the trials run a command."""
        return self.trial.with_settings(params)


__all__ = ["FOLDER", "TABLE", "SweepJob"]
