"""Downloads a run's finished files, and lists which files are downloaded and which exist only on its machine."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.core.artifact_names import readable_name
from gpurun.core.collected_record import missing_of, read_stated_files
from gpurun.core.errors import CollectFailed, GpurunError, SetupError, UsageError, VerificationFailed
from gpurun.core.journal_events import CollectObserved, FilesBrought, TrainIntended, TrainObserved, TrainStarted
from gpurun.core.journal_records import Phase, last_brought, last_typed
from gpurun.core.paths import Home, RunFolder
from gpurun.core.records import canonical
from gpurun.ledger.runs import Sight
from gpurun.lifecycle.artifacts.inventory import EgressBudget, Inventory, spare_files
from gpurun.lifecycle.artifacts.on_demand import (
    ONLY,
    OVER_PLAN,
    UNREACHABLE,
    Brought,
    Only,
    bring_now,
    copy_out,
    download_pushed_files,
    select_files,
)
from gpurun.lifecycle.connect import MachineConnector
from gpurun.lifecycle.context import get_instance
from gpurun.lifecycle.instance.job_folder import as_finished
from gpurun.lifecycle.ways_in import config_of, write_entries
from gpurun.readers.run_status import held_word
from gpurun.remote.messages import Manifest, ManifestFile
from gpurun.remote.s3.s3_errors import BucketLost
from gpurun.view.number_format import format_bytes, format_files

# In these phases the machine may have finished files. In earlier phases it has none; later it is being destroyed.
_ALIVE = (Phase.SHIPPED, Phase.TRAINING, Phase.TRAINED, Phase.HELD)
_NO_FILES_YET = (Phase.OPENED, Phase.CREATING, Phase.CREATED, Phase.READY)
_TELL_S = 5.0
_MOST_NAMED = 6


def copy_result_files(result: Result, sight: Sight, place: Path) -> Result:
    """Copy a result's files to the folder `place`, and return the result with that folder added."""
    files = [ManifestFile(**file) for file in result.data["here"]]
    copy_out(sight.folder.artifacts, files, place)
    summary = f"Copied to {place}: {format_files(len(files))}, digests verified."
    return replace(result, data={**result.data, "to": str(place)}, text=f"{result.text}\n{summary}")


def download_checkpoints(session: Session, sight: Sight, only: Only) -> Result:
    """Download the requested files from the machine if it is alive, else from the bucket; list which files are here.

    The result also lists the files that are not here.
    """
    name, phase = sight.folder.name, sight.state.phase
    if phase in _NO_FILES_YET:
        hint = f"gpurun attach {name} shows how far it is."
        raise UsageError("checkpoint.none", f"{name} has not started training, so it has no files yet.", hint=hint)
    instance = sight.state.instance
    if phase not in _ALIVE and sight.state.shared == "kept" and instance is not None:
        instance = as_finished(instance)
    elif phase not in _ALIVE:
        return _collect_ended(session, sight, only)
    far = MachineConnector(sight.folder, sight.plan, session.clock)(instance or get_instance(sight.state))
    held = _held_lines(sight)
    try:
        budget = EgressBudget.from_plan(sight.folder, sight.plan)
        brought = bring_now(far, sight.folder, only, session.clock, _progress_printer(session), budget)
    except (CollectFailed, UsageError) as error:
        if held and error.code == "checkpoint.none":
            return Result(data=_result_data(sight, only, Manifest(), (), ()), text="\n".join(held))
        if error.code not in (UNREACHABLE, OVER_PLAN) or not _upload_address(sight):
            raise
        session.say(f"{error.what} Using the copies in the bucket instead.")
        return _download_from_bucket(session, sight, only)
    finally:
        far.close()
    return _download_result(sight, only, brought)


def parse_only(only: str) -> Only:
    """Return the value of --only; UsageError if it is not allowed."""
    for known in ONLY:
        if only == known:
            return known
    hint = "Use last (the newest), best (the lowest validation loss) or all."
    raise UsageError("usage.only", f"--only {only!r} is not one of {', '.join(ONLY)}.", hint=hint)


def _progress_printer(session: Session) -> Callable[[ManifestFile, int], None]:
    """Return a callback that prints the progress of a large file every few seconds."""
    last_mono = session.clock.monotonic()

    def tell(file: ManifestFile, have_bytes: int) -> None:
        nonlocal last_mono
        if session.clock.monotonic() - last_mono >= _TELL_S:
            last_mono = session.clock.monotonic()
            session.say(f"{readable_name(file.name)}: {format_bytes(have_bytes)} of {format_bytes(file.bytes)}")

    return tell


def _download_result(sight: Sight, only: Only, brought: Brought) -> Result:
    """Return the result of a download: the files here, and the files that would be lost with the machine."""
    name = sight.folder.name
    lines = [_files_line(sight, brought.manifest, brought.here)]
    older = {file.name for file in spare_files(brought.manifest)}
    beside = [file for file in brought.left if file.name in older]
    left = [file for file in brought.left if file.name not in older]
    if left:
        lines.append(f"Only on the machine: {_count_and_names(left)}.")
        lines.append(f"gpurun destroy {name} would lose them; gpurun stop {name}, or the run's end, downloads them.")
    elif not beside:
        lines.append("All finished files are downloaded.")
    if beside:
        lines.append(f"Only on the machine, older than the newest and not the best: {_count_and_names(beside)}.")
        lines.append("They are downloaded only with --only all, or if the newest is damaged.")
    lines += _held_lines(sight) or ["The run continues."]
    return Result(data=_result_data(sight, only, brought.manifest, brought.here, brought.left), text="\n".join(lines))


def _held_lines(sight: Sight) -> list[str]:
    """Return lines for a machine that is held: why, until when, its other files, and how to copy them by hand."""
    state, instance = sight.state, sight.state.instance
    if state.phase is not Phase.HELD or instance is None:
        return []
    ended = last_typed(sight.records, TrainObserved)
    lines = [f"The machine is {held_word(state)}; gpurun destroy {sight.folder.name} ends it now."]
    for kind, heading, spelled in (
        ("elsewhere", "Files outside the folders that are downloaded", str),
        ("unpublished", "Finished files that could not be listed", readable_name),
    ):
        left = ((ended and ended.outputs) or {}).get(kind) or {}
        files = left.get("first", ())
        names = ", ".join(f"{spelled(file['name'])} ({format_bytes(file['bytes'])})" for file in files)
        if names:
            more = " and more" if left["files"] > len(files) else ""
            lines.append(f"{heading}: {names}{more}.")
    home = Home(sight.folder.home)
    with suppress(GpurunError, OSError):  # The line with scp is optional.
        for way in write_entries(home):
            if way.run == sight.folder.name and way.entry is not None:
                lines.append(f"By hand: scp -r -F {shlex.quote(str(config_of(home)))} {way.entry.alias}:PATH .")
    return lines


def _collect_ended(session: Session, sight: Sight, only: Only) -> Result:
    """Return the files of a run that has ended; download missing files from the bucket, if the run used a bucket."""
    collected = last_brought(sight.records)
    # The last known state of a lost machine may be old; the bucket may have newer checkpoints.
    is_old = collected is None or (isinstance(collected, CollectObserved) and collected.remembered)
    if not _upload_address(sight) or not (is_old or (collected and collected.missing)):
        return _verify_downloaded(sight, only, collected)
    try:
        return _download_from_bucket(session, sight, only, collected)
    except (SetupError, BucketLost) as error:
        if is_old or collected is None or _step_at_home(collected, only) is None:
            raise
        session.say(f"{error.what} Using the files that were downloaded earlier.")
        return _verify_downloaded(sight, only, collected)


def _step_at_home(collected: FilesBrought, only: Only) -> int | None:
    """Return the step of the requested checkpoint, the newest or the best, if all its files are here.

    None if a file is missing, or if all checkpoints were requested.
    """
    step = collected.latest if only == "last" else (collected.best or {}).get("step")
    weights = [file["name"] for file in collected.files if (file["kind"], file["step"]) == ("weights", step)]
    lost = {_checkpoint_stem(name) for name in collected.missing}
    return None if only == "all" or not weights or lost & {_checkpoint_stem(name) for name in weights} else step


def _checkpoint_stem(name: str) -> str:
    """Return the part of a file's name that all files of its checkpoint share."""
    return name.partition(".")[0]


def _is_ahead(collected: FilesBrought, manifest: Manifest, only: Only) -> bool:
    """Return whether the downloaded checkpoint is newer, or better, than the one in the bucket."""
    step = _step_at_home(collected, only)
    if step is None:
        return False
    if only == "last":
        return manifest.latest is None or step > manifest.latest
    return manifest.best is None or float(collected.best["val_loss"]) < manifest.best.val_loss


def _upload_address(sight: Sight) -> str:
    """Return the address in the bucket that the run's machine uploads to; "" if it does not upload."""
    starts = (record.typed for record in reversed(sight.records) if sight.plan.choices.stage)
    return next((start.pushed for start in starts if isinstance(start, TrainIntended | TrainStarted)), "")


def _download_from_bucket(session: Session, sight: Sight, only: Only, collected: FilesBrought | None = None) -> Result:
    """Download the requested files from the bucket; raise the first failure.

    If a checkpoint on this computer is newer or better than the bucket's, nothing is downloaded.
    """
    name, inventory = sight.folder.name, Inventory(sight.folder)

    def is_home_ahead(manifest: Manifest) -> bool:
        return collected is not None and _is_ahead(collected, manifest, only)

    found = download_pushed_files(
        sight.folder, sight.plan.choices.stage, _upload_address(sight), session.clock,
        choose=lambda manifest: [] if is_home_ahead(manifest) else select_files(manifest, only, name),
        tell=_progress_printer(session),
    )  # fmt: skip
    if is_home_ahead(found.manifest):
        return _verify_downloaded(sight, only, collected)
    if not found.manifest.files:
        hint = f"Files that were downloaded earlier are in {inventory.artifacts}."
        raise UsageError("checkpoint.none", f"{name} has uploaded nothing to the bucket.", hint=hint)
    if found.missing:
        raise next(iter(found.missing.values()))
    here_names = {file.name for file in found.here}
    left = [file for file in found.manifest.files if file.name not in here_names and not inventory.has(file)]
    manifest, here = found.manifest, found.here
    if only == "all" and collected is not None:
        manifest, here = _merge_with_downloaded(found.manifest, found.here, collected, inventory)
    lines = [_files_line(sight, manifest, here), "They were downloaded from the bucket, to which the machine uploads."]
    lines += [f"Only in the bucket: {_count_and_names(left)}."] if left else []
    return Result(data=_result_data(sight, only, manifest, here, left), text="\n".join(lines))


def _merge_with_downloaded(
    manifest: Manifest, here: Sequence[ManifestFile], collected: FilesBrought, inventory: Inventory
) -> tuple[Manifest, tuple[ManifestFile, ...]]:
    """Merge the bucket's manifest and files with the files downloaded earlier; return the merged manifest and files."""
    downloaded = _read_recorded_manifest(collected, inventory.folder)
    names = {file.name for file in here}
    files = (*here, *(file for file in downloaded.files if file.name not in names and inventory.has(file)))
    both = (manifest, downloaded)
    latest = max((listed.latest for listed in both if listed.latest is not None), default=None)
    best = min((listed.best for listed in both if listed.best), key=lambda best: best.val_loss, default=None)
    return manifest.model_copy(update={"latest": latest, "best": best}), files


def _read_recorded_manifest(collected: FilesBrought, folder: RunFolder) -> Manifest:
    """Return the recorded list of downloaded files as a manifest; VerificationFailed if the list was altered."""
    try:
        files = read_stated_files(folder, collected.files, collected.listed)
        fields = {"latest": collected.latest, "best": collected.best, "files": files}
        return Manifest.model_validate_json(canonical(fields))
    except ValueError as error:
        hint = f"gpurun audit {folder.name} shows what else was changed."
        raise VerificationFailed("collect.altered", f"The list of {folder.name}'s files: {error}.", hint=hint) from None


def _verify_downloaded(sight: Sight, only: Only, collected: FilesBrought | None) -> Result:
    """Verify the downloaded files of a run that has ended, and list the files that were lost.

    VerificationFailed if a file was removed or changed after the download.
    """
    name, inventory = sight.folder.name, Inventory(sight.folder)
    if collected is None:
        hint = f"To see why: gpurun receipt {name}. The files in {inventory.artifacts} were not all checked."
        raise UsageError("checkpoint.none", f"{name} has ended, and its files were not downloaded.", hint=hint)
    manifest = _read_recorded_manifest(collected, sight.folder)
    lost = missing_of(sight.folder, collected.missing, collected.missing_files)
    left = collected.left if isinstance(collected, CollectObserved) else []
    files = _chosen_of_whole(manifest, {*lost, *left}, only, name)
    for file in files:
        if not inventory.has(file):
            what = f"{readable_name(file.name)} of {name} was removed or changed after the download."
            hint = f"gpurun audit {name} shows what else was changed."
            raise VerificationFailed("checkpoint.missing", what, hint=hint)
    ended = "The machine is gone." if sight.state.phase is Phase.CLOSED else "It ends."
    lines = [_files_line(sight, manifest, files), *([] if sight.state.imported else [ended])]
    if lost:
        lines.append(f"Lost with it: {_first_names(lost)}.")
    if left:
        lines.append(f"Not downloaded, because newer files were: {', '.join(left)}.")
    return Result(
        data={**_result_data(sight, only, manifest, files, ()), "lost": lost, "left": left}, text="\n".join(lines)
    )


def _chosen_of_whole(manifest: Manifest, not_here: Set[str], only: Only, name: str) -> list[ManifestFile]:
    """Return the requested files. For "last" these belong to the newest complete checkpoint.

    UsageError if no checkpoint, or not the best one that was requested, is complete.
    """
    lost = {_checkpoint_stem(name) for name in not_here}
    weights = [file for file in manifest.files if file.kind == "weights" and _checkpoint_stem(file.name) not in lost]
    whole = {file.step for file in weights}
    if only == "best" and manifest.best and manifest.best.step not in whole:
        what = f"The best checkpoint of {name}, step {manifest.best.step}, was not downloaded completely."
        raise UsageError(
            "checkpoint.none", what, hint=f"gpurun collect {name} --only last has the newest complete one."
        )
    if only == "last" and lost and not whole:
        what, hint = f"No checkpoint of {name} was downloaded completely.", f"To see why: gpurun receipt {name}"
        raise UsageError("checkpoint.none", what, hint=hint)
    if only == "last":
        manifest = manifest.model_copy(update={"latest": max(whole, default=None)})
    return select_files(manifest, only, name, is_over=True)


def _files_line(sight: Sight, manifest: Manifest, files: Sequence[ManifestFile]) -> str:
    """Return a line that lists the downloaded files."""
    marks = {manifest.latest: "the newest"}
    if manifest.best:
        marks[manifest.best.step] = f"the best, val loss {manifest.best.val_loss:.4f}"
        if manifest.best.step == manifest.latest:
            marks[manifest.latest] = f"the newest and the best, val loss {manifest.best.val_loss:.4f}"
    steps = sorted({file.step for file in files if file.kind == "weights"})
    listed = ", ".join(f"step {step} ({marks[step]})" if step in marks else f"step {step}" for step in steps)
    size = f"{format_files(len(files))}, {format_bytes(sum(file.bytes for file in files))}"
    checkpoints = f"{listed or 'no checkpoint'}; " if sight.plan.job.terms.has_model else ""
    return f"At home, digests verified: {checkpoints}{size}, in {sight.folder.artifacts}"


def _count_and_names(files: Sequence[ManifestFile]) -> str:
    """Return the number and total size of the files, and the first names."""
    names = _first_names([file.name for file in files])
    return f"{format_files(len(files))}, {format_bytes(sum(file.bytes for file in files))} ({names})"


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(map(readable_name, names[:_MOST_NAMED])) + (" and more" if names[_MOST_NAMED:] else "")


def _result_data(
    sight: Sight, only: Only, manifest: Manifest, here: Sequence[ManifestFile], left: Sequence[ManifestFile]
) -> dict[str, Any]:
    return {
        "run": sight.folder.name,
        "only": only,
        "folder": str(sight.folder.artifacts),
        "latest": manifest.latest,
        "best": manifest.best.model_dump(mode="json") if manifest.best else None,
        "here": [file.as_json() for file in here],
        "not_here": [file.as_json() for file in left],
    }
