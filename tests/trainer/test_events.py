"""Tests that events.jsonl consists of whole lines, even after a process was killed while it wrote one."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.tiny_training import ROOT, events
from trainer.events import Reporter


def test_a_torn_last_line_does_not_spoil_the_next_event(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"kind":"step"}\n{"kind":"st')
    Reporter(tmp_path, is_first=True).emit("eval", 3, val_loss=1.0)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert lines[:2] == ['{"kind":"step"}', '{"kind":"st']
    assert lines[2].startswith('{"kind":"eval"')


def test_what_is_not_a_number_is_null_in_json(tmp_path: Path) -> None:
    Reporter(tmp_path, is_first=True).emit("step", 1, loss=math.nan, lr=math.inf, grad_norm=1.5)
    (event,) = events(tmp_path)
    assert (event["loss"], event["lr"], event["grad_norm"]) == (None, None, 1.5)


def test_the_first_process_reports_but_any_says_why_it_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = Reporter(tmp_path, is_first=True), Reporter(tmp_path, is_first=False)
    second.emit("step", 1)
    second.say("nothing")
    second.stop(1, "done", "", 0.0, None)
    assert events(tmp_path) == []
    assert capsys.readouterr().out == ""
    second.stop(1, "error", "a refusal, which the first process reports", 0.0, None)
    assert events(tmp_path) == []
    second.stop(1, "out_of_memory", "too large", 0.0, None, alone=True)
    first.stop(1, "error", "the other process was lost", 0.0, None, alone=True)
    assert [(e["kind"], e["reason"]) for e in events(tmp_path)] == [("stop", "out_of_memory")]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_only_the_process_that_failed_first_says_why(tmp_path: Path, order: tuple[int, ...]) -> None:
    for _ in range(2):
        reporters = [Reporter(tmp_path, is_first=rank == 0) for rank in range(3)]
        for rank, reason in zip(order, ("out_of_memory", "error", "error"), strict=True):
            reporters[rank].stop(1, reason, "connection closed", 0.0, None, alone=True)
    assert [event["reason"] for event in events(tmp_path)] == ["out_of_memory", "out_of_memory"]


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Reporter(tmp_path, is_first=True).sample(1, "a", "a\x1b[2Jb\nc", "samples/1.txt")
    assert "\x1b" not in capsys.readouterr().out
    assert events(tmp_path)[0]["text"] == "a\x1b[2Jb\nc"


def test_the_log_is_not_doubled_when_standard_output_is_the_log(tmp_path: Path) -> None:
    code = "import sys, pathlib; from trainer.events import Reporter; "
    code += "Reporter(pathlib.Path(sys.argv[1]), is_first=True).say('once \\u2192 é')"
    with (tmp_path / "trainer.log").open("ab") as log:
        argv = [sys.executable, "-c", code, str(tmp_path)]
        subprocess.run(argv, cwd=ROOT, stdout=log, env={"PYTHONIOENCODING": "ascii"}, check=True)
    assert (tmp_path / "trainer.log").read_text() == "once ? ?\n"
