"""What a run cost by its provider's own account, where that tells what it billed for one machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpurun.core.errors import GpurunError
from gpurun.core.money import Micros, total
from gpurun.core.paths import RunFolder
from gpurun.core.untrusted import plain_line
from gpurun.ledger.journal import read_journal
from gpurun.ledger.rental import Rental, rentals_of
from gpurun.providers.base import Provider, Rejected, ReportsCharges, Unknown


@dataclass(frozen=True)
class Bill:
    """What was billed for a run's machines, as far as it is told; None where nothing is.

    `is_settled`: it changes no more. `unclear` says in words what is not in it, and why.
    """

    micros: Micros | None
    is_settled: bool
    unclear: tuple[str, ...] = ()


def bill_of(folder: RunFolder, provider_named: Callable[[str], Provider]) -> Bill | None:
    """Ask for the bill of every machine that a run had; None for a run that rented none."""
    try:
        rentals = rentals_of(read_journal(folder.journal).records)
    except GpurunError as error:
        return Bill(None, is_settled=False, unclear=(error.what,))
    rented = [one for one in rentals if one.instance is not None and one.intent.data["rate_micros_per_hour"]]
    if not rented:
        return None
    amounts, is_settled, unclear = list[Micros](), True, list[str]()
    for rental in rented:
        told = _charge(rental, provider_named)
        if isinstance(told, str):
            unclear.append(plain_line(told))
            continue
        amounts.append(told[0])
        is_settled = is_settled and told[1] and rental.end != "not_proven"
        if rental.machines > 1:
            unclear.append("the bill of a duplicate machine is not in it")
    return Bill(total(*amounts) if amounts else None, is_settled and bool(amounts), tuple(dict.fromkeys(unclear)))


def _charge(rental: Rental, provider_named: Callable[[str], Provider]) -> tuple[Micros, bool] | str:
    """The bill of one machine and whether it is settled; in words why there is none."""
    name, instance = str(rental.intent.data["provider"]), rental.instance or {}
    try:
        provider = provider_named(name)
        if not isinstance(provider, ReportsCharges):
            return f"{name} does not tell what it billed for one machine"
        charge = provider.charges(str(instance["id"]), rental.intent.wall, rental.records[-1].wall)
    except (Unknown, Rejected) as error:
        return f"{name} could not be asked: {error}"
    except GpurunError as error:
        return f"{name} could not be asked: {error.what}"
    return (charge.micros, charge.settled) if charge is not None else f"{name} has no bill of it yet"
