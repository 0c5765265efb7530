"""Remove a rental's side resources, count the local files, then write the receipt.

The receipt is written last and only from the run's folder, so that a crash before that does not change it.
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
from gpurun.ledger.rental import Rental, are_costs_bounded, rentals_of, unseen_ends
from gpurun.ledger.write_receipt import read_receipt, write_receipt
from gpurun.lifecycle.artifacts.inventory import Inventory
from gpurun.lifecycle.charges import final_bills
from gpurun.lifecycle.context import Context, Note
from gpurun.lifecycle.instance.readings import living_instances
from gpurun.lifecycle.instance.terminate import (
    NAMED,
    CheckAccount,
    check_account,
    is_other_account,
    make_answer_check,
    note_once,
    other_account,
    prove_termination,
)
from gpurun.planning.history_file import add_prior
from gpurun.providers.base import LeavesThings, Provider, Rejected, Unknown
from gpurun.remote.key_pairs import forget_client_key

# A firewall group can be removed only after the machine's network card, which a cloud removes after a minute or two.
CLEAR_S = 180.0
CLEAR_POLL_S = 5.0
_LATE = "was created after it had been recorded as absent"
_LIVES = "still runs although its end was recorded"
EMPTY_LISTS = 3  # One list may be old.


def settle_run(state: RunState, context: Context) -> Iterator[Note]:
    """Remove side resources, then write and sign the receipt and add it to the ledger. Repeating gives the same bytes.

    If an earlier process was killed after it wrote the ledger, the receipt stays as it is and is recorded first. Any
    later finding comes after it in the journal.
    """
    is_over, link = state.phase in (Phase.SETTLED, Phase.CLOSED), _read_ledger_link(context)
    if link is not None and not is_over:
        _settle_by_receipt(state, context)  # Before the record is written, because after it this step never runs again.
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
    # Only later plans use this; the receipt does not.
    add_prior(state, context.plan, context.folder, context.home, context.clock.wall())


def close_machines(state: RunState, context: Context) -> Iterator[Note]:
    """End late machines, remove all side resources, and settle each rental with a proven end in the budgets.

    The run stays open. MayBeBilling if a late machine may still be billed.
    """
    yield from clear_all(state, context)
    _settle_ended(rentals_of(read_journal(context.folder.journal).records), context)


def _settle_ended(rentals: Sequence[Rental], context: Context) -> None:
    """Enter the cost of each rental with a proven end in the budgets, in place of the reserved amount.

    A later bill may lower the amount.
    """
    with suppress(GpurunError):
        for rental in rentals:
            if rental.ended and are_costs_bounded([rental]):
                context.budgets.settle(rental.token, rental.micros)


def _settle_by_receipt(state: RunState, context: Context) -> None:
    """Replace the amounts that are reserved in the budgets by the receipt's cost.

    If the receipt has no upper bound, or a budget cannot be written, the amounts stay reserved.
    """
    with suppress(GpurunError):
        receipt = read_receipt(context.home, context.folder)
        cost = receipt.predicate["cost"]["upper_bound_micros"]
        sent = [token for token, request in state.attempts.items() if request.answer != "refused"]
        if cost is not None:
            for token in state.attempts:
                context.budgets.settle(token, Micros(cost if sent[-1:] == [token] else 0), receipt.sha256)


def _read_ledger_link(context: Context) -> Link | None:
    """Return the run's line in the ledger, or None. Whoever writes the receipt reports a damaged ledger."""
    with suppress(OSError):
        return read_chain(context.home.ledger).link_of(context.folder.name)
    return None


def clear_all(state: RunState, context: Context) -> Iterator[Note]:
    """End late machines and remove side resources of every create request. Raise MayBeBilling if any is billed.

    Machines are ended first, so that none is billed while the side resources of another machine are removed.
    """
    opened: list[tuple[_CreateRequest, Provider]] = []
    red: list[MayBeBilling] = []
    for request in _create_requests(state, context):
        try:
            opened.append((request, _open_provider(request, state, context)))
        except (SetupError, Unknown, MayBeBilling) as error:
            if request.late or request.is_billed:
                red.append(error if isinstance(error, MayBeBilling) else _make_cannot_end_error(request, error))
            else:  # The end of this request's machine is already proven.
                yield from note_once(_no_answer_note(request.provider, error), context)
    for part in (_end_late_machines, _remove_leftovers):
        for request, provider in list(opened):
            try:
                yield from part(request, provider, state, context)
            except MayBeBilling as error:  # The other requests are still handled.
                red.append(error)
                opened.remove((request, provider))  # The machine of this request still uses its side resources.
    if red:
        raise red[0]


def _open_provider(request: _CreateRequest, state: RunState, context: Context) -> Provider:
    """Return the provider of a create request. Raise MayBeBilling if its key is known to belong to another account."""
    provider = context.provider_of(request.provider, request.region)
    # A machine that is known to live is ended with any key; only its proof needs the right key (`check_account`). The
    # key of an unknown account may be used too: what it sees is removed, and what it does not see proves nothing.
    is_named = request.account.startswith(NAMED)
    if is_named and not request.late and is_other_account(provider, request.account, request.token):
        raise other_account(provider, _make_request_state(request, state))
    return provider


def clear(provider: Provider, token: str, clock: Clock, *, is_billed: bool = False) -> list[Leftover]:
    """Remove the side resources with a token until the provider lists none. Return those that remain after CLEAR_S.

    `is_billed` means that some are known to be billed; then a missing reply counts as a billed resource.
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
                with suppress(Unknown, Rejected, SetupError):  # Another leftover may still use it.
                    provider.remove(leftover)
        except (Unknown, Rejected, SetupError) as error:
            unseen = Leftover(provider=provider.name, kind=f"side resource ({error})", id=token, run="", token=token)
            left = left or [unseen.model_copy(update={"billed": is_billed})]
        # Time out only if something is left: a computer that slept has not read three empty lists.
        if left and clock.monotonic() - began_s >= CLEAR_S:
            return left
        clock.sleep(CLEAR_POLL_S)


def _end_late_machines(
    request: _CreateRequest, provider: Provider, state: RunState, context: Context
) -> Iterator[Note]:
    """End machines with one of the run's tokens that appear after they were recorded as absent or ended.

    The journal does not show what such a machine cost, so the receipt states no upper bound. Once the machine is
    recorded, its absence from a list is not enough; its end must be proven.
    """
    late = list(request.late)
    for machine in _listed(provider, request.token):
        if machine.id not in late:
            yield came_late(machine, state)
            late.append(machine.id)
    check = _check_account_of(request, provider, state, context)
    for name in late:
        knock = make_answer_check(state, replace(context, provider=provider), name)
        ending = prove_termination(
            provider, context.clock, name, request.token, run=context.plan.run, check_account=check, knock=knock
        )
        for note in ending:
            if isinstance(note, Incident) and note.code in ("account.vouched", "death.denied"):
                yield from note_once(note, context)
        gone = f"{name} is proven gone"
        yield ExtraGone(code="create.late_gone", message=gone, id=name, token=request.token)


def came_late(found: Instance, state: RunState) -> Note:
    """Return the incident for a machine that is alive although its end or its absence was recorded."""
    is_own = state.instance is not None and found.id == state.instance.id
    what = f"{found.id} {_LIVES if is_own else _LATE}; it was billed as well"
    return Incident(code="create.late", message=what, id=found.id, token=found.token)


def _check_account_of(request: _CreateRequest, provider: Provider, state: RunState, context: Context) -> CheckAccount:
    """Return the function that checks the account of this create request (see `check_account`)."""
    return partial(check_account, _make_request_state(request, state), replace(context, provider=provider))


def _make_request_state(request: _CreateRequest, state: RunState) -> RunState:
    """Return the state with the token and account of this create request."""
    return state.model_copy(update={"token": request.token, "account": request.account})


def _listed(provider: Provider, token: str) -> list[Instance]:
    """Return the living machines with the token that the provider lists now; none if it does not answer."""
    try:
        return living_instances(provider.find(token), token)
    except Unknown as error:
        return living_instances(error.found, token)
    except (Rejected, SetupError):
        return []  # Earlier replies have shown that no machine is left.


def _remove_leftovers(request: _CreateRequest, provider: Provider, state: RunState, context: Context) -> Iterator[Note]:
    """Remove the side resources of a create request; record those that remain. Raise MayBeBilling if one is billed.

    A billed resource stays recorded as such until lists, read with the right account's key, show that it is gone.
    """
    if request.is_billed:
        try:
            for note in _check_account_of(request, provider, state, context)():
                yield from note_once(note, context)
        except (SetupError, Unknown) as error:
            raise _make_cannot_end_error(request, error) from error
    is_given_up = state.stop == "destroy" and state.reason != "lease"
    if state.shared == "kept" and request.token == state.token and not is_given_up:
        message = f"missing files are kept on the cluster, in the folder {request.token} of its workdir: "
        message += f"`gpurun collect {state.run}` downloads them, `gpurun reap --destroy` removes them"
        yield from note_once(Incident(code="folder.kept", message=message), context)
        return
    left = clear(provider, request.token, context.clock, is_billed=request.is_billed)
    billed = [leftover for leftover in left if leftover.billed]
    for leftover in left:
        if leftover not in billed:
            yield from note_once(_make_leftover_note(leftover, request.token), context)
        elif not request.is_billed:
            yield _make_leftover_note(leftover, request.token)
    if billed:
        raise _make_billed_error(billed[0], provider, context.plan.run)
    if request.is_billed:
        gone = f"what was billed beside {request.token} is gone"
        yield Incident(code="leftover_gone", message=gone, token=request.token)


def _no_answer_note(name: str, error: GpurunError | Unknown) -> Note:
    why = error.what if isinstance(error, GpurunError) else str(error)
    return Incident(code="leftover", message=f"{name} did not list the resources that were left there: {why}")


@dataclass(frozen=True)
class _CreateRequest:
    """One create request from the journal, and which of its machines and resources are known to be billed.

    `late` are the machines that appeared after their absence or end was recorded and that are not proven gone.
    `is_billed` means that a side resource is still billed.
    """

    provider: str
    region: str
    token: str
    account: str
    late: tuple[str, ...]
    is_billed: bool


def _create_requests(state: RunState, context: Context) -> Iterator[_CreateRequest]:
    """Yield every create request of this run."""
    for intent in all_typed(read_journal(context.folder.journal).records, CreateIntended):
        late = tuple(name for name, token in state.late.items() if token in ("", intent.token))
        region, is_billed = str(intent.offer.get("region", "")), intent.token in state.leftover
        yield _CreateRequest(intent.provider, region, intent.token, intent.account, late, is_billed)


def _make_cannot_end_error(request: _CreateRequest, error: SetupError | Unknown) -> MayBeBilling:
    """Return the error for billed machines or resources at a provider that does not answer now."""
    why, hint = (error.what, error.hint) if isinstance(error, SetupError) else (str(error), "Try again.")
    left = ", ".join(request.late) or f"what is beside {request.token}"
    return MayBeBilling("destroy.cannot_ask", f"{request.provider} cannot end {left} now: {why}", hint=hint)


def _make_leftover_note(left: Leftover, token: str) -> Note:
    """Return the incident for a leftover. A billed leftover keeps the run red until it is gone."""
    what = f"{left.kind} {left.id} is still at {left.provider}; `gpurun reap` removes it"
    billed: Json = {"token": token, "billed": True} if left.billed else {}
    return Incident(code="leftover", message=what, **billed)


def _make_billed_error(left: Leftover, provider: Provider, run: str) -> MayBeBilling:
    return MayBeBilling(
        "destroy.leftover",
        f"The machine is gone, but its {left.kind} {left.id} at {left.provider} is not, and it is billed.",
        hint=f"Run `gpurun resume {run}`, or remove it by hand: {provider.traits.console_url}.",
    )
