"""Uploads the compile caches of the user's earlier runs, so that the next rental compiles less (only with --warm).

A compile cache contains code that the next machine runs, so a cache is used only if a signed receipt in this home's
chain contains its digest. A cache from a rented machine is uploaded only to rented machines; it is never used on this
computer or on the user's own machine. The trainer decides, from the file's name, whether a cache fits exactly (torch,
CUDA, micro-batch). This module only excludes caches that cannot fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpurun.core.journal_events import FileBrought
from gpurun.core.paths import Home, make_private, write_atomic
from gpurun.core.places import place_kinds
from gpurun.core.records import GpuNeed
from gpurun.core.run_plan import DataSummary, Mode, Plan, Request
from gpurun.jobs.earlier_run import EarlierRun, read_earlier_run
from gpurun.jobs.training.recipe import ResolvedRecipe
from gpurun.ledger.chain import read_chain
from gpurun.remote.archive import PackedFile
from gpurun.view.number_format import format_bytes, format_files

FOLDER = "compile-cache"
MOST_FILES = 4
MOST_BYTES = 64 << 20
_NAME = re.compile(r"compile-cache/[0-9a-f]{16}\.bin")


def with_compile_caches(
    data: DataSummary, request: Request, resolved: ResolvedRecipe, need: GpuNeed, home: Home, into: Path
) -> DataSummary:
    """If --warm is set, write the caches that may fit to `into`; return the data with their size added.

    `need` states which GPUs the run will use.
    """
    if not request.choices.warm or not resolved.tables.train.compile:
        return data
    left_bytes, taken = MOST_BYTES, 0
    for name, content in _find_caches(request, resolved, need, data.vocab_size, home):
        if taken < MOST_FILES and len(content) <= left_bytes and not (into / name).exists():
            make_private((into / name).parent)
            write_atomic(into / name, content)
            left_bytes, taken = left_bytes - len(content), taken + 1
    return data.model_copy(update={"bytes": data.bytes + MOST_BYTES - left_bytes})


def compile_cache_note(plan: Plan, files: Sequence[PackedFile]) -> str:
    """Return the plan's note about the compile caches among the uploaded files."""
    if not plan.job.resolved["train"].get("compile"):
        return "--warm has no effect: this recipe does not compile."
    caches = [file for file in files if file.name.startswith(f"data/{FOLDER}/")]
    if not caches:
        return "No compile cache of your earlier runs fits; this run downloads one for the next."
    size = format_bytes(sum(file.bytes for file in caches))
    label = f"{format_files(len(caches))}, {size}"
    return f"The compile cache of your earlier runs is uploaded ({label}), and the machine runs code from it."


def caches_among(files: Iterable[FileBrought]) -> list[FileBrought]:
    """Return the compile caches among a run's files, newest first, to upload to the run's next machine."""
    named = {file["name"]: file for file in files if _NAME.fullmatch(file["name"])}
    found, left_bytes = list[FileBrought](), MOST_BYTES
    for file in sorted(named.values(), key=lambda file: -int(file["step"])):
        if len(found) < MOST_FILES and file["bytes"] <= left_bytes:
            found, left_bytes = [*found, file], left_bytes - int(file["bytes"])
    return found


def _find_caches(
    request: Request, resolved: ResolvedRecipe, need: GpuNeed, vocab_size: int, home: Home
) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each cache that may fit and matches its receipt, newest run first."""
    chain, settings = read_chain(home.ledger), resolved.record
    for name in reversed(home.run_names()):
        has_any = (home.run(name).artifacts / FOLDER).is_dir()
        run = read_earlier_run(home, chain, name) if has_any else None
        files = run.files("compile_cache") if run else []
        if run is None or not files or not _may_share_code(run, request):
            continue
        plan = run.plan()
        if plan is None or not _has_same_gpus(run, request, need):
            continue
        is_same_model = plan.job.resolved["model"] == settings["model"] and plan.data.vocab_size == vocab_size
        if is_same_model and plan.job.resolved["train"]["precision"] == settings["train"]["precision"]:
            yield from _verified_caches(run, files)


def _may_share_code(run: EarlierRun, request: Request) -> bool:
    """Return whether code compiled on the earlier run's machine may run on the machine of this request."""
    origin = str(run.receipt["asked"]["provider"])
    is_of_here = place_kinds([origin]) == {"here"}
    if request.mode is not Mode.PAID:
        return is_of_here
    if request.host:
        before = run.request()
        return is_of_here or (before is not None and before.host == request.host)
    return True


def _has_same_gpus(run: EarlierRun, request: Request, need: GpuNeed) -> bool:
    """Return whether the earlier run's trainer reported the GPUs that this request needs; on this computer, True."""
    if request.mode is not Mode.PAID:
        return True
    start = run.receipt["training"]["start"]["event"] or {}
    if not need.count:
        return start.get("device") == "cpu"
    reported = _plain_gpu_name(str(start.get("cuda_name")))
    return _plain_gpu_name(need.name) in reported and start.get("world_size") == need.count


def _plain_gpu_name(name: str) -> str:
    """Return a GPU's name in lower case without punctuation, to find `RTX4090` in `NVIDIA GeForce RTX 4090`."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _verified_caches(run: EarlierRun, files: Sequence[dict[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each cache that still matches the run's receipt."""
    for file in files:
        name = str(file["name"])
        if not _NAME.fullmatch(name) or not file["bytes"] <= MOST_BYTES:
            continue
        content = run.content(file)
        if content is not None:
            yield name, content
