"""Checks and copies the user's own trainer (`--trainer DIR`) when a run is planned.

The copy is rehearsed, uploaded and named in the receipt, so the original folder may change or disappear afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from gpurun.core.errors import UsageError
from gpurun.core.installed_files import bundle_root
from gpurun.core.paths import Home, make_private, write_atomic
from gpurun.core.run_plan import Mode, Plan
from gpurun.jobs.trainer import CHANGED, digest_of_trainer, words_of_trainer
from gpurun.ledger.plan_from_journal import read_plan
from gpurun.remote.archive import PackedFile, content_at, survey
from gpurun.view.number_format import short_hash


def take_trainer(folder: Path, into: Path) -> None:
    """Copy a trainer's modules. Raise UsageError if the folder is not a trainer, or a file must not be uploaded."""
    as_ours = f"Copy {bundle_root() / 'trainer'}, and change the copy."
    if not folder.is_dir():
        raise UsageError("trainer.absent", f"There is no folder {folder}.", hint=as_ours)
    if not (folder / "train.py").is_file():
        raise UsageError("trainer.no_train", f"{folder} has no train.py, so it is not a trainer.", hint=as_ours)
    surveyed = survey({"trainer": folder})
    for refusal in surveyed.refusals:
        hint = "Move it out of the trainer's folder: all modules there (*.py) are uploaded."
        raise UsageError(refusal.code, f"{refusal.path} is not uploaded: {refusal.reason}.", hint=hint)
    for file in surveyed.files:
        name = PurePosixPath(file.name).relative_to("trainer")
        if name.suffix == ".py":
            make_private((into / name).parent)
            write_atomic(into / name, _read_utf8(file))


def _read_utf8(file: PackedFile) -> bytes:
    """Return the bytes of a module. Raise UsageError if they are not UTF-8 text."""
    content = content_at(file, 0, file.bytes)
    try:
        content.decode()
    except UnicodeDecodeError:
        hint = "Save it as UTF-8, which Python expects."
        raise UsageError("trainer.not_text", f"{file.source!s} is not UTF-8 text.", hint=hint) from None
    return content


def describe_changed_trainer(plan: Plan, trainer: Path) -> Iterator[str]:
    """Yield the plan's note about a trainer that the user modified."""
    digest = digest_of_trainer(trainer)
    if words_of_trainer(digest) == CHANGED:
        first = "; it is first rehearsed and resumed on this computer" if plan.mode is Mode.PAID else ""
        yield (
            f"A trainer modified by you is uploaded (sha256 {short_hash(digest)}){first}. "
            "The time is estimated as for the official trainer."
        )


def other_than_before(plan: Plan, home: Home) -> Iterator[str]:
    """Yield a note if the continued run used another trainer, and the user modified at least one of the two."""
    before = read_plan(home.run(plan.continues.run)) if plan.continues else plan
    if CHANGED in (plan.job.trainer, before.job.trainer) and plan.bundle_sha256 != before.bundle_sha256:
        yield f"{before.run} used another trainer: {before.job.trainer}, {short_hash(before.bundle_sha256)}."
