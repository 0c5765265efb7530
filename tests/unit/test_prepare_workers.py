"""Workers load once what they share, and nobody outlives anybody: neither a killed one, nor who forked it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trainer.prepare.corpora.workers import Tell, work_through
from trainer.prepare.errors import Refusal

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no worker is forked: each loads its own")


@dataclass(frozen=True)
class Told:
    """A job that tells who does it, and goes on for as long as `hold` is there."""

    folder: Path
    fails: bool = False

    def open(self) -> Callable[[Any, Tell], int]:
        with open(self.folder / "opened", "a") as out:
            out.write(f"{os.getpid()}\n")
        if self.fails:
            raise Refusal("test.refused", "There is nothing to load.", hint="Bring it.")
        return self._do

    def _do(self, item: Any, tell: Tell) -> int:
        (self.folder / f"worker-{os.getpid()}").touch()
        while item == "hold" or len(list(self.folder.glob("worker-*"))) < int(item):
            time.sleep(0.005)
        tell(1)
        return os.getpid()


def is_alive(pid: int) -> bool:
    """Whether a process is there and not only its name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not true():
        assert time.monotonic() < ends, "it never came"
        time.sleep(0.005)


def pids(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("worker-")) for path in folder.glob("worker-*")]


@on_linux
def test_what_all_need_is_loaded_once_and_each_of_them_works(tmp_path: Path) -> None:
    told: list[int] = []
    done = dict(work_through(Told(tmp_path), ["4"] * 6, 4, lambda place, count: told.append(place)))
    assert len((tmp_path / "opened").read_text().split()) == 1, "a vocabulary takes memory once"
    assert len(set(done.values())) == 4, "four processes did the six items"
    assert sorted(done) == sorted(told) == list(range(6))
    assert not any(is_alive(pid) for pid in pids(tmp_path))


def test_what_cannot_be_loaded_is_told_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as found:
        list(work_through(Told(tmp_path, fails=True), ["1"] * 4, 4, lambda place, count: None))
    assert found.value.code == "test.refused", "not that a worker died, which is what the other connections show"


@on_linux
@pytest.mark.parametrize("whom", ["a worker", "the one that forked them"])
def test_one_that_is_killed_ends_all(tmp_path: Path, whom: str) -> None:
    work = work_through(Told(tmp_path), ["3", "hold", "hold", "hold"], 3, lambda place, count: None)
    first = next(work)[1]  # It has the last item now; without one it would go home before it is killed.
    victim = first if whom == "a worker" else int((tmp_path / "opened").read_text())
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(Refusal, match="exit code -9"):
        list(work)
    wait_until(lambda: not any(is_alive(pid) for pid in pids(tmp_path)))


@on_linux
def test_who_stops_listening_leaves_nobody_that_writes(tmp_path: Path) -> None:
    work = work_through(Told(tmp_path), ["3", "hold", "hold"], 3, lambda place, count: None)
    next(work)
    work.close()
    assert not any(is_alive(pid) for pid in pids(tmp_path)), "the folder may be somebody else's from now on"
