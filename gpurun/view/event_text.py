"""The phrases for journal records and trainer events, shared by the plain lines and the live view."""

from __future__ import annotations

from gpurun.core.artifact_names import readable_name
from gpurun.core.clock import local_minute
from gpurun.core.job_terms import TRAINER, JobTerms
from gpurun.core.journal_events import (
    BillObserved,
    CollectIntended,
    CreateIntended,
    CreateObserved,
    CreateRefused,
    CreateUnknown,
    DeathProven,
    DeathRead,
    DestroyAsked,
    DestroyIntended,
    FilesBrought,
    HoldIntended,
    HoldObserved,
    Incident,
    JournalEvent,
    JournalRepaired,
    LegPlanned,
    NewerEvent,
    RateObserved,
    ReadyObserved,
    ReceiptObserved,
    RunClosed,
    RunOpened,
    SalvageIntended,
    ShipIntended,
    ShipObserved,
    StageIntended,
    StageObserved,
    StepFailed,
    StopRequested,
    TrainIntended,
    TrainObserved,
    TrainStarted,
)  # fmt: skip
from gpurun.core.journal_records import Record
from gpurun.core.money import Micros, format_rate, format_usd
from gpurun.core.records import Teardown
from gpurun.core.trainer_events import (
    AlertEvent,
    CheckpointEvent,
    CoreScoreEvent,
    EvaluationEvent,
    OutputsEvent,
    SampleEvent,
    StartEvent,
    StepEvent,
    StopEvent,
    TrainerEvent,
    TrialEvent,
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

PHASES = ("plan", "provision", "ship", "run", "collect", "destroy", "receipt")

# The phase of each record, by whether the record begins, continues or ends the phase.
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
    "leg.planned": "plan",
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
"""The outcomes that count as a failure of the training."""
_MOST_NAMED = 6
_STOPS = {"done": "ended: done", "failed": "ended: failed"}
SILENT, HEARD = "machine.silent", "machine.heard"
"""The incidents of a machine that has not answered for minutes during training, and of its next answer."""
JOB_SILENT, JOB_HEARD = "job.silent", "job.heard"
"""The incidents of a job that has written nothing for a long time, and of its next output."""
IDLE_SOON, IDLE_OVER = "dev.idle_soon", "dev.used_again"
"""The incidents of a dev box that will be ended as idle within minutes, and of its next use."""
APART = frozenset({"stop.requested", "step.failed", "incident", "journal.repaired"})


def tell_record(record: Record, terms: JobTerms = TRAINER) -> str:
    """Return a record as a clause without a full stop, in the words of `terms`. The machine's names are escaped."""
    typed = record.typed
    if isinstance(typed, NewerEvent):
        return f"{record.event}, which is unknown here: a newer gpurun wrote it"
    return _describe_event(typed, terms)


def _describe_event(event: JournalEvent, terms: JobTerms) -> str:
    match event:
        case RunOpened(recipe=recipe, provider=provider):
            return f"run opened: {_as_one_line(recipe)} on {_as_one_line(provider)}"
        case StageIntended(url=url, bytes=size):
            amount = "" if size is None else f"{format_bytes(size)} "
            return f"uploading {amount}to {_as_one_line(url) or 'the bucket'} before anything is rented"
        case StageObserved(url=url):
            there, sent = event.there_bytes or 0, event.sent_bytes or 0
            return f"in {_as_one_line(url or 'the bucket')}: {format_bytes(there)} was there, {format_bytes(sent)} sent"
        case CreateIntended():
            return _describe_create_request(event)
        case CreateObserved(instance=instance):
            return f"the machine exists: {_as_one_line(instance.id)}"
        case CreateRefused(message=message, reason=reason):
            return f"no machine was made: {_as_one_line(message or reason)}"
        case CreateUnknown(message=message):
            return f"no clear answer; looking for the machine by its token: {_as_one_line(message)}"
        case ReadyObserved():
            return _describe_ready(event)
        case ShipIntended():
            return "uploading code and data"
        case ShipObserved(bytes=size, files=files):
            amount = "" if size is None else f" {format_bytes(size)}"
            return f"uploaded{amount}" + ("" if files is None else f" in {format_files(files)}") + ", digests verified"
        case TrainIntended():
            return f"starting {terms.worker}"
        case TrainStarted():
            return terms.doing
        case RateObserved():
            return tell_rate(event, terms)
        case TrainObserved():
            return _describe_end(event, terms)
        case StopRequested(how=how, by=by):
            return f"asked to {how} by {_as_one_line(by) or 'you'}"
        case CollectIntended():
            return f"bringing the {terms.files} home"
        case FilesBrought():
            return _describe_collected(event)
        case HoldIntended(until_wall=until_wall, message=message):
            until = UNKNOWN if number(until_wall) is None else local_minute(until_wall, now=until_wall)
            return f"the machine is held until {until}: {_as_one_line(message)}"
        case HoldObserved(how=how):
            why = {"home": "all missing files are at home", "gone": "it no longer runs", "over": "its time is over"}
            return f"the machine is no longer held: {why.get(how, 'it was ended')}"
        case DestroyIntended():
            return "ending the machine"
        case DestroyAsked(attempt=attempt, taken=True):
            return f"destroy requested, attempt {attempt}"
        case DestroyAsked(attempt=attempt, answer=answer):
            return f"no destroy request was accepted, attempt {attempt}: {_as_one_line(answer)}"
        case DeathRead(state=state):
            return f"read back: {_as_one_line(state)}"
        case DeathProven(teardown=teardown, reads=reads):
            how = _TEARDOWNS.get(teardown, "proven gone")
            return f"{how} ({reads} {'read' if reads == 1 else 'reads'})"
        case BillObserved(micros=micros):
            return f"the provider has billed {format_usd(Micros(micros))}, by two readings"
        case SalvageIntended(folder=""):
            return "counting the files that came home before"
        case SalvageIntended():
            return "downloading what the machine has put into the bucket"
        case StepFailed(step=step, message=message, code=code):
            return f"{_STEPS.get(step, _as_one_line(step))} failed: {_as_one_line(message or code)}"
        case Incident(message=message, code=code):
            return _as_one_line(message or code)
        case LegPlanned():
            return _describe_leg(event)
        case ReceiptObserved(seq=seq, sha256=sha256):
            return f"receipt #{seq} {short_hash(_as_one_line(sha256))}"
        case RunClosed(exit_code=exit_code):
            return f"closed, exit {int(exit_code)}"
        case JournalRepaired():
            return "the journal's incomplete last line was removed: a crash while writing"
    raise AssertionError(f"{type(event).__name__} has no words")


def is_alarming(record: Record) -> bool:
    """Return whether a record needs the user's attention."""
    match record.typed:
        case RateObserved(finishes=finishes):
            return finishes is False
        case TrainObserved(outcome=outcome):
            return outcome in FELL
        case StepFailed() | Incident() | JournalRepaired() | CreateUnknown() | HoldIntended():
            return True
    return False


_TEARDOWNS = {
    Teardown.DESTROYED: "destroyed, proven gone",
    Teardown.PROCESSES_KILLED_HOST_KEPT: "every process ended, proven; this machine stays",
    Teardown.RELEASED: "released, proven gone",
    Teardown.STOPPED_DISK_BILLED: "stopped; its disk is still billed",
    Teardown.EXPIRES_AT: "left to expire at its time limit",
    Teardown.USER_OPERATED: "left running: you must end it",
    Teardown.NOT_PROVEN: "NOT proven gone",
}
"""How the machine's end was proven. Only a real destroy is called destroyed."""
_STEPS = {
    "create": "getting a machine",
    "await_ready": "getting the machine ready",
    "move": "continuing on another machine",
}


def _describe_ready(ready: ReadyObserved) -> str:
    """Return a clause about a machine that answers; for several nodes, also their number and the speed between them."""
    network, others = ready.network or {}, ready.not_passed
    if others:
        names = ", ".join(others[:_MOST_NAMED]) + (" and more" if others[_MOST_NAMED:] else "")
        alone = ready.model_copy(update={"not_passed": []})
        return f"{_describe_ready(alone)}; not passed on to the job (--pass-env): {safe_line(names)}"
    if not isinstance(nodes := network.get("nodes"), list):
        return "the machine answers"
    rate = number(network.get("gigabytes_per_s"))
    return f"all {len(nodes)} nodes answer" + (f", {rate:.2g} GB/s between them" if rate is not None else "")


def _describe_leg(leg: LegPlanned) -> str:
    """Return where a moved run continues: its checkpoint, its machine and the remaining money; and why it moved."""
    start = f"from step {format_whole(leg.step)}" if leg.step else "from the beginning"
    again = leg.reached - leg.step
    twice = f", {format_whole(again)} steps are repeated" if leg.token and again > 0 else ""
    caps = [format_usd(Micros(leg.left_micros))] if leg.left_micros is not None else []
    caps += [f"{leg.left_gpu_hours:.2f} GPU-hours"] if leg.left_gpu_hours is not None else []
    left = f"the cap has {' and '.join(caps)} left"
    why = f"; the last machine: {_as_one_line(leg.why)}" if leg.why else ""
    return f"leg {leg.number}: the run continues {start} on another machine{twice}; {left}{why}"


def _describe_end(end: TrainObserved, terms: JobTerms) -> str:
    """Return how the work ended, with its reason, and the record's message if the work failed or was lost."""
    outcome, reason = _as_one_line(end.outcome), _as_one_line(end.reason)
    is_worded = outcome in FELL or "elsewhere" in (end.outputs or {})
    why = _as_one_line(end.message) if is_worded else ""
    ended = f"{terms.work} ended: {outcome}" + (f" ({reason})" if reason not in ("", outcome) else "")
    return f"{ended}: {why}" if why else ended


def _describe_create_request(intent: CreateIntended) -> str:
    """Return which offer is requested, and its price, as far as the record has them. An older gpurun recorded less."""
    offer, asked = intent.offer, f"asking {_as_one_line(intent.provider)} for"
    if not whole(offer.get("gpu_count")):
        return f"{asked} a machine"
    region = _as_one_line(str(offer.get("region") or ""))
    where = f" in {region}" if region not in ("", "any") else ""
    spot = ", spot" if offer.get("spot") is True else ""
    rate = Micros(intent.rate_micros_per_hour)
    price = f" at {format_rate(rate)}" if rate > 0 else ""
    gpu = _as_one_line(str(offer.get("gpu") or "GPU"))
    cards = format_cards(gpu, whole(offer.get("gpu_count")) or 0, whole(offer.get("nodes")) or 1)
    return f"{asked} {cards}{where}{spot}{price}"


def tell_rate(rate: RateObserved, terms: JobTerms = TRAINER) -> str:
    """Return the measured speed and its consequence: when the work ends and what it costs, or how far it gets."""
    measured, left_s = f"measured {tell_pace(rate)}", rate.left_s or 0
    expected, cap, needed = rate.expected_micros, rate.cap_micros, rate.needed_micros
    if rate.finishes:
        costs = f", about {format_usd(Micros(expected))} in all" if expected else ""
        holds = f"; the cap of {format_usd(Micros(cap))} holds" if expected and cap else ""
        return f"{measured}: ends in {format_duration(left_s)}{costs}{holds}"
    step, steps = rate.ends_at_step or 0, rate.steps or 0
    share = f" ({format_percent(step / steps)})" if steps else ""
    far = f"does not finish: it ends at step {format_whole(step)} of {format_whole(steps)}{share}"
    would = f"finishing needs {format_duration(left_s)} more"
    under = f" and a cap of {format_usd(Micros(needed))}" if needed else ""
    return f"{measured}, {far}; {would}{under}; {terms.verb} --from continues later"


def tell_pace(rate: RateObserved) -> str:
    """Return the measured speed in tokens per second; if tokens are not known, in seconds per step."""
    speed = number(rate.tokens_per_s)
    return f"{number(rate.step_s) or 0.0:.3g} s a step" if speed is None else f"{format_count(speed)} tok/s"


def _describe_collected(downloaded: FilesBrought) -> str:
    missing = downloaded.missing
    here = downloaded.listed["files"] if downloaded.listed else len(downloaded.files)
    lost = ""
    if missing:
        more = " and more" if missing[_MOST_NAMED:] else ""
        count = downloaded.missing_files["files"] if downloaded.missing_files else len(missing)
        lost = f", {count} MISSING: {', '.join(map(readable_name, missing[:_MOST_NAMED]))}{more}"
    if not downloaded.files and not lost:
        return "collected no files, because there were none"
    return f"collected {format_files(here)}, digests verified{lost}"


def tell_event(event: TrainerEvent, steps: int | None = None) -> str:
    """Return one line for a trainer's event. For an unknown kind, the line has only its name."""
    if isinstance(event, StartEvent):
        return _describe_start(event)
    if isinstance(event, TrialEvent):
        return trial_words(event)
    steps = (event.steps if isinstance(event, StepEvent) else None) or steps
    of = f"/{format_whole(steps)}" if steps and isinstance(event, StepEvent) else ""
    at = "" if event.step is None else f"step {format_whole(event.step)}{of}  "
    return at + _event_words(event, steps)


def _event_words(event: TrainerEvent, steps: int | None) -> str:
    """Return the content of an event, without its step."""
    match event:
        case StepEvent():
            return metrics(event, steps)
        case EvaluationEvent() if event.val_loss is None and event.bits_per_byte is not None:
            return f"val {event.bits_per_byte:.4f} bits a byte"
        case EvaluationEvent():
            return f"val loss {format_loss(event.val_loss)}"
        case CoreScoreEvent():
            over = "" if event.core_items is None else f" over {format_whole(event.core_items)} items"
            return f"CORE {format_loss(event.core)}{over}"
        case CheckpointEvent():
            return f"checkpoint {format_bytes(event.bytes or 0)} saved on the machine"
        case SampleEvent():
            return f"sample “{clip(_as_one_line(event.prompt), 40)}” → “{clip(_as_one_line(event.text or ''), 100)}”"
        case AlertEvent():
            return f"warning {event.code}: {_as_one_line(event.message)}"
        case OutputsEvent():
            left = event.published
            return f"left {format_files(left.files)} ({format_bytes(left.bytes)})" if left.files else "left no files"
        case StopEvent():
            ended = _STOPS.get(event.reason, f"stopped: {event.reason}")
            return f"{ended}: {_as_one_line(event.message)}" if event.message else ended
    if event.kind == "removed":
        names = event.said.get("names")
        return f"{format_files(len(names) if isinstance(names, list) else 0)} of the upload were deleted there"
    if event.kind == "clone":
        return f"cloned, at commit {short_hash(_as_one_line(str(event.said.get('commit'))))}"
    if event.kind == "output":
        name, size = _as_one_line(str(event.said.get("name") or "a file")), whole(event.said.get("bytes"))
        more = whole(event.said.get("files"))
        what = f"{format_files(more)} such as {readable_name(name)}" if more else f"{readable_name(name)}"
        return f"output {what} ({format_bytes(size or 0)}) is finished"
    return event.kind


def trial_words(event: TrialEvent) -> str:
    """Return a line with a trial's state, step, result and settings."""
    settings = ", ".join(f"{name} {value}" for name, value in event.params.items())
    result = "" if event.result is None else f", {format_loss(event.result)}"
    why = f": {_as_one_line(event.why)}" if event.why else ""
    at = "" if event.step is None or event.state == "running" else f" at step {format_whole(event.step)}"
    return f"trial {event.trial or 0:03d} {event.state}{at}{result}{why}  ({settings})"


def _as_one_line(text: str) -> str:
    return safe_line(text.replace("\n", " "))


def metrics(event: StepEvent, steps: int | None) -> str:
    """Return the figures of a step that are known."""
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


def _describe_start(event: StartEvent) -> str:
    named = f" ({event.cuda_name})" if event.cuda_name else ""
    parts = [f"device {event.device}{named}" if event.device else "started"]
    if event.parameters is not None:
        parts.append(f"{format_count(event.parameters)} parameters")
    if event.world_size is not None:
        parts.append(f"{event.world_size} {'process' if event.world_size == 1 else 'processes'}")
    resumed = event.resumed_from
    return ", ".join(parts) + (f", resumed from step {format_whole(resumed)}" if resumed is not None else "")
