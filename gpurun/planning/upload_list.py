"""What a run ships, and under which names: the trainer, the recipe as resolved, the shards, weights to start from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from gpurun.core.job import WORK, Command
from gpurun.core.records import digest_of
from gpurun.core.run_plan import Plan
from gpurun.planning.initial_weights import weights_of
from gpurun.remote.archive import Elsewhere, PackedFile, Survey, survey
from gpurun.remote.client import AGENT

_PACKAGE = "bundle/gpurun/remote/agent"
_ORDER = ("outputs", "checkpoints", "total_steps", "secrets", "stop_signal", "grace_s", "executable")
"""What of a command its runner reads on the machine; values of secrets are nowhere in it."""


def sources_of(plan: Plan, trainer: Path) -> dict[str, Path | bytes]:
    """What a run ships, by the place it gets on the far side."""
    if plan.command:
        return _with_command(plan, plan.command)
    recipe = json.dumps(plan.resolved, indent=2, sort_keys=True).encode()
    modules = {f"bundle/trainer/{name}": path for name, path in modules_of(trainer).items()}
    return {**modules, "bundle/recipe.json": recipe, **_data(plan)}


def surveyed(plan: Plan, trainer: Path) -> Survey:
    """What a run ships, looked at file by file; the shards that the machine downloads itself are among it by digest."""
    here = survey(sources_of(plan, trainer))
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


def _data(plan: Plan) -> dict[str, Path | bytes]:
    """A run's own data folder whole; of a person's, the shards that its manifest names and the weights it wants.

    The manifest is the run's own copy: a person's folder may be moved or made again before it is shipped.
    """
    folder, name = Path(plan.data.folder), plan.resolved["train"].get("init_from")
    if not plan.data.beside:
        return {"data": folder}
    manifest = json.loads((Path(plan.data.beside) / "data.json").read_bytes())
    shards = [Path(str(shard["name"])).name for part in ("train", "val") for shard in manifest[part]]
    files = {one: folder / one for one in shards}
    if name and plan.continues is None:
        files |= weights_of(folder, name)
    return {**{f"data/{one}": path for one, path in files.items()}, "data": Path(plan.data.beside)}
