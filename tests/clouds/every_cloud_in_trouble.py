"""An account at each emulated cloud and a rental on it, for test_every_cloud_in_trouble.py and other tests."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest

from gpurun.core.clock import VirtualClock
from gpurun.core.errors import ExitCode, MayBeBilling
from gpurun.core.journal_records import Event
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.core.records import GpuNeed, Offer
from gpurun.core.run_plan import Candidate, Mode, Plan
from gpurun.core.secrets import Secret
from gpurun.ledger.audit import audit
from gpurun.ledger.journal import Journal, read_journal
from gpurun.lifecycle.context import Context
from gpurun.lifecycle.driver import Driver
from gpurun.lifecycle.steps.await_ready import NEVER_WALL
from gpurun.providers.aws import AwsProvider
from gpurun.providers.base import Provider
from gpurun.providers.catalog import rows_for
from gpurun.providers.lambdalabs import LambdaProvider
from gpurun.providers.runpod import RunPodProvider
from gpurun.remote.messages import EndAnswer
from tests.changed_plan import changed_plan
from tests.emulators import aws, lambda_cloud, runpod
from tests.emulators.fake import FakeCloud
from tests.emulators.guests import Meter
from tests.lifecycle.drive import TINY
from tests.lifecycle.scripted_cloud import LEASE, Killed, ScriptedFar
from tests.lifecycle.tiny_runs import make_run

# AWS is slow because its SDK takes seconds to read its own description of EC2.
CLOUDS = (pytest.param("aws", marks=pytest.mark.slow), "lambda", "runpod")


@dataclass
class Account:
    """An account at one emulated cloud, with the same controls for each cloud."""

    provider: Provider
    clock: VirtualClock
    emulator: Any
    routes: dict[str, str]
    """The cloud's names for create, list, read and destroy."""
    faults: Any
    regions: tuple[str, str]
    need: GpuNeed
    lies: Callable[[], None]
    """Lets the cloud confirm the next request to end a machine without ending it."""
    revoke: Callable[[bool], None]
    hide: Callable[[float], None]
    """Omits a machine from lists for so many seconds after its creation."""
    lost: Any
    throttled: Any
    full: Callable[[], None]
    """Lets the first region refuse a create for lack of capacity, although the region was offered."""

    @property
    def alive(self) -> list[Any]:
        return list(self.emulator.world.alive)

    @property
    def made(self) -> int:
        """The number of machines that were ever created."""
        world = self.emulator.world
        return len(world.pods if self.provider.name == "runpod" else world.instances)

    @property
    def meter(self) -> Meter:
        return cast(Meter, self.emulator.world.meter)

    def passing(self, place: str) -> None:
        """Do nothing; the scripted machine calls this before each verb, because other clouds kill a supervisor here."""

    def fail(self, verb: str, *faults: Any) -> None:
        self.emulator.fail(self.routes[verb], *faults)


@contextmanager
def _runpod(clock: VirtualClock, patch: pytest.MonkeyPatch) -> Iterator[Account]:
    patch.setattr("gpurun.providers.runpod.graphql.is_installed", lambda: False)
    with runpod.RunPodEmulator(clock=clock, tick_s=None) as emulator:
        world, key = emulator.world, Secret(runpod.FULL_KEY)

        def revoke(now: bool) -> None:
            for route in ("create", "list", "read", "delete", "action"):
                emulator.faults[route] = [runpod.Fault.REVOKED] * 1000 if now else []

        yield Account(
            provider=RunPodProvider(key, clock, base_url=emulator.base_url),
            clock=clock,
            emulator=emulator,
            routes={"create": "create", "list": "list", "read": "read", "destroy": "delete"},
            faults=runpod.Fault,
            regions=("EU-RO-1", "US-KS-2"),
            need=GpuNeed(count=1, name="A100"),
            lies=lambda: setattr(world, "deaf_deletes", 1),
            revoke=revoke,
            hide=lambda lag_s: setattr(world, "list_lag_s", lag_s),
            lost=runpod.Fault.DROP_RESPONSE,
            throttled=runpod.Fault.TOO_MANY,
            full=lambda: emulator.fail("create", runpod.Fault.SOLD_OUT),
        )


@contextmanager
def _lambda(clock: VirtualClock, patch: pytest.MonkeyPatch) -> Iterator[Account]:
    with lambda_cloud.LambdaEmulator(clock=clock, tick_s=None) as emulator:
        world, key = emulator.world, Secret(lambda_cloud.KEY)
        yield Account(
            provider=LambdaProvider(key, clock, base_url=emulator.base_url),
            clock=clock,
            emulator=emulator,
            routes={"create": "launch", "list": "list", "read": "read", "destroy": "terminate"},
            faults=lambda_cloud.Fault,
            regions=("us-east-1", "us-west-1"),
            need=GpuNeed(count=1, name="A10"),
            lies=lambda: setattr(world, "deaf_terminates", 1),
            revoke=lambda now: setattr(emulator, "api_keys", set() if now else {lambda_cloud.KEY}),
            hide=lambda lag_s: setattr(world, "list_lag_s", lag_s),
            lost=lambda_cloud.Fault.DROP_RESPONSE,
            throttled=lambda_cloud.Fault.TOO_MANY,
            full=lambda: emulator.fail("launch", lambda_cloud.Fault.SOLD_OUT),
        )


@contextmanager
def _aws(clock: VirtualClock, patch: pytest.MonkeyPatch) -> Iterator[Account]:
    with aws.AwsEmulator(clock=clock, tick_s=None) as emulator:
        for name, value in emulator.environment.items():
            patch.setenv(name, value)
        emulator.rules.image_gb = 8
        provider = AwsProvider(clock, my_address=lambda: "203.0.113.7")
        need = GpuNeed(count=0, name="cpu")
        type_id = rows_for(need, "aws")[0].type_id
        yield Account(
            provider=provider,
            clock=clock,
            emulator=emulator,
            routes={"create": "RunInstances", "list": "DescribeInstances", "read": "DescribeInstances",
                    "destroy": "TerminateInstances"},
            faults=aws.Fault,
            regions=("us-east-1", "us-west-2"),
            need=need,
            lies=lambda: emulator.fail("TerminateInstances", aws.Fault.LIE),
            revoke=lambda now: setattr(emulator.rules, "valid_key", not now),
            hide=lambda lag_s: setattr(emulator.world, "hidden_s", lag_s),
            lost=aws.Fault.DROP_ANSWER,
            throttled=aws.Fault.THROTTLED,
            full=lambda: emulator.rules.sold_out.update(f"{type_id}@us-east-1{zone}" for zone in "abcdef"),
        )  # fmt: skip


OPENED: dict[str, Callable[[VirtualClock, pytest.MonkeyPatch], AbstractContextManager[Account]]] = {
    "aws": _aws, "lambda": _lambda, "runpod": _runpod
}  # fmt: skip


class Box(ScriptedFar):
    """A scripted machine that reports the rented card."""

    def __init__(self, account: Account) -> None:
        super().__init__(cast(FakeCloud, account))
        self.card_name = f"NVIDIA {account.need.name}"

    def end(self, folder: str, at_wall: float = 0.0) -> EndAnswer:
        """Confirm the timer, which gpurun requires before an upload; never end the machine."""
        return EndAnswer(taken=at_wall >= NEVER_WALL, deadline=None, message="no timer is simulated here")


class Rental:
    """A paid run that may rent in either of two regions of a cloud."""

    def __init__(self, account: Account, home: Home) -> None:
        self.account, self.home = account, home
        self.folder = make_run(home, lease=LEASE)
        self.far = Box(account)
        self._write_plan()

    def drive(self) -> ExitCode | MayBeBilling | str:
        """Drive the run as a supervisor does; return the exit code, the error for exit code 9, or "killed"."""
        provider = self.account.provider
        context = Context(
            home=self.home,
            folder=self.folder,
            plan=Plan.from_json(self.folder.plan.read_bytes()),
            clock=self.account.clock,
            provider=provider,
            reach=lambda instance: self.far,
            trainer=TINY / "trainer",
            open=lambda name: provider,
        )
        try:
            return Driver(context, Journal.open(self.folder.journal, self.account.clock)).drive()
        except MayBeBilling as red:
            return red
        except Killed:
            return "killed"

    def all_of(self, event: Event) -> list[dict[str, Any]]:
        return [record.data for record in read_journal(self.folder.journal).records if record.event is event]

    def ended(self) -> bool:
        """Assert that no machine lives, meter <= receipt <= cap, and the audit agrees; return True."""
        statement = json.loads(base64.b64decode(json.loads(self.folder.receipt.read_bytes())["payload"]))
        cost = statement["predicate"]["cost"]
        assert self.account.alive == []
        assert self.account.meter.total_micros() <= cost["upper_bound_micros"] <= usd(5)
        assert cost["cap_kept"] is True
        assert [row.problems for row in audit(self.home).rows] == [()]
        return True

    def _write_plan(self) -> None:
        """Write a plan for the cheapest machine in the first region, with the second region as its alternative."""
        account, made = self.account, Plan.from_json(self.folder.plan.read_bytes())
        offers = account.provider.offers(account.need, rows_for(account.need, account.provider.name))
        best = min(offers, key=lambda offer: offer.rate_micros_per_hour)
        first, second = (best.model_copy(update={"region": region}) for region in account.regions)
        changes = {
            "offer": first, "mode": Mode.PAID, "cap_micros": usd(5), "worst_micros": usd(5),
            "resolved": {**made.job.resolved, "hardware": {"disk_gb": 50}}, "quoted_wall": account.clock.wall(),
            "candidates": tuple(_candidate(made, offer) for offer in (first, second)),
        }  # fmt: skip
        self.folder.plan.write_text(changed_plan(made, changes).to_json())


def _candidate(plan: Plan, offer: Offer) -> Candidate:
    return Candidate(
        offer=offer,
        estimate=plan.estimate,
        lease=plan.lease,
        expected_micros=usd(0),
        worst_micros=usd(5),
        finishes=True,
    )


@pytest.fixture(params=CLOUDS)
def account(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    with OPENED[request.param](VirtualClock(), monkeypatch) as opened:
        yield opened


@pytest.fixture
def rental(account: Account, own_home: Any) -> Rental:
    return Rental(account, Home(own_home))
