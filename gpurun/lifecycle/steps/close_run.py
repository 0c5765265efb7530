"""Take away what a rental left beside its machine, count what is at home, then write the receipt from the folder alone.

The receipt comes last and from files only, so that a crash before it changes no byte of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from gpurun.core.clock import Clock
from gpurun.core.errors import GpurunError, MayBeBilling, SetupError
from gpurun.core.journal_events import CreateIntended, ExtraGone, Incident, Json, ReceiptObserved
from gpurun.core.journal_records import Phase, RunState, all_typed
from gpurun.core.money import Micros
from gpurun.core.records import Instance, Leftover
from gpurun.ledger.chain import Link, read_chain
from gpurun.ledger.journal import read_journal
from gpurun.ledger.rental import Rental, all_bounded, rentals_of, unseen_ends
from gpurun.ledger.write_receipt import read_receipt, write_receipt
from gpurun.lifecycle.artifacts.inventory import Inventory
from gpurun.lifecycle.charges import final_bills
from gpurun.lifecycle.context import Context, Note
from gpurun.lifecycle.instance.readings import living
from gpurun.lifecycle.instance.terminate import (
    NAMED,
    CheckAccount,
    check_account,
    is_other_account,
    knock_of,
    once,
    other_account,
    prove_termination,
)
from gpurun.planning.history_file import add_prior
from gpurun.providers.base import LeavesThings, Provider, Rejected, Unknown
from gpurun.remote.key_pairs import forget_client_key

# A firewall group can go only once its machine's network card has, and that takes a cloud a minute or two.
CLEAR_S = 180.0
CLEAR_POLL_S = 5.0
_LATE = "was made after its absence had been believed"
_LIVES = "lives, and its end had been believed"
EMPTY_LISTS = 3  # One list may be an old one.


def settle_run(state: RunState, context: Context) -> Iterator[Note]:
    """Clear, write and sign the receipt, and put it into the ledger; doing it twice gives the same bytes.

    Killed after the ledger's line, the receipt is what it is: it is observed first, and what shows now comes after it.
    """
    is_over, link = state.phase in (Phase.SETTLED, Phase.CLOSED), _link(context)
    if link is not None and not is_over:
        _settle_by_receipt(state, context)  # Before the record: once that is there, nobody comes back to this step.
        yield ReceiptObserved(seq=link.seq, sha256=link.receipt_sha256)
    yield from clear_all(state, context)
    forget_client_key(context.folder.ssh)
    if is_over:
        return
    if link is None:
        rentals = rentals_of(read_journal(context.folder.journal).records)
        _settle_ended(rentals, context)
        if unseen := unseen_ends(rentals):
            yield from final_bills(unseen, state, context)
        inventory = Inventory(context.folder)
        yield from inventory.count_all_legs() if state.leg > 1 else inventory.take_stock()
    written = write_receipt(context.home, context.folder)
    if link is None:
        _settle_by_receipt(state, context)
        yield ReceiptObserved(seq=written.seq, sha256=written.sha256)
    # Advice for later plans: nothing of the receipt waits for it.
    add_prior(state, context.plan, context.folder, context.home, context.clock.wall())


def close_machines(state: RunState, context: Context) -> Iterator[Note]:
    """Take away what all machines until now have left, and have every budget know what they cost; the run continues."""
    yield from clear_all(state, context)
    _settle_ended(rentals_of(read_journal(context.folder.journal).records), context)


def _settle_ended(rentals: Sequence[Rental], context: Context) -> None:
    """Put what each rental whose end is proven has cost in the place of what was held; a bill may yet say less."""
    with suppress(GpurunError):
        for rental in rentals:
            if rental.ended and all_bounded([rental]):
                context.budgets.settle(rental.token, rental.micros)


def _settle_by_receipt(state: RunState, context: Context) -> None:
    """Put what the receipt says in the place of what was held; without a bound, or a file to note it in, that stays."""
    with suppress(GpurunError):
        receipt = read_receipt(context.home, context.folder)
        cost = receipt.predicate["cost"]["upper_bound_micros"]
        sent = [token for token, asked in state.asked.items() if asked.answer != "refused"]
        if cost is not None:
            for token in state.asked:
                context.budgets.settle(token, Micros(cost if sent[-1:] == [token] else 0), receipt.sha256)


def _link(context: Context) -> Link | None:
    """The run's place in the ledger, if it has one; a ledger that cannot be read is told of when it is written to."""
    with suppress(OSError):
        return read_chain(context.home.ledger).of(context.folder.name)
    return None


def clear_all(state: RunState, context: Context) -> Iterator[Note]:
    """Take away what any asking of the run has left; MayBeBilling while something of it is billed.

    Machines come first: none of them is billed on while something beside another one is waited for.
    """
    opened: list[tuple[_Asking, Provider]] = []
    red: list[MayBeBilling] = []
    for asked in _asked(state, context):
        try:
            opened.append((asked, _open(asked, state, context)))
        except (SetupError, Unknown, MayBeBilling) as error:
            if asked.late or asked.is_billed:
                red.append(error if isinstance(error, MayBeBilling) else _cannot_end(asked, error))
            else:  # Its machines' deaths were proven before.
                yield from once(_unasked(asked.provider, error), context)
    for part in (_late, _beside):
        for asked, provider in list(opened):
            try:
                yield from part(asked, provider, state, context)
            except MayBeBilling as error:  # What the others have left is ended all the same.
                red.append(error)
                opened.remove((asked, provider))  # What lies beside a machine that lives is in use.
    if red:
        raise red[0]


def _open(asked: _Asking, state: RunState, context: Context) -> Provider:
    """The provider that was asked; MayBeBilling where its key is known to be another customer's."""
    provider = context.provider_named(asked.provider)
    # A machine that is known to live is asked to end whatever the key; its death takes the right one (`check_account`).
    # A new key of unknown owner is let look: it removes what it sees, and nothing is concluded from the rest.
    is_named = asked.account.startswith(NAMED)
    if is_named and not asked.late and is_other_account(provider, asked.account, asked.token):
        raise other_account(provider, _of(asked, state))
    return provider


def clear(provider: Provider, token: str, clock: Clock, *, is_billed: bool = False) -> list[Leftover]:
    """Remove what carries a token beside the machines, until a reading shows none; what is left when patience ends.

    `is_billed`: something of it is known to be billed, so that silence means that it still is.
    """
    if not isinstance(provider, LeavesThings):
        return []
    left: list[Leftover] = []
    empty_lists, began_s = 0, clock.monotonic()
    while True:
        try:
            left = provider.leftovers(token)
            is_billed = is_billed or any(one.billed for one in left)
            empty_lists = 0 if left else empty_lists + 1
            if empty_lists >= EMPTY_LISTS:
                return []
            for one in left:
                with suppress(Unknown, Rejected, SetupError):  # What holds it may be the next of them.
                    provider.remove(one)
        except (Unknown, Rejected, SetupError) as error:
            unseen = Leftover(provider=provider.name, kind=f"side resource ({error})", id=token, run="", token=token)
            left = left or [unseen.model_copy(update={"billed": is_billed})]
        # Only for what is left: a laptop that slept through all its patience has not seen three lists.
        if left and clock.monotonic() - began_s >= CLEAR_S:
            return left
        clock.sleep(CLEAR_POLL_S)


def _late(asked: _Asking, provider: Provider, state: RunState, context: Context) -> Iterator[Note]:
    """A machine of any token of the run that shows only now, when its absence had been believed: it is ended too.

    What it was billed is not known from the journal, so the receipt claims no bound any more. Once it is on record,
    no list that is silent about it counts: only the proof of its end does.
    """
    late = list(asked.late)
    for one in _shown(provider, asked.token):
        if one.id not in late:
            yield came_late(one, state)
            late.append(one.id)
    check = _check_account_of(asked, provider, state, context)
    for name in late:
        knock = knock_of(state, replace(context, provider=provider), name)
        ending = prove_termination(
            provider, context.clock, name, asked.token, run=context.plan.run, check_account=check, knock=knock
        )
        for note in ending:
            if isinstance(note, Incident) and note.code in ("account.vouched", "death.denied"):
                yield from once(note, context)
        gone = f"{name} is proven gone"
        yield ExtraGone(code="create.late_gone", message=gone, id=name, token=asked.token)


def came_late(found: Instance, state: RunState) -> Note:
    """Return the record of a machine that shows itself after its end, or its absence, had been believed."""
    is_own = state.instance is not None and found.id == state.instance.id
    what = f"{found.id} {_LIVES if is_own else _LATE}; it was billed besides"
    return Incident(code="create.late", message=what, id=found.id, token=found.token)


def _check_account_of(asked: _Asking, provider: Provider, state: RunState, context: Context) -> CheckAccount:
    """Asks whether an absence at the provider says something of this asking (`account.vouched`)."""
    return partial(check_account, _of(asked, state), replace(context, provider=provider))


def _of(asked: _Asking, state: RunState) -> RunState:
    """The state as far as it tells whose account was asked for what."""
    return state.model_copy(update={"token": asked.token, "account": asked.account})


def _shown(provider: Provider, token: str) -> list[Instance]:
    """What carries the token, as far as the provider shows it now."""
    try:
        return living(provider.find(token), token)
    except Unknown as error:
        return living(error.found, token)
    except (Rejected, SetupError):
        return []  # Its death was proven, or its absence believed, when the provider did answer.


def _beside(asked: _Asking, provider: Provider, state: RunState, context: Context) -> Iterator[Note]:
    """What an asking has left beside its machine: removed, or told; MayBeBilling where it is billed.

    What is billed is on record until readings under the right account's key show that it is gone.
    """
    if asked.is_billed:
        try:
            for note in _check_account_of(asked, provider, state, context)():
                yield from once(note, context)
        except (SetupError, Unknown) as error:
            raise _cannot_end(asked, error) from error
    is_given_up = state.stop == "destroy" and state.reason != "lease"
    if state.shared == "kept" and asked.token == state.token and not is_given_up:
        told = f"what did not come home is kept on the cluster, in the folder {asked.token} of its workdir: "
        told += f"`gpurun collect {state.run}` brings it, `gpurun reap --destroy` removes it"
        yield from once(Incident(code="folder.kept", message=told), context)
        return
    left = clear(provider, asked.token, context.clock, is_billed=asked.is_billed)
    billed = [one for one in left if one.billed]
    for one in left:
        if one not in billed:
            yield from once(_told(one, asked.token), context)
        elif not asked.is_billed:
            yield _told(one, asked.token)
    if billed:
        raise _still_billed(billed[0], provider, context.plan.run)
    if asked.is_billed:
        gone = f"what was billed beside {asked.token} is gone"
        yield Incident(code="leftover_gone", message=gone, token=asked.token)


def _unasked(name: str, error: GpurunError | Unknown) -> Note:
    why = error.what if isinstance(error, GpurunError) else str(error)
    return Incident(code="leftover", message=f"{name} could not be asked what was left there: {why}")


@dataclass(frozen=True)
class _Asking:
    """One asking for a machine, as its intent has it, and what of it is known to cost still.

    `late` are machines that came late and are not proven gone; `is_billed`: so is something beside its machine.
    """

    provider: str
    token: str
    account: str
    late: tuple[str, ...]
    is_billed: bool


def _asked(state: RunState, context: Context) -> Iterator[_Asking]:
    """Every asking for a machine in this run."""
    for intent in all_typed(read_journal(context.folder.journal).records, CreateIntended):
        late = tuple(name for name, token in state.late.items() if token in ("", intent.token))
        yield _Asking(intent.provider, intent.token, intent.account, late, intent.token in state.leftover)


def _cannot_end(asked: _Asking, error: SetupError | Unknown) -> MayBeBilling:
    """The error of what is known to be billed at a provider that cannot be asked now."""
    why, hint = (error.what, error.hint) if isinstance(error, SetupError) else (str(error), "Try again.")
    left = ", ".join(asked.late) or f"what lies beside {asked.token}"
    return MayBeBilling("destroy.cannot_ask", f"{asked.provider} cannot be asked to end {left}: {why}", hint=hint)


def _told(left: Leftover, token: str) -> Note:
    """The record of something that was left; one that is billed leaves the run red until it is gone."""
    what = f"{left.kind} {left.id} is still at {left.provider}; `gpurun reap` removes it"
    billed: Json = {"token": token, "billed": True} if left.billed else {}
    return Incident(code="leftover", message=what, **billed)


def _still_billed(left: Leftover, provider: Provider, run: str) -> MayBeBilling:
    return MayBeBilling(
        "destroy.leftover",
        f"The machine is gone, but its {left.kind} {left.id} at {left.provider} is not, and it is billed.",
        hint=f"Run `gpurun resume {run}`, or remove it by hand: {provider.traits.console_url}.",
    )
