"""Helpers shared by test_offers_in_turn.py and other tests."""

from __future__ import annotations

from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Event
from gpurun.core.paths import Home
from gpurun.core.records import Offer
from gpurun.core.run_plan import Candidate, Plan
from gpurun.ledger.journal import Journal
from gpurun.lifecycle.context import Context
from gpurun.lifecycle.driver import Driver
from tests.changed_plan import changed_plan
from tests.lifecycle.drive import TINY
from tests.lifecycle.scripted_cloud import World


class Market(World):
    """A paid run whose plan has three offers of one cloud, which differ only in their regions."""

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        first = self.plan.offer
        others = [first.model_copy(update={"region": "second"}), first.model_copy(update={"region": "third"})]
        self.set_plan(candidates=tuple(self.candidate(offer) for offer in (first, *others)))

    def candidate(self, offer: Offer) -> Candidate:
        plan = self.plan
        return Candidate(
            offer=offer,
            estimate=plan.estimate,
            lease=plan.lease,
            expected_micros=plan.expected_micros,
            worst_micros=plan.worst_micros,
            finishes=True,
        )

    def set_plan(self, **changes: object) -> None:
        self.plan = changed_plan(self.plan, changes)
        self.folder.plan.write_text(self.plan.to_json())

    def supervise(self) -> ExitCode:
        plan = Plan.from_json(self.folder.plan.read_bytes())
        context = Context(
            home=self.home,
            folder=self.folder,
            plan=plan,
            clock=self.clock,
            provider=self.cloud,
            reach=lambda instance: self.far,
            trainer=TINY / "trainer",
            open=lambda name: self.cloud,
        )
        return Driver(context, Journal.open(self.folder.journal, self.clock)).drive()

    @property
    def regions(self) -> list[str]:
        return [intent["offer"]["region"] for intent in self.all_of(Event.CREATE_INTENDED)]
