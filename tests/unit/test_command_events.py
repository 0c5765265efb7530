"""Tests of $GPURUN_EVENTS, the file in which a script reports its steps: it is read in pieces, and lines may be bad."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.remote.agent.runner.command_events import MOST_LINE_BYTES, CommandEvents, parse_command_event
from gpurun.remote.agent.runner.run_command import Events, ProgressEvents


@pytest.fixture
def curve(tmp_path: Path) -> ProgressEvents:
    return ProgressEvents(Events(str(tmp_path)), CommandEvents(str(tmp_path / "reported")), 0)


def kinds(folder: Path) -> list[tuple[Any, ...]]:
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [(row["kind"], row.get("step"), row.get("loss", row.get("val_loss")), row.get("steps")) for row in rows]


def test_what_a_script_says_itself_outranks_its_log(curve: ProgressEvents, tmp_path: Path) -> None:
    with (tmp_path / "reported").open("a") as file:
        file.write(
            '{"step": 10, "loss": 2.5, "val_loss": 2.6, "lr": 0.1, "total_steps": 40, "note": "x"}\n{"step": 20, "lo'
        )
    curve.take_reported()
    curve.take("step 999 | loss 999")
    with (tmp_path / "reported").open("a") as file:
        file.write('ss": 1.5}\n')
    curve.take_reported()
    curve.flush()
    assert kinds(tmp_path) == [("step", 10, 2.5, 40), ("eval", 10, 2.6, None), ("step", 20, 1.5, 40)]


def test_malformed_lines_are_passed_over_with_one_warning(curve: ProgressEvents, tmp_path: Path) -> None:
    long = json.dumps({"step": 1, "note": "x" * MOST_LINE_BYTES})
    lines = [
        "nonsense",
        '{"loss": 2}',
        '{"step": "1"}',
        '{"step": -1}',
        '{"step": true}',
        "[" * 5000,
        long,
        "",
        '{"step": 3}',
    ]
    (tmp_path / "reported").write_text("\n".join(lines) + "\n")
    curve.take_reported()
    curve.take_reported()
    assert [kind for kind, *_ in kinds(tmp_path)] == ["step", "warning"]


def test_a_restarted_file_a_link_and_a_missing_file_do_no_harm(tmp_path: Path) -> None:
    events, path = CommandEvents(str(tmp_path / "reported")), tmp_path / "reported"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    assert len(events.read()) == 2
    path.write_text('{"step": 3}\n')
    assert events.read() == [{"step": 3}]
    path.unlink()
    assert events.read() == []
    path.symlink_to("/etc/passwd")
    assert events.read() == []
    assert events.malformed == ""


KEYS = st.sampled_from(["step", "loss", "total_steps", "lr"])
PLAIN = st.none() | st.booleans() | st.floats() | st.integers() | st.text()


@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner)))
def test_in_any_line_a_step_is_a_count_and_a_figure_a_number(value: Any) -> None:
    found = parse_command_event(json.dumps(value).encode())
    assert found is None or (type(found["step"]) is int and all(type(one) in (int, float) for one in found.values()))


def test_a_line_with_both_losses_gives_a_step_and_an_evaluation(curve: ProgressEvents, tmp_path: Path) -> None:
    curve.take("step 250: train loss 1.9, val loss 2.1")
    curve.take("Test loss: 9.9")
    assert kinds(tmp_path) == [("step", 250, 1.9, None), ("eval", 250, 2.1, None)]
