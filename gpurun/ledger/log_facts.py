"""What the trainer's own words show: the log lines, losses, device and sample of a receipt, and what it may be called.

All of it is the instance's word. It is quoted, never believed: a run was on a GPU only if the first `device:` line of
its log says `cuda` and every start event agrees, and no figure of money or time rests on that. Whose word it is divides
the verdicts: a provider that told of what it rented out, or the machine alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpurun.core.job_terms import COMMAND, terms_in
from gpurun.core.journal_events import RunOpened
from gpurun.core.paths import RunFolder, open_regular
from gpurun.core.places import place_facts
from gpurun.core.receipt_record import UNKNOWN, Digested, ReceiptMachine, SampleTold, Verdict
from gpurun.core.trainer_events import (
    AlertEvent,
    CoreScoreEvent,
    EvaluationEvent,
    SampleEvent,
    StartEvent,
    StepEvent,
    StopEvent,
    TrainerEvent,
    TrialEvent,
    events_of,
    later_of_trial,
)
from gpurun.core.untrusted import lines_of, plain_line, plain_text, whole
from gpurun.ledger.paid_phases import TrainingSplit

RENTED, BY_ITS_WORD, SMOKE = "gpu, rented", "gpu, as the machine says", "smoke"
NOT_DONE, NOT_A_PROVIDER = "not done", "not a provider"

GPU_SENTENCE = "ran on a GPU, as its log shows"
RENTED_SENTENCE = "ran on a rented GPU: the provider told of it, and the log agrees"
SMOKE_SENTENCE = "smoke test complete, GPU run still pending"
STOPPED_SENTENCE = "smoke test stopped early, GPU run still pending"
NOTHING_SENTENCE = "no training was completed, GPU run still pending"
UNSHOWN_SENTENCE = "the training ended, and its log and events do not show on which device; GPU run still pending"

_NOT_SHOWN = {
    RENTED: "It does not show who ran it, nor that the provider's answers were signed as they came.",
    BY_ITS_WORD: "It does not show whose card it was, nor that there was one: its owner could write that log.",
    SMOKE: "It does not show a GPU, nor who ran it.",
    NOT_DONE: "It does not show a GPU, nor who ran it.",
    NOT_A_PROVIDER: "It does not show that anything was rented: whoever runs that address could answer anything.",
}

_SEED_NOT_SHOWN = "It does not show that the command used the seed of its challenge."

_DEVICE = re.compile(r"device: (cuda|cpu)")
_CODE = re.compile(r"code: embedding trainer/\S+ \| .+")
_SINGLES = (_DEVICE, re.compile(r"cuda_name: .+"), re.compile(r"parameters: [\d,]+"), _CODE)
_STEP = re.compile(r"step \d+ \| loss \S+ \|.*")
_CHECKPOINT = re.compile(r"checkpoint: \S+")
_MOST_WARNINGS = 8
_MOST_TRIALS = 1000
_COMMAND_ENDS = {
    "done": "the command ended well",
    "stopped": "the command was stopped",
    "lost": "the command was cut off",
    "none": "how the command ended was not seen, if it began",
}
_START_KEYS = (
    "device",
    "cuda_name",
    "torch",
    "python",
    "world_size",
    "parameters",
    "tokens_per_step",
    "precision",
    "steps",
)


@dataclass(frozen=True)
class Evidence:
    """The trainer's log and events, boiled down. `device` is "cuda", "cpu" or "" when log and events do not agree."""

    log: Digested
    events: Digested
    lines: list[str]
    device: str
    start: dict[str, Any] | None
    figures: dict[str, Any]
    sample: SampleTold | None
    split: TrainingSplit
    warnings: list[str]
    trials: list[TrialEvent]


@dataclass
class _Told:
    """What one pass over the events leaves."""

    start: StartEvent | None = None
    devices: set[str | None] = field(default_factory=set)
    first_step: StepEvent | None = None
    last_step: StepEvent | None = None
    last_eval: EvaluationEvent | None = None
    best_val_loss: float | None = None
    core: CoreScoreEvent | None = None
    sample: SampleEvent | None = None
    stop: StopEvent | None = None
    split: TrainingSplit = field(default_factory=TrainingSplit)
    warnings: list[str] = field(default_factory=list)
    trials: dict[int, TrialEvent] = field(default_factory=dict)


def read_evidence(folder: RunFolder) -> Evidence:
    """Read log and events of a run; files that are not there show nothing."""
    told = _listen(events_of(folder.events))
    lines, said = _quote(folder.log)
    return Evidence(
        log=digest_file(folder.log),
        events=digest_file(folder.events),
        lines=lines,
        device=said if told.devices == {said} else "",
        start={key: getattr(told.start, key) for key in _START_KEYS} if told.start else None,
        figures=_figures(told),
        sample=_sample(told.sample),
        split=told.split,
        warnings=told.warnings,
        trials=[event for _, event in sorted(told.trials.items())],
    )


def digest_file(path: Path) -> Digested:
    """A file's length and sha256; both unknown when it is not there."""
    if not path.is_file():
        return {"bytes": None, "sha256": UNKNOWN}
    with open_regular(path) as content:
        return {"sha256": hashlib.file_digest(content, "sha256").hexdigest(), "bytes": content.tell()}


def _quote(log: Path) -> tuple[list[str], str]:
    """The lines that a receipt shows, and the device that the log names first.

    Only the first `device:` line counts: a sample may print whatever it likes, but only after it.
    """
    singles: dict[int, str] = {}
    checkpoint, steps = "", 0
    for line in lines_of(log):
        for place, pattern in enumerate(_SINGLES):
            if place not in singles and pattern.fullmatch(line):
                singles[place] = plain_line(line)
        steps += _STEP.fullmatch(line) is not None
        checkpoint = plain_line(line) if _CHECKPOINT.fullmatch(line) else checkpoint
    wanted = {0, (steps - 1) // 2, steps - 1}
    numbered = enumerate(line for line in lines_of(log) if _STEP.fullmatch(line))
    shown = [plain_line(line) for number, line in numbered if number in wanted]
    lines = [singles[place] for place in sorted(singles)] + shown + ([checkpoint] if checkpoint else [])
    return lines, singles.get(0, "").removeprefix("device: ")


def _listen(events: Iterable[TrainerEvent]) -> _Told:
    told = _Told()
    for event in events:
        told.split.take(event)
        match event:
            case StartEvent():
                told.start = told.start or event
                told.devices.add(event.device)
            case StepEvent():
                told.first_step = told.first_step or event
                told.last_step = event
            case EvaluationEvent():
                told.last_eval = event
                losses = [loss for loss in (event.val_loss, told.best_val_loss) if loss is not None]
                told.best_val_loss = min(losses, default=None)
            case CoreScoreEvent():
                told.core = event
            case SampleEvent():
                told.sample = event
            case AlertEvent() if len(told.warnings) < _MOST_WARNINGS:
                at = "" if event.step is None else f"step {event.step}: "
                told.warnings.append(f"{at}{plain_line(event.message)}")
            case StopEvent():
                told.stop = event
            case TrialEvent(trial=int(number)) if number in told.trials or len(told.trials) < _MOST_TRIALS:
                told.trials[number] = later_of_trial(told.trials.get(number), event)
    return told


def _figures(told: _Told) -> dict[str, Any]:
    """Losses, steps and speed as the trainer reported them; null where it did not."""
    first, last, core = told.first_step, told.last_step, told.core
    scored = {key: getattr(core, key) for key in ("core", "core_items", "bundle_sha256")} if core else None
    return {
        "first_step": first.step if first else None,
        "first_loss": first.loss if first else None,
        "last_step": last.step if last else None,
        "last_loss": last.loss if last else None,
        "last_val_loss": told.last_eval.val_loss if told.last_eval else None,
        "best_val_loss": told.best_val_loss,
        "tokens": last.tokens if last else None,
        "train_s": told.stop.train_s if told.stop else None,
        **({"core": scored} if scored else {}),
    }


def _sample(event: SampleEvent | None) -> SampleTold | None:
    if event is None:
        return None
    return {"step": event.step, "prompt": plain_line(event.prompt), "text": plain_text(event.text or "")}


def verdict_of(opened: RunOpened, machine: ReceiptMachine | None, device: str, outcome: str) -> Verdict:
    """The verdict of a run that was opened so, on that machine; `device` is "" where log and events do not agree."""
    if opened.endpoint:
        trained = GPU_SENTENCE if device == "cuda" else _smoke_sentence(device, outcome)
        says = plain_line(f"asked {opened.endpoint} in place of {opened.provider}; {trained}")
        return _with_limits(NOT_A_PROVIDER, says)
    if device != "cuda":
        return _with_limits(_without_gpu(opened, outcome), _smoke_sentence(device, outcome))
    if opened.mode == "paid" and machine is not None and _is_told(machine):
        return _with_limits(RENTED, RENTED_SENTENCE)
    return _with_limits(BY_ITS_WORD, GPU_SENTENCE)


def command_verdict(
    opened: RunOpened, machine: ReceiptMachine | None, tally: Mapping[str, Any], outcome: str
) -> Verdict:
    """The verdict of a user's command: by what the agent saw the cards do, not by the log."""
    own, busy, looks = (whole(tally.get(key)) or 0 for key in ("own", "busy", "looks"))
    is_on_gpu = bool(
        own or (busy and not place_facts(opened.provider).is_own_box)
    )  # Others may work on a box of the user's own.
    how = _COMMAND_ENDS.get(outcome, "the command failed").replace(COMMAND.work, terms_in(opened.as_data()).work)
    seen = f"a GPU was at work in {own or busy} of {looks} looks" if is_on_gpu else "no GPU was seen at work"
    says = f"{how}; {seen}"
    if opened.challenge:
        word = opened.challenge.rpartition(":")[0]
        says = plain_line(f"{says}; opened for the challenge {word} by the key that signs")
    if opened.endpoint:
        kind, says = NOT_A_PROVIDER, plain_line(f"asked {opened.endpoint} in place of {opened.provider}; {says}")
    elif not is_on_gpu:
        kind = _without_gpu(opened, outcome)
    else:
        is_rented = opened.mode == "paid" and machine is not None and _is_told(machine)
        kind = RENTED if is_rented else BY_ITS_WORD
    verdict = _with_limits(kind, says)
    if opened.challenge:
        verdict["not_shown"] += f" {_SEED_NOT_SHOWN}"
    return verdict


def older_verdict(device: str, outcome: str) -> Verdict:
    """The verdict as receipts had it before they told whose word it is."""
    if device == "cuda":
        return {"is": "gpu", "says": GPU_SENTENCE}
    return {"is": SMOKE, "says": _smoke_sentence(device, outcome)}


def _without_gpu(opened: RunOpened, outcome: str) -> str:
    """Return the verdict of a run without a GPU: one that failed, was cut off or never started tested nothing.

    Rules 1 called that a smoke test, too.
    """
    return SMOKE if outcome in ("done", "stopped") or (opened.rules or 1) < 2 else NOT_DONE


def _with_limits(kind: str, says: str) -> Verdict:
    return {"is": kind, "says": says, "not_shown": _NOT_SHOWN[kind]}


def _smoke_sentence(device: str, outcome: str) -> str:
    if outcome not in ("done", "stopped"):
        return NOTHING_SENTENCE
    on_cpu = {"done": SMOKE_SENTENCE, "stopped": STOPPED_SENTENCE}[outcome]
    return on_cpu if device == "cpu" else UNSHOWN_SENTENCE


def _is_told(machine: ReceiptMachine) -> bool:
    """Whether the provider itself named the card, or the type of machine; of a box of the user's own nobody did."""
    untold = machine.get("as_ordered", [])
    return (
        not place_facts(machine["provider"]).is_own_box and not {"gpu", "type"} <= set(untold) and bool(machine["id"])
    )
