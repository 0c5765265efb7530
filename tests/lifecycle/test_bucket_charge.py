"""Tests that a machine pushes no more bytes to a bucket in another place than the plan has paid egress for."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpurun.core.clock import SystemClock
from gpurun.core.journal_records import RunState
from gpurun.core.paths import Home, RunFolder
from gpurun.core.run_plan import Plan
from gpurun.core.stage_plan import StagePlan
from gpurun.lifecycle.artifacts.inventory import EgressBudget
from gpurun.lifecycle.context import Context
from gpurun.lifecycle.job_spec import Pushing
from gpurun.planning.transfer import early_bytes
from gpurun.remote.client import FarSide
from gpurun.remote.messages import ManifestFile
from tests.changed_plan import changed_plan
from tests.emulators.s3 import S3Emulator
from tests.lifecycle.stage import staged_run

OWN = {"endpoint": "https://s3.us-west-2.amazonaws.com", "region": "us-west-2"}
FILE = ManifestFile(name="checkpoints/000010.weights", bytes=9, sha256="0" * 64, kind="weights", step=10)


def order_of(home: Home, *, provider: str, **bucket: str) -> tuple[dict[str, Any], RunFolder, Plan]:
    """Return the push order that the agent would get for this provider and bucket, the run's folder and its plan."""
    folder = staged_run(home)
    plan = Plan.from_json(folder.plan.read_bytes())
    stage = StagePlan(
        url="s3://shards/gpt", **bucket, files=0, bytes=0, there_files=0, there_bytes=0, upload_s=0, saves_s=0
    )
    offer = plan.offer.model_copy(update={"provider": provider, "region": "us-west-2"})
    plan = changed_plan(plan, {"offer": offer, "stage": stage})
    given: list[bytes] = []
    context = SimpleNamespace(
        plan=plan, clock=SystemClock(), folder=folder, seconds_left=lambda _: 600.0, raise_if_stopped=lambda _: None
    )
    far = SimpleNamespace(let_push=given.append)
    for _ in range(2):  # A second order has fresh URLs, but the limit stays the same.
        Pushing(cast(RunState, SimpleNamespace(token="gr")), cast(Context, context), cast(FarSide, far)).give()
    first, again = map(json.loads, given)
    assert first["most_bytes"] == again["most_bytes"]
    return first, folder, plan


@pytest.mark.parametrize(
    "bucket", [OWN | {"region": "eu-west-1"}, {"endpoint": "https://x.r2.cloudflarestorage.com", "region": "us-west-2"}]
)
def test_a_bucket_elsewhere_gets_only_what_the_plan_pays_for(own: Home, s3: S3Emulator, bucket: dict[str, str]) -> None:
    order, folder, plan = order_of(own, provider="aws", **bucket)
    assert order["most_bytes"] == early_bytes(plan)
    assert order["steps"] == plan.job.resolved["train"]["steps"]
    assert not EgressBudget.from_plan(folder, plan).take([FILE]), "it would leave twice"


@pytest.mark.parametrize(
    ("provider", "bucket"), [("aws", OWN), ("runpod", OWN)], ids=["in one region", "where nothing is charged"]
)
def test_without_egress_charges_all_is_pushed_and_comes_home(
    own: Home, s3: S3Emulator, provider: str, bucket: dict[str, str]
) -> None:
    order, folder, plan = order_of(own, provider=provider, **bucket)
    assert order["most_bytes"] is None
    assert EgressBudget.from_plan(folder, plan).take([FILE])
