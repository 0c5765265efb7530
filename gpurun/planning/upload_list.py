"""What a run ships, and under which names: the trainer, the recipe as resolved, the shards, weights to start from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from gpurun import __version__
from gpurun.core.installed_files import bundle_root
from gpurun.core.records import digest_of
from gpurun.core.run_plan import Plan
from gpurun.planning.initial_weights import weights_of
from gpurun.remote.archive import Elsewhere, PackedFile, Survey, survey

CHANGED = "changed trainer"


def sources_of(plan: Plan, trainer: Path) -> dict[str, Path | bytes]:
    """What a run ships, by the place it gets on the far side."""
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
    manifest = json.loads((Path(plan.data.beside) / "data.json").read_bytes())
    shards = [Path(str(shard["name"])).name for part in ("train", "val") for shard in manifest[part]]
    files = {one: folder / one for one in shards}
    if name and plan.continues is None:
        files |= weights_of(folder, name)
    return {**{f"data/{one}": path for one, path in files.items()}, "data": Path(plan.data.beside)}
