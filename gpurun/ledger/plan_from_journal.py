"""A run's plan; where its file is damaged, what the journal has of it: enough to end the machine and tell the cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from gpurun.core.errors import VerificationFailed
from gpurun.core.journal_events import CreateIntended, RunOpened
from gpurun.core.journal_records import Record, all_typed, opened_of
from gpurun.core.money import Micros
from gpurun.core.paths import RunFolder, read_regular
from gpurun.core.records import Offer
from gpurun.core.run_plan import Candidate, DataSummary, Estimate, Plan

_NO_GUESS = Estimate(fits=True, peak_bytes=0, micro_batch=0, tokens_per_s=None, train_s=None, basis="the plan is lost")
# What a journal may lack, and nothing here needs to know.
_NO_OFFER: dict[str, Any] = {
    **dict.fromkeys(("type_id", "gpu", "price_source"), "unknown"),
    **dict.fromkeys(("gpu_count", "vram_gb", "boot_s"), 0),
    "region": "any",
    "dies_by_itself": "not known",
}
_PRICED = {"provider", "rate_micros_per_hour", "billing_unit_s"}


def read_plan(folder: RunFolder) -> Plan:
    """The plan that was agreed to, with its shards where they lie now; OSError or ValidationError where it is none."""
    plan = Plan.from_json(read_regular(folder.plan))
    places = {key: folder.now_at(getattr(plan.data, key)) for key in ("folder", "beside")}
    return plan.model_copy(update={"data": plan.data.model_copy(update=places)})


def plan_of(folder: RunFolder, records: Sequence[Record]) -> tuple[Plan, VerificationFailed | None]:
    """The plan, or what the journal has of it, and why it is not the plan itself.

    That is raised where the journal has nothing of it: then nothing was asked for either.
    """
    try:
        return read_plan(folder), None
    except (OSError, ValidationError) as error:
        lost = VerificationFailed(
            "run.plan_damaged",
            f"The plan of {folder.name} cannot be read: {type(error).__name__}.",
            hint=f"Put {folder.plan} back from a copy to go on, or end the run: gpurun destroy {folder.name}.",
        )
        try:
            return _stand_in(opened_of(records), list(all_typed(records, CreateIntended))), lost
        except (IndexError, ValueError):
            raise lost from error


def _stand_in(opened: RunOpened, intents: Sequence[CreateIntended]) -> Plan:
    """The plan of what was asked for, offer by offer, in the order of asking; of the training it knows nothing."""
    asked = {Offer.model_validate(_NO_OFFER | one.model_dump(include=_PRICED) | one.offer): one for one in intents}
    approved = [
        Candidate(
            offer=offer,
            estimate=_NO_GUESS,
            lease=one.lease,
            expected_micros=None,
            worst_micros=Micros(one.worst_micros),
            finishes=False,
        )
        for offer, one in asked.items()
    ]
    known = {"run", "mode", "recipe", "form", "recipe_sha256", "bundle_sha256", "cap_micros"}
    return Plan.model_validate(
        {
            **opened.model_dump(include=known),
            "resolved": {"train": {"steps": 0}, "hardware": {"disk_gb": 0}},
            "parameters": 0,
            "processes": approved[0].offer.gpu_count or approved[0].offer.nodes,
            "chosen": approved[0],
            "candidates": approved,
            "data": DataSummary(
                folder="",
                tokenizer="",
                tokenizer_sha256="",
                vocab_size=0,
                train_tokens=0,
                val_tokens=0,
                bytes=0,
                sha256=opened.data_sha256,
                source="unknown",
            ),
            "ship_files": 0,
            "ship_bytes": 0,
        }
    )
