"""Finds a run's downloaded checkpoints, and runs the trainer's programs on them in a child process.

gpurun itself never loads tensors. The trainer does that with torch, in its own process, and only from files whose
digests are the same as when they were downloaded.
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
from gpurun.jobs.survey import require_planned_program
from gpurun.jobs.trainer import CHANGED
from gpurun.ledger.runs import Sight
from gpurun.lifecycle.artifacts.inventory import Inventory

# The kinds of file that generating text and exporting need. They do not need the optimiser's state.
_NEEDED = ("weights", "state")
MEMORY_BYTES = 8 << 30
"""The memory that torch may use in addition to the weights. This includes GPU libraries."""
_STEP = re.compile(r"(?:checkpoints/)?0*(\d{1,6})(?:\.(?:model|optim)\.safetensors|\.state\.json)?")


@dataclass(frozen=True)
class HomeCheckpoint:
    """A complete downloaded checkpoint: its step, its weights file, the folder of its data, and the plan's recipe.

    `trainer` is the run's copy of a modified trainer, because only that trainer knows its model; None for gpurun's own.
    """

    step: int
    weights: Path
    data: Path
    recipe: dict[str, Any]
    trainer: Path | None = None


def find_checkpoint(sight: Sight, reference: str) -> HomeCheckpoint:
    """Return the checkpoint `reference` (`best`, `last` or a name) after verifying its digests.

    Raise UsageError if it does not exist, and VerificationFailed if a file is missing or was altered.
    """
    name = sight.folder.name
    if not sight.plan.job.terms.has_model:
        what = f"{name} ran your own command, whose files gpurun cannot open."
        raise UsageError("checkpoint.command", what, hint=f"They are in {sight.folder.artifacts}.")
    collected = _downloaded_files(sight)
    files, steps = _complete_checkpoints(collected)
    if not steps:
        raise _no_checkpoint_error(sight)
    best = (collected.get("best") or {}).get("step")
    found = _STEP.fullmatch(reference)
    step = int(found[1]) if found else {"last": steps[-1], "best": best if best in steps else steps[-1]}.get(reference)
    if step is None or step not in steps:
        there = ", ".join(f"{step:06d}" for step in steps)
        hint = f"Use one of: {there}; or best or last."
        raise UsageError("checkpoint.unknown", f"{name} has no checkpoint {reference!r} here.", hint=hint)
    own = {file["kind"]: _verified_path(sight, file) for file in files if file["step"] == step}
    data = Path(sight.plan.data.beside or sight.plan.data.folder)
    trainer = sight.folder.trainer if sight.plan.job.trainer == CHANGED else None
    if trainer is not None:
        require_planned_program(sight.plan, trainer)
    return HomeCheckpoint(step, own["weights"], data, sight.plan.job.resolved, trainer)


def _downloaded_files(sight: Sight) -> dict[str, Any]:
    """Return the recorded download; without one, for an unfinished run, local files that are in the machine's list."""
    recorded = last_brought(sight.records)
    listed = Inventory(sight.folder).remembered() if sight.unfinished and recorded is None else None
    if listed is None:
        return recorded.as_data() if recorded else {}
    listing: dict[str, Any] = listed.model_dump(mode="json")
    paths = [(sight.folder.artifacts / file["name"], file) for file in listing["files"]]
    listing["files"] = [file for path, file in paths if path.is_file() and path.stat().st_size == file["bytes"]]
    return listing


def _no_checkpoint_error(sight: Sight) -> UsageError:
    name = sight.folder.name
    if not sight.unfinished:
        hint = f"To see what was downloaded, and why: gpurun receipt {name}"
        return UsageError("checkpoint.none", f"{name} has no checkpoint on this machine.", hint=hint)
    hint = f"gpurun collect {name} downloads finished files now; the rest is downloaded when training ends."
    return UsageError(
        "checkpoint.none", f"{name} is under way, and none of its checkpoints is complete here yet.", hint=hint
    )


def steps_at_home(sight: Sight) -> list[int]:
    """Return the steps of the complete downloaded checkpoints, in order."""
    return _complete_checkpoints(_downloaded_files(sight))[1]


def _complete_checkpoints(collected: dict[str, Any]) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the files needed to use checkpoints, and the steps for which all these files were downloaded."""
    files = [file for file in collected.get("files", []) if file["kind"] in _NEEDED]
    kinds = {
        step: {file["kind"] for file in files if file["step"] == step} for step in {entry["step"] for entry in files}
    }
    return files, sorted(step for step, there in kinds.items() if there == set(_NEEDED))


def _verified_path(sight: Sight, file: dict[str, Any]) -> Path:
    """Return the path of a downloaded file after checking its digest. Raise VerificationFailed if it was altered."""
    path: Path = sight.folder.artifacts / file["name"]
    hint = f"gpurun audit {sight.folder.name} shows what else was changed; another checkpoint may be intact."
    try:
        with open_regular(path) as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        what = f"{file['name']} of {sight.folder.name} cannot be read: {error.strerror}."
        raise VerificationFailed("checkpoint.missing", what, hint=hint) from None
    if digest != file["sha256"]:
        what = f"{file['name']} of {sight.folder.name} was altered after its download, so gpurun does not open it."
        raise VerificationFailed("checkpoint.tampered", what, hint=hint)
    return path


def ask_trainer(module: str, found: HomeCheckpoint, *arguments: str, limit_s: float, **inputs: Any) -> str:
    """Run `python -m MODULE`, a program of the checkpoint's trainer, on the checkpoint, and return its output.

    The program gets the recipe from the plan, not from the checkpoint, and the values of `inputs` as JSON files. Its
    memory and time are limited. Raise SetupError if torch is missing or the program fails, and UsageError if the
    program refuses.
    """
    if find_spec("torch") is None:
        hint = f"{install_line('local')} (no NVIDIA GPU: from PyTorch's CPU index; see the README)."
        raise SetupError("torch.missing", "This needs PyTorch, which is not installed here.", hint=hint)
    words = [str(found.weights), *arguments, "--data", str(found.data)]
    with tempfile.TemporaryDirectory(prefix="gpurun-") as own:
        for name, value in (inputs | ({"recipe": found.recipe} if "model" in found.recipe else {})).items():
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
        # Capitalise the first word if it is an ordinary word, but not if it is a key or a file name.
        begun = refusal.split(maxsplit=1)[0]
        what = f"{begun.capitalize() if begun.isalpha() else begun}{refusal[len(begun) :]}."
        raise UsageError("trainer.refused", what, hint=hint)
    if ended.code:
        what = f"python -m {module} ended with exit code {ended.code}: {ended.last_lines}"
        raise SetupError("trainer.failed", what, hint="There may be too little memory; gpurun doctor checks PyTorch.")
    return ended.out
