"""Runs as a table, and the trainer's log as it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from gpurun.cli.output import put, put_bytes
from gpurun.cli.reader import lines_in
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.core.errors import ExitCode, UsageError
from gpurun.core.money import Micros
from gpurun.core.progress import Event, Phase
from gpurun.ledger.lock import holder_of
from gpurun.ledger.rental import is_more, rentals_of
from gpurun.lifecycle.home.local_copy import read_on_at
from gpurun.lifecycle.runs import Sight, look_at_all, planned_runs
from gpurun.view.envelope import log_json
from gpurun.view.events import parse_event, whole
from gpurun.view.listings import RunRow, ps_table
from gpurun.view.paint import render
from gpurun.view.safe import safe_line
from gpurun.view.screen import Screen

_TAIL_BYTES = 1 << 16
_PART_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 4 << 20
# The live view's words for what goes on; the other phases are called so already.
_WORDS = {
    Phase.OPENED: "starting",
    Phase.CREATING: "provisioning",
    Phase.CREATED: "provisioning",
    Phase.READY: "shipping",
    Phase.SHIPPED: "shipping",
    Phase.TRAINING: "running",
    Phase.TRAINED: "collecting",
    Phase.COLLECTED: "collected",
    Phase.GONE: "settling",
    Phase.SETTLED: "settling",
    Phase.CLOSED: "settling",
}


def list_runs(session: Session, *, all_runs: bool) -> Result:
    """The unfinished runs, or all; exit 9 when one may be billing and nobody drives it."""
    sights, errors = look_at_all(session.home, planned_runs(session.home))
    shown = [sight for sight in sights if all_runs or sight.unfinished]
    rows = [_row(sight, session.clock.wall()) for sight in shown]
    told = [_as_data(sight, row) for sight, row in zip(shown, rows, strict=True)]
    billing = any(row.may_be_billing for row in rows)
    text = render(ps_table(rows, session.style, now=session.clock.wall()), session.style) if rows else ""
    if not rows and sights:
        text = f"Nothing is running. {len(sights)} finished: gpurun ps --all"
    elif not rows and not errors:
        text = f"No runs in {session.home.root}. Start one: gpurun train --dry-run"
    return Result(
        data={"runs": told},
        text=text,
        after="\n".join(_ways_on(rows)),
        errors=tuple(errors),
        exit_code=ExitCode.MAY_BE_BILLING if billing else errors[0].exit_code if errors else ExitCode.DONE,
    )


def _ways_on(rows: list[RunRow]) -> Iterator[str]:
    """The next command for every run that may be billing while nobody drives it."""
    for row in rows:
        if row.may_be_billing:
            yield f"Nobody drives {row.run}: gpurun resume {row.run}, or gpurun destroy {row.run}"


def _row(sight: Sight, now: float) -> RunRow:
    state, plan = sight.state, sight.plan
    orphaned = state.may_be_billing and sight.owner is None
    dies = state.may_be_billing and not (state.late or state.leftover)  # Those are not the machine of this deadline.
    return RunRow(
        run=sight.folder.name,
        recipe=plan.recipe,
        where=f"{plan.offer.provider} {plan.offer.label}",
        state=state_word(sight),
        step=_last_step(sight),
        steps=plan.resolved.get("train", {}).get("steps"),
        started_wall=sight.opened_wall or None,
        spent_micros=_spent(sight, now),
        worst_micros=plan.worst_micros,
        dies_wall=state.deadline_wall if dies else None,
        dies_by=plan.offer.dies_by_itself if dies else "",
        live=sight.owner is not None,
        may_be_billing=orphaned,
        spent_is_floor=sight.damage is not None or is_more(rentals_of(sight.records)),
    )


def _spent(sight: Sight, now: float) -> Micros:
    """What the rentals cost so far, as the live view counts it."""
    screen = Screen(sight.plan)
    screen.update(sight.records, (), ())
    return screen.spent(now)


def state_word(sight: Sight) -> str:
    """How a run stands, in a word or three."""
    state = sight.state
    if sight.damage is not None:
        return "damaged"
    if sight.unfinished:
        word = _WORDS.get(state.phase, str(state.phase))
        return word if sight.owner else f"{word}, nobody drives it"
    begun = any(record.event is Event.TRAIN_STARTED for record in sight.records)
    nothing = "cut off" if begun else "never started"
    return "failed" if state.failure or state.outcome in ("failed", "lost") else state.outcome or nothing


def _as_data(sight: Sight, row: RunRow) -> dict[str, object]:
    state = sight.state
    return {
        "run": sight.folder.name,
        "recipe": sight.plan.recipe,
        "provider": sight.plan.offer.provider,
        "phase": state.phase,
        "step": row.step,
        "steps": row.steps,
        "spent_micros": row.spent_micros,
        "spent_is_floor": row.spent_is_floor,
        "worst_micros": row.worst_micros,
        "outcome": state.outcome,
        "owner": sight.owner,
        "may_be_billing": state.may_be_billing and sight.owner is None,
        "deadline_wall": state.deadline_wall,
        "exit_code": state.exit_code,
        "damage": sight.damage,
    }


def _last_step(sight: Sight) -> int | None:
    """The step of the last event that came, from the end of the file alone."""
    try:
        with sight.folder.events.open("rb") as events:
            events.seek(max(0, sight.folder.events.stat().st_size - _TAIL_BYTES))
            lines = events.read().splitlines()
    except FileNotFoundError:
        return None
    parsed = (parse_event(line) for line in reversed(lines))
    return next((step for event in parsed if event is not None and (step := whole(event, "step")) is not None), None)


def print_log(session: Session, sight: Sight, *, follow: bool, raw: bool) -> Result:
    """Stream the local copy of the log: made harmless, as JSON Lines, or byte for byte where no terminal reads it."""
    if raw and sys.stdout.isatty():
        raise UsageError(
            "logs.raw_to_terminal",
            "--raw prints bytes of the instance as they are, and your terminal would obey them.",
            hint="Send them somewhere else: gpurun logs RUN --raw > run.log",
        )
    if raw and session.json:
        hint = "--json alone streams each line as JSON."
        raise UsageError("logs.two_outputs", "--raw and --json both want standard output.", hint=hint)
    is_empty = True
    for block in _blocks(session, sight, follow=follow):
        is_empty = False
        if raw:
            put_bytes(block)
        elif session.json:
            put("\n".join(log_json(line) for line in lines_in(block)))
        else:
            put("\n".join(safe_line(line) for line in lines_in(block)))
    after = _why_empty(sight) if is_empty else ""
    return Result(data={"run": sight.folder.name, "log": str(sight.folder.log)}, after=after)


def _why_empty(sight: Sight) -> str:
    """What there is to look at instead of a log of which nothing is here."""
    name = sight.folder.name
    if sight.unfinished:
        return f"The trainer of {name} has said nothing yet. How far the run is: gpurun attach {name}"
    return f"No line of a trainer came home from {name}. What became of it: gpurun receipt {name}"


def _blocks(session: Session, sight: Sight, *, follow: bool) -> Iterator[bytes]:
    """The log from its beginning, in whole lines; with `follow` until nobody drives the run any more.

    Read part by part: it may be a gigabyte, and whoever pipes it into `head` wants its first lines. A line of a
    gigabyte (what redraws a bar and never ends its line) comes in pieces.
    """
    offset, rest = 0, list[bytes]()
    while True:
        owned = holder_of(sight.folder.lock) is not None
        offset = read_on_at(sight.folder.log, offset)
        for part in _parts(sight.folder.log, offset):
            offset += len(part)
            whole_lines, newline, begun = part.rpartition(b"\n")
            if newline:
                yield b"".join((*rest, whole_lines, newline))
                rest.clear()
            rest.append(begun)
            if sum(map(len, rest)) >= _LONGEST_LINE_BYTES:
                yield b"".join(rest)
                rest.clear()
        if not follow or not owned:
            break
        session.clock.sleep(0.3)
    if any(rest):
        yield b"".join(rest)


def _parts(path: Path, offset: int) -> Iterator[bytes]:
    """What a file has from an offset on, part by part; nothing of one that is not there."""
    if path.exists():
        with path.open("rb") as content:
            content.seek(offset)
            while part := content.read(_PART_BYTES):
                yield part
