"""The compile caches of one's own earlier runs, sent along so that the next rental compiles less: only when asked for.

A compile cache is code that the next machine runs. It is taken from runs of this home alone, whose signed receipt in
the chain has the file's digest, and goes from a rented machine only to rented ones: never to this laptop, nor to a box
of one's own. Whether it fits exactly (torch, CUDA, micro-batch and all) the trainer decides by its name; here it only
may.
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
    """Return the data with the caches that may fit beside it in `into`, if wanted; they count as what is shipped.

    `need` are the GPUs that the run is for.
    """
    if not request.choices.warm or not resolved.tables.train.compile:
        return data
    left_bytes, taken = MOST_BYTES, 0
    for name, content in _caches(request, resolved, need, data.vocab_size, home):
        if taken < MOST_FILES and len(content) <= left_bytes and not (into / name).exists():
            make_private((into / name).parent)
            write_atomic(into / name, content)
            left_bytes, taken = left_bytes - len(content), taken + 1
    return data.model_copy(update={"bytes": data.bytes + MOST_BYTES - left_bytes})


def compile_cache_note(plan: Plan, files: Sequence[PackedFile]) -> str:
    """Return what the plan says of the caches among the files that are shipped."""
    if not plan.job.resolved["train"].get("compile"):
        return "With --warm no compile cache goes along: this recipe does not compile."
    caches = [file for file in files if file.name.startswith(f"data/{FOLDER}/")]
    if not caches:
        return "No compile cache at home fits this; the run brings one home for the next."
    size = format_bytes(sum(file.bytes for file in caches))
    return (
        f"The compile cache of your earlier runs goes along ({format_files(len(caches))}, {size}): the machine runs it."
    )


def caches_among(files: Iterable[FileBrought]) -> list[FileBrought]:
    """Return the compile caches among a run's files that go along to its next machine, the newest first."""
    named = {file["name"]: file for file in files if _NAME.fullmatch(file["name"])}
    found, left_bytes = list[FileBrought](), MOST_BYTES
    for file in sorted(named.values(), key=lambda file: -int(file["step"])):
        if len(found) < MOST_FILES and file["bytes"] <= left_bytes:
            found, left_bytes = [*found, file], left_bytes - int(file["bytes"])
    return found


def _caches(
    request: Request, resolved: ResolvedRecipe, need: GpuNeed, vocab_size: int, home: Home
) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of every cache that may fit, of the newest run first; each is what its receipt says."""
    chain, wanted = read_chain(home.ledger), resolved.record
    for name in reversed(home.run_names()):
        has_any = (home.run(name).artifacts / FOLDER).is_dir()
        run = read_earlier_run(home, chain, name) if has_any else None
        files = run.files("compile_cache") if run else []
        if run is None or not files or not _may_go(run, request):
            continue
        plan = run.plan()
        if plan is None or not _is_on_such_cards(run, request, need):
            continue
        is_same_model = plan.job.resolved["model"] == wanted["model"] and plan.data.vocab_size == vocab_size
        if is_same_model and plan.job.resolved["train"]["precision"] == wanted["train"]["precision"]:
            yield from _verified(run, files)


def _may_go(run: EarlierRun, request: Request) -> bool:
    """Return whether what that run's machine made may run on the machine that is asked for now."""
    origin = str(run.receipt["asked"]["provider"])
    is_of_here = place_kinds([origin]) == {"here"}
    if request.mode is not Mode.PAID:
        return is_of_here
    if request.host:
        before = run.request()
        return is_of_here or (before is not None and before.host == request.host)
    return True


def _is_on_such_cards(run: EarlierRun, request: Request, need: GpuNeed) -> bool:
    """Return whether that run's trainer said that it had such cards as are asked for now, and as many."""
    if request.mode is not Mode.PAID:
        return True
    start = run.receipt["training"]["start"]["event"] or {}
    if not need.count:
        return start.get("device") == "cpu"
    return _letters(need.name) in _letters(str(start.get("cuda_name"))) and start.get("world_size") == need.count


def _letters(name: str) -> str:
    """Return a card's name as all agree on it: `RTX4090` is in `NVIDIA GeForce RTX 4090`."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _verified(run: EarlierRun, files: Sequence[dict[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """Yield the caches of a run that are still what came home then."""
    for file in files:
        name = str(file["name"])
        if not _NAME.fullmatch(name) or not file["bytes"] <= MOST_BYTES:
            continue
        content = run.content(file)
        if content is not None:
            yield name, content
