"""Prints a line about unfinished runs without a supervisor, before any unrelated command."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpurun.cli.session import Session

if TYPE_CHECKING:
    from gpurun.core.journal_records import RunState
    from gpurun.ledger.runs import Sight

# These commands handle such runs themselves, or must be fast.
SILENT = (
    "ps",
    "resume",
    "attach",
    "wait",
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
    """Print a line if runs without a supervisor are unfinished; this is fast if there are none."""
    if not any(not folder.is_closed and os.path.isfile(folder.journal) for folder in session.home.folders()):
        return
    from gpurun.ledger.runs import unfinished_runs

    left = unfinished_runs(session.home)
    if left:
        first = left[0].folder.name
        many = "1 unfinished run" if len(left) == 1 else f"{len(left)} unfinished runs"
        session.say(f"{many}: {first} ({_what_may_exist(left[0].state)}). gpurun resume {first}")
    for sight in left:
        _restart_destroying(session, sight)


def _what_may_exist(state: RunState) -> str:
    """Return a phrase about the resources that a run may still have."""
    if state.leftover:
        return "something that it left may be billed"
    return "its instance may still exist" if state.may_be_billing else "nothing is rented for it"


def _restart_destroying(session: Session, sight: Sight) -> None:
    """Restart the supervisor of a run whose machine should be gone but is not proven gone, whatever the command."""
    from gpurun.core.journal_records import Phase

    state = sight.state
    overdue = state.deadline_wall is not None and session.clock.wall() > state.deadline_wall
    ending = state.phase in (Phase.DESTROYING, Phase.GONE, Phase.SETTLED, Phase.CLOSED)
    if sight.damage is None and state.may_be_billing and (overdue or ending):
        from gpurun.lifecycle.supervisor import start_supervisor

        start_supervisor(sight.folder, session.home, session.clock)
        session.say(f"Its supervisor was restarted to prove that {sight.folder.name} is gone.")
