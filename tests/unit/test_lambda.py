"""Tests of the Lambda provider: its requests, how it reads replies, and what the emulated account then rents out."""

from __future__ import annotations

import json
import shlex
import time
import traceback
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpurun.core.clock import SystemClock, VirtualClock, ticks
from gpurun.core.errors import MayBeBilling, SetupError
from gpurun.core.money import usd
from gpurun.core.paths import Home
from gpurun.core.records import Address, GpuNeed, Instance, InstanceState, Leftover, Offer, Order, RunKeys, Teardown
from gpurun.core.secrets import Secret
from gpurun.lifecycle.instance.terminate import prove_termination
from gpurun.providers._http import Answer
from gpurun.providers.base import Guarded, LeavesThings, NoCapacity, Rejected, Unknown
from gpurun.providers.catalog import rows_for, terms_of
from gpurun.providers.errors import RejectedFor
from gpurun.providers.guard import lambda_guard, lambda_user_data
from gpurun.providers.lambdalabs import LambdaProvider, Pace
from gpurun.providers.lambdalabs.parse import explain_lambda_answer, hourly_price, judge_launch_answer
from gpurun.providers.registry import open_provider
from gpurun.remote.key_pairs import make_keys
from tests.emulators.guests import whole
from tests.emulators.lambda_cloud import KEY, FakeGuest, Fault, LambdaEmulator, Lie, Problem, real_guest
from tests.emulators.lambda_cloud.contract import SPEC
from tests.emulators.specs import ABSENT, document
from tests.refusals import refusal

A100 = GpuNeed(count=8, name="A100")
SXM = "gpu_8x_a100_80gb_sxm4"
TOKEN, OTHER = "gr-fox-41-00c0ffee", "gr-fox-41-0badf00d"
START, DEADLINE = 1_795_168_800.0, 1_795_172_400.9
GUARD = "secret_guard_fedcba9876543210fedcba9876543210.fedcba98"
HOST_PRIVATE = (
    "-----BEGIN OPENSSH PRIVATE KEY-----\n" + "canary0123456789+/" * 20 + "\n-----END OPENSSH PRIVATE KEY-----\n"
)
KEYS = RunKeys(
    client_public="ssh-ed25519 AAAAclient gpurun", host_public="ssh-ed25519 AAAAhost", host_private=HOST_PRIVATE
)
SHORT = Pace(launch_limit_s=1.0, terminate_limit_s=1.0)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(start=START)  # 2026-11-20 10:00 UTC


@pytest.fixture
def cloud(clock: VirtualClock) -> Iterator[LambdaEmulator]:
    """Yield an emulated account in virtual time with both of Lambda's rate limits, and check its traffic afterwards."""
    with LambdaEmulator(clock=clock, tick_s=None) as emulator:
        emulator.api_keys.add(GUARD)
        yield emulator
        assert emulator.violations == [], "what was asked or answered is not in the document"


@pytest.fixture
def lamb(cloud: LambdaEmulator, clock: VirtualClock) -> LambdaProvider:
    return provider(cloud, clock)


def provider(cloud: LambdaEmulator, clock: VirtualClock, key: str = KEY, **named: Any) -> LambdaProvider:
    return LambdaProvider(Secret(key), clock, base_url=cloud.base_url, **named)


def sxm(**changed: Any) -> Offer:
    """Return the catalogue's offer of eight A100 of 80 GB, placed in a region."""
    row = next(one for one in rows_for(A100, "lambda") if one.type_id == SXM)
    return row.model_copy(update={"region": "us-east-1", **changed})


def order(offer: Offer | None = None, token: str = TOKEN, **changed: Any) -> Order:
    fields = {"run": "fox-41", "token": token, "attempt": 1, "offer": offer or sxm(), "deadline_wall": DEADLINE}
    return Order(**{**fields, "lease_s": 3600, "keys": KEYS, "disk_gb": 120, **changed})


def guest_of(cloud: LambdaEmulator, instance: Instance) -> FakeGuest:
    guest = cloud.world.instances[instance.id].guest
    assert isinstance(guest, FakeGuest)
    return guest


def running(lamb: LambdaProvider, **changed: Any) -> Instance:
    return lamb.read(lamb.create(order(**changed)).id)


# Offers


def test_verify_says_if_the_key_works_and_compares_the_clocks(lamb: LambdaProvider) -> None:
    account = lamb.verify()
    assert (account.identity, account.missing) == ("Lambda account", ())
    assert account.clock_ahead_s == pytest.approx(0, abs=1)


def test_a_bad_key_is_a_matter_of_setup_and_is_not_shown(cloud: LambdaEmulator, clock: VirtualClock) -> None:
    key = "_".join(("secret", "canary"))  # A traceback quotes the lines of this file.
    with refusal(SetupError, "auth.refused", "HTTP 401") as raised:
        provider(cloud, clock, key).verify()
    assert "gpurun auth set lambda" in raised.value.hint
    assert key not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("code", ["global/account-inactive", "global/invalid-address"])
def test_an_account_that_may_rent_nothing_is_told_what_it_lacks(
    cloud: LambdaEmulator, lamb: LambdaProvider, code: str
) -> None:
    cloud.fail("list", Problem(403, code))
    with refusal(SetupError, "account.not_ready") as raised:
        lamb.verify()
    assert "https://cloud.lambda.ai" in raised.value.hint


def test_offers_are_the_known_types_left_at_todays_price(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    cloud.world.kinds[SXM].cents = 2400
    offers = [one for one in lamb.offers(A100, rows_for(A100, "lambda")) if one.type_id == SXM]
    assert [one.region for one in offers] == ["us-east-1", "us-west-1"]
    offer = offers[0]
    assert (offer.rate_micros_per_hour, offer.gpu_count, offer.billing_unit_s) == (usd("24.00"), 8, 60)
    assert (offer.gpu, offer.vram_gb, offer.boot_s, offer.arch) == ("A100 SXM", 80, 900, "x86_64")
    assert (offer.price_source, offer.dies_by_itself[:2]) == ("live 2026-11-20 10:00 UTC", "NO")
    assert cloud.world.instances == {}


def test_with_a_guard_key_a_machine_can_end_itself(cloud: LambdaEmulator, clock: VirtualClock) -> None:
    guarded = provider(cloud, clock, guard_key=Secret(GUARD))
    (ends,) = {one.dies_by_itself for one in guarded.offers(A100, rows_for(A100, "lambda"))}
    assert ends.startswith("yes")
    assert terms_of("lambda").with_guard == ends, "as the catalogue has it"


def test_no_machine_is_said_to_end_by_a_key_lambda_rejects(cloud: LambdaEmulator, clock: VirtualClock) -> None:
    cloud.api_keys.discard(GUARD)
    with pytest.raises(SetupError, match=r"--lambda-guard.*invalid-api-key") as raised:
        provider(cloud, clock, guard_key=Secret(GUARD)).offers(A100, rows_for(A100, "lambda"))
    assert "gpurun auth set lambda-guard" in raised.value.hint


def test_what_cannot_be_had_or_is_not_what_it_was_is_not_offered(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    cloud.world.kinds[SXM].regions = []
    cloud.world.kinds["gpu_8x_a100"].gpus = 4
    assert lamb.offers(A100, rows_for(A100, "lambda")) == []
    assert lamb.offers(A100, ()) == []
    cloud.world.kinds["gpu_8x_a100"].gpus, cloud.world.kinds["gpu_8x_a100"].cents = 8, 0
    assert lamb.offers(A100, rows_for(A100, "lambda")) == []


def test_an_arm_machine_is_offered_by_its_name_as_what_it_is(lamb: LambdaProvider) -> None:
    need = GpuNeed(count=1, name="GH200")
    (offer,) = lamb.offers(need, rows_for(need, "lambda"))
    assert (offer.type_id, offer.arch, offer.rate_micros_per_hour) == ("gpu_1x_gh200", "aarch64", usd("2.29"))


LOST = [Fault.ERROR_BEFORE, Fault.EDGE_BEFORE, Fault.EDGE_AFTER, Fault.BLANK_AFTER, Fault.DROP_RESPONSE]


@pytest.mark.parametrize("fault", LOST)
def test_what_cannot_be_read_is_not_taken_for_empty(cloud: LambdaEmulator, lamb: LambdaProvider, fault: Fault) -> None:
    lamb.create(order())
    for route in ("types", "list", "read", "keys"):
        cloud.fail(route, *[fault] * 3)
    with pytest.raises(Unknown):
        lamb.offers(A100, rows_for(A100, "lambda"))
    with pytest.raises(Unknown):
        lamb.find(TOKEN)
    with pytest.raises(Unknown):
        lamb.read("0" * 32)
    with pytest.raises(Unknown):
        lamb.leftovers(TOKEN)


@pytest.mark.parametrize(
    ("cents", "expected"),
    [(2232, usd("22.32")), (20, usd("0.20")), (0, None), (-5, None), (True, None), ("2232", None), (None, None)],
)
def test_a_price_is_cents_for_the_whole_machine(cents: object, expected: int | None) -> None:
    assert hourly_price(cents) == expected


# Creating an instance


def test_a_launch_carries_its_token_its_end_and_its_keys(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    lamb.create(order())
    assert cloud.bodies("launch") == [
        {
            "region_name": "us-east-1", "instance_type_name": SXM, "ssh_key_names": [TOKEN], "name": TOKEN,
            "hostname": TOKEN, "user_data": lambda_user_data(keys=KEYS),
            "tags": [
                {"key": "gpurun-run", "value": "fox-41"}, {"key": "gpurun-token", "value": TOKEN},
                {"key": "gpurun-deadline", "value": "1795172400"},
            ],
        }
    ]  # fmt: skip
    comment = "ssh-ed25519 AAAAclient gpurun-deadline=1795172400"
    assert cloud.bodies("add_key") == [{"name": TOKEN, "public_key": comment}]


def test_nothing_is_asked_between_the_launch_and_telling_its_id(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    born = lamb.create(order())
    assert [route for _, route, _ in cloud.requests] == ["keys", "add_key", "launch"]
    assert list(cloud.world.instances) == [born.id]
    assert (born.token, born.run, born.state, born.deadline_wall) == (
        TOKEN,
        "fox-41",
        InstanceState.PENDING,
        1795172400,
    )
    assert (born.rate_micros_per_hour, born.type_id, born.address) == (None, "", None)


@pytest.mark.parametrize(
    ("image", "expected"),
    [("family:lambda-stack-22-04", {"family": "lambda-stack-22-04"}), ("43336648-096d", {"id": "43336648-096d"})],
)
def test_an_image_is_asked_for_by_its_family_or_its_id(
    cloud: LambdaEmulator, lamb: LambdaProvider, image: str, expected: dict[str, str]
) -> None:
    lamb.create(order(image=image))
    assert cloud.bodies("launch")[0]["image"] == expected


@pytest.mark.parametrize(
    "wrong",
    [{"keys": None}, {"offer": sxm(region="any")}, {"offer": sxm(region="")}, {"token": "gr-FOX-1"}, {"token": "x"}],
)
def test_an_order_that_cannot_be_kept_is_not_sent(
    cloud: LambdaEmulator, lamb: LambdaProvider, wrong: dict[str, Any]
) -> None:
    with pytest.raises(Rejected):
        lamb.create(order(**wrong))
    assert cloud.requests == []


@pytest.mark.parametrize(
    ("fault", "raised", "made"),
    [
        (Fault.DROP_REQUEST, Unknown, 0),
        (Fault.DROP_RESPONSE, Unknown, 1),
        (Fault.HANG_BEFORE, Unknown, 0),
        (Fault.HANG_AFTER, Unknown, 1),
        (Fault.ERROR_BEFORE, Unknown, 0),
        (Fault.ERROR_AFTER, Unknown, 1),
        (Fault.UNAVAILABLE_AFTER, Unknown, 1),
        (Fault.EDGE_BEFORE, Unknown, 0),
        (Fault.EDGE_AFTER, Unknown, 1),
        (Fault.BLANK_AFTER, Unknown, 1),
        (Problem(409, "global/conflict"), Unknown, 0),
        (Problem(400, "global/tomorrow"), Unknown, 0),
        (Problem(500, "global/invalid-parameters"), Unknown, 0),
        (Problem(503, "instance-operations/launch/insufficient-capacity"), Unknown, 0),
        (Fault.SOLD_OUT, NoCapacity, 0),
        (Fault.REVOKED, Rejected, 0),
    ],
    ids=lambda value: getattr(value, "name", "") or str(getattr(value, "code", value)),
)
def test_certainly_nothing_is_said_only_where_it_is_certain(
    cloud: LambdaEmulator, clock: VirtualClock, fault: Fault | Problem, raised: type[Exception], made: int
) -> None:
    lamb = provider(cloud, clock, pace=SHORT)
    cloud.fail("launch", fault)
    with pytest.raises(raised):
        lamb.create(order())
    assert cloud.count("launch") == 1, "a launch of unknown outcome is never sent again"
    assert len(cloud.world.alive) == made
    assert [one.token for one in lamb.find(TOKEN)] == [TOKEN] * made
    assert len(lamb.leftovers(TOKEN)) == (1 if raised is Unknown else 0), "the key goes only where nothing may need it"


@pytest.mark.parametrize(
    ("status", "code", "expected", "advice"),
    [
        (400, "global/quota-exceeded", "account.no_quota 5", "https://support.lambda.ai"),
        (401, "global/invalid-api-key", "auth.refused 4", "gpurun auth set lambda"),
        (403, "global/account-inactive", "account.not_ready 4", "payment method"),
        (403, "global/invalid-address", "account.not_ready 4", "billing address"),
        (403, "global/forbidden", "auth.not_allowed 4", "global/forbidden"),
        (404, "global/object-does-not-exist", "", "HTTP 404"),
        (400, "instance-operations/launch/file-system-in-wrong-region", "", "HTTP 400"),
    ],
)
def test_a_refusal_says_what_to_do(
    cloud: LambdaEmulator, lamb: LambdaProvider, status: int, code: str, expected: str, advice: str
) -> None:
    cloud.fail("launch", Problem(status, code))
    with pytest.raises(Rejected, match=code) as raised:
        lamb.create(order())
    assert advice in str(raised.value)
    error = getattr(raised.value, "error", None)
    assert expected == (f"{error.code} {error.exit_code}" if error else "")
    assert raised.value.of_offer == (code == "global/quota-exceeded"), "what another provider's offer may still do"


def test_capacity_that_went_since_the_plan_is_no_capacity(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    offers = lamb.offers(A100, rows_for(A100, "lambda"))
    cloud.world.capacity_left = 0
    with pytest.raises(NoCapacity):
        lamb.create(order(offers[0]))
    assert cloud.world.keys == {}


def test_trouble_before_the_launch_launches_nothing(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    for route, fault in (("keys", Fault.ERROR_BEFORE), ("add_key", Fault.DROP_RESPONSE), ("keys", Fault.EDGE_BEFORE)):
        cloud.fail(route, *[fault] * (3 if fault is Fault.ERROR_BEFORE else 1))
        with pytest.raises(Rejected):
            lamb.create(order())
    cloud.fail("keys", Fault.REVOKED)
    with pytest.raises(Rejected, match="gpurun auth set lambda"):
        lamb.create(order())
    assert cloud.count("launch") == 0


def test_a_read_is_repeated_after_server_errors(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    born = lamb.create(order())
    cloud.fail("read", Fault.ERROR_BEFORE, Fault.EDGE_AFTER)
    assert lamb.read(born.id).id == born.id


def test_a_key_that_an_earlier_try_left_is_used_again(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    cloud.fail("launch", Fault.DROP_REQUEST)
    with pytest.raises(Unknown):
        lamb.create(order())
    lamb.create(order())
    assert (cloud.count("add_key"), len(cloud.world.keys), len(cloud.world.alive)) == (1, 1, 1)


def test_the_next_try_of_a_run_uses_the_key_the_last_one_left(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    cloud.world.takes_a_key_twice = False
    cloud.fail("launch", Fault.DROP_REQUEST, None, Fault.SOLD_OUT)
    with pytest.raises(Unknown):
        lamb.create(order())
    lamb.create(order(token=OTHER))
    assert cloud.bodies("launch")[-1]["ssh_key_names"] == [TOKEN]
    with pytest.raises(NoCapacity):
        lamb.create(order(token="gr-fox-41-0000cafe"))
    assert [one.token for one in lamb.leftovers(None)] == [TOKEN], "a refusal takes away only what was its own"
    launches = cloud.count("launch")
    with pytest.raises(Rejected):
        lamb.create(order(run="owl-7", token="gr-owl-7-00c0ffee"))
    assert cloud.count("launch") == launches


def test_nobody_elses_key_is_let_in(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    cloud.world.add_key(TOKEN, "ssh-ed25519 AAAAsomebody gpurun")
    with pytest.raises(Rejected, match=TOKEN):
        lamb.create(order())
    assert cloud.count("launch") == 0


def test_a_key_whose_removal_fails_is_left_to_be_found(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    cloud.fail("launch", Fault.SOLD_OUT)
    cloud.fail("remove_key", Fault.DROP_REQUEST)
    with pytest.raises(NoCapacity):
        lamb.create(order())
    assert [one.token for one in lamb.leftovers(None)] == [TOKEN]


@pytest.mark.parametrize(
    "data", [None, [], {}, {"instance_ids": []}, {"instance_ids": ["../x"]}, {"instance_ids": [7]}]
)
def test_a_launch_without_an_id_may_have_made_something(
    cloud: LambdaEmulator, lamb: LambdaProvider, data: object
) -> None:
    cloud.fail("launch", Lie(data))
    with pytest.raises(Unknown):
        lamb.create(order())
    assert len(lamb.find(TOKEN)) == 1


def test_a_code_counts_only_with_a_status_of_its_kind() -> None:
    for code in ("global/object-does-not-exist", "global/invalid-api-key"):
        text = json.dumps({"error": {"code": code, "message": []}})
        assert isinstance(judge_launch_answer(Answer(502, {}, text)), Unknown)
        assert isinstance(explain_lambda_answer(Answer(502, {}, text)), Unknown)


def test_one_request_a_second_and_one_launch_in_twelve_are_kept(
    cloud: LambdaEmulator, lamb: LambdaProvider, clock: VirtualClock
) -> None:
    lamb.create(order())
    lamb.create(order(token=OTHER))
    for _ in range(5):
        lamb.find(None)
    assert len(cloud.requests) == 3 + 2 + 5, "none was answered 429 and sent again"
    assert clock.monotonic() >= 12 + 5


def test_other_requests_under_the_same_key_are_waited_out(
    cloud: LambdaEmulator, lamb: LambdaProvider, clock: VirtualClock
) -> None:
    provider(cloud, clock).create(order(token=OTHER))
    began = clock.monotonic()
    lamb.create(order())
    assert len(cloud.world.alive) == 2
    assert clock.monotonic() - began >= 12


def test_being_told_to_wait_for_ever_is_unknown(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    cloud.fail("launch", *[Fault.TOO_MANY] * 20)
    with pytest.raises(Unknown, match="429"):
        lamb.create(order())
    assert cloud.world.instances == {}


def test_what_is_sent_with_a_refused_order_is_not_in_the_refusal(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    cloud.fail("launch", Fault.ECHO)
    cloud.fail("list", Fault.ECHO)
    with pytest.raises(Rejected) as raised:
        lamb.create(order())
    with pytest.raises(Unknown) as unclear:
        lamb.find(None)
    for error in (raised.value, unclear.value):
        text = "".join(traceback.format_exception(error))
        assert not any(part in text for part in ("canary", KEY, KEY.rpartition("_")[2]))


# Finding an instance again


def test_an_instance_is_told_with_all_that_it_is_held_against(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    born = running(lamb)
    assert (born.state, born.said, born.region) == (InstanceState.RUNNING, "active", "us-east-1")
    assert born.address == Address(kind="ssh", host=guest_of(cloud, born).host, port=22, user="ubuntu")
    assert (born.type_id, born.gpu_count, born.rate_micros_per_hour) == (SXM, 8, usd("22.32"))
    assert (born.token, born.run, born.deadline_wall) == (TOKEN, "fox-41", 1_795_172_400.0)
    assert "jupyter" not in born.to_json()


@pytest.mark.parametrize("nulls", [False, True])
def test_what_boots_has_no_address_yet(cloud: LambdaEmulator, lamb: LambdaProvider, nulls: bool) -> None:
    cloud.nulls, cloud.world.boot_s = nulls, 600.0
    born = running(lamb)
    assert (born.state, born.address, born.token) == (InstanceState.PENDING, None, TOKEN)


def test_what_never_boots_stays_pending_and_can_be_ended(
    cloud: LambdaEmulator, lamb: LambdaProvider, clock: VirtualClock
) -> None:
    cloud.world.never_boots = True
    born = running(lamb)
    clock.sleep(3_600)
    assert lamb.read(born.id).state is InstanceState.PENDING
    lamb.destroy(born.id)
    assert (lamb.read(born.id).state, cloud.world.widest.running) == (InstanceState.GONE, [])


STATES = {
    "booting": InstanceState.PENDING,
    "active": InstanceState.RUNNING,
    "unhealthy": InstanceState.RUNNING,
    "preempted": InstanceState.STOPPED,
    "terminating": InstanceState.STOPPING,
    "terminated": InstanceState.GONE,
}
"""The state that gpurun reads from each status of Lambda."""


def test_every_status_of_lambdas_document_is_known() -> None:
    spec = document(SPEC)
    if spec is None:
        pytest.skip(ABSENT)
    assert set(spec["components"]["schemas"]["InstanceStatus"]["enum"]) == set(STATES)


@pytest.mark.parametrize(("status", "state"), [*STATES.items(), ("hibernating", InstanceState.UNKNOWN)])
def test_nothing_that_may_be_billed_is_called_gone(
    cloud: LambdaEmulator, lamb: LambdaProvider, status: str, state: InstanceState
) -> None:
    cloud.world.terminating_s = cloud.world.terminated_s = 600.0
    born = running(lamb)
    cloud.world.never_boots = True
    cloud.world.ail(cloud.world.instances[born.id], status)
    read = lamb.read(born.id)
    assert (read.state, read.said) == (state, status)
    assert [one.state for one in lamb.find(TOKEN)] == [state]
    cloud.violations = [one for one in cloud.violations if "hibernating" not in one]


def test_a_price_that_rose_and_another_machine_are_read_back(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    cloud.world.price_factor, cloud.world.given_kind = Fraction(3, 2), "gpu_8x_a100"
    born = running(lamb)
    assert (born.rate_micros_per_hour, born.type_id) == (usd("23.88"), "gpu_8x_a100")


def test_a_lost_launch_and_a_double_are_found_in_one_order(
    cloud: LambdaEmulator, lamb: LambdaProvider, clock: VirtualClock
) -> None:
    cloud.fail("launch", Fault.TWICE, Fault.DROP_RESPONSE)
    first = lamb.create(order())
    with pytest.raises(Unknown):
        lamb.create(order())
    lamb.create(order(token=OTHER))
    found = [one.id for one in lamb.find(TOKEN)]
    assert len(found) == 3
    assert first.id in found
    assert found == [one.id for one in provider(cloud, clock).find(TOKEN)] == sorted(found)
    assert len(lamb.find(None)) == 4


def test_only_gpuruns_own_are_found(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    ours = lamb.create(order())
    cloud.world.add_key("laptop", "ssh-ed25519 AAAAme me@laptop")
    plain = {"region_name": "us-east-1", "instance_type_name": SXM, "ssh_key_names": ["laptop"]}
    for name in ("my instance", "gr-", "gr-fox-41-00c0ffee-2", TOKEN.upper()):
        cloud.world.launch({**plain, "name": name})
    cloud.world.launch(plain)
    named = cloud.world.launch({**plain, "name": OTHER})
    assert {one.id for one in lamb.find(None)} == {ours.id, named.id}
    assert [(one.id, one.run, one.deadline_wall) for one in lamb.find(OTHER)] == [(named.id, "fox-41", None)]
    assert lamb.find("") == []


def test_the_owner_survives_the_loss_of_the_name_or_the_tags(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    renamed = lamb.create(order())
    cloud.world.instances[renamed.id].body["name"] = "mine now"
    cloud.world.keeps_tags = False
    untagged = lamb.create(order(token=OTHER))
    assert [one.id for one in lamb.find(TOKEN)] == [renamed.id]
    assert [one.id for one in lamb.find(OTHER)] == [untagged.id]


def test_it_is_gone_by_lambdas_code_alone(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    assert lamb.read("0" * 32).state is InstanceState.GONE
    cloud.fail("read", Problem(404, "global/not-found"), *[Problem(500, "global/object-does-not-exist")] * 3)
    for _ in range(2):
        with pytest.raises(Unknown):
            lamb.read("0" * 32)


def test_a_strange_id_is_never_made_part_of_a_url(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    strange = Leftover(provider="lambda", kind="ssh_key", id="../instances", run="fox-41", token=TOKEN)
    for request in (lambda: lamb.read("../ssh-keys"), lambda: lamb.destroy(""), lambda: lamb.remove(strange)):
        with pytest.raises(Rejected):
            request()
    assert cloud.requests == []


def test_what_is_told_of_another_instance_is_not_taken(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    born, other = running(lamb), lamb.create(order(token=OTHER))
    cloud.fail("read", Lie({"id": other.id, "status": "terminated"}), Lie({"status": "terminated"}), Lie([]))
    for _ in range(3):
        with pytest.raises(Unknown):
            lamb.read(born.id)
    cloud.fail("list", Lie([{"status": "terminated", "name": TOKEN}]), Lie({"0": born.id}), Lie(["terminated"]))
    for _ in range(3):
        with pytest.raises(Unknown):
            lamb.find(TOKEN)


@pytest.mark.parametrize(
    "fields",
    [{"ip": "evil.example"}, {"ip": 7}, {"ip": "-oProxyCommand=x"}, {"tags": "x", "instance_type": [], "name": 7}],
)
def test_what_makes_no_sense_is_as_if_it_were_not_told(
    cloud: LambdaEmulator, lamb: LambdaProvider, fields: dict[str, Any]
) -> None:
    cloud.fail("read", Lie({"id": "0" * 32, "status": "active", **fields}))
    read = lamb.read("0" * 32)
    assert (read.address, read.token, read.type_id, read.rate_micros_per_hour) == (None, "", "", None)


# Ending an instance


def test_an_end_is_proven_though_the_dead_are_listed_for_a_while(
    cloud: LambdaEmulator, lamb: LambdaProvider, clock: VirtualClock
) -> None:
    cloud.world.terminating_s, cloud.world.terminated_s = 5.0, 60.0
    born = running(lamb)
    lamb.destroy(born.id)
    assert lamb.read(born.id).state is InstanceState.STOPPING
    clock.sleep(5)
    assert [one.state for one in (lamb.read(born.id), *lamb.find(TOKEN))] == [InstanceState.GONE] * 2
    lamb.destroy(born.id)
    clock.sleep(60)
    assert (lamb.read(born.id).state, lamb.find(TOKEN)) == (InstanceState.GONE, [])
    lamb.destroy(born.id)
    assert cloud.world.meter.running == []


@pytest.mark.parametrize(
    "fault", [Fault.HANG_BEFORE, Fault.HANG_AFTER, Fault.ERROR_BEFORE, Fault.ERROR_AFTER, Fault.EDGE_AFTER]
)
def test_an_unanswered_terminate_is_given_up_and_asked_again(
    cloud: LambdaEmulator, clock: VirtualClock, fault: Fault
) -> None:
    lamb = provider(cloud, clock, pace=SHORT)
    born = running(lamb)
    cloud.fail("terminate", fault)
    began = time.monotonic()
    with pytest.raises(Unknown):
        lamb.destroy(born.id)
    assert time.monotonic() - began < 10
    lamb.destroy(born.id)
    assert (lamb.read(born.id).state, cloud.world.alive) == (InstanceState.GONE, [])


def test_a_key_that_was_revoked_meanwhile_is_told(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    born = running(lamb)
    cloud.api_keys.clear()
    for request in (lambda: lamb.destroy(born.id), lambda: lamb.read(born.id), lambda: lamb.find(TOKEN)):
        with refusal(SetupError, "auth.refused", "HTTP 401"):
            request()


def test_a_death_is_proven_through_hangs_lies_and_old_lists(cloud: LambdaEmulator, clock: VirtualClock) -> None:
    lamb = provider(cloud, clock, pace=SHORT)
    cloud.world.terminating_s, cloud.world.terminated_s, cloud.world.list_lag_s = 20.0, 40.0, 15.0
    cloud.fail("launch", Fault.TWICE)
    born = running(lamb)
    clock.sleep(20)
    cloud.world.deaf_terminates = 2
    cloud.fail("terminate", None, Fault.HANG_BEFORE, Fault.ERROR_AFTER, Fault.DROP_RESPONSE)
    cloud.fail("list", None, Fault.STALE, Fault.EDGE_BEFORE)
    cloud.fail("read", Fault.ERROR_BEFORE)
    notes = list(prove_termination(lamb, clock, born.id, TOKEN, run="fox-41"))
    assert notes[-1].event == "death.proven"
    assert (cloud.world.alive, cloud.world.meter.running, cloud.world.widest.running) == ([], [], [])


def test_the_step_never_proves_the_death_of_what_lives(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    born = running(lamb)
    cloud.world.deaf_terminates = 1_000
    with pytest.raises(MayBeBilling) as raised:
        list(prove_termination(lamb, lamb._clock, born.id, TOKEN, run="fox-41"))
    assert "https://cloud.lambda.ai/instances" in raised.value.hint
    assert lamb.traits.teardown is Teardown.DESTROYED


def test_powering_off_ends_nothing(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    born = running(lamb)
    guest_of(cloud, born).poweroff()
    assert (lamb.read(born.id).state, lamb.read(born.id).said) == (InstanceState.RUNNING, "unhealthy")
    assert cloud.world.meter.running == [born.id]


def test_five_minutes_of_illness_mean_stopped_unless_it_recovers(
    cloud: LambdaEmulator, lamb: LambdaProvider, clock: VirtualClock
) -> None:
    born = running(lamb)
    inside = cloud.world.instances[born.id]

    def states(status: str, *pauses_s: float) -> list[str]:
        cloud.world.ail(inside, status)
        seen = []
        for pause_s in pauses_s:
            clock.sleep(pause_s)
            seen.append(str(lamb.read(born.id).state))
        return seen

    assert states("unhealthy", 0, 290) == ["RUNNING", "RUNNING"]
    assert states("active", 5) == ["RUNNING"]
    assert states("unhealthy", 0, 290, 10) == ["RUNNING", "RUNNING", "STOPPED"]
    assert lamb.read(born.id).said == "unhealthy"
    assert cloud.world.meter.running == [born.id], "that is no end: it is billed until it is terminated"


def test_a_machine_ill_twice_in_a_day_was_not_ill_all_day(
    cloud: LambdaEmulator, lamb: LambdaProvider, clock: VirtualClock
) -> None:
    """gpurun reads Lambda only while a machine is silent, so two short illnesses must not be taken for one long one."""
    born = running(lamb)
    cloud.world.ail(cloud.world.instances[born.id])
    assert lamb.read(born.id).state is InstanceState.RUNNING
    clock.sleep(3 * 3600.0)
    assert lamb.read(born.id).state is InstanceState.RUNNING
    for _ in range(4):
        clock.sleep(80)
        state = lamb.read(born.id).state
    assert state is InstanceState.STOPPED


# What an instance leaves in the account


def test_rental_keys_are_left_and_say_when_they_are_unneeded(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    lamb.create(order())
    cloud.world.add_key("laptop", "ssh-ed25519 AAAAme me@laptop")
    cloud.world.add_key(OTHER, "ssh-ed25519 AAAAold gpurun")
    mine, old = lamb.leftovers(None)
    assert (mine.kind, mine.token, mine.run, mine.billed) == ("ssh_key", TOKEN, "fox-41", False)
    assert (mine.deadline_wall, old.deadline_wall) == (1_795_172_400.0, None)
    assert [one.id for one in lamb.leftovers(OTHER)] == [old.id]


def test_a_key_is_removed_once_its_machine_lets_it_go(cloud: LambdaEmulator, lamb: LambdaProvider) -> None:
    assert isinstance(lamb, LeavesThings)
    cloud.world.keys_in_use_stay = True
    born = running(lamb)
    (key,) = lamb.leftovers(TOKEN)
    with pytest.raises(Unknown, match="in use"):
        lamb.remove(key)
    lamb.destroy(born.id)
    lamb.find(TOKEN)
    for _ in range(2):
        lamb.remove(key)
    assert cloud.world.keys == {}
    with pytest.raises(Rejected):
        lamb.remove(key.model_copy(update={"kind": "volume"}))


# The guard on the machine


def test_a_machine_has_a_guard_only_where_there_is_a_key_for_it(lamb: LambdaProvider, cloud: LambdaEmulator) -> None:
    assert isinstance(lamb, Guarded)
    assert lamb.guard_folder(running(lamb)) == ""
    assert "bootcmd" not in cloud.bodies("launch")[0]["user_data"]


@pytest.mark.parametrize(
    ("seen", "words"), [(Problem(401, "global/invalid-api-key"), "invalid-api-key"), (Lie([]), "another account")]
)
def test_nothing_is_launched_that_the_guard_key_could_not_end(
    cloud: LambdaEmulator, clock: VirtualClock, seen: Problem | Lie, words: str
) -> None:
    cloud.fail("keys", None, seen)
    with pytest.raises(RejectedFor, match=words) as raised:
        provider(cloud, clock, guard_key=Secret(GUARD)).create(order())
    assert isinstance(raised.value.error, SetupError)
    assert "gpurun auth set lambda-guard" in raised.value.error.hint
    assert (cloud.count("launch"), cloud.world.keys) == (0, {})


def test_the_users_own_key_on_the_machine_needs_no_extra_look(cloud: LambdaEmulator, clock: VirtualClock) -> None:
    running(provider(cloud, clock, guard_key=Secret(KEY)))
    assert cloud.count("keys") == 1


def test_a_guard_with_the_users_key_is_known_to_fail_with_it(cloud: LambdaEmulator, clock: VirtualClock) -> None:
    shared, own = (provider(cloud, clock, guard_key=Secret(key)) for key in (KEY, GUARD))
    assert (shared.guard_shares_key, own.guard_shares_key) == (True, False)
    born = running(shared)
    cloud.api_keys.discard(KEY)
    with refusal(SetupError, "auth.refused", "HTTP 401"):
        shared.destroy(born.id)


def test_two_keys_of_one_account_share_its_request_a_second(cloud: LambdaEmulator, clock: VirtualClock) -> None:
    guarded = provider(cloud, clock, guard_key=Secret(GUARD))
    guarded.offers(A100, rows_for(A100, "lambda"))
    guarded.create(order())
    routes = [route for _, route, _ in cloud.requests]
    assert routes == ["keys", "types", "keys", "add_key", "keys", "launch"], "none was refused and sent again"


def test_the_launch_carries_a_guard_that_knows_what_and_when(cloud: LambdaEmulator, clock: VirtualClock) -> None:
    guarded = provider(cloud, clock, guard_key=Secret(GUARD))
    guarded.create(order())
    (command,) = yaml.safe_load(cloud.bodies("launch")[0]["user_data"])["bootcmd"]
    variables = dict(shlex.split(line)[0].split("=", 1) for line in command.splitlines()[:5])
    assert b64decode(variables.pop("KEY_B64")).decode() == GUARD
    assert variables == {
        "BASE_URL": cloud.base_url, "TOKEN": TOKEN, "DEADLINE": str(int(DEADLINE)), "LEASE_S": "3600",
    }  # fmt: skip


@pytest.mark.parametrize("status", [400, 403, 500])
@pytest.mark.parametrize("code", ["global/invalid-parameters", "global/forbidden", "global/quota-exceeded"])
def test_no_refusal_repeats_the_key_that_a_launch_carries(
    cloud: LambdaEmulator, clock: VirtualClock, status: int, code: str
) -> None:
    """Lambda's error may quote a request that contains the guard's key: the error that the user sees must not."""
    guarded = provider(cloud, clock, guard_key=Secret(GUARD))
    quoted = lambda_guard(key=Secret(GUARD), base_url="", token="", deadline_wall=0, lease_s=0).splitlines()[4]
    assert "KEY_B64" in quoted
    cloud.fail("launch", Problem(status, code, f"cannot read {quoted}, nor {GUARD}"))
    with pytest.raises((Rejected, Unknown)) as raised:
        guarded.create(order())
    said = str(raised.value) + repr(raised.value) + repr(getattr(raised.value, "error", ""))
    assert "cannot read" in said
    assert GUARD not in said
    assert b64encode(GUARD.encode()).decode() not in said


# Real machines


def test_two_processes_keep_lambdas_pace_together(
    cloud: LambdaEmulator, clock: VirtualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lambda limits the requests of an account: two processes that each kept their own pace were refused with 429."""
    home, admitted, takes = Home(tmp_path), list[bool](), cloud.limits.takes
    for name, value in cloud.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cloud.limits, "takes", lambda route: admitted.append(takes(route)) or admitted[-1])
    both = [open_provider("lambda", home, clock) for _ in range(2)]
    for one in (*both, *both):
        one.find(None)
    for one, token in zip(both, (TOKEN, OTHER), strict=True):
        one.create(order(token=token))
    # The provider waits after a 429, so elapsed time alone would prove nothing.
    assert all(admitted), admitted
    assert len(admitted) >= 6


QUICK = Pace(request_s=0.0, launch_s=0.0)


@pytest.fixture
def real_cloud(tmp_path: Path) -> Iterator[LambdaEmulator]:
    """Yield an account in real time and without rate limits, whose machines accept SSH two seconds after their boot."""
    if whole():
        pytest.skip(whole())
    with LambdaEmulator(boot=real_guest(tmp_path / "guests", sshd_delay_s=2.0)) as cloud:
        cloud.limits.gap_s = cloud.limits.launch_gap_s = 0.0
        cloud.api_keys.add(GUARD)
        yield cloud
    assert cloud.violations == []


def soon(does: Callable[[], bool], limit_s: float) -> bool:
    """Return whether the condition becomes true within `limit_s` seconds."""
    return any(does() for _ in ticks(SystemClock(), 0.1, limit_s))


@pytest.mark.slow
def test_a_machine_whose_laptop_dies_at_launch_ends_itself(real_cloud: LambdaEmulator, tmp_path: Path) -> None:
    """After the launch no process logs in or sends a request: the guard alone must end the machine."""
    clock, keys = SystemClock(), make_keys(tmp_path / "ssh")
    guarded = LambdaProvider(Secret(KEY), clock, base_url=real_cloud.base_url, guard_key=Secret(GUARD), pace=QUICK)
    deadline = float(int(clock.wall()) + 10)
    born = guarded.create(order(keys=keys, deadline_wall=deadline))
    real_cloud.api_keys.discard(KEY)  # From here on only the machine's own guard has a key that works.
    assert soon(lambda: not real_cloud.world.alive, 30)
    assert deadline <= clock.wall() < deadline + 20
    assert real_cloud.world.meter.running == []
    assert real_cloud.bodies("terminate") == [{"instance_ids": [born.id]}]
