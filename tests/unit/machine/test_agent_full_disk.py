"""Tests that on a full disk the lease, the check for a hanging trainer, a stop and the farewell still work."""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import Box, kill

from gpurun.remote.agent.s3_push import Pusher
from gpurun.remote.agent.system import say

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /dev/full")

SAVES = """
signal.signal(signal.SIGTERM, lambda *_: (open('saved', 'w').write('yes'), sys.exit(0)))
open('up', 'w').write('yes')
time.sleep(60)
"""
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen('up', 'w').write('yes')\ntime.sleep(60)"
STUCK = (
    "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\nopen('../out/heartbeat.json', 'w').write('{\"patience_s\": 0.5}')\n"
    + SAVES
)


class FullBox(Box):
    """A box whose disk refuses the agent's files from `fill` to `free`, and always refuses the agent's log."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._flag = folder / "out" / "full"  # Emptying the folder makes room again.
        place = f'"/dev/full" if os.path.exists({str(self._flag)!r}) else temporary'
        self.alter_agent('with open(temporary, "wb") as out:', f'with open({place}, "wb") as out:')
        (folder / "agent").mkdir(exist_ok=True)
        (folder / "agent" / "agent.log").symlink_to("/dev/full")

    def run(self, script: str, **limits: float) -> int:
        """Start a trainer, wait until it is up, and fill the disk; return the keeper's process id."""
        started = self.far.start(self.job(script, **limits))
        self.until(lambda: self.text("up"))
        self.fill()
        return started.keeper_pid

    def fill(self) -> None:
        self._flag.touch()

    def free(self) -> None:
        self._flag.unlink()


@pytest.fixture
def box(tmp_path: Path) -> Iterator[FullBox]:
    box = FullBox(tmp_path / "box")
    yield box
    box.close()


def test_the_lease_holds_and_the_end_is_reported_once_it_fits(box: FullBox) -> None:
    box.run(SAVES, soft_s=2.5)
    assert box.until(lambda: box.text("saved")) == "yes"
    box.free()
    status = box.until_exited()
    assert (status.exit_code, status.stop_reason) == (0, "lease")


def test_the_keeper_is_heard_of_all_the_while(box: FullBox) -> None:
    keeper = box.run(SAVES)
    wall = box.status().wall
    box.until(lambda: box.status().wall > wall + 2)
    assert box.status().state == "running"
    assert box.agent_file("keeper.json")["keeper_pid"] == keeper


def test_a_trainer_that_stands_still_is_ended(box: FullBox) -> None:
    box.run(STUCK)
    box.until(lambda: box.text("saved"))
    box.free()
    assert box.until_exited().stop_reason == "hang"


def test_a_trainer_that_is_asked_to_stop_may_save(box: FullBox) -> None:
    box.run(SAVES)
    assert box.far.stop(reason="user")
    assert box.until(lambda: box.text("saved")) == "yes"
    box.free()
    assert (box.until_exited().exit_code, bool(box.status().stop_reason)) == (0, True)


def test_a_trainer_that_ignores_it_dies_after_its_time_to_save(box: FullBox) -> None:
    box.run(STUBBORN, save_s=0.5)
    box.far.stop(reason="user")
    box.free()
    assert box.until_exited().signal == signal.SIGKILL


def test_stop_now_kills_at_once(box: FullBox) -> None:
    box.run(SAVES)
    assert box.far.stop(now=True, reason="user")
    box.free()
    assert box.until_exited().signal == signal.SIGKILL
    assert box.text("saved") == ""


def test_a_keeper_that_is_made_for_the_stop_hears_of_it(box: FullBox) -> None:
    """A new keeper may get the stop signal before it can handle it: the signal must neither end it nor be lost."""
    kill(box.run(SAVES))
    assert box.far.stop(reason="user")
    assert box.until(lambda: box.text("saved")) == "yes"


def test_what_only_the_keeper_was_told_is_known_to_the_next_one(box: FullBox) -> None:
    keeper = box.run(STUBBORN, save_s=1)
    box.far.stop(reason="user")
    box.free()
    request = box.folder / "agent" / "stop.json"
    box.until(request.exists)
    kill(keeper)
    assert box.until_exited().stop_reason == json.loads(request.read_bytes())["reason"]


class Notice(BaseHTTPRequestHandler):
    """A metadata service that answers every request with the notice that the machine will be taken away."""

    def do_PUT(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"yes")

    do_GET = do_PUT

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def test_a_machine_that_is_to_be_taken_away_saves_first(box: FullBox) -> None:
    job = box.job(SAVES)
    with ThreadingHTTPServer(("127.0.0.1", 0), Notice) as server:
        box.far.start({**job, "notice_url": f"http://127.0.0.1:{server.server_port}"})
        box.until(lambda: box.text("up"))
        box.fill()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert box.until(lambda: box.text("saved")) == "yes"
        server.shutdown()
    box.free()
    assert box.until_exited().stop_reason == "preempted"


def test_what_cannot_be_read_costs_the_keeper_a_look_and_no_more(box: FullBox) -> None:
    lease = box.folder / "agent" / "lease.json"
    started = box.far.start(box.job(SAVES, soft_s=2.5))
    lease.rename(lease.with_suffix(".kept"))
    lease.mkdir()
    time.sleep(1)
    lease.rmdir()
    lease.with_suffix(".kept").rename(lease)
    assert box.until_exited().stop_reason == "lease"
    assert box.agent_file("keeper.json")["keeper_pid"] == started.keeper_pid


def test_a_farewell_empties_the_disk(box: FullBox) -> None:
    box.run(STUBBORN)
    begun = time.monotonic()
    reply = box.machine.call(box.agent_argv("farewell"), timeout_s=30)
    assert json.loads(reply.stdout) == {"killed": 1}
    assert box.living() == []
    assert not box.folder.exists()
    assert time.monotonic() - begun < 10, "nobody waits for room that only this makes"


@pytest.mark.parametrize("who", [say, lambda what: Pusher("/nowhere").say(what)], ids=["keeper", "push"])
def test_a_log_that_takes_no_word_ends_nobody(who: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True) as full:
        monkeypatch.setattr(sys, "stderr", full)
        who("there is no room")
