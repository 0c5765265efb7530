"""A plan that differs in a few keys, those of its chosen candidate among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpurun.core.run_plan import Candidate, Plan


def changed_plan(plan: Plan, told: Mapping[str, Any]) -> Plan:
    """The plan with these keys, wherever they belong."""
    chosen = {key: value for key, value in told.items() if key in Candidate.model_fields}
    others = {key: value for key, value in told.items() if key not in chosen}
    return plan.model_copy(update={**others, "chosen": plan.chosen.model_copy(update=chosen)})
