"""Tests of whole runs on this machine as a user starts them, with the real command, trainer and files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.clock import SystemClock
from gpurun.core.paths import Home
from gpurun.ledger.run_lock import holder_of
from gpurun.providers.local import LocalProvider

GPURUN = [sys.executable, "-m", "gpurun.cli.app"]


def gpurun(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*GPURUN, *arguments], capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
    )


def envelope(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert set(answer) == {"v", "command", "ok", "data", "errors", "exit_code"}
    assert answer["exit_code"] == done.returncode
    return answer


def losses(folder: Path) -> list[float]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["kind"] == "step"]


def nothing_is_left(home: Path) -> bool:
    return LocalProvider(Home(home), SystemClock()).find(None) == []


def test_mini_gpt_trains_here_and_leaves_all_that_was_promised(own_home: Path) -> None:
    done = gpurun("train", "mini-gpt", "--provider", "local", "--yes", "--json")
    answer = envelope(done)
    assert done.returncode == 0, done.stderr
    folder = Path(answer["data"]["folder"])
    falling = losses(folder)
    assert falling[-1] < falling[0] - 1.0
    assert (folder / "receipt.json").is_file()
    assert list((folder / "artifacts" / "checkpoints").glob("*.model.safetensors"))
    assert list((folder / "artifacts" / "samples").iterdir())
    log = (folder / "run.log").read_text()
    for line in ("device: cpu", "parameters: ", "step 0050 | loss ", "checkpoint: ", "--- sample ---"):
        assert line in log
    assert answer["data"]["verdict"] == "smoke"
    audited = gpurun("audit", "--json")
    assert envelope(audited)["data"]["ok"] is True
    assert nothing_is_left(own_home)


@pytest.mark.slow
def test_the_rehearsal_of_the_paid_run_uses_two_processes(own_home: Path) -> None:
    done = gpurun("train", "--gpu", "8xA100", "--max-cost", "25", "--dry-run", "--name", "dry-1")
    assert done.returncode == 0, done.stderr
    verdict = envelope(gpurun("receipt", "dry-1", "--json"))["data"]["statement"]["predicate"]["verdict"]
    assert (verdict["is"], verdict["says"] in done.stdout) == ("smoke", True)
    assert "8xA100" in done.stderr, "what the paid run would rent"
    assert "\x1b" not in done.stdout + done.stderr
    events = [json.loads(line) for line in (own_home / "runs/dry-1/events.jsonl").read_text().splitlines()]
    assert next(event for event in events if event["kind"] == "start")["world_size"] == 2
    # Under plain torchrun, a sharded model that runs out of memory would end.
    assert '"trainer.launch","--processes=2"' in (own_home / "runs/dry-1/journal.jsonl").read_text().replace(", ", ",")
    falling = losses(own_home / "runs/dry-1")
    assert falling[-1] < falling[0] - 2.0
    assert envelope(gpurun("audit", "--json"))["data"]["ok"] is True
    assert nothing_is_left(own_home)


@pytest.mark.slow
def test_supervisor_killed_in_training_and_resumed(own_home: Path) -> None:
    detached = gpurun("train", "mini-gpt", "--provider", "local", "--yes", "--name", "fox-41", "--detach",
                      "--set", "steps=150", "--set", "checkpoint_every=100")  # fmt: skip
    assert detached.returncode == 0, detached.stderr
    assert "gpurun attach fox-41" in detached.stderr
    wait_for(lambda: (own_home / "runs/fox-41/events.jsonl").exists())
    kill_supervisor(own_home)
    listed = envelope(gpurun("ps", "--json"))
    assert listed["exit_code"] == 9, "an instance without an owner may be billing"
    resumed = gpurun("resume", "fox-41", "--json")
    assert resumed.returncode == 0, resumed.stderr
    events = [json.loads(line) for line in (own_home / "runs/fox-41/events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events].count("start") == 1
    assert envelope(gpurun("audit", "--json"))["data"]["ok"] is True
    assert nothing_is_left(own_home)


@pytest.mark.slow
def test_stop_saves_brings_home_and_destroys(own_home: Path) -> None:
    start = gpurun("train", "mini-gpt", "--provider", "local", "--yes", "--name", "owl-7", "--detach",
                   "--set", "steps=100000", "--set", "checkpoint_every=100000")  # fmt: skip
    assert start.returncode == 0, start.stderr
    wait_for(lambda: "step 0010" in read(own_home / "runs/owl-7/run.log"))
    second = gpurun("stop", "owl-7", "--json")
    assert second.returncode == 0, second.stdout
    assert envelope(second)["data"]["outcome"] == "stopped"
    assert len(list((own_home / "runs/owl-7/artifacts/checkpoints").glob("*.model.safetensors"))) == 1
    assert nothing_is_left(own_home)


@pytest.mark.slow
def test_only_the_supervisor_asks_the_machine_however_many_watch(own_home: Path, tmp_path: Path) -> None:
    trains = ("train", "mini-gpt", "--provider", "local", "--yes", "--name", "cat-2", "--set", "steps=100")
    views = {"train": trains, "attach": ("attach", "cat-2"), "logs": ("logs", "cat-2", "-f")}
    watching, calls = [], {name: tmp_path / name for name in views}
    for name, words in views.items():
        env = {**os.environ, "GPURUN_CRASH_LOG": str(calls[name])}
        watching.append(subprocess.Popen([*GPURUN, *words], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        wait_for(lambda: (own_home / "runs/cat-2/events.jsonl").exists())
    said = [viewer.communicate(timeout=240)[0] for viewer in watching]
    assert [viewer.returncode for viewer in watching] == [0, 0, 0], said
    assert all(b"step 100" in words or b"step 0100" in words for words in said), said
    assert "far.poll" in read(calls["train"]), "its supervisor passes these on"
    assert "far." not in read(calls["attach"]) + read(calls["logs"])


@pytest.mark.slow
def test_a_stopped_run_continued_ends_as_if_never_stopped(own_home: Path) -> None:
    def trains(*what: str) -> int:
        return gpurun("train", *what, "--provider", "local", "--yes").returncode

    small = ("--set", "steps=240", "--set", "model.width=64", "--set", "model.heads=4",
             "--set", "eval.every=120", "--set", "eval.tokens=2048", "--set", "sample.tokens=16")  # fmt: skip
    assert trains("mini-gpt", *small, "--name", "hen-1") == 0
    assert trains("mini-gpt", *small, "--name", "owl-1", "--detach") == 0
    wait_for(lambda: "step 0010" in read(own_home / "runs/owl-1/run.log"))
    assert gpurun("stop", "owl-1").returncode == 0
    for verb in ("receipt", "resume"):
        assert "gpurun train --from owl-1" in gpurun(verb, "owl-1").stdout
    assert "--from" not in gpurun("resume", "hen-1").stdout
    assert gpurun("train", "--from", "owl-1", "--name", "owl-2", "--yes").returncode == 0
    start = json.loads((own_home / "runs/owl-2/events.jsonl").read_text().splitlines()[0])
    assert 10 <= start["resumed_from"] < 240
    whole, parts = (own_home / "runs" / run / "artifacts/checkpoints" for run in ("hen-1", "owl-2"))
    for name in ("000240.model.safetensors", "000240.optim.safetensors"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
    again = envelope(gpurun("plan", "--from", "owl-2", "--json"))
    assert again["errors"][0]["code"] == "continue.finished", "what was asked of a run that went on is known, too"
    audited = envelope(gpurun("audit", "--json"))
    assert audited["data"]["ok"] is True
    assert nothing_is_left(own_home)


@pytest.mark.slow
def test_the_lease_ends_a_run_that_would_go_on(own_home: Path) -> None:
    done = gpurun("train", "mini-gpt", "--provider", "local", "--yes", "--name", "emu-3", "--hours", "0.02",
                  "--set", "steps=100000", "--set", "checkpoint_every=100000", "--json")  # fmt: skip
    assert done.returncode == 7, done.stdout[-2000:]
    assert list((own_home / "runs/emu-3/artifacts/checkpoints").glob("*.model.safetensors")), "what existed came home"
    assert nothing_is_left(own_home)


@pytest.mark.slow
def test_destroy_leaves_nothing_and_collects_nothing(own_home: Path) -> None:
    start = gpurun("train", "mini-gpt", "--provider", "local", "--yes", "--name", "yak-9", "--detach",
                   "--set", "steps=100000", "--set", "checkpoint_every=50")  # fmt: skip
    assert start.returncode == 0, start.stderr
    wait_for(lambda: "checkpoint:" in read(own_home / "runs/yak-9/run.log"))
    assert gpurun("destroy", "yak-9").returncode == 2, "it asks, and off a terminal nobody can answer"
    assert gpurun("destroy", "yak-9", "--yes").returncode == 0
    assert nothing_is_left(own_home)
    assert not list((own_home / "runs/yak-9/artifacts").glob("checkpoints/*"))


@pytest.mark.slow
def test_a_second_driver_of_a_run_is_refused_with_12(own_home: Path) -> None:
    start = gpurun("train", "mini-gpt", "--provider", "local", "--yes", "--name", "ant-1", "--detach",
                   "--set", "steps=100000", "--set", "checkpoint_every=100000")  # fmt: skip
    assert start.returncode == 0, start.stderr
    second = subprocess.run(
        [sys.executable, "-m", "gpurun.lifecycle.supervisor", str(own_home), "ant-1"], capture_output=True, text=True
    )
    assert second.returncode == 12
    assert "run.held" in second.stderr
    assert gpurun("train", "mini-gpt", "--provider", "local", "--yes", "--name", "ant-1").returncode == 12
    assert gpurun("destroy", "ant-1", "--yes").returncode == 0


def test_a_trainers_failure_gives_its_reason_and_still_destroys(own_home: Path) -> None:
    wild = ["--set", "lr=1e30", "--set", "grad_clip=0", "--set", "steps=20", "--set", "checkpoint_every=20"]
    done = gpurun("train", "mini-gpt", "--provider", "local", "--yes", "--json", *wild)
    answer = envelope(done)
    assert done.returncode == 6
    assert answer["errors"][0]["code"] == "train.nonfinite"
    assert nothing_is_left(own_home)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def wait_for(true: Any, limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def kill_supervisor(home: Path) -> None:
    """Kill the process that drives a home's runs, and wait until no lock of these runs is held."""
    found = subprocess.run(["pgrep", "-f", f"gpurun.lifecycle.supervisor {home}"], capture_output=True, text=True)
    for pid in found.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    # A process that waits for the disk dies later; until then it holds its lock.
    wait_for(lambda: not any(holder_of(folder) for folder in (home / "runs").glob("*/run.lock")))
