"""What the data of each event must have to be understood: the keys that readers index, and their types.

A key beside them is a newer gpurun's, and left alone; so is an event that is not here. docs/JOURNAL.md tells all keys.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from gpurun.core.errors import ExitCode
from gpurun.core.journal_records import Event, Record
from gpurun.core.money import Micros
from gpurun.core.records import Frozen, Instance, Teardown
from gpurun.core.run_plan import Lease

Json = dict[str, Any]
Seconds = Annotated[float, Field(gt=-1e11, lt=1e11)]
"""A time or a duration that a clock can have told."""


class _Opened(Frozen):
    run: str
    mode: str
    recipe: str
    form: str
    recipe_sha256: str
    request_sha256: str
    plan_sha256: str
    data_sha256: str
    bundle_sha256: str
    gpurun_version: str
    provider: str
    cap_micros: int | None
    worst_micros: int
    rules: int = 1
    core_bundle_sha256: str = ""


class _Lease(Lease):
    kill_allowance_s: int


class _Machine(Instance):
    rate_micros_per_hour: Micros | None


class _Intended(Frozen):
    attempt: int
    token: str
    provider: str
    offer: Json
    rate_micros_per_hour: int
    billing_unit_s: int
    worst_micros: int
    lease: _Lease
    deadline_wall: Seconds
    beside_micros_per_hour: int = 0
    egress_micros: int = 0
    sends_itself: bool = False
    least_billed_s: Seconds = 0


class _WithInstance(Frozen):
    instance: _Machine | None = None


class _Created(Frozen):
    token: str
    instance: _Machine


class _Refused(Frozen):
    reason: str
    message: str


class _Ready(Frozen):
    instance: _Machine
    facts: Json


class _Shipped(Frozen):
    manifest_sha256: str


class _Trained(Frozen):
    outcome: str
    reason: str
    message: str
    exit_code: int | None


class _Stop(Frozen):
    how: Literal["save", "now", "destroy"]
    by: str


class _File(Frozen):
    name: str
    bytes: int
    sha256: str
    kind: str
    step: int


class _Brought(Frozen):
    files: list[_File]
    missing: list[str]
    latest: Any
    best: Any


class _Collected(_Brought):
    egress_micros: int = 0


class _Held(Frozen):
    until_wall: float
    message: str


class _HoldOver(Frozen):
    how: str


class _Read(Frozen):
    state: str
    listed: bool
    answer_sha256: str
    ended_wall: Seconds | None = None
    ran_s: Seconds | None = None
    alive_s_ago: Seconds | None = None
    up_s_ago: Seconds | None = None
    gone_s_ago: Seconds | None = None


class _Proven(Frozen):
    id: str
    teardown: Teardown
    reads: int
    spread_s: float
    evidence_sha256: str


class _Billed(Frozen):
    token: str
    micros: int
    reads: int
    spread_s: Seconds


class _Failed(Frozen):
    step: str
    code: str
    message: str
    exit_code: ExitCode


class _Incident(Frozen):
    code: str
    message: str


class _Rose(Frozen):
    rate_micros_per_hour: int
    since_wall: Seconds


class _ShownGone(Frozen):
    gone_s_ago: Seconds


class _EndsItself(Frozen):
    ends_wall: Seconds


class _Moved(Frozen):
    instance: Instance


class _Gone(Frozen):
    id: str


class _Receipt(Frozen):
    seq: int
    sha256: str


class _Closed(Frozen):
    exit_code: ExitCode


class _Repaired(Frozen):
    cut_bytes: int


FORMS: dict[Event, type[Frozen]] = {
    Event.RUN_OPENED: _Opened,
    Event.CREATE_INTENDED: _Intended,
    Event.CREATE_OBSERVED: _Created,
    Event.CREATE_REFUSED: _Refused,
    Event.READY_OBSERVED: _Ready,
    Event.SHIP_OBSERVED: _Shipped,
    Event.TRAIN_OBSERVED: _Trained,
    Event.STOP_REQUESTED: _Stop,
    Event.COLLECT_OBSERVED: _Collected,
    Event.SALVAGE_OBSERVED: _Brought,
    Event.HOLD_INTENDED: _Held,
    Event.HOLD_OBSERVED: _HoldOver,
    Event.DEATH_READ: _Read,
    Event.DEATH_PROVEN: _Proven,
    Event.BILL_OBSERVED: _Billed,
    Event.STEP_FAILED: _Failed,
    Event.INCIDENT: _Incident,
    Event.RECEIPT_OBSERVED: _Receipt,
    Event.RUN_CLOSED: _Closed,
    Event.JOURNAL_REPAIRED: _Repaired,
}
_OF_INCIDENTS: dict[str, type[Frozen]] = {
    "price.rose": _Rose,
    "machine.ends_itself": _EndsItself,
    "machine.moved": _Moved,
    "create.duplicate_gone": _Gone,
    "create.late_gone": _Gone,
    "machine.gone": _ShownGone,
}


def lacks(record: Record) -> str | None:
    """What a record lacks for its readers, as "offer.gpu: Field required"; None where it is understood, or unknown."""
    forms = [FORMS.get(record.event)] if isinstance(record.event, Event) else []
    # Whatever the event is: those who reckon take it for the provider's last word of the machine.
    forms += [_WithInstance] if "instance" in record.data else []
    if record.event is Event.INCIDENT:
        forms.append(_OF_INCIDENTS.get(str(record.data.get("code"))))
    for form in forms:
        try:
            if form is not None:
                # By JSON's own types: "5" is no number for those who reckon with it.
                form.model_validate_json(json.dumps(record.data), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            return f"{record.event}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    return None
