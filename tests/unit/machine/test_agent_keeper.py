"""Tests that the agent starts a trainer once, keeps its lease and reports the truth, whatever process is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer

import pytest
from conftest import Box, kill

from gpurun.remote.agent.job_state import clocks_now
from gpurun.remote.agent.spot_notice import is_given
from gpurun.remote.interface import FarRefusal
from tests.refusals import refusal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tests look into /proc")

COUNTED = "open('starts', 'a').write('x'); "
WAITS = COUNTED + "print('up'); time.sleep(60)"
SAVES = """
def save(*_):
    open('saved', 'w').write('yes')
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open('ready', 'w').write('yes')
time.sleep(60)
"""
STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
nap = [sys.executable, '-I', '-S', '-c', 'import time; time.sleep(61)']
deaf = [sys.executable, '-I', '-S', '-c', 'import signal, time; signal.signal(15, 1); time.sleep(62)']
children = [subprocess.Popen(nap, start_new_session=True), subprocess.Popen(deaf, start_new_session=True, env={})]
if os.fork() == 0:  # a daemon that hides: no parent, no session, no environment
    os.setsid()
    hidden = subprocess.Popen(nap, env={}, start_new_session=True)
    open('hidden', 'w').write(str(hidden.pid))
    os._exit(0)
open('children', 'w').write(' '.join(str(child.pid) for child in children))
time.sleep(60)
"""


def stops(soft_s: float, hard_s: float, ahead_s: float = 0.0) -> dict[str, float]:
    """Return a job's stops, in seconds from now and as times of a clock that is `ahead_s` ahead."""
    walls = {"soft_stop_wall": time.time() + ahead_s + soft_s, "hard_stop_wall": time.time() + ahead_s + hard_s}
    return {"soft_stop_s": soft_s, "hard_stop_s": hard_s, **walls}


def bring_forward(box: Box, soft_s: float, hard_s: float) -> None:
    """Shorten the lease to these stops, in seconds from now. (A test does this once its trainer is up.)"""
    now = time.time()
    box.far.shorten(now + soft_s, now + hard_s)


def alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_a_job_runs_to_its_end_with_words_and_exit_code_kept(box: Box) -> None:
    started = box.far.start(box.job("print('hello'); sys.exit(3)"))
    assert not started.already
    status = box.until_exited()
    assert (status.exit_code, status.signal, status.stop_reason) == (3, None, None)
    assert box.far.poll({"trainer.log": (0, 100)}).chunks["trainer.log"].data == b"hello\n"
    assert box.agent_file("exit.json")["ended_wall"] >= started.started_wall


def test_starting_twice_at_once_makes_one_trainer(box: Box) -> None:
    box.machine.put("job.json", json.dumps(box.job(WAITS)).encode())
    with ThreadPoolExecutor(6) as pool:
        start = box.agent_argv("start", "--job", "job.json")
        answers = [json.loads(r.stdout) for r in pool.map(lambda _: box.machine.call(start, timeout_s=30), range(6))]
    assert sorted(answer["already"] for answer in answers) == [False, True, True, True, True, True]
    assert len({answer["keeper_pid"] for answer in answers}) == 1
    assert box.until(lambda: box.text("starts")) == "x"


@pytest.mark.slow
def test_a_start_killed_anywhere_and_repeated_makes_one_trainer(tmp_path: Path) -> None:
    for number, delay_s in enumerate([0.0, 0.015, 0.025, 0.03, 0.035, 0.04, 0.05, 0.06, 0.08]):
        box = Box(tmp_path / str(number))
        try:
            job = box.job(WAITS)
            box.machine.put("job.json", json.dumps(job).encode())
            first = subprocess.Popen(
                box.agent_argv("start", "--job", "job.json"), cwd=box.folder, stdout=subprocess.PIPE
            )
            time.sleep(delay_s)
            first.kill()
            first.communicate()
            box.far.start(job)
            box.until(lambda box=box: box.text("starts"))
            time.sleep(0.1)
            assert box.text("starts") == "x", f"killed after {delay_s} s"
        finally:
            box.close()


def test_an_unwritable_heartbeat_does_not_end_the_keeper(box: Box) -> None:
    box.far.start(box.job("time.sleep(1.6); sys.exit(7)"))
    while not (box.folder / "out" / "status.json").is_dir():  # A heartbeat may come in between.
        (box.folder / "out" / "status.json").unlink()
        with contextlib.suppress(FileExistsError):
            (box.folder / "out" / "status.json").mkdir()
    box.until(lambda: (box.folder / "agent" / "exit.json").exists())
    (box.folder / "out" / "status.json").rmdir()
    assert (box.status().state, box.status().exit_code) == ("exited", 7)


def test_a_keeper_needs_its_program_only_to_start(box: Box) -> None:
    box.far.start(box.job("open('up', 'w').write('x'); signal.signal(15, lambda *_: sys.exit(7)); time.sleep(60)"))
    box.until(lambda: box.text("up"))
    box.machine.put("agent.pyz", b"another version, half of it")
    box.machine.put("agent/stop.json", b'{"now": false, "reason": "user"}')
    box.until(lambda: (box.folder / "agent" / "exit.json").exists())
    box.far.install_agent()
    assert (box.status().exit_code, box.status().stop_reason) == (7, "user")


def test_another_job_in_the_same_folder_is_refused(box: Box) -> None:
    box.far.start(box.job("pass"))
    box.until_exited()
    with refusal(FarRefusal, "far.other_job") as refused:
        box.far.start(box.job("print('other')"))
    assert refused.value.reason == "other_job"


def test_nothing_starts_before_the_shipment_is_verified_in_place(box: Box) -> None:
    job = box.job("pass")
    (box.folder / "agent" / "shipped.json").unlink()
    with pytest.raises(FarRefusal) as refused:
        box.far.start(job)
    assert refused.value.reason == "not_shipped"


def test_a_trainer_that_cannot_be_started_is_a_refusal(box: Box) -> None:
    job = {**box.job(""), "argv": ["/no/such/python"]}
    with refusal(FarRefusal, "far.start_failed", "No such file", "/no/such/python") as refused:
        box.far.start(job)
    assert refused.value.reason == "start_failed"
    assert box.status().state == "idle"


def test_a_killed_keepers_trainer_is_adopted_by_a_new_keeper(box: Box) -> None:
    job = box.job(WAITS)
    first = box.far.start(job)
    box.until(lambda: box.text("starts"))
    kill(first.keeper_pid)
    assert box.status().state == "running"
    assert box.far.start(job).already
    box.until(lambda: box.agent_file("keeper.json")["keeper_pid"] != first.keeper_pid)
    assert box.text("starts") == "x"
    assert box.far.stop(reason="user")
    status = box.until_exited()
    assert (status.exit_code, status.stop_reason) == (None, "user")


def test_a_trainer_without_a_keeper_is_still_bound_by_its_lease(box: Box) -> None:
    first = box.far.start(box.job(STUBBORN))
    children = [int(pid) for pid in box.until(lambda: box.text("children")).split()]
    kill(first.keeper_pid)
    assert box.status().state == "running"
    bring_forward(box, 0.3, 0.8)
    assert box.until_exited().stop_reason == "lease"
    assert not [pid for pid in children if alive(pid)]


def test_with_keeper_and_trainer_killed_the_run_may_start_again(box: Box) -> None:
    job = box.job(WAITS)
    first = box.far.start(job)
    box.until(lambda: box.text("starts"))
    pid = box.status().pid
    kill(first.keeper_pid)
    kill(pid)
    status = box.status()
    assert (status.state, status.exit_code) == ("exited", None)
    assert not box.far.start(job).already
    assert box.until(lambda: box.text("starts") == "xx")


@pytest.mark.parametrize("left", [b"", bytes(200), b'{"state": "runn'], ids=["nothing", "zeros", "half"])
def test_a_power_cut_that_leaves_no_status_behind_ends_the_run(box: Box, left: bytes) -> None:
    """status.json is not synced, so a power cut may leave it empty: the run must count as over."""
    keeper = box.far.start(box.job(WAITS)).keeper_pid
    box.until(lambda: box.text("starts"))
    pid = box.status().pid
    kill(keeper)
    kill(pid)
    status = box.folder / "out" / "status.json"
    status.write_bytes(left)
    os.utime(status, (1e9, 1e9))
    for _ in range(2):
        assert (box.status().state, box.status().wall) == ("exited", 1e9), "it tells no time of now: nobody lives"


def test_at_the_soft_stop_the_trainer_may_save(box: Box) -> None:
    box.far.start(box.job(SAVES))
    box.until(lambda: box.text("ready"))
    bring_forward(box, 0.3, 60)
    status = box.until_exited()
    assert (status.exit_code, status.stop_reason, box.text("saved")) == (0, "lease", "yes")


def test_at_the_hard_stop_everything_dies_wherever_it_hides(box: Box) -> None:
    box.far.start(box.job(STUBBORN, save_s=60))
    hidden = int(box.until(lambda: box.text("hidden")))
    children = [int(pid) for pid in box.until(lambda: box.text("children")).split()]
    assert all(alive(pid) for pid in [*children, hidden])
    bring_forward(box, 0.3, 0.8)
    status = box.until_exited()
    assert (status.signal, status.stop_reason) == (signal.SIGKILL, "lease")
    assert not [pid for pid in [*children, hidden] if alive(pid)]


def test_what_a_trainer_leaves_running_dies_with_it(box: Box) -> None:
    box.far.start(
        box.job("child = subprocess.Popen(['sleep', '60'], env={}, start_new_session=True); print(child.pid)")
    )
    assert box.until_exited().exit_code == 0
    assert not alive(int(box.far.poll({"trainer.log": (0, 99)}).chunks["trainer.log"].data))


def test_a_clock_set_back_does_not_lengthen_the_lease(box: Box) -> None:
    box.far.start(box.job(WAITS))
    lease = box.agent_file("lease.json")
    lease["soft_mono"] = lease["hard_mono"] = 0.0  # passed by the monotonic clock, not by the wall clock
    box.machine.put("agent/lease.json", json.dumps(lease).encode())
    assert box.until_exited().stop_reason == "lease"


def test_shorten_brings_the_lease_forward_and_never_back(box: Box) -> None:
    job = box.job(SAVES)
    box.far.start(job)
    box.until(lambda: box.text("ready"))
    before = box.agent_file("lease.json")
    later = box.far.shorten(job["soft_stop_wall"] + 9e5, job["hard_stop_wall"] + 9e5)
    assert (later.soft_stop_wall, later.hard_stop_wall) == (before["soft_stop_wall"], before["hard_stop_wall"])
    now = time.time()
    sooner = box.far.shorten(now, now + 20)
    assert box.far.shorten(now + 30, now + 10).hard_stop_wall == now + 10 < sooner.hard_stop_wall
    assert box.until_exited().stop_reason == "lease"
    assert box.text("saved") == "yes"


def test_a_repeated_start_with_another_lease_only_shortens_it(box: Box) -> None:
    job = box.job(SAVES)
    box.far.start(job)
    lease = box.agent_file("lease.json")
    assert box.far.start({**job, **stops(99, 99)}).already
    assert box.agent_file("lease.json") == pytest.approx(lease, abs=0.01)  # The clocks are read one after the other.
    assert box.far.start({**job, **stops(20, 30)}).already
    sooner = box.agent_file("lease.json")
    assert all(sooner[key] < lease[key] - 20 for key in ("soft_stop_wall", "hard_stop_wall", "soft_mono", "hard_mono"))


@pytest.mark.parametrize("ahead_s", [3600, -3600, 110], ids=["ahead", "behind", "a little ahead"])
def test_a_corrected_clock_does_not_change_the_lease(box: Box, ahead_s: float) -> None:
    """The machine's clock was wrong when the laptop computed the stops, and is right when the job arrives."""
    now = clocks_now()
    box.machine.put("agent/clock.json", json.dumps({**now, "wall": now["wall"] + ahead_s}).encode())
    box.far.start({**box.job(SAVES), **stops(50, 60, ahead_s)})
    lease = box.agent_file("lease.json")
    assert 45 < lease["soft_mono"] - clocks_now()["mono"] < 50 < lease["hard_mono"] - clocks_now()["mono"] < 60
    assert box.until(lambda: box.text("ready"))
    time.sleep(0.5)
    assert (box.status().state, box.text("saved")) == ("running", "")


def test_a_job_that_comes_late_has_no_more_time_for_that(box: Box) -> None:
    """The job arrived half a minute after it was written: it must not get that time in addition."""
    box.machine.put("agent/clock.json", json.dumps(clocks_now()).encode())
    box.far.start({**box.job(SAVES), **stops(50, 60), "soft_stop_wall": time.time() + 20})
    assert box.agent_file("lease.json")["soft_mono"] - clocks_now()["mono"] < 20


def test_hello_notes_the_clock_that_it_tells(box: Box) -> None:
    facts = box.far.hello(python="/no/such/python")
    noted = box.agent_file("clock.json")
    assert (facts.wall, facts.boot_id) == (noted["wall"], noted["boot_id"])
    assert abs(noted["mono"] - clocks_now()["mono"]) < 60


@pytest.mark.parametrize("without", ["soft_stop_s", "hard_stop_s", "hard_stop_wall"])
def test_a_job_that_does_not_say_when_to_stop_is_refused(box: Box, without: str) -> None:
    job = box.job(SAVES)
    del job[without]
    with pytest.raises(FarRefusal) as refused:
        box.far.start(job)
    assert refused.value.reason == "bad_job"


@pytest.mark.parametrize("words", [("nan", "1"), ("1", "inf"), ("-1", "1"), ("soon", "1")])
def test_a_lease_that_is_no_time_is_refused(box: Box, words: tuple[str, str]) -> None:
    reply = box.machine.call(box.agent_argv("shorten", "--soft", words[0], "--hard", words[1]), timeout_s=10)
    assert reply.exit_code == 1
    assert json.loads(reply.stdout)["error"]["code"] == "usage"


def test_stop_saves_and_stop_now_does_not(box: Box) -> None:
    box.far.start(box.job(SAVES))
    box.until(lambda: box.text("ready"))
    assert box.far.stop(reason="user")
    assert box.until_exited().stop_reason == "user"
    assert box.text("saved") == "yes"
    assert not box.far.stop(now=True), "nobody is left to be asked"


def test_a_trainer_that_ignores_a_stop_dies_after_its_save_time(box: Box) -> None:
    box.far.start(box.job("signal.signal(15, 1); open('ready', 'w').write('1'); time.sleep(60)", save_s=0.5))
    box.until(lambda: box.text("ready"))
    box.far.stop(reason="user")
    assert box.until_exited().signal == signal.SIGKILL


def test_stop_now_kills_at_once(box: Box) -> None:
    box.far.start(box.job(SAVES, save_s=60))
    box.until(lambda: box.text("ready"))
    box.far.stop(now=True, reason="user")
    assert box.until_exited().signal == signal.SIGKILL, "long before its time to save is over"
    assert box.text("saved") == ""


def test_torchruns_workers_are_asked_and_torchrun_is_not(box: Box) -> None:
    worker = repr(
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); print('up', flush=True); time.sleep(60)"
    )
    launcher = f"""
signal.signal(15, lambda *_: os._exit(77))
command = [sys.executable, '-I', '-S', '-c', {worker}]
ranks = [subprocess.Popen(command, env=dict(os.environ, LOCAL_RANK=str(i)), start_new_session=True) for i in (0, 1)]
sys.exit(max(rank.wait() for rank in ranks))
"""
    box.far.start(box.job(launcher))
    box.until(lambda: box.far.poll({"trainer.log": (0, 99)}).chunks["trainer.log"].data == b"up\nup\n")
    box.far.stop(reason="user")
    assert box.until_exited().exit_code == 0


@pytest.mark.slow
def test_the_heartbeat_is_never_older_than_two_seconds(box: Box) -> None:
    box.far.start(box.job(WAITS))
    end = time.time() + 3
    while time.time() < end:
        asked_wall = time.time()  # The time that a poll takes is not the heartbeat's age.
        assert asked_wall - box.status().wall < 2
        time.sleep(0.2)


def test_the_trainer_is_told_no_secret(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = "canary-5d41402abc"
    for name in ("RUNPOD_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MY_OWN", "PYTHONPATH", "LD_PRELOAD_KEY"):
        monkeypatch.setenv(name, canary)
    environments = ["/proc/self/environ", "/proc/%d/environ' % os.getppid()"]
    script = f"print(open('{environments[0]}').read(), open('{environments[1]}).read(), sys.argv)"
    box.far.start(box.job(script, WANTED="yes"))
    box.until_exited()
    said = box.far.poll({"trainer.log": (0, 1 << 20)}).chunks["trainer.log"].data
    assert b"WANTED=yes" in said
    assert b"GPURUN_INSTANCE=" in said
    assert canary.encode() not in said
    # Over SSH no LocalMachine holds keys back, so the agent itself must.
    argv = ["env", f"RUNPOD_API_KEY={canary}", *box.agent_argv("start", "--job", "job.json")]
    other = Box(box.folder.parent / "other")
    try:
        other.machine.put("job.json", json.dumps(other.job(script)).encode())
        assert other.machine.call(argv, timeout_s=10).exit_code == 0
        other.until_exited()
        assert canary.encode() not in other.far.poll({"trainer.log": (0, 1 << 20)}).chunks["trainer.log"].data
    finally:
        other.close()


STUCK = """
import faulthandler
faulthandler.register(signal.SIGUSR1)
def waits_for_a_card_that_fell_off_the_bus():
    time.sleep(60)
open('../out/heartbeat.json', 'w').write('{"v": 1, "patience_s": 0.5}')
waits_for_a_card_that_fell_off_the_bus()
"""


def test_a_trainer_that_stands_still_says_where_and_is_ended(box: Box) -> None:
    box.far.start(box.job(STUCK))
    status = box.until_exited()
    assert (status.signal, status.stop_reason) == (signal.SIGTERM, "hang")
    assert (
        b"waits_for_a_card_that_fell_off_the_bus" in box.far.poll({"trainer.log": (0, 4000)}).chunks["trainer.log"].data
    )


def test_a_trainer_that_even_kill_does_not_end_is_told_as_ended(box: Box) -> None:
    """A trainer that hangs in its card's driver never ends.

    It must be reported as ended, as each minute is paid for.
    """
    box.alter_agent("for _ in range(50):", "for _ in range(2):")
    box.alter_agent("        send_signal(left if", "        (lambda *_: None)(left if")
    box.alter_agent("DUMP_S, LAST_WORDS_S, KILLED_S = 1.0, 5.0, 60.0", "DUMP_S, LAST_WORDS_S, KILLED_S = 0.1, 0.1, 0.5")
    box.far.start(box.job("signal.signal(signal.SIGTERM, signal.SIG_IGN)" + STUCK))
    status = box.until_exited()
    assert (status.exit_code, status.signal, status.stop_reason) == (None, None, "hang")
    assert box.living(), "it is there as before"


@pytest.mark.parametrize(
    "said", ['{"patience_s": -1}', '{"patience_s": 1e9}', "[]", "half a li", '{"patience_s": true}']
)
def test_a_heartbeat_that_says_nothing_ends_nobody(box: Box, said: str) -> None:
    box.far.start(box.job(f"open('../out/heartbeat.json', 'w').write({said!r}); time.sleep(1.5); sys.exit(7)"))
    assert (box.until_exited().exit_code, box.status().stop_reason) == (7, None)


class Metadata(BaseHTTPRequestHandler):
    """EC2's metadata service, which requires a token and gives its notice from the second request on."""

    questions = 0

    def do_PUT(self) -> None:
        assert self.path == "/latest/api/token"
        self._say(200, "a-token")

    def do_GET(self) -> None:
        assert (self.path, self.headers["X-aws-ec2-metadata-token"]) == (
            "/latest/meta-data/spot/instance-action", "a-token",
        )  # fmt: skip
        Metadata.questions += 1
        self._say(*((404, "") if Metadata.questions == 1 else (200, '{"action": "terminate"}')))

    def _say(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def test_a_machine_that_is_to_be_taken_away_saves_first(box: Box) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        box.far.start({**box.job(SAVES), "notice_url": f"http://127.0.0.1:{server.server_port}"})
        assert box.until(lambda: box.text("saved")) == "yes"
        server.shutdown()
    status = box.until_exited()
    assert (status.exit_code, status.stop_reason) == (0, "preempted")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhalf",
        b"HTTP/1.1 200 OK\r\n" + b"x" * 99_999,
    ],
    ids=["nothing", "no HTTP", "half", "a line without end"],
)
def test_a_senseless_answer_is_ignored_and_listening_continues(answer: bytes) -> None:
    class Restarts(StreamRequestHandler):
        """A service that is just being restarted."""

        def handle(self) -> None:
            while self.rfile.readline().strip():
                """Skip the request."""
            self.wfile.write(answer)

    with ThreadingTCPServer(("127.0.0.1", 0), Restarts) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert not is_given(f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()
