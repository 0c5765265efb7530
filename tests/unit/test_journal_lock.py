"""Tests of a run's lock: a living process holds it, and only the end of that process frees it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpurun.core.errors import ExitCode, RunHeld, SetupError
from gpurun.ledger.journal import RunLock, holder_of
from tests.refusals import refusal

_HOLDER = """
import subprocess, sys, os
from pathlib import Path
from gpurun.ledger.journal import RunLock
with RunLock(Path(sys.argv[1])):
    if sys.argv[2] == "spawn":
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
        print(child.pid, flush=True)
    elif sys.argv[2] == "fork":
        awake, wake = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(wake, b"!")
            sys.stdin.read()
            os._exit(0)
        os.read(awake, 1)
        print(child, flush=True)
    else:
        print(0, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "fox-41"
    folder.mkdir()
    return folder / "run.lock"


@contextmanager
def held_elsewhere(path: Path, child: str = "none") -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-c", _HOLDER, str(path), child]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        grandchild = int(holder.stdout.readline())
        try:
            yield holder, grandchild
        finally:
            holder.kill()
            if grandchild:
                os.kill(grandchild, signal.SIGKILL)


def test_a_second_process_is_told_who_holds_the_run(path: Path) -> None:
    with held_elsewhere(path) as (holder, _):
        with pytest.raises(RunHeld, match=f"process {holder.pid} on ") as caught, RunLock(path):
            pass
        assert caught.value.exit_code is ExitCode.RUN_HELD
        assert "fox-41" in caught.value.what
        assert f"process {holder.pid} " in str(holder_of(path))


def test_kill_9_of_the_holder_frees_the_run(path: Path) -> None:
    with held_elsewhere(path) as (holder, _):
        holder.kill()
        holder.wait()
        assert holder_of(path) is None
        with RunLock(path):
            assert f"process {os.getpid()} " in str(holder_of(path))


@pytest.mark.parametrize("child", ["spawn", "fork"])
def test_a_child_does_not_keep_the_lock_of_a_dead_holder(path: Path, child: str) -> None:
    with held_elsewhere(path, child) as (holder, grandchild):
        holder.kill()
        holder.wait()
        os.kill(grandchild, 0)
        assert holder_of(path) is None


def test_the_file_alone_holds_nothing(path: Path) -> None:
    path.write_text('{"pid": 1, "host": "here", "started": "today"}')
    assert holder_of(path) is None
    with RunLock(path):
        pass
    assert path.exists()
    assert holder_of(path) is None


def test_a_run_that_was_never_locked_has_no_holder(path: Path) -> None:
    assert holder_of(path) is None
    assert not path.exists()


def test_one_process_cannot_own_a_run_twice(path: Path) -> None:
    with RunLock(path), pytest.raises(RunHeld), RunLock(path):
        pass


def test_a_reader_who_looks_just_then_does_not_keep_an_owner_out(path: Path) -> None:
    """A reader takes the lock for an instant to see its holder; a new owner must wait for that instant and not fail."""
    path.touch()
    with path.open() as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        leaves = threading.Timer(0.05, fcntl.flock, (reader, fcntl.LOCK_UN))
        leaves.start()
        with RunLock(path):
            assert holder_of(path) is not None
        leaves.join()


def test_a_broken_note_still_means_that_somebody_is_there(path: Path) -> None:
    with RunLock(path):
        path.write_bytes(b"\xff{")
        assert holder_of(path)


def test_a_lock_that_cannot_be_made_is_a_setup_error(tmp_path: Path) -> None:
    with refusal(SetupError, "run.unlockable"), RunLock(tmp_path / "nowhere" / "run.lock"):
        pass
