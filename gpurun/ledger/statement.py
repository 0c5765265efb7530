"""Derives a run's statement from its folder: what was asked, what ran, what it cost, how it ended.

A pure function of the journal, the trainer's files and the place in the chain: no clock and no machine is asked, so a
receipt that was lost is made again byte for byte. docs/RECEIPTS.md has every field. Each group of figures says what it
rests on: "measured" (this laptop's clock), "provider-reported", "instance-reported", "planned" or "unknown".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpurun.core.clock import utc
from gpurun.core.collected_record import HERE, NAMED, CheckpointTold, FileAtHome
from gpurun.core.journal_records import Event, Record
from gpurun.core.money import Figure, Micros, left_of, total
from gpurun.core.paths import RunFolder
from gpurun.core.receipt_record import (
    UNKNOWN,
    Asked,
    Cost,
    Digests,
    Incident,
    Machine,
    Predicate,
    RentalPaid,
    Runtime,
    Shipping,
    Statement,
    Subject,
    TeardownTold,
    Training,
    Verdict,
)
from gpurun.core.receipt_rules import rules_of
from gpurun.core.run_plan import terms_in
from gpurun.core.untrusted import number, plain_data, plain_line, read_object
from gpurun.ledger.billed_time import elapsed_s, last_of
from gpurun.ledger.log_facts import Evidence, command_verdict, older_verdict, read_evidence, verdict_of
from gpurun.ledger.paid_phases import TrainingSplit, phases_s, planned, timeline
from gpurun.ledger.rental import Rental, all_bounded, billed_by, cost_says, figure_of, rentals_of

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://gpurun.dev/receipt/v1"
MEASURED, REPORTED, FROM_INSTANCE = "measured", "provider-reported", "instance-reported"

NOT_OBSERVED = "not observed: it ran in a notebook, which its user ends"

# What may follow the end of a rental and changes nothing about it.
_AFTERWARDS = {Event.STOP_REQUESTED, Event.JOURNAL_REPAIRED, Event.RECEIPT_OBSERVED, Event.RUN_CLOSED}
_CAME = {"type": "type_id", "region": "region", "gpu": "gpu", "gpu_count": "gpu_count"}
_CHECKPOINT_KINDS = ("weights", "optimizer", "state", "checkpoint", "output")
_TALLY = ("looks", "busy", "own", "most_mib")


def basis_of(records: Sequence[Record]) -> list[Record]:
    """The records that a receipt rests on: up to the last that says something about the rental, none after itself."""
    observed = [place for place, record in enumerate(records) if record.event is Event.RECEIPT_OBSERVED]
    kept = list(records[: observed[0]] if observed else records)
    while len(kept) > 1 and kept[-1].event in _AFTERWARDS:
        kept.pop()
    return kept


def build_statement(
    folder: RunFolder, records: Sequence[Record], *, head: str, seq: int, prev: str, keyid: str | None
) -> Statement:
    """The in-toto Statement of a run. `records` are its `basis_of`, `head` the sha256 of the last one's line."""
    evidence = read_evidence(folder)
    opened, rentals = records[0].data, rentals_of(records)
    is_imported = bool(opened.get("imported"))
    # Rules 1 divided a command's time as if it were a training.
    divided = None if not terms_in(opened).has_model and rules_of(opened) > 1 else evidence.split
    instance = _instance(records, rentals)
    collected = last_of(records, Event.SALVAGE_OBSERVED) or last_of(records, Event.COLLECT_OBSERVED)
    files = [_file(one) for one in collected.data["files"]] if collected else []
    predicate: Predicate = {
        "v": 1,
        "run": opened["run"],
        "seq": seq,
        "prev": prev,
        "journal": {"head": head, "records": len(records)},
        "signing": {"keyid": keyid},
        "asked": _asked(opened),
        "digests": _digests(opened, records, evidence),
        "shipping": _shipping(records),
        "gpurun": {"version": opened["gpurun_version"]},
        "platform": plain_data(opened.get("platform", UNKNOWN)),
        "instance": instance,
        "timeline": timeline(records),
        "runtime": _runtime(folder, rentals, divided, is_seen=not is_imported),
        "cost": _cost(opened, rentals),
        "training": _training(records, evidence),
        "checkpoint": _checkpoint(collected, files),
        "sample": evidence.sample,
        "teardown": {"is": "user_operated", "evidence": []} if is_imported else _teardown(rentals),
        "verdict": _verdict(records, instance, evidence),
        "incidents": _incidents(records),
    }
    if "rules" in opened:
        predicate["rules"] = opened["rules"]
    return {
        "_type": STATEMENT_TYPE,
        "subject": _subjects(files, predicate["checkpoint"]),
        "predicateType": PREDICATE_TYPE,
        "predicate": predicate,
    }


def _subjects(files: list[FileAtHome], checkpoint: CheckpointTold) -> list[Subject]:
    """What the receipt is about, by digest; of very many files the list of all stands beside the first."""
    found = {file["name"]: file["sha256"] for file in files if file["kind"] in _CHECKPOINT_KINDS}
    if "listed" in checkpoint:
        found[HERE] = checkpoint["listed"]["sha256"]
    return [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in found.items()]


def _asked(opened: dict[str, Any]) -> Asked:
    """What was to be done, and from which checkpoint of which run it went on, if it did."""
    mode, recipe, form, provider = (opened[key] for key in ("mode", "recipe", "form", "provider"))
    asked: Asked = {"mode": mode, "recipe": recipe, "form": form, "provider": provider}
    if opened.get("continues"):
        asked["continues"] = opened["continues"]
    if opened.get("challenge"):
        asked["challenge"] = plain_line(str(opened["challenge"]))
    if opened.get("command"):
        asked["command"] = plain_data(opened["command"])
    if opened.get("job"):
        asked["job"] = plain_line(str(opened["job"]))
    if opened.get("trainer"):
        asked["trainer"] = opened["trainer"]
    if "max_gpu_hours" in opened:
        asked["max_gpu_hours"] = opened["max_gpu_hours"]
    if opened.get("imported"):
        asked["imported"] = plain_data(opened["imported"])
    return asked


def _file(file: dict[str, Any]) -> FileAtHome:
    name, size, sha256, kind, step = (plain_data(file.get(key)) for key in ("name", "bytes", "sha256", "kind", "step"))
    if "%" in str(file.get("name")):  # One that is escaped is harmless, however long.
        name = str(file["name"])
    return {"name": name, "bytes": size, "sha256": sha256, "kind": kind, "step": step}


def _digests(opened: dict[str, Any], records: Sequence[Record], evidence: Evidence) -> Digests:
    shipped = last_of(records, Event.SHIP_OBSERVED)
    digests: Digests = {
        "request": opened["request_sha256"],
        "plan": opened["plan_sha256"],
        "recipe": opened["recipe_sha256"],
        "data": opened["data_sha256"],
        "trainer": opened["bundle_sha256"],
        "shipped": shipped.data["manifest_sha256"] if shipped else UNKNOWN,
        "log": evidence.log,
        "events": evidence.events,
    }
    if bundle := opened.get("core_bundle_sha256"):
        digests["core_bundle"] = bundle
    return digests


def _shipping(records: Sequence[Record]) -> Shipping:
    """Which bytes went which way, as sent: over SSH, to the bucket before renting, from the bucket to the machine.

    Where the machine downloaded the shards itself, `public` names their set.
    """
    staged, shipped = last_of(records, Event.STAGE_OBSERVED), last_of(records, Event.SHIP_OBSERVED)
    there, ways = (staged.data if staged else {}), (shipped.data if shipped else {})
    ready = last_of(records, Event.READY_OBSERVED)
    early_bytes = ready.data.get("sent_bytes", 0) if ready else 0  # While a job waited in its queue.
    told: Shipping = {
        "is": MEASURED,
        "by_ssh_bytes": ways["sent_bytes"] + early_bytes if "sent_bytes" in ways else None,
        "bucket": plain_data(there.get("url")),
        "to_bucket_bytes": there.get("sent_bytes"),
        "from_bucket_bytes": ways.get("pulled_bytes"),
    }
    if "public" in ways:
        told |= {"public": plain_data(ways["public"]), "public_bytes": ways["public_bytes"]}
    return told


def _instance(records: Sequence[Record], rentals: Sequence[Rental]) -> Machine | None:
    """The last machine: what came by the provider's word, and what it says of itself.

    What the provider did not tell is named in `as_ordered`.
    """
    made = [rental for rental in rentals if rental.instance is not None]
    if not made:
        return None
    rental, seen = made[-1], made[-1].instance or {}
    ready = rental.last(Event.READY_OBSERVED)
    offer, opened = rental.intent.data["offer"], records[0].data
    came = {ours: rental.told(theirs) for ours, theirs in _CAME.items()}
    ordered = {ours: offer[theirs] for ours, theirs in _CAME.items()}
    if "endpoint" not in opened:  # An older gpurun named the type that was ordered.
        came["type"] = None
    untold = sorted(name for name in _CAME if not came[name] and ordered[name])
    kind, region, gpu, gpu_count = (plain_data(came[name]) or ordered[name] for name in _CAME)
    machine: Machine = {
        "is": REPORTED,
        "provider": rental.intent.data["provider"],
        "id": plain_data(seen.get("id")),
        "token": rental.token,
        "type": kind,
        "region": region,
        "gpu": gpu,
        "gpu_count": gpu_count,
        "created_wall": plain_data(seen.get("created_wall")),
        "facts": {"is": FROM_INSTANCE, "hello": plain_data(ready.data["facts"])} if ready else None,
    }
    if (nodes := offer.get("nodes", 1)) > 1:
        machine["nodes"] = nodes
    if untold and "endpoint" in opened:
        machine["as_ordered"] = untold
    if opened.get("endpoint"):
        machine["endpoint"] = plain_data(opened["endpoint"])
    return machine


def _runtime(folder: RunFolder, rentals: Sequence[Rental], divided: TrainingSplit | None, *, is_seen: bool) -> Runtime:
    """Seconds, by the widest reading of this laptop's clocks, where they went, and what the plan had for it.

    How the training phase divides is the machine's word; what a command does with its time is not known. Of a
    notebook's session nothing was seen (`is_seen`).
    """
    ended, spent = is_seen and all_bounded(rentals), phases_s(rentals)
    rented = [rental for rental in rentals if rental.end != "refused"]
    billable_s = round(sum((rental.seconds for rental in rentals), 0.0), 3)
    return {
        "is": MEASURED if is_seen else UNKNOWN,
        "billable_s": billable_s if ended else None,
        "phases_s": spent,
        "training": {"is": FROM_INSTANCE, "seconds": divided.within(spent.get("training", 0.0)) if divided else None},
        "planned": planned(rented[-1].intent.data, _plan_of(folder)) if rented else None,
    }


def _plan_of(folder: RunFolder) -> dict[str, Any]:
    """The plan as data; one that is lost or broken says nothing, and its digest in the journal says that it is."""
    try:
        return read_object(folder.plan)
    except (OSError, ValueError):
        return {}


def _cost(opened: dict[str, Any], rentals: Sequence[Rental]) -> Cost:
    """What the run cost at most; unknown where the journal does not bound it."""
    cap, ended = opened["cap_micros"], all_bounded(rentals) and not opened.get("imported")
    upper: Micros | None = total(*(rental.micros for rental in rentals)) if ended else None
    figure = figure_of(rentals)
    billed = billed_by(rentals) if ended else None
    is_kept = None if cap is None or upper is None else left_of(cap, upper) >= 0
    cost: Cost = {
        "upper_bound_micros": upper,
        "is": _figure_by_rules(opened, figure) if ended else UNKNOWN,
        "billed_micros": billed,
        "billed_is": UNKNOWN if billed is None else REPORTED,
        "worst_micros": opened["worst_micros"],
        "cap_micros": cap,
        "cap_kept": None
        if figure is Figure.BOUND and not is_kept
        else is_kept,  # No bound that nobody saw shows that it was broken.
        "rentals": [_rental(rental) for rental in rentals],
        "says": NOT_OBSERVED if opened.get("imported") else cost_says(rentals),
    }
    if any(rental.is_queued for rental in rentals):
        cost["gpu_hours"] = round(sum(rental.gpu_hours for rental in rentals), 4) if ended else None
    return cost


def _rental(rental: Rental) -> RentalPaid:
    """One line of the costs; what only some rentals have is there only in those."""
    told: RentalPaid = {
        "attempt": rental.intent.data["attempt"],
        "token": rental.token,
        "machines": rental.machines,
        "billable_s": rental.seconds if rental.ended else None,
        "billing_unit_s": rental.intent.data["billing_unit_s"],
        "rate_micros_per_hour": rental.rate,
        "rate_is": REPORTED if rental.rate_is_reported else "quoted",
        "micros": rental.micros if rental.ended else None,
        "end": rental.end,
    }
    if rental.end_is:
        told["end_is"] = rental.end_is
    if rental.extras:
        told["extras"] = [
            {"id": plain_data(one.id), "billable_s": one.seconds, "micros": rental.micros_of(one), "ended": one.ended}
            for one in rental.extras
        ]
    if rental.rises:
        told["price_rose"] = [
            {"rate_micros_per_hour": one.micros_per_hour, "billable_s": one.seconds} for one in rental.rises
        ]
    return told


def _figure_by_rules(opened: dict[str, Any], figure: Figure) -> str:
    """What the bound is called; by rules 1 one that nobody saw was "measured", too."""
    return MEASURED if "rules" not in opened else str(figure)


def _training(records: Sequence[Record], evidence: Evidence) -> Training:
    started, seen = last_of(records, Event.TRAIN_STARTED), last_of(records, Event.TRAIN_OBSERVED)
    failed = _failed_step(records)
    seconds = elapsed_s(records, started, seen) if started and seen and seen.seq > started.seq else None
    if seen and seconds is not None:  # What was fetched after the end was no training.
        seconds = round(max(0.0, seconds - (number(seen.data.get("drained_s")) or 0.0)), 3)
    told: Training = {
        "outcome": seen.data["outcome"] if seen else "none",
        "reason": plain_line(str(seen.data["reason"])) if seen else "",
        "message": plain_line(str(seen.data["message"])) if seen else "",
        "exit_code": seen.data["exit_code"] if seen else None,
        "failed_step": {key: plain_data(failed.get(key)) for key in ("step", "code", "message")} if failed else None,
        "seconds": {"is": MEASURED if seconds is not None else UNKNOWN, "train_s": seconds},
        "device": evidence.device or UNKNOWN,
        "start": {"is": FROM_INSTANCE, "event": evidence.start},
        "figures": {"is": FROM_INSTANCE, **evidence.figures},
        "log": {"is": FROM_INSTANCE, "lines": evidence.lines},
    }
    if evidence.warnings and "trainer" in records[0].data:  # The receipts of an older gpurun do not have them.
        told["warnings"] = {"is": FROM_INSTANCE, "lines": evidence.warnings}
    if seen and "gpu_tally" in seen.data:
        looks, busy, own, most_mib = (plain_data(seen.data["gpu_tally"].get(key)) for key in _TALLY)
        told["gpu_use"] = {"is": FROM_INSTANCE, "looks": looks, "busy": busy, "own": own, "most_mib": most_mib}
    return told


def _failed_step(records: Sequence[Record]) -> dict[str, Any] | None:
    """The last step that failed, but for a collect of which all came home while the machine was held."""
    place, home = 0, False
    for record in records:
        if record.event is Event.HOLD_INTENDED:
            place = record.seq
        home = home or (bool(place) and record.event is Event.COLLECT_OBSERVED and not record.data["missing"])
    failed = (one.data for one in reversed(records) if one.event is Event.STEP_FAILED)
    return next((one for one in failed if not (home and one["step"] == "collect")), None)


def _checkpoint(collected: Record | None, files: list[FileAtHome]) -> CheckpointTold:
    if collected is None:
        return {"latest": None, "best": None, "files": [], "missing": []}
    data = collected.data
    told: CheckpointTold = {
        "latest": plain_data(data["latest"]),
        "best": plain_data(data["best"]),
        "files": files,
        "missing": plain_data(data["missing"]),
    }
    if "listed" in data:
        told["listed"] = plain_data(data["listed"])
    if "missing_files" in data:
        told["missing"], told["missing_files"] = plain_data(data["missing"][:NAMED]), plain_data(data["missing_files"])
    return told


def _teardown(rentals: Sequence[Rental]) -> TeardownTold:
    """How every machine that may have existed came to its end, with the reads that prove it."""
    rented = [rental for rental in rentals if rental.end != "refused"]
    ends = [rental.end for rental in rented]
    how = "not_proven" if "not_proven" in ends else ends[-1] if ends else None
    return {"is": how, "evidence": [rental.proof() for rental in rented]}


def _verdict(records: Sequence[Record], machine: Machine | None, evidence: Evidence) -> Verdict:
    """Older runs, which were opened without a challenge or the lack of one, have the verdict of their time."""
    opened, seen = records[0].data, last_of(records, Event.TRAIN_OBSERVED)
    outcome = seen.data["outcome"] if seen else "none"
    if not terms_in(opened).has_model:
        return command_verdict(opened, machine, (seen.data.get("gpu_tally") if seen else None) or {}, outcome)
    if "challenge" not in opened:
        return older_verdict(evidence.device, outcome)
    return verdict_of(opened, machine, evidence.device, outcome)


def _incidents(records: Sequence[Record]) -> list[Incident]:
    """What should not have happened, with when; a step that failed and a repaired journal are among them."""
    found: list[Incident] = []
    kinds = {Event.INCIDENT} | ({Event.STEP_FAILED} if "endpoint" in records[0].data else set())
    for record in records:
        if record.event in kinds:
            code, message = str(record.data["code"]), str(record.data["message"])
            found.append({"at": utc(record.wall), "code": plain_line(code), "message": plain_line(message)})
        elif record.event is Event.JOURNAL_REPAIRED:
            message = f"{record.data['cut_bytes']} bytes of an unfinished record were cut"
            found.append({"at": utc(record.wall), "code": "journal.repaired", "message": message})
    return found
