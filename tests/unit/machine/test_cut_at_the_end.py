"""Tests of a connection that is cut after a pack arrived and before the reply: the next try must succeed."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable

import pytest
from conftest import Box

from gpurun.lifecycle.context import StopWanted
from gpurun.remote.archive import Pack, survey
from gpurun.remote.client import FarSide
from gpurun.remote.interface import MachineLost

FILES = {"bundle/a.py": b"print(1)", "data/x.bin": random.Random(3).randbytes(3 << 20)}
BYTES = sum(map(len, FILES.values()))


class Cut(FarSide):
    """A far side that loses one reply to `settle`, after the machine has put everything in place."""

    def __init__(self, box: Box) -> None:
        super().__init__(box.machine, python=box.far._python)
        self._is_lost = False

    def ask(  # type: ignore[override]
        self, verb: str, *options: str, stdin: Iterable[bytes] | None = None, site: bool = False, timeout_s: float = 20
    ) -> tuple[bytes, bytes]:
        """Make the call, but lose the first reply to `settle`."""
        answer = super().ask(verb, *options, stdin=stdin, site=site, timeout_s=timeout_s)
        if verb == "settle" and not self._is_lost:
            self._is_lost = True
            raise MachineLost("cut")
        return answer


def small_disk(box: Box) -> None:
    """Make the agent see a disk with room for only one copy of the pack."""
    taken = 'sum(e["bytes"] for e in (read(root, "agent", "pack.json") or {"files": []})["files"])'
    box.alter_agent("free = shutil.disk_usage(root).free\n    if needed", f"free = {BYTES} - {taken}\n    if needed")


def test_what_is_in_place_by_then_needs_no_room_again(box: Box) -> None:
    small_disk(box)
    far, pack = Cut(box), Pack(survey(FILES))
    with pytest.raises(MachineLost, match="cut"):
        far.unpack(pack)
    sent_bytes = pack.sent_bytes
    assert far.unpack(pack).bytes == BYTES
    assert pack.sent_bytes == sent_bytes


class Late(FarSide):
    """A far side on which most of the first parts arrive only after the next `begin` has listed the parts."""

    def __init__(self, box: Box) -> None:
        super().__init__(box.machine, python=box.far._python)
        self._late = list[bytes]()
        self._is_first = True

    def lanes(self, most: int, *, least: int = 1) -> list[FarSide]:
        """Return one lane only, so that no other lane can overtake it."""
        return [self]

    def ask(  # type: ignore[override]
        self, verb: str, *options: str, stdin: Iterable[bytes] | None = None, site: bool = False, timeout_s: float = 20
    ) -> tuple[bytes, bytes]:
        """Make the call; of the first parts, all but one arrive after the next `begin`."""
        if verb == "receive" and self._is_first:
            self._is_first, frames, self._receive = False, list(stdin or ()), options
            head, data, *self._late = frames
            super().ask(verb, *options, stdin=[head, data, frames[-1]], site=site, timeout_s=timeout_s)
            raise MachineLost("cut")
        answer = super().ask(verb, *options, stdin=stdin, site=site, timeout_s=timeout_s)
        if verb == "begin" and self._late:
            late, self._late = self._late, []
            super().ask("receive", *self._receive, stdin=late, site=True, timeout_s=20)
        return answer


def test_parts_that_come_late_and_again_do_no_harm(box: Box) -> None:
    assert Late(box).unpack(Pack(survey(FILES))).bytes == BYTES


class Hashing(FarSide):
    """A far side whose `begin` is slow, as if it had to read tens of gigabytes of an earlier run."""

    is_given_up, is_answered, limit_s = threading.Event(), False, 0.0

    def ask(  # type: ignore[override]
        self, verb: str, *options: str, stdin: Iterable[bytes] | None = None, site: bool = False, timeout_s: float = 20
    ) -> tuple[bytes, bytes]:
        """Make the call; `begin` takes 2 s, unless the far side is closed earlier."""
        if verb == "begin":
            self.limit_s = timeout_s
            self.is_answered = not self.is_given_up.wait(2)
        return super().ask(verb, *options, stdin=stdin, site=site, timeout_s=timeout_s)

    def close(self) -> None:
        """End the wait of a slow `begin`."""
        self.is_given_up.set()


def test_the_wait_for_the_parts_list_uses_all_time_and_can_stop(box: Box) -> None:
    far = Hashing(box.machine, python=box.far._python)

    def stopped(_: int) -> None:
        raise StopWanted

    with pytest.raises(StopWanted):
        far.unpack(Pack(survey(FILES)), on_progress=stopped, timeout_s=3600)
    assert not far.is_answered
    assert far.limit_s > 3500
