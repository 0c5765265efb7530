"""Defines the job of `gpurun run`: the user's own command, run in a copy of its folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from os.path import normpath
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gpurun.core.artifact_names import path_of, raw_name
from gpurun.core.command import WORK, Command
from gpurun.core.installed_files import recipe_file
from gpurun.core.job_terms import COMMAND, JobTerms
from gpurun.core.records import digest_json
from gpurun.core.run_plan import Job, Leg, Mode, Plan, Workload
from gpurun.core.sweep import EARLIER, END_S
from gpurun.view.number_format import short_hash

if TYPE_CHECKING:
    from gpurun.jobs.trainer import TrainerJob

_OUTPUTS = "outputs/"
_PACKAGE = "bundle/gpurun/remote/agent"
_ORDER = ("outputs", "checkpoints", "total_steps", "secrets", "stop_signal", "grace_s", "executable", "imports")
"""The fields of a command that the runner reads on the machine. They never contain the value of a secret."""
LOOK_S, HERE_LOOK_S = 20.0, 3.0
"""Seconds to search for results that a command wrote outside its folder: on a machine, and on this computer."""
_NO_GIT = re.compile(r"not a git repository|InvalidGitRepositoryError|\bgit\b[^\n]{0,80}exit status 128", re.I)


class CommandJob(Job):
    """A `command` whose duration is not known in advance. gpurun's own runner starts it on the machine."""

    kind: ClassVar[str] = "command"
    terms: ClassVar[JobTerms] = COMMAND

    command: Command

    @property
    def steps(self) -> int:
        """See `Job.steps`."""
        return self.command.total_steps

    @property
    def disk_gb(self) -> int:
        """See `Job.disk_gb`."""
        return self.command.disk_gb

    @property
    def home_bytes(self) -> int:
        """See `Job.home_bytes`."""
        return self.command.output_bytes

    @property
    def save_s(self) -> int:
        """See `Job.save_s`."""
        return self.command.save_s

    @property
    def can_resume(self) -> bool:
        """See `Job.can_resume`: true if --checkpoint-glob names its checkpoints."""
        return bool(self.command.checkpoints)

    def resumed(self, leg: Leg) -> CommandJob:
        """Return the job with the leg's checkpoint as its starting point; unchanged if the leg has no checkpoint."""
        if not leg.files:
            return self
        names = [place for place, _ in checkpoint_of(leg)]
        resumed = names[0] if len(names) == 1 else os.path.commonpath(names)
        return self.model_copy(update={"command": self.command.model_copy(update={"resumed": resumed})})

    @property
    def secrets(self) -> tuple[str, ...]:
        """See `Job.secrets`."""
        return self.command.secrets

    @property
    def imports(self) -> tuple[str, ...]:
        """See `Job.imports`."""
        return self.command.imports

    @property
    def python(self) -> str:
        """See `Job.python`."""
        return self.command.python

    @property
    def pip(self) -> tuple[str, ...]:
        """See `Job.pip`."""
        return self.command.pip

    @property
    def env(self) -> dict[str, str]:
        """See `Job.env`."""
        return self.command.env

    @property
    def argv(self) -> tuple[str, ...]:
        """See `Job.argv`."""
        return self.command.argv

    @property
    def challenge(self) -> str:
        """See `Job.challenge`."""
        return self.command.challenge

    def workload(self, plan: Plan, trainer: Path, cpus: int) -> Workload:
        """See `Job.workload`."""
        python = "{agent}" if plan.enters_image else "{python}"
        argv = (python, "-m", "gpurun.remote.agent.runner.run_command", "command.json")
        commit = {"GPURUN_GIT_COMMIT": self.command.commit} if self.command.commit else {}
        env = {"PYTHONUNBUFFERED": "1", **commit, **self.command.env, **self._challenge_env()}
        uploads = self._uploads(plan)
        return Workload(argv, uploads, env, has_runner=True, allowed=tuple(self._included_files(uploads)))

    def digest(self, plan: Plan, trainer: Path) -> str:
        """Return one digest over the names and contents of all files in the command's folder."""
        return digest_json(_file_digests(self.program(plan, trainer)))

    def program(self, plan: Plan, trainer: Path) -> Path:
        """Return the run's own copy of the command's folder."""
        return Path(plan.data.beside) / "work"

    def code(self, plan: Plan, beside: Path) -> list[tuple[str, str]]:
        """Return (label, text) rows: each uploaded file that the command names, then the git commit.

        Return [] if the run's copy of the folder has changed since the run was planned.
        """
        digests = _file_digests(beside / "work")
        if digest_json(digests) != plan.bundle_sha256:
            return []
        folder = Path(self.command.folder)
        where = f"in {folder.name if folder.suffix not in ('.py', '.ipynb') else folder.parent.name}/, as uploaded"
        started = (name for name in dict.fromkeys(map(normpath, self.command.argv)) if name in digests)
        files = [("Code", f"{name}, {where} · sha256 {digests[name]}") for name in started]
        return [*files, *([("Commit", f"{self.command.commit}, checked out in git")] if self.command.commit else [])]

    def opened(self) -> dict[str, Any]:
        """Return the command and the names, not the values, of its environment variables."""
        return {"command": self.command.recorded}

    def flat(self) -> dict[str, Any]:
        """Return the keys that this job adds to the top level of plan.json."""
        return self.model_dump(mode="json")

    def headline(self) -> list[str]:
        """Return one phrase each for the command, its environment variables, its checkpoints and its challenge."""
        names = [*sorted(self.env), *(f"{name} (secret)" for name in sorted(self.secrets))]
        parts = [shlex.join(self.command.words).replace("'{python}'", "python")]
        if names:
            parts.append(f"with {', '.join(names)}")
        if self.command.checkpoints:
            parts.append(f"checkpoints {self.command.checkpoints}")
        if self.challenge:
            parts.append(f"challenge {self.challenge.partition(':')[0]}, its seed in $GPURUN_SEED")
        return parts

    def trial_order(self, workload: Workload) -> dict[str, Any]:
        """Return the settings that a sweep's runner needs to start each trial of this command."""
        fields = {"outputs", "total_steps", "stop_signal", "executable"}
        return {"is_recipe": False, "argv": list(self.command.words), **self.command.model_dump(include=fields)}

    def earlier_sweep_uploads(self, plan: Plan) -> dict[str, Path | bytes]:
        """Return the uploads with the earlier sweep's results, by path; empty if this sweep does not continue one."""
        earlier = Path(plan.data.beside) / EARLIER
        return {f"bundle/{EARLIER}": earlier} if earlier.is_dir() else {}

    def trials_save_s(self, at_once: int) -> int:
        """Return the seconds that trials have to save when all of them are stopped at the same time."""
        return self.command.grace_s - END_S

    def trials_bytes(self, at_once: int, keep: int) -> int:
        """Return 0: the user's --disk already covers all trials."""
        return 0

    def kept_bytes(self, keep: int) -> int:
        """Return the bytes to download for the best trials: the limit that the user set for all outputs."""
        return self.home_bytes

    def with_settings(self, params: Mapping[str, str]) -> TrainerJob | None:
        """Return None: only a trial of a recipe can become a stand-alone training run."""
        return None

    def cargo(self, plan: Plan) -> tuple[list[str], list[str]]:
        """See `Job.cargo`."""
        return [Path(self.command.folder).name or "no folder"], [f"folder {short_hash(plan.bundle_sha256)}"]

    def cures(self, message: str, log: str) -> Iterator[str]:
        """See `Job.cures`."""
        from gpurun.jobs.commands.failure_cure import failure_cure

        yield failure_cure(message, self.command)
        if _NO_GIT.search(log):
            commit = self.command.commit
            known = "the commit is in $GPURUN_GIT_COMMIT" if commit else "your folder has no commit either"
            yield f".git is not uploaded, so git does not work on the machine; {known}."

    def _challenge_env(self) -> dict[str, str]:
        """Return the environment variables for the challenge and its seed. The seed has 32 bits, as numpy requires."""
        if not self.challenge:
            return {}
        return {"GPURUN_CHALLENGE": self.challenge, "GPURUN_SEED": str(recipe_file.seed_of(self.challenge, 32))}

    def _uploads(self, plan: Plan) -> dict[str, Path | bytes]:
        """Return the files to upload by path: the runner, its settings, the run's copy of the folder, and --data."""
        from gpurun.remote.client import ANY_ON_EACH_NODE, IN_IMAGE, PYTHON_IN_IMAGE

        several, words = plan.offer.nodes > 1, tuple(self.command.words)
        if plan.enters_image:
            has_python = words[0] == "{python}"
            words = (f"../../{PYTHON_IN_IMAGE if has_python else IN_IMAGE}", *words[has_python:])
        on_each = ("sh", f"../../{ANY_ON_EACH_NODE[0]}", *ANY_ON_EACH_NODE[1:], "{python}") if several else ()
        words = (*on_each, *words)
        order = self.command.model_dump(mode="json", include=set(_ORDER)) | {"argv": words}
        order["look_s"] = LOOK_S if plan.mode is Mode.PAID else HERE_LOOK_S
        own = Path(plan.data.beside)
        place = Path(plan.data.folder) if plan.data.folder else own / "data"
        data: dict[str, Path | bytes] = {"data": place} if place.is_dir() else {}
        return {
            **runner_uploads(),
            "bundle/command.json": json.dumps(order, indent=2, sort_keys=True).encode(),
            WORK: own / "work",
            **({f"{WORK}/{place}": path for place, path in checkpoint_of(plan.leg)} if plan.leg else {}),
            **data,
        }

    def _included_files(self, uploads: Mapping[str, Path | bytes]) -> Iterator[str]:
        """Yield the full path of each file in the folder or the data that an --include names exactly."""
        folders = (uploads.get(name) for name in (WORK, "data"))
        places = [folder.resolve() for folder in folders if isinstance(folder, Path)]
        return (str(place / name) for place in places for name in self.command.include if (place / name).is_file())


def checkpoint_of(leg: Leg) -> list[tuple[str, Path]]:
    """Return each checkpoint file of a leg as (path in the command's folder, path on this computer)."""
    return [
        (os.fsdecode(raw_name(file.name)).removeprefix(_OUTPUTS), path_of(Path(leg.folder), file.name))
        for file in leg.files
    ]


def runner_uploads() -> dict[str, Path | bytes]:
    """Return the files of the runner package, each keyed by its path on the machine."""
    from gpurun.remote.client import AGENT

    return {
        **{f"{_PACKAGE}/runner/{path.name}": path for path in (AGENT / "runner").glob("*.py")},
        **{f"{folder}/__init__.py": b"" for folder in ("bundle/gpurun", "bundle/gpurun/remote", _PACKAGE)},
    }


def _file_digests(work: Path) -> dict[str, str]:
    """Return the sha256 of each file in a folder, keyed by the file's relative path."""
    digests: dict[str, str] = {}
    for path in sorted(path for path in work.rglob("*") if path.is_file()):
        with path.open("rb") as content:
            digests[path.relative_to(work).as_posix()] = hashlib.file_digest(content, "sha256").hexdigest()
    return digests
