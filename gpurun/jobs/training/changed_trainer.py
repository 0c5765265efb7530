"""A trainer of the user's own (`--trainer DIR`): looked through and copied when its run is planned.

The copy is what is rehearsed, shipped and named in the receipt; the folder it came from may change or vanish meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from gpurun.core.errors import SetupError, UsageError
from gpurun.core.installed_files import bundle_root
from gpurun.core.paths import Home, make_private, write_atomic
from gpurun.core.run_plan import Mode, Plan
from gpurun.jobs.trainer import CHANGED, digest_of_trainer, words_of_trainer
from gpurun.ledger.plan_from_journal import read_plan
from gpurun.remote.archive import PackedFile, content_at, survey
from gpurun.view.number_format import short_hash


def take_trainer(folder: Path, into: Path) -> None:
    """Copy the modules of a trainer folder; a UsageError where it is none, or holds what may not be shipped."""
    as_ours = f"It is laid out as {bundle_root() / 'trainer'}: copy that, and change the copy."
    if not folder.is_dir():
        raise UsageError("trainer.absent", f"There is no folder {folder}.", hint=as_ours)
    if not (folder / "train.py").is_file():
        raise UsageError("trainer.no_train", f"{folder} has no train.py, so it is no trainer.", hint=as_ours)
    seen = survey({"trainer": folder})
    for one in seen.refusals:
        hint = "Move it out of the trainer's folder, of which the modules (*.py) are shipped."
        raise UsageError(one.code, f"{one.path} is not shipped: {one.reason}.", hint=hint)
    for file in seen.files:
        name = PurePosixPath(file.name).relative_to("trainer")
        if name.suffix == ".py":
            make_private((into / name).parent)
            write_atomic(into / name, _text_of(file))


def _text_of(file: PackedFile) -> bytes:
    """A module's text; UsageError where it is none."""
    content = content_at(file, 0, file.bytes)
    try:
        content.decode()
    except UnicodeDecodeError:
        hint = "Save it as UTF-8, which Python expects."
        raise UsageError("trainer.not_text", f"{file.source!s} is not UTF-8 text.", hint=hint) from None
    return content


def demand_as_planned(plan: Plan, trainer: Path) -> None:
    """SetupError where the copy is not the trainer any more that the run was planned with."""
    if digest_of_trainer(trainer) != plan.bundle_sha256:
        what = f"{trainer} is not the trainer any more that {plan.run} was planned with."
        raise SetupError("trainer.altered", what, hint="Begin a new run with the trainer that is meant.")


def describe_changed_trainer(plan: Plan, trainer: Path) -> Iterator[str]:
    """What the plan says of a trainer that gpurun does not know."""
    digest = digest_of_trainer(trainer)
    if words_of_trainer(digest) == CHANGED:
        first = "; it is rehearsed here before anything is rented, and resumes once" if plan.mode is Mode.PAID else ""
        yield f"A changed trainer is shipped (sha256 {short_hash(digest)}){first}. Its time is counted as gpurun's own."


def other_than_before(plan: Plan, home: Home) -> Iterator[str]:
    """What the plan says where the run that it goes on from had another trainer, and one of the two is changed."""
    before = read_plan(home.run(plan.continues.run)) if plan.continues else plan
    if CHANGED in (plan.job.trainer, before.job.trainer) and plan.bundle_sha256 != before.bundle_sha256:
        yield f"{before.run} was trained by another trainer: {before.job.trainer}, {short_hash(before.bundle_sha256)}."
