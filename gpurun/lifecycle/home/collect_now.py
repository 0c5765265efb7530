"""What a person wants at home now: brought from the machine while training goes on there, without disturbing it.

No lock is taken and no record made: the supervisor goes on, and what is here already its own collect step finds by
digest. Both may be at the same file, as only one of them at a time can have it open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from gpurun.core.clock import Clock
from gpurun.core.errors import CollectFailed, UsageError
from gpurun.core.paths import RunFolder
from gpurun.lifecycle.context import PASSING, RETRY_S
from gpurun.lifecycle.home.allowance import Allowance
from gpurun.lifecycle.home.at_home import is_here, keep, remember
from gpurun.lifecycle.home.held import Held
from gpurun.machine.answers import MOST_ANNOUNCED_BYTES, Manifest, ManifestFile
from gpurun.machine.base import FarRefusal, MachineLost
from gpurun.machine.far import FarSide
from gpurun.machine.partial import HeldElsewhere

Only = Literal["last", "best", "all"]
ONLY: tuple[Only, ...] = ("last", "best", "all")
UNREACHABLE = "collect.unreachable"
OVER_PLAN = "collect.over_plan"
CHECKPOINT = ("weights", "optimizer", "state")
# So long without a byte of progress; the supervisor, which has hours, goes on trying for longer.
PATIENCE_S = 60.0
TRIES = 3

T = TypeVar("T")


@dataclass(frozen=True)
class Brought:
    """What is at home now of a run whose machine lives: files that were wanted, and files that are only there."""

    manifest: Manifest
    here: tuple[ManifestFile, ...]
    left: tuple[ManifestFile, ...]


def bring_now(
    far: FarSide,
    folder: RunFolder,
    only: Only,
    clock: Clock,
    tell: Callable[[ManifestFile, int], None],
    allowance: Allowance,
) -> Brought:
    """Bring the wanted files of what is finished there, each verified; `tell` hears of each how many bytes are here.

    UsageError when none such is finished yet, or the plan does not pay for it; CollectFailed when nothing comes for
    PATIENCE_S, when a file does not arrive as it was announced, or cannot be stored.
    """
    trying, held = _Trying(clock), Held(folder.artifacts, clock)
    with far.many_lanes():
        for tries_left in reversed(range(TRIES)):
            try:
                return _bring_now(far, folder, only, trying, held, tell, allowance)
            except FarRefusal as refusal:  # What was finished a moment ago has been replaced by the next checkpoint.
                if not tries_left:
                    hint = "Ask again. What came home before is kept, and the run goes on."
                    raise CollectFailed(refusal.code, refusal.what, hint=hint) from refusal
            except OSError as error:
                what = f"{folder.path} cannot be written: {error.strerror}."
                hint = "Mend what is said there, or free some space, and ask again. The run goes on."
                raise CollectFailed("collect.cannot_store", what, hint=hint) from error
    raise AssertionError("one of the tries has returned or raised")


def _bring_now(
    far: FarSide,
    folder: RunFolder,
    only: Only,
    trying: _Trying,
    held: Held,
    tell: Callable[[ManifestFile, int], None],
    allowance: Allowance,
) -> Brought:
    artifacts = folder.artifacts
    manifest = trying.patiently(lambda: far.manifest(MOST_ANNOUNCED_BYTES))
    remember(folder, manifest)
    wanted = chosen(manifest, only, folder.name)
    if not allowance.take(wanted):
        raise _over_plan(folder.name, wanted, allowance)
    keep(folder, [file.name for file in wanted])
    for file in wanted:
        trying.patiently(partial(_bring, far, file, artifacts, trying, held, tell))
    left = [file for file in manifest.files if file not in wanted and not is_here(artifacts, file)]
    return Brought(manifest, tuple(wanted), tuple(left))


def chosen(manifest: Manifest, only: Only, run: str, *, is_over: bool = False) -> list[ManifestFile]:
    """The files that are meant, weights first; UsageError when nothing of that kind is finished."""
    if only == "all":
        found = list(manifest.files)
    else:
        step = manifest.latest if only == "last" else manifest.best.step if manifest.best else None
        found = [file for file in manifest.files if file.step == step and file.kind in CHECKPOINT]
    if not found:
        nothing = {"last": "finished no checkpoint", "best": "evaluated no checkpoint that it keeps"}
        what = f"{run} has {nothing.get(only, 'finished no file')}{'' if is_over else ' yet'}."
        later = f"Ask again later; gpurun attach {run} shows how far it is."
        hint = f"What came home, and why: gpurun receipt {run}" if is_over else later
        raise UsageError("checkpoint.none", what, hint=hint)
    return sorted(found, key=lambda file: (-file.step, file.kind != "weights", file.name))


def _over_plan(run: str, wanted: Sequence[ManifestFile], allowance: Allowance) -> UsageError:
    asked_bytes = sum(file.bytes for file in wanted)
    return UsageError(
        OVER_PLAN,
        f"Each byte that leaves this machine is charged. The plan of {run} pays for {allowance.limit_bytes:,} before "
        f"training ends: {allowance.spent_bytes:,} have left, and this is {asked_bytes:,}.",
        hint=f"The latest and the best come home when training ends, as planned. gpurun stop {run} saves and ends it.",
    )


class _Trying:
    """Tries again what the line has broken, as long as now and then something comes of it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._moved_mono = clock.monotonic()

    def moved(self) -> None:
        """Something has come."""
        self._moved_mono = self._clock.monotonic()

    def patiently(self, attempt: Callable[[], T]) -> T:
        """What the attempt answers; CollectFailed when nothing has come for PATIENCE_S."""
        while True:
            try:
                answer = attempt()
            except HeldElsewhere:  # The supervisor is bringing that file home, or another who asked; his end frees it.
                self.moved()
            except (MachineLost, FarRefusal) as error:
                if isinstance(error, FarRefusal) and error.reason not in PASSING:
                    raise
                if self._clock.monotonic() - self._moved_mono > PATIENCE_S:
                    hint = "What came home before is kept. `gpurun ps` says how the run stands."
                    what = f"The machine cannot be reached: {error.what}"
                    raise CollectFailed(UNREACHABLE, what, hint=hint) from error
            else:
                self.moved()
                return answer
            self._clock.sleep(RETRY_S)


def _bring(
    far: FarSide,
    file: ManifestFile,
    into: Path,
    trying: _Trying,
    held: Held,
    tell: Callable[[ManifestFile, int], None],
) -> None:
    have = -1

    def heard(bytes_here: int) -> None:
        nonlocal have
        if bytes_here > have:
            have = bytes_here
            trying.moved()
            tell(file, bytes_here)

    held.past(file, partial(far.fetch, file.name, file.bytes, file.sha256, into, on_progress=heard))
