"""Tests of output without a terminal: one line per event, fewer metrics, a sign of life, and no heavy imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.refusals import lacking

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))
import view_samples as samples

from gpurun.core.journal_records import Event
from gpurun.core.trainer_events import TrainerEvent
from gpurun.view.plain_lines import PlainView

NOW = samples.NOW


def step(number: int, wall: float) -> TrainerEvent:
    return samples.make_events({"kind": "step", "step": number, "wall": wall, "loss": 3.0, "lr": 1e-3})[0]


def test_every_record_is_a_line_with_a_utc_stamp() -> None:
    view = PlainView()
    records = [*samples.story(NOW, samples.usd(0)), *samples.ending(NOW)]
    lines = view.update(records, [], NOW)
    assert len(lines) == len(records)
    assert all(re.match(r"2027-01-15T\d\d:\d\d:\d\dZ  \w+ +\S", line) for line in lines)


def test_metrics_come_at_most_every_thirty_seconds() -> None:
    view = PlainView()
    lines = [line for t in range(600) for line in view.update([], [step(t, NOW + t)], NOW + t)]
    assert len(lines) == 20


def test_the_last_figures_come_out_before_the_stop() -> None:
    view = PlainView()
    view.update([], [step(1, NOW)], NOW)
    stop = {"kind": "stop", "step": 120, "reason": "done", "wall": NOW + 2}
    lines = view.update([], [step(120, NOW + 1), *samples.make_events(stop)], NOW + 2)
    assert "step 120" in lines[0]
    assert "ended: done" in lines[1]


def test_who_attaches_later_reads_records_and_events_in_order() -> None:
    begun = samples.NOW - 20_000
    records = [*samples.story(begun, samples.usd(0)), *samples.ending(begun)]
    stop = {"kind": "stop", "step": 120, "reason": "done", "wall": begun + 10_991}
    events = [step(120, begun + 10_990), *samples.make_events(stop)]
    stamps = [line[:20] for line in PlainView().update(records, events, NOW)]
    assert len(stamps) == len(records) + 2
    assert stamps == sorted(stamps)


def test_a_long_history_shows_the_newest_and_how_much_is_hidden() -> None:
    began = {"kind": "start", "wall": NOW - 1000, "device": "cuda", "steps": 200}
    evals = samples.make_events(
        *({"kind": "eval", "step": s, "wall": NOW - 900 + s, "val_loss": 9.0 - s / 100} for s in range(200))
    )
    view = PlainView()
    lines = view.update([], [*samples.make_events(began), *evals], NOW)
    assert "device cuda" in lines[0]
    assert "160 lines" in lines[1]
    assert "step 199  val loss 7.010" in lines[-1]
    assert view.update([], [step(200, NOW), *evals], NOW) != [], "the first step is told at once"
    view.update([], [step(201, NOW)], NOW)
    held, left_out = view.rest(NOW)
    assert "step 201" in held
    assert "200 lines" in left_out
    assert view.rest(NOW) == []


def test_silence_is_broken_every_minute() -> None:
    view = PlainView()
    view.update([samples.record(1, Event.SHIP_INTENDED, NOW, {})], [], NOW)
    lines = [line for t in range(1, 181) for line in view.update([], [], NOW + t)]
    assert len(lines) == 3
    assert lacking(lines[0], "ship", "1 m 00 s") == []


def test_a_wall_clock_that_jumps_back_silences_nothing() -> None:
    view = PlainView()
    view.update([], [step(1, NOW)], NOW)
    assert view.update([], [step(2, NOW)], NOW - 86_400)
    view.update([], [], NOW - 86_400)
    assert view.update([], [], NOW - 86_400 + 61)


def test_tables_and_screens_need_neither_rich_nor_pydantic() -> None:
    """Only views that read journals may import pydantic: plain lines, the live view and the audit's table."""
    code = (
        "import sys\nfrom gpurun.view import envelope, error_text, list_tables\n"
        "from gpurun.view import plan_screen, receipt_screen\n"
        "sys.exit(any(name in sys.modules for name in ('rich', 'pydantic', 'torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_machine_that_does_not_answer_is_not_said_to_work() -> None:
    """gpurun once said "still at it" for hours about a silent machine that was paid for."""
    view = PlainView()
    message = "the machine k3x9 has not answered since 04:50 UTC; runpod says that it runs; it costs $2.49/h"
    silent = samples.record(9, Event.INCIDENT, NOW, {"code": "machine.silent", "message": message})
    heard = samples.record(10, Event.INCIDENT, NOW + 90, {"code": "machine.heard", "message": "it answers again"})
    view.update([silent], [], NOW)
    (line,) = view.update([], [], NOW + 61)
    assert line.endswith(message)
    view.update([heard], [], NOW + 90)
    (line,) = view.update([], [], NOW + 151)
    assert "1 m 01 s" in line
    assert message not in line
