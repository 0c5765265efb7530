"""Tests that gpurun gives up, in time, AWS credentials that never arrive and replies that never end, and names them."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpurun.core import aws_session
from gpurun.core.clock import SystemClock, VirtualClock
from gpurun.core.errors import SetupError
from gpurun.providers.aws import AwsProvider, wire
from gpurun.providers.base import Unknown, endpoint_of
from gpurun.remote.s3.address import parse_address
from gpurun.remote.s3.s3_client import Bucket
from tests.emulators.aws import AwsEmulator
from tests.refusals import refusal

SHORT_S = 1.0
HANGS = "echo $$ >>{pids}; exec sleep 600\n"
Program = Callable[[str], None]


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
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    """Let the SDK get its credentials from a shell script; yield a function that sets the script's text."""
    path, pids = tmp_path / "credentials.sh", tmp_path / "pids"

    def goes_on(words: str) -> None:
        path.write_text(words.format(pids=pids) if words == HANGS else words)

    config = tmp_path / "config"
    config.write_text(f"[profile lab]\ncredential_process = /bin/sh {path}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(aws_session, "LIMIT_S", SHORT_S)
    yield goes_on
    for pid in pids.read_text().split() if pids.exists() else ():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def keys(minutes: float) -> str:
    ends = (datetime.now(UTC) + timedelta(minutes=minutes)).isoformat()
    credentials = {"Version": 1, "AccessKeyId": "AKIAEMULATED000EXAMPLE", "SessionToken": "t", "Expiration": ends}
    return f"echo '{json.dumps(credentials | {'SecretAccessKey': 'emulated-secret-access-key-0123456789'})}'"


def test_a_hung_credential_process_blocks_no_verb_and_is_named(
    cloud: AwsEmulator, clock: VirtualClock, program: Program
) -> None:
    program(HANGS)
    aws, real = AwsProvider(clock), SystemClock()
    began_s = real.monotonic()
    for verb in (aws.verify, lambda: aws.find(None), lambda: aws.destroy("us-east-1/i-0a1b2c3d"), aws.key_ends_wall):
        with refusal(SetupError, "auth.aws", "credential_process", "/bin/sh"):
            verb()  # type: ignore[operator]
    assert endpoint_of(aws) == ""
    assert real.monotonic() - began_s < 3 * SHORT_S, "the next call does not wait again"


def test_once_the_program_answers_again_so_does_aws(cloud: AwsEmulator, clock: VirtualClock, program: Program) -> None:
    program(HANGS)
    aws = AwsProvider(clock)
    with pytest.raises(SetupError):
        aws.find(None)
    program(keys(60.0))
    clock.sleep(aws_session.AGAIN_S)
    assert aws.find(None) == []


def test_credentials_that_hang_at_renewal_are_given_up_too(
    cloud: AwsEmulator, clock: VirtualClock, program: Program
) -> None:
    """The credentials expire within minutes, so the SDK runs the script, which now hangs, before the next request."""
    program(keys(5.0))
    aws = AwsProvider(clock)
    assert aws.find(None) == []
    program(HANGS)
    with refusal(SetupError, "auth.aws", "1 s"):
        aws.find(None)


def test_a_bucket_waits_no_longer_for_its_credentials(clock: VirtualClock, program: Program) -> None:
    program(HANGS)
    with refusal(SetupError, "auth.aws", "1 s", "credential_process"):
        Bucket(parse_address("s3://bucket/place"), clock).look()


def test_a_dripping_server_is_cut_at_an_exchanges_time_limit(
    cloud: AwsEmulator, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wire.CONNECT_S + wire.READ_S <= wire.EXCHANGE_S == 30.0
    monkeypatch.setattr(wire, "EXCHANGE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(Unknown, match="terminate_instances"):
            AwsProvider(clock).destroy("us-east-1/i-0a1b2c3d")
