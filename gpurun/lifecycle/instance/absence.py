"""Decide when a new machine counts as gone before it was ready, and then take the next offer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from gpurun.core.errors import NoOffer, SetupError
from gpurun.core.journal_events import Incident
from gpurun.core.journal_records import RunState
from gpurun.core.money import total
from gpurun.core.records import Instance, InstanceState
from gpurun.ledger.journal import read_journal
from gpurun.ledger.spending import records_until
from gpurun.lifecycle.context import Context, Note, pays_for_another, spent_at_most
from gpurun.lifecycle.instance.readings import living_instances
from gpurun.providers.base import Rejected, Unknown


@dataclass
class Absence:
    """A series of readings that show a new machine as gone; a reading that shows it alive restarts the series.

    The machine counts as gone after the provider's settling time. Two readings are enough if the provider still lists
    the machine as ended (`is_listed`). `reason` is the provider's reason, if it gives one.
    """

    since_mono: float | None = None
    is_listed: bool = False
    reason: str = ""

    def is_believed(self, seen: Instance, state: RunState, context: Context) -> bool:
        """Add a reading. Return whether the readings so far are enough to treat the machine as gone."""
        now_mono, is_first, listed = context.clock.monotonic(), self.since_mono is None, list[Instance]()
        if seen.state is not InstanceState.GONE:
            self.since_mono = None
            return False
        with suppress(Unknown, Rejected, SetupError):  # Without a list, only the reading counts.
            listed = [instance for instance in context.provider.find(state.token) if instance.id == seen.id]
        if living_instances(listed, state.token):
            self.since_mono = None
            return False
        self.since_mono = now_mono if self.since_mono is None else self.since_mono
        self.is_listed = bool(listed) or seen.token == state.token  # Without a token, the provider has forgotten it.
        self.reason = seen.said or next((instance.said for instance in listed if instance.said), "") or self.reason
        settle_s = context.provider.traits.settle_s
        return (self.is_listed and not is_first) or now_mono - self.since_mono >= settle_s


def next_offer(born: Instance, absence: Absence, state: RunState, context: Context) -> Iterator[Note]:
    """Record that the machine is gone, so that the next offer is tried. Raise NoOffer if no other offer can be tried.

    If the provider only no longer shows the machine, it may still run; the cap must then cover both machines.
    """
    name = context.provider.name
    what = f"{name} shows {born.id} as gone before it was ready{f': {absence.reason}' if absence.reason else ''}"
    if not context.has_offer(state.passed_over + 1):
        raise NoOffer("boot.gone", f"{what}.", hint="Try again, or another region or provider.")
    if not _pays_for_next(absence, state, context):
        hint = "The cap does not cover a second machine in addition to it: raise --max-cost, or try again."
        raise NoOffer("boot.gone", f"{what}.", hint=hint)
    message = f"{what}; the next offer is taken"
    yield Incident(code="boot.gone", message=message, id=born.id, token=state.token)


def _pays_for_next(absence: Absence, state: RunState, context: Context) -> bool:
    plan = context.plan
    worst = plan.with_chosen(plan.approved[state.passed_over + 1]).worst_micros
    if plan.cap_micros is None or pays_for_another(state, plan.cap_left_micros, worst):
        return True
    until_wall = context.clock.wall() + plan.lease.destroy_s
    records = records_until(read_journal(context.folder.journal).records, until_wall)
    spent = spent_at_most(state, records, state.leg)
    return absence.is_listed and total(spent, worst) <= plan.cap_micros
