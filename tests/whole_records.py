"""Journal records for tests: a test gives only the data it is about, and these functions add what a reader needs."""

from __future__ import annotations

from typing import Any

from gpurun.core.journal_events import Event
from gpurun.core.journal_records import Record

INSTANCE: dict[str, Any] = {
    "id": "i-1", "provider": "local", "token": "gr-x-1", "run": "x", "state": "RUNNING", "rate_micros_per_hour": None,
}  # fmt: skip
_LEASE = dict.fromkeys(("boot_s", "ship_s", "train_s", "collect_s", "destroy_s", "kill_allowance_s"), 0)
_BROUGHT: dict[str, Any] = {"files": [], "missing": [], "latest": None, "best": None}
_FILE = {"name": "x", "bytes": 0, "sha256": "", "kind": "", "step": 0}
LEAST: dict[Event, dict[str, Any]] = {
    Event.RUN_OPENED: {
        "run": "x", "mode": "paid", "recipe": "x", "form": "full", "gpurun_version": "", "provider": "local",
        "cap_micros": None, "worst_micros": 0,
        **{f"{name}_sha256": "" for name in ("recipe", "request", "plan", "data", "bundle")},
    },
    Event.CREATE_INTENDED: {
        "attempt": 1, "token": "gr-x-1", "provider": "local", "offer": {}, "rate_micros_per_hour": 0,
        "billing_unit_s": 1, "worst_micros": 0, "lease": _LEASE, "deadline_wall": 0,
    },
    Event.CREATE_OBSERVED: {"token": "gr-x-1", "instance": INSTANCE},
    Event.CREATE_REFUSED: {"reason": "rejected", "message": ""},
    Event.READY_OBSERVED: {"instance": INSTANCE, "facts": {}},
    Event.SHIP_OBSERVED: {"manifest_sha256": ""},
    Event.TRAIN_OBSERVED: {"outcome": "done", "reason": "", "exit_code": None, "message": ""},
    Event.STOP_REQUESTED: {"how": "save", "by": "user"},
    Event.COLLECT_OBSERVED: _BROUGHT,
    Event.SALVAGE_OBSERVED: _BROUGHT,
    Event.HOLD_INTENDED: {"until_wall": 0, "message": ""},
    Event.HOLD_OBSERVED: {"how": "over"},
    Event.DEATH_READ: {"state": "GONE", "listed": False, "answer_sha256": ""},
    Event.DEATH_PROVEN: {"id": "i-1", "teardown": "destroyed", "reads": 3, "spread_s": 30, "evidence_sha256": ""},
    Event.BILL_OBSERVED: {"token": "gr-x-1", "micros": 0, "reads": 2, "spread_s": 600},
    Event.STEP_FAILED: {"step": "ship", "code": "x", "message": "", "exit_code": 6},
    Event.INCIDENT: {"code": "x", "message": ""},
    Event.LEG_PLANNED: {
        "number": 2, "plan": "legs/1.json", "plan_sha256": "", "step": 0, "spent_micros": 0, "left_micros": 0
    },
    Event.RECEIPT_OBSERVED: {"seq": 1, "sha256": ""},
    Event.RUN_CLOSED: {"exit_code": 0},
    Event.JOURNAL_REPAIRED: {"cut_bytes": 1},
}  # fmt: skip
"""For each of these events, the least data that a reader does not take for damage."""


def whole(event: Event, data: dict[str, Any]) -> dict[str, Any]:
    """Return these data, completed with the least that the event needs."""
    full = {**LEAST.get(event, {}), **data}
    if "instance" in full:
        full["instance"] = {**INSTANCE, **full["instance"]}
    if "files" in full and isinstance(full["files"], list):
        full["files"] = [{**_FILE, **file} for file in full["files"]]
    return full


def record(seq: int, event: Event, wall: float, data: dict[str, Any], mono: float | None = None) -> Record:
    """Return a journal record with these data, completed by `whole`; `mono` is `wall` by default."""
    mono = wall if mono is None else mono
    return Record(seq=seq, prev="", wall=wall, mono=mono, boot_id="b", event=event, data=whole(event, data))
