"""Tests of one or two real processes that are killed or asked to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.trainer.tiny_training import (
    LONG,
    ROOT,
    command,
    environment,
    events,
    losses,
    manifest,
    recipe_record,
    run_command,
    train_here,
    whole_events,
    workers,
)

KILLED_AT_13 = """
import os, signal, sys, threading, time
from trainer import checkpoint, events, train
report = events.Reporter.step
def step(self, number, values):
    report(self, number, values)
    while number == 13 and '"kind":"AWAITED"' not in self._path.read_text():
        time.sleep(0.01)  # a thread writes what step 10 leaves
    if number == 13:
        os.kill(os.getpid(), signal.SIGKILL)
events.Reporter.step = step
if "AWAITED" == "checkpoint":
    checkpoint.CheckpointStore.write_samples = lambda *_: threading.Event().wait()
sys.exit(train.main())
"""
"""A trainer that is killed at step 13, like a lost machine, once the event AWAITED of step 10 has been written."""


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Return the out folder of one process that trained twenty steps without interruption."""
    out = tmp_path_factory.mktemp("straight") / "out"
    assert train_here(recipe_record(), data, out) == 0
    return out


@pytest.mark.slow
@pytest.mark.parametrize("awaited", ["checkpoint", "sample"])
def test_ten_steps_a_kill_and_ten_more_equal_twenty_exactly(
    tmp_path: Path, data: Path, straight: Path, awaited: str
) -> None:
    out = tmp_path / "out"
    argv = command(recipe_record(), data, out)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_AT_13.replace("AWAITED", awaited), *argv[argv.index("--recipe") :]],
        cwd=ROOT, env=environment(), capture_output=True, timeout=120,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    assert manifest(out)["latest"] == 10
    assert max(losses(out)) == 13
    assert run_command(recipe_record(), data, out).returncode == 0
    assert events(out, "start")[1]["resumed_from"] == 10
    assert losses(out) == losses(straight)
    for kind in ("model", "optim"):
        name = f"checkpoints/000020.{kind}.safetensors"
        assert (out / name).read_bytes() == (straight / name).read_bytes()
    assert [e["val_loss"] for e in events(out, "eval")] == [e["val_loss"] for e in events(straight, "eval")]
    assert [e["text"] for e in events(out, "sample")] == [e["text"] for e in events(straight, "sample")]


def test_two_processes_see_the_same_tokens_and_the_same_losses(tmp_path: Path, data: Path, straight: Path) -> None:
    out = tmp_path / "out"
    done = run_command(recipe_record(), data, out, processes=2)
    assert done.returncode == 0, done.stderr
    start = events(out, "start")[0]
    assert (start["world_size"], start["micro_batch"], start["accumulation"]) == (2, 2, 2)
    assert losses(out) == pytest.approx(losses(straight), rel=1e-5)
    for wanted, got in zip(events(straight, "eval"), events(out, "eval"), strict=True):
        assert got["val_loss"] == pytest.approx(wanted["val_loss"], rel=1e-5)
    # Only the first process reports.
    assert len(events(out, "step")) == 20
    assert done.stdout.count("device: cpu") == 1


def wait_for_step(out: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (out / "events.jsonl").exists() and any(e["step"] >= step for e in whole_events(out)):
            return
        time.sleep(0.02)
    pytest.fail("the trainer did not get going")


def test_sigterm_finishes_the_step_saves_and_is_a_good_end(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(recipe_record(**LONG), data, out), cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL
    )
    try:
        wait_for_step(out, 3)
        process.send_signal(signal.SIGTERM)
        asked_wall = time.time()
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
    stop = events(out)[-1]
    assert (stop["kind"], stop["reason"]) == ("stop", "signal")
    assert manifest(out)["latest"] == stop["step"]
    late = [e for e in events(out, "step") if e["wall"] > asked_wall]
    assert len(late) <= 2, "the step under way when the signal came, and at most the one after"


@pytest.mark.slow
def test_the_step_after_which_it_stops_is_always_reported(tmp_path: Path, data: Path) -> None:
    """Otherwise the receipt, which shows the last reported step, would name an earlier step than the checkpoint's."""
    seldom = {"train": {**LONG["train"], "log_every": 100_000}, "eval": LONG["eval"]}
    process = subprocess.Popen(
        command(recipe_record(**seldom), data, tmp_path / "out"), cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL
    )
    try:
        wait_for_step(tmp_path / "out", 1)
        time.sleep(0.2)
        process.terminate()
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
    stop, last = events(tmp_path / "out")[-1], events(tmp_path / "out", "step")[-1]
    assert stop["step"] > 1
    assert (last["step"], last["loss"]) == (stop["step"], stop["final_loss"])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the workers through /proc")
def test_sigterm_to_one_process_stops_both_at_the_same_step(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "out"
    launcher = subprocess.Popen(
        command(recipe_record(**LONG), data, out, processes=2), cwd=ROOT, env=environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for_step(out, 3)
        os.kill(next(pid for pid, rank in workers(launcher.pid) if rank == 1), signal.SIGTERM)
        assert launcher.wait(timeout=30) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
    stop = events(out)[-1]
    assert (stop["reason"], manifest(out)["latest"]) == ("signal", stop["step"])


SIGNAL_IN_SIGNAL = """
import signal, threading
from trainer.run import watch_for_stop
class Interrupted(threading.Event):
    def set(self):
        with self._cond:  # where Event.set is, too, when the second one comes
            signal.raise_signal(signal.SIGINT)
        super().set()
threading.Event = Interrupted
asked = watch_for_stop()
signal.raise_signal(signal.SIGTERM)
print(asked.is_set())
"""


@pytest.mark.slow
def test_a_second_signal_during_the_first_does_not_deadlock() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNAL_IN_SIGNAL], cwd=ROOT, env=environment(), capture_output=True, text=True,
        timeout=30,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the workers through /proc")
def test_processes_whose_launcher_was_killed_save_and_stop(tmp_path: Path, data: Path) -> None:
    """Otherwise no process would end them, and the same command again would start a second training in the folder."""
    out = tmp_path / "out"
    launcher = subprocess.Popen(
        command(recipe_record(**LONG), data, out, processes=2), cwd=ROOT, env=environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    pids: list[int] = []
    try:
        wait_for_step(out, 3)
        pids = [pid for pid, _ in workers(launcher.pid)]
        launcher.kill()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and whole_events(out)[-1]["kind"] != "stop":
            time.sleep(0.05)
    finally:
        launcher.kill()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait()
    assert len(pids) == 2
    stop = events(out)[-1]
    assert (stop["kind"], stop.get("reason"), manifest(out)["latest"]) == ("stop", "signal", stop["step"])


@pytest.mark.slow
def test_it_leaves_at_once_with_its_code_though_output_fails() -> None:
    """Tearing torch down takes a second of a paid machine, and a log on a full disk must not change the exit code."""
    code = "import atexit, sys; from trainer.distributed import leave; atexit.register(sys.stderr.write, 'torn down');"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", f"{code} print('unheard'); print('heard', file=sys.stderr, end=''); leave(3)"],
            stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60,
            env={**environment(), "PYTHONUNBUFFERED": ""},
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (3, "heard")
