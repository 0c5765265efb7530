"""Tests of durations, sizes, errors, envelopes and charts as people and programs read them."""

from __future__ import annotations

import json
import math
import shlex

import pytest

from gpurun.core.errors import ExitCode, NoOffer
from gpurun.providers.aws.setup import admin_commands
from gpurun.view.envelope import ENVELOPE_KEYS, ERROR_KEYS, envelope_json
from gpurun.view.error_text import error_text
from gpurun.view.number_format import (
    format_bytes,
    format_count,
    format_duration,
    format_exact,
    format_files,
    format_small,
    format_stopwatch,
    format_whole,
    short_hash,
)
from gpurun.view.style import Style
from gpurun.view.styled_text import cells, clip, fold, line, render, split_words
from gpurun.view.table import Column, table
from gpurun.view.terminal_charts import Scale, line_chart, scale_of, sparkline


def test_durations() -> None:
    seconds = (0, 0.9, 42, 545, 11_280, 183_600, -5, math.inf)
    shown = ["0 s", "0 s", "42 s", "9 m 05 s", "3 h 08 m", "2 d 03 h", "0 s", "—"]
    assert [format_duration(s) for s in seconds] == shown
    assert [format_exact(s) for s in (0, 90, 3600, 13_320, 3661)] == [
        "0 s",
        "1 m 30 s",
        "1 h",
        "3 h 42 m",
        "1 h 1 m 1 s",
    ]
    assert [format_stopwatch(s) for s in (5, 108, 7390)] == ["0:05", "1:48", "2:03:10"]


def test_sizes_and_counts() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 449_912, 3_100_000_000)] == [
        "0 B",
        "999 B",
        "1 kB",
        "450 kB",
        "3.1 GB",
    ]
    assert [format_count(n) for n in (960, 112_384, 999_600, 124e6, 2.5e9)] == ["960", "112 k", "1 M", "124 M", "2.5 B"]
    assert [format_small(x) for x in (4.1e-4, 0, 3e-3, None)] == ["4.1e-4", "0", "3.0e-3", "—"]
    assert format_whole(2_410_000) == "2 410 000"
    assert [format_files(n) for n in (0, 1, 2_410)] == ["0 files", "1 file", "2 410 files"]
    assert short_hash("9f2c" + "0" * 56 + "1ab4") == "9f2c…1ab4"


def test_figures_stay_with_their_units_when_a_line_breaks() -> None:
    assert split_words("train 3 h 42 m + 4 768 steps of 2.5 B") == [
        "train 3 h 42 m",
        "+",
        "4 768",
        "steps",
        "of",
        "2.5 B",
    ]


def test_an_error_says_what_then_what_to_do_then_its_code() -> None:
    error = NoOffer("offer.none", "No offer fits $3.00.", hint="Raise the cap: --max-cost 8.50.")
    assert error_text(error.what, error.hint, error.code, Style()) == (
        "✗ No offer fits $3.00.\n  Raise the cap: --max-cost 8.50.  [offer.none]"
    )


def test_what_is_to_be_copied_from_a_hint_has_lines_of_its_own() -> None:
    trust, policy = {"Principal": {"Service": "scheduler.amazonaws.com"}}, {"Action": "ec2:TerminateInstances"}
    typed = admin_commands(trust, policy)
    shown = error_text(
        "No role was created.", "\n".join(["To create it by hand:", *typed]), "aws.declined", Style(width=60)
    )
    _, advice, *copied, code = (line.strip() for line in shown.splitlines())
    assert (advice, copied, code) == ("To create it by hand:", typed, "[aws.declined]")
    assert [shlex.split(line)[2] for line in copied] == ["create-role", "put-role-policy"]


def test_a_foreign_line_in_a_hint_steers_no_terminal() -> None:
    assert "\x1b" not in error_text("It failed.", "It said:\n\x1b[2Jno", "a.b", Style())


def test_a_quotation_after_an_errors_first_line_keeps_its_lines() -> None:
    shown = error_text("It failed. Its last words:\nE: no lion\n\x1b[2Jat all", "Mend it.", "setup.failed", Style())
    assert [line.strip() for line in shown.splitlines()][1:3] == ["E: no lion", "[2Jat all"]


def test_the_envelope_has_its_six_keys_and_no_other() -> None:
    assert ENVELOPE_KEYS == ("v", "command", "ok", "data", "errors", "exit_code")
    assert ERROR_KEYS == ("code", "message", "hint")
    error = NoOffer("a.b", "what", hint="do").as_record()
    failed = json.loads(envelope_json("train", {"loss": math.nan}, [error], ExitCode.NO_OFFER))
    assert failed == {
        "v": 1, "command": "train", "ok": False, "data": {"loss": None},
        "errors": [{"code": "a.b", "message": "what", "hint": "do"}], "exit_code": 5,
    }  # fmt: skip
    assert [json.loads(envelope_json("train", {}, [], code))["ok"] for code in (0, 8, 6, 9)] == [
        True,
        True,
        False,
        False,
    ]


def test_wide_characters_keep_columns_straight() -> None:
    style = Style(width=40)
    lines = render(table([Column("A"), Column("B")], [["日本", "x"], ["ab", "y"]], style), style).splitlines()
    assert [cells(text[: text.index(mark)]) for text, mark in zip(lines[1:], "xy", strict=True)] == [8, 8]
    assert clip("日本語", 5) == "日本…"
    assert render([line("  trailing   ")], style) == "  trailing"


@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize(
    "points",
    [
        [],
        [(1, 2.0)],
        [(0, 5.0), (10, 5.0)],
        [(1, math.nan), (2, 1e300), (3, -1e300)],
        [(0, 0.0)],
        [(5, 1e-9)],
        [(5, 5e-324)],
    ],
)
def test_a_chart_of_anything_is_a_rectangle(points: list[tuple[float, float]], unicode: bool) -> None:
    rows = line_chart(points, width=50, height=5, marks=points, unicode=unicode)
    assert len(rows) == 6
    assert all(cells(row) <= 50 for row in rows)


def test_a_chart_falls_from_its_top_left_to_its_bottom_right() -> None:
    rows = line_chart([(x, 10 - x) for x in range(11)], width=40, height=5)
    assert rows[0].startswith("10.0 ┤⠉")
    assert rows[4].startswith("0.00 ┤")
    assert rows[4].rstrip()[-1] != "┤"
    assert rows[5].split() == ["0", "step", "10"]


def test_rings_leave_the_line_to_be_seen() -> None:
    points = [(float(x), 3.0) for x in range(1000)]
    assert sum(row.count("○") for row in line_chart(points, width=100, height=5, marks=points)) == 12


def test_a_flat_line_is_between_two_figures() -> None:
    rows = line_chart([(1.0, 2.0), (9.0, 2.0)], width=40, height=5)
    assert [row[:4] for row in rows[:5:2]] == ["2.20", "2.10", "2.00"]


def test_scales_are_round_and_sparklines_fixed() -> None:
    assert scale_of([3.1, 10.9]) == Scale(3.0, 11.0)
    assert sparkline([0, 50, 100, math.nan], width=4, scale=Scale(0, 100)) == "▁▅█ "
    assert sparkline([0, 50, 100], width=2, scale=Scale(0, 100), unicode=False) == "+#"


@pytest.mark.parametrize(
    ("quoted", "rows"),
    [
        ("loss trainer/loss.py:110 | checkpoint", ["loss trainer/loss.py:110 | ", "checkpoint"]),
        ("a/path/that/has/no/blank/anywhere/in/it", ["a/path/that/has/no/blank/anywh", "ere/in/it"]),
        ("    x = [" + "y, " * 9, ["    x = [y, y, y, y, y, y, y, ", "y, y, "]),
        ("語" * 16, ["語" * 15, "語"]),
    ],
)
def test_a_quoted_line_folds_at_a_near_blank_and_loses_nothing(quoted: str, rows: list[str]) -> None:
    folded = ["".join(span.text for span in row)[2:] for row in fold(quoted, Style(width=32), indent=2)]
    assert folded == rows
    assert "".join(folded) == quoted
