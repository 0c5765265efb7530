"""Tests that log and events are downloaded byte for byte despite cuts, damage and restarts of the supervisor."""

from __future__ import annotations

import random
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Place

from gpurun.core.clock import SystemClock
from gpurun.lifecycle.artifacts.log_copy import LEAST_ASKED_BYTES, Tail
from gpurun.remote.client import Chunk, FarSide, Poll
from gpurun.remote.interface import MachineLost
from tests.emulators import sshd
from tests.later import LATER

pytestmark = pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing())


class Hasty(SystemClock):
    """A clock that shortens every pause to 5 ms at most."""

    def sleep(self, seconds: float) -> None:
        super().sleep(min(seconds, 0.005))


def write_on(folder: Path, over: threading.Event, dice: random.Random) -> None:
    """Write events and random log bytes until `over` is set, as a trainer might."""
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
def test_no_byte_is_lost_or_doubled_over_any_cuts_and_restarts(place: Place, tmp_path: Path, cuts: int) -> None:
    out, dice, over = place.folder / "out", random.Random(5), threading.Event()
    out.mkdir(parents=True)
    proxy = place.proxy()
    here = SimpleNamespace(events=tmp_path / "events.jsonl", log=tmp_path / "run.log")

    def supervisor() -> FarSide:
        return FarSide(place.machine(proxy.port, clock=Hasty()), python=sys.executable)

    supervisor().install_agent()
    far, lost = supervisor(), 0
    tail = Tail(far, here)  # type: ignore[arg-type]
    trainer = threading.Thread(target=write_on, args=(out, over, random.Random(6)), daemon=True)
    trainer.start()
    for number in range(cuts):
        if number % 5 == 4:
            far.close()
            far = supervisor()  # A new process knows only what is in the files.
            tail = Tail(far, here)  # type: ignore[arg-type]
        trouble = (lambda: proxy.corrupt(1)) if number % 3 == 2 else proxy.cut
        cut = threading.Timer(dice.random() * 0.25, trouble)
        cut.start()
        try:
            while cut.is_alive():
                tail.bring()
        except MachineLost:
            lost += 1
        cut.join()
    over.set()
    trainer.join()
    assert lost > cuts // 4, "the cuts were felt"
    for name, copy in (("events.jsonl", here.events), ("trainer.log", here.log)):
        original = (out / name).read_bytes()
        while not copy.exists() or copy.stat().st_size < len(original):
            tail.bring()
        is_same = copy.read_bytes() == original
        assert is_same, name


def test_a_slow_line_is_asked_for_less_until_something_comes(tmp_path: Path) -> None:
    carried_bytes, log, asked = 200_000, bytes(range(256)) * 4096, list[int]()

    def poll(wants: dict[str, tuple[int, int]]) -> Poll:
        asked.append(max(most for _, most in wants.values()))
        if asked[-1] > carried_bytes:
            raise MachineLost("30 s were not enough")
        chunks = {name: Chunk(at, log[at : at + most], len(log)) for name, (at, most) in wants.items()}
        return Poll(SimpleNamespace(), chunks)  # type: ignore[arg-type]

    here = SimpleNamespace(events=tmp_path / "events.jsonl", log=tmp_path / "run.log")
    tail = Tail(SimpleNamespace(poll=poll), here)  # type: ignore[arg-type]
    for _ in range(40):
        with suppress(MachineLost):
            tail.bring()
    assert here.log.read_bytes() == log
    assert min(asked) >= LEAST_ASKED_BYTES
