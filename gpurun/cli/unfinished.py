"""Print a line about unfinished runs without a supervisor, before any unrelated verb."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpurun.cli.session import Session

if TYPE_CHECKING:
    from gpurun.core.journal_records import RunState
    from gpurun.ledger.runs import Sight

# These verbs handle such runs themselves, or must be fast.
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
    """Print which runs are unfinished; without any, this costs only a few small reads."""
    if not any(not folder.is_closed and os.path.isfile(folder.journal) for folder in session.home.folders()):
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
    """Return what may still exist of a run."""
    if state.leftover:
        return "something that it left is billed"
    return "its instance may still exist" if state.may_be_billing else "nothing of it is rented"


def _go_on_destroying(session: Session, sight: Sight) -> None:
    """Restart the supervisor of a machine that should be gone but is not proven gone, whatever verb was typed."""
    from gpurun.core.journal_records import Phase

    state = sight.state
    overdue = state.deadline_wall is not None and session.clock.wall() > state.deadline_wall
    ending = state.phase in (Phase.DESTROYING, Phase.GONE, Phase.SETTLED, Phase.CLOSED)
    if sight.damage is None and state.may_be_billing and (overdue or ending):
        from gpurun.lifecycle.supervisor import start_supervisor

        start_supervisor(sight.folder, session.home, session.clock)
        session.say(f"Its supervisor was restarted to prove that {sight.folder.name} is gone.")
