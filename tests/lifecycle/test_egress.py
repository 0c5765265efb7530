"""Tests that a run pays for the bytes that left a machine, not for those that the plan allowed."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Event
from gpurun.core.money import Micros, cost_of, usd
from gpurun.core.paths import Home
from gpurun.core.records import Offer
from gpurun.ledger.audit import audit
from gpurun.planning.budget import egress_of
from gpurun.remote.ssh import HostKeyMismatch
from tests.changed_plan import changed_plan
from tests.lifecycle.faults import receipt_of
from tests.lifecycle.scripted_cloud import WEIGHTS, World

GB = 10**9


def offer_at(world: World, provider: str, region: str) -> Offer:
    offer = world.plan.offer.model_copy(update={"provider": provider, "region": region})
    world.plan = changed_plan(world.plan, {"offer": offer, "parameters": 124_000_000, "cap_micros": usd(1000)})
    world.folder.plan.write_text(world.plan.to_json())
    return offer


@pytest.mark.parametrize("again", [False, True], ids=["each byte once", "one file twice"])
def test_the_receipt_has_what_left_plus_a_twentieth_not_the_plan(tmp_path: Path, again: bool) -> None:
    world = World(Home(tmp_path))
    offer = offer_at(world, "aws", "us-east-1")
    name, content, _ = WEIGHTS[0]
    world.far.flips = {name: 1} if again else {}
    assert world.drive() is ExitCode.DONE
    (collected,) = world.all_of(Event.COLLECT_OBSERVED)
    log_bytes = len(world.folder.log.read_bytes()) + len(world.folder.events.read_bytes())
    files = sum(file["bytes"] for file in collected["files"])
    assert collected["left_bytes"] == files + log_bytes + (len(content) if again else 0)
    assert collected["egress_micros"] == egress_of(offer, collected["left_bytes"]) == 900, "ten megabytes of $0.09 a GB"
    (intent,) = world.all_of(Event.CREATE_INTENDED)
    assert intent["egress_micros"] > 100 * collected["egress_micros"]
    (rental,) = receipt_of(world)["cost"]["rentals"]
    assert rental["micros"] < intent["egress_micros"]
    assert audit(world.home).problems == ()


def test_a_machine_of_seconds_costs_awss_minute_and_no_egress(tmp_path: Path) -> None:
    """AWS bills at least one minute: the receipt must include it, but not the planned egress, because no byte left."""
    world = World(Home(tmp_path))
    offer_at(world, "aws", "us-east-1")
    world.far.broken["install_agent"] = HostKeyMismatch("203.0.113.9:22", "SHA256:ours", "SHA256:theirs")
    world.drive()
    (rental,) = receipt_of(world)["cost"]["rentals"]
    (intent,) = world.all_of(Event.CREATE_INTENDED)
    assert 0 < rental["billable_s"] < 60 == intent["least_billed_s"]
    paid = cost_of(Micros(rental["rate_micros_per_hour"]), 60) + cost_of(Micros(intent["beside_micros_per_hour"]), 60)
    assert (rental["micros"], intent["egress_micros"] > 0) == (paid, True)
    (row,) = audit(world.home).rows
    assert row.measured_micros == paid, "the audit counts the same"


def test_where_nothing_is_charged_nothing_is_counted(tmp_path: Path) -> None:
    world = World(Home(tmp_path))
    assert world.drive() is ExitCode.DONE
    assert "left_bytes" not in world.all_of(Event.COLLECT_OBSERVED)[0]


@given(left_bytes=st.integers(min_value=0, max_value=10**14), region=st.sampled_from(["us-east-1", "af-south-1"]))
def test_egress_is_at_least_the_bill_and_at_most_10_mb_above(left_bytes: int, region: str) -> None:
    offer = Offer(
        provider="aws", type_id="p4d", gpu="A100", gpu_count=8, vram_gb=40, region=region, billing_unit_s=1, boot_s=1,
        rate_micros_per_hour=Micros(1), price_source="", dies_by_itself="",
    )  # fmt: skip
    per_gb = egress_of(offer, GB * 100 // 105)
    paid = Fraction(per_gb * left_bytes * 105, 100 * GB)
    assert paid <= egress_of(offer, left_bytes) <= paid + Fraction(per_gb, 100) + 1
