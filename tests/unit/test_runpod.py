"""Tests of the RunPod provider: its requests, how it reads replies, and what the emulated account then rents out."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from gpurun.core.clock import SystemClock, VirtualClock, ticks
from gpurun.core.errors import ExitCode, SetupError
from gpurun.core.money import usd
from gpurun.core.records import GpuNeed, Instance, InstanceState, Offer, Order, RunKeys
from gpurun.core.secrets import Secret, child_environment
from gpurun.providers._http import Answer, Http
from gpurun.providers.base import NoCapacity, Rejected, ReportsCharges, Unknown
from gpurun.providers.catalog import all_offers, rows_for
from gpurun.providers.errors import RejectedFor
from gpurun.providers.guard import runpod_wrapper
from gpurun.providers.runpod import RunPodProvider, graphql, spot
from gpurun.providers.runpod.parse import judge_create_answer, money, rate, refusal_in_words
from gpurun.providers.runpod.pods import IMAGE, parse_pod
from gpurun.providers.runpod.provider import _parse_next_page, _parse_user_id
from tests.emulators.guests import missing
from tests.emulators.runpod import FULL_KEY, READ_KEY, Fault, RunPodEmulator, real_guest
from tests.emulators.runpod.catalog import single
from tests.emulators.runpod.contract import SPEC
from tests.emulators.runpod.graphql import execute
from tests.emulators.runpod.guest import Container
from tests.emulators.specs import document
from tests.refusals import refusal

A100 = GpuNeed(count=8, name="A100")
CPU = GpuNeed(count=0, name="cpu")
SXM = "NVIDIA A100-SXM4-80GB"
TOKEN, OTHER = "gr-fox-41-00c0ffee", "gr-fox-41-0badf00d"
HOST_PRIVATE = (
    "-----BEGIN OPENSSH PRIVATE KEY-----\n" + "canary0123456789+/" * 20 + "\n-----END OPENSSH PRIVATE KEY-----\n"
)
KEYS = RunKeys(
    client_public="ssh-ed25519 AAAAclient gpurun", host_public="ssh-ed25519 AAAAhost", host_private=HOST_PRIVATE
)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(start=1_795_168_800.0)  # 2026-11-20 10:00 UTC


@pytest.fixture
def cloud(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunPodEmulator]:
    """Yield an emulated account in virtual time; the SDK counts as absent unless a test enables it."""
    monkeypatch.setattr(graphql, "is_installed", lambda: False)
    with RunPodEmulator(clock=clock, tick_s=None) as emulator:
        yield emulator
        answers = [one for one in emulator.violations if one.startswith("answer")]
        assert answers == [], "the emulator is not true to the document"


@pytest.fixture
def runpod(cloud: RunPodEmulator, clock: VirtualClock) -> RunPodProvider:
    return provider(cloud, clock)


def provider(cloud: RunPodEmulator, clock: VirtualClock, key: str = FULL_KEY, **named: Any) -> RunPodProvider:
    return RunPodProvider(Secret(key), clock, base_url=cloud.base_url, **named)


def sxm(**changed: Any) -> Offer:
    """Return the catalogue's offer of eight A100 SXM in the secure cloud, with these fields changed."""
    rows = [one for one in rows_for(A100, "runpod") if one.type_id == SXM and one.gpu_count == 8]
    return next(one for one in rows if one.tier == "secure").model_copy(update=changed)


def order(offer: Offer | None = None, token: str = TOKEN, **changed: Any) -> Order:
    fields = {"run": "fox-41", "token": token, "attempt": 1, "offer": offer or sxm(), "deadline_wall": 1_795_172_400.9}
    return Order(**{**fields, "lease_s": 3600, "keys": KEYS, "disk_gb": 120, **changed})


def test_verify_says_when_a_key_may_only_read(cloud: RunPodEmulator, clock: VirtualClock) -> None:
    assert provider(cloud, clock).verify().missing == ()
    assert ["pods" in right for right in provider(cloud, clock, READ_KEY).verify().missing] == [True]


def test_verify_tells_the_clocks_apart(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    assert runpod.verify().clock_ahead_s == pytest.approx(0, abs=1)


def test_a_bad_key_is_a_matter_of_setup_and_is_not_shown(cloud: RunPodEmulator, clock: VirtualClock) -> None:
    key = "-".join(("rpa", "canary"))  # A traceback quotes the lines of this file.
    with refusal(SetupError, "auth.refused", "HTTP 401") as raised:
        provider(cloud, clock, key).verify()
    assert key not in "".join(traceback.format_exception(raised.value))


def test_offers_are_known_rows_at_todays_price_in_both_clouds(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    cloud.world.gpus[SXM].price["secure"] = Decimal("1.85")
    offers = {(one.type_id, one.tier): one for one in runpod.offers(A100, rows_for(A100, "runpod"))}
    assert set(offers) == {(kind, tier) for kind in (SXM, "NVIDIA A100 80GB PCIe") for tier in ("secure", "community")}
    offer = offers[SXM, "secure"]
    assert (offer.rate_micros_per_hour, offer.gpu_count, offer.region) == (usd("14.80"), 8, "any")
    assert (offer.gpu, offer.vram_gb, offer.boot_s) == ("A100 SXM", 80, 300)
    assert (offer.price_source, offer.dies_by_itself[:3]) == ("live 2026-11-20 10:00 UTC", "yes")
    assert not any(one.spot for one in offers.values())
    assert cloud.world.pods == {}


def test_what_cannot_be_had_is_not_offered(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    cloud.world.gpus[SXM].stock["secure"] = "NONE"
    cloud.world.gpus[SXM].most["community"] = 4
    cloud.world.gpus["NVIDIA A100 80GB PCIe"].price["community"] = Decimal(0)
    offers = runpod.offers(A100, rows_for(A100, "runpod"))
    assert [(one.type_id, one.tier) for one in offers] == [("NVIDIA A100 80GB PCIe", "secure")]
    assert runpod.offers(A100, ()) == []


def test_a_named_data_centre_offers_only_what_it_has(cloud: RunPodEmulator, clock: VirtualClock) -> None:
    cloud.world.gpus[SXM].centers = {"US-KS-2"}
    known = rows_for(A100, "runpod")
    kinds = {
        region: {one.type_id for one in provider(cloud, clock, region=region).offers(A100, known)}
        for region in (None, "US-KS-2", "EU-RO-1")
    }
    assert kinds[None] == kinds["US-KS-2"] == {SXM, "NVIDIA A100 80GB PCIe"}
    assert kinds["EU-RO-1"] == {"NVIDIA A100 80GB PCIe"}


def test_a_cpu_pod_costs_its_flavour_times_its_vcpus(runpod: RunPodProvider) -> None:
    (offer,) = runpod.offers(CPU, rows_for(CPU, "runpod"))
    assert (offer.type_id, offer.gpu_count, offer.rate_micros_per_hour) == ("cpu3c-4", 0, usd("0.12"))


@pytest.mark.parametrize("fault", [Fault.ERROR_BEFORE, Fault.HTML_AFTER, Fault.BLANK_AFTER, Fault.DROP_RESPONSE])
def test_a_catalogue_that_cannot_be_read_is_no_empty_one(
    cloud: RunPodEmulator, runpod: RunPodProvider, fault: Fault
) -> None:
    cloud.fail("gpus", *[fault] * 3)
    with pytest.raises(Unknown):
        runpod.offers(A100, rows_for(A100, "runpod"))


def test_a_create_carries_its_token_end_keys_and_guard(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    born = runpod.create(order())
    (body,) = cloud.bodies("create")
    host_key = body["env"].pop("GPURUN_HOST_KEY_B64")
    assert base64.b64decode(host_key).decode() == HOST_PRIVATE
    assert body == {
        "name": TOKEN, "image": IMAGE, "gpu": {"id": SXM, "count": 8, "minCudaVersion": "12.8"}, "cloud": "SECURE",
        "disk": 120, "ports": ["22/tcp"], "entrypoint": ["/bin/sh", "-c", runpod_wrapper()], "cmd": ["/start.sh"],
        "env": {
            "PUBLIC_KEY": KEYS.client_public, "GPURUN_RUN": "fox-41", "GPURUN_TOKEN": TOKEN, "GPURUN_LEASE_S": "3600",
            "GPURUN_DEADLINE": "1795172400", "GPURUN_API_URL": cloud.base_url,
        },
    }  # fmt: skip
    assert (born.token, born.run, born.deadline_wall) == (TOKEN, "fox-41", 1_795_172_400.0)
    assert (born.type_id, born.gpu_count, born.rate_micros_per_hour) == (SXM, 8, usd("14.32"))
    assert cloud.violations == []


def test_the_same_order_is_the_same_request(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    runpod.create(order())
    runpod.create(order())
    first, second = cloud.bodies("create")
    assert first == second


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"offer": sxm(tier="community")}, {"cloud": "COMMUNITY"}),
        ({"offer": sxm(region="EU-RO-1")}, {"dataCenterIds": ["EU-RO-1"]}),
        ({"image": "me/mine:1"}, {"image": "me/mine:1", "gpu": {"id": SXM, "count": 8}}),
        ({"offer": rows_for(CPU, "runpod")[0]}, {"cpu": {"id": "cpu3c", "vcpuCount": 4}}),
    ],
)
def test_what_was_chosen_is_what_is_asked_for(
    cloud: RunPodEmulator, runpod: RunPodProvider, changed: dict[str, Any], expected: dict[str, Any]
) -> None:
    born = runpod.create(order(**changed))
    (body,) = cloud.bodies("create")
    assert {name: body[name] for name in expected} == expected
    assert born.type_id == order(**changed).offer.type_id
    assert cloud.violations == []


@pytest.mark.parametrize(
    ("image", "version"),
    [
        (IMAGE, "12.8"),
        ("runpod/pytorch:1.0.3-cu1300-torch291-ubuntu2404", "13.0"),
        ("runpod/pytorch:2.8.0-py3.11-cuda12.8.1-cudnn-devel-ubuntu22.04", "12.8"),
        ("runpod/pytorch:2.4.0-py3.11-cuda12.4.1-devel-ubuntu22.04", "12.4"),
        ("pytorch/pytorch:2.9.1-cuda12.10-cudnn9-devel", "12.10"),
        ("nvidia/cuda:13.0.1-devel-ubuntu24.04", "13.0"),
        ("me/trainer:torch2.8_cu126", "12.6"),
        ("me/mine:1", None),
        ("me/cuda-tools:12.8", None),
        ("me/focus128:1", None),
    ],
)
def test_an_image_gets_a_host_with_the_cuda_that_its_name_tells(
    cloud: RunPodEmulator, runpod: RunPodProvider, image: str, version: str | None
) -> None:
    """On a host with an older driver the container would never start, and no guard in it would be armed."""
    runpod.create(order(image=image))
    assert cloud.bodies("create")[0]["gpu"].get("minCudaVersion") == version


def test_an_older_contract_gets_the_guard_as_arguments(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    cloud.refused_fields = frozenset({"entrypoint", "cmd"})
    runpod.create(order())
    assert shlex.split(cloud.bodies("create")[-1]["args"]) == ["/bin/sh", "-c", runpod_wrapper(), "/start.sh"]
    assert len(cloud.world.pods) == 1


def test_no_pod_is_made_that_nothing_would_end(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    cloud.refused_fields = frozenset({"entrypoint", "cmd", "args"})
    with pytest.raises(Rejected, match="start command"):
        runpod.create(order())
    assert cloud.world.pods == {}


@pytest.mark.parametrize(
    ("fault", "raised", "made"),
    [
        (Fault.DROP_REQUEST, Unknown, 0),
        (Fault.DROP_RESPONSE, Unknown, 1),
        (Fault.ERROR_BEFORE, Unknown, 0),
        (Fault.ERROR_AFTER, Unknown, 1),
        (Fault.HTML_AFTER, Unknown, 1),
        (Fault.BLANK_AFTER, Unknown, 1),
        (Fault.CONFLICT, Unknown, 0),
        (Fault.SOLD_OUT, NoCapacity, 0),
        (Fault.REVOKED, Rejected, 0),
        (Fault.RETIRED, Rejected, 0),
    ],
)
def test_certainly_nothing_is_said_only_where_it_is_certain(
    cloud: RunPodEmulator, runpod: RunPodProvider, fault: Fault, raised: type[Exception], made: int
) -> None:
    cloud.fail("create", fault)
    with pytest.raises(raised):
        runpod.create(order())
    assert cloud.count("create") == 1, "a create of unknown outcome is never sent again"
    assert len(cloud.world.alive) == made
    assert [one.token for one in runpod.find(TOKEN)] == [TOKEN] * made


def test_an_empty_account_is_told_where_to_add_credit(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    cloud.world.balance = Decimal("14.31")
    with pytest.raises(RejectedFor, match="balance") as raised:
        runpod.create(order())
    error = raised.value.error
    assert (error.code, error.exit_code) == ("account.no_funds", ExitCode.NO_OFFER)
    assert "https://console.runpod.io/user/billing" in error.hint


def test_a_read_only_key_makes_nothing_an_invalid_one_is_named(cloud: RunPodEmulator, clock: VirtualClock) -> None:
    for key, code in ((READ_KEY, "auth.not_allowed"), ("rpa_nobodys", "auth.refused")):
        with pytest.raises(RejectedFor) as raised:
            provider(cloud, clock, key).create(order())
        error = raised.value.error
        assert (error.code, error.exit_code) == (code, ExitCode.SETUP)
        assert "gpurun auth set runpod" in error.hint
    assert cloud.world.pods == {}


def test_the_mark_is_the_accounts_by_graphql_or_else_the_keys(cloud: RunPodEmulator, clock: VirtualClock) -> None:
    mark = provider(cloud, clock).account_mark()
    assert mark.startswith("account:")
    assert provider(cloud, clock, READ_KEY).account_mark() == mark, "another key of the same account"
    for closed in (Fault.REVOKED, Fault.RETIRED):
        cloud.fail("graphql", closed)
        assert provider(cloud, clock).account_mark().startswith("key:")


def test_a_mark_that_nobody_tells_is_not_made_up(cloud: RunPodEmulator, clock: VirtualClock) -> None:
    runpod = provider(cloud, clock)
    for unclear in (Fault.DROP_RESPONSE, Fault.ERROR_BEFORE, Fault.BLANK_AFTER, Fault.HTML_AFTER):
        cloud.fail("graphql", unclear)
        with pytest.raises(Unknown):
            runpod.account_mark()
    with refusal(SetupError, "auth.refused", "HTTP 401"):
        provider(cloud, clock, "rpa_nobodys").account_mark()
    assert runpod.account_mark() == runpod.account_mark()
    assert cloud.count("graphql") == 6, "asked once more, and remembered"


def test_a_graphql_that_is_out_of_order_is_not_one_that_says_no() -> None:
    assert _parse_user_id({"errors": [{"message": "You do not have permission"}], "data": None}) == ""
    assert _parse_user_id({"data": {"myself": None}}) == ""
    with pytest.raises(Unknown):
        _parse_user_id(
            {"errors": [{"message": "Something went wrong", "extensions": {"code": "INTERNAL_SERVER_ERROR"}}]}
        )


def test_the_data_centres_are_the_catalogues(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    assert runpod.regions() == ("US-KS-2", "EU-RO-1")
    cloud.fail("datacenters", Fault.BLANK_AFTER)
    with pytest.raises(Unknown):
        runpod.regions()
    assert cloud.violations == []


def test_capacity_that_went_since_the_plan_is_no_capacity(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    cloud.world.gpus[SXM].stock["secure"] = "NONE"
    with pytest.raises(NoCapacity):
        runpod.create(order())


def test_being_asked_to_wait_is_no_refusal(cloud: RunPodEmulator, runpod: RunPodProvider, clock: VirtualClock) -> None:
    cloud.retry_after = "20"
    cloud.fail("create", Fault.TOO_MANY)
    runpod.create(order())
    assert (len(cloud.world.alive), cloud.count("create")) == (1, 2)
    assert clock.monotonic() >= 20


def test_what_is_sent_with_a_refused_order_is_not_in_the_refusal(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    cloud.fail("create", Fault.SECRET_ECHO, Fault.SECRET_ECHO)
    with pytest.raises(Rejected) as raised:
        runpod.create(order())
    text = "".join(traceback.format_exception(raised.value))
    assert not any(part in text for part in ("canary", base64.b64encode(HOST_PRIVATE.encode()).decode()[:60], FULL_KEY))


def test_an_order_that_is_too_large_is_not_sent(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    with pytest.raises(Rejected, match="larger"):
        runpod.create(order(image="x" * 102_400))
    assert cloud.requests == []


def test_a_price_that_rose_and_another_gpu_are_read_back(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    cloud.world.price_factor, cloud.world.told_gpu = Decimal("1.5"), "NVIDIA A40"
    born = runpod.create(order())
    assert (born.rate_micros_per_hour, born.type_id) == (usd("21.48"), "NVIDIA A40")


def test_duplicates_are_found_oldest_first(cloud: RunPodEmulator, runpod: RunPodProvider, clock: VirtualClock) -> None:
    first = runpod.create(order())
    clock.sleep(5)
    second = runpod.create(order())
    clock.sleep(5)
    runpod.create(order(token=OTHER))
    assert [one.id for one in runpod.find(TOKEN)] == [first.id, second.id]
    assert len(runpod.find(None)) == 3


def test_only_gpuruns_own_pods_are_found(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    ours = runpod.create(order())
    plain = {"image": "x", "gpu": {"id": "NVIDIA A40", "count": 1}}
    for name in ("my pod", "gr-", "gr-fox-41-00c0ffee-2", TOKEN.upper()):
        cloud.world.create({**plain, "name": name})
    named = cloud.world.create({**plain, "name": OTHER})
    assert {one.id for one in runpod.find(None)} == {ours.id, named.id}
    assert [(one.id, one.run) for one in runpod.find(OTHER)] == [(named.id, "fox-41")]


def test_a_renamed_pod_is_still_known_by_its_environment(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    born = runpod.create(order())
    cloud.world.pods[born.id].body["name"] = "mine now"
    assert [one.id for one in runpod.find(TOKEN)] == [born.id]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_page_of_the_list_is_read(cloud: RunPodEmulator, runpod: RunPodProvider, size: int) -> None:
    born = {runpod.create(order()).id for _ in range(4)}
    cloud.page_size = size
    assert {one.id for one in runpod.find(TOKEN)} == born


def test_a_failed_page_gives_the_earlier_ones_with_the_doubt(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    born = [runpod.create(order()).id for _ in range(3)]
    cloud.page_size = 2
    cloud.fail("list", None, Fault.DROP_REQUEST)
    with pytest.raises(Unknown) as raised:
        runpod.find(None)
    assert {one.id for one in raised.value.found} == set(born[:2])


def test_a_page_that_fails_leaves_no_half_list(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    for _ in range(4):
        runpod.create(order())
    cloud.page_size = 2
    cloud.fail("list", None, *[Fault.ERROR_BEFORE] * 3)
    with pytest.raises(Unknown):
        runpod.find(TOKEN)


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ({}, ("", False)),
        ({"nextCursor": None}, ("", False)),
        ({"nextCursor": "x"}, ("x", True)),
        ({"pagination": {"next_cursor": "x", "hasMore": True}}, ("x", True)),
        ({"pageInfo": {"endCursor": "x", "hasNextPage": False}}, ("", False)),
        ({"hasMore": True}, ("", True)),
    ],
)
def test_a_cursor_is_known_under_its_usual_names(page: dict[str, Any], expected: tuple[str, bool]) -> None:
    assert _parse_next_page(page) == expected


@pytest.mark.parametrize("fault", [Fault.ERROR_BEFORE, Fault.HTML_AFTER, Fault.BLANK_AFTER, Fault.DROP_RESPONSE])
@pytest.mark.parametrize("route", ["list", "read"])
def test_a_broken_answer_is_never_an_absence(
    cloud: RunPodEmulator, runpod: RunPodProvider, route: str, fault: Fault
) -> None:
    born = runpod.create(order())
    cloud.fail(route, *[fault] * 3)
    with pytest.raises(Unknown):
        runpod.find(TOKEN) if route == "list" else runpod.read(born.id)


@pytest.mark.parametrize("route", ["list", "read"])
def test_a_read_is_repeated_after_server_errors(cloud: RunPodEmulator, runpod: RunPodProvider, route: str) -> None:
    born = runpod.create(order())
    cloud.fail(route, Fault.ERROR_BEFORE, Fault.HTML_AFTER)
    assert (runpod.find(TOKEN)[0] if route == "list" else runpod.read(born.id)).id == born.id


def test_a_create_at_which_the_server_failed_is_never_sent_again(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    cloud.fail("create", Fault.ERROR_BEFORE)
    with pytest.raises(Unknown):
        runpod.create(order())
    assert len(cloud.bodies("create")) == 1


def test_a_500_that_names_the_balance_is_about_the_balance() -> None:
    text = '{"detail": "You must have at least $0.01 in your account."}'
    judged = judge_create_answer(Answer(500, {}, text))
    assert isinstance(judged, RejectedFor)
    assert "at least $0.01" in judged.error.what


def test_a_key_that_was_revoked_proves_no_death(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    born = runpod.create(order())
    for route, ask in (("list", lambda: runpod.find(TOKEN)), ("read", lambda: runpod.read(born.id))):
        cloud.fail(route, Fault.REVOKED)
        with pytest.raises(SetupError):
            ask()


def test_what_is_new_or_dead_may_be_told_late(
    cloud: RunPodEmulator, runpod: RunPodProvider, clock: VirtualClock
) -> None:
    cloud.world.list_lag_s, cloud.world.delete_lag_s = 30.0, 20.0
    born = runpod.create(order())
    assert runpod.find(TOKEN) == []
    clock.sleep(30)
    assert [one.id for one in runpod.find(TOKEN)] == [born.id]
    runpod.destroy(born.id)
    assert [one.state for one in runpod.find(TOKEN)] == [InstanceState.GONE]
    clock.sleep(20)
    assert runpod.find(TOKEN) == []
    assert runpod.read(born.id).state is InstanceState.GONE


def test_a_pod_is_followed_from_its_birth_to_its_end(
    cloud: RunPodEmulator, runpod: RunPodProvider, clock: VirtualClock
) -> None:
    cloud.world.provision_s, cloud.world.start_s = 10.0, 60.0
    born = runpod.create(order())
    seen = []
    for _ in range(3):
        clock.sleep(30)
        seen.append(runpod.read(born.id))
    assert [one.said for one in seen] == ["STARTING", "STARTING", "RUNNING"]
    assert [one.state for one in seen] == [InstanceState.PENDING, InstanceState.PENDING, InstanceState.RUNNING]
    assert [one.address is None for one in seen] == [True, True, False]
    address = seen[-1].address
    assert address is not None
    assert (address.kind, address.user) == ("ssh", "root")
    assert address.port >= 10_000
    runpod.destroy(born.id)
    assert runpod.read(born.id).state is InstanceState.GONE
    assert cloud.world.alive == []


STATES = {
    "PROVISIONING": InstanceState.PENDING,
    "STARTING": InstanceState.PENDING,
    "RUNNING": InstanceState.RUNNING,
    "EXITED": InstanceState.STOPPED,
    "ERROR": InstanceState.STOPPED,
    "TERMINATED": InstanceState.GONE,
}
"""The state that gpurun reads from each status; RunPod stops a pod without balance and still bills its disk."""


def test_every_status_is_known_and_a_billable_one_is_never_gone() -> None:
    spec = document(SPEC)
    if spec is not None:
        assert set(spec["components"]["schemas"]["PodStatus"]["enum"]) == set(STATES)
    read = {status: parse_pod({"id": "abc", "status": status}).state for status in (*STATES, "HIBERNATING", "")}
    assert read == {**STATES, "HIBERNATING": InstanceState.UNKNOWN, "": InstanceState.UNKNOWN}


def test_a_stopped_pod_is_not_gone_and_has_no_rate(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    born = runpod.create(order())
    cloud.world.act(born.id, "stop")
    stopped = runpod.read(born.id)
    assert (stopped.state, stopped.rate_micros_per_hour, stopped.said) == (InstanceState.STOPPED, None, "EXITED")
    assert [one.id for one in runpod.find(TOKEN)] == [born.id]
    assert len(cloud.world.alive) == 1, "its disk is billed"


def test_destroy_may_be_asked_again_and_of_the_dead(
    cloud: RunPodEmulator, runpod: RunPodProvider, clock: VirtualClock
) -> None:
    born = runpod.create(order())
    for _ in range(3):
        runpod.destroy(born.id)
        clock.sleep(10)
    assert cloud.world.alive == []


def test_a_delete_that_does_nothing_is_seen(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    born = runpod.create(order())
    cloud.world.deaf_deletes = 1
    runpod.destroy(born.id)
    assert runpod.read(born.id).state is InstanceState.RUNNING
    runpod.destroy(born.id)
    assert runpod.read(born.id).state is InstanceState.GONE


def test_a_delete_in_the_wrong_state_becomes_a_terminate(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    born = runpod.create(order())
    cloud.fail("delete", Fault.CONFLICT)
    runpod.destroy(born.id)
    assert cloud.world.alive == []


def test_a_pod_that_somebody_locked_is_unlocked_and_deleted(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    born = runpod.create(order())
    cloud.world.pods[born.id].locked = True
    runpod.destroy(born.id)
    assert cloud.world.alive == []


def test_a_lock_that_cannot_be_removed_says_where_it_can(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    born = runpod.create(order())
    cloud.world.pods[born.id].locked = True
    cloud.fail("update", Fault.ERROR_BEFORE)
    with pytest.raises(Unknown, match=r"locked.*https://console\.runpod\.io/pods"):
        runpod.destroy(born.id)
    assert len(cloud.world.alive) == 1


@pytest.mark.parametrize("fault", [Fault.ERROR_BEFORE, Fault.ERROR_AFTER, Fault.DROP_REQUEST, Fault.DROP_RESPONSE])
def test_a_delete_without_an_answer_is_unknown(cloud: RunPodEmulator, runpod: RunPodProvider, fault: Fault) -> None:
    born = runpod.create(order())
    cloud.fail("delete", fault)
    with pytest.raises(Unknown):
        runpod.destroy(born.id)


@pytest.mark.parametrize("strange", ["", ".", "..", "../pods", "a/b", "a?b", "a b", "a" * 81, "ü"])
def test_a_strange_id_is_never_part_of_a_url(cloud: RunPodEmulator, runpod: RunPodProvider, strange: str) -> None:
    for verb in (runpod.read, runpod.destroy, lambda name: runpod.charges(name, 0.0, 1.0)):
        with pytest.raises(Rejected):
            verb(strange)
    assert cloud.requests == []


def test_charges_are_what_was_billed_for_this_pod_alone(
    cloud: RunPodEmulator, runpod: RunPodProvider, clock: VirtualClock
) -> None:
    assert isinstance(runpod, ReportsCharges)
    begun = clock.wall()
    born, other = runpod.create(order()), runpod.create(order(token=OTHER))
    clock.sleep(5400)
    runpod.destroy(born.id)
    runpod.destroy(other.id)
    ended = clock.wall()
    charge = runpod.charges(born.id, begun, ended)
    assert charge is not None
    assert abs(charge.micros - cloud.world.meter.total_micros(born.id)) <= 2
    assert not charge.settled
    clock.sleep(3600 + 1800 + 1)
    settled = runpod.charges(born.id, begun, ended)
    assert settled is not None
    assert settled.settled
    assert cloud.violations == []


def test_no_record_of_a_pod_is_no_charge_of_nothing(
    cloud: RunPodEmulator, runpod: RunPodProvider, clock: VirtualClock
) -> None:
    cloud.world.bill_lag_s = 7200
    born = runpod.create(order())
    clock.sleep(60)
    assert runpod.charges(born.id, clock.wall() - 60, clock.wall()) is None


@pytest.mark.parametrize(
    ("price", "expected"),
    [
        (Decimal("14.320000000000002"), "14.32"),  # 8 x 1.79 in doubles
        (Decimal("21.520000457763672"), "21.52"),  # in floats
        (Decimal("1.7899999618530273"), "1.79"),
        (Decimal("0.1234567"), "0.123457"),
        (Decimal("0.00000001"), "0.000001"),
        (Decimal("100.12345678"), "100.123457"),
        (3, "3"),
    ],
)
def test_prices_are_rounded_up_once_the_noise_of_floats_is_gone(price: Any, expected: str) -> None:
    assert money(price) == usd(expected)


@pytest.mark.parametrize("price", [None, "1.79", True, Decimal("1e999999999"), Decimal("NaN"), [1], {}])
def test_what_is_no_price_is_none(price: Any) -> None:
    assert money(price) is None


def forms_of(price: Decimal, count: int) -> tuple[Decimal, ...]:
    """Return the forms in which RunPod may report the price of `count` GPUs: exact, or rounded to single precision."""
    product = single(Decimal(single(price)) * count)
    shortest = next(text for digits in range(1, 10) if single(text := Decimal(f"{product:.{digits}g}")) == product)
    return price * count, Decimal(repr(single(price * count))), Decimal(repr(product)), shortest


ALL_PRICES = sorted(
    {
        Decimal(row.rate_micros_per_hour) / 1_000_000 / max(1, row.gpu_count)
        for row in all_offers()
        if row.provider == "runpod"
    }
)


@pytest.mark.parametrize("count", range(1, 9))
def test_a_catalogue_price_is_read_despite_single_precision(count: int) -> None:
    for price in ALL_PRICES:
        assert [rate(form) for form in forms_of(price, count)] == [usd(price * count)] * 4


@given(mills=st.integers(1, 30_000), count=st.integers(1, 8))
def test_any_price_in_tenths_of_a_cent_is_read_so_too(mills: int, count: int) -> None:
    price = Decimal(mills) / 1000
    assert {rate(form) for form in forms_of(price, count)} == {usd(price * count)}


@given(cents=st.integers(1, 3_000), count=st.integers(1, 8), dearer=st.sampled_from(["a cent", "0.1 %"]))
def test_a_price_that_really_rose_is_never_read_as_the_old_one(cents: int, count: int, dearer: str) -> None:
    price = Decimal(cents) / 100
    risen = price + Decimal("0.01") / count if dearer == "a cent" else price * Decimal("1.001")
    for form in forms_of(risen, count):
        read = rate(form)
        assert read is not None
        assert read > usd(price * count)
        assert abs(read - usd(risen * count)) <= 1 + usd(risen * count) // 2_000_000


def test_a_pod_cost_in_single_precision_is_not_called_dearer(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    cloud.world.gpus[SXM].price["secure"] = Decimal("4.59")
    born = runpod.create(order())
    assert cloud.world.pods[born.id].as_json(0)["cost"] == 36.720001220703125
    assert born.rate_micros_per_hour == runpod.read(born.id).rate_micros_per_hour == usd("36.72")


@pytest.mark.parametrize("status", [301, 302, 307, 408, 409, 425, 429, 500, 502, 503, 504, 520])
def test_a_status_that_leaves_a_doubt_is_unknown(status: int) -> None:
    assert isinstance(judge_create_answer(Answer(status, {}, "")), Unknown)


def problem(status: int, detail: str) -> Answer:
    return Answer(status, {}, json.dumps({"title": "Refused", "status": status, "detail": detail}))


@pytest.mark.parametrize(("status", "of_offer"), [(400, True), (403, True), (401, False), (402, False), (422, False)])
def test_a_rule_or_a_pool_that_refuses_is_about_this_offer_alone(status: int, of_offer: bool) -> None:
    """For 400 RunPod's table says "Try your next candidate", and for 403 "Skip this candidate, keep going"."""
    judged = judge_create_answer(problem(status, "gpu is not to be placed"))
    assert isinstance(judged, Rejected)
    assert judged.of_offer is of_offer
    assert "gpu" in str(judged)


def test_the_table_of_refusals_is_still_the_documents() -> None:
    spec = document(SPEC)
    if spec is None:
        pytest.skip("the OpenAPI document is not here")
    rows = [line.split("|") for line in spec["paths"]["/v2/pods"]["post"]["description"].splitlines() if "| `" in line]
    advice = {row[1].strip(" `"): row[3].strip() for row in rows}
    assert (advice["400"], advice["403"]) == ("Try your next candidate.", "Skip this candidate, keep going.")
    assert (advice["402"], advice["422"]) == ("Stop; no candidate will succeed.", "Fix the request. Never retry.")


@pytest.mark.parametrize("status", [400, 403])
@pytest.mark.parametrize(
    "words",
    [
        "There are no instances currently available",
        "create pod: could not find any pods with required specifications",
        "No available datacenter with requested resources",
    ],
)
def test_every_sentence_for_sold_out_is_known(words: str, status: int) -> None:
    assert isinstance(judge_create_answer(problem(status, words)), NoCapacity)
    assert isinstance(refusal_in_words(words), NoCapacity)


def test_sold_out_with_a_service_failure_leaves_the_doubt() -> None:
    """An older API answered 500 for "sold out", although it may have created a pod: the outcome must stay unknown."""
    assert isinstance(judge_create_answer(problem(500, "There are no instances currently available")), Unknown)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("There are no longer any instances available with enough disk space.", NoCapacity),
        ("This machine does not have the resources to deploy your pod.", NoCapacity),
        ("You must have at least $0.01 in your account balance.", Rejected),
        ('Field "x" is not defined by type "PodRentInterruptableInput".', Rejected),
        ("Insufficient funds.", Rejected),
        ("Something went wrong. Please try again later or contact support.", Unknown),
        ("The load balancer gave up before the upstream answered.", Unknown),
    ],
)
def test_graphql_says_only_in_words_what_it_did(words: str, expected: type[Exception]) -> None:
    assert isinstance(refusal_in_words(words), expected)


def test_spot_without_the_sdk_says_what_to_install(cloud: RunPodEmulator, clock: VirtualClock) -> None:
    with pytest.raises(SetupError) as raised:
        provider(cloud, clock, spot=True).offers(A100, rows_for(A100, "runpod"))
    assert "[runpod]" in raised.value.hint


@pytest.fixture
def sdk(cloud: RunPodEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable the real SDK, which gpurun runs in a separate process."""
    pytest.importorskip("runpod", reason="the extra runpod is not installed")
    monkeypatch.setattr(graphql, "is_installed", lambda: True)


@pytest.mark.slow
@pytest.mark.usefixtures("sdk")
def test_the_balance_is_told_and_is_worth_no_error(cloud: RunPodEmulator, runpod: RunPodProvider) -> None:
    cloud.world.balance = Decimal("12.34")
    account = runpod.verify()
    assert (account.identity, account.balance_micros) == ("you@example.com", usd("12.34"))
    cloud.fail("graphql", Fault.HTML_AFTER)
    assert runpod.verify().balance_micros is None


@pytest.mark.slow
@pytest.mark.usefixtures("sdk")
def test_a_spot_pod_bids_the_lowest_price_with_the_same_guard(cloud: RunPodEmulator, clock: VirtualClock) -> None:
    runpod = provider(cloud, clock, spot=True)
    offers = [one for one in runpod.offers(A100, rows_for(A100, "runpod")) if one.spot]
    offer = next(one for one in offers if one.type_id == SXM and one.tier == "community")
    assert offer.rate_micros_per_hour == usd("6.32")
    on_demand = provider(cloud, clock).offers(A100, rows_for(A100, "runpod"))
    same = next(one for one in on_demand if (one.type_id, one.tier) == (SXM, "community"))
    assert offer.on_demand_micros_per_hour == same.rate_micros_per_hour
    born = runpod.create(order(offer, image='say "hi" \\ ü'))
    (pod,) = cloud.world.alive
    assert pod.spot
    assert pod.body["image"] == 'say "hi" \\ ü'
    assert shlex.split(pod.body["args"]) == ["/bin/sh", "-c", runpod_wrapper(), "/start.sh"]
    assert (born.id, born.token, born.rate_micros_per_hour) == (pod.id, TOKEN, usd("6.32"))
    assert base64.b64decode(pod.env["GPURUN_HOST_KEY_B64"]).decode() == HOST_PRIVATE
    assert [one.deadline_wall for one in runpod.find(TOKEN)] == [1_795_172_400.0]


def test_a_bid_asks_for_the_same_hosts_as_an_order_on_demand(
    cloud: RunPodEmulator, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host with an older driver the container would never start, and no guard in it would be armed."""
    cloud.world.has_old_drivers = True
    documents = bidding(cloud, monkeypatch)
    runpod = provider(cloud, clock)
    runpod.create(order())
    runpod.create(order(sxm(spot=True, rate_micros_per_hour=usd("6.32")), token=OTHER))
    assert [one.state for one in runpod.find(None)] == [InstanceState.RUNNING] * 2
    assert [pod.body["gpu"]["minCudaVersion"] for pod in cloud.world.alive] == ["12.8"] * 2
    assert all("supportPublicIp:true" in document for document in documents)


def test_an_image_silent_on_cuda_is_bid_for_on_any_host(
    cloud: RunPodEmulator, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = bidding(cloud, monkeypatch)
    provider(cloud, clock).create(order(sxm(spot=True, rate_micros_per_hour=usd("6.32")), image="me/mine:1"))
    assert "minCudaVersion" not in documents[-1]
    assert "supportPublicIp:true" in documents[-1]


def bidding(cloud: RunPodEmulator, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the emulator answer bids without the SDK; return a list that gets the GraphQL documents."""
    documents: list[str] = []

    def answered(document: str, key: Secret, base_url: str) -> dict[str, Any]:
        documents.append(document)
        with cloud.world.lock:
            answer = json.dumps(execute(document, cloud.world, None))
        return dict(json.loads(answer, parse_float=Decimal))

    monkeypatch.setattr(spot, "ask", answered)
    return documents


@pytest.mark.slow
@pytest.mark.usefixtures("sdk")
def test_a_bid_is_never_above_what_was_agreed_to(cloud: RunPodEmulator, clock: VirtualClock) -> None:
    offer = sxm(spot=True, rate_micros_per_hour=usd("6.32"))
    cloud.world.gpus[SXM].bid["secure"] = Decimal("0.80")
    with pytest.raises(NoCapacity, match="agreed"):
        provider(cloud, clock).create(order(offer))
    assert cloud.world.pods == {}


@pytest.mark.slow
@pytest.mark.usefixtures("sdk")
def test_without_graphql_spot_is_unknown_and_others_remain(cloud: RunPodEmulator, clock: VirtualClock) -> None:
    """RunPod has announced the end of GraphQL: that must not change on-demand rentals or make a run fail."""
    cloud.fail("graphql", *[Fault.RETIRED] * 9)
    with pytest.raises(Unknown):
        provider(cloud, clock, spot=True).offers(A100, rows_for(A100, "runpod"))
    with pytest.raises(NoCapacity):
        provider(cloud, clock).create(order(sxm(spot=True, rate_micros_per_hour=usd("6.32"))))
    assert cloud.world.pods == {}
    on_demand = provider(cloud, clock)
    assert on_demand.offers(A100, rows_for(A100, "runpod"))
    assert on_demand.account_mark().startswith("key:")
    on_demand.create(order())
    assert len(cloud.world.alive) == 1


def test_a_spot_create_without_graphql_leaves_other_offers() -> None:
    refused = refusal_in_words('Cannot query field "podRentInterruptable" on type "Mutation".')
    assert isinstance(refused, Rejected)
    assert refused.of_offer


@pytest.mark.slow
@pytest.mark.usefixtures("sdk")
def test_a_spot_create_without_a_whole_answer_is_found(cloud: RunPodEmulator, clock: VirtualClock) -> None:
    offer = sxm(spot=True, rate_micros_per_hour=usd("6.32"))
    for fault in (Fault.DROP_RESPONSE, Fault.HTML_AFTER):
        runpod = provider(cloud, clock)
        cloud.fail("graphql", None, fault)  # The lowest bid is read first.
        with pytest.raises(Unknown):
            runpod.create(order(offer))
    assert len(cloud.world.alive) == len(runpod.find(TOKEN)) == 2


@pytest.mark.slow
def test_the_sdk_is_given_up_when_its_time_is_over(cloud: RunPodEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("runpod", reason="the extra runpod is not installed")
    monkeypatch.setattr(graphql, "is_installed", lambda: True)
    with cloud.world.lock, pytest.raises(Unknown):  # While this lock is held, the server does not answer.
        graphql.ask("query{myself{id}}", Secret(FULL_KEY), cloud.base_url, limit_s=4)


class ProcessGuest:
    """A container whose command is a plain process group, with the guard's folders inside the test's folder."""

    host, port = "127.0.0.1", 22

    def __init__(self, container: Container, folder: Path) -> None:
        (folder / "start.sh").write_text("#!/bin/sh\nexec sleep 600\n")
        (folder / "start.sh").chmod(0o700)
        here = {"GPURUN_GUARD_FOLDER": f"{folder}/state", "GPURUN_GUARD_SSH_FOLDER": f"{folder}/ssh"}
        quick = {"GPURUN_GUARD_TICK_S": "0.1", "GPURUN_GUARD_PAUSE_S": "0.1"}
        self.process = subprocess.Popen(
            [*container.command[:-1], f"{folder}/start.sh"],
            env={**child_environment(), **container.env, **here, **quick},
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.mark.parametrize("older", [False, True])
def test_a_pod_without_its_laptop_deletes_itself_by_its_own_key(tmp_path: Path, older: bool) -> None:
    """The guard is sent as the entrypoint, or to an older API as arguments, which RunPod splits.

    It must work either way.
    """
    with RunPodEmulator(boot=lambda container: ProcessGuest(container, tmp_path)) as cloud:
        cloud.refused_fields = frozenset({"entrypoint", "cmd"} if older else ())
        runpod = RunPodProvider(Secret(FULL_KEY), SystemClock(), base_url=cloud.base_url)
        born = runpod.create(order(lease_s=1, deadline_wall=SystemClock().wall() + 600))
        wait_until(lambda: not cloud.world.meter.running)
        assert (tmp_path / "ssh" / "ssh_host_ed25519_key").read_text() == HOST_PRIVATE
        assert [one.state for one in runpod.find(TOKEN)] in ([], [InstanceState.GONE])
        assert cloud.world.meter.total_micros(born.id) < usd("0.10")


@pytest.mark.parametrize("deaf", [1, 2])
def test_a_guard_that_is_lied_to_goes_on_until_no_gpu_is_billed(tmp_path: Path, deaf: int) -> None:
    """If deletes have no effect, the guard's last resort is to stop the pod, so that only its disk is billed."""
    with RunPodEmulator(boot=lambda container: ProcessGuest(container, tmp_path)) as cloud:
        runpod = RunPodProvider(Secret(FULL_KEY), SystemClock(), base_url=cloud.base_url)
        cloud.world.deaf_deletes = deaf
        cloud.fail("delete", Fault.ERROR_BEFORE)
        runpod.create(order(lease_s=1, deadline_wall=SystemClock().wall() + 600))
        wait_until(lambda: not any(pod.bills("gpu") for pod in cloud.world.pods.values()))
        assert cloud.count("action") + cloud.count("graphql") > deaf


def test_a_container_that_is_started_again_has_no_more_time(tmp_path: Path) -> None:
    guests: list[ProcessGuest] = []

    def boot(container: Container) -> ProcessGuest:
        guests.append(ProcessGuest(container, tmp_path))
        return guests[-1]

    with RunPodEmulator(boot=boot) as cloud:
        runpod = RunPodProvider(Secret(FULL_KEY), SystemClock(), base_url=cloud.base_url)
        runpod.create(order(lease_s=2, deadline_wall=SystemClock().wall() + 600))
        for _ in ticks(SystemClock(), 0.02, 10):
            if guests and (tmp_path / "state" / "spent").exists():
                guests[0].kill()
                break
        wait_until(lambda: not cloud.world.meter.running)
        assert len(guests) >= 2


def test_a_container_wiped_by_a_restart_ends_at_its_fixed_time(tmp_path: Path) -> None:
    """A wiped container counts the lease's seconds from zero, but the deadline in its environment stays the same."""
    guests: list[ProcessGuest] = []

    def boot(container: Container) -> ProcessGuest:
        shutil.rmtree(tmp_path / "state", ignore_errors=True)
        guests.append(ProcessGuest(container, tmp_path))
        return guests[-1]

    with RunPodEmulator(boot=boot) as cloud:
        clock = SystemClock()
        runpod = RunPodProvider(Secret(FULL_KEY), clock, base_url=cloud.base_url)
        end_wall = clock.wall() + 3
        runpod.create(order(lease_s=600, deadline_wall=end_wall))
        for _ in ticks(clock, 0.02, 10):
            if guests and (tmp_path / "state" / "spent").exists():
                guests[0].kill()
                break
        wait_until(lambda: not cloud.world.meter.running)
        assert len(guests) >= 2
        assert int(end_wall) <= clock.wall() < end_wall + 20


def wait_until(over: Callable[[], bool]) -> None:
    for _ in ticks(SystemClock(), 0.05, 30):
        if over():
            return
    raise AssertionError("the pod outlived its deadline")


@pytest.mark.slow
def test_a_real_pod_deletes_itself_without_the_laptop(tmp_path: Path) -> None:
    """A real container with the real guard presents the host key that we gave it.

    With no laptop, it deletes its pod with its API key at the deadline.
    """
    reason = missing()
    if reason:
        pytest.skip(reason)
    clock, keys = SystemClock(), real_keys()
    with RunPodEmulator(boot=real_guest(tmp_path)) as cloud:
        runpod = RunPodProvider(Secret(FULL_KEY), clock, base_url=cloud.base_url)
        end_wall = clock.wall() + 15
        born = runpod.create(order(keys=keys, deadline_wall=end_wall, lease_s=3600))
        shown = host_key_of(runpod, born.id, clock)
        assert keys.host_public.split()[1] in shown
        assert clock.wall() < end_wall
        wait_until(lambda: not cloud.world.meter.running)
        assert clock.wall() >= int(end_wall)
        assert runpod.find(TOKEN) == [] or runpod.find(TOKEN)[0].state is InstanceState.GONE


def real_keys() -> RunKeys:
    pairs = [Ed25519PrivateKey.generate() for _ in range(2)]
    public = [one.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode() for one in pairs]
    private = pairs[1].private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode()
    return RunKeys(client_public=public[0], host_public=public[1], host_private=private)


def host_key_of(runpod: RunPodProvider, identifier: str, clock: SystemClock) -> str:
    """Return the output of ssh-keyscan for the pod's sshd, once it listens."""
    for _ in ticks(clock, 0.2, 12):
        address = runpod.read(identifier).address
        if address is not None:
            command = ["ssh-keyscan", "-T", "2", "-t", "ed25519", "-p", str(address.port), address.host]
            shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            if shown:
                return shown
    raise AssertionError("its sshd never showed a key")


class TestTheEmulatorIsHonest:
    """Tests of the emulator: the calls that a pod's guard relies on, and the costs that it computes."""

    def own_key(self, cloud: RunPodEmulator, born: Instance, clock: VirtualClock) -> Http:
        headers = {"Authorization": f"Bearer {cloud.world.pods[born.id].key}"}
        return Http(cloud.base_url, headers=headers, clock=clock, name="pod")

    def test_a_pods_own_key_ends_it_and_nothing_else(
        self, cloud: RunPodEmulator, runpod: RunPodProvider, clock: VirtualClock
    ) -> None:
        one, two = runpod.create(order()), runpod.create(order(token=OTHER))
        http = self.own_key(cloud, one, clock)
        refused = [("GET", "/v2/pods"), ("GET", f"/v2/pods/{one.id}"), ("DELETE", f"/v2/pods/{two.id}")]
        assert [http.request(*call).status for call in refused] == [403] * 3
        assert http.request("DELETE", f"/v2/pods/{one.id}").status == 204
        assert [pod.id for pod in cloud.world.alive] == [two.id]

    def test_the_guards_other_ways_to_end_it_work_too(
        self, cloud: RunPodEmulator, runpod: RunPodProvider, clock: VirtualClock
    ) -> None:
        first, second = runpod.create(order()), runpod.create(order(token=OTHER))
        path = f"/v2/pods/{first.id}/action"
        assert self.own_key(cloud, first, clock).request("POST", path, body={"action": "terminate"}).status == 204
        document = f'mutation {{ podTerminate(input: {{podId: "{second.id}"}}) }}'
        answer = self.own_key(cloud, second, clock).request("POST", "/graphql", body={"query": document}).json
        assert answer == {"data": {"podTerminate": None}}
        assert cloud.world.alive == []

    def test_a_container_that_ends_is_started_again_at_another_port(
        self, cloud: RunPodEmulator, runpod: RunPodProvider
    ) -> None:
        born = runpod.create(order())
        first, pod = runpod.read(born.id).address, cloud.world.pods[born.id]
        assert pod.guest is not None
        pod.guest.kill()
        again = runpod.read(born.id).address
        assert pod.starts == 2
        assert first is not None
        assert again is not None
        assert first.port != again.port

    def test_nothing_ends_a_pod_by_itself(
        self, cloud: RunPodEmulator, runpod: RunPodProvider, clock: VirtualClock
    ) -> None:
        runpod.create(order())
        clock.sleep(86_400)
        assert len(cloud.world.alive) == 1
