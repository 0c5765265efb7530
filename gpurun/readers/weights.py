"""A run's checkpoints at home, and the trainer's own programs that use them in a child process.

gpurun never loads a tensor: the trainer does, with torch, in its own process, and only from files whose digests match
those that were recorded when they were downloaded.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpurun.core.bounded_program import run_module
from gpurun.core.errors import SetupError, UsageError, VerificationFailed
from gpurun.core.installed_files import install_line
from gpurun.core.journal_records import last_brought
from gpurun.core.paths import open_regular
from gpurun.jobs.trainer import CHANGED
from gpurun.jobs.training.changed_trainer import demand_as_planned
from gpurun.ledger.runs import Sight
from gpurun.lifecycle.artifacts.inventory import Inventory

# Files for generating text or exporting; the optimiser's state is not needed.
_NEEDED = ("weights", "state")
MEMORY_BYTES = 8 << 30
"""What torch may use in addition to the weights, including for a GPU."""
_STEP = re.compile(r"(?:checkpoints/)?0*(\d{1,6})(?:\.(?:model|optim)\.safetensors|\.state\.json)?")


@dataclass(frozen=True)
class HomeCheckpoint:
    """One complete checkpoint at home: its step, its weights file, its data's folder and the plan's recipe.

    `trainer` is the run's copy of its own changed trainer, which alone knows its model; None for gpurun's.
    """

    step: int
    weights: Path
    data: Path
    recipe: dict[str, Any]
    trainer: Path | None = None


def find_checkpoint(sight: Sight, wanted: str) -> HomeCheckpoint:
    """Return the requested checkpoint, `best`, `last` or a name, after verifying its digests.

    UsageError if it does not exist, VerificationFailed if a file is missing or was changed.
    """
    name = sight.folder.name
    if not sight.plan.job.terms.has_model:
        what = f"{name} ran your own command, whose files gpurun cannot open."
        raise UsageError("checkpoint.command", what, hint=f"They are in {sight.folder.artifacts}.")
    collected = _came_home(sight)
    files, steps = _whole(collected)
    if not steps:
        raise _none(sight)
    best = (collected.get("best") or {}).get("step")
    found = _STEP.fullmatch(wanted)
    step = int(found[1]) if found else {"last": steps[-1], "best": best if best in steps else steps[-1]}.get(wanted)
    if step is None or step not in steps:
        there = ", ".join(f"{known:06d}" for known in steps)
        hint = f"Use one of: {there}; or best or last."
        raise UsageError("checkpoint.unknown", f"{name} has no checkpoint {wanted!r} here.", hint=hint)
    own = {file["kind"]: _unchanged(sight, file) for file in files if file["step"] == step}
    data = Path(sight.plan.data.beside or sight.plan.data.folder)
    trainer = sight.folder.trainer if sight.plan.job.trainer == CHANGED else None
    if trainer is not None:
        demand_as_planned(sight.plan, trainer)
    return HomeCheckpoint(step, own["weights"], data, sight.plan.job.resolved, trainer)


def _came_home(sight: Sight) -> dict[str, Any]:
    """Return the recorded download; for an open run, the files here from its machine's last list."""
    recorded = last_brought(sight.records)
    listed = Inventory(sight.folder).remembered() if sight.unfinished and recorded is None else None
    if listed is None:
        return recorded.as_data() if recorded else {}
    listing: dict[str, Any] = listed.model_dump(mode="json")
    paths = [(sight.folder.artifacts / file["name"], file) for file in listing["files"]]
    listing["files"] = [file for path, file in paths if path.is_file() and path.stat().st_size == file["bytes"]]
    return listing


def _none(sight: Sight) -> UsageError:
    name = sight.folder.name
    if not sight.unfinished:
        hint = f"To see what came home and why: gpurun receipt {name}"
        return UsageError("checkpoint.none", f"{name} has no checkpoint on this machine.", hint=hint)
    hint = f"gpurun collect {name} downloads what is finished; the rest comes when training ends."
    return UsageError(
        "checkpoint.none", f"{name} is under way, and none of its checkpoints is complete here yet.", hint=hint
    )


def steps_at_home(sight: Sight) -> list[int]:
    """Return the steps of the complete checkpoints at home, in order."""
    return _whole(_came_home(sight))[1]


def _whole(collected: dict[str, Any]) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the files needed to use a checkpoint, and the steps for which all of them came home."""
    files = [file for file in collected.get("files", []) if file["kind"] in _NEEDED]
    kinds = {
        step: {file["kind"] for file in files if file["step"] == step} for step in {entry["step"] for entry in files}
    }
    return files, sorted(step for step, there in kinds.items() if there == set(_NEEDED))


def _unchanged(sight: Sight, file: dict[str, Any]) -> Path:
    """Return the path of a file that is byte for byte the recorded one; refuse a changed one."""
    path: Path = sight.folder.artifacts / file["name"]
    hint = f"gpurun audit {sight.folder.name} shows what else was changed; another checkpoint may be intact."
    try:
        with open_regular(path) as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        what = f"{file['name']} of {sight.folder.name} cannot be read: {error.strerror}."
        raise VerificationFailed("checkpoint.missing", what, hint=hint) from None
    if digest != file["sha256"]:
        what = f"{file['name']} of {sight.folder.name} was changed after it came home; gpurun does not open it."
        raise VerificationFailed("checkpoint.tampered", what, hint=hint)
    return path


def ask_trainer(module: str, found: HomeCheckpoint, *arguments: str, limit_s: float, **values: Any) -> str:
    """Run `python -m MODULE` of a checkpoint's trainer on it, and return its output.

    It gets the recipe from the plan, not from the checkpoint, limits for memory and time, and `values` as JSON in
    files. SetupError if torch is missing or the program breaks; UsageError for a refusal of the program.
    """
    if find_spec("torch") is None:
        hint = f"{install_line('local')} (no NVIDIA GPU: from PyTorch's CPU index; see the README)."
        raise SetupError("torch.missing", "This needs PyTorch, which is not installed here.", hint=hint)
    words = [str(found.weights), *arguments, "--data", str(found.data)]
    with tempfile.TemporaryDirectory(prefix="gpurun-") as own:
        for name, value in (values | ({"recipe": found.recipe} if "model" in found.recipe else {})).items():
            path = Path(own, f"{name}.json")
            path.write_text(json.dumps(value), encoding="utf-8")
            words += [f"--{name}", str(path)]
        most_bytes = MEMORY_BYTES + 4 * found.weights.stat().st_size
        try:
            ended = run_module(module, words, trainer=found.trainer, most_bytes=most_bytes, limit_s=limit_s)
        except subprocess.TimeoutExpired:
            what = f"python -m {module} did not finish within {limit_s / 60:.0f} minutes, and was ended."
            hint = "Use a faster machine, or for a sample fewer --tokens."
            raise SetupError("trainer.too_long", what, hint=hint) from None
    if refusal := ended.refusal:
        hint = f"See gpurun {'sample' if module.endswith('generate') else 'export'} --help."
        begun = refusal.split(maxsplit=1)[0]  # Capitalise a sentence, but not the name of a key or file.
        what = f"{begun.capitalize() if begun.isalpha() else begun}{refusal[len(begun) :]}."
        raise UsageError("trainer.refused", what, hint=hint)
    if ended.code:
        what = f"python -m {module} ended with exit code {ended.code}: {ended.last_lines}"
        raise SetupError("trainer.failed", what, hint="The memory or PyTorch itself may be the reason; gpurun doctor.")
    return ended.out
