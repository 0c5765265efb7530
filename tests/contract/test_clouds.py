"""Tests of what every cloud reports beyond the six verbs: its account, its time and its regions."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from gpurun.providers.base import HasAccounts, Provider, TellsTime
from gpurun.providers.catalog import offers_for, rows_for
from gpurun.providers.errors import no_such_region
from tests.contract.clouds import CLOUDS, Customers
from tests.contract.orders import NEED
from tests.emulators.runpod import FULL_KEY, READ_KEY
from tests.refusals import lacking


@pytest.fixture(params=sorted(CLOUDS))
def customers(request: pytest.FixtureRequest) -> Iterator[Customers]:
    with CLOUDS[request.param]() as opened:
        yield opened


def mark(provider: Provider) -> str:
    assert isinstance(provider, HasAccounts)
    return provider.account_mark()


def test_each_account_has_a_mark_of_its_own(customers: Customers) -> None:
    mine = mark(customers.mine)
    assert re.fullmatch("(account|key):[0-9a-f]{16}", mine)
    assert mark(customers.mine) == mark(customers.again()) == mine
    assert mark(customers.stranger()) != mine


def test_a_mark_shows_nothing_of_the_key(customers: Customers) -> None:
    for secret in (FULL_KEY, READ_KEY, "secret_gpurun", "AKIA", "123456789012"):
        assert secret not in mark(customers.mine)


def test_the_clouds_time_is_told_once_it_is_asked(customers: Customers) -> None:
    cloud = customers.mine
    assert isinstance(cloud, TellsTime)
    assert cloud.clock_ahead_s is None
    cloud.ask_time()
    assert cloud.clock_ahead_s == pytest.approx(0, abs=5)


def test_every_offer_is_in_a_region_that_the_cloud_names(customers: Customers) -> None:
    cloud = customers.mine
    known = cloud.regions()  # type: ignore[attr-defined]
    assert known
    offers = cloud.offers(NEED, rows_for(NEED, cloud.name) or offers_for(NEED))
    assert {offer.region for offer in offers} - {"any"} <= set(known)


def test_an_unknown_region_is_refused_with_the_nearest_and_all() -> None:
    refused = no_such_region("us-ks-3", {"runpod": ("US-KS-2", "EU-RO-1"), "lambda": ("us-east-1",)})
    assert refused.code == "region.unknown"
    assert lacking(refused.what, "'us-ks-3'", "runpod", "lambda") == []
    near, *listed = re.findall(r"[\w-]+-\d", refused.hint)
    assert (near, sorted(listed)) == ("US-KS-2", ["EU-RO-1", "US-KS-2", "us-east-1"])
    assert re.findall(r"[\w-]+-\d", no_such_region("mars", {"lambda": ("us-east-1",)}).hint) == ["us-east-1"]
