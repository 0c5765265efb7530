"""One line about runs that nobody drives and nobody closed, before any verb that is not about them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpurun.cli.session import Session

if TYPE_CHECKING:
    from gpurun.core.journal_records import RunState
    from gpurun.ledger.runs import Sight

_TAIL_BYTES = 4096
_CLOSED, _CLOSED_RED = b'"event":"run.closed"', b'"exit_code":9'
# These are about such runs themselves, or answer too quickly to look.
SILENT = (
    "ps",
    "resume",
    "attach",
    "stop",
    "collect",
    "destroy",
    "logs",
    "reap",
    "doctor",
    "version",
    "config show",
    "config path",
)


def note_unfinished(session: Session) -> None:
    """Say which runs are left unfinished; silence, at the price of a few small reads, when there are none."""
    runs = session.home.runs
    if not runs.is_dir() or all(_is_closed(path / "journal.jsonl") for path in runs.iterdir()):
        return
    from gpurun.ledger.runs import unfinished_runs

    left = unfinished_runs(session.home)
    if left:
        first = left[0].folder.name
        many = "1 unfinished run" if len(left) == 1 else f"{len(left)} unfinished runs"
        session.say(f"{many}: {first} ({_exists(left[0].state)}). gpurun resume {first}")
    for sight in left:
        _go_on_destroying(session, sight)


def _exists(state: RunState) -> str:
    """What may be there of a run, in words."""
    if state.leftover:
        return "something that it left is billed"
    return "its instance may still exist" if state.may_be_billing else "nothing of it is rented"


def _go_on_destroying(session: Session, sight: Sight) -> None:
    """A machine that should be gone and is not proven gone: whatever the user came for, somebody goes on trying."""
    from gpurun.core.journal_records import Phase
    from gpurun.lifecycle.supervisor import start_supervisor

    state = sight.state
    overdue = state.deadline_wall is not None and session.clock.wall() > state.deadline_wall
    ending = state.phase in (Phase.DESTROYING, Phase.GONE, Phase.SETTLED, Phase.CLOSED)
    if sight.damage is None and state.may_be_billing and (overdue or ending):
        start_supervisor(sight.folder, session.home, session.clock)
        session.say(f"Its supervisor was started again, to see {sight.folder.name} gone.")


def _is_closed(journal: Path) -> bool:
    """Whether the journal's last line closes the run, and nothing is billed; without a journal it never was a run."""
    try:
        with journal.open("rb") as content:
            content.seek(max(0, journal.stat().st_size - _TAIL_BYTES))
            end = content.read()
    except OSError:
        return True
    return _CLOSED in end and _CLOSED_RED not in end
