"""Tests of the AWS provider: at most one instance per token, found in any region, and ended by its own timer.

The emulator's meter decides what AWS would bill, whatever gpurun believes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from math import inf
from pathlib import Path

import boto3
import pytest
from botocore.parsers import ResponseParserError
from typer.testing import CliRunner

from gpurun.cli.app import build_app
from gpurun.core.clock import Clock, SystemClock, VirtualClock, ticks
from gpurun.core.errors import ExitCode, MayBeBilling, SetupError
from gpurun.core.paths import Home
from gpurun.core.records import GpuNeed, Instance, InstanceState, Offer, Order
from gpurun.core.run_plan import Choices
from gpurun.lifecycle.instance.terminate import prove_termination
from gpurun.planning.live_offers import live_offers
from gpurun.planning.market import Market, key_warning
from gpurun.providers.aws import AwsProvider, side_resources, wire
from gpurun.providers.aws.errors import NO_QUOTA, explain_early_refusal, judge_launch_refusal, quota_in_words
from gpurun.providers.aws.parse import parse_ec2_instance
from gpurun.providers.aws.schedule import ROLE
from gpurun.providers.aws.setup import make_role, plan_role
from gpurun.providers.aws.wire import AwsClients, AwsRefused
from gpurun.providers.base import LeavesThings, NoCapacity, Rejected, Unknown
from gpurun.providers.catalog import rows_for
from gpurun.providers.errors import RejectedFor
from gpurun.remote.key_pairs import make_keys
from tests.contract.orders import KEYS
from tests.emulators import guests
from tests.emulators.aws import AwsEmulator, FakeGuest, Fault, Machine, real_guest
from tests.refusals import refusal

TOKEN = "gr-fox-41-0a1b2c3d"
LEASE_S = 3600
P4D = GpuNeed(count=8, name="A100", memory_gb=40)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def cloud(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsEmulator]:
    with AwsEmulator(clock=clock, tick_s=None) as emulator:
        for name, value in emulator.environment.items():
            monkeypatch.setenv(name, value)
        yield emulator


@pytest.fixture
def aws(cloud: AwsEmulator, clock: VirtualClock) -> AwsProvider:
    return AwsProvider(clock)


def offer_of(need: GpuNeed = P4D, region: str = "us-east-1", *, spot: bool = False) -> Offer:
    row = next(row for row in rows_for(need, "aws") if row.gpu_count == need.count)
    return row.model_copy(update={"region": region, "spot": spot})


def order_of(clock: Clock, token: str = TOKEN, *, offer: Offer | None = None, disk_gb: int = 100) -> Order:
    return Order(
        run="fox-41",
        token=token,
        attempt=1,
        offer=offer or offer_of(),
        deadline_wall=clock.wall() + LEASE_S,
        lease_s=LEASE_S,
        keys=KEYS,
        disk_gb=disk_gb,
    )


def billed(cloud: AwsEmulator) -> list[str]:
    cloud.world.tick()
    return cloud.world.meter.running


# A launch whose outcome is not known.


@pytest.mark.parametrize("fault", [Fault.DROP_ANSWER, Fault.ERROR_AFTER, Fault.NOT_JSON])
def test_a_launch_with_a_lost_answer_is_sent_once_and_found(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock, fault: Fault
) -> None:
    cloud.fail("RunInstances", fault)
    with pytest.raises(Unknown):
        aws.create(order_of(clock))
    assert cloud.count("RunInstances") == len(billed(cloud)) == 1
    (found,) = AwsProvider(clock).find(TOKEN)
    assert (found.token, found.run, found.deadline_wall) == (TOKEN, "fox-41", clock.wall() + LEASE_S)


@pytest.mark.parametrize("fault", [Fault.DROP_ANSWER, Fault.DROP_REQUEST])
def test_an_identical_launch_repeated_gives_the_one_instance(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock, fault: Fault
) -> None:
    cloud.world.hidden_s = 30
    cloud.fail("RunInstances", Fault.NO_CAPACITY, fault)
    with pytest.raises(Unknown) as lost:
        aws.create(order_of(clock))
    assert lost.value.again is not None
    made = lost.value.again()
    if fault is Fault.DROP_ANSWER:
        assert cloud.launches[-1] == cloud.launches[-2], "the same zone and ClientToken, and every other word"
    assert cloud.launches[-1]["ClientToken"] == f"{TOKEN}.a"
    assert (made.token, billed(cloud)) == (TOKEN, [made.id.rpartition("/")[2]])


def test_a_refusal_of_the_same_launch_once_more_leaves_the_doubt(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    cloud.fail("RunInstances", Fault.DROP_ANSWER, Fault.NO_CAPACITY)
    with pytest.raises(Unknown) as lost:
        aws.create(order_of(clock))
    assert lost.value.again is not None
    with pytest.raises(Unknown):
        lost.value.again()
    assert (cloud.count("RunInstances"), len(billed(cloud))) == (2, 1)


@pytest.mark.parametrize("fault", [Fault.DROP_REQUEST, Fault.ERROR])
def test_a_launch_that_never_arrived_is_just_as_unknown(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock, fault: Fault
) -> None:
    cloud.fail("RunInstances", fault)
    with pytest.raises(Unknown):
        aws.create(order_of(clock))
    assert (billed(cloud), aws.find(TOKEN)) == ([], [])


def test_a_doubt_in_one_zone_keeps_the_others_from_being_asked(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    cloud.fail("RunInstances", Fault.NO_CAPACITY, Fault.DROP_ANSWER)
    with pytest.raises(Unknown):
        aws.create(order_of(clock))
    assert cloud.count("RunInstances") == 2
    assert [one.token for one in aws.find(TOKEN)] == [TOKEN]
    assert len(billed(cloud)) == 1


def test_a_repeated_order_gives_one_instance_even_if_invisible(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    cloud.world.hidden_s = 30
    order = order_of(clock)
    first = aws.create(order)
    assert aws.find(TOKEN) == []
    assert AwsProvider(clock).create(order).id == first.id
    assert len(billed(cloud)) == 1


def test_a_changed_request_on_a_used_token_is_a_doubt_no_second(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    cloud.world.hidden_s = 30
    aws.create(order_of(clock))
    with pytest.raises(Unknown, match="IdempotentParameterMismatch"):
        AwsProvider(clock).create(order_of(clock, disk_gb=200))
    assert len(billed(cloud)) == 1


def test_an_instance_without_its_tags_is_found_by_its_launch(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    made = aws.create(order_of(clock))
    names = ("gpurun:run", "gpurun:token", "gpurun:deadline", "Name")
    boto3.client("ec2").delete_tags(Resources=[made.id.rpartition("/")[2]], Tags=[{"Key": name} for name in names])
    for token in (TOKEN, None):
        assert [(one.id, one.token, one.run) for one in AwsProvider(clock).find(token)] == [(made.id, TOKEN, "fox-41")]


def test_an_invisible_group_is_waited_for_with_the_same_request(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    cloud.fail("AuthorizeSecurityGroupIngress", *[Fault.UNSEEN_GROUP] * 2)
    cloud.fail("RunInstances", *[Fault.UNSEEN_GROUP] * 3)
    aws.create(order_of(clock))
    assert (cloud.count("RunInstances"), len(billed(cloud))) == (4, 1)
    cloud.fail("RunInstances", *[Fault.UNSEEN_GROUP] * 99)
    with pytest.raises(Rejected, match="InvalidGroup"):
        aws.create(order_of(clock, "gr-fox-41-99999999"))


# No capacity, no quota, no permission.


def test_a_sold_out_zone_gives_way_to_the_next_with_a_new_token(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    cloud.rules.sold_out = {"p4d.24xlarge@us-east-1a"}
    made = aws.create(order_of(clock))
    tokens = [form["ClientToken"] for form in cloud.launches]
    assert tokens == [TOKEN, f"{TOKEN}.a", f"{TOKEN}.b"]
    assert [one.id for one in aws.find(TOKEN)] == [made.id]
    assert made.token == TOKEN


def test_a_repeated_order_makes_no_second_in_a_freed_first_zone(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    cloud.rules.sold_out = {"p4d.24xlarge@us-east-1a"}
    made = aws.create(order_of(clock))
    cloud.rules.sold_out = set()
    assert AwsProvider(clock).create(order_of(clock)).id == made.id
    assert len(billed(cloud)) == 1


def test_sold_out_everywhere_is_no_capacity_after_each_zone_once(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    cloud.rules.sold_out = {"p4d.24xlarge"}
    with pytest.raises(NoCapacity, match="InsufficientInstanceCapacity"):
        aws.create(order_of(clock))
    tokens = [form["ClientToken"] for form in cloud.launches]
    assert len(tokens) == len(set(tokens)) > 2
    assert billed(cloud) == []


def test_a_quota_of_nothing_is_named_with_where_to_raise_it(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    cloud.rules.quotas["L-417A185B"] = 0
    with pytest.raises(RejectedFor) as refused:
        aws.create(order_of(clock))
    error = refused.value.error
    assert (error.code, error.exit_code) == ("account.no_quota", ExitCode.NO_OFFER)
    assert refused.value.of_offer, "another family, region or provider may have what was approved next"
    words = error.hint
    assert "Running On-Demand P instances" in words
    assert "us-east-1.console.aws.amazon.com/servicequotas/home/services/ec2/quotas/L-417A185B" in words
    assert (cloud.count("RunInstances"), billed(cloud)) == (1, [])


def test_a_refused_launch_names_the_permission_not_encoded_text(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    cloud.rules.denied = {"ec2:RunInstances"}
    with pytest.raises(RejectedFor, match="ec2:RunInstances") as refused:
        aws.create(order_of(clock))
    assert "xxx" not in str(refused.value)
    error = refused.value.error
    assert (error.code, error.exit_code) == ("auth.not_allowed", ExitCode.SETUP)
    assert "gpurun aws setup --policy" in error.hint


@pytest.mark.parametrize(
    ("code", "expected", "advice"),
    [
        ("Blocked", "account.not_ready", "console.aws.amazon.com/support"),
        ("PendingVerification", "account.not_ready", "verifies a new account"),
        ("OptInRequired", "account.not_ready", "--region"),
        ("AuthFailure.ServiceLinkedRoleCreationNotPermitted", "auth.not_allowed", "gpurun aws setup --policy"),
        ("ExpiredToken", "auth.refused", "aws sso login"),
        ("RequestExpired", "clock.skewed", "timedatectl set-ntp true"),
        ("RequestExpired", "clock.skewed", "aws sso login"),
        ("RequestInTheFuture", "clock.skewed", "timedatectl set-ntp true"),
    ],
)
def test_what_somebody_can_mend_is_told_with_how(code: str, expected: str, advice: str) -> None:
    for error in (
        judge_launch_refusal(AwsRefused("run_instances", code, "", 403), "p5.4xlarge", "us-east-1", spot=True),
        explain_early_refusal(AwsRefused("describe_subnets", code, "", 403)),
    ):
        assert isinstance(error, RejectedFor)
        assert (error.error.code, error.error.exit_code) == (expected, ExitCode.SETUP)
        assert advice in error.error.hint


def test_lost_credentials_certainly_made_nothing(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the SSO session ends between plan and create, gpurun must know that no instance was made."""
    send = AwsClients.call

    def call(wire: AwsClients, service: str, region: str, operation: str, **asked: object) -> dict[str, object]:
        if operation == "run_instances":
            raise SetupError("auth.aws", "The SSO session is over.", hint="aws sso login")
        return send(wire, service, region, operation, **asked)  # type: ignore[arg-type]

    monkeypatch.setattr(AwsClients, "call", call)
    with pytest.raises(RejectedFor, match="aws sso login"):
        aws.create(order_of(clock))
    assert billed(cloud) == []


def test_a_clock_that_is_off_is_not_taken_for_a_bad_key(aws: AwsProvider, cloud: AwsEmulator) -> None:
    cloud.rules.valid_key = False
    cloud.world.clock = VirtualClock(start=cloud.world.clock.wall() - 1_000)
    with refusal(SetupError, "clock.skewed", "+1000 s"):
        aws.find(None)
    assert aws.clock_ahead_s == pytest.approx(1_000, abs=1)


def test_an_expired_session_is_said_to_be_that(aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock) -> None:
    cloud.fail("RunInstances", Fault.EXPIRED)
    with pytest.raises(Rejected, match="ExpiredToken"):
        aws.create(order_of(clock))
    cloud.fail("DescribeInstances", Fault.EXPIRED)
    with pytest.raises(SetupError, match="ExpiredToken"):
        aws.read("us-east-1/i-0123456789abcdef0")


def test_too_many_requests_are_waited_out_on_gpuruns_own_clock(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    cloud.fail("RunInstances", *[Fault.THROTTLED] * 4)
    before = clock.monotonic()
    assert aws.create(order_of(clock)).token == TOKEN
    assert cloud.count("RunInstances") == 5
    assert clock.monotonic() - before > 1.0
    assert len(billed(cloud)) == 1


def test_a_launch_that_is_held_off_for_ever_is_unknown(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    cloud.fail("RunInstances", *[Fault.THROTTLED] * 100)
    with pytest.raises(Unknown):
        aws.create(order_of(clock))


@pytest.mark.parametrize("code", ["SomethingNew", "IdempotentParameterMismatch", "InternalError", "Unavailable", "?"])
def test_a_refusal_that_nobody_knows_leaves_the_doubt(code: str) -> None:
    for status in (400, 500, 200):
        assert isinstance(
            judge_launch_refusal(AwsRefused("run_instances", code, "", status), "p5.4xlarge", "r", spot=False), Unknown
        )


def test_every_family_has_its_quota() -> None:
    assert "L-417A185B" in quota_in_words("p5.48xlarge", "us-east-1", spot=False)
    assert "L-DB2E81BA" in quota_in_words("g6e.xlarge", "us-east-1", spot=False)
    assert "L-1216C47A" in quota_in_words("c7i.xlarge", "us-east-1", spot=False)
    assert "L-C4BD4855" in quota_in_words("p5en.48xlarge", "us-east-1", spot=True)
    assert {"VcpuLimitExceeded", "MaxSpotInstanceCountExceeded"} <= NO_QUOTA


# What a launch requests.


def test_the_launch_says_all_that_money_hangs_on(aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock) -> None:
    aws.create(order_of(clock))
    (form,) = cloud.launches
    assert form["ClientToken"] == TOKEN
    assert (form["MinCount"], form["MaxCount"]) == ("1", "1")
    assert form["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert form["MetadataOptions.HttpTokens"] == "required"
    assert form["MetadataOptions.HttpPutResponseHopLimit"] == "1"
    assert form["NetworkInterface.1.AssociatePublicIpAddress"] == "true"
    disk = {key.rpartition(".")[2]: value for key, value in form.items() if key.startswith("BlockDeviceMapping.1.Ebs")}
    assert disk == {"VolumeSize": "100", "VolumeType": "gp3", "DeleteOnTermination": "true"}
    tagged = {form[f"TagSpecification.{n}.ResourceType"] for n in (1, 2, 3)}
    assert tagged == {"instance", "volume", "network-interface"}
    tags = {form[f"TagSpecification.1.Tag.{n}.Key"]: form[f"TagSpecification.1.Tag.{n}.Value"] for n in (1, 2, 3, 4)}
    deadline = str(int(clock.wall()) + LEASE_S)
    assert tags == {"gpurun:run": "fox-41", "gpurun:token": TOKEN, "gpurun:deadline": deadline, "Name": TOKEN}


def test_the_newest_image_that_suits_is_taken(aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock) -> None:
    aws.create(order_of(clock))
    wanted = cloud.rules.image_of("oss-nvidia-driver-gpu-pytorch-2.10-ubuntu-24.04", "us-east-1")
    assert cloud.launches[0]["ImageId"] == wanted


def test_a_region_without_an_image_and_a_bad_name_are_refused(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    cloud.rules.images = ["oss-nvidia-driver-gpu-pytorch-2.7-ubuntu-22.04"]
    with pytest.raises(Rejected, match=r"PyTorch 2\.8"):
        aws.create(order_of(clock))
    with pytest.raises(Rejected, match="--image"):
        aws.create(order_of(clock).model_copy(update={"image": "ubuntu:24.04"}))
    assert cloud.launches == []


def test_a_disk_that_was_not_paid_for_is_not_made(aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock) -> None:
    """The image needs a larger disk than planned, billed outside the cap: the create must be refused."""
    with pytest.raises(Rejected, match=r"hardware\.disk_gb=45"):
        aws.create(order_of(clock, disk_gb=20))
    assert cloud.launches == []


@pytest.mark.parametrize(
    ("rule", "value", "words"),
    [
        ("image_platform", "Windows with SQL Server Standard", "its system is Windows with SQL Server Standard"),
        ("image_platform", "Ubuntu Pro", "its system is Ubuntu Pro"),
        ("image_product", "aw0evgkw8e5c1q413zgy5pjce", "it is sold in AWS Marketplace"),
        ("image_more_gb", [500, 16], "it has more disks: /dev/sdb, /dev/sdc"),
    ],
)
def test_an_image_billed_beside_its_machine_is_not_booted(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock, rule: str, value: object, words: str
) -> None:
    """An offer's price is for Linux with one disk: any other image costs more, outside the cap, and is refused."""
    setattr(cloud.rules, rule, value)
    named = {"image": cloud.rules.image_of(cloud.rules.images[1], "us-east-1")}
    with pytest.raises(Rejected, match=words):
        aws.create(order_of(clock).model_copy(update=named))
    assert cloud.launches == []


def test_an_own_image_that_is_linux_on_one_disk_is_booted(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    named = cloud.rules.image_of(cloud.rules.images[1], "us-east-1")
    aws.create(order_of(clock).model_copy(update={"image": named}))
    assert [form["ImageId"] for form in cloud.launches] == [named]


def test_without_a_default_vpc_it_is_said_how_to_make_one(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    cloud.rules.no_default_vpc = True
    with pytest.raises(Rejected, match="create-default-vpc"):
        aws.create(order_of(clock))


def test_the_firewall_lets_in_this_machine_alone(
    cloud: AwsEmulator, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AwsClients, "is_near", lambda *_: False)
    AwsProvider(clock, my_address=lambda: "203.0.113.7").create(order_of(clock))
    (group,) = boto3.client("ec2").describe_security_groups(GroupNames=[TOKEN])["SecurityGroups"]
    (rule,) = group["IpPermissions"]
    assert (rule["FromPort"], rule["ToPort"]) == (22, 22)
    assert [one["CidrIp"] for one in rule["IpRanges"]] == ["203.0.113.7/32"]


@pytest.mark.parametrize("answer", ["203.0.113.7\n", "<html>log in</html>", "203.0.113.7/0", ""])
def test_the_own_address_is_an_address_or_there_is_no_machine(
    answer: str, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Says(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Says) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setattr(side_resources, "ADDRESS_URL", f"http://127.0.0.1:{server.server_address[1]}")
        if answer.strip() == "203.0.113.7":
            assert side_resources.public_address(clock) == "203.0.113.7"
        else:
            with pytest.raises(Rejected, match="public address"):
                side_resources.public_address(clock)


# Finding instances in every region.


def test_an_instance_in_another_region_is_found_unprompted(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    made = aws.create(order_of(clock, offer=offer_of(region="us-west-2")))
    stranger = AwsProvider(clock, region="eu-west-1")
    for token in (TOKEN, None):
        assert [one.id for one in stranger.find(token)] == [made.id]
    assert made.id.startswith("us-west-2/i-")
    assert stranger.read(made.id).region == "us-west-2"
    stranger.destroy(made.id)
    assert stranger.read(made.id).state is InstanceState.GONE
    assert billed(cloud) == []


def test_whoever_sent_a_token_somewhere_looks_for_it_there_alone(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    aws.create(order_of(clock))
    cloud.calls.clear()
    aws.find(TOKEN)
    assert {region for _, region in cloud.calls} == {"us-east-1"}


def test_an_unreadable_region_is_named_and_never_counts_as_empty(aws: AwsProvider, cloud: AwsEmulator) -> None:
    cloud.rules.denied = {"ec2:DescribeInstances@eu-west-1"}
    for token in (TOKEN, None):
        with pytest.raises(Unknown, match="eu-west-1"):
            aws.find(token)


def test_one_silent_region_hides_nothing_of_the_others(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    made = [aws.create(order_of(clock, TOKEN[:-1] + str(n), offer=offer_of(region=region))).id
            for n, region in enumerate(("us-east-1", "us-west-2"))]  # fmt: skip
    cloud.rules.denied = {"ec2:DescribeInstances@eu-west-1"}
    with pytest.raises(Unknown, match="eu-west-1") as doubt:
        AwsProvider(clock).find(None)
    assert [one.id for one in doubt.value.found] == made


def test_a_mistyped_region_is_corrected_and_still_finds_machines(
    cloud: AwsEmulator, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    AwsProvider(clock).create(order_of(clock))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-esat-1")
    lost = AwsProvider(clock)
    with refusal(SetupError, "region.unknown", "'us-esat-1'") as refused:
        lost.offers(P4D, rows_for(P4D, "aws"))
    assert refused.value.hint.startswith("Did you mean us-east-1? aws has eu-west-1, us-east-1, us-west-2.")
    assert [one.token for one in lost.find(TOKEN)] == [TOKEN]
    assert AwsProvider(clock, region="US-KS-2").offers(P4D, rows_for(P4D, "aws")) == [], "it may be another cloud's"


def test_a_proxys_page_in_the_place_of_a_list_is_no_empty_list(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    """The SDK parses any XML: it takes a proxy's error page for an empty list, which would look like a death."""
    made = aws.create(order_of(clock))
    for listing in ("DescribeInstances", "DescribeVolumes"):
        cloud.fail(listing, *[Fault.NOT_JSON] * 1000)
    for request in (partial(aws.find, TOKEN), partial(aws.read, made.id), partial(aws.leftovers, TOKEN)):
        with pytest.raises(Unknown, match=r"describe_\w+"):
            request()
    cloud.fail("TerminateInstances", *[Fault.LIE] * 1000)
    with pytest.raises(MayBeBilling, match=r"describe_\w+"):
        list(prove_termination(aws, clock, made.id, TOKEN, run="fox-41"))
    assert len(billed(cloud)) == 1


@pytest.mark.parametrize(
    "operation", ["DescribeImages", "DescribeSubnets", "DescribeSecurityGroups", "CreateSecurityGroup"]
)
def test_a_proxys_page_before_the_launch_is_no_answer_either(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock, operation: str
) -> None:
    cloud.fail(operation, Fault.NOT_JSON)
    with pytest.raises(Rejected, match=r"(describe|create)_\w+"):
        aws.create(order_of(clock))
    assert cloud.launches == []
    aws.create(order_of(clock, "gr-fox-41-0badf00d"))
    assert len(billed(cloud)) == 1


def test_a_page_that_the_sdk_cannot_read_is_not_quoted() -> None:
    page = ResponseParserError("Unable to parse response, invalid XML received:\nb'<html>502 Bad Gateway</html>'")
    assert "<" not in str(wire._explain(page, "describe_instances", "us-east-1"))


def test_a_silent_region_is_named(aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock) -> None:
    cloud.fail("DescribeInstances", *[Fault.DROP_ANSWER] * 100)
    with pytest.raises(Unknown, match="us-west-2"):
        aws.find(None)


def test_a_region_shut_by_an_organisation_delays_nothing(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    shut = ("ec2:DescribeInstances", "ec2:RunInstances")
    cloud.rules.denied = {f"{action}@eu-west-1" for action in shut}
    assert aws.find(None) == []
    cloud.rules.denied = {f"{action}@us-east-1" for action in shut}
    with pytest.raises(Unknown, match="us-east-1"):
        AwsProvider(clock).find(None)


def test_the_tokens_own_region_must_answer_even_when_shut(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    made = aws.create(order_of(clock, offer=offer_of(region="us-west-2")))
    cloud.rules.denied = {"ec2:DescribeInstances@us-west-2", "ec2:RunInstances@us-west-2"}
    for look in (lambda: aws.find(TOKEN), lambda: aws.read(made.id), lambda: AwsProvider(clock).read(made.id)):
        with pytest.raises(SetupError, match="ec2:DescribeInstances"):
            look()
    assert billed(cloud)


def test_what_was_found_needs_no_answer_from_the_other_regions(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    made = aws.create(order_of(clock))
    cloud.rules.denied = {"ec2:DescribeInstances@eu-west-1"}
    assert [one.id for one in AwsProvider(clock).find(TOKEN)] == [made.id]


def test_a_users_copy_of_an_instance_has_its_tags_and_is_found(aws: AwsProvider, cloud: AwsEmulator) -> None:
    image = cloud.rules.image_of("base-oss-nvidia-driver-gpu-ubuntu-24.04", "us-east-1")
    marked = [{"ResourceType": "instance", "Tags": [{"Key": "gpurun:token", "Value": TOKEN}]}]
    boto3.client("ec2").run_instances(
        ImageId=image, InstanceType="c7i.xlarge", MinCount=1, MaxCount=1, TagSpecifications=marked
    )
    for token in (TOKEN, None):
        assert [(one.token, one.run) for one in aws.find(token)] == [(TOKEN, "fox-41")]


def test_somebody_elses_instances_are_not_gpuruns(aws: AwsProvider, cloud: AwsEmulator) -> None:
    image = cloud.rules.image_of("base-oss-nvidia-driver-gpu-ubuntu-24.04", "us-east-1")
    ec2 = boto3.client("ec2")
    for token in ("gr-", "terraform-1", "gr-fox-41-0a1b2c3"):
        ec2.run_instances(ImageId=image, InstanceType="c7i.xlarge", MinCount=1, MaxCount=1, ClientToken=token)
    assert aws.find(None) == []


def test_one_is_pending_reachable_ending_and_gone_at_awss_time(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    cloud.world.pending_s, cloud.world.dying_s = 20, 30
    made = aws.create(order_of(clock))
    assert (made.state, made.address) == (InstanceState.PENDING, None)
    born = clock.wall()
    clock.sleep(25)
    seen = aws.read(made.id)
    assert (seen.state, seen.type_id, seen.created_wall) == (InstanceState.RUNNING, "p4d.24xlarge", born)
    assert seen.address is not None
    assert (seen.address.user, seen.address.port) == ("ubuntu", 22)
    aws.destroy(made.id)
    assert aws.read(made.id).state is InstanceState.STOPPING
    assert billed(cloud)
    clock.sleep(30)
    gone = aws.read(made.id)
    assert (gone.state, gone.address, gone.ended_wall) == (InstanceState.GONE, None, clock.wall())
    assert billed(cloud) == []
    clock.sleep(4000)
    assert (aws.read(made.id).state, aws.find(TOKEN)) == (InstanceState.GONE, [])


def test_destroy_may_be_asked_again_and_is_believed_by_nobody(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    made = aws.create(order_of(clock))
    cloud.fail("TerminateInstances", Fault.LIE)
    aws.destroy(made.id)
    assert aws.read(made.id).state is InstanceState.RUNNING
    for _ in range(3):
        aws.destroy(made.id)
    assert (aws.read(made.id).state, billed(cloud)) == (InstanceState.GONE, [])
    aws.destroy("us-east-1/i-00000000000000000")


@pytest.mark.parametrize("strange", ["", "i-0123456789abcdef0", "us-east-1/../x", "us-east-1/vol-0123456789abcdef0"])
def test_what_is_no_instance_is_neither_read_nor_ended(aws: AwsProvider, strange: str) -> None:
    for verb in (aws.read, aws.destroy):
        with pytest.raises(Rejected):
            verb(strange)


STATES = {
    "pending": InstanceState.PENDING,
    "running": InstanceState.RUNNING,
    "shutting-down": InstanceState.STOPPING,
    "terminated": InstanceState.GONE,
    "stopping": InstanceState.STOPPED,
    "stopped": InstanceState.STOPPED,
}
"""EC2's states. A stopped instance does not train, whoever stopped it, but its disk is billed until termination."""


def test_every_state_is_known_and_a_billable_one_is_never_gone() -> None:
    from botocore.loaders import Loader

    shape = Loader().load_service_model("ec2", "service-2")["shapes"]["InstanceStateName"]
    assert set(shape["enum"]) == set(STATES)

    def state(name: str) -> InstanceState:
        return parse_ec2_instance("us-east-1", {"InstanceId": "i-0123456789abcdef0", "State": {"Name": name}}).state

    assert {name: state(name) for name in (*STATES, "hibernating")} == {**STATES, "hibernating": InstanceState.UNKNOWN}


def test_a_machine_that_aws_took_away_says_so(cloud: AwsEmulator, clock: VirtualClock) -> None:
    need = P4D
    aws = AwsProvider(clock, spot=True)
    (offer,) = aws.offers(need, rows_for(need, "aws"))
    made = aws.create(order_of(clock, offer=offer))
    cloud.world.interrupt(made.id.rpartition("/")[2])
    assert "spot interruption" in aws.read(made.id).said


# What ends a machine.


def test_the_machine_ends_at_its_deadline_and_within_its_lease(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    offer = offer_of()
    made = aws.create(order_of(clock, offer=offer))
    clock.sleep(LEASE_S - 1)
    assert aws.read(made.id).state is InstanceState.RUNNING
    clock.sleep(1)
    assert aws.read(made.id).state is InstanceState.GONE
    assert cloud.world.meter.total_micros() <= offer.rate_micros_per_hour


def test_a_stopped_machine_is_not_gone_as_its_disk_is_billed(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    """The user has changed the instance so that a power-off stops it. A stopped instance must not count as gone."""
    made = aws.create(order_of(clock))
    (inside,) = cloud.world.alive
    inside.shutdown = "stop"
    clock.sleep(LEASE_S)
    assert [one.state for one in (aws.read(made.id), *aws.find(None))] == [InstanceState.STOPPED] * 2
    aws.destroy(made.id)
    assert (aws.read(made.id).state, cloud.world.alive) == (InstanceState.GONE, [])


def test_in_a_set_up_account_a_hung_machine_ends_from_outside(cloud: AwsEmulator, clock: VirtualClock) -> None:
    cloud.world.boot = lambda machine: FakeGuest(machine, hung=True)
    wire = AwsClients(clock)
    make_role(wire, plan_role(wire))
    aws = AwsProvider(clock)
    made = aws.create(order_of(clock))
    clock.sleep(LEASE_S + 60)
    assert aws.read(made.id).state is InstanceState.GONE
    assert cloud.world.fired == [TOKEN]
    assert [one.kind for one in aws.leftovers(TOKEN)] == ["security group"]


def test_no_role_or_schedule_permission_loses_no_instance(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    assert aws.create(order_of(clock)).token == TOKEN
    assert cloud.count("CreateSchedule") == 0
    wire = AwsClients(clock)
    make_role(wire, plan_role(wire))
    cloud.rules.denied = {"scheduler:CreateSchedule", "scheduler:ListSchedules"}
    other = "gr-fox-41-99999999"
    assert aws.create(order_of(clock, other)).token == other
    assert "only its own timer" in caplog.text
    assert [one.kind for one in aws.leftovers(other)] == ["security group"]


def test_a_schedule_that_is_no_longer_needed_can_be_taken_away(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    wire = AwsClients(clock)
    make_role(wire, plan_role(wire))
    aws.create(order_of(clock))
    (schedule,) = [one for one in aws.leftovers(None) if one.kind == "schedule"]
    assert (schedule.token, schedule.run, schedule.billed) == (TOKEN, "fox-41", False)
    for _ in range(2):
        aws.remove(schedule)
    assert [one.kind for one in aws.leftovers(TOKEN)] == ["security group"]


# Leftovers beside the instance.


def test_a_launch_that_dies_leaves_a_findable_firewall_group(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    cloud.fail("RunInstances", Fault.DROP_REQUEST)
    with pytest.raises(Unknown):
        aws.create(order_of(clock))
    stranger = AwsProvider(clock, region="eu-west-1")
    assert isinstance(stranger, LeavesThings)
    (group,) = stranger.leftovers(TOKEN)
    assert (group.kind, group.region, group.deadline_wall) == ("security group", "us-east-1", clock.wall() + LEASE_S)
    for _ in range(2):
        stranger.remove(group)
    assert stranger.leftovers(None) == []


@pytest.mark.parametrize("fault", [Fault.DROP_ANSWER, Fault.ERROR_AFTER])
def test_a_group_whose_making_was_not_answered_is_made_once(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock, fault: Fault
) -> None:
    cloud.fail("CreateSecurityGroup", fault)
    aws.create(order_of(clock))
    assert len(aws.leftovers(TOKEN)) == 1


def test_a_group_is_not_gone_while_its_machine_lives(aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock) -> None:
    made = aws.create(order_of(clock))
    (group,) = aws.leftovers(TOKEN)
    with pytest.raises(Unknown, match="still in use"):
        aws.remove(group)
    aws.destroy(made.id)
    aws.remove(group)
    assert aws.leftovers(TOKEN) == []


def test_a_disk_that_outlived_its_machine_is_billed_and_removed(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    tags = [{"Key": key, "Value": value} for key, value in (("gpurun:token", TOKEN), ("gpurun:run", "fox-41"))]
    marked = [{"ResourceType": "volume", "Tags": tags}]
    boto3.client("ec2", "us-west-2").create_volume(AvailabilityZone="us-west-2a", Size=100, TagSpecifications=marked)
    (disk,) = aws.leftovers(TOKEN)
    assert (disk.kind, disk.billed, disk.region) == ("volume", True, "us-west-2")
    aws.remove(disk)
    assert aws.leftovers(None) == []


# Prices.


def test_the_price_is_the_one_that_aws_lists_today(aws: AwsProvider, cloud: AwsEmulator) -> None:
    cloud.rules.prices_usd["p4d.24xlarge"] = "22.0000000001"
    (offer,) = aws.offers(P4D, rows_for(P4D, "aws"))
    assert (offer.rate_micros_per_hour, offer.price_source) == (22_000_001, "Pricing API")
    assert (offer.spot, offer.region) == (False, "us-east-1")
    assert offer.dies_by_itself == "yes · power-off ends it, armed at boot"


def test_without_the_permission_it_names_the_catalogues_price(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    cloud.rules.denied = {"pricing:GetProducts"}
    (offer,) = aws.offers(P4D, rows_for(P4D, "aws"))
    assert offer.price_source.startswith("catalogue 20")
    assert offer.price_source.endswith("(Pricing API: AccessDeniedException)")
    with pytest.raises(Unknown, match="eu-west-1"):  # The catalogue's price is for another region.
        AwsProvider(clock, region="eu-west-1").offers(P4D, rows_for(P4D, "aws"))


def test_a_spot_offer_is_the_cheapest_zones_and_bids_as_agreed(cloud: AwsEmulator, clock: VirtualClock) -> None:
    for zone, price in (("us-east-1a", "9.5"), ("us-east-1b", "7.123456"), ("us-east-1c", "8")):
        cloud.rules.spot_usd[f"p4d.24xlarge@{zone}"] = price
    aws = AwsProvider(clock, spot=True)
    (offer,) = aws.offers(P4D, rows_for(P4D, "aws"))
    assert (offer.spot, offer.rate_micros_per_hour) == (True, 7_123_456)
    assert (
        offer.on_demand_micros_per_hour == AwsProvider(clock).offers(P4D, rows_for(P4D, "aws"))[0].rate_micros_per_hour
    )
    made = aws.create(order_of(clock, offer=offer))
    prefix = "InstanceMarketOptions.SpotOptions."
    terms = {name.removeprefix(prefix): value for name, value in cloud.launches[-1].items() if name.startswith(prefix)}
    # One-time: a request that stays open would rent again without an order.
    usual = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
    assert terms == {**usual, "MaxPrice": "7.123456"}
    assert [one.zone for one in cloud.world.alive] == ["us-east-1b"]
    cloud.rules.spot_usd["p4d.24xlarge@us-east-1b"] = "7.2"
    with pytest.raises(NoCapacity, match="SpotMaxPriceTooLow"):
        aws.create(order_of(clock, "gr-fox-41-99999999", offer=offer))
    aws.destroy(made.id)
    assert billed(cloud) == []


def spot_machine(cloud: AwsEmulator, clock: VirtualClock, dollars: str) -> tuple[AwsProvider, Instance]:
    """Launch a spot instance at this price in dollars per hour; return the provider and the instance."""
    cloud.rules.spot_usd["p4d.24xlarge@us-east-1a"] = dollars
    aws = AwsProvider(clock, spot=True)
    (offer,) = aws.offers(P4D, rows_for(P4D, "aws"))
    return aws, aws.create(order_of(clock, offer=offer))


def test_a_spot_machines_highest_price_is_read_from_its_request(cloud: AwsEmulator, clock: VirtualClock) -> None:
    aws, made = spot_machine(cloud, clock, "7.123456")
    assert (made.rate_micros_per_hour, made.rate_is_limit) == (None, False), "the answer to a launch has no price"
    for _ in range(3):
        read = aws.read(made.id)
        assert (read.rate_micros_per_hour, read.rate_is_limit) == (7_123_456, True)
    assert cloud.count("DescribeSpotInstanceRequests") == 1, "it is asked for once"
    aws.destroy(made.id)
    assert AwsProvider(clock).read(made.id).rate_micros_per_hour is None, "what has ended costs no more"


def test_a_maximum_above_the_agreed_price_is_reported_as_it_is(cloud: AwsEmulator, clock: VirtualClock) -> None:
    """The price in AWS's record is reported even if it is higher than requested: a later check then refuses it."""
    aws, made = spot_machine(cloud, clock, "7.123456")
    (one,) = cloud.world.alive
    one.spot_usd = "21.96"
    assert aws.read(made.id).rate_micros_per_hour == 21_960_000


def test_an_unreadable_maximum_is_no_price_and_no_failure(cloud: AwsEmulator, clock: VirtualClock) -> None:
    aws, made = spot_machine(cloud, clock, "7.123456")
    cloud.fail("DescribeSpotInstanceRequests", Fault.NOT_JSON)
    assert aws.read(made.id).rate_micros_per_hour is None
    cloud.rules.denied = {"ec2:DescribeSpotInstanceRequests"}
    assert [aws.read(made.id).rate_micros_per_hour for _ in range(2)] == [None, None]
    before = cloud.count("DescribeSpotInstanceRequests")
    cloud.rules.denied = set()
    assert aws.read(made.id).rate_micros_per_hour is None
    assert cloud.count("DescribeSpotInstanceRequests") == before, "what may not be read is not asked for again"
    assert AwsProvider(clock).read(made.id).rate_micros_per_hour == 7_123_456


def test_a_machine_on_demand_has_no_maximum(aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock) -> None:
    made = aws.create(order_of(clock))
    assert aws.read(made.id).rate_micros_per_hour is None
    assert cloud.count("DescribeSpotInstanceRequests") == 0


def test_a_spot_offer_needs_no_price_on_demand(cloud: AwsEmulator, clock: VirtualClock) -> None:
    cloud.rules.denied = {"pricing:GetProducts"}
    (offer,) = AwsProvider(clock, spot=True, region="eu-west-1").offers(P4D, rows_for(P4D, "aws"))
    assert (offer.spot, offer.on_demand_micros_per_hour) == (True, None)


def test_what_is_not_sold_or_has_no_driver_is_not_offered(aws: AwsProvider, cloud: AwsEmulator) -> None:
    one_a100 = GpuNeed(count=1, name="A100")
    assert aws.offers(one_a100, rows_for(one_a100, "aws")) == []
    v100 = GpuNeed(count=1, name="V100")
    assert rows_for(v100, "aws")
    assert aws.offers(v100, rows_for(v100, "aws")) == []
    cloud.rules.not_sold = {"p4d.24xlarge"}
    assert aws.offers(P4D, rows_for(P4D, "aws")) == []


# The account and its credentials.


def test_verify_tells_who_and_what_is_missing(aws: AwsProvider, cloud: AwsEmulator) -> None:
    cloud.rules.denied = {"ec2:TerminateInstances", "ssm:GetParametersByPath", "ec2:DescribeInstances@eu-west-1"}
    account = aws.verify()
    assert account.identity.startswith("arn:aws:")
    assert account.missing == ("ec2:TerminateInstances", "ssm:GetParametersByPath")
    assert account.clock_ahead_s is not None
    assert (cloud.launches, billed(cloud)) == ([], [])


def test_credentials_that_end_are_told(
    cloud: AwsEmulator, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "temporary")
    (worry,) = AwsProvider(clock).verify().missing
    assert "are temporary" in worry


def test_credentials_that_end_before_the_lease_are_in_the_plan(
    cloud: AwsEmulator, clock: VirtualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, lease_end_wall = datetime.now(UTC), datetime.now(UTC).timestamp() + 3 * 3600
    market = Market((), (), 0.0)
    assert AwsProvider(clock).key_ends_wall() == inf
    assert key_warning(market, "aws", lease_end_wall) == []
    monkeypatch.setenv("AWS_SESSION_TOKEN", "temporary")
    for hours, warns in ((1, True), (5, False)):
        monkeypatch.setenv("AWS_CREDENTIAL_EXPIRATION", (now + timedelta(hours=hours)).isoformat())
        market = live_offers(P4D, ["aws"], Home(tmp_path).prepare(), clock, Choices())
        assert bool(key_warning(market, "aws", lease_end_wall)) is warns
    monkeypatch.setenv("AWS_CREDENTIAL_EXPIRATION", (now - timedelta(hours=1)).isoformat())
    with refusal(SetupError, "auth.aws", "have expired"):
        AwsProvider(clock).find(None)


def test_a_key_that_aws_does_not_take_is_about_the_setup(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    cloud.rules.valid_key = False
    for ask in (aws.verify, lambda: aws.find(None), lambda: aws.find(TOKEN), lambda: aws.leftovers(None)):
        with refusal(SetupError, "auth.refused"):
            ask()


def test_no_key_at_all_is_about_the_setup(
    cloud: AwsEmulator, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(SetupError) as missing:
        AwsProvider(clock).verify()
    assert "aws configure" in missing.value.hint
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(SetupError, match="nobody"):
        AwsProvider(clock).find(None)


def test_the_role_may_end_only_what_gpurun_made_in_this_account(cloud: AwsEmulator, clock: VirtualClock) -> None:
    wire = AwsClients(clock)
    assert plan_role(wire).arn is None
    arn = make_role(wire, plan_role(wire))
    assert plan_role(wire).arn == arn == make_role(wire, plan_role(wire))
    iam = boto3.client("iam")
    trust = iam.get_role(RoleName=ROLE)["Role"]["AssumeRolePolicyDocument"]["Statement"][0]
    assert trust["Principal"] == {"Service": "scheduler.amazonaws.com"}
    assert trust["Condition"] == {"StringEquals": {"aws:SourceAccount": "123456789012"}}
    policy = iam.get_role_policy(RoleName=ROLE, PolicyName=ROLE)["PolicyDocument"]["Statement"][0]
    assert policy["Action"] == "ec2:TerminateInstances"
    assert policy["Condition"] == {"Null": {"aws:ResourceTag/gpurun:run": "false"}}


def test_whoever_may_not_make_the_role_is_told_what_to_type(cloud: AwsEmulator, clock: VirtualClock) -> None:
    cloud.rules.denied = {"iam:CreateRole"}
    wire = AwsClients(clock)
    with pytest.raises(SetupError) as refused:
        make_role(wire, plan_role(wire))
    assert "aws iam create-role --role-name gpurun-terminate" in refused.value.hint
    trust = refused.value.hint.partition("--assume-role-policy-document '")[2].partition("'")[0]
    assert json.loads(trust)["Statement"]


def test_the_sdk_is_loaded_only_when_aws_is_asked() -> None:
    code = (
        "import sys, gpurun.providers.aws as aws; from gpurun.core.clock import SystemClock as C; aws.AwsProvider(C())"
    )
    code += "; print(sorted({'boto3', 'botocore'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.skipif(bool(guests.whole()), reason=guests.whole() or "guests are machines")
def test_a_real_machine_reads_its_user_data_and_terminates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real machine must end itself by cloud-config, a timer and a power-off, without any API call."""
    clock = SystemClock()
    with AwsEmulator(boot=real_guest(tmp_path)) as emulator:
        for name, value in emulator.environment.items():
            monkeypatch.setenv(name, value)
        aws = AwsProvider(clock)
        order = order_of(clock).model_copy(
            update={"deadline_wall": float(int(clock.wall()) + 6), "lease_s": 6, "keys": make_keys(tmp_path / "ssh")}
        )
        made = aws.create(order)
        for _ in ticks(clock, 0.1, 60):
            if aws.read(made.id).state is InstanceState.GONE:
                break
        gone = aws.read(made.id)
        assert gone.state is InstanceState.GONE
        assert gone.ended_wall is not None
        assert order.deadline_wall <= gone.ended_wall <= order.deadline_wall + 30
        assert (emulator.count("TerminateInstances"), emulator.world.meter.running) == (0, [])


def test_the_emulator_boots_what_user_data_asks_for(cloud: AwsEmulator, aws: AwsProvider, clock: VirtualClock) -> None:
    booted: list[Machine] = []
    cloud.world.boot = lambda machine: (booted.append(machine), FakeGuest(machine))[1]
    made: Instance = aws.create(order_of(clock))
    aws.read(made.id)
    (machine,) = booted
    assert machine.user_data.startswith("#cloud-config\n")
    assert machine.gpu_count == 8
    assert KEYS.client_public in machine.user_data


def setup_verb(*arguments: str) -> tuple[int, str]:
    """Run `gpurun aws setup` and return its exit code and its output."""
    shown = CliRunner().invoke(build_app(), ["aws", "setup", *arguments, "--json", "--no-input"], standalone_mode=False)
    assert shown.exception is None, shown.exception
    return int(shown.return_value), shown.output


def test_gpurun_aws_setup_makes_the_role_once_it_is_told_to(cloud: AwsEmulator) -> None:
    code, _ = setup_verb()
    assert (code, cloud.count("CreateRole")) == (2, 0)
    for made in (True, False):
        code, output = setup_verb("--yes")
        data = json.loads(output)["data"]
        assert (code, data["made"], data["role"]) == (0, made, f"arn:aws:iam::123456789012:role/{ROLE}")


def test_gpurun_aws_setup_shows_a_policy_for_every_call_made(cloud: AwsEmulator, clock: VirtualClock) -> None:
    code, output = setup_verb("--policy")
    allowed = {action for one in json.loads(output)["data"]["policy"]["Statement"] for action in _listed(one["Action"])}
    assert code == 0
    cloud.calls.clear()
    aws = AwsProvider(clock)
    make_role(AwsClients(clock), plan_role(AwsClients(clock)))
    cloud.calls.clear()
    (offer,) = aws.offers(P4D, rows_for(P4D, "aws"))
    made = aws.create(order_of(clock, offer=offer))
    aws.find(None)
    aws.destroy(made.id)
    for one in aws.leftovers(None):
        aws.remove(one)
    names = {action.partition(":")[2] for action in allowed}
    assert {action for action, _ in cloud.calls} <= names


def _listed(action: str | list[str]) -> list[str]:
    return [action] if isinstance(action, str) else action


def test_a_moved_laptop_is_let_in_again_once_a_minute_at_most(
    aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock
) -> None:
    made = aws.create(order_of(clock))
    before = cloud.count("AuthorizeSecurityGroupIngress")
    for _ in range(3):
        aws.let_in(made)
    assert cloud.count("AuthorizeSecurityGroupIngress") == before + 1
    clock.sleep(61)
    aws.let_in(made)
    assert cloud.count("AuthorizeSecurityGroupIngress") == before + 2


def test_a_moved_laptop_is_let_in_by_its_group_alone(aws: AwsProvider, cloud: AwsEmulator, clock: VirtualClock) -> None:
    made = aws.create(order_of(clock))
    cloud.rules.denied = {"ec2:DescribeVolumes", "ec2:DescribeNetworkInterfaces"}
    cloud.fail("ListSchedules", *[Fault.ERROR] * 10)
    before = cloud.count("AuthorizeSecurityGroupIngress")
    aws.let_in(made)
    assert cloud.count("AuthorizeSecurityGroupIngress") == before + 1
