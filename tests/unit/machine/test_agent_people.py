"""Tests that the agent of a dev box sees a person's keys, traffic and processes, and ends a box that is not used."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Box
from test_agent_activity import scripted_card

from gpurun.remote.agent import people
from gpurun.remote.agent.people import People

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="people's processes are read in /proc")

KEEPS = "time.sleep(600)"
IDLE_S = 6
SERVES = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
client, _ = server.accept()
while block := client.recv(65536):
    client.sendall(block)
"""


def begin(box: Box, idle_s: float = IDLE_S, **more: Any) -> None:
    (box.folder / "bundle" / "work").mkdir(exist_ok=True)
    box.far.start({**box.job(KEEPS), "idle_s": idle_s, "attended": "job", **more})


@pytest.fixture
def there(box: Box) -> Iterator[Any]:
    """Yield a function that starts a process in the box's folder, as a shell would; kill all of these at the end."""
    begun = list[subprocess.Popen[bytes]]()

    def begins(*words: str, **more: Any) -> subprocess.Popen[bytes]:
        work = box.folder / "bundle" / "work"
        begun.append(
            subprocess.Popen(words, **{"cwd": work, "stdin": subprocess.DEVNULL, "start_new_session": True, **more})
        )
        while not Path(f"/proc/{begun[-1].pid}/environ").read_bytes():  # It is empty for a moment after exec.
            time.sleep(0.01)
        return begun[-1]

    yield begins
    for process in begun:
        process.kill()
        process.wait()


class Shell:
    """A shell in its own terminal, in the folder of a box."""

    def __init__(self, there: Any) -> None:
        self.ours, self.theirs = os.openpty()
        self.process = there("cat", stdin=self.theirs, stdout=self.theirs)

    @property
    def path(self) -> str:
        return os.ttyname(self.theirs)

    def shown(self) -> str:
        os.set_blocking(self.ours, False)
        try:
            return os.read(self.ours, 65536).decode()
        except BlockingIOError:
            return ""

    def close(self) -> None:
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture
def shell(box: Box, there: Any) -> Iterator[Shell]:
    (box.folder / "bundle" / "work").mkdir(exist_ok=True)
    shell = Shell(there)
    yield shell
    shell.close()


def test_a_box_that_nobody_uses_ends_and_says_so_before(box: Box, shell: Shell) -> None:
    """An open terminal alone does not count as use, but gets a message when the box's end is near."""
    begin(box)
    began_wall = time.time()
    soon = box.until(lambda: box.status().idle_at_wall)
    assert soon - began_wall <= IDLE_S + 2
    shown = box.until(shell.shown)
    assert re.search(r"test-1 is idle .* \d\d:\d\d:\d\d", shown)
    status = box.until_exited()
    assert status.stop_reason == "idle"
    assert time.time() - began_wall < IDLE_S + 10
    assert status.silent_since_wall is None
    assert status.sessions is not None
    assert (status.sessions.terminals, status.sessions.used_s < IDLE_S) == (1, True)
    assert shell.process.poll() is None, "a person's own process is not the job's"


def lasts(box: Box) -> None:
    """Assert that the job still runs for twice the idle limit."""
    end = time.monotonic() + 2 * IDLE_S
    while time.monotonic() < end:
        assert box.status().state == "running"
        time.sleep(0.3)


@pytest.mark.slow
def test_a_key_now_and_then_keeps_it(box: Box, shell: Shell) -> None:
    begin(box)

    def press() -> None:
        # The kernel updates this time only every 8 s, so the test sets it as the kernel would.
        for _ in range(9):
            os.utime(shell.path, ns=(time.time_ns(), os.stat(shell.path).st_mtime_ns))
            time.sleep(IDLE_S / 4)

    threading.Thread(target=press, daemon=True).start()
    lasts(box)
    assert box.until_exited().stop_reason == "idle"


def test_a_real_key_is_noted_by_the_kernel(box: Box, shell: Shell) -> None:
    seen = People(str(box.folder), False, 1800.0)
    seen.is_typed({shell.process.pid})
    assert not seen.is_typed({shell.process.pid})
    end = time.monotonic() + 20
    while not seen.is_typed({shell.process.pid}):
        assert time.monotonic() < end
        os.write(shell.ours, b"x\n")
        time.sleep(0.5)


@pytest.mark.parametrize("what", ["a core", "a card", pytest.param("a file", marks=pytest.mark.slow)])
def test_work_in_the_background_keeps_it(box: Box, there: Any, tmp_path: Path, what: str) -> None:
    words = {
        "a core": "while True: pass",
        "a file": "import time\nwhile True: open('a', 'a').write('x'); time.sleep(0.5)",
    }
    more = {"PATH": scripted_card(tmp_path / "bin", "97")} if what == "a card" else {}
    if more:
        os.environ["PATH"], before = more["PATH"], os.environ["PATH"]
    try:
        begin(box)
        if what in words:
            there(sys.executable, "-c", words[what])
        lasts(box)
    finally:
        if more:
            os.environ["PATH"] = before


def test_the_first_program_of_a_cluster_job_does_not_count(box: Box, there: Any) -> None:
    """Slurm's script starts each call of gpurun: if it counted as use, frequent calls would keep the job alive."""
    begin(box)
    script = box.folder / "slurm_script"
    script.write_text("while :; do sleep 0.001; done\n")
    there("sh", str(script), str(box.folder))
    assert box.until_exited().stop_reason == "idle"


@pytest.mark.parametrize(
    ("every_s", "size", "is_used"), [(1.0, 4000, True), (1.0, 2, False)], ids=["used", "only open"]
)
def test_a_forwarded_port_counts_only_beyond_keep_alives(
    box: Box, there: Any, every_s: float, size: int, is_used: bool
) -> None:
    begin(box)
    server = there(sys.executable, "-c", SERVES, stdout=subprocess.PIPE)
    port = int(server.stdout.readline())
    with socket.create_connection(("127.0.0.1", port)) as client:
        over = threading.Event()

        def talk() -> None:
            while not over.wait(every_s):
                client.sendall(b"x" * size)
                client.recv(65536)

        talker = threading.Thread(target=talk, daemon=True)
        talker.start()
        try:
            if is_used:
                lasts(box)
            else:
                assert box.until_exited().stop_reason == "idle"
        finally:
            over.set()
            talker.join()


def test_traffic_between_processes_of_the_box_does_not_count(there: Any, box: Box) -> None:
    (box.folder / "bundle" / "work").mkdir(exist_ok=True)
    server = there(sys.executable, "-c", SERVES, stdout=subprocess.PIPE)
    port = int(server.stdout.readline())
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"x" * 1000)
        client.recv(1000)
        (size,) = dict(people.forwarded_bytes({server.pid})).values()
        assert size >= 2000
        assert dict(people.forwarded_bytes({server.pid, os.getpid()})) == {}


@pytest.mark.slow
def test_idle_off_keeps_a_box_to_its_lease(box: Box) -> None:
    begin(box, idle_s=0)
    lasts(box)


def test_on_a_shared_machine_only_work_below_the_folder_counts(box: Box, there: Any) -> None:
    (box.folder / "bundle" / "work").mkdir(exist_ok=True)
    inside = there("sleep", "60")
    outside = there("sleep", "60", cwd="/")
    gone_out = there("sleep", "60", cwd="/", env={"GPURUN_SHELL_OF": str(box.folder)})
    (box.folder / "agent").mkdir(exist_ok=True)
    shared = dict(People(str(box.folder), False, 0.0).processes(set()))
    assert {inside.pid, gone_out.pid} <= set(shared)
    assert outside.pid not in shared
    assert {inside.pid, outside.pid} <= set(dict(People(str(box.folder), True, 0.0).processes(set())))
