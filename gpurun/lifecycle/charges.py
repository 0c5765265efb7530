"""Read what a run cost from its provider's bill, if the provider reports the bill for a single machine.

A bill keeps growing for minutes after a machine's end. It is final once two readings ten minutes apart agree. A receipt
waits for a final bill only if the machine's end was not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gpurun.core.clock import ticks
from gpurun.core.errors import GpurunError
from gpurun.core.journal_events import BillObserved, Incident
from gpurun.core.journal_records import RunState
from gpurun.core.money import Micros, total
from gpurun.core.paths import RunFolder
from gpurun.core.untrusted import plain_line
from gpurun.ledger.journal import read_journal
from gpurun.ledger.rental import Rental, rentals_of
from gpurun.lifecycle.context import Context, Note
from gpurun.lifecycle.instance.terminate import note_once
from gpurun.providers.base import Provider, Rejected, ReportsCharges, Unknown

BILL_GAP_S, BILL_WAIT_S, LOOK_S = 600.0, 1800.0, 30.0
"""Seconds between two readings of a bill, the longest wait for them, and between two checks for a stop request."""


@dataclass(frozen=True)
class Bill:
    """The amount that was billed for a run's machines, as far as it is known; `micros` is None if no amount is known.

    `is_settled` means that the amount no longer changes. `unclear` has a phrase for each thing that it does not
    include.
    """

    micros: Micros | None
    is_settled: bool
    unclear: tuple[str, ...] = ()


def bill_of(folder: RunFolder, provider_named: Callable[[str], Provider]) -> Bill | None:
    """Request the bill of every machine that a run had. Return None if the run rented no machine."""
    try:
        rentals = rentals_of(read_journal(folder.journal).records)
    except GpurunError as error:
        return Bill(None, is_settled=False, unclear=(error.what,))
    rented = [rental for rental in rentals if rental.instance is not None and rental.intent.rate_micros_per_hour]
    if not rented:
        return None
    amounts, is_settled, unclear = list[Micros](), True, list[str]()
    for rental in rented:
        charge = _read_charge(rental, provider_named, rental.records[-1].wall)
        if isinstance(charge, str):
            unclear.append(plain_line(charge))
            continue
        amounts.append(charge[0])
        is_settled = is_settled and charge[1] and rental.end != "not_proven"
        if rental.machines > 1:
            unclear.append("the bill of a duplicate machine is not in it")
    return Bill(total(*amounts) if amounts else None, is_settled and bool(amounts), tuple(dict.fromkeys(unclear)))


def _read_charge(
    rental: Rental, provider_named: Callable[[str], Provider], until_wall: float
) -> tuple[Micros, bool] | str:
    """Return one machine's bill and whether it is final; if there is no bill, return a phrase that says why."""
    name = rental.intent.provider
    try:
        provider = provider_named(name)
        if not isinstance(provider, ReportsCharges):
            return f"{name} does not report the bill for a single machine"
        charge = provider.charges(rental.machine_id, rental.asked.wall, until_wall)
    except (Unknown, Rejected) as error:
        return f"{name} did not report its bill: {error}"
    except GpurunError as error:
        return f"{name} did not report its bill: {error.what}"
    except Exception as error:  # noqa: BLE001 - an unreadable reply has no bill.
        return f"{name}'s bill cannot be read: {type(error).__name__}"
    return (charge.micros, charge.settled) if charge is not None else f"{name} has no bill for it yet"


def final_bills(rentals: Sequence[Rental], state: RunState, context: Context) -> Iterator[Note]:
    """Wait until the bills of machines whose end was not seen are final, and record the final bills.

    The wait is at most BILL_WAIT_S, and a stop request ends it. Without a final bill, the receipt states only an upper
    bound of the cost.
    """
    seen, final = dict[str, tuple[float, Micros | None]](), set[str]()
    unseen = [rental for rental in rentals if _reports_charges(rental, context)]
    for rental in unseen:
        message = f"the end of {rental.machine_id} was not seen: the receipt waits up to half an hour for "
        message += f"{rental.intent.provider}'s bill; nothing is billed during the wait"
        yield from note_once(Incident(code="bill.awaited", message=message), context)
    for elapsed in ticks(context.clock, LOOK_S, BILL_WAIT_S) if unseen else ():
        for rental in unseen:
            at_s, before = seen.get(rental.token, (float("-inf"), None))
            if rental.token in final or elapsed - at_s < BILL_GAP_S:
                continue
            charge = _read_charge(rental, context.provider_named, context.clock.wall())
            if isinstance(charge, str):
                continue
            seen[rental.token] = elapsed, charge[0]
            if charge[0] == before:
                final.add(rental.token)
                token, name, micros = rental.token, rental.machine_id, charge[0]
                yield BillObserved(token=token, id=name, micros=micros, reads=2, spread_s=round(elapsed - at_s, 3))
        if len(final) == len(unseen) or context.wants_stop(state):
            return


def _reports_charges(rental: Rental, context: Context) -> bool:
    """Return whether the machine was created and its provider reports the bill for a single machine."""
    try:
        provider = context.provider_named(rental.intent.provider)
    except GpurunError:
        return False
    return rental.instance is not None and isinstance(provider, ReportsCharges)
