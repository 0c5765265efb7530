"""Tests that gpurun says what to do when a cloud refuses to create a machine, and that nothing is billed.

The commands are real; no machine boots.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpurun.core.errors import ExitCode
from gpurun.core.installed_files import bundle_root
from tests.clouds.rented import Cloud, somebody
from tests.emulators.aws import AwsEmulator
from tests.emulators.lambda_cloud import KEY, LambdaEmulator
from tests.emulators.runpod import FULL_KEY, READ_KEY, RunPodEmulator
from tests.refusals import lacking

pytestmark = pytest.mark.slow


@contextmanager
def _runpod() -> Iterator[Cloud]:
    with RunPodEmulator() as emulator:
        environment = {"RUNPOD_API_BASE_URL": emulator.base_url, "RUNPOD_API_KEY": FULL_KEY}
        yield Cloud(
            "runpod", environment, emulator.world.meter, lambda: emulator.world.alive, ("--gpu", "1xA100"), emulator
        )


@contextmanager
def emulated_lambda_cloud() -> Iterator[Cloud]:
    with LambdaEmulator() as emulator:
        environment = {"LAMBDA_API_BASE_URL": emulator.base_url, "LAMBDA_API_KEY": KEY}
        asks = ("--lambda-guard", "--gpu", "1xA10")
        yield Cloud("lambda", environment, emulator.world.meter, lambda: emulator.world.alive, asks, emulator)


@contextmanager
def _aws() -> Iterator[Cloud]:
    with AwsEmulator() as emulator:
        environment, asks = emulator.environment, ("--gpu", "cpu")
        yield Cloud("aws", environment, emulator.world.meter, lambda: emulator.world.alive, asks, emulator)


OPENED = {"runpod": _runpod, "lambda": emulated_lambda_cloud, "aws": _aws}


def _nothing(emulator: Any) -> None:
    """Leave the account as it is, in order."""


def _empty(emulator: Any) -> None:
    emulator.world.balance = Decimal("0.01")


def _sold_out(emulator: Any) -> None:
    for kind in emulator.world.gpus.values():
        kind.stock = dict.fromkeys(kind.stock, "NONE")


def _sold_out_lambda(emulator: Any) -> None:
    for kind in emulator.world.kinds.values():
        kind.regions = []


def _sold_out_aws(emulator: Any) -> None:
    emulator.rules.has_capacity = lambda type_id, zone: False


def _no_quota(emulator: Any) -> None:
    emulator.rules.quotas = dict.fromkeys(emulator.rules.quotas, 0)


def _denied(emulator: Any) -> None:
    emulator.rules.denied.add("ec2:RunInstances")


@dataclass(frozen=True)
class Refusal:
    """A cloud, what is wrong with the account or the key, and the error's code and a text that it must contain."""

    cloud: str
    code: str
    fact: str
    account: Callable[[Any], None] = _nothing
    key: Mapping[str, str | None] | None = None
    typed: tuple[str, ...] = ()


REFUSALS = {
    "no key for runpod": Refusal("runpod", "auth.no_key", "gpurun auth set runpod", key={"RUNPOD_API_KEY": None}),
    "no key for lambda": Refusal("lambda", "auth.no_key", "gpurun auth set lambda", key={"LAMBDA_API_KEY": None}),
    "no key for aws": Refusal("aws", "auth.no_provider", "aws configure", key={"AWS_ACCESS_KEY_ID": None}),
    "runpod does not know the key": Refusal("runpod", "auth.refused", "RunPod", key={"RUNPOD_API_KEY": "rpa_wrong"}),
    "lambda does not know the key": Refusal("lambda", "auth.refused", "Lambda", key={"LAMBDA_API_KEY": "secret_wrong"}),
    "aws does not know the key": Refusal("aws", "auth.refused", "AWS", key={"AWS_ACCESS_KEY_ID": "AKIAWRONG"}),
    "a key of runpod that may only read": Refusal(
        "runpod", "auth.not_allowed", "create pods", key={"RUNPOD_API_KEY": READ_KEY}
    ),
    "a key of aws that may not rent": Refusal("aws", "auth.not_allowed", "ec2:RunInstances", account=_denied),
    "no money left on runpod": Refusal("runpod", "account.no_funds", "runpod.io", account=_empty),
    "no quota on aws": Refusal("aws", "account.no_quota", "servicequotas", account=_no_quota),
    "nothing left on runpod": Refusal("runpod", "offer.no_capacity", "(runpod)", account=_sold_out),
    "nothing left on lambda": Refusal("lambda", "offer.no_capacity", "(lambda)", account=_sold_out_lambda),
    "nothing left on aws": Refusal("aws", "create.no_capacity", "InsufficientInstanceCapacity", account=_sold_out_aws),
    "a region that runpod has not": Refusal(
        "runpod", "region.unknown", "'XX-NOWHERE-1'", typed=("--region", "XX-NOWHERE-1")
    ),
    "a region that lambda has not": Refusal(
        "lambda", "region.unknown", "'xx-nowhere-1'", typed=("--region", "xx-nowhere-1")
    ),
}


@pytest.mark.parametrize("name", list(REFUSALS))
def test_a_clouds_refusal_says_what_to_do_and_nothing_is_billed(name: str, tmp_path: Path) -> None:
    refusal = REFUSALS[name]
    (tmp_path / "text.txt").write_text("to be or not to be.\n" * 2000)
    with OPENED[refusal.cloud]() as cloud:
        refusal.account(cloud.emulator)
        given = {**cloud.environment, **(refusal.key or {})}
        known = {variable: value for variable, value in given.items() if value is not None}
        with somebody(replace(cloud, environment=known), tmp_path / "home") as user:
            done = user.trains("--data", str(tmp_path / "text.txt"), *refusal.typed)
            envelope = json.loads(done.stdout.splitlines()[-1])
            assert done.returncode == envelope["exit_code"], done.stdout
            assert done.returncode in (2, 4, 5), "a word, a key or an offer is wrong; nothing may be billing"
            (error,) = envelope["errors"]
            assert (error["code"], lacking(f"{error['message']} {error['hint']}", refusal.fact)) == (refusal.code, [])
            assert error["hint"]
            secrets = [value for variable, value in known.items() if "KEY" in variable]
            assert not [secret for secret in secrets if secret in done.stdout + done.stderr]
            assert cloud.alive() == []
            assert cloud.meter.total_micros() == 0
            assert user.envelope("ps")[0] == 0


def test_a_changed_trainer_that_fails_rehearsal_rents_nothing(tmp_path: Path) -> None:
    mine = shutil.copytree(bundle_root() / "trainer", tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    with (mine / "loss.py").open("a") as module:
        module.write('\nraise RuntimeError("not on paid time")\n')
    with _runpod() as cloud, somebody(cloud, tmp_path / "home") as user:
        done = user.trains("--trainer", str(mine))
        (error,) = json.loads(done.stdout.splitlines()[-1])["errors"]
        assert (done.returncode, error["code"]) == (ExitCode.TRAINING_FAILED, "recipes.rehearsal_failed"), done.stderr
        assert f"--dry-run --trainer {mine}" in error["hint"]
        assert cloud.meter.total_micros() == 0
        assert not cloud.emulator.world.pods, "nothing was ever asked for"
        assert not (tmp_path / "home" / "runs" / "fox-41").exists()
