"""What a journal record or a trainer's event says, in words; the plain lines and the live view share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gpurun.core.artifact_names import shown
from gpurun.core.clock import local_minute
from gpurun.core.job_terms import TRAINER, JobTerms
from gpurun.core.money import Micros, format_rate, format_usd
from gpurun.core.trainer_events import (
    Alert,
    Checkpoint,
    CoreScore,
    Evaluation,
    Outputs,
    Sample,
    Start,
    Step,
    Stop,
    TrainerEvent,
)
from gpurun.core.untrusted import number, safe_line, whole
from gpurun.view.number_format import (
    UNKNOWN,
    format_bytes,
    format_cards,
    format_count,
    format_duration,
    format_files,
    format_loss,
    format_percent,
    format_small,
    format_whole,
    short_hash,
)
from gpurun.view.styled_text import clip

if TYPE_CHECKING:
    from gpurun.core.journal_records import Record

PHASES = ("plan", "provision", "ship", "run", "collect", "destroy", "receipt")

# Which phase a record belongs to, and whether it begins, goes on in or ends it. Together they name every event.
BEGINS = {
    "create.intended": "provision",
    "ship.intended": "ship",
    "train.intended": "run",
    "collect.intended": "collect",
    "hold.intended": "collect",
    "destroy.intended": "destroy",
    "salvage.intended": "collect",
    "receipt.observed": "receipt",
}
GOES_ON = {
    "stage.intended": "plan",
    "stage.observed": "plan",
    "create.observed": "provision",
    "create.refused": "provision",
    "create.unknown": "provision",
    "train.started": "run",
    "rate.observed": "run",
    "destroy.asked": "destroy",
    "death.read": "destroy",
    "bill.observed": "receipt",
}
ENDS = {
    "run.opened": "plan",
    "ready.observed": "provision",
    "ship.observed": "ship",
    "train.observed": "run",
    "collect.observed": "collect",
    "hold.observed": "collect",
    "salvage.observed": "collect",
    "death.proven": "destroy",
    "run.closed": "receipt",
}
FELL = ("failed", "lost")
"""The outcomes of a training that are no end of it."""
_MOST_NAMED = 6
_STOPS = {"done": "ended: done", "failed": "ended: failed"}
SILENT, HEARD = "machine.silent", "machine.heard"
"""The incidents of a machine that trains and has not answered for minutes, and of its first answer after that."""
JOB_SILENT, JOB_HEARD = "job.silent", "job.heard"
"""The incidents of a job that has written nothing for long, and of its first word after that."""
APART = frozenset({"stop.requested", "step.failed", "incident", "journal.repaired"})


def tell_record(record: Record, terms: JobTerms = TRAINER) -> str:
    """Return one clause without a full stop, in the job's `terms`. Names from the far side inside it are harmless."""
    name = str(record.event)
    if name in _OF_THE_JOB:
        return _OF_THE_JOB[name](record.data, terms)
    teller = _TELLERS.get(name)
    return teller(record.data) if teller else f"{record.event}, which a newer gpurun wrote and this one does not know"


def is_alarming(record: Record) -> bool:
    """Whether a person should look up."""
    if str(record.event) == "rate.observed":
        return record.data.get("finishes") is False
    if str(record.event) == "train.observed":
        return record.data.get("outcome") in FELL
    return str(record.event) in ("step.failed", "incident", "journal.repaired", "create.unknown", "hold.intended")


def _text(data: Mapping[str, Any], key: str, otherwise: str = "") -> str:
    value = data.get(key)
    return otherwise if value is None or value == "" else safe_line(str(value).replace("\n", " "))


def _instance(data: Mapping[str, Any]) -> str:
    instance = data.get("instance")
    return _text(instance, "id", "it") if isinstance(instance, Mapping) else _text(data, "id", "it")


def _teardown(data: Mapping[str, Any]) -> str:
    """How death was proven; the word destroyed is kept for the teardown that is one."""
    how = {
        "destroyed": "destroyed, proven gone",
        "processes_killed_host_kept": "every process ended, proven; this machine stays",
        "released": "released, proven gone from Slurm",
        "stopped_disk_billed": "stopped; its disk is still billed",
        "expires_at": "left to expire by itself",
        "user_operated": "left running: ending it is yours to do",
        "not_proven": "NOT proven gone",
    }.get(_text(data, "teardown"), "proven gone")
    reads = data.get("reads")
    return f"{how} ({reads} {'read' if reads == 1 else 'reads'})" if isinstance(reads, int) else how


def _step(data: Mapping[str, Any]) -> str:
    """A step of the driver in words; one that is not known by its own name."""
    name = _text(data, "step", "a step")
    return {"create": "getting a machine", "await_ready": "getting the machine ready"}.get(name, name)


def _asked_to_die(data: Mapping[str, Any]) -> str:
    attempt = _text(data, "attempt", "1")
    if data.get("taken", True):  # An older gpurun did not record it.
        return f"asked to die, attempt {attempt}"
    return f"no request for its end was taken, attempt {attempt}: {_text(data, 'answer')}"


def _ready(data: Mapping[str, Any]) -> str:
    """That it answers; of several nodes how many, and how fast they reach one another."""
    network, others = data.get("network"), data.get("not_passed")
    if isinstance(others, list) and others:
        names = ", ".join(map(str, others[:_MOST_NAMED])) + (" and more" if others[_MOST_NAMED:] else "")
        return f"{_ready({**data, 'not_passed': None})}; not passed on to the job (--pass-env): {safe_line(names)}"
    if not isinstance(network, Mapping) or not isinstance(nodes := network.get("nodes"), list):
        return "the machine answers"
    rate = number(network.get("gigabytes_per_s"))
    return f"all {len(nodes)} nodes answer" + (f", {rate:.2g} GB/s between them" if rate is not None else "")


def _ended(data: Mapping[str, Any], terms: JobTerms) -> str:
    """Return how the work ended, with the reason where that says more; of one that failed, in its own words."""
    outcome, reason = _text(data, "outcome", "ended"), _text(data, "reason")
    is_worded = outcome in FELL or "elsewhere" in (data.get("outputs") or {})
    why = _text(data, "message") if is_worded else ""
    ended = f"{terms.work} ended: {outcome}" + (f" ({reason})" if reason not in ("", outcome) else "")
    return f"{ended}: {why}" if why else ended


def _asked(data: Mapping[str, Any]) -> str:
    """Which offer is asked for, and its price; of an offer that an older gpurun wrote, what there is."""
    offer = data.get("offer")
    asked = f"asking {_text(data, 'provider', 'the provider')} for"
    if not isinstance(offer, Mapping) or not whole(offer.get("gpu_count")):
        return f"{asked} a machine"
    region, rate = _text(offer, "region"), whole(data.get("rate_micros_per_hour"))
    where = f" in {region}" if region not in ("", "any") else ""
    spot = ", spot" if offer.get("spot") is True else ""
    price = f" at {format_rate(Micros(rate))}" if rate else ""
    cards = format_cards(_text(offer, "gpu", "GPU"), whole(offer.get("gpu_count")) or 0, whole(offer.get("nodes")) or 1)
    return f"{asked} {cards}{where}{spot}{price}"


def _shipped(data: Mapping[str, Any]) -> str:
    size, files = number(data.get("bytes")), whole(data.get("files"))
    amount = "" if size is None else f" {format_bytes(size)}"
    return f"shipped{amount}" + ("" if files is None else f" in {format_files(files)}") + ", digests verified"


def _staging(data: Mapping[str, Any]) -> str:
    size = number(data.get("bytes"))
    amount = "" if size is None else f"{format_bytes(size)} "
    return f"putting {amount}into {_text(data, 'url', 'the bucket')} before anything is rented"


def _staged(data: Mapping[str, Any]) -> str:
    there, sent = number(data.get("there_bytes")) or 0, number(data.get("sent_bytes")) or 0
    return f"in {_text(data, 'url', 'the bucket')}: {format_bytes(there)} was there, {format_bytes(sent)} sent"


def tell_rate(data: Mapping[str, Any], terms: JobTerms = TRAINER) -> str:
    """Return what was measured and what it means: when the work ends and what all of it costs, or how far it gets."""
    left_s, step = number(data.get("left_s")), whole(data.get("ends_at_step"))
    expected, cap, needed = (whole(data.get(key)) for key in ("expected_micros", "cap_micros", "needed_micros"))
    measured = f"measured {tell_pace(data)}"
    if data.get("finishes") is True:
        costs = f", about {format_usd(Micros(expected))} in all" if expected else ""
        holds = f"; the cap of {format_usd(Micros(cap))} holds" if expected and cap else ""
        return f"{measured}: ends in {format_duration(left_s or 0)}{costs}{holds}"
    steps = whole(data.get("steps")) or 0
    share = f" ({format_percent((step or 0) / steps)})" if steps else ""
    far = f"does not finish: it ends at step {format_whole(step or 0)} of {format_whole(steps)}{share}"
    would = f"to finish takes {format_duration(left_s or 0)} more"
    under = f", under a cap of {format_usd(Micros(needed))}" if needed else ""
    return f"{measured}, {far}; {would}{under}; {terms.verb} --from goes on later"


def tell_pace(data: Mapping[str, Any]) -> str:
    """Return the speed that was measured: in tokens, where they are known."""
    speed = number(data.get("tokens_per_s"))
    return f"{number(data.get('step_s')) or 0.0:.3g} s a step" if speed is None else f"{format_count(speed)} tok/s"


def _collected(data: Mapping[str, Any]) -> str:
    files, missing = data.get("files"), data.get("missing")
    listed, lost_files = data.get("listed"), data.get("missing_files")
    here = listed["files"] if isinstance(listed, dict) else len(files) if isinstance(files, list | tuple) else None
    count = f" {format_files(here)}" if isinstance(here, int) else ""
    lost = ""
    if isinstance(missing, list | tuple) and missing:
        more = " and more" if missing[_MOST_NAMED:] else ""
        number = lost_files["files"] if isinstance(lost_files, dict) else len(missing)
        lost = f", {number} MISSING: {', '.join(shown(str(name)) for name in missing[:_MOST_NAMED])}{more}"
    if not files and not lost:
        return "collected no files: there were none"
    return f"collected{count}, digests verified{lost}"


def _clock(data: Mapping[str, Any]) -> str:
    """The minute until which a machine is held, by this computer's clock."""
    until_wall = number(data.get("until_wall"))
    return UNKNOWN if until_wall is None else local_minute(until_wall, now=until_wall)


def _unheld(data: Mapping[str, Any]) -> str:
    """Why a machine is held no longer."""
    how = {
        "home": "all that was missing is at home",
        "gone": "it runs no more",
        "over": "its time is over",
    }.get(_text(data, "how"), "it was ended")
    return f"the machine is held no longer: {how}"


def _billed(data: Mapping[str, Any]) -> str:
    amount = data.get("micros")
    return f"its provider has billed {format_usd(Micros(amount)) if type(amount) is int else UNKNOWN}, by two readings"


_OF_THE_JOB: dict[str, Callable[[Mapping[str, Any], JobTerms], str]] = {
    "train.intended": lambda d, terms: f"starting {terms.worker}",
    "train.started": lambda d, terms: terms.doing,
    "rate.observed": tell_rate,
    "train.observed": _ended,
    "collect.intended": lambda d, terms: f"bringing the {terms.files} home",
}
_TELLERS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "run.opened": lambda d: f"run opened: {_text(d, 'recipe', 'a recipe')} on {_text(d, 'provider', 'a provider')}",
    "stage.intended": _staging,
    "stage.observed": _staged,
    "create.intended": lambda d: _asked(d),
    "create.observed": lambda d: f"the machine exists: {_instance(d)}",
    "create.refused": lambda d: f"no machine was made: {_text(d, 'message', _text(d, 'reason', 'refused'))}",
    "create.unknown": lambda d: f"no clear answer, looking for the machine by its token: {_text(d, 'message')}",
    "ready.observed": lambda d: _ready(d),
    "ship.intended": lambda d: "shipping code and data",
    "ship.observed": _shipped,
    "stop.requested": lambda d: f"asked to {_text(d, 'how', 'stop')} by {_text(d, 'by', 'you')}",
    "collect.observed": _collected,
    "hold.intended": lambda d: f"the machine is held until {_clock(d)}: {_text(d, 'message')}",
    "hold.observed": _unheld,
    "destroy.intended": lambda d: "ending the machine",
    "destroy.asked": _asked_to_die,
    "death.read": lambda d: f"read back: {_text(d, 'state', 'UNKNOWN')}",
    "death.proven": _teardown,
    "bill.observed": _billed,
    "salvage.intended": lambda d: (
        "bringing home what the machine has put into the bucket" if d.get("folder") else "counting what came home early"
    ),
    "salvage.observed": _collected,
    "step.failed": lambda d: f"{_step(d)} failed: {_text(d, 'message', _text(d, 'code'))}",
    "incident": lambda d: _text(d, "message", _text(d, "code", "an incident")),
    "receipt.observed": lambda d: f"receipt #{_text(d, 'seq', UNKNOWN)} {short_hash(_text(d, 'sha256'))}",
    "run.closed": lambda d: f"closed, exit {_text(d, 'exit_code', UNKNOWN)}",
    "journal.repaired": lambda d: f"the journal's torn last line was cut: {_text(d, 'reason', 'crash while writing')}",
}


def tell_event(event: TrainerEvent, steps: int | None = None) -> str:
    """One line for a trainer's event; an unknown kind is named and nothing more."""
    if isinstance(event, Start):
        return _start(event)
    steps = (event.steps if isinstance(event, Step) else None) or steps
    of = f"/{format_whole(steps)}" if steps and isinstance(event, Step) else ""
    at = "" if event.step is None else f"step {format_whole(event.step)}{of}  "
    return at + _told(event, steps)


def _told(event: TrainerEvent, steps: int | None) -> str:
    """Return what an event says, without its step."""
    match event:
        case Step():
            return metrics(event, steps)
        case Evaluation() if event.val_loss is None and event.bits_per_byte is not None:
            return f"val {event.bits_per_byte:.4f} bits a byte"
        case Evaluation():
            return f"val loss {format_loss(event.val_loss)}"
        case CoreScore():
            over = "" if event.core_items is None else f" over {format_whole(event.core_items)} items"
            return f"CORE {format_loss(event.core)}{over}"
        case Checkpoint():
            return f"checkpoint {format_bytes(event.bytes or 0)} saved on the machine"
        case Sample():
            return f"sample “{clip(_line(event.prompt), 40)}” → “{clip(_line(event.text or ''), 100)}”"
        case Alert():
            return f"warning {event.code}: {_line(event.message)}"
        case Outputs():
            left = event.published
            return f"left {format_files(left.files)} ({format_bytes(left.bytes)})" if left.files else "left no files"
        case Stop():
            ended = _STOPS.get(event.reason, f"stopped: {event.reason}")
            return f"{ended}: {_line(event.message)}" if event.message else ended
    if event.kind == "output":
        name, size = _text(event.said, "name", "a file"), whole(event.said.get("bytes"))
        more = whole(event.said.get("files"))
        what = f"{format_files(more)} such as {shown(name)}" if more else f"{shown(name)}"
        return f"output {what} ({format_bytes(size or 0)}) is finished"
    return event.kind


def _line(text: str) -> str:
    return safe_line(text.replace("\n", " "))


def metrics(event: Step, steps: int | None) -> str:
    """The figures of a step, with what is missing left out."""
    parts = [] if event.loss is None and "loss" not in event.said else [f"loss {format_loss(event.loss)}"]
    if event.lr is not None:
        parts.append(f"lr {format_small(event.lr)}")
    if event.tokens_per_s is not None:
        parts.append(f"{format_count(event.tokens_per_s)} tok/s")
    if event.mfu is not None:
        parts.append(f"MFU {format_percent(event.mfu)}")
    if event.step_s is not None and event.step is not None and steps is not None and steps > event.step:
        parts.append(f"eta {format_duration(event.step_s * (steps - event.step))}")
    return "  ".join(parts)


def _start(event: Start) -> str:
    named = f" ({event.cuda_name})" if event.cuda_name else ""
    parts = [f"device {event.device}{named}" if event.device else "started"]
    if event.parameters is not None:
        parts.append(f"{format_count(event.parameters)} parameters")
    if event.world_size is not None:
        parts.append(f"{event.world_size} {'process' if event.world_size == 1 else 'processes'}")
    resumed = event.resumed_from
    return ", ".join(parts) + (f", resumed from step {format_whole(resumed)}" if resumed is not None else "")
