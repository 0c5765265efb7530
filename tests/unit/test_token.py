"""Tests of the token: its parts, its length as a name in each cloud, and the home's id in it."""

from __future__ import annotations

import re
import shutil
import threading
from pathlib import Path

import pytest

from gpurun.core.errors import SetupError
from gpurun.core.machine_token import MOST, make_token, parse_token
from gpurun.core.paths import Home
from gpurun.core.records import GpuNeed, Order
from gpurun.providers.aws.tags import client_token, client_token_filter, owner, tags_of
from gpurun.providers.catalog import offers_for
from gpurun.providers.lambdalabs import instances as lambda_instances
from gpurun.providers.runpod import pods
from tests.refusals import refusal

_OFFER = offers_for(GpuNeed(count=0, name="cpu"))[0]
HOME, DEADLINE = "3fa9c1", 1_795_246_236.0
LONG = "a-run-with-the-longest-name-that-there-is"[:40]


@pytest.mark.parametrize("run", ["fox-41", "x", LONG, f"{'a' * 27}-b", f"{'a' * 28}-b", "a-" * 20, "9" * 40])
def test_a_token_says_home_deadline_and_run_and_fits_any_name(run: str) -> None:
    made = make_token(HOME, DEADLINE + 0.9, run)
    assert re.fullmatch(r"[a-z0-9][a-z0-9-]{0,58}[a-z0-9]", made), "a host name, a file name, a key"
    assert len(made) <= MOST
    assert len(client_token(made, "us-east-1a")) <= 62
    parsed = parse_token(made)
    assert parsed is not None
    assert (parsed.text, parsed.home, parsed.deadline_wall) == (made, HOME, DEADLINE)
    assert run.startswith(parsed.run)
    assert parsed.run_or(run) == run, "a tag has the whole name"
    assert parsed.run_or("another") == parsed.run_or("../../etc") == parsed.run_or(f"{parsed.run}/../x") == parsed.run


def test_two_tokens_of_one_run_differ() -> None:
    assert len({make_token(HOME, DEADLINE, "fox-41") for _ in range(50)}) == 50


def test_the_older_form_is_read_without_home_or_deadline() -> None:
    parsed = parse_token("gr-fox-41-0a1b2c3d")
    assert parsed is not None
    assert (parsed.home, parsed.deadline_wall, parsed.run) == ("", None, "fox-41")
    assert parsed.deadline_or("1795246236") == DEADLINE
    assert parsed.deadline_or("soon") is parsed.deadline_or(None) is parsed.deadline_or("²") is None


@pytest.mark.parametrize(
    "text",
    [
        "", "my-pod", "gr-", "gr-fox-41-0a1b2c3", "GR-fox-41-0a1b2c3d", "gr-fox/41-0a1b2c3d", "gpurun-dry-run",
        "gpurun-3fa9c1-179524623-7c0d2e-fox", "gpurun-3fa9c1-1795246236-7c0d2e-",
        "gpurun-3fa9c1-1795246236-7c0d2e-../x",
        f"gpurun-3fa9c1-1795246236-7c0d2e-{'x' * 29}", "gpurun-3FA9C1-1795246236-7c0d2e-fox", "gpurun-terminate",
        "gpurun-3fa9c1-1795246236-7c0d2e-fox\n",
    ],
)  # fmt: skip
def test_what_has_another_form_is_none(text: str) -> None:
    assert parse_token(text) is None


def _seen_at(cloud: str, token: str, run: str, deadline: str) -> tuple[str, str, float | None]:
    """Return token, run and deadline as this cloud's reader reads them from a machine with these tags."""
    if cloud == "runpod":
        env = {"GPURUN_TOKEN": token, "GPURUN_RUN": run, "GPURUN_DEADLINE": deadline}
        pod = pods.parse_pod({"id": "p1", "name": token, "env": env, "status": "RUNNING"})
        return pod.token, pod.run, pod.deadline_wall
    if cloud == "lambda":
        tags = {"gpurun-run": run, "gpurun-token": token, "gpurun-deadline": deadline}
        listed = [{"key": key, "value": value} for key, value in tags.items()]
        vm = lambda_instances.parse_lambda_instance({"id": "l1", "name": token, "status": "active", "tags": listed})
        return vm.token, vm.run, vm.deadline_wall
    tags = {"gpurun:run": run, "gpurun:token": token, "gpurun:deadline": deadline}
    return owner({"ClientToken": f"{token}.b", "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]})


@pytest.mark.parametrize("cloud", ["runpod", "lambda", "aws"])
@pytest.mark.parametrize("edited", ["9999999999", "soon", "", "0"])
def test_a_tag_that_somebody_edited_changes_no_deadline(cloud: str, edited: str) -> None:
    token = make_token(HOME, DEADLINE, LONG)
    assert _seen_at(cloud, token, LONG, edited) == (token, LONG, DEADLINE)


def test_an_ec2_client_token_is_believed_before_another_tag() -> None:
    token, other = make_token(HOME, DEADLINE, "fox-41"), make_token("ffffff", 9e9, "owl-7")
    instance = {"ClientToken": token, "Tags": [{"Key": "gpurun:token", "Value": other}]}
    assert owner(instance) == (token, "fox-41", DEADLINE)


def test_ec2_is_asked_for_both_forms() -> None:
    assert client_token_filter(None)["Values"] == ["gpurun-*", "gr-*"]


def test_the_whole_name_of_a_long_run_stands_in_its_tags() -> None:
    order = Order(run=LONG, token=make_token(HOME, DEADLINE, LONG), attempt=1, offer=_OFFER, deadline_wall=DEADLINE)
    assert {"Key": "gpurun:run", "Value": LONG} in tags_of(order)


def test_a_home_has_one_id_for_good_and_so_has_its_copy(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    assert re.fullmatch(r"[0-9a-f]{6}", home.id)
    copy = Home(shutil.copytree(home.root, tmp_path / "copy"))
    assert Home(home.root).id == home.id == copy.id
    assert (home.root / "id").stat().st_mode & 0o777 == 0o600
    assert Home(tmp_path / "another").id != home.id


def test_commands_that_start_at_once_give_a_home_one_id(tmp_path: Path) -> None:
    home, start, seen = Home(tmp_path / "home"), threading.Barrier(8), set[str]()

    def one() -> None:
        start.wait()
        seen.add(home.id)

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 1


def test_a_home_whose_id_cannot_be_kept_is_told_as_that(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    (home.root / "id").mkdir(parents=True)
    with refusal(SetupError, "home.unusable", "home/id"):
        _ = home.id
