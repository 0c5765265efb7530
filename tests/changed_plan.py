"""Copies of a plan with a few changed keys, also in its job and its chosen candidate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpurun.core.run_plan import Candidate, Plan
from tests.lifecycle.drive import TINY


def changed_plan(plan: Plan, changes: Mapping[str, Any]) -> Plan:
    """Return the plan with these keys changed; each is a key of the plan, of its job or of its chosen candidate."""
    chosen = {key: value for key, value in changes.items() if key in Candidate.model_fields}
    job = {key: value for key, value in changes.items() if key in type(plan.job).model_fields}
    others = {key: value for key, value in changes.items() if key not in chosen and key not in job}
    parts = {"job": plan.job.model_copy(update=job), "chosen": plan.chosen.model_copy(update=chosen)}
    return plan.model_copy(update={**others, **parts})


def as_shipped(plan: Plan) -> Plan:
    """Return the plan with the digest of the program that its job uploads: its own folder, or the tiny trainer."""
    return plan.model_copy(update={"bundle_sha256": plan.job.digest(plan, TINY / "trainer")})
