"""Trials of one recipe or one command with different settings, on one machine: the job of `gpurun sweep`.

On the machine `remote/agent/runner/sweep.py` is the command: it starts the trials, and its table and the files of the
best are the checkpoint of the whole. To the rest of gpurun it is a command with a few outputs.
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
from gpurun.core.records import digest_json
from gpurun.core.run_plan import Job, Mode, Plan, Workload
from gpurun.core.sweep import Range, Sweep
from gpurun.jobs.command import HERE_LOOK_S, LOOK_S, CommandJob, runner_uploads
from gpurun.jobs.trainer import KEPT_CHECKPOINTS, TrainerJob
from gpurun.remote.agent.runner.sweep import FOLDER, TABLE

EARLIER = "earlier_sweep"
"""The folder beside a run's data with what an earlier machine came to."""
END_S = 15
"""What the sweep itself needs to end, after its trials."""
ON_DISK = 4
"""The checkpoints of a running trial: the trainer keeps three while it writes another."""
_START = b"from gpurun.remote.agent.runner.sweep import main\n\nraise SystemExit(main())\n"
_MAIN = ("{python}", "../start_sweep.py", "../sweep.json")


class SweepJob(Job):
    """A `sweep` over one kind of `trial`; `at_once` is how many run together on all cards."""

    kind: ClassVar[str] = "sweep"
    terms: ClassVar[JobTerms] = SWEEP

    sweep: Sweep
    at_once: int
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
        """Return how many trials there are: each that is over is a step of the whole."""
        return self.sweep.trials

    @property
    def disk_gb(self) -> int:
        """Return the disk of one trial, and room for the checkpoints of the others and of the best."""
        return self.trial.disk_gb + ceil(self._beside_bytes / 2**30)

    @property
    def _beside_bytes(self) -> int:
        """Return what trials of a recipe take beside the first; of a command its user says how much disk it wants."""
        if not isinstance(self.trial, TrainerJob):
            return 0
        return ((self.at_once - 1) * ON_DISK + self.sweep.keep * KEPT_CHECKPOINTS) * self.trial.checkpoint_bytes

    @property
    def home_bytes(self) -> int:
        """Return what the best trials weigh that are kept; of a command its user says how much may come home."""
        return self.trial.home_bytes * (self.sweep.keep if isinstance(self.trial, TrainerJob) else 1)

    @property
    def save_s(self) -> int:
        """Return what all trials need that are stopped together, and their runner."""
        return self._grace_s + END_S + PUBLISH_START_S + int(self.home_bytes / DIGEST_BYTES_PER_S)

    @property
    def _grace_s(self) -> int:
        """Return how long trials have to save: those of a recipe write to one disk, one after the other."""
        if isinstance(self.trial, TrainerJob):
            return self.at_once * self.trial.save_s
        return self.trial.command.grace_s - END_S

    @property
    def secrets(self) -> tuple[str, ...]:
        """See `Job.secrets`."""
        return self.trial.secrets

    @property
    def imports(self) -> tuple[str, ...]:
        """See `Job.imports`."""
        return (*self.trial.imports, *(("optuna",) if self.sweep.sampler == "tpe" else ()))

    @property
    def python(self) -> str:
        """See `Job.python`."""
        return self.trial.python

    @property
    def pip(self) -> tuple[str, ...]:
        """See `Job.pip`."""
        return self.trial.pip

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
        """See `Job.workload`: its own program in the place of the trial's, which stands in sweep.json."""
        one = self.trial.workload(plan.model_copy(update={"processes": 1}), trainer, cpus)
        command = getattr(self.trial, "command", None)
        cards = max(0, plan.offer.gpu_count)
        order = {
            "outputs": [f"{FOLDER}/**"],
            "checkpoints": FOLDER,
            "total_steps": self.sweep.trials,
            "secrets": self.secrets,
            "stop_signal": "TERM",
            "grace_s": self._grace_s + END_S,
            "executable": command.executable if command else (),
            "imports": (),
            "argv": _MAIN,
            "look_s": LOOK_S if plan.mode is Mode.PAID else HERE_LOOK_S,
        }
        sweep = {
            "space": {name: axis.model_dump() if isinstance(axis, Range) else axis for name, axis in self._space()},
            **self.sweep.model_dump(include={"trials", "sampler", "prune", "keep", "seed"}),
            "at_once": self.at_once,
            "cards": cards,
            "is_recipe": command is None,
            "argv": list(command.words) if command else ["{out}" if word == "../out" else word for word in one.argv],
            "outputs": command.outputs if command else (),
            "secrets": self.secrets,
            "total_steps": self.trial.steps if command else 0,
            "stop_signal": command.stop_signal if command else "TERM",
            "grace_s": self._grace_s,
            "earlier": f"../../data/{EARLIER}" if command is None else f"../{EARLIER}",
        }
        uploads = {
            **one.uploads,
            **runner_uploads(),
            "bundle/command.json": json.dumps(order, indent=2, sort_keys=True).encode(),
            "bundle/sweep.json": json.dumps(sweep, indent=2, sort_keys=True).encode(),
            "bundle/start_sweep.py": _START,
        }
        earlier = Path(plan.data.beside) / EARLIER
        if command is not None and earlier.is_dir():
            uploads[f"bundle/{EARLIER}"] = earlier
        argv = ("{python}", "-m", "gpurun.remote.agent.runner.run_command", "command.json")
        return Workload(argv, uploads, one.env, has_runner=True, allowed=one.allowed)

    def _space(self) -> Iterator[tuple[str, Any]]:
        """Yield the settings in the order in which a grid takes them, whatever wrote the plan."""
        yield from sorted(self.sweep.space.items())

    def digest(self, plan: Plan, trainer: Path) -> str:
        """See `Job.digest`: the trial's own, since the trainer's or the folder's is what people compare."""
        return self.trial.digest(plan, trainer)

    def shipped(self, digest: str) -> Self:
        """See `Job.shipped`."""
        trial = self.trial.shipped(digest)
        return self.model_copy(update={"trial": trial, "trainer": trial.trainer})

    def code(self, plan: Plan, beside: Path) -> list[tuple[str, str]]:
        """See `Job.code`."""
        return self.trial.code(plan, beside)

    def headline(self) -> list[str]:
        """Return how many trials of what, over which settings, and what ends them early."""
        sweep = self.sweep
        pruned = [f"a trial that falls behind ends early ({sweep.prune})"] if sweep.prune else []
        kept = "the best one comes home" if sweep.keep == 1 else f"the best {sweep.keep} come home"
        return [f"{sweep.trials} trials ({sweep.sampler}) of {self.trial.headline()[0]}", *sweep.words(), *pruned, kept]

    def cargo(self, plan: Plan) -> tuple[list[str], list[str]]:
        """See `Job.cargo`."""
        return self.trial.cargo(plan)

    def cures(self, message: str, log: str) -> Iterator[str]:
        """See `Job.cures`."""
        yield from self.trial.cures(message, log)

    def with_settings(self, params: dict[str, str]) -> TrainerJob | None:
        """Return the job of one trial of a recipe, trained alone; None for a command."""
        if not isinstance(self.trial, TrainerJob):
            return None
        from gpurun.core.installed_files import recipe, recipe_file

        sets = [recipe_file.parse_override(f"{name}={value}") for name, value in params.items()]
        whole = recipe.parse_recipe(self.trial.resolved, is_whole=False)
        resolved = recipe_file.laid_over(whole, sets, rehearse=False)
        resolved.pop("rehearsal", None)
        return self.trial.model_copy(update={"resolved": resolved, "recipe_sha256": digest_json(resolved)})


__all__ = ["EARLIER", "FOLDER", "TABLE", "SweepJob"]
