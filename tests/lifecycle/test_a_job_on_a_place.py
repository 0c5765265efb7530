"""Tests that gpurun can run a new kind of job on a new kind of place and write an audited receipt.

Both kinds are defined in this file, and no file of gpurun names them: other kinds can be added in the same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gpurun.core import places
from gpurun.core.clock import SystemClock
from gpurun.core.errors import ExitCode
from gpurun.core.job_terms import COMMAND, JobTerms
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.core.records import GpuNeed, Instance, Offer, Teardown
from gpurun.core.run_plan import Candidate, DataSummary, Estimate, Job, Plan, Request, Workload
from gpurun.core.uplink import Uplink
from gpurun.ledger.audit import audit
from gpurun.ledger.journal import read_journal
from gpurun.ledger.runs import create_run
from gpurun.ledger.write_receipt import read_receipt
from gpurun.lifecycle.supervisor import supervise
from gpurun.planning import place
from gpurun.planning.budget import lease_for, worst_case
from gpurun.planning.candidates import Quote
from gpurun.planning.market import Market
from gpurun.planning.place import Desk, Place
from gpurun.planning.planner import Proposal, make_plan
from gpurun.planning.transfer import Load
from gpurun.providers import registry
from gpurun.providers.base import EndsBy, Traits
from gpurun.providers.local import LocalProvider
from gpurun.view.plan_screen import plan_text
from gpurun.view.style import Style
from tests.command_line import gpurun

COUNTING = """\
import hashlib, json, pathlib, sys, time
out, most = pathlib.Path("../out"), int(sys.argv[1])
def tell(kind, step, **more):
    with open(out / "events.jsonl", "a") as events:
        events.write(json.dumps({"kind": kind, "wall": time.time(), "elapsed_s": 0.1, "step": step, **more}) + "\\n")
tell("start", 0, steps=most)
text = "\\n".join(str(n) for n in range(2, most) if all(n % k for k in range(2, n)))
(out / "outputs").mkdir(parents=True)
(out / "outputs" / "primes.txt").write_text(text)
file = {"name": "outputs/primes.txt", "kind": "output", "step": most, "bytes": len(text)}
file["sha256"] = hashlib.sha256(text.encode()).hexdigest()
(out / "MANIFEST.json").write_text(json.dumps({"v": 1, "latest": most, "best": None, "files": [file]}))
tell("stop", most, reason="done", message="", train_s=0.1, final_loss=None)
"""


class PrimesJob(Job):
    """A job that lists the primes below `most`."""

    kind: ClassVar[str] = "primes"
    terms: ClassVar[JobTerms] = COMMAND
    disk_gb: ClassVar[int] = 1
    home_bytes: ClassVar[int] = 1_000_000
    save_s: ClassVar[int] = 5

    most: int

    def workload(self, plan: Plan, trainer: Path, cpus: int) -> Workload:
        return Workload(("{python}", "count.py", str(self.most)), {"bundle/count.py": COUNTING.encode()}, {})

    def digest(self, plan: Plan, trainer: Path) -> str:
        return hashlib.sha256(COUNTING.encode()).hexdigest()


class PrimesProposal(Proposal):
    """A proposal for a job that needs a minute on any machine."""

    def need(self, place: Place) -> GpuNeed:
        return GpuNeed(count=0, name="cpu")

    def prepared_data(self) -> DataSummary:
        return DataSummary(folder="", bytes=0, sha256="", source="no data")

    def quote(self, place: Place, market: Market | None, data: DataSummary | None) -> Quote:
        assert market is not None
        load = Load(1_000, 1_000_000, 1)
        guess = Estimate(fits=True, peak_bytes=0, micro_batch=0, tokens_per_s=None, train_s=None, basis="a minute")
        found = []
        for offer in market.offers:
            lease = lease_for(offer, guess, load, cap=place.cap, hours=1 / 60)
            assert lease is not None
            worst = worst_case(offer, lease, load)
            found.append(Candidate(offer=offer, estimate=guess, lease=lease, expected_micros=None,
                                   worst_micros=worst, finishes=True))  # fmt: skip
        return Quote(tuple(found), load, Uplink(), ("It counts.",))

    def choose(self, quote: Quote, place: Place) -> tuple[Candidate, Quote]:
        return quote.candidates[0], quote

    def job(self, data: DataSummary) -> PrimesJob:
        return PrimesJob(recipe="primes", recipe_sha256="0" * 64, most=100)


class MoonProvider(LocalProvider):
    """The local provider under the name "moon": a machine costs $2 per hour and is released at the end."""

    name = "moon"
    traits = Traits(
        settle_s=0.1, poll_s=0.1, death_reads=3, death_spread_s=10.0, teardown=Teardown.RELEASED, console_url="",
        ends_by=EndsBy.MACHINE,
    )  # fmt: skip

    def offers(self, need: GpuNeed, known: Sequence[Offer]) -> list[Offer]:
        changes = {"rate_micros_per_hour": usd(2), "region": "crater", "price_source": "the moon"}
        return [offer.model_copy(update=changes) for offer in super().offers(need, known)]

    def read(self, instance_id: str) -> Instance:
        return super().read(instance_id).model_copy(update={"rate_micros_per_hour": usd(2), "region": "crater"})


class MoonPlace(Place):
    """A rented place whose market has the moon's offers only."""

    is_rented = True

    def market(self, need: GpuNeed) -> Market:
        self.demand_cap()
        found = MoonProvider(self.desk.home, self.desk.clock).offers(need, ())
        return Market(tuple(found), (), self.desk.clock.wall(), ("moon",))


@pytest.fixture
def moon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the moon as a provider and as a place that gpurun can plan for."""
    monkeypatch.setitem(registry.PROVIDERS, "moon", lambda home, clock, choices: MoonProvider(home, clock))
    monkeypatch.setitem(places.PLACES, "moon", places.PlaceFacts(kind="moon"))
    monkeypatch.setitem(place.PLACES, "moon", MoonPlace)


def test_a_new_job_on_a_new_place_is_planned_rented_and_audited(
    moon: None, own_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, clock = Home(own_home).prepare(), SystemClock()
    request = Request(recipe="", providers=("moon",), max_cost_micros=usd(1))
    plan = make_plan(PrimesProposal(request, Desk("fox-41", home, clock, print)))
    assert plan.worst_micros <= usd(1)
    shown = plan_text(plan, Style(width=120))
    assert "primes" in shown
    assert "It counts." in shown
    folder = create_run(home, request, plan)
    assert Plan.from_json(folder.plan.read_bytes()) == plan

    assert supervise(home, "fox-41", clock) is ExitCode.DONE
    assert (folder.artifacts / "outputs" / "primes.txt").read_text().split()[:4] == ["2", "3", "5", "7"]
    assert [row.problems for row in audit(home).rows] == [()]
    predicate: dict[str, Any] = dict(read_receipt(home, folder).predicate)
    ordered, cost = predicate["asked"], predicate["cost"]
    assert (ordered["job"], ordered["provider"]) == ("primes", "moon")
    assert 0 < cost["upper_bound_micros"] <= plan.worst_micros
    assert predicate["teardown"]["is"] == "released"
    for verb in (("ps", "--all"), ("audit",), ("receipt", "fox-41"), ("report", "fox-41"), ("logs", "fox-41")):
        done = gpurun(*verb)
        assert done.returncode == 0, (verb, done.stdout, done.stderr)
    assert MoonProvider(home, clock).find(None) == []
    assert len(read_journal(folder.journal).records) > 10
