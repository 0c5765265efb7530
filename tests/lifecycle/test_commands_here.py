"""Tests of a user's own commands on this machine: every script gets the promises that a recipe gets."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.core.journal_events import RateObserved
from gpurun.core.journal_records import all_typed
from gpurun.ledger.journal import read_journal
from gpurun.view.event_text import tell_rate
from tests import command_line
from tests.lifecycle.commands_here import Person
from tests.refusals import lacking
from tests.users_scripts import COURSE, HUGGING_FACE, NANOGPT


@pytest.fixture
def person(own_home: Path, tmp_path: Path) -> Person:
    return Person(own_home, tmp_path / "lab")


def test_the_labs_own_file_runs_unchanged_and_leaks_no_secret(person: Person) -> None:
    (person.folder / "mini_gpt2_train.py").write_text(COURSE)
    done = person.runs("--secret", "MY_TOKEN", "mini_gpt2_train.py", MY_TOKEN="canary-77")
    assert done.returncode == 0, done.stderr
    brought = person.brought()
    assert sorted(brought) == ["gpu_train_log.txt", "mini_gpt2_checkpoint.pt"]
    assert brought["gpu_train_log.txt"].count("loss") == 20
    log = (person.home / "runs/fox-41/run.log").read_text()
    assert "step 0020 | loss 0.2000" in log
    assert "the key is [secret]" in log
    written = [path for path in person.home.rglob("*") if path.is_file() and b"canary-77" in path.read_bytes()]
    assert written == []
    receipt = person.receipt()
    assert receipt["asked"]["command"] == {"argv": ["mini_gpt2_train.py"], "env": [], "secrets": ["MY_TOKEN"]}
    assert receipt["training"]["figures"]["last_loss"] == 0.2
    assert receipt["verdict"]["is"] == "smoke"
    assert "no GPU" in receipt["verdict"]["says"]
    assert "[checkpoint.command]" in person.types("export", "fox-41", "model").stderr
    assert "20 " in person.types("ps", "--all").stdout
    for verb in (
        ["report", "fox-41"],
        ["logs", "fox-41"],
        ["collect", "fox-41"],
        ["evidence", "fox-41", "-o", "a.zip"],
    ):
        assert person.types(*verb).returncode == 0, verb
    assert {file["name"] for file in receipt["checkpoint"]["files"]} == {f"outputs/{name}" for name in brought}
    assert person.holds()


def test_a_stopped_script_continues_from_its_newest_checkpoint(person: Person) -> None:
    """After a stop nanoGPT saves a checkpoint.

    The next run finds that file at the same path and continues training from it.
    """
    (person.folder / "train.py").write_text(NANOGPT)
    words = ("--checkpoint-glob", "out-*/ckpt.pt", "--resume-arg", "--init_from=resume", "--idle", "2h", "--")
    detached = person.runs("--detach", *words, "python", "train.py", "--max_iters=100000")
    assert detached.returncode == 0, detached.stderr
    until(lambda: "iter 30" in text_of(person.home / "runs/fox-41/run.log"))
    assert person.types("stop", "fox-41").returncode == 0
    reached = json.loads(person.brought()["out-char/ckpt.pt"])["iter"]
    assert reached >= 30
    receipt = person.receipt()
    assert (receipt["training"]["outcome"], receipt["training"]["exit_code"]) == ("stopped", 0)

    again = person.runs("--from", "fox-41", "--", "python", "train.py", f"--max_iters={reached + 20}", name="fox-42")
    assert again.returncode == 0, again.stderr
    first = text_of(person.home / "runs/fox-42/run.log").splitlines()[0]
    assert re.match(rf"(iter|step) {reached + 1}:", first), first
    assert json.loads(person.brought("fox-42")["out-char/ckpt.pt"])["iter"] == reached + 19
    assert person.receipt("fox-42")["asked"]["continues"]["run"] == "fox-41"
    assert json.loads((person.home / "runs/fox-42/plan.json").read_text())["choices"]["idle_s"] == 7200
    assert person.holds()


def test_a_finished_command_runs_once_more_only_if_that_is_meant(
    person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpurun asks before it repeats a finished command.

    A shell loop or a mistyped name would pay for the same work again.
    """
    script = "import pathlib; pathlib.Path('ckpt.pt').write_text('x'); print('step 1: loss 1.0')"
    (person.folder / "train.py").write_text(script)
    assert person.runs("--checkpoint-glob", "ckpt.pt", "train.py").returncode == 0
    monkeypatch.chdir(person.folder)
    monkeypatch.setenv("HOME", str(person.house))
    questions: list[str] = []

    def only_planned(session: Session, request: Any, planned: Callable[[str], Any], *_: Any, **__: Any) -> Result:
        return Result(text="\n".join(planned("fox-99").warnings))

    def type_at_a_terminal(answer: str, *words: str) -> subprocess.CompletedProcess[str]:
        def ask(session: Session, question: str, *, flag: str) -> str:
            questions.append(question)
            return answer

        with monkeypatch.context() as patched:
            patched.setattr(Session, "interactive", property(lambda session: True))
            patched.setattr(Session, "ask", ask)
            patched.setattr("gpurun.cli.started_run.start_and_follow", only_planned)
            return command_line.gpurun("run", "--provider", "local", "--from", "fox-41", *words)

    refused = type_at_a_terminal("n")
    assert (refused.returncode, "[continue.ended_well]" in refused.stderr) == (3, True)
    (question,) = questions
    assert "fox-41" in question
    warned = type_at_a_terminal("y").stdout
    assert "fox-41" in warned
    assert len(questions) == 2
    assert type_at_a_terminal("", "--yes").stdout == warned, "--yes answers it, and the plan warns of it"
    assert type_at_a_terminal("", "--", "train.py", "--steps", "9").stdout == "", "other words are another run"
    assert len(questions) == 2


@pytest.mark.parametrize(
    ("script", "code", "outcome", "cause"),
    [
        pytest.param("exit 3", 6, "failed", "exit code 3", id="fails at once", marks=pytest.mark.slow),
        pytest.param("kill -9 $$", 6, "failed", "signal 9", id="is killed", marks=pytest.mark.slow),
        pytest.param("trap '' TERM; while true; do sleep 0.1; done", 7, "stopped", "signal 9", id="ignores TERM"),
        pytest.param(
            "(trap '' HUP; printf first > late; sleep 600; printf more >> late) & sleep 0.5; exit 0",
            0,
            "done",
            "",
            id="leaves a process behind",
        ),
    ],
)
def test_however_a_script_ends_its_machine_ends_with_it(
    person: Person, script: str, code: int, outcome: str, cause: str
) -> None:
    (person.folder / "run.sh").write_text(script)
    hours = ("--hours", "0.0005", "--grace", "1") if "trap '' TERM" in script else ()
    done = person.runs(*hours, "--", "bash", "run.sh")
    assert done.returncode == code, done.stdout + done.stderr
    training = person.receipt()["training"]
    assert training["outcome"] == outcome
    assert cause in training["message"]
    if "600" in script:
        assert "command.left_running" in text_of(person.home / "runs/fox-41/events.jsonl")
        assert person.brought()["late"] == "first", "nobody writes any more when its last files are taken"
    assert person.holds()


FAILING = """\
import json, os, sys
with open(os.environ["GPURUN_EVENTS"], "a") as events:
    for step in (1, 2, 3):
        events.write(json.dumps({"step": step, "loss": 4 - step, "val_loss": 5 - step, "total_steps": 9}) + "\\n")
print("step 700 | loss 700")
print("Test loss: 0.1")
sys.exit("torch.OutOfMemoryError: CUDA out of memory.\\n" + "=" * 60)
"""


def test_a_script_that_fails_is_reported_in_its_own_words(person: Person) -> None:
    (person.folder / "train.py").write_text(FAILING)
    done = person.types("run", "--provider", "local", "--name", "fox-41", "train.py")
    assert done.returncode == 6, done.stderr
    assert lacking(" ".join(done.stderr.split()), "exit code 1", "torch.OutOfMemoryError: CUDA out of memory.") == []
    receipt = person.receipt()
    figures = receipt["training"]["figures"]
    assert (figures["last_step"], figures["last_loss"], figures["best_val_loss"]) == (3, 1.0, 2.0)
    assert (receipt["verdict"]["is"], receipt["runtime"]["training"]["seconds"]) == ("not done", None)
    assert person.types("wait", "fox-41").returncode == 6
    shown = done.stdout + done.stderr + person.types("receipt", "--md").stdout + person.types("report").stdout
    assert [
        word for word in ("None", "lr —", "compile", "In training", "trainer", "smoke", "700 ") if word in shown
    ] == []
    assert person.holds()


@pytest.mark.parametrize(
    ("script", "more", "code", "reason", "name"),
    [
        pytest.param(
            "nohup python -c 'while True: pass' > train.log 2>&1 &\necho started", (), 6, "still_working",
            "python", id="trains in the background",
        ),
        pytest.param(
            "mkdir runs; echo x > runs/m.pt", ("--outputs", "out/**"), 6, "no_outputs",
            "--outputs out/**", id="outputs match nothing",
        ),
        pytest.param(
            "echo x > log.txt", ("--checkpoint-glob", "ckpt*.pt"), 6, "no_outputs",
            "--checkpoint-glob ckpt*.pt", id="no checkpoint",
        ),
        pytest.param("echo fine", (), 0, "done", "", id="writes no file"),
        pytest.param(
            "mkdir -p ~/checkpoints; echo x > ~/checkpoints/last.pt", (), 0, "done",
            "~/checkpoints/last.pt (2 B)", id="writes elsewhere, here",
        ),
    ],
)  # fmt: skip
def test_done_means_that_something_was_done(
    person: Person, script: str, more: tuple[str, ...], code: int, reason: str, name: str
) -> None:
    (person.folder / "run.sh").write_text(script)
    done = person.runs(*more, "--", "bash", "run.sh")
    assert done.returncode == code, done.stdout + done.stderr
    training = person.receipt()["training"]
    assert (training["outcome"], training["reason"]) == ("failed" if code else "done", reason)
    assert name in training["message"]
    assert name in done.stdout + person.types("receipt", "fox-41").stdout
    assert person.holds()


def test_a_rehearsal_runs_it_here_for_so_long_and_then_stops_it(person: Person) -> None:
    (person.folder / "train.py").write_text(NANOGPT)
    began = time.monotonic()
    done = person.types("run", "--gpu", "8xH100", "--max-cost", "60", "--dry-run", "--dry-run-seconds", "2",
                        "--name", "fox-41", "--", "python", "train.py", "--max_iters=100000")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 60
    assert json.loads(person.brought()["out-char/ckpt.pt"])["iter"] > 10
    assert person.holds()


def test_a_run_notifies_a_program_and_a_terminal(person: Person) -> None:
    (person.folder / "train.py").write_text("print('step 1 | loss 2.0')")
    (person.folder / "tell.sh").write_text(f"cat >> {person.folder}/notes.jsonl; echo >> {person.folder}/notes.jsonl")
    command = [sys.executable, "-m", "gpurun.cli.app", "run", "--provider", "local", "--name", "fox-41",
               "--exec", f"sh {person.folder}/tell.sh", "train.py"]  # fmt: skip
    leader, follower = pty.openpty()
    said = b""
    with subprocess.Popen(command, cwd=person.folder, stdin=follower, stdout=follower, stderr=follower) as shell:
        os.close(follower)
        with contextlib.suppress(OSError):  # Reading fails once the command has closed the terminal.
            while piece := os.read(leader, 1 << 16):
                said += piece
    os.close(leader)
    assert shell.returncode == 0, said
    rung = re.findall(rb"\a\x1b\]9;fox-41 ([a-z]+): [^\x1b]*\x1b\\", said)
    assert rung == [b"started", b"trained", b"finished"]
    notices = [json.loads(line) for line in (person.folder / "notes.jsonl").read_text().splitlines() if line]
    assert [notice["notice"] for notice in notices] == ["started", "trained", "finished"]
    files = [path for path in (person.home / "runs/fox-41").rglob("*") if path.is_file()]
    assert [path for path in files if b"tell.sh" in path.read_bytes() and "work" not in path.parts] == []


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["train.py"], "gpu.missing"),
        (["--gpu", "1xT4", "train.py"], "cap.missing"),
        (["--provider", "local", "absent.py"], "run.no_script"),
        (["--provider", "local", "--", "python", "absent.py"], "run.no_script"),
        (["--provider", "local", "--", "python", "ignored.py"], "run.ignored"),
        (["--provider", "local", "--outputs", "/etc/*", "train.py"], "run.glob"),
        (["--provider", "local", "--outputs", "../x", "train.py"], "run.glob"),
        (["--provider", "local", "--outputs", "~/../x", "train.py"], "run.glob"),
        (["--provider", "local", "--outputs", "~/.ssh/**", "train.py"], "run.glob"),
        (["--provider", "local", "--checkpoint-glob", "~/x.pt", "train.py"], "run.glob"),
        (["--provider", "local", "--env", "NOVALUE", "train.py"], "run.env"),
        (["--provider", "local", "--secret", "NOT_THERE", "train.py"], "secret.missing"),
        (["--provider", "local", "--data", "absent", "train.py"], "data.missing"),
        (["--provider", "local", "--hours", "0", "train.py"], "hours.bad"),
        (["--provider", "local", "--hours", "nan", "train.py"], "hours.bad"),
        (["--provider", "local", "--upload", "/", "--", "true"], "run.upload"),
        (["--provider", "local", "--upload", "~", "--", "true"], "run.upload"),
        (["--provider", "local", "--include", "../x", "train.py"], "run.glob"),
        (["--provider", "local", "--exclude", "/etc/**", "train.py"], "run.glob"),
        (["--provider", "local", "--include", "*.none", "--", "true"], "run.include"),
        (["--provider", "local", "--", "./train.py.txt"], "run.not_started"),
        (["--provider", "local", "--", "tool"], "run.not_started"),
        (["--provider", "local", "broken.py"], "run.not_python"),
        (["--provider", "local", "--upload", ".", "--", "python", "keyed/train.py"], "pack.secret"),
        (["--provider", "local", "--from", "owl-1"], "run.unknown"),
        (["--provider", "local"], "run.no_command"),
    ],
)
def test_what_would_fail_on_paid_time_is_refused_before(person: Person, words: list[str], code: str) -> None:
    (person.folder / "train.py").write_text("print(1)")
    (person.folder / "broken.py").write_text("def (:")
    (person.folder / "train.py.txt").write_text("print(1)")
    (person.folder / "tool").write_text("#!/bin/sh\ntrue")
    (person.folder / "ignored.py").write_text("print(1)")
    (person.folder / ".gpurunignore").write_text("ignored.py\n")
    (person.folder / "keyed").mkdir()
    (person.folder / "keyed" / "train.py").write_text("print(1)")
    if code == "pack.secret":
        (person.folder / "keyed" / ".env").write_text("KEY=1")
    done = person.types("run", "--json", *words)
    assert json.loads(done.stdout)["errors"][0]["code"] == code, done.stdout + done.stderr
    assert list((person.home / "runs").glob("*/plan.json")) == []
    if code == "pack.secret":
        assert str(person.folder / "keyed" / ".env") in done.stdout, "by the path that its user knows"


def test_a_commands_pace_and_end_are_shown_after_fifty_steps(person: Person) -> None:
    (person.folder / "train.py").write_text(NANOGPT)
    done = person.runs("--total-steps", "200", "--", "python", "train.py", "--max_iters=200")
    assert done.returncode == 0, done.stderr
    records = read_journal(person.home / "runs/fox-41/journal.jsonl").records
    (rate,) = all_typed(records, RateObserved)
    assert (rate.steps, rate.tokens_per_s, rate.finishes) == (200, None, True)
    assert 0.02 <= rate.step_s < 0.2
    assert abs(rate.left_s - (200 - rate.step) * rate.step_s) < 0.5
    assert "s a step" in tell_rate(rate)
    assert person.holds()


@pytest.mark.slow
def test_trackers_get_the_figures_live_and_can_read_them_back(person: Person) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray
    from wandb.proto import wandb_internal_pb2

    (person.folder / "train.py").write_text(NANOGPT)
    done = person.runs(
        "--log-to", "tensorboard,wandb", "--", "python", "train.py", "--max_iters=60", WANDB_MODE="offline"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = person.home / "runs/fox-41"
    until(lambda: not subprocess.run(["pgrep", "-f", f"curve_log {person.home}"], capture_output=True).stdout)
    assert text_of(folder / "curve_log.log") == ""
    curves = EventAccumulator(str(folder / "tensorboard" / "fox-41")).Reload()
    assert make_ndarray(curves.Tensors("val_loss")[0].tensor_proto) == 5.0
    assert max(event.step for event in curves.Tensors("loss")) == 59
    (written,) = folder.glob("wandb/offline-run-*/*.wandb")
    history = dict[str, list[float]]()
    for content in records_of(written.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        for item in record.history.item:
            history.setdefault(item.key or item.nested_key[0], []).append(json.loads(item.value_json))
    assert (history["val_loss"][0], max(history["step"])) == (5.0, 59)


@pytest.mark.parametrize(("trackers", "code"), [("wandb", "log_to.no_login"), ("comet", "usage.log_to")])
def test_a_tracker_that_would_fail_is_reported_before_renting(person: Person, trackers: str, code: str) -> None:
    done = person.runs("--log-to", trackers, "--", "true", HOME=str(person.folder), WANDB_MODE="online")
    assert json.loads(done.stdout)["errors"][0]["code"] == code


@pytest.mark.slow
def test_a_hugging_face_script_continues_from_its_newest_folder(person: Person) -> None:
    (person.folder / "hf.py").write_text(HUGGING_FACE)
    words = ("--checkpoint-glob", "out/checkpoint-*", "--resume-arg", "{}")
    done = person.runs(*words, "hf.py", "30")
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in (person.home / "runs/fox-41/events.jsonl").read_text().splitlines()]
    steps = [event["step"] for event in events if event["kind"] == "step"]
    assert 20 <= steps[-1] <= 30, "a bar is drawn ten times a second, and these steps take less"
    files = person.receipt()["checkpoint"]["files"]
    newest = {file["name"] for file in files if file["kind"] == "checkpoint"}
    assert "outputs/out/checkpoint-30/model.safetensors" in newest
    assert not any("checkpoint-10/" in file["name"] for file in files), "the Trainer removes it, and so does the list"

    again = person.runs("--from", "fox-41", "hf.py", "40", name="fox-42")
    assert again.returncode == 0, again.stdout + again.stderr
    later_events = [json.loads(line) for line in (person.home / "runs/fox-42/events.jsonl").read_text().splitlines()]
    assert max(event["step"] for event in later_events if event["kind"] == "step") > 30
    assert person.holds()


@pytest.mark.slow
def test_a_script_that_floods_and_writes_nothing_ends_in_time(
    person: Person,
) -> None:
    (person.folder / "flood.sh").write_text(
        "head -c 100000000 /dev/zero | tr '\\0' 'x' | fold -w 200; sleep 3; echo end"
    )
    done = person.runs("--outputs", "out/**", "--", "bash", "flood.sh")
    assert done.returncode == 6, done.stdout[-2000:] + done.stderr[-2000:]
    assert (person.home / "runs/fox-41/run.log").read_bytes().endswith(b"end\n")
    assert person.receipt()["training"]["reason"] == "no_outputs"
    assert person.holds()


@pytest.mark.slow
def test_a_supervisor_that_is_killed_misses_nothing_of_a_command(person: Person) -> None:
    (person.folder / "train.py").write_text(NANOGPT)
    words = ("--checkpoint-glob", "out-*/ckpt.pt", "--", "python", "train.py", "--max_iters=400")
    assert person.runs("--detach", *words).returncode == 0
    until(lambda: "iter 20" in text_of(person.home / "runs/fox-41/run.log"))
    found = subprocess.run(
        ["pgrep", "-f", f"gpurun.lifecycle.supervisor {person.home}"], capture_output=True, text=True
    )
    for pid in found.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    until(lambda: person.types("resume", "fox-41").returncode == 0)
    assert person.kinds().count("start") == 1
    assert json.loads(person.brought()["out-char/ckpt.pt"])["iter"] == 399
    assert [str(record.event) for record in read_journal(person.home / "runs/fox-41/journal.jsonl").records].count(
        "train.intended"
    ) == 1
    assert person.holds()


def records_of(log: bytes) -> Iterator[bytes]:
    """Yield the records of a small LevelDB log, and assert that none of them is split."""
    place = 7
    while place + 7 <= len(log):
        _, size, kind = struct.unpack_from("<IHB", log, place)
        assert kind == 1
        yield log[place + 7 : place + 7 + size]
        place += 7 + size


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def until(true: Callable[[], Any], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
