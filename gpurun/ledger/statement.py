"""Derives the statement in a run's receipt from its folder: what was requested, what ran, the cost, and the end.

The statement depends only on the run folder, the place in the chain and the key, not on a clock or a machine, so a
lost receipt can be made again byte for byte. docs/RECEIPTS.md has every field. Each group of figures states its source:
"measured" (this computer's clock), "provider-reported", "instance-reported", "planned" or "unknown".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from gpurun.core.clock import utc
from gpurun.core.collected_record import COLLECTED, NAMED, FileAtHome, ReceiptCheckpoint
from gpurun.core.journal_events import (
    CollectObserved,
    FileBrought,
    FilesBrought,
    Incident,
    JournalRepaired,
    ReadyObserved,
    RunOpened,
    ShipObserved,
    StageObserved,
    StepFailed,
    TrainObserved,
    TrainStarted,
)
from gpurun.core.journal_records import Event, Record, all_typed, by_machine, last_brought, last_typed, opened_of
from gpurun.core.money import Figure, Micros, share_of, total
from gpurun.core.paths import RunFolder
from gpurun.core.receipt_record import (
    UNKNOWN,
    Continues,
    Cost,
    Predicate,
    ReceiptAsked,
    ReceiptDigests,
    ReceiptIncident,
    ReceiptMachine,
    ReceiptMeasured,
    ReceiptTeardown,
    ReceiptTrial,
    ReceiptTrials,
    RentalPaid,
    Runtime,
    Shipping,
    Statement,
    Subject,
    Training,
    Verdict,
)
from gpurun.core.receipt_rules import END_BY_MACHINE_CLOCK
from gpurun.core.untrusted import number, plain_data, plain_line, read_object
from gpurun.ledger.billed_time import elapsed_s, last_of
from gpurun.ledger.legs import legs_of, on_demand_of
from gpurun.ledger.log_facts import Evidence, command_verdict, older_verdict, read_evidence, verdict_of
from gpurun.ledger.paid_phases import TrainingSplit, phases_s, planned_phases, timeline
from gpurun.ledger.rental import Rental, are_costs_bounded, billed_by, cost_says, figure_of, is_cap_kept, rentals_of

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://gpurun.dev/receipt/v1"
MEASURED, REPORTED, FROM_INSTANCE = "measured", "provider-reported", "instance-reported"

NOT_OBSERVED = "not observed: it ran in a notebook, which its user ends"

# Events that may follow the end of the last rental, and on which a receipt is not based.
AFTERWARDS = {Event.STOP_REQUESTED, Event.JOURNAL_REPAIRED, Event.RECEIPT_OBSERVED, Event.RUN_CLOSED}
_INCIDENTS = {Event.INCIDENT, Event.STEP_FAILED, Event.JOURNAL_REPAIRED}
_CAME = {"type": "type_id", "region": "region", "gpu": "gpu", "gpu_count": "gpu_count"}
_CHECKPOINT_KINDS = ("weights", "optimizer", "state", "checkpoint", "output")
SEEN_LATE_S = 60.0
"""If the job's end was observed later than this, for example by a laptop that slept, the receipt has both times."""
_TALLY = ("looks", "busy", "own", "most_mib")
_SESSIONS = ("terminals", "open_s", "used_s")


def basis_of(records: Sequence[Record]) -> list[Record]:
    """Return the records on which a receipt is based: those before its own record, up to the last one that matters.

    Records of AFTERWARDS at the end do not matter.
    """
    observed = [place for place, record in enumerate(records) if record.event is Event.RECEIPT_OBSERVED]
    kept = list(records[: observed[0]] if observed else records)
    while len(kept) > 1 and kept[-1].event in AFTERWARDS:
        kept.pop()
    return kept


def build_statement(
    folder: RunFolder, records: Sequence[Record], *, head: str, seq: int, prev: str, keyid: str | None
) -> Statement:
    """Return the in-toto Statement of a run. `records` are from `basis_of`, `head` is the sha256 of their last line."""
    evidence = read_evidence(folder)
    opened, rentals = opened_of(records), rentals_of(records)
    is_imported = bool(opened.imported)
    # Rules 1 divided a command's time as if it were training.
    divided = None if not opened.has_model and (opened.rules or 1) > 1 else evidence.split
    instance = _describe_machine(opened, rentals)
    collected = last_brought(records)
    files = [_describe_file(file) for file in collected.files] if collected else []
    predicate: Predicate = {
        "v": 1,
        "run": opened.run,
        "seq": seq,
        "prev": prev,
        "journal": {"head": head, "records": len(records)},
        "signing": {"keyid": keyid},
        "asked": _describe_request(opened),
        "digests": _collect_digests(opened, records, evidence),
        "shipping": _sum_shipped_bytes(records),
        "gpurun": {"version": opened.gpurun_version},
        "platform": plain_data(opened.platform),
        "instance": instance,
        "timeline": timeline(records),
        "runtime": _describe_runtime(folder, rentals, divided, is_seen=not is_imported),
        "cost": _describe_cost(opened, rentals),
        "training": _describe_training(records, evidence, rentals),
        "checkpoint": _describe_checkpoint(collected, files),
        "sample": evidence.sample,
        "teardown": {"is": "user_operated", "evidence": []} if is_imported else _describe_teardown(rentals),
        "verdict": _choose_verdict(records, instance, evidence),
        "incidents": _list_incidents(records),
    }
    if opened.rules is not None:
        predicate["rules"] = opened.rules
    if legs := legs_of(records):
        predicate["legs"] = legs
    elif (on_demand := on_demand_of(rentals)) is not None:
        predicate["cost"]["on_demand_micros"] = on_demand
    return {
        "_type": STATEMENT_TYPE,
        "subject": _list_signed_files(files, predicate["checkpoint"]),
        "predicateType": PREDICATE_TYPE,
        "predicate": predicate,
    }


def _list_signed_files(files: list[FileAtHome], checkpoint: ReceiptCheckpoint) -> list[Subject]:
    """Return the statement's subjects: the downloaded checkpoints and outputs and, if there is one, the full list."""
    found = {file["name"]: file["sha256"] for file in files if file["kind"] in _CHECKPOINT_KINDS}
    if "listed" in checkpoint:
        found[COLLECTED] = checkpoint["listed"]["sha256"]
    return [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in found.items()]


def _describe_request(opened: RunOpened) -> ReceiptAsked:
    """Return the request; optional keys are present only if the run has a value for them."""
    request: ReceiptAsked = {
        "mode": opened.mode, "recipe": opened.recipe, "form": opened.form, "provider": opened.provider
    }  # fmt: skip
    if opened.continues:
        request["continues"] = cast(Continues, opened.continues)
    if opened.challenge:
        request["challenge"] = plain_line(opened.challenge)
    if opened.command:
        request["command"] = plain_data(opened.command)
    if opened.job:
        request["job"] = plain_line(opened.job)
    if opened.trainer:
        request["trainer"] = opened.trainer
    if opened.max_gpu_hours is not None:
        request["max_gpu_hours"] = opened.max_gpu_hours
    if opened.legs:
        request["legs"] = opened.legs
    if opened.imported:
        request["imported"] = plain_data(opened.imported)
    return request


def _describe_file(file: FileBrought) -> FileAtHome:
    name, size, sha256, kind, step = (plain_data(file[key]) for key in ("name", "bytes", "sha256", "kind", "step"))
    if "%" in file["name"]:  # An escaped name is harmless, however long.
        name = file["name"]
    return {"name": name, "bytes": size, "sha256": sha256, "kind": kind, "step": step}


def _collect_digests(opened: RunOpened, records: Sequence[Record], evidence: Evidence) -> ReceiptDigests:
    shipped = last_typed(records, ShipObserved)
    digests: ReceiptDigests = {
        "request": opened.request_sha256,
        "plan": opened.plan_sha256,
        "recipe": opened.recipe_sha256,
        "data": opened.data_sha256,
        "trainer": opened.bundle_sha256,
        "shipped": shipped.manifest_sha256 if shipped else UNKNOWN,
        "log": evidence.log,
        "events": evidence.events,
    }
    if opened.core_bundle_sha256:
        digests["core_bundle"] = opened.core_bundle_sha256
    return digests


def _sum_shipped_bytes(records: Sequence[Record]) -> Shipping:
    """Return the bytes over each route: over SSH, to the bucket before renting, from the bucket to the machine.

    If the machine downloaded the shards itself, `public` names them.
    """
    staged, shipped = last_typed(records, StageObserved), last_typed(records, ShipObserved)
    ready = last_typed(records, ReadyObserved)
    early_bytes = ready.sent_bytes if ready else 0  # Sent while the job waited in its queue.
    sent_bytes = shipped.sent_bytes if shipped else None
    shipping: Shipping = {
        "is": MEASURED,
        "by_ssh_bytes": None if sent_bytes is None else sent_bytes + early_bytes,
        "bucket": plain_data(staged and staged.url),
        "to_bucket_bytes": staged.sent_bytes if staged else None,
        "from_bucket_bytes": shipped.pulled_bytes if shipped else None,
    }
    if shipped and shipped.public is not None and shipped.public_bytes is not None:
        shipping |= {"public": plain_data(shipped.public), "public_bytes": shipped.public_bytes}
    return shipping


def _describe_machine(opened: RunOpened, rentals: Sequence[Rental]) -> ReceiptMachine | None:
    """Return the provider's description of the last machine, and the machine's report about itself.

    Fields that the provider did not report are those of the order; `as_ordered` names them. None without a machine.
    """
    made = [rental for rental in rentals if rental.instance is not None]
    if not made:
        return None
    rental, seen = made[-1], made[-1].instance
    ready, offer = last_typed(rental.records, ReadyObserved), rental.intent.offer
    reported = {ours: rental.reported(theirs) for ours, theirs in _CAME.items()}
    ordered = {ours: offer[theirs] for ours, theirs in _CAME.items()}
    if opened.endpoint is None:  # Receipts of an older gpurun have the ordered type.
        reported["type"] = None
    unreported = sorted(name for name in _CAME if not reported[name] and ordered[name])
    kind, region, gpu, gpu_count = (plain_data(reported[name]) or ordered[name] for name in _CAME)
    machine: ReceiptMachine = {
        "is": REPORTED,
        "provider": rental.intent.provider,
        "id": plain_data(seen and seen.id),
        "token": rental.token,
        "type": kind,
        "region": region,
        "gpu": gpu,
        "gpu_count": gpu_count,
        "created_wall": plain_data(seen and seen.created_wall),
        "facts": {"is": FROM_INSTANCE, "hello": plain_data(ready.facts)} if ready else None,
    }
    if (nodes := offer.get("nodes", 1)) > 1:
        machine["nodes"] = nodes
    if (jobs := offer.get("jobs", 1)) > 1:
        machine["jobs"] = jobs
    if unreported and opened.endpoint is not None:
        machine["as_ordered"] = unreported
    if opened.endpoint:
        machine["endpoint"] = plain_data(opened.endpoint)
    return machine


def _describe_runtime(
    folder: RunFolder, rentals: Sequence[Rental], divided: TrainingSplit | None, *, is_seen: bool
) -> Runtime:
    """Return the billable seconds, by the clock that advanced more, their division into phases, and the plan's limits.

    `divided` has the machine's figures about the training phase; None for a command, of which they are not known. If
    `is_seen` is false, the run was in a notebook, whose seconds are unknown.
    """
    ended, spent = is_seen and are_costs_bounded(rentals), phases_s(rentals)
    rented = [rental for rental in rentals if rental.end != "refused"]
    billable_s = round(sum((rental.seconds for rental in rentals), 0.0), 3)
    return {
        "is": MEASURED if is_seen else UNKNOWN,
        "billable_s": billable_s if ended else None,
        "phases_s": spent,
        "training": {"is": FROM_INSTANCE, "seconds": divided.within(spent.get("training", 0.0)) if divided else None},
        "planned": planned_phases(rented[-1].intent, _read_plan(folder)) if rented else None,
    }


def _read_plan(folder: RunFolder) -> dict[str, Any]:
    """Return the plan's file as data; {} if it is lost or damaged, which the audit finds by its digest."""
    try:
        return read_object(folder.plan)
    except (OSError, ValueError):
        return {}


def _describe_cost(opened: RunOpened, rentals: Sequence[Rental]) -> Cost:
    """Return the upper bound of the cost, with its parts; it is unknown if the journal does not bound the cost."""
    cap = None if opened.cap_micros is None else Micros(opened.cap_micros)
    ended = are_costs_bounded(rentals) and not opened.imported
    upper: Micros | None = total(*(rental.micros for rental in rentals)) if ended else None
    figure = figure_of(rentals)
    billed = billed_by(rentals) if ended else None
    is_kept = None if cap is None or upper is None else is_cap_kept(rentals, upper, cap, opened.rules or 1)
    cost: Cost = {
        "upper_bound_micros": upper,
        "is": _choose_figure_word(opened, figure) if ended else UNKNOWN,
        "billed_micros": billed,
        "billed_is": UNKNOWN if billed is None else REPORTED,
        "worst_micros": opened.worst_micros,
        "cap_micros": cap,
        "cap_kept": is_kept,
        "rentals": [_describe_rental(rental) for rental in rentals],
        "says": NOT_OBSERVED if opened.imported else cost_says(rentals),
    }
    if any(rental.is_queued for rental in rentals):
        cost["gpu_hours"] = round(sum(rental.gpu_hours for rental in rentals), 4) if ended else None
    return cost


def _describe_rental(rental: Rental) -> RentalPaid:
    """Return a rental's entry in the costs; optional keys are present only if the rental has a value for them."""
    line: RentalPaid = {
        "attempt": rental.intent.attempt,
        "token": rental.token,
        "machines": rental.machines,
        "billable_s": rental.seconds if rental.ended else None,
        "billing_unit_s": rental.intent.billing_unit_s,
        "rate_micros_per_hour": rental.rate,
        "rate_is": "provider-limit" if rental.rate_is_limit else REPORTED if rental.rate_is_reported else "quoted",
        "micros": rental.micros if rental.ended else None,
        "end": rental.end,
    }
    if rental.end_is:
        line["end_is"] = rental.end_is
    if rental.extras:
        line["extras"] = [
            {
                "id": plain_data(extra.id),
                "billable_s": extra.seconds,
                "micros": rental.micros_of(extra),
                "ended": extra.ended,
            }
            for extra in rental.extras
        ]
    if rental.rises:
        line["price_rose"] = [
            {"rate_micros_per_hour": rise.micros_per_hour, "billable_s": rise.seconds} for rise in rental.rises
        ]
    return line


def _choose_figure_word(opened: RunOpened, figure: Figure) -> str:
    """Return the word for the kind of figure; for a run without a rules version it is always "measured"."""
    return MEASURED if opened.rules is None else str(figure)


def _describe_trials(evidence: Evidence, rentals: Sequence[Rental]) -> ReceiptTrials:
    """Return all trials and the best one. A trial has its last report and a share of the cost, by its seconds.

    The share is None if the cost is unknown, and 0 for a trial of an earlier run.
    """
    cost = total(*(rental.micros for rental in rentals)) if are_costs_bounded(rentals) else None
    own = [event for event in evidence.trials if not event.is_restored]
    whole_s = sum(event.seconds or 0.0 for event in own)
    rows: list[ReceiptTrial] = []
    for event in evidence.trials:
        paid_s = 0.0 if event.is_restored else event.seconds or 0.0
        row: ReceiptTrial = {
            "trial": event.trial or 0,
            "state": plain_line(event.state),
            "params": dict(event.params),
            "step": event.step,
            "steps": event.steps,
            "result": event.result,
            "tokens": event.tokens,
            "seconds": event.seconds,
            "micros": None if cost is None else share_of(cost, paid_s, whole_s),
        }
        if event.why:
            row["why"] = event.why
        if event.is_restored:
            row["restored"] = True
        rows.append(row)
    ranked = [event for event in evidence.trials if event.is_ranked]
    best = min(ranked, key=lambda event: (event.rank, event.trial), default=None)
    return {"is": FROM_INSTANCE, "best": best.trial if best else None, "rows": rows}


def _describe_training(records: Sequence[Record], evidence: Evidence, rentals: Sequence[Rental]) -> Training:
    seen, failed = last_typed(records, TrainObserved), failed_step(records)
    training: Training = {
        "outcome": seen.outcome if seen else "none",
        "reason": plain_line(seen.reason) if seen else "",
        "message": plain_line(seen.message) if seen else "",
        "exit_code": seen.exit_code if seen else None,
        "failed_step": plain_data(failed.model_dump(include={"step", "code", "message"})) if failed else None,
        "seconds": _measure_training(records),
        "device": evidence.device or UNKNOWN,
        "start": {"is": FROM_INSTANCE, "event": evidence.start},
        "figures": {"is": FROM_INSTANCE, **evidence.figures},
        "log": {"is": FROM_INSTANCE, "lines": evidence.lines},
    }
    if evidence.warnings and opened_of(records).trainer is not None:  # Receipts of an older gpurun do not have them.
        training["warnings"] = {"is": FROM_INSTANCE, "lines": evidence.warnings}
    if seen and seen.gpu_tally is not None:
        looks, busy, own, most_mib = (plain_data(seen.gpu_tally.get(key)) for key in _TALLY)
        training["gpu_use"] = {"is": FROM_INSTANCE, "looks": looks, "busy": busy, "own": own, "most_mib": most_mib}
    if seen and seen.sessions is not None:
        terminals, open_s, used_s = (plain_data(seen.sessions.get(key)) for key in _SESSIONS)
        training["sessions"] = {"is": FROM_INSTANCE, "terminals": terminals, "open_s": open_s, "used_s": used_s}
    if evidence.trials:
        training["trials"] = _describe_trials(evidence, rentals)
    return training


def _measure_training(records: Sequence[Record]) -> ReceiptMeasured:
    """Return how long the job ran until this computer observed its end, added up over all machines of a run that moved.

    If the machines' clocks show over SEEN_LATE_S less, that time is included, too. Rules before END_BY_MACHINE_CLOCK do
    neither.
    """
    is_whole = (opened_of(records).rules or 1) >= END_BY_MACHINE_CLOCK
    parts = by_machine(records) if is_whole else [records]
    times = [time for time in map(_measure_training_on_machine, parts) if time is not None]
    if not times:
        return {"is": UNKNOWN, "train_s": None}
    seconds = round(sum(seen_s for seen_s, _ in times), 3)
    line: ReceiptMeasured = {"is": MEASURED, "train_s": seconds}
    machine_s = round(sum(seen_s if own_s is None else own_s for seen_s, own_s in times), 3)
    if is_whole and 0 <= machine_s < seconds - SEEN_LATE_S:
        line["told_s"] = machine_s
    return line


def _measure_training_on_machine(records: Sequence[Record]) -> tuple[float, float | None] | None:
    """Return how long the job ran on one machine, by this computer's clock and by the machine's (None if not known).

    None if it did not run, or if its end was not observed.
    """
    started, ended = last_of(records, Event.TRAIN_STARTED), last_of(records, Event.TRAIN_OBSERVED)
    began, seen = last_typed(records, TrainStarted), last_typed(records, TrainObserved)
    if not (started and ended and began and seen and ended.seq > started.seq):
        return None
    # After the end, `drained_s` were used for downloads.
    seconds = round(max(0.0, elapsed_s(records, started, ended) - (number(seen.drained_s) or 0.0)), 3)
    began_wall, ended_wall = number(began.started_wall), number(seen.ended_wall)
    return seconds, None if began_wall is None or ended_wall is None else ended_wall - began_wall


def failed_step(records: Sequence[Record]) -> StepFailed | None:
    """Return the last failure of a step, except of a collect whose missing files came home while the machine was held.

    Failures before the run moved to its last machine do not count.
    """
    records = by_machine(records)[-1]
    held = next((place for place, record in enumerate(records) if record.event is Event.HOLD_INTENDED), len(records))
    is_home = any(not collected.missing for collected in all_typed(records[held:], CollectObserved))
    failed = all_typed(reversed(records), StepFailed)
    return next((failure for failure in failed if not (is_home and failure.step == "collect")), None)


def _describe_checkpoint(collected: FilesBrought | None, files: list[FileAtHome]) -> ReceiptCheckpoint:
    if collected is None:
        return {"latest": None, "best": None, "files": [], "missing": []}
    checkpoint: ReceiptCheckpoint = {
        "latest": plain_data(collected.latest),
        "best": plain_data(collected.best),
        "files": files,
        "missing": plain_data(collected.missing),
    }
    if collected.listed:
        checkpoint["listed"] = plain_data(collected.listed)
    if collected.missing_files:
        checkpoint["missing"] = plain_data(collected.missing[:NAMED])
        checkpoint["missing_files"] = plain_data(collected.missing_files)
    return checkpoint


def _describe_teardown(rentals: Sequence[Rental]) -> ReceiptTeardown:
    """Return the ends of all machines that may have existed, with the readings that prove them."""
    rented = [rental for rental in rentals if rental.end != "refused"]
    ends = [rental.end for rental in rented]
    how = "not_proven" if "not_proven" in ends else ends[-1] if ends else None
    return {"is": how, "evidence": [rental.proof() for rental in rented]}


def _choose_verdict(records: Sequence[Record], machine: ReceiptMachine | None, evidence: Evidence) -> Verdict:
    """Return the verdict; a run of an older gpurun, which recorded no challenge, has the verdict in its old form."""
    opened, seen = opened_of(records), last_typed(records, TrainObserved)
    outcome = seen.outcome if seen else "none"
    if not opened.has_model:
        return command_verdict(opened, machine, (seen and seen.gpu_tally) or {}, outcome)
    if opened.challenge is None:
        return older_verdict(evidence.device, outcome)
    return verdict_of(opened, machine, evidence.device, outcome)


def _list_incidents(records: Sequence[Record]) -> list[ReceiptIncident]:
    """Return the incidents with their times, including failed steps and repairs of the journal."""
    found: list[ReceiptIncident] = []
    is_older = opened_of(records).endpoint is None
    for record in (record for record in records if record.event in _INCIDENTS):
        match record.typed:
            case StepFailed() if is_older:
                continue
            case StepFailed(code=code, message=message) | Incident(code=code, message=message):
                found.append({"at": utc(record.wall), "code": plain_line(code), "message": plain_line(message)})
            case JournalRepaired(cut_bytes=cut_bytes):
                message = f"{cut_bytes} bytes of an unfinished record were cut"
                found.append({"at": utc(record.wall), "code": "journal.repaired", "message": message})
    return found
