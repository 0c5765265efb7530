"""The compile caches of one's own earlier runs, sent along so that the next rental compiles less: only when asked for.

A compile cache is code that the next machine runs. It is taken from runs of this home alone, whose signed receipt in
the chain has the file's digest, and goes from a rented machine only to rented ones: never to this laptop, nor to a box
of one's own. Whether it fits exactly (torch, CUDA, micro-batch and all) the trainer decides by its name; here it only
may.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpurun.core.paths import Home, make_private, write_atomic
from gpurun.core.places import place_kinds
from gpurun.core.run_plan import DataSummary, Mode, Plan, Request
from gpurun.jobs.training.recipe import ResolvedRecipe
from gpurun.ledger.chain import read_chain
from gpurun.planning.candidates import need_of
from gpurun.planning.place import mode_of
from gpurun.planning.verified_run import VerifiedRun, verified_run
from gpurun.remote.archive import PackedFile
from gpurun.view.number_format import format_bytes, format_files

FOLDER = "compile-cache"
MOST_FILES = 4
MOST_BYTES = 64 << 20
_NAME = re.compile(r"compile-cache/[0-9a-f]{16}\.bin")


def warmed(data: DataSummary, request: Request, resolved: ResolvedRecipe, home: Home, into: Path) -> DataSummary:
    """The data with the caches that may fit beside it in `into`, if that was wanted; they count as what is shipped."""
    if not request.choices.warm or not resolved.tables.train.compile:
        return data
    left_bytes, taken = MOST_BYTES, 0
    for name, content in _caches(request, resolved, data.vocab_size, home):
        if taken < MOST_FILES and len(content) <= left_bytes and not (into / name).exists():
            make_private((into / name).parent)
            write_atomic(into / name, content)
            left_bytes, taken = left_bytes - len(content), taken + 1
    return data.model_copy(update={"bytes": data.bytes + MOST_BYTES - left_bytes})


def warm_notes(plan: Plan, files: Sequence[PackedFile]) -> list[str]:
    """What the plan says of it."""
    return [_compile_note(plan, files)] if plan.choices.warm else []


def _compile_note(plan: Plan, files: Sequence[PackedFile]) -> str:
    if not plan.job.resolved["train"].get("compile"):
        return "With --warm no compile cache goes along: this recipe does not compile."
    caches = [file for file in files if file.name.startswith(f"data/{FOLDER}/")]
    if not caches:
        return "No compile cache at home fits this; the run brings one home for the next."
    size = format_bytes(sum(file.bytes for file in caches))
    return (
        f"The compile cache of your earlier runs goes along ({format_files(len(caches))}, {size}): the machine runs it."
    )


def _caches(request: Request, resolved: ResolvedRecipe, vocab_size: int, home: Home) -> Iterator[tuple[str, bytes]]:
    """Name and content of every cache that may fit, of the newest run first; each is what its receipt says."""
    chain, wanted = read_chain(home.ledger), resolved.record
    for name in reversed(home.run_names()):
        has_any = (home.run(name).artifacts / FOLDER).is_dir()
        run = verified_run(home, chain, name) if has_any else None
        files = run.files("compile_cache") if run else []
        if run is None or not files or not _may_go(run, request):
            continue
        plan = run.plan()
        if plan is None or not _is_on_such_cards(run.told, request, resolved):
            continue
        is_same_model = plan.job.resolved["model"] == wanted["model"] and plan.data.vocab_size == vocab_size
        if is_same_model and plan.job.resolved["train"]["precision"] == wanted["train"]["precision"]:
            yield from _verified(run, files)


def _may_go(run: VerifiedRun, request: Request) -> bool:
    """Whether what that run's machine made may run on the machine that is asked for now."""
    origin = str(run.told["asked"]["provider"])
    is_of_here = place_kinds([origin]) == {"here"}
    if mode_of(request) is not Mode.PAID:
        return is_of_here
    if request.host:
        before = run.request()
        return is_of_here or (before is not None and before.host == request.host)
    return True


def _is_on_such_cards(told: dict[str, Any], request: Request, resolved: ResolvedRecipe) -> bool:
    """Whether that run's trainer said that it had such cards as are asked for now, and as many."""
    if mode_of(request) is not Mode.PAID:
        return True
    is_rented = place_kinds(request.providers) <= {"cloud"}
    need, start = need_of(request, resolved, is_rented=is_rented), told["training"]["start"]["event"] or {}
    if not need.count:
        return start.get("device") == "cpu"
    return _letters(need.name) in _letters(str(start.get("cuda_name"))) and start.get("world_size") == need.count


def _letters(name: str) -> str:
    """A card's name as all agree on it: `RTX4090` is in `NVIDIA GeForce RTX 4090`."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _verified(run: VerifiedRun, files: Sequence[dict[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """The caches of a run that are still what came home then."""
    for file in files:
        name = str(file["name"])
        if not _NAME.fullmatch(name) or not file["bytes"] <= MOST_BYTES:
            continue
        content = run.content(file)
        if content is not None:
            yield name, content
