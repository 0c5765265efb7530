"""Log and events come home byte for byte, however often the line is cut and the supervisor started again."""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Place

from gpurun.core.clock import SystemClock
from gpurun.lifecycle.run import _copy
from gpurun.machine.base import MachineLost
from gpurun.machine.far import FarSide
from tests.emulators import sshd
from tests.later import LATER

pytestmark = pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing())


class Hasty(SystemClock):
    """A clock that makes nobody wait long before the next connect."""

    def sleep(self, seconds: float) -> None:
        super().sleep(min(seconds, 0.005))


def write_on(folder: Path, over: threading.Event, dice: random.Random) -> None:
    """A trainer that writes both of its files in pieces of any size, lines or not."""
    number = 0
    with (
        open(folder / "events.jsonl", "ab", buffering=0) as events,
        open(folder / "trainer.log", "ab", buffering=0) as log,
    ):
        while not over.wait(0.002):
            number += 1
            events.write(b'{"kind": "step", "step": %d}\n' % number)
            log.write(dice.randbytes(dice.randrange(20_000)))


@pytest.mark.parametrize("cuts", [12, pytest.param(200, marks=LATER)])
def test_no_byte_is_lost_or_doubled_over_any_number_of_cuts_and_restarts(
    place: Place, tmp_path: Path, cuts: int
) -> None:
    out, dice, over = place.folder / "out", random.Random(5), threading.Event()
    out.mkdir(parents=True)
    proxy = place.proxy()
    here = SimpleNamespace(folder=SimpleNamespace(events=tmp_path / "events.jsonl", log=tmp_path / "run.log"))

    def supervisor() -> FarSide:
        return FarSide(place.machine(proxy.port, clock=Hasty()), python=sys.executable)

    supervisor().install_agent()
    far, lost = supervisor(), 0
    trainer = threading.Thread(target=write_on, args=(out, over, random.Random(6)), daemon=True)
    trainer.start()
    while proxy.cuts < cuts:
        if proxy.cuts % 5 == 4:
            far.close()
            far = supervisor()  # Another process knows only what lies in the files.
        cut = threading.Timer(dice.random() * 0.25, proxy.cut)
        cut.start()
        try:
            while cut.is_alive():
                _copy(far, here)  # type: ignore[arg-type]
        except MachineLost:
            lost += 1
        cut.join()
    over.set()
    trainer.join()
    assert lost > cuts // 4, "the cuts were felt"
    for name, copy in (("events.jsonl", here.folder.events), ("trainer.log", here.folder.log)):
        original = (out / name).read_bytes()
        while not copy.exists() or copy.stat().st_size < len(original):
            _copy(far, here)  # type: ignore[arg-type]
        is_same = copy.read_bytes() == original
        assert is_same, name
