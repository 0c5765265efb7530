"""More than one instance for one token: found by the token, recorded once each, because each is paid for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpurun.core.model import Instance, InstanceState
from gpurun.core.progress import Event, RunState
from gpurun.ledger.journal import read_journal
from gpurun.lifecycle.context import Context, Note, instance_of


def duplicates(state: RunState, context: Context) -> list[Instance]:
    """What bears the run's token beside the instance that was adopted, newest first; it may raise what `find` does."""
    kept = instance_of(state).id
    return [one for one in reversed(living(context.provider.find(state.token), state.token)) if one.id != kept]


def living(found: Sequence[Instance], token: str) -> list[Instance]:
    """Those that bear this token, whatever a provider's own search took for the same, and are not gone."""
    return [one for one in found if one.token == token and one.state is not InstanceState.GONE]


def incident(extra: Instance) -> Note:
    """The record of a duplicate."""
    return Event.INCIDENT, {"code": "create.duplicate", "message": f"a second instance {extra.id} bears the token"}


def once(note: Note, context: Context) -> Iterator[Note]:
    """The note, unless the journal has it already."""
    event, data = note
    if not any(one.event is event and one.data == data for one in read_journal(context.folder.journal).records):
        yield note
