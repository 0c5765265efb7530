"""One line about runs that nobody drives and nobody closed, before any verb that is not about them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gpurun.cli.session import Session

if TYPE_CHECKING:
    from gpurun.core.journal_records import RunState
    from gpurun.ledger.runs import Sight

# These are about such runs themselves, or answer too quickly to look.
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
    """Say which runs are left unfinished; silence, at the price of a few small reads, when there are none."""
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
    """What may be there of a run, in words."""
    if state.leftover:
        return "something that it left is billed"
    return "its instance may still exist" if state.may_be_billing else "nothing of it is rented"


def _go_on_destroying(session: Session, sight: Sight) -> None:
    """A machine that should be gone and is not proven gone: whatever the user came for, somebody goes on trying."""
    from gpurun.core.journal_records import Phase

    state = sight.state
    overdue = state.deadline_wall is not None and session.clock.wall() > state.deadline_wall
    ending = state.phase in (Phase.DESTROYING, Phase.GONE, Phase.SETTLED, Phase.CLOSED)
    if sight.damage is None and state.may_be_billing and (overdue or ending):
        from gpurun.lifecycle.supervisor import start_supervisor

        start_supervisor(sight.folder, session.home, session.clock)
        session.say(f"Its supervisor was started again, to see {sight.folder.name} gone.")
