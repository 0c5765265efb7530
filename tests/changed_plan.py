"""A plan that differs in a few keys, those of its job and of its chosen candidate among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpurun.core.run_plan import Candidate, Plan
from tests.lifecycle.drive import TINY


def changed_plan(plan: Plan, changes: Mapping[str, Any]) -> Plan:
    """The plan with these keys, wherever they belong."""
    chosen = {key: value for key, value in changes.items() if key in Candidate.model_fields}
    job = {key: value for key, value in changes.items() if key in type(plan.job).model_fields}
    others = {key: value for key, value in changes.items() if key not in chosen and key not in job}
    parts = {"job": plan.job.model_copy(update=job), "chosen": plan.chosen.model_copy(update=chosen)}
    return plan.model_copy(update={**others, **parts})


def as_shipped(plan: Plan) -> Plan:
    """The plan with the digest of its folder, or else of the tiny trainer."""
    return plan.model_copy(update={"bundle_sha256": plan.job.digest(plan, TINY / "trainer")})
