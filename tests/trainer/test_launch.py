"""Tests of several processes under the launcher: if memory runs out, all restart with smaller micro-batches."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.refusals import lacking
from tests.trainer.tiny_training import (
    LONG,
    ROOT,
    command,
    environment,
    events,
    losses,
    manifest,
    patience_s,
    recipe_record,
    torchrun,
    whole_events,
    workers,
)
from trainer import launch
from trainer.checkpoint import read_checkpoint
from trainer.data import BatchPlan
from trainer.distributed import Processes
from trainer.errors import OutOfMemory, Restart, TrainerError
from trainer.events import UNKNOWN_S, Reporter
from trainer.out_of_memory import BEGINNING, ending, read_room
from trainer.recipe import parse_recipe
from trainer.run import RunIO, State

NO_DROPOUT = {"dropout": 0.0}

# Runs the script in its first argument in each process, in place of the module `trainer.train`.
LAUNCHED = """
import sys
from trainer import launch
launch.PROGRAM = (sys.argv.pop(1),)
launch.leave(launch.main())
"""

# Memory runs out under the condition WHERE if a batch has more than FIT sequences.
FULL = """
import os, torch
from trainer import train
from trainer.model import GPT
forward, calls = GPT.forward, 0
def full(self, ids, targets):
    global calls
    calls += self.training
    if WHERE and len(ids) > FIT:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return forward(self, ids, targets)
GPT.forward = full
train.leave(train.main())
"""

# Memory runs out in the eighth forward of process 1, while process 0 sleeps and cannot be interrupted, as if it waited
# for its GPU. Both write down the time at which they end.
STUCK = """
import os, sys, time, torch
from pathlib import Path
from trainer import out_of_memory, train
from trainer.model import GPT
folder, rank = Path(sys.argv[sys.argv.index("--out") + 1]).parent, os.environ["RANK"]
forward, calls = GPT.forward, 0
def full(self, ids, targets):
    global calls
    calls += self.training
    if calls == 8 and len(ids) > 2:
        if rank == "0":
            time.sleep(60)
        (folder / "full").write_text(str(time.time()))
        raise torch.OutOfMemoryError("CUDA out of memory")
    return forward(self, ids, targets)
def left(code):
    (folder / f"left-{rank}").write_text(str(time.time())) if code == 6 else None
    os._exit(code)
GPT.forward, out_of_memory.leave = full, left
left(train.main())
"""

# The loss of step 6 is not a number.
NOT_A_NUMBER = """
from trainer import train
gradient = train.gradient
def bad(setup, state, io):
    figures = gradient(setup, state, io)
    return (float("nan"), *figures[1:]) if state.step == 5 else figures
train.gradient = bad
train.leave(train.main())
"""

IN_ONE = 'self.training and os.environ["RANK"] == "1"'


def full(where: str, fit: int) -> str:
    return FULL.replace("WHERE", where).replace("FIT", str(fit))


def in_parts(**keys: Any) -> dict[str, Any]:
    """Return a recipe with sharding and without dropout, because its masks depend on how the batch is divided."""
    train = {"parallel": "fsdp", "micro_batch": 4, "checkpoint_every": 5, **keys}
    return recipe_record(model=NO_DROPOUT, train=train, eval={"every": 5})


def launched(script: str, recipe: dict[str, Any], data: Path, out: Path) -> list[str]:
    """Write the script and return the launcher's command line that runs it in two processes."""
    argv, file = command(recipe, data, out), out.parent / "script.py"
    file.write_text(script)
    return [sys.executable, "-c", LAUNCHED, str(file), "--processes=2", *argv[argv.index("--recipe") :]]


def run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    surroundings = {**environment(), "PYTHONPATH": str(ROOT)}
    return subprocess.run(argv, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=120)


def fields(out: Path, kind: str, *keys: str) -> list[Any]:
    return [tuple(event[key] for key in keys) for event in events(out, kind)]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Return the out folder of a single process that trained twenty steps and never ran out of memory."""
    out = tmp_path_factory.mktemp("straight") / "out"
    done = run(command(in_parts(), data, out))
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "where", "step", "resumed"),
    [
        ("fsdp", f"{IN_ONE} and calls >= 8", 7, 5),
        ("ddp", f"{IN_ONE} and calls >= 9", 7, 5),
        ("fsdp", "not self.training", 5, None),
        ("ddp", 'not self.training and calls > 7 and os.environ["RANK"] == "1"', 10, 5),
    ],
    ids=["a step of one", "a step of one replica", "an evaluation of both", "an evaluation of one replica"],
)
def test_memory_that_runs_out_in_one_of_two_costs_no_token(
    tmp_path: Path, data: Path, straight: Path, parallel: str, where: str, step: int, resumed: int | None
) -> None:
    """Memory runs out in one process after a checkpoint, or in both before the first checkpoint."""
    out = tmp_path / "out"
    done = run(launched(full(where, 2), in_parts(parallel=parallel), data, out))
    assert done.returncode == 0, done.stderr
    assert fields(out, "warning", "code", "step") == [("memory.micro_batch", step)]
    message = events(out, "warning")[0]["message"]
    assert lacking(message, f"step {step}", "micro_batch 4 became 2", "2 portions") == []
    assert f"{step - (resumed or 0)} steps" in message
    started = fields(out, "start", "parallel", "micro_batch", "resumed_from")
    assert started == [(parallel, 4, None), (parallel, 2, resumed)]
    assert fields(out, "stop", "reason") == [("done",)]
    assert losses(out) == pytest.approx(losses(straight), rel=1e-5)
    assert read_checkpoint(out, 20).state["room"] == {"card": None, "planned": 4, "fits": 2}


@pytest.mark.slow
def test_out_of_memory_ends_within_5_s_and_its_peer_within_15(tmp_path: Path, data: Path, straight: Path) -> None:
    """A process that waits on its GPU for the other's tensors cannot react to signals, and its machine costs money."""
    out = tmp_path / "out"
    done = run(launched(STUCK, in_parts(), data, out))
    assert done.returncode == 0, done.stderr
    full, alone, other = (float((tmp_path / name).read_text()) for name in ("full", "left-1", "left-0"))
    assert alone - full < 5
    assert other - full < 15
    assert losses(out) == pytest.approx(losses(straight), rel=1e-5)


@pytest.mark.slow
def test_with_no_smaller_micro_batch_it_ends_as_out_of_memory(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "out"
    done = run(launched(full(IN_ONE, 0), in_parts(micro_batch=2), data, out))
    assert done.returncode == OutOfMemory.exit_code, done.stderr
    assert fields(out, "start", "micro_batch") == [(2,), (1,)]
    assert len(events(out, "warning")) == 1
    ((reason, message),) = fields(out, "stop", "reason", "message")
    assert (reason, "context 16" in message) == ("out_of_memory", True)


@pytest.mark.slow
def test_another_failure_is_not_restarted_and_keeps_its_code(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "out"
    assert run(launched(NOT_A_NUMBER, in_parts(), data, out)).returncode == 3
    assert len(events(out, "start")) == 1
    assert fields(out, "stop", "reason") == [("nonfinite",)]


@pytest.mark.slow
def test_without_the_launcher_out_of_memory_ends_the_run(tmp_path: Path, data: Path) -> None:
    argv = command(in_parts(), data, tmp_path / "out")
    done = torchrun(full(IN_ONE, 2), argv, tmp_path)
    assert "exitcode  : 4" in done.stderr
    assert fields(tmp_path / "out", "stop", "reason") == [("out_of_memory",)]
    assert "micro_batch 4 of" in events(tmp_path / "out", "stop")[0]["message"]
    assert (len(events(tmp_path / "out", "start")), read_room(tmp_path / "out")) == (1, {})


def begun_anew(out: Path) -> bool:
    """Return whether the restarted trainer has taken a step."""
    kinds = [event["kind"] for event in whole_events(out)] if (out / "events.jsonl").exists() else []
    return kinds.count("start") == 2 and "step" in kinds[kinds.index("start", kinds.index("start") + 1) :]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the workers through /proc")
def test_restarted_processes_still_save_at_sigterm(tmp_path: Path, data: Path) -> None:
    """The agent signals the children of the launcher that it started, so the launcher's new children must save too."""
    out = tmp_path / "out"
    recipe = in_parts(**LONG["train"])
    recipe["eval"] |= LONG["eval"]
    launcher = subprocess.Popen(
        launched(full(f"{IN_ONE} and calls >= 3", 2), recipe, data, out), cwd=ROOT,
        env={**environment(), "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not begun_anew(out):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        found = sorted(workers(launcher.pid), key=lambda worker: worker[1])
        assert [rank for _, rank in found] == [0, 1]
        for pid, _ in found:
            os.kill(pid, signal.SIGTERM)
        assert launcher.wait(timeout=30) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
    stop = events(out)[-1]
    assert (stop["reason"], manifest(out)["latest"]) == ("signal", stop["step"])


@pytest.mark.parametrize(
    ("beginning", "fitting", "begun", "end"),
    [
        ("this one", [8, 8], 2, "micro-batch"),
        ("an earlier one", [8], 1, "micro-batch"),
        ("this one", [8, 4, 2], 3, "--set train.micro_batch=2"),
    ],
)
def test_it_restarts_only_for_less_and_twice_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beginning: str, fitting: list[int], begun: int, end: str
) -> None:
    monkeypatch.setenv(BEGINNING, "whatever was there")
    calls = []

    def full(*given: Any) -> int:
        calls.append(given)
        assert len(calls) <= begun
        note = {"planned": 16, "fits": fitting[len(calls) - 1], "step": 7, "message": "it ran out"}
        note["beginning"] = os.environ[BEGINNING] if beginning == "this one" else beginning
        (tmp_path / "room.json").write_text(json.dumps(note))
        return Restart.exit_code

    monkeypatch.setattr(launch, "_train", full)
    argv = ["--processes=2", "--recipe", "recipe.json", "--data", "data", "--out", str(tmp_path)]
    began_s = time.monotonic()
    assert launch.main(argv) == OutOfMemory.exit_code
    assert calls == [(2, argv[1:])] * begun
    if begun > 1:
        assert patience_s(tmp_path) == UNKNOWN_S, "to import torch and read the shards may take longer than any step"
    ((reason, step, message),) = fields(tmp_path, "stop", "reason", "step", "message")
    assert (reason, step, end in message) == ("out_of_memory", 7, True)
    warnings = [message for (message,) in fields(tmp_path, "warning", "message")]
    assert [lacking(message, "it ran out", "7 steps") for message in warnings] == [[]] * (begun - 1)
    passed_s = time.monotonic() - began_s
    assert all(event["elapsed_s"] <= passed_s + 0.001 for event in events(tmp_path)), "not since this was imported"


def test_a_stopped_process_restarts_only_if_another_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun stops the other processes once one has failed; that stop is not the user's request."""
    monkeypatch.setenv(BEGINNING, "the first")
    planned = {"card": "NVIDIA A100", "planned": 4}
    recipe, two = parse_recipe(in_parts()), Processes(count=2, several=True)
    setup: Any = SimpleNamespace(recipe=recipe, out=tmp_path, processes=two, planned=planned)
    state, io = State(step=3), RunIO(Reporter(tmp_path, is_first=False), None, threading.Event())
    state.plan = BatchPlan(8, 4, 1)

    def end(is_stopping: bool) -> type[TrainerError]:
        io.stop_requested = threading.Event()
        if is_stopping:
            io.stop_requested.set()
        return type(ending(setup, state, io))

    assert end(is_stopping=True) is OutOfMemory
    assert end(is_stopping=False) is Restart
    expected = {**planned, "fits": 2, "step": 3, "beginning": "the first"}
    assert read_room(tmp_path).items() >= expected.items()
    assert end(is_stopping=True) is Restart
    monkeypatch.setenv(BEGINNING, "the second")
    assert end(is_stopping=True) is OutOfMemory
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []
