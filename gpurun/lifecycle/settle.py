"""Take away what a rental left beside its machine, then write the receipt from the run folder alone.

The receipt comes last and from files only, so that a crash before it changes no byte of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpurun.core.clock import Clock, ticks
from gpurun.core.errors import MayBeBilling, SetupError
from gpurun.core.model import Leftover
from gpurun.core.progress import Event, RunState
from gpurun.ledger.journal import read_journal
from gpurun.ledger.receipt import write_receipt
from gpurun.lifecycle.context import Context, Note
from gpurun.lifecycle.destroy import end
from gpurun.lifecycle.duplicates import living, once
from gpurun.machine.ssh_keys import forget_client_key
from gpurun.providers.base import LeavesThings, Provider, Rejected, Unknown

# A firewall group can go only once its machine's network card has, and that takes a cloud a minute or two.
CLEAR_S = 180.0
CLEAR_POLL_S = 5.0
EMPTY_LISTS = 3  # One list may be an old one.


def settle(state: RunState, context: Context) -> Iterator[Note]:
    """Clear, write and sign the receipt, and put it into the ledger; doing it twice gives the same bytes."""
    for name, tokens in _asked(context).items():
        try:
            provider = context.provider_named(name)
        except SetupError as error:  # Refused by it, or passed over: nothing of the run's is billed there.
            yield from once(_unasked(name, error), context)
            continue
        for token in tokens:
            yield from _late(provider, token, context)
            for left in clear(provider, token, context.clock):
                yield from once(_told(left), context)
                if left.billed:
                    raise _still_billed(left, provider)
    forget_client_key(context.folder.ssh)
    written = write_receipt(context.home, context.folder)
    yield Event.RECEIPT_OBSERVED, {"seq": written.seq, "sha256": written.sha256}


def clear(provider: Provider, token: str, clock: Clock) -> list[Leftover]:
    """Remove what bears a token beside the machines, until a reading shows none; what is left when patience ends."""
    if not isinstance(provider, LeavesThings):
        return []
    left: list[Leftover] = []
    empty_lists = 0
    for _ in ticks(clock, CLEAR_POLL_S, CLEAR_S):
        try:
            left = provider.leftovers(token)
            empty_lists = 0 if left else empty_lists + 1
            if empty_lists >= EMPTY_LISTS:
                return []
            for one in left:
                provider.remove(one)
        except (Unknown, Rejected, SetupError) as error:
            unseen = Leftover(provider=provider.name, kind=f"side resource ({error})", id=token, run="", token=token)
            left = left or [unseen]
    return left


def _late(provider: Provider, token: str, context: Context) -> Iterator[Note]:
    """A machine of any token of the run that shows only now, when its absence had been believed: it is ended too."""
    try:
        late = living(provider.find(token), token)
    except (Unknown, Rejected, SetupError):
        return  # Its death was proven, or its absence believed, when the provider did answer.
    for one in late:
        what = f"{one.id} was made after its absence had been believed; it was billed besides"
        yield from once((Event.INCIDENT, {"code": "create.late", "message": what}), context)
        for _ in end(provider, context.clock, one.id, token, run=context.plan.run):
            pass


def _unasked(name: str, error: SetupError) -> Note:
    what = f"{name} could not be asked what was left beside a machine: {error.what}"
    return Event.INCIDENT, {"code": "leftover", "message": what}


def _asked(context: Context) -> dict[str, list[str]]:
    """Every provider that was asked for a machine in this run, with the tokens."""
    tokens: dict[str, list[str]] = {}
    for record in read_journal(context.folder.journal).records:
        if record.event is Event.CREATE_INTENDED:
            tokens.setdefault(record.data["provider"], []).append(record.data["token"])
    return tokens


def _told(left: Leftover) -> Note:
    what = f"{left.kind} {left.id} is still at {left.provider}; `gpurun reap` removes it"
    return Event.INCIDENT, {"code": "leftover", "message": what}


def _still_billed(left: Leftover, provider: Provider) -> MayBeBilling:
    return MayBeBilling(
        "destroy.leftover",
        f"The machine is gone, but its {left.kind} {left.id} at {left.provider} is not, and it is billed.",
        hint=f"Run `gpurun resume {left.run}`, or remove it by hand: {provider.traits.console_url}.",
    )
