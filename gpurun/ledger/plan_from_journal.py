"""Reads a run's plan. If its file is damaged, the journal has enough of it to end the machine and show the cost."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from gpurun.core.errors import VerificationFailed
from gpurun.core.journal_events import CreateIntended, LegPlanned, RunOpened
from gpurun.core.journal_records import Record, all_typed, by_machine, last_typed, opened_of
from gpurun.core.money import Micros
from gpurun.core.paths import RunFolder, read_regular
from gpurun.core.records import Offer
from gpurun.core.run_plan import Candidate, DataSummary, Estimate, Plan

_NO_GUESS = Estimate(fits=True, peak_bytes=0, micro_batch=0, tokens_per_s=None, train_s=None, basis="the plan is lost")
# Values for the fields of an offer that a journal may lack; they are only placeholders.
_NO_OFFER: dict[str, Any] = {
    **dict.fromkeys(("type_id", "gpu", "price_source"), "unknown"),
    **dict.fromkeys(("gpu_count", "vram_gb", "boot_s"), 0),
    "region": "any",
    "dies_by_itself": "not known",
}
_PRICED = {"provider", "rate_micros_per_hour", "billing_unit_s"}


def read_plan(folder: RunFolder) -> Plan:
    """Read the approved plan, with the present paths of its data; OSError or ValidationError if it is not a plan."""
    return _correct_paths(Plan.from_json(read_regular(folder.plan)), folder)


def _correct_paths(plan: Plan, folder: RunFolder) -> Plan:
    """Return the plan with the present paths of its files, because the home may have been moved."""
    places = {key: folder.now_at(getattr(plan.data, key)) for key in ("folder", "beside")}
    update: dict[str, Any] = {"data": plan.data.model_copy(update=places)}
    if plan.leg is not None:
        update["leg"] = plan.leg.model_copy(update={"folder": str(folder.artifacts)})
    return plan.model_copy(update=update)


def read_leg_plan(folder: RunFolder, name: str, sha256: str) -> Plan:
    """Return a leg's plan from the file with this name and digest; OSError or ValueError if there is no such file."""
    return _correct_paths(_read_leg_plan(folder.legs / Path(name).name, sha256), folder)


@lru_cache(maxsize=8)
def _read_leg_plan(path: Path, sha256: str) -> Plan:
    content = read_regular(path)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(f"{path} is not the plan that the journal names")
    return Plan.from_json(content)


def plan_of(folder: RunFolder, records: Sequence[Record]) -> tuple[Plan, VerificationFailed | None]:
    """Return the plan of the current machine and None or, if it cannot be read, the journal's part of it and the error.

    If the journal has no part of it either, raise the error; then no machine was requested.
    """
    leg = last_typed(records, LegPlanned)
    try:
        return read_leg_plan(folder, leg.plan, leg.plan_sha256) if leg else read_plan(folder), None
    except (OSError, ValueError) as error:
        lost = VerificationFailed(
            "run.plan_damaged",
            f"The plan of {folder.name} cannot be read: {type(error).__name__}.",
            hint=f"Restore {folder.legs if leg else folder.plan} from a copy to resume, or end the run: "
            f"gpurun destroy {folder.name}.",
        )
        try:
            return _build_stand_in_plan(opened_of(records), _list_current_intents(records)), lost
        except (IndexError, ValueError):
            raise lost from error


def _list_current_intents(records: Sequence[Record]) -> list[CreateIntended]:
    """Return the create intents of the current leg or, if it has none, of the whole run."""
    since = list(all_typed(by_machine(records)[-1], CreateIntended))
    return since or list(all_typed(records, CreateIntended))


def _build_stand_in_plan(opened: RunOpened, intents: Sequence[CreateIntended]) -> Plan:
    """Return a plan with the offers of the intents, in their order, and placeholders for everything about the training.

    Raise IndexError if there are no intents.
    """
    offers = {
        Offer.model_validate(_NO_OFFER | intent.model_dump(include=_PRICED) | intent.offer): intent
        for intent in intents
    }
    approved = [
        Candidate(
            offer=offer,
            estimate=_NO_GUESS,
            lease=intent.lease,
            expected_micros=None,
            worst_micros=Micros(intent.worst_micros),
            finishes=False,
        )
        for offer, intent in offers.items()
    ]
    known = {"run", "mode", "recipe", "form", "recipe_sha256", "bundle_sha256", "cap_micros"}
    return Plan.model_validate(
        {
            **opened.model_dump(include=known),
            "resolved": {"train": {"steps": 0}, "hardware": {"disk_gb": 0}},
            "parameters": 0,
            "processes": approved[0].offer.processes,
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
