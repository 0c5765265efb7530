"""Derives from a run folder what its receipt must say, with code that shares nothing with the code that wrote it.

Shared are only the base: canonical JSON, price arithmetic, and the rules that make text harmless. What differs between
this and a receipt is named by its path, such as `cost.upper_bound_micros`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpurun.core.clock import utc
from gpurun.core.money import left_of, total
from gpurun.core.paths import RunFolder
from gpurun.ledger.audit.lines import Json
from gpurun.ledger.audit.rentals import (
    MILESTONES,
    instance_of,
    is_more,
    named,
    proof_of,
    rental_facts,
    seconds_between,
    split_rentals,
)
from gpurun.ledger.audit.seconds import phases_of, planned_of, training_of
from gpurun.ledger.audit.words import Words, hear, told_in
from gpurun.ledger.untrusted import plain_data, plain_line

_SAYS = {
    "gpu": "ran on a GPU, as its log shows",
    "done": "smoke test complete, GPU run still pending",
    "stopped": "smoke test stopped early, GPU run still pending",
    "": "no training was completed, GPU run still pending",
}


def expected_statement(folder: RunFolder, records: Sequence[Json], head: str, seq: int, prev: str, keyid: Any) -> Json:
    """The statement that follows from a run folder, the basis of its journal and its place in the chain."""
    opened, words = records[0]["data"], hear(folder)
    collected = named(records, "salvage.observed") or named(records, "collect.observed")
    files = [] if not collected else [_file(one) for one in collected[-1]["data"]["files"]]
    shipped = named(records, "ship.observed")
    predicate = {
        "v": 1,
        "run": folder.name,
        "seq": seq,
        "prev": prev,
        "journal": {"head": head, "records": len(records)},
        "signing": {"keyid": keyid},
        "asked": {"mode": opened["mode"], "recipe": opened["recipe"]}
        | {"form": opened["form"], "provider": opened["provider"]}
        | {name: opened[name] for name in ("continues",) if opened.get(name)},
        "digests": {
            "request": opened["request_sha256"],
            "plan": opened["plan_sha256"],
            "recipe": opened["recipe_sha256"],
            "data": opened["data_sha256"],
            "trainer": opened["bundle_sha256"],
            "shipped": shipped[-1]["data"]["manifest_sha256"] if shipped else "unknown",
            "log": _sized(folder.log),
            "events": _sized(folder.events),
        },
        "shipping": _shipping(named(records, "stage.observed"), shipped),
        "gpurun": {"version": opened["gpurun_version"]},
        "platform": plain_data(opened["platform"]) if "platform" in opened else "unknown",
        "verdict": _verdict(records, words),
        "incidents": list(_incidents(records)),
        "sample": words.sample,
        "checkpoint": _checkpoint(collected, files),
        **_machine_part(folder, records),
        "training": _training(records, words),
    }
    subjects = [one for one in files if one["kind"] in ("weights", "optimizer", "state")]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "predicateType": "https://gpurun.dev/receipt/v1",
        "subject": [{"name": one["name"], "digest": {"sha256": one["sha256"]}} for one in subjects],
        "predicate": predicate,
    }


def _machine_part(folder: RunFolder, records: Sequence[Json]) -> Json:
    """Everything that follows from the rentals: machine, times, money and its end."""
    opened, rentals = records[0]["data"], split_rentals(records)
    facts = [rental_facts(rental) for rental in rentals]
    live = is_more(records) or any(one["end"] == "not_proven" for one in facts)
    spent, cap = None if live else total(*(one["micros"] for one in facts)), opened["cap_micros"]
    ends = [one["end"] for one in facts if one["end"] != "refused"]
    billable = sum((Decimal(str(one["billable_s"])) for one in facts), Decimal(0))
    phases = phases_of(rentals, facts)
    training = training_of(told_in(folder), phases.get("training", 0.0))
    hidden = {"billable_s": None, "micros": None}
    stamps = {name: named(records, event) for name, event in MILESTONES.items()}
    times_seen = {
        name: utc(at[0 if name == "asked" else -1]["wall"]) if at else "unknown" for name, at in stamps.items()
    }
    return {
        "instance": instance_of(rentals),
        "timeline": {"is": "measured", **times_seen},
        "runtime": {
            "is": "measured",
            "billable_s": None if live else float(billable),
            "phases_s": phases,
            "training": {"is": "instance-reported", "seconds": training},
            "planned": planned_of(folder, rentals, facts),
        },
        "cost": {
            "upper_bound_micros": spent,
            "is": "unknown" if live else "measured",
            "billed_micros": None,
            "billed_is": "unknown",
            "worst_micros": opened["worst_micros"],
            "cap_micros": cap,
            "cap_kept": None if cap is None or spent is None else left_of(cap, spent) >= 0,
            "rentals": [{**one, **hidden} if one["end"] == "not_proven" else one for one in facts],
        },
        "teardown": {
            "is": "not_proven" if "not_proven" in ends else (ends or [None])[-1],
            "evidence": [
                proof_of(rental, one) for rental, one in zip(rentals, facts, strict=True) if one["end"] != "refused"
            ],
        },
    }


def _training(records: Sequence[Json], words: Words) -> Json:
    started, seen = named(records, "train.started"), named(records, "train.observed")
    failures = named(records, "step.failed")
    end = seen[-1]["data"] if seen else {"outcome": "none", "reason": "", "message": "", "exit_code": None}
    known = bool(started and seen and started[-1]["seq"] < seen[-1]["seq"])
    seconds = float(seconds_between(records, started[-1]["seq"], seen[-1]["seq"])) if known else None
    failed = (
        {key: plain_data(failures[-1]["data"].get(key)) for key in ("step", "code", "message")} if failures else None
    )
    return {
        "outcome": end["outcome"],
        "reason": plain_line(str(end["reason"])),
        "message": plain_line(str(end["message"])),
        "exit_code": end["exit_code"],
        "failed_step": failed,
        "seconds": {"is": "measured" if known else "unknown", "train_s": seconds},
        "device": words.device or "unknown",
        "start": {"is": "instance-reported", "event": words.start},
        "figures": {"is": "instance-reported", **words.figures},
        "log": {"is": "instance-reported", "lines": words.lines},
    }


def _verdict(records: Sequence[Json], words: Words) -> Json:
    if words.device == "cuda":
        return {"is": "gpu", "says": _SAYS["gpu"]}
    ends = [record["data"]["outcome"] for record in named(records, "train.observed")]
    complete = ends[-1] if ends and words.device == "cpu" else ""
    return {"is": "smoke", "says": _SAYS.get(complete, _SAYS[""])}


def _file(file: Json) -> Json:
    return {key: plain_data(file[key]) if key in file else None for key in ("kind", "step", "name", "bytes", "sha256")}


def _shipping(staged: Sequence[Json], shipped: Sequence[Json]) -> Json:
    bucket = staged[-1]["data"] if staged else {"url": None, "sent_bytes": None}
    ways = shipped[-1]["data"] if shipped else {}
    way = {"to_bucket_bytes": bucket["sent_bytes"], "from_bucket_bytes": ways.get("pulled_bytes")}
    return {"is": "measured", "bucket": plain_data(bucket["url"]), "by_ssh_bytes": ways.get("sent_bytes"), **way}


def _checkpoint(collected: Sequence[Json], files: list[Json]) -> Json:
    data = collected[-1]["data"] if collected else {"latest": None, "best": None, "missing": []}
    return {"files": files, **{key: plain_data(data[key]) for key in ("latest", "best", "missing")}}


def _incidents(records: Sequence[Json]) -> Iterator[Json]:
    for record in records:
        data, at = record["data"], {"at": utc(record["wall"])}
        if record["event"] == "incident":
            yield {**at, "code": plain_line(str(data["code"])), "message": plain_line(str(data["message"]))}
        if record["event"] == "journal.repaired":
            message = f"{data['cut_bytes']} bytes of an unfinished record were cut"
            yield {**at, "code": "journal.repaired", "message": message}


def _sized(path: Path) -> Json:
    return {"bytes": path.stat().st_size if path.is_file() else None, "sha256": sha256_of(path)}


def sha256_of(path: Path) -> str:
    """The digest of a file, taken in blocks; "unknown" when it is not there."""
    if not path.is_file():
        return "unknown"
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def differences(expected: Any, found: Any, path: str = "") -> Iterator[str]:
    """The paths at which two pieces of JSON differ; a number of another type (1 and 1.0, 1 and true) differs too."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted(expected.keys() | found.keys()):
            below = f"{path}.{key}" if path else str(key)
            if key in expected and key in found:
                yield from differences(expected[key], found[key], below)
            else:
                yield below
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for place, (one, other) in enumerate(zip(expected, found, strict=True)):
            yield from differences(one, other, f"{path}[{place}]")
    elif type(expected) is not type(found) or expected != found:
        yield path or "the statement"
