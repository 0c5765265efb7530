"""A guard that is handed over runs once, beside a key that nobody else can read, until it is taken away."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from conftest import Box, kill

from gpurun.machine.base import FarRefusal
from gpurun.machine.far import FarSide
from gpurun.machine.local import LocalMachine
from gpurun.providers.guard import lambda_hand

KEY = "secret_canary_5fQx.91"
# What a guard does first is to write down what time it has left; then it waits, as this one does.
WAITING = b'cd "$(dirname "$0")"\necho "$$" >>started\necho 0 >spent\nexec sleep 600\n'


def guard_pids(box: Box) -> list[int]:
    return [int(line) for line in (box.folder / "guard" / "started").read_text().split()]


def guard_runs(box: Box) -> bool:
    return any(b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in box.living())


def test_a_guard_runs_in_a_session_of_its_own_beside_a_key_that_is_its_users_alone(box: Box) -> None:
    box.far.arm(WAITING, KEY)
    (pid,) = guard_pids(box)
    assert os.getsid(pid) == pid
    folder = box.folder / "guard"
    assert (folder / "guard.key").read_text() == KEY
    assert [stat.S_IMODE((folder / name).stat().st_mode) for name in ("guard.key", "guard.sh")] == [0o600, 0o600]
    assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0


def test_the_key_is_no_argument_and_in_no_environment(box: Box) -> None:
    calls: list[list[str]] = []

    class Watched(LocalMachine):
        def call(self, argv: Any, **rest: Any) -> Any:
            calls.append(list(argv))
            return super().call(argv, **rest)

    FarSide(Watched(box.folder, box.token), python=box.agent_argv("arm")[0]).arm(WAITING, KEY)
    assert calls
    assert KEY not in str(calls)
    for pid in box.living():
        for name in ("cmdline", "environ"):
            assert KEY.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()


def test_a_guard_is_started_once_however_often_it_is_armed(box: Box) -> None:
    for _ in range(3):
        box.far.arm(WAITING, KEY)
    assert len(guard_pids(box)) == 1


def test_a_guard_that_died_is_started_again(box: Box) -> None:
    box.far.arm(WAITING, KEY)
    kill(guard_pids(box)[0])
    box.far.arm(WAITING, KEY)
    assert len(guard_pids(box)) == 2


def test_a_guard_that_ends_at_once_is_not_called_armed(box: Box) -> None:
    with pytest.raises(FarRefusal, match="ended with 3: no such cloud") as refused:
        box.far.arm(b'echo "no such cloud" >&2\nexit 3\n', KEY)
    assert refused.value.reason == "guard_failed"


def test_a_guard_without_its_key_is_not_started(box: Box) -> None:
    box.machine.put("guard/guard.sh", WAITING)
    reply = box.machine.call(box.agent_argv("arm"), timeout_s=10)
    assert json.loads(reply.stdout)["error"] == {"code": "no_guard", "message": "guard.key was not put here"}


def test_disarmed_means_neither_key_nor_script_nor_process(box: Box) -> None:
    box.far.arm(WAITING, KEY)
    assert box.far.disarm()
    assert not (box.folder / "guard").exists()
    assert box.living() == []
    assert not box.far.disarm(), "there was nothing left"


def test_disarming_takes_the_key_away_before_anything_else(box: Box) -> None:
    """Killed there, the guard ends by itself: without its key it can end no machine."""
    box.alter_agent("    end = monotonic() + WAIT_S\n    while guards", "    os._exit(9)\n    while guards")
    box.far.arm(WAITING, KEY)
    with pytest.raises(FarRefusal):
        box.far.disarm()
    assert not (box.folder / "guard" / "guard.key").exists()


def test_a_trainer_and_its_end_leave_the_guard_alone(box: Box) -> None:
    box.far.arm(WAITING, KEY)
    box.far.start(box.job("time.sleep(60)"))
    box.far.stop(now=True)
    box.until_exited()
    assert guard_runs(box)


def test_the_guard_ignores_what_a_closing_connection_sends(box: Box) -> None:
    script = lambda_hand(base_url="http://127.0.0.1:9", instance_id="i", deadline_wall=time.time() + 3600, lease_s=0)
    box.far.arm(script, KEY)
    sessions = {os.getsid(pid) for pid in box.living()}
    assert len(sessions) == 1
    os.killpg(sessions.pop(), signal.SIGHUP)
    box.far.arm(script, KEY)
    assert len({os.getsid(pid) for pid in box.living()}) == 1


def test_the_guard_of_a_cloud_ends_the_machine_through_all_of_this(box: Box) -> None:
    """Put there, armed and left alone: at the deadline the cloud is asked, with the key, for this machine's end."""
    asked: list[tuple[str, str | None, Any]] = []

    class Cloud(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers["Authorization"], body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Cloud) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/api/v1"
        box.far.arm(lambda_hand(base_url=url, instance_id="abc", deadline_wall=time.time(), lease_s=0), KEY)
        box.until(lambda: asked)
        server.shutdown()
    assert asked == [("/api/v1/instance-operations/terminate", f"Bearer {KEY}", {"instance_ids": ["abc"]})]
