"""Tests of the live view: its words in each phase, its fit to any terminal, and that it needs a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import termios
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))
import view_samples as samples

from gpurun.cli.keyboard import Keyboard
from gpurun.core.gpu_reading import GpuReading, read_gpus, write_gpus
from gpurun.core.journal_records import Event
from gpurun.core.money import usd
from gpurun.core.paths import Home, RunFolder
from gpurun.core.trainer_events import make_event
from gpurun.ledger.spending import spent_by
from gpurun.ledger.write_receipt import read_receipt
from gpurun.lifecycle.artifacts import log_copy
from gpurun.lifecycle.artifacts.log_copy import LocalCopy
from gpurun.readers.run_reader import RunReader
from gpurun.view.event_text import APART, BEGINS, ENDS, GOES_ON, tell_record
from gpurun.view.live_layout import live_screen
from gpurun.view.live_state import Screen
from gpurun.view.style import Style, probe
from gpurun.view.styled_text import cells, render
from tests.refusals import lacking
from tests.unit.ledger_samples import RATE, CloudRun

OLD = "these figures are old"


def drawn(screen: Screen, now: float, width: int = 100, height: int = 30, *, helps: bool = False) -> str:
    style = Style(width=width, height=height)
    return render(live_screen(screen, style, now=now, keys=True, helps=helps), style)


@pytest.mark.parametrize("width", [40, 41, 60, 79, 80, 95, 96, 120, 300])
@pytest.mark.parametrize("height", [5, 12, 17, 18, 24, 30, 60])
def test_it_fits_any_terminal(width: int, height: int) -> None:
    blank = Screen(samples.plan(), spent_by), samples.NOW
    for screen, now in (samples.rented_screen(), samples.local_screen(), blank):
        for helps in (False, True):
            lines = drawn(screen, now, width, height, helps=helps).splitlines()
            assert len(lines) < height
            assert max(cells(one) for one in lines) <= width


@pytest.mark.parametrize("count", [3, 12, 60])
@pytest.mark.parametrize("height", [24, 40])
def test_a_sweep_shows_a_row_per_trial_and_marks_the_best(count: int, height: int) -> None:
    screen, now = samples.rented_screen()
    trials = [
        {
            "kind": "trial", "trial": number, "params": {"optim.lr": f"{number}e-4"}, "step": number, "steps": 60,
            "seconds": 10.0, "state": "running" if number == count else "pruned" if number % 3 == 0 else "done",
            "result": 5 - number / 100,
        }
        for number in range(1, count + 1)
    ]  # fmt: skip
    screen.update((), [event for fields in trials if (event := make_event(fields))], ())
    best = max(number for number in range(1, count) if number % 3)
    lines = drawn(screen, now, 80, height).splitlines()
    assert len(lines) < height
    assert max(cells(line) for line in lines) <= 80
    table = [line for line in lines if re.match(r" {4}\d{3}  ", line)]
    assert "running" in table[0]
    assert f"{best:03d}  best " in table[1]
    left = [line for line in lines if line.strip().startswith("and ")]
    assert len(table) + (int(left[0].split()[1]) if left else 0) == count
    assert bool(left) is (len(table) < count)


def test_the_cards_are_shown_in_training_and_not_if_unknown() -> None:
    screen, now = samples.rented_screen()
    assert "94 %    61 of 80 GiB    71 °C    608 W" in drawn(screen, now)
    screen.update((), (), (), gpus=GpuReading(now + 9, 8, 90, None, None, 66, 4870))
    assert lacking(drawn(screen, now), "90 %    66 °C    4 870 W", "8 cards") == []
    screen.update((), (), ())
    assert " gpu" not in drawn(screen, now)


def test_card_figures_are_read_while_fresh_whatever_the_file_has(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    cards = [
        {"use_percent": use, "memory_mib": 1000 * use, "memory_of_mib": 81_920, "celsius": use, "watts": 400}
        for use in (10, 31)
    ]
    assert read_gpus(folder, 100.0) is None
    write_gpus(folder, 100.0, cards)
    assert read_gpus(folder, 110.0) == GpuReading(100.0, 2, 20, 31_000, 81_920, 31, 800)
    assert read_gpus(folder, 140.0) is None
    write_gpus(folder, 150.0, [dict.fromkeys(cards[0])])
    assert read_gpus(folder, 150.0) == GpuReading(150.0, 1, None, None, None, None, None)
    for broken in ("", "[]", '{"wall": 150, "cards": [3]}', '{"wall": "x", "cards": []}'):
        folder.gpus.write_text(broken)
        assert read_gpus(folder, 150.0) is None


def test_keys_are_heard_without_echo_and_the_terminal_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    with os.fdopen(follower, "rb", buffering=0) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())
        before, keyboard = termios.tcgetattr(follower), Keyboard()
        keyboard.open()
        os.write(leader, b"q?")
        typed = select.poll()
        typed.register(follower, select.POLLIN)
        assert typed.poll(10_000)
        assert (keyboard.is_open, keyboard.pressed(), keyboard.pressed()) == (True, "q?", "")
        assert not termios.tcgetattr(follower)[3] & termios.ECHO
        keyboard.close()
        assert termios.tcgetattr(follower) == before
        assert not keyboard.is_open
        monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp() + 1)
        keyboard.open()
        assert not keyboard.is_open, "another's: to change it would stop a process in the background"
    os.close(leader)


def test_every_journal_event_has_words_and_a_place() -> None:
    assert {*BEGINS, *GOES_ON, *ENDS, *APART} == {str(event) for event in Event}
    for event in Event:
        assert tell_record(samples.record(1, event, 0.0, {}))


def test_money_runs_only_from_create_sent_to_death_proven() -> None:
    begun = samples.NOW - 20_000
    screen = Screen(samples.plan(), spent_by)
    screen.update(samples.story(begun, usd("2.49")), [], [])
    assert screen.spent(begun + 1 + 3600) == usd("2.49")
    screen.update(samples.ending(begun), [], [])
    assert screen.spent(samples.NOW) == screen.spent(samples.NOW + 9_999)
    assert screen.spent(samples.NOW) == usd("7.711392")  # 11,149 s at $2.49/h, rounded up


def test_a_refused_create_is_free_and_a_dearer_machine_is_dearer() -> None:
    screen = Screen(samples.plan(), spent_by)
    intended = samples.record(1, Event.CREATE_INTENDED, 0.0, samples.INTENT)
    screen.update([intended, samples.record(2, Event.CREATE_REFUSED, 1.0, {})], [], [])
    assert screen.spent(5000.0) == usd(0)
    observed = {"instance": {"rate_micros_per_hour": usd("4.98")}}
    screen.update([intended, samples.record(3, Event.CREATE_OBSERVED, 2.0, observed)], [], [])
    assert screen.spent(3600.0) == usd("4.98")


def test_a_duplicate_is_paid_for_like_the_machine_that_was_kept() -> None:
    begun = samples.NOW - 20_000
    screen = Screen(samples.plan(), spent_by)
    twice = samples.record(4, Event.INCIDENT, begun + 5, {"code": "create.duplicate", "message": "a second one"})
    screen.update([*samples.story(begun, usd("2.49"))[:3], twice], [], [])
    assert screen.spent(begun + 1 + 3600) == usd("4.98")


@pytest.mark.parametrize("story", ["plain", "set back", "cheaper once ready", "dearer once ready"])
def test_what_it_says_was_spent_is_what_the_receipt_says(tmp_path: Path, story: str) -> None:
    run = CloudRun(Home(tmp_path))
    rate = {"cheaper once ready": RATE // 2, "dearer once ready": RATE + 7}.get(story)
    run.write(run.opened(), run.intended(), run.created(rate_micros_per_hour=None if rate else RATE))
    run.clock.jump_wall(-1800 if story == "set back" else 0)
    if rate:
        ready = {"id": run.instance_id, "instance": run.instance(rate_micros_per_hour=rate), "facts": {}, "seconds": 1}
        run.clock.sleep(108)
        run.write((Event.READY_OBSERVED, ready)).play(run.death())
    else:
        run.play(run.through_training(), run.death())
    run.settle()
    screen = Screen(samples.plan(offer=samples.offer(rate_micros_per_hour=RATE, billing_unit_s=60)), spent_by)
    screen.update(run.journal.records, [], [])
    receipt_cost = read_receipt(run.home, run.folder).predicate["cost"]
    assert screen.spent(run.clock.wall()) == receipt_cost["upper_bound_micros"]


def test_it_shows_the_offer_taken_when_the_first_is_refused() -> None:
    first = samples.candidate(samples.offer(), "7.97", "8.40", "11.23")
    second = samples.candidate(
        samples.offer("lambda", region="us-west-3", rate_micros_per_hour=usd("3.29"), billing_unit_s=60),
        "9",
        "10",
        "11.90",
    )
    screen = Screen(samples.plan(candidates=(first, second)), spent_by)
    dearer = {"offer": second.offer.model_dump(mode="json"), "provider": "lambda", "billing_unit_s": 60}
    dearer["rate_micros_per_hour"] = second.offer.rate_micros_per_hour
    notes = [
        (Event.CREATE_INTENDED, samples.INTENT | {"offer": first.offer.model_dump(mode="json"), "provider": "runpod"}),
        (Event.CREATE_REFUSED, {"reason": "no_capacity"}),
        (Event.CREATE_INTENDED, samples.INTENT | dearer),
        (Event.CREATE_OBSERVED, {"instance": {"id": "i-1", "rate_micros_per_hour": None}}),
    ]
    screen.update([samples.record(i, event, 0.0, data) for i, (event, data) in enumerate(notes, 1)], [], [])
    seen = drawn(screen, 3600.0)
    assert "lambda 1×H100 80G us-west-3" in seen
    record = samples.record(5, Event.CREATE_INTENDED, 0.0, notes[2][1])
    assert lacking(tell_record(record), "lambda", "1×H100", "us-west-3", "$3.29/h") == []
    assert "runpod" not in seen
    assert "$3.29 now" in seen
    assert "worst $11.90" in seen
    assert screen.spent(3601.0) == screen.spent(3660.0), "it is billed by the minute there"


def test_what_it_says_in_words() -> None:
    screen, now = samples.rented_screen()
    assert "RUNNING" in drawn(screen, now)
    assert "run ●" in drawn(screen, now)
    screen.update([samples.record(9, Event.STOP_REQUESTED, now, {"how": "save", "by": "user"})], [], [])
    assert "STOPPING" in drawn(screen, now)
    failed = {"step": "watch", "message": "the trainer ended with nonfinite"}
    screen.update([samples.record(10, Event.STEP_FAILED, now, failed)], [], [])
    assert "run ✘" in drawn(screen, now)
    assert "nonfinite" in drawn(screen, now)


def closed(outcome: str, exit_code: int, files: list[dict[str, object]]) -> str:
    """Return the last screen of a run that had saved step 2250 and downloaded these files."""
    screen, now = samples.rented_screen()
    notes = [
        (Event.TRAIN_OBSERVED, {"outcome": outcome, "reason": outcome, "message": "the instance is gone"}),
        (Event.COLLECT_OBSERVED, {"files": files, "missing": []}),
        (Event.DEATH_PROVEN, {"teardown": "destroyed", "reads": 3}),
        (Event.RUN_CLOSED, {"exit_code": exit_code}),
    ]
    screen.update([samples.record(10 + i, event, now, data) for i, (event, data) in enumerate(notes)], [], [])
    return drawn(screen, now, width=100, height=40)


def test_a_lost_training_has_no_tick_and_lost_files_are_not_here() -> None:
    seen = closed("lost", 6, samples.checkpoint_files(2000))
    assert "run ✘" in seen
    assert re.search("step 2 250, [^✔·]*· step 2 000, here ✔", seen), "the newest is lost, the one before is here"
    assert "the instance is gone" in seen
    assert "here ✔" not in closed("lost", 6, samples.checkpoint_files(2250)[:2])


def test_a_training_stopped_before_its_last_step_is_not_done() -> None:
    seen = closed("stopped", 0, samples.checkpoint_files(2250))
    assert "DONE" not in seen
    assert "STOPPED" in seen
    assert "saved  step 2 250, here ✔" in seen


def test_figures_of_a_machine_no_longer_heard_are_called_old() -> None:
    screen, now = samples.rented_screen()
    screen.update([], [], [], heard_wall=now - 10)
    assert OLD not in drawn(screen, now)
    assert lacking(drawn(screen, now + 3590), "1 h 00 m", OLD) == []
    screen.update([samples.record(10, Event.TRAIN_OBSERVED, now, {"outcome": "done"})], [], [], heard_wall=now - 10)
    assert OLD not in drawn(screen, now + 3590), "of one that has ended nothing more is expected"


def test_when_a_word_came_is_known_to_whoever_attaches_later(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert RunReader(folder).read().heard_wall is None
    folder.events.write_bytes(b'{"kind": "step", "step": 1}\n')
    os.utime(folder.events, (samples.NOW, samples.NOW))
    assert RunReader(folder).read().heard_wall == samples.NOW


@pytest.mark.parametrize("width", [40, 50, 80])
def test_how_long_it_still_takes_is_never_cut(width: int) -> None:
    screen, now = samples.rented_screen()
    screen.update([], samples.make_events({"kind": "step", "step": 4000, "step_s": 100.25, "loss": 3.0}), [])
    assert "eta 21 h 23 m\n" in drawn(screen, now, width)


def test_a_progress_bar_over_itself_is_one_line_of_the_log(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.log.write_bytes(b"a\r\n 10%|#\r 20%|##\r100%|#####\nb\n")
    screen = Screen(samples.plan(), spent_by)
    screen.update([], [], RunReader(folder).read().log_lines)
    assert list(screen.log) == ["a", "100%|#####", "b"]


def test_a_flood_is_shown_on_after_its_copy_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_copy, "HEAD_BYTES", 40)
    folder = RunFolder(tmp_path)
    copy, reader = LocalCopy(folder.log, most_bytes=100, head_bytes=40), RunReader(folder)
    shown: list[bytes] = []
    for number in range(30):
        copy.append(b"%09d\n" % number)
        shown += reader.read().log_lines
    assert shown == [b"%09d" % number for number in range(30)]


def test_an_exit_code_of_nine_is_in_the_header_in_capitals() -> None:
    screen = Screen(samples.plan(), spent_by)
    screen.update([samples.record(1, Event.RUN_CLOSED, samples.NOW, {"exit_code": 9})], [], [])
    assert "MAY BE BILLING" in drawn(screen, samples.NOW)


def test_a_pipe_a_dumb_terminal_no_color_and_c_get_no_escapes() -> None:
    class Tty(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    good = {"TERM": "xterm-256color", "LANG": "C.UTF-8", "COLUMNS": "90"}
    assert probe(Tty(), environment=good) == Style(width=90, height=24, color=True, unicode=True, redraw=True)
    for bad in ({"TERM": "dumb"}, {"NO_COLOR": "1"}, {"LC_ALL": "C"}):
        style = probe(Tty(), environment={**good, **bad})
        assert (style.color, style.redraw) == (False, False)
    never = probe(Tty(), color="never", environment=good)
    assert (never.color, never.redraw) == (False, False)
    piped = probe(io.StringIO(), environment=good)
    assert (piped.color, piped.redraw) == (False, False)
    forced = probe(io.StringIO(), color="always", environment=good)
    assert (forced.color, forced.redraw) == (True, False)
    assert not probe(Tty(), environment={**good, "LC_ALL": "C"}).unicode


_SHOW = """
import sys
sys.path.insert(0, {golden!r})
import view_samples as samples
from gpurun.view.live_window import LiveWindow
from gpurun.view.styled_text import render
from gpurun.view.live_layout import live_screen
from gpurun.view.style import probe
screen, now = samples.rented_screen()
style = probe(sys.stdout)
if style.redraw:
    with LiveWindow(sys.stdout, style) as window:
        for tick in range(3):
            window.show(screen, now=now + tick)
else:
    print(render(live_screen(screen, style, now=now), style))
"""


def _show(environment: dict[str, str], *, terminal: bool) -> bytes:
    script = _SHOW.format(golden=str(Path(__file__).parents[1] / "golden"))
    leader, follower = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=follower if terminal else subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "LANG": "C.UTF-8", **environment},
    )
    os.close(follower)
    if not terminal:
        return child.communicate()[0]
    written = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # Linux reports EIO when the other side is closed.
            break
        if not chunk:
            break
        written += chunk
    os.close(leader)
    assert child.wait() == 0
    return written


def test_a_real_terminal_redraws_in_place_and_gets_its_cursor() -> None:
    written = _show({}, terminal=True)
    assert written.count(b"RUNNING") >= 3
    assert written.rindex(b"\x1b[?25h") > written.rindex(b"RUNNING")


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"LC_ALL": "C"}], ids=str)
def test_no_byte_of_escape_where_none_is_wanted(environment: dict[str, str]) -> None:
    assert b"\x1b" not in _show(environment, terminal=True)


def test_no_byte_of_escape_in_a_pipe() -> None:
    written = _show({}, terminal=False)
    assert b"\x1b" not in written
    assert b"\r" not in written


def test_the_worst_case_of_a_later_machine_is_that_of_its_own_lease() -> None:
    """A later machine has a shorter lease than the first plan gave to its offer, as less of the cap is left."""
    screen, now = samples.rented_screen()
    leg = {"number": 2, "plan": "legs/1.json", "plan_sha256": samples.SHA, "step": 2250}
    leg |= {"spent_micros": usd("4.31"), "left_micros": usd("7.69")}
    screen.update([samples.record(10, Event.LEG_PLANNED, now, leg)], [], [])
    assert screen.worst_micros == usd("12.00"), "what is left of the cap bounds a machine that is not requested yet"
    offer = screen.plan.offer.model_dump(mode="json")
    intent = {**samples.INTENT, "provider": "runpod", "offer": offer, "worst_micros": usd("2.10")}
    screen.update([samples.record(11, Event.CREATE_INTENDED, now, intent)], [], [])
    assert screen.worst_micros == usd("6.41")
