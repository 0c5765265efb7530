"""Tests of standard output: what a reader gets, and what happens if the reader is gone or the device is full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from gpurun.cli.app import build_app, run_app
from gpurun.cli.render import OutputLost
from gpurun.core.clock import SystemClock
from gpurun.core.paths import Home
from gpurun.lifecycle.artifacts import log_copy
from gpurun.lifecycle.artifacts.log_copy import LocalCopy
from tests.lifecycle.tiny_runs import make_run
from tests.unit.report_samples import opened_run

LOUD = [
    ["ps", "--all"],
    ["ps", "--all", "--json"],
    ["logs", "fox-41"],
    ["logs", "fox-41", "--json"],
    ["recipes", "show"],
    ["pack", ".", "-o", "-"],
    ["--version"],
    ["train", "--help"],
]


@pytest.fixture
def folder(own_home: Path, tmp_path: Path) -> Path:
    """Return a folder to pack. The home also has a run whose log is larger than any buffer."""
    run = make_run(Home(own_home), "fox-41")
    run.log.write_bytes(b"step 1 loss 2.0\n\x1b]0;own\x07step 2\xff\n" * 5_000)
    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "a.bin").write_bytes(os.urandom(200_000))
    return shards


def gpurun(words: list[str], folder: Path, out: int, **environment: str) -> tuple[int, str]:
    """Run a command line with this file descriptor as standard output; return its exit code and standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "gpurun", *words],
        cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.fixture
def gpurun_here(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function like `gpurun` that runs in this process, and closes the stream as Python does at exit."""
    monkeypatch.chdir(folder)

    def run(words: list[str], out: int) -> tuple[int, str]:
        with open(out, "w", closefd=False) as stream, pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            code = in_process(words, patch)
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize("words", LOUD, ids=" ".join)
def test_a_reader_that_has_left_ends_it_quietly(words: list[str], gpurun_here: Any) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    assert gpurun_here(words, writing) == (0, "")
    os.close(writing)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device here that is always full")
@pytest.mark.parametrize("words", LOUD, ids=" ".join)
def test_a_full_device_is_told_in_a_sentence(words: list[str], gpurun_here: Any) -> None:
    with open("/dev/full", "w") as full:
        code, said = gpurun_here(words, full.fileno())
    assert (code, "[output.lost]" in said) == (4, True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device here that is always full")
def test_python_reports_no_leftover_buffer_at_its_end(folder: Path) -> None:
    with open("/dev/full", "w") as full:
        code, said = gpurun(["ps", "--all"], folder, full.fileno())
    assert (code, "[output.lost]" in said, "Traceback" in said) == (4, True, False)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_encoding_lacks_is_a_question_mark(encoding: str, folder: Path, own_home: Path) -> None:
    Home(own_home).run("fox-41").log.write_text("caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{GRINNING FACE}\n")
    with (folder / "said").open("wb") as said:
        assert gpurun(["logs", "fox-41"], folder, said.fileno(), PYTHONIOENCODING=encoding) == (0, "")
    assert (folder / "said").read_bytes() == (b"caf? ?\n" if encoding == "ascii" else b"caf\xe9 ?\n")


def test_the_findings_exit_code_outranks_a_reader_that_left(folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code, said = gpurun(["receipt", "nosuch"], folder, writing)
    assert (code, "[run.unknown]" in said) == (2, True)
    os.close(writing)


def in_process(words: list[str], patch: pytest.MonkeyPatch) -> int:
    patch.setattr(sys, "argv", ["gpurun", *words])
    return run_app(build_app())


def test_logs_json_is_json_line_by_line_and_the_envelope_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_process(["logs", "fox-41", "--json"], monkeypatch) == 0
    *lines, envelope = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert {line["stream"] for line in lines} == {"log"}
    own_words = ["step 1 loss 2.0", "\x1b]0;own\x07step 2\N{REPLACEMENT CHARACTER}"]
    assert [line["data"]["text"] for line in lines[:2]] == own_words
    assert (len(lines), envelope["command"], envelope["ok"]) == (10_000, "logs", True)


@pytest.mark.parametrize("end", [b"\n", b"\r"], ids=["lines", "one line that is drawn again"])
@pytest.mark.parametrize("form", [[], ["--json"], ["--raw"]], ids=" ".join)
def test_a_log_is_never_held_whole(
    form: list[str], end: bytes, folder: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (b"x" * 999 + end) * 30_000
    Home(own_home).run("fox-41").log.write_bytes(lines)
    with open(os.devnull, "w") as nowhere:
        monkeypatch.setattr(sys, "stdout", nowhere)
        tracemalloc.start()
        try:
            assert in_process(["logs", "fox-41", *form], monkeypatch) == 0
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak_bytes < len(lines)


def test_a_log_comes_out_as_it_went_in_wherever_its_lines_end(
    folder: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    log = b"a\n" + b"x" * 3_000_000 + b"\n\n" + b"line\n" * 30_000 + b"half"
    Home(own_home).run("fox-41").log.write_bytes(log)
    assert in_process(["logs", "fox-41", "--raw"], monkeypatch) == 0
    assert capfdbinary.readouterr().out == log
    assert in_process(["logs", "fox-41", "--json"], monkeypatch) == 0
    *lines, _ = capfdbinary.readouterr().out.splitlines()
    assert "\n".join(json.loads(line)["data"]["text"] for line in lines).encode() == log


def test_what_a_flood_says_after_its_copy_was_cut_is_followed(
    folder: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log_copy, "HEAD_BYTES", 40)
    run = Home(own_home).run("fox-41")
    run.log.unlink()
    copy, said = LocalCopy(run.log, most_bytes=100, head_bytes=40), iter(range(30))

    def still_driven(lock: Path) -> str | None:
        for number in said:
            copy.append(b"%09d\n" % number)
            return "its supervisor"
        return None

    monkeypatch.setattr("gpurun.cli.commands.logs.holder_of", still_driven)
    monkeypatch.setattr(SystemClock, "sleep", lambda clock, seconds: None)
    assert in_process(["logs", "fox-41", "-f"], monkeypatch) == 0
    assert capsys.readouterr().out.splitlines() == [f"{number:09d}" for number in range(30)]


def test_where_there_is_no_log_the_way_on_is_told(
    folder: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Home(own_home).run("fox-41").log.unlink()
    assert in_process(["logs", "fox-41"], monkeypatch) == 0
    assert "gpurun attach fox-41" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name"),
    [(["logs", "fox-41", "--raw"], "logs.two_outputs"), (["pack", ".", "-o", "-"], "pack.two_outputs")],
)
def test_bytes_and_json_do_not_share_it(
    words: list[str], name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_process([*words, "--json"], monkeypatch) == 2
    assert json.loads(capsys.readouterr().out)["errors"][0]["code"] == name


def test_ctrl_c_leaves_an_envelope_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpurun.cli.run_control.find_meant_run", interrupted)
    assert in_process(["sample", "fox-41", "--prompt", "def ", "--json"], monkeypatch) == 130
    answer = json.loads(capsys.readouterr().out)
    assert (answer["exit_code"], answer["errors"][0]["code"]) == (130, "interrupted")


@pytest.mark.parametrize("device", [BrokenPipeError(), OSError(28, "No space left on device")], ids=["pipe", "device"])
@pytest.mark.parametrize("flags", [["--json"], []], ids=["json", "plain"])
def test_a_run_without_a_reader_continues_and_its_code_says_so(
    flags: list[str], device: OSError, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 0 would claim that the run is done and its machine destroyed, while the run still continues."""

    def lost(*given: object) -> None:
        raise OutputLost(device) if flags else device

    opened_run(Home(own_home).prepare(), "fox-41")
    monkeypatch.setattr("gpurun.cli.panes.put" if flags else "gpurun.cli.session.Session.say", lost)
    monkeypatch.setattr("gpurun.cli.viewer.start_supervisor", lambda *given: None)
    assert in_process(["attach", "fox-41", *flags], monkeypatch) == 8
