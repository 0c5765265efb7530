"""Remove what a rental left beside its machine, count the files here, then write the receipt from the folder alone.

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
EMPTY_LISTS = 3  # One list may be old.


def settle_run(state: RunState, context: Context) -> Iterator[Note]:
    """Clear, write and sign the receipt, and put it into the ledger; doing it twice gives the same bytes.

    If the process was killed after the ledger's line, the receipt stays as it is: it is observed first, and what shows
    up now comes after it.
    """
    is_over, link = state.phase in (Phase.SETTLED, Phase.CLOSED), _link(context)
    if link is not None and not is_over:
        _settle_by_receipt(state, context)  # Before the record: once that is there, this step never runs again.
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
    # Advice for later plans: the receipt does not depend on it.
    add_prior(state, context.plan, context.folder, context.home, context.clock.wall())


def close_machines(state: RunState, context: Context) -> Iterator[Note]:
    """Remove what all machines so far have left, and settle their cost in every budget; the run continues."""
    yield from clear_all(state, context)
    _settle_ended(rentals_of(read_journal(context.folder.journal).records), context)


def _settle_ended(rentals: Sequence[Rental], context: Context) -> None:
    """Settle each rental whose end is proven at what it cost, in place of the held sum; a bill may later lower it."""
    with suppress(GpurunError):
        for rental in rentals:
            if rental.ended and all_bounded([rental]):
                context.budgets.settle(rental.token, rental.micros)


def _settle_by_receipt(state: RunState, context: Context) -> None:
    """Settle the held sums by the receipt; without a bound, or a file to note it in, they stay held."""
    with suppress(GpurunError):
        receipt = read_receipt(context.home, context.folder)
        cost = receipt.predicate["cost"]["upper_bound_micros"]
        sent = [token for token, asked in state.asked.items() if asked.answer != "refused"]
        if cost is not None:
            for token in state.asked:
                context.budgets.settle(token, Micros(cost if sent[-1:] == [token] else 0), receipt.sha256)


def _link(context: Context) -> Link | None:
    """Return the run's place in the ledger, if it has one; a damaged ledger is reported when it is written to."""
    with suppress(OSError):
        return read_chain(context.home.ledger).of(context.folder.name)
    return None


def clear_all(state: RunState, context: Context) -> Iterator[Note]:
    """Remove what each request of the run has left; MayBeBilling while any of it is billed.

    Machines come first, so that none of them is billed while the leftovers of another are waited for.
    """
    opened: list[tuple[_Asking, Provider]] = []
    red: list[MayBeBilling] = []
    for asked in _asked(state, context):
        try:
            opened.append((asked, _open(asked, state, context)))
        except (SetupError, Unknown, MayBeBilling) as error:
            if asked.late or asked.is_billed:
                red.append(error if isinstance(error, MayBeBilling) else _cannot_end(asked, error))
            else:  # The ends of its machines were proven before.
                yield from once(_unasked(asked.provider, error), context)
    for part in (_late, _beside):
        for asked, provider in list(opened):
            try:
                yield from part(asked, provider, state, context)
            except MayBeBilling as error:  # What the others have left is ended anyway.
                red.append(error)
                opened.remove((asked, provider))  # What lies beside a machine that lives is in use.
    if red:
        raise red[0]


def _open(asked: _Asking, state: RunState, context: Context) -> Provider:
    """Return the provider of a request; MayBeBilling if its key is known to be another customer's."""
    provider = context.provider_of(asked.provider, asked.region)
    # A machine that is known to live is ended with any key; its proof needs the right one (`check_account`).
    # A new key of unknown owner may look: it removes what it sees, and nothing is concluded from the rest.
    is_named = asked.account.startswith(NAMED)
    if is_named and not asked.late and is_other_account(provider, asked.account, asked.token):
        raise other_account(provider, _of(asked, state))
    return provider


def clear(provider: Provider, token: str, clock: Clock, *, is_billed: bool = False) -> list[Leftover]:
    """Remove the leftovers that carry a token, until a reading shows none; return what is left when patience ends.

    `is_billed`: some of it is known to be billed, so a missing reply means that it still is.
    """
    if not isinstance(provider, LeavesThings):
        return []
    left: list[Leftover] = []
    empty_lists, began_s = 0, clock.monotonic()
    while True:
        try:
            left = provider.leftovers(token)
            is_billed = is_billed or any(leftover.billed for leftover in left)
            empty_lists = 0 if left else empty_lists + 1
            if empty_lists >= EMPTY_LISTS:
                return []
            for leftover in left:
                with suppress(Unknown, Rejected, SetupError):  # The next leftover may hold this leftover.
                    provider.remove(leftover)
        except (Unknown, Rejected, SetupError) as error:
            unseen = Leftover(provider=provider.name, kind=f"side resource ({error})", id=token, run="", token=token)
            left = left or [unseen.model_copy(update={"billed": is_billed})]
        # The patience limits only leftovers: a laptop that slept through it has not seen three empty lists.
        if left and clock.monotonic() - began_s >= CLEAR_S:
            return left
        clock.sleep(CLEAR_POLL_S)


def _late(asked: _Asking, provider: Provider, state: RunState, context: Context) -> Iterator[Note]:
    """End a machine of any of the run's tokens that shows up only now, after its absence was believed.

    Its bill is not known from the journal, so the receipt no longer claims a bound. Once it is on record, a list
    without it proves nothing: only the proof of its end counts.
    """
    late = list(asked.late)
    for machine in _shown(provider, asked.token):
        if machine.id not in late:
            yield came_late(machine, state)
            late.append(machine.id)
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
    """Return the record of a machine that shows up after its end, or its absence, was believed."""
    is_own = state.instance is not None and found.id == state.instance.id
    what = f"{found.id} {_LIVES if is_own else _LATE}; it was billed as well"
    return Incident(code="create.late", message=what, id=found.id, token=found.token)


def _check_account_of(asked: _Asking, provider: Provider, state: RunState, context: Context) -> CheckAccount:
    """Return the check whether an absence at the provider is meaningful for this request (`account.vouched`)."""
    return partial(check_account, _of(asked, state), replace(context, provider=provider))


def _of(asked: _Asking, state: RunState) -> RunState:
    """Return the state with the token and the account of one request."""
    return state.model_copy(update={"token": asked.token, "account": asked.account})


def _shown(provider: Provider, token: str) -> list[Instance]:
    """Return the living machines with the token, as far as the provider shows them now."""
    try:
        return living(provider.find(token), token)
    except Unknown as error:
        return living(error.found, token)
    except (Rejected, SetupError):
        return []  # Its end was proven, or its absence believed, when the provider did answer.


def _beside(asked: _Asking, provider: Provider, state: RunState, context: Context) -> Iterator[Note]:
    """Remove what a request has left beside its machine, or report it; MayBeBilling if it is billed.

    A billed leftover stays on record until readings under the right account's key show that it is gone.
    """
    if asked.is_billed:
        try:
            for note in _check_account_of(asked, provider, state, context)():
                yield from once(note, context)
        except (SetupError, Unknown) as error:
            raise _cannot_end(asked, error) from error
    is_given_up = state.stop == "destroy" and state.reason != "lease"
    if state.shared == "kept" and asked.token == state.token and not is_given_up:
        message = f"what was not downloaded is kept on the cluster, in the folder {asked.token} of its workdir: "
        message += f"`gpurun collect {state.run}` downloads it, `gpurun reap --destroy` removes it"
        yield from once(Incident(code="folder.kept", message=message), context)
        return
    left = clear(provider, asked.token, context.clock, is_billed=asked.is_billed)
    billed = [leftover for leftover in left if leftover.billed]
    for leftover in left:
        if leftover not in billed:
            yield from once(_left_note(leftover, asked.token), context)
        elif not asked.is_billed:
            yield _left_note(leftover, asked.token)
    if billed:
        raise _still_billed(billed[0], provider, context.plan.run)
    if asked.is_billed:
        gone = f"what was billed beside {asked.token} is gone"
        yield Incident(code="leftover_gone", message=gone, token=asked.token)


def _unasked(name: str, error: GpurunError | Unknown) -> Note:
    why = error.what if isinstance(error, GpurunError) else str(error)
    return Incident(code="leftover", message=f"{name} did not show what was left there: {why}")


@dataclass(frozen=True)
class _Asking:
    """One request for a machine, as its intent records it, and what of it is known to cost still.

    `late` are machines that showed up late and are not proven gone; `is_billed`: so is a leftover beside its machine.
    """

    provider: str
    region: str
    token: str
    account: str
    late: tuple[str, ...]
    is_billed: bool


def _asked(state: RunState, context: Context) -> Iterator[_Asking]:
    """Yield every request for a machine in this run."""
    for intent in all_typed(read_journal(context.folder.journal).records, CreateIntended):
        late = tuple(name for name, token in state.late.items() if token in ("", intent.token))
        region, is_billed = str(intent.offer.get("region", "")), intent.token in state.leftover
        yield _Asking(intent.provider, region, intent.token, intent.account, late, is_billed)


def _cannot_end(asked: _Asking, error: SetupError | Unknown) -> MayBeBilling:
    """Return the error for what is known to be billed at a provider that does not answer now."""
    why, hint = (error.what, error.hint) if isinstance(error, SetupError) else (str(error), "Try again.")
    left = ", ".join(asked.late) or f"what is beside {asked.token}"
    return MayBeBilling("destroy.cannot_ask", f"{asked.provider} cannot end {left} now: {why}", hint=hint)


def _left_note(left: Leftover, token: str) -> Note:
    """Return the record of a leftover; one that is billed leaves the run red until it is gone."""
    what = f"{left.kind} {left.id} is still at {left.provider}; `gpurun reap` removes it"
    billed: Json = {"token": token, "billed": True} if left.billed else {}
    return Incident(code="leftover", message=what, **billed)


def _still_billed(left: Leftover, provider: Provider, run: str) -> MayBeBilling:
    return MayBeBilling(
        "destroy.leftover",
        f"The machine is gone, but its {left.kind} {left.id} at {left.provider} is not, and it is billed.",
        hint=f"Run `gpurun resume {run}`, or remove it by hand: {provider.traits.console_url}.",
    )
