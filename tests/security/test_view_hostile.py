"""Tests that a terminal gets only printing characters, in bounded lines and time, whatever a machine prints."""

from __future__ import annotations

import io
import json
import re
import sys
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))
import view_samples as samples

from gpurun.core.journal_records import Event
from gpurun.core.run_plan import Mode
from gpurun.core.trainer_events import parse_event
from gpurun.core.untrusted import MAX_LINE_BYTES, safe_line, safe_text
from gpurun.ledger.spending import spent_by
from gpurun.view.envelope import event_json, record_json
from gpurun.view.live_layout import live_screen
from gpurun.view.live_state import Screen
from gpurun.view.plain_lines import PlainView
from gpurun.view.receipt_markdown import receipt_markdown
from gpurun.view.receipt_screen import receipt_screen
from gpurun.view.report.series import hear
from gpurun.view.style import Style
from gpurun.view.styled_text import line, render
from tests.later import examples
from tests.security.view_hostile import HOSTILE


def offenders(text: str) -> list[str]:
    """Return the code points of characters that are neither printing nor a newline."""
    bad = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return [hex(ord(c)) for c in text if c != "\n" and unicodedata.category(c) in bad]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("as_text", [False, True], ids=["bytes", "str"])
def test_a_line_is_one_line_of_printing_characters(name: str, as_text: bool) -> None:
    given: bytes | str = HOSTILE[name].decode("utf-8", "surrogateescape") if as_text else HOSTILE[name]
    shown = safe_line(given)
    assert offenders(shown) == []
    assert "\n" not in shown
    assert len(shown) <= MAX_LINE_BYTES + 40


@given(st.binary(max_size=6000) | st.text(max_size=6000))
@settings(max_examples=examples(150), deadline=None)
def test_any_bytes_or_text_become_printing_characters(given_line: bytes | str) -> None:
    shown = safe_line(given_line)
    assert offenders(shown) == []
    assert safe_line(shown)[:4000] == shown[:4000]


def test_what_is_harmless_stays() -> None:
    for text in ("step 0050 | loss 2.9871 | lr 3.00e-04", "größe 日本語 ✔ é", "[bold]", "a  b"):
        assert safe_line(text) == text
        assert safe_line(text.encode()) == text
    assert safe_line(HOSTILE["colour"]) == "red"
    assert safe_line(HOSTILE["set the clipboard (OSC 52)"]) == "after"
    assert safe_line(HOSTILE["progress bar"]) == " 30%"
    assert safe_line("a\tb") == "a   b"


def test_a_ten_megabyte_line_is_cut_with_a_mark_and_at_once() -> None:
    for unit in (b"x", b"\x1b[", b"\x1b]", b"\xff", "\u202e".encode(), b"\r", b"\t"):
        given = unit * (10_000_000 // len(unit))
        begun = time.thread_time()  # Without the time of other threads that run meanwhile.
        shown = safe_line(given)
        assert time.thread_time() - begun < 0.1
        assert len(shown.encode()) <= 3 * MAX_LINE_BYTES + 60
        assert shown.endswith(f"[line of {len(given):,} cut]")


def test_several_lines_are_bounded_too() -> None:
    lines = safe_text(b"\x1b[2Jx\n" * 1_000_000)
    assert len(lines) == 41
    assert lines[0] == "x"


def test_the_last_door_holds_even_when_nobody_cleaned() -> None:
    for style in (Style(), Style(unicode=False)):
        for raw in HOSTILE.values():
            assert offenders(render([line(raw.decode("utf-8", "surrogateescape"))], style)) == []


def hostile_events() -> Iterator[dict[str, Any]]:
    odd: list[Any] = [None, True, [], {}, "\x1b[31m", -1, 1e308, float("nan"), float("inf"), 10**400, "9" * 5000]
    for kind in ("start", "step", "eval", "sample", "checkpoint", "warning", "stop", "\x1b]0;x\x07"):
        for value in odd:
            keys = ("wall", "step", "loss", "val_loss", "lr", "grad_norm", "step_s", "tokens_per_s", "mfu", "steps")
            more = ("world_size", "memory_peak_bytes", "device", "cuda_name", "bytes", "code", "reason", "prompt")
            yield {"kind": kind, **dict.fromkeys((*keys, *more), value), "message": "\x1b[2J", "text": "a\nb\x1bc"}


def test_events_that_lie_break_nothing_and_draw_nothing_raw() -> None:
    screen = Screen(samples.plan(), spent_by)
    begun = samples.NOW - 900
    screen.update(samples.story(begun, samples.usd("2.49")), samples.trainer_events(begun), HOSTILE.values())
    view = PlainView()
    for event in samples.make_events(*hostile_events()):
        screen.update([], [event], ["\x1b[31m"])
        for width in (60, 120):
            style = Style(width=width, height=30)
            drawn = render(live_screen(screen, style, now=samples.NOW), style)
            assert offenders(drawn) == []
        for printed in view.update([], [event], samples.NOW):
            assert offenders(printed) == []
            assert len(printed) < 20_000
        assert json.loads(event_json(event))["stream"] == "trainer"
        assert event_json(event).isascii()


def test_losses_at_the_ends_of_what_a_float_holds_break_no_chart() -> None:
    losses = [4.0, -1e308, 1e308, 3.5, -1.7e308, 3.0]
    events = [{"kind": "step", "step": step, "loss": loss, "step_s": 1e308} for step, loss in enumerate(losses)]
    screen = Screen(samples.plan(), spent_by)
    screen.update([], samples.make_events(*events), [])
    assert drawn_somehow(screen)
    heard = hear(json.dumps(event).encode() for event in events)
    assert ([mark.loss for mark in heard.losses.items], heard.not_finite) == ([4.0, 3.5, 3.0], 3)


def drawn_somehow(screen: Screen) -> str:
    style = Style(width=100, height=40)
    return render(live_screen(screen, style, now=samples.NOW), style)


def test_records_that_quote_the_far_side_are_told_harmlessly() -> None:
    view = PlainView()
    for event in Event:
        for raw in HOSTILE.values():
            text = raw.decode("utf-8", "replace")
            keys = ("message", "code", "id", "answer", "reason", "outcome", "step", "state", "recipe", "sha256", "how")
            # For these two events, hostile values would be damage of the journal.
            own = {Event.STOP_REQUESTED: {"how": "save"}, Event.LEG_PLANNED: {"step": 3}}.get(event, {})
            record = samples.record(1, event, samples.NOW, {**dict.fromkeys(keys, text), **own})
            assert offenders("".join(view.update([record], [], samples.NOW))) == []
            assert "\x1b" not in record_json(record)


def test_a_flood_of_warnings_is_thinned_and_counted() -> None:
    view = PlainView()
    flood = samples.make_events(*({"kind": "warning", "code": "x", "message": str(i)} for i in range(10_000)))
    lines = view.update([], flood, samples.NOW)
    assert len(lines) == 41
    assert lines[0].endswith("9960 lines of the trainer left out")
    assert lines[-1].endswith("9999"), "the newest are told"
    assert view.update([], flood, samples.NOW) == []
    assert "10000 lines of the trainer left out" in view.update([], [], samples.NOW + 5)[0]


@pytest.mark.parametrize("kind", ["start", "stop"])
def test_a_flood_of_beginnings_or_ends_is_thinned_too(kind: str) -> None:
    lines = PlainView().update([], samples.make_events({"kind": kind, "reason": "done"}) * 10_000, samples.NOW)
    assert len(lines) <= 81


def test_the_screen_keeps_little_however_much_is_sent() -> None:
    screen = Screen(samples.plan(Mode.LOCAL), spent_by)
    steps = samples.make_events(*({"kind": "step", "step": i, "loss": 1.0} for i in range(50_000)))
    screen.update([], steps, (b"x" * 9999 for _ in range(5000)))
    assert len(screen.losses.points) <= 4096
    assert len(screen.log) <= 200


def test_lines_that_are_no_event_are_no_event() -> None:
    for raw in (
        *HOSTILE.values(),
        b"[" * 100_000,
        b"9" * 10_000,
        b'{"kind": 3}',
        b"null",
        b'{"kind":"x"' + b" " * (2 << 20),
    ):
        assert parse_event(raw) is None
    assert parse_event(b'{"kind": "step", "loss": NaN}') is not None


@pytest.mark.parametrize("depth", [10, 90, 100, 400, 900, 9000])
def test_an_event_of_nested_brackets_ends_no_stream_of_json(depth: int) -> None:
    event = parse_event(b'{"kind": "x", "step": 7, "a": ' + b"[" * depth + b"1" + b"]" * depth + b"}")
    assert (event is None) == (depth >= 100), "what is nested deeper than any event is none"
    if event is not None:
        shown = event_json(event)
        assert json.loads(shown)["data"]["step"] == 7
        assert ("1" in shown.partition('"a"')[2]) == (depth == 10), "what no reader could take is null"


def everywhere(value: Any, text: str) -> Any:
    """Return the value with every string replaced, except the times and the receipt's own words."""
    if isinstance(value, dict):
        return {
            key: inner if key in ("timeline", "verdict", "run", "is") else everywhere(inner, text)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [everywhere(inner, text) for inner in value]
    return text if isinstance(value, str) else value


def test_the_receipt_quotes_log_and_sample_harmlessly_both_ways() -> None:
    for raw in HOSTILE.values():
        text = raw.decode("utf-8", "replace")
        said = everywhere(samples.PREDICATE, text)
        said["sample"] = {"step": 1, "prompt": text, "text": text + "\n```\n# not a heading"}
        view = samples.receipt(said)
        style = Style(width=80)
        assert offenders(render(receipt_screen(view, style, now=0), style)) == []
        markdown = receipt_markdown(view)
        assert offenders(markdown) == []
        outside = re.sub(r"(?s)(`{3,})text\n.*?\n\1", "", markdown)
        assert "<script" not in outside.replace("\\<", "")
        assert "# not a heading" not in outside


def test_rich_is_given_no_markup_and_no_escape() -> None:
    from gpurun.view.live_window import LiveWindow

    screen = Screen(samples.plan(), spent_by)
    screen.update([], [], [HOSTILE["markup"], HOSTILE["an OSC that never ends"]])
    stream = io.StringIO()
    with LiveWindow(stream, Style(color=True, redraw=True)) as window:
        window.show(screen, now=samples.NOW)
    written = stream.getvalue()
    assert "[bold red]x[/bold red]" in written
    assert "\x1b]" not in written
