"""Tests of every screen at 60, 80 and 120 columns, in UTF-8 and in ASCII, against the files in `drawn/`.

After an intended change run `GPURUN_UPDATE_GOLDEN=1 pytest tests/golden`, and read the difference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import command_samples as commands
import view_samples as samples
from drawing import check

from gpurun.core.journal_records import Event
from gpurun.core.money import usd
from gpurun.core.run_plan import Mode
from gpurun.core.transfer_progress import Moving
from gpurun.view.audit_table import audit_screen
from gpurun.view.budget_screen import budget_screen
from gpurun.view.candidate_table import candidates_table
from gpurun.view.error_text import error_lines
from gpurun.view.list_tables import config_table, doctor_lines, pack_listing, ps_table, recipes_table
from gpurun.view.live_layout import live_screen
from gpurun.view.plain_lines import PlainView
from gpurun.view.plan_screen import plan_screen
from gpurun.view.reap_table import reap_table
from gpurun.view.receipt_markdown import receipt_markdown
from gpurun.view.receipt_screen import receipt_screen
from gpurun.view.style import Style
from gpurun.view.styled_text import Line, cells, render

NOW = samples.NOW


def _live(screen_and_now: tuple[samples.Screen, float], style: Style, *, helps: bool = False) -> list[Line]:
    screen, now = screen_and_now
    return live_screen(screen, style, now=now, keys=True, helps=helps)


def _ended(outcome: str, exit_code: int) -> tuple[samples.Screen, float]:
    """Return the live view, and its time, of an ended run whose last checkpoint, of step 2250, is not at home."""
    screen, now = samples.rented_screen()
    facts = [
        (Event.TRAIN_OBSERVED, {"outcome": outcome, "reason": outcome, "message": "the instance is gone"}),
        (Event.COLLECT_OBSERVED, {"files": samples.checkpoint_files(2000), "missing": []}),
        (Event.DEATH_PROVEN, {"teardown": "destroyed", "reads": 3}),
        (Event.RUN_CLOSED, {"exit_code": exit_code}),
    ]
    screen.update([samples.record(10 + i, event, now, data) for i, (event, data) in enumerate(facts)], [], [])
    return screen, now


def _silent() -> tuple[samples.Screen, float]:
    """Return the live view, and its time, of a run whose machine has been silent for an hour."""
    screen, now = samples.rented_screen()
    screen.update([], [], [], heard_wall=now - 10)
    return screen, now + 3590


def _waiting() -> tuple[samples.Screen, float]:
    """Return the live view, and its time, of a run that lost its machine and waits for the next one at $0."""
    screen, now = samples.rented_screen()
    facts = [
        (Event.TRAIN_OBSERVED, {"outcome": "lost", "reason": "lost", "message": "the instance is gone"}),
        (Event.COLLECT_OBSERVED, {"files": samples.checkpoint_files(2250), "missing": []}),
        (Event.DESTROY_INTENDED, {}),
        (Event.DEATH_PROVEN, {"teardown": "destroyed", "reads": 3}),
    ]
    records = [samples.record(10 + i, event, now, data) for i, (event, data) in enumerate(facts)]
    words = "$0.00 an hour, until 20:00; best $2.99/h at runpod, more than --max-rate"
    screen.update(records, [], [], Moving("wait", 115, 3600, now, 0, now - 115, words))
    return screen, now


def _next_machine() -> tuple[samples.Screen, float]:
    """Return the live view, and its time, of the same run while its next machine boots."""
    screen, now = _waiting()
    leg = {"number": 2, "plan": "legs/1.json", "step": 2250, "spent_micros": usd("4.31"), "left_micros": usd("7.69")}
    screen.update([samples.record(14, Event.LEG_PLANNED, now, {**leg, "plan_sha256": samples.SHA})], [], [])
    return screen, now


SCREENS: dict[str, Callable[[Style], list[Line]]] = {
    "plan-paid": lambda s: plan_screen(samples.plan(), s, now=NOW),
    "plan-rehearsal": lambda s: plan_screen(samples.plan(Mode.REHEARSAL), s, now=NOW),
    "plan-local": lambda s: plan_screen(samples.plan(Mode.LOCAL, notes=()), s, now=NOW),
    "offers": lambda s: candidates_table(samples.CANDIDATES, s, chosen=samples.CANDIDATES[2].offer, cap=usd(12)),
    "offers-all": lambda s: candidates_table(samples.CANDIDATES, s, every=True),
    "ps": lambda s: ps_table(samples.RUNS, s, now=NOW),
    "recipes": lambda s: recipes_table(samples.RECIPES, s),
    "audit": lambda s: audit_screen(
        samples.AUDIT, samples.BILLED, {"elk-33": "gpurun destroy elk-33"}, s, exit_code=10
    ),
    "reap": lambda s: reap_table(samples.ORPHANS, ["runpod"], s, now=NOW),
    "pack": lambda s: pack_listing(samples.PACKED, s, packed_bytes=141_000_000),
    "budget": lambda s: budget_screen(samples.BUDGETS, samples.SPENT, ["ant-9"], s, now=NOW),
    "config": lambda s: config_table(samples.SETTINGS, s),
    "doctor": lambda s: doctor_lines(samples.FINDINGS, s),
    "receipt": lambda s: receipt_screen(samples.RECEIPT, s, now=NOW, then="gpurun report fox-41 --html out.html"),
    "receipt-command": lambda s: receipt_screen(commands.RECEIPT, s, now=NOW),
    "plan-command": lambda s: plan_screen(commands.plan(), s, now=NOW),
    "live-command": lambda s: _live(commands.live(), s),
    "live-rented": lambda s: _live(samples.rented_screen(), s),
    "live-help": lambda s: _live(samples.rented_screen(), s, helps=True),
    "live-ended": lambda s: _live(samples.local_screen(), s),
    "live-lost": lambda s: _live(_ended("lost", 6), s),
    "live-waiting": lambda s: _live(_waiting(), s),
    "live-next-machine": lambda s: _live(_next_machine(), s),
    "live-silent": lambda s: _live(_silent(), s),
    "error": lambda s: error_lines(
        "No offer fits $3.00. The cheapest way to run this recipe is $7.97 (runpod 1×H100).",
        "Raise the cap (--max-cost 8.50), shorten it (--set train.steps=1600), or look: gpurun offers --gpu any",
        "offer.none_under_cap",
        s,
    ),
}


@pytest.mark.parametrize("unicode", [True, False], ids=["utf8", "ascii"])
@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", SCREENS)
def test_screen_is_drawn_as_agreed(name: str, width: int, unicode: bool) -> None:
    style = Style(width=width, height=30, unicode=unicode)
    drawn = render(SCREENS[name](style), style)
    check(f"{name}.{width}.{'utf8' if unicode else 'ascii'}.txt", drawn)
    assert all(cells(line) <= width for line in drawn.splitlines())
    assert unicode or drawn.isascii()
    assert "\x1b" not in drawn


@pytest.mark.parametrize("name", SCREENS)
def test_colour_adds_nothing_but_colour(name: str) -> None:
    """Without its escape codes the coloured screen is the plain one: no meaning depends on colour alone."""
    import re

    plain, colored = (Style(width=80, height=30, color=color) for color in (False, True))
    assert re.sub(r"\x1b\[[0-9;]*m", "", render(SCREENS[name](colored), colored)) == render(SCREENS[name](plain), plain)


def test_receipt_as_markdown() -> None:
    check("receipt.md", receipt_markdown(samples.RECEIPT))
    check("receipt-command.md", receipt_markdown(commands.RECEIPT))


def test_a_whole_run_off_a_terminal() -> None:
    begun = NOW - 11_160
    view = PlainView()
    lines: list[str] = []
    clock = begun
    records = [*samples.story(begun, usd(0)), *samples.ending(begun)]
    events = samples.trainer_events(begun + 475, 4768, 4760)
    while clock <= NOW + 600:
        due = [r for r in records if clock - 600 < r.wall <= clock]
        lines += view.update(due, [e for e in events if clock - 600 < (e.wall or 0) <= clock], clock)
        clock += 600
    check("plain.txt", "\n".join(lines))
