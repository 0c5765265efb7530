"""Tests of the emulated Lambda over HTTP: its refusals, its limits and its bill."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest

from gpurun.core.clock import VirtualClock
from tests.emulators.lambda_cloud import KEY, FakeGuest, LambdaEmulator
from tests.emulators.lambda_cloud.contract import SPEC
from tests.emulators.specs import ABSENT, document

LAUNCH = {"region_name": "us-east-1", "instance_type_name": "gpu_8x_a100_80gb_sxm4", "ssh_key_names": ["mine"]}


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def cloud(clock: VirtualClock) -> Iterator[LambdaEmulator]:
    """Yield an account with one key; only the test lets time pass."""
    with LambdaEmulator(clock=clock, tick_s=None) as emulator:
        emulator.limits.gap_s = emulator.limits.launch_gap_s = 0.0
        emulator.world.add_key("mine", "ssh-ed25519 AAAAmine")
        yield emulator


def ask(cloud: LambdaEmulator, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Send one request; return the status with the data or the error's code, or with the text if it is not JSON."""
    parts = urlsplit(cloud.base_url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=5)
    sent = {"Authorization": f"Bearer {KEY}", "User-Agent": "gpurun-test", **headers}
    connection.request(method, parts.path + path, None if body is None else json.dumps(body), sent)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    if response.headers["Content-Type"] != "application/json":
        return response.status, text
    answer = json.loads(text)
    return response.status, answer["data"] if "data" in answer else answer["error"]["code"]


def launch(cloud: LambdaEmulator, **changed: Any) -> str:
    status, data = ask(cloud, "POST", "/instance-operations/launch", {**LAUNCH, **changed})
    assert status == 200, data
    return str(data["instance_ids"][0])


@pytest.mark.parametrize(
    ("changed", "status", "code"),
    [
        ({"ssh_key_names": []}, 400, "global/invalid-parameters"),
        ({"ssh_key_names": ["mine", "mine"]}, 400, "global/invalid-parameters"),
        ({"ssh_key_names": ["nobodys"]}, 404, "global/object-does-not-exist"),
        ({"instance_type_name": "gpu_9x"}, 404, "global/object-does-not-exist"),
        ({"region_name": "europe-central-1"}, 400, "instance-operations/launch/insufficient-capacity"),
        ({"tags": [{"key": "Gpurun", "value": "x"}]}, 400, "global/invalid-parameters"),
        ({"user_data": "#" * 1_000_001}, 400, "global/invalid-parameters"),
        ({"region_name": ""}, 400, "global/invalid-parameters"),
    ],
)
def test_a_launch_that_is_refused_makes_nothing(
    cloud: LambdaEmulator, changed: dict[str, Any], status: int, code: str
) -> None:
    assert ask(cloud, "POST", "/instance-operations/launch", {**LAUNCH, **changed}) == (status, code)
    assert cloud.world.instances == {}


@pytest.mark.parametrize("changed", [{"quantity": 1}, {"hostname": "No_Name"}, {"name": "x" * 65}, {"image": {}}])
def test_what_the_document_does_not_have_is_refused(cloud: LambdaEmulator, changed: dict[str, Any]) -> None:
    if document(SPEC) is None:
        pytest.skip(ABSENT)
    assert ask(cloud, "POST", "/instance-operations/launch", {**LAUNCH, **changed})[0] == 400
    assert len(cloud.violations) == 1
    assert cloud.violations[0].startswith("request")


@pytest.mark.parametrize("nulls", [False, True])
def test_every_answer_is_as_the_document_has_it(cloud: LambdaEmulator, clock: VirtualClock, nulls: bool) -> None:
    if document(SPEC) is None:
        pytest.skip(ABSENT)
    world = cloud.world
    cloud.nulls, world.boot_s, world.terminating_s, world.terminated_s = nulls, 10.0, 10.0, 10.0
    name = launch(cloud, name="one", tags=[{"key": "gpurun-run", "value": "x"}])
    seen = []
    for _ in range(5):
        status, reply = ask(cloud, "GET", f"/instances/{name}")
        seen.append(reply["status"] if status == 200 else reply)
        assert ask(cloud, "GET", "/instances")[0] == 200
        if seen[-1] == "active":
            ask(cloud, "POST", "/instance-operations/terminate", {"instance_ids": [name]})
            continue
        clock.sleep(10)
    assert seen == ["booting", "active", "terminating", "terminated", "global/object-does-not-exist"]
    for path in ("/instance-types", "/regions", "/ssh-keys"):
        assert ask(cloud, "GET", path)[0] == 200
    assert ask(cloud, "POST", "/ssh-keys", {"name": "two", "public_key": "ssh-ed25519 AAAAtwo"})[0] == 200
    assert ask(cloud, "DELETE", "/ssh-keys/none") == (404, "global/not-found")
    assert cloud.violations == []


def test_a_launch_per_12_s_and_a_request_per_s_are_allowed(cloud: LambdaEmulator, clock: VirtualClock) -> None:
    cloud.limits.gap_s, cloud.limits.launch_gap_s = 1.0, 12.0
    launch(cloud)
    assert ask(cloud, "GET", "/instances") == (429, "global/too-many-requests")
    clock.sleep(1)
    assert ask(cloud, "GET", "/instances")[0] == 200
    clock.sleep(10)
    assert ask(cloud, "POST", "/instance-operations/launch", LAUNCH)[0] == 429
    clock.sleep(1)
    launch(cloud)
    assert len(cloud.world.alive) == 2


def test_the_bill_is_whole_minutes_from_active_to_terminated(cloud: LambdaEmulator, clock: VirtualClock) -> None:
    world = cloud.world
    world.boot_s, world.terminating_s = 600.0, 20.0
    name = launch(cloud)
    clock.sleep(700)  # It boots for 600 s and is active for 100 s, although no request arrives meanwhile.
    assert ask(cloud, "GET", f"/instances/{name}")[1]["status"] == "active"
    ask(cloud, "POST", "/instance-operations/terminate", {"instance_ids": [name]})
    clock.sleep(3_600)
    assert ask(cloud, "GET", "/instances") == (200, [])
    per_minute = 2232 * 10_000 // 60
    assert (world.meter.total_micros(), world.widest.total_micros()) == (2 * per_minute, 12 * per_minute)


def test_a_machine_that_powers_itself_off_is_billed_on(cloud: LambdaEmulator, clock: VirtualClock) -> None:
    name = launch(cloud)
    ask(cloud, "GET", "/instances")
    guest = cloud.world.instances[name].guest
    assert isinstance(guest, FakeGuest)
    guest.poweroff()
    assert ask(cloud, "GET", f"/instances/{name}")[1]["status"] == "unhealthy"
    clock.sleep(3_600)
    assert cloud.world.meter.total_micros() == 22_320_000


def test_of_several_to_be_ended_all_are_or_none(cloud: LambdaEmulator) -> None:
    name = launch(cloud)
    both = {"instance_ids": [name, "0" * 32]}
    assert ask(cloud, "POST", "/instance-operations/terminate", both) == (404, "global/object-does-not-exist")
    assert [instance.id for instance in cloud.world.alive] == [name]


def test_an_old_list_shows_neither_births_nor_deaths(cloud: LambdaEmulator, clock: VirtualClock) -> None:
    cloud.world.list_lag_s = 15.0
    name = launch(cloud)
    assert ask(cloud, "GET", "/instances") == (200, [])
    assert ask(cloud, "GET", f"/instances/{name}")[0] == 200
    clock.sleep(15)
    ask(cloud, "POST", "/instance-operations/terminate", {"instance_ids": [name]})
    clock.sleep(10)
    assert ask(cloud, "GET", f"/instances/{name}")[0] == 404
    assert [instance["status"] for instance in ask(cloud, "GET", "/instances")[1]] == ["active"]


def test_who_has_no_key_or_no_name_is_turned_away(cloud: LambdaEmulator) -> None:
    basic = base64.b64encode(f"{KEY}:".encode()).decode()
    assert ask(cloud, "GET", "/instances", Authorization=f"Basic {basic}")[0] == 200
    assert ask(cloud, "GET", "/instances", Authorization="Bearer nobodys") == (401, "global/invalid-api-key")
    status, text = ask(cloud, "GET", "/instances", **{"User-Agent": "Python-urllib/3.11"})
    assert (status, "1010" in text) == (403, True)
    assert ask(cloud, "GET", "/images") == (404, "global/not-found")
