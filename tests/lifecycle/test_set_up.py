"""Tests of the --setup script in a run: it runs once, its output is shown, and its failure is quoted."""

from __future__ import annotations

import signal
import stat
import time
from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock, ticks
from gpurun.core.errors import ExitCode, GpurunError
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.core.records import Instance
from gpurun.core.run_plan import Lease
from gpurun.core.stop_request import ask_to_stop
from gpurun.core.transfer_progress import read_moving
from gpurun.ledger.audit import audit
from gpurun.ledger.journal import read_journal
from gpurun.ledger.write_receipt import read_receipt
from gpurun.lifecycle.instance import setup_script as set_up
from gpurun.lifecycle.supervisor import supervise
from gpurun.providers.local import LocalProvider
from gpurun.remote.client import FarSide
from gpurun.remote.interface import MachineLost
from gpurun.remote.messages import SetUp
from gpurun.view.progress_line import moving_words
from tests.lifecycle import tiny_runs
from tests.lifecycle.drive import TINY, reach
from tests.lifecycle.scripted_cloud import LEASE, World

RUN = "fox-41"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up, "POLL_S", 0.25)


def drive(home: Home, cuts: int = 0) -> int:
    """Drive the run with the real agent, lose the first `cuts` replies about the script, and return the exit code."""
    left = [cuts]

    class Cut(FarSide):
        def set_up(self, script: bytes, *, limit_s: float, offset: int, most: int) -> tuple[SetUp, bytes]:
            answer = super().set_up(script, limit_s=limit_s, offset=offset, most=most)
            if left[0]:
                left[0] -= 1
                raise MachineLost("the line is lost")
            return answer

    def cut(instance: Instance) -> FarSide:
        far = reach(home, instance)
        return Cut(far._machine, far._python)

    try:
        return int(supervise(home, RUN, SystemClock(), reach=cut, trainer=TINY / "trainer"))
    except GpurunError as error:
        return int(error.exit_code)


def make(home: Home, script: str, limit_s: int = 60) -> Path:
    """Make a run whose setup script adds a line to a file on this computer each time it starts; return that file."""
    starts = home.root / "starts"
    tiny_runs.setting_up(tiny_runs.make_run(home), f"echo begun >>{starts}\n{script}", limit_s)
    return starts


def failure(home: Home) -> dict[str, object]:
    (failed,) = [record for record in read_journal(home.run(RUN).journal).records if record.event is Event.STEP_FAILED]
    assert LocalProvider(home, SystemClock()).find(None) == []
    assert "death.proven" in tiny_runs.events_of(home.run(RUN))
    return dict(failed.data)


def test_it_runs_once_over_two_lost_lines_and_its_output_comes(own: Home) -> None:
    starts = make(own, "nohup sleep 100 &\nseq 3\nsleep 1\necho done")
    assert drive(own, cuts=2) == 0
    assert starts.read_text() == "begun\n"
    log = own.run(RUN).setup_log
    assert log.read_text() == "1\n2\n3\ndone\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    records = read_journal(own.run(RUN).journal).records
    (ready,) = [record.data for record in records if record.event is Event.READY_OBSERVED]
    assert 1.0 <= ready["setup_s"] < ready["seconds"]
    (row,) = audit(own).rows
    assert (list(row.problems), read_receipt(own, own.run(RUN)).predicate["runtime"]["phases_s"]["setup"]) == (
        [],
        ready["setup_s"],
    )


@pytest.mark.parametrize(
    ("script", "limit_s", "code", "figure"),
    [
        ("seq 40\nprintf 'in \\033[31mred\\033[0m\\n' >&2\nexit 9", 60, "setup.failed", "ended with 9"),
        ("seq 40\necho in red\nkill -9 $$", 60, "setup.failed", "ended with signal 9"),
        ("seq 40\necho in red\nsleep 100", 1, "setup.limit", "limit of 1 s"),
    ],
)
def test_a_failing_or_slow_set_up_is_exit_4_with_its_last_words(
    own: Home, script: str, limit_s: int, code: str, figure: str
) -> None:
    starts = make(own, script, limit_s)
    assert drive(own) == int(ExitCode.SETUP)
    failed = failure(own)
    assert (failed["step"], failed["code"], failed["exit_code"]) == ("await_ready", code, 4)
    first, *words = str(failed["message"]).split("\n")
    assert figure in first
    assert words == [*map(str, range(27, 41)), "in red"]
    assert "setup.log" in str(failed["hint"])
    assert starts.read_text() == "begun\n"
    assert len(own.run(RUN).setup_log.read_text().splitlines()) == 41


def test_a_flood_of_words_is_one_start_with_head_and_tail_kept(own: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up, "MOST_LOG_BYTES", 1 << 20)
    starts = make(own, "yes 0123456789abcde | head -n 2500000\necho end")
    assert drive(own) == 0
    assert starts.read_text() == "begun\n"
    log = own.run(RUN).setup_log.read_bytes()
    assert log[: 1 << 20] == b"0123456789abcde\n" * (1 << 16)
    assert len(log) < (1 << 20) + 5000
    assert log.endswith(b"\n0123456789abcde\nend\n")
    assert b"[... 38,951,428 more bytes" in log


def until(true: object, limit_s: float = 30.0) -> None:
    assert callable(true)
    for _ in ticks(SystemClock(), 0.05, limit_s):
        if true():
            return
    raise AssertionError("it did not become so")


def test_a_killed_supervisor_resumes_watching_the_same_set_up(own: Home) -> None:
    starts = make(own, "sleep 4\necho done")
    supervisor = tiny_runs.start(own)
    until(starts.exists)
    supervisor.send_signal(signal.SIGKILL)
    supervisor.communicate()
    assert tiny_runs.drive(own).returncode == 0
    assert starts.read_text() == "begun\n"
    assert own.run(RUN).setup_log.read_text() == "done\n"


def test_a_working_set_up_ends_within_ten_seconds_of_a_stop(own: Home) -> None:
    make(own, "printf 'half\\rwhole \\033[31mred\\033[0m\\n'\nsleep 100", limit_s=600)
    supervisor = tiny_runs.start(own)
    folder = own.run(RUN)
    until(lambda: (seen := read_moving(folder, time.time())) is not None and seen.words)
    seen = read_moving(folder, time.time())
    assert seen is not None
    assert moving_words(seen).endswith(" s of 10 m 00 s · whole red")
    asked_mono = time.monotonic()
    ask_to_stop(folder, "destroy", by="user", reason="a test")
    until(lambda: LocalProvider(own, SystemClock()).find(None) == [], 10.0)
    assert time.monotonic() - asked_mono < 10
    supervisor.communicate(timeout=60)
    assert supervisor.returncode == int(ExitCode.INTERRUPTED)


def test_what_it_does_not_need_of_its_limit_is_trained_for(own: Home) -> None:
    lease: Lease = LEASE.model_copy(update={"setup_s": 600, "train_s": 3000})
    stops = []
    for home, takes_s in ((own, 10.0), (Home(own.root / "other"), 500.0)):
        world = World(home, lease)
        tiny_runs.setting_up(world.folder, "pip install something", 600)
        world.far.setup_takes_s = takes_s
        assert world.drive() is ExitCode.DONE
        (intent,) = world.all_of(Event.CREATE_INTENDED)
        assert intent["lease"]["setup_s"] == 600
        (job,) = world.all_of(Event.TRAIN_INTENDED)
        stops.append(intent["deadline_wall"] - job["hard_stop_wall"])
    assert stops == pytest.approx([lease.collect_s + lease.destroy_s] * 2)


def test_a_line_that_stays_down_is_waited_for_while_worth_it(own: Home) -> None:
    world = World(own, LEASE.model_copy(update={"setup_s": 120, "train_s": 36_000}))
    tiny_runs.setting_up(world.folder, "pip install something", 120)
    world.far.broken = {"set_up": MachineLost("the line is lost")}
    assert world.drive() is ExitCode.TRAINING_FAILED
    assert world.state.failure.code == "machine.lost"
    assert world.cloud.alive == []
    assert (world.cloud.boxes[0].died_s or 0) < 1200
