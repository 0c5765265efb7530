"""What a machine runs, and what is uploaded for it: the bundled trainer with its shards, or a command of the user's."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gpurun import __version__
from gpurun.core.installed_files import bundle_root
from gpurun.core.job import WORK, Command
from gpurun.core.records import digest_of
from gpurun.core.run_plan import Mode, Plan
from gpurun.core.untrusted import read_object
from gpurun.planning.initial_weights import weights_of
from gpurun.planning.transfer import save_s
from gpurun.remote.archive import Elsewhere, PackedFile, Survey, survey
from gpurun.remote.client import AGENT, EACH_NODE, TORCHRUN

_PACKAGE = "bundle/gpurun/remote/agent"
_ORDER = ("outputs", "checkpoints", "total_steps", "secrets", "stop_signal", "grace_s", "executable", "imports")
"""What of a command its runner reads on the machine; values of secrets are nowhere in it."""

LOOK_S, HERE_LOOK_S = 20.0, 3.0
"""For how long a command's results are looked for outside of its folder; here nothing of them is lost."""

CHANGED = "changed trainer"


@dataclass(frozen=True)
class Job:
    """What a machine runs under a lease; the bundled trainer is one kind, a command of the user's own the other.

    `uploads` are files, folders or bytes by the place that they get there. `argv` runs in `cwd` with `env` beside the
    machine's own variables, `{python}` standing for the Python with torch, or any where it does not `need_torch`.
    `has_runner` says that the first process is gpurun's own, which runs the job as its child. Of both kinds the agent,
    the driver and the download know the same: the log on standard output, progress in out/events.jsonl, outputs in
    out/MANIFEST.json, an end in `save_s` after SIGTERM.
    """

    argv: tuple[str, ...]
    uploads: Mapping[str, Path | bytes]
    env: Mapping[str, str]
    save_s: int
    needs_torch: bool = True
    has_runner: bool = False
    cwd: str = "bundle"
    allowed: tuple[str, ...] = ()
    """Files that may have the name or the content of a key, by their whole paths here."""


def job_for(plan: Plan, trainer: Path, cpus: int = 1) -> Job:
    """The job of a plan, on a machine with so many cores; `trainer` is the package that is uploaded."""
    if plan.command:
        argv = ("{python}", "-m", "gpurun.remote.agent.runner.run_command", "command.json")
        commit = {"GPURUN_GIT_COMMIT": plan.command.commit} if plan.command.commit else {}
        env = {"PYTHONUNBUFFERED": "1", **commit, **plan.command.env}
        uploads = _with_command(plan, plan.command)
        allowed = tuple(_let_in(uploads, plan.command))
        return Job(argv, uploads, env, save_s(plan), needs_torch=False, has_runner=True, allowed=allowed)
    recipe = json.dumps(plan.resolved, indent=2, sort_keys=True).encode()
    modules = {f"bundle/trainer/{name}": path for name, path in modules_of(trainer).items()}
    uploads = {**modules, "bundle/recipe.json": recipe, **_data(plan)}
    return Job(_trainer_words(plan), uploads, _trainer_variables(plan, cpus), save_s(plan))


def python_here(plan: Plan) -> str:
    """Return the Python by which a plan's job runs on this machine."""
    return (plan.command.python if plan.command else "") or sys.executable


def _trainer_words(plan: Plan) -> tuple[str, ...]:
    """The trainer, in the processes of the plan, with no more on each card at once than the plan found room for.

    It would find that out by itself, on paid time: by running out of memory, perhaps after it has compiled.
    """
    start: tuple[str, ...] = ("{python}", "-m")
    program = ["trainer.launch", f"--processes={plan.processes}"] if plan.processes > 1 else ["trainer.train"]
    if plan.offer.nodes > 1:
        start = ("sh", f"../{EACH_NODE[0]}", *EACH_NODE[1:], "{python}", "-m")
        program = [TORCHRUN, f"--nproc-per-node={plan.offer.processes_per_node}", "-m", "trainer.train"]
    paths = ["--recipe", "recipe.json", "--data", "../data", "--out", "../out"]
    fits = plan.estimate.micro_batch
    cut = [f"--micro-batch={fits}"] if 0 < fits < plan.resolved["train"]["micro_batch"] else []
    # Otherwise the trainer's own rule stands, as it does for a plan that was written before the plan decided this.
    shared = ["--parallel=fsdp"] if plan.estimate.sharded and plan.resolved["train"]["parallel"] == "auto" else []
    return (*start, *program, *paths, *cut, *shared)


def _trainer_variables(plan: Plan, cpus: int) -> dict[str, str]:
    """The variables that the trainer needs beside the machine's own."""
    variables = {"PYTHONUNBUFFERED": "1"}
    if plan.processes > 1:
        # torchrun would give each process one thread, whatever there is.
        variables["OMP_NUM_THREADS"] = str(max(1, cpus // (plan.processes // plan.offer.nodes)))
    if plan.offer.provider == "local":
        # On a machine that somebody else uses too, a thread that spins keeps the one that it waits for from running;
        # one that sleeps at once is woken for each of a small step's many parts, which can take longer than they do.
        variables |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
    return variables


def surveyed(plan: Plan, trainer: Path) -> Survey:
    """What a run ships, looked at file by file; the shards that the machine downloads itself are among it by digest."""
    job = job_for(plan, trainer)
    here = survey(job.uploads, job.allowed)
    public = tuple(PackedFile(f"data/{one.name}", one.bytes, Elsewhere(one.sha256)) for one in plan.data.public)
    return replace(here, files=tuple(sorted((*here.files, *public), key=lambda file: file.name)))


def modules_of(trainer: Path) -> dict[str, Path]:
    """The trainer's modules, which go to the machine, by name."""
    return {path.relative_to(trainer).as_posix(): path for path in sorted(trainer.rglob("*.py"))}


def work_digest(plan: Plan) -> str:
    """One digest over a command's folder: the names of its files and what is in them."""
    work, digests = Path(plan.data.beside) / "work", dict[str, str]()
    for path in sorted(path for path in work.rglob("*") if path.is_file()):
        with path.open("rb") as content:
            digests[path.relative_to(work).as_posix()] = hashlib.file_digest(content, "sha256").hexdigest()
    return digest_of(digests)


def _with_command(plan: Plan, command: Command) -> dict[str, Path | bytes]:
    """What a command needs: itself, what runs it, the run's own copy of its folder, and the data that was named."""
    order = command.model_dump(mode="json", include=set(_ORDER)) | {"argv": command.words}
    order["look_s"] = LOOK_S if plan.mode is Mode.PAID else HERE_LOOK_S
    own = Path(plan.data.beside)
    place = Path(plan.data.folder) if plan.data.folder else own / "data"
    data: dict[str, Path | bytes] = {"data": place} if place.is_dir() else {}
    return {
        **{f"{_PACKAGE}/runner/{path.name}": path for path in (AGENT / "runner").glob("*.py")},
        **{f"{folder}/__init__.py": b"" for folder in ("bundle/gpurun", "bundle/gpurun/remote", _PACKAGE)},
        "bundle/command.json": json.dumps(order, indent=2, sort_keys=True).encode(),
        WORK: own / "work",
        **data,
    }


def _let_in(uploads: Mapping[str, Path | bytes], command: Command) -> Iterator[str]:
    """The files of a command's folder and of its data that --include names, each by its whole name."""
    folders = (uploads.get(name) for name in (WORK, "data"))
    places = [folder.resolve() for folder in folders if isinstance(folder, Path)]
    return (str(place / name) for place in places for name in command.include if (place / name).is_file())


def digest_of_trainer(trainer: Path) -> str:
    """One digest over the names and the text of all modules."""
    return digest_of({name: path.read_text(encoding="utf-8") for name, path in modules_of(trainer).items()})


def words_of_trainer(digest: str) -> str:
    """What plan, journal and receipt call the trainer of this digest; an unchanged copy is the official one."""
    official = digest == digest_of_trainer(bundle_root() / "trainer")
    return f"official trainer {__version__}" if official else CHANGED


def _data(plan: Plan) -> dict[str, Path | bytes]:
    """A run's own data folder whole; of a person's, the shards that its manifest names and the weights it wants.

    The manifest is the run's own copy: a person's folder may be moved or made again before it is shipped.
    """
    folder, name = Path(plan.data.folder), plan.resolved["train"].get("init_from")
    if not plan.data.beside:
        return {"data": folder}
    manifest = read_object(Path(plan.data.beside) / "data.json")
    shards = [Path(str(shard["name"])).name for part in ("train", "val") for shard in manifest[part]]
    files = {one: folder / one for one in shards}
    if name and plan.continues is None and not (Path(plan.data.beside) / name).is_dir():
        files |= weights_of(folder, name)
    return {**{f"data/{one}": path for one, path in files.items()}, "data": Path(plan.data.beside)}
