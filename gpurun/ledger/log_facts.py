"""Reads the trainer's log and events for a receipt: the quoted lines, losses, device and sample, and the verdict.

All of this comes from the machine: it is quoted, but not trusted. A run counts as one on a GPU only if the first
`device:` line of its log is `cuda` and every start event agrees. No figure of money or time depends on that. The
verdict also states the source of this claim: the provider, which described the machine, or the machine alone.
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
from gpurun.core.receipt_record import UNKNOWN, Digested, ReceiptMachine, ReceiptSample, Verdict
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

GPU_SENTENCE = "ran on a GPU, according to its log"
RENTED_SENTENCE = "ran on a rented GPU: the provider named it, and the log agrees"
SMOKE_SENTENCE = "smoke test complete, GPU run still pending"
STOPPED_SENTENCE = "smoke test stopped early, GPU run still pending"
NOTHING_SENTENCE = "no training was completed, GPU run still pending"
UNSHOWN_SENTENCE = "the training ended, but log and events do not show the device; GPU run still pending"

_NOT_SHOWN = {
    RENTED: "This receipt does not prove who ran it, or that the provider's answers are genuine.",
    BY_ITS_WORD: "This receipt does not prove whose card it was, or if there was one: its owner could write that log.",
    SMOKE: "This receipt does not prove that a GPU was used, or by whom.",
    NOT_DONE: "This receipt does not prove that a GPU was used, or by whom.",
    NOT_A_PROVIDER: "This receipt does not prove that anything was rented: that address could answer anything.",
}

_SEED_NOT_SHOWN = "It does not prove that the command used the seed of its challenge."

_DEVICE = re.compile(r"device: (cuda|cpu)")
_CODE = re.compile(r"code: embedding trainer/\S+ \| .+")
_SINGLES = (_DEVICE, re.compile(r"cuda_name: .+"), re.compile(r"parameters: [\d,]+"), _CODE)
_STEP = re.compile(r"step \d+ \| loss \S+ \|.*")
_CHECKPOINT = re.compile(r"checkpoint: \S+")
_MOST_WARNINGS = 8
_MOST_TRIALS = 1000
_COMMAND_ENDS = {
    "done": "the command succeeded",
    "stopped": "the command was stopped",
    "lost": "the command was cut off",
    "none": "whether the command started, and how it ended, was not seen",
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
    """The content of a run's log and events that a receipt uses.

    `device` is "cuda", "cpu", or "" if log and events disagree or do not name one.
    """

    log: Digested
    events: Digested
    lines: list[str]
    device: str
    start: dict[str, Any] | None
    figures: dict[str, Any]
    sample: ReceiptSample | None
    split: TrainingSplit
    warnings: list[str]
    trials: list[TrialEvent]


@dataclass
class _EventSummary:
    """The events that a receipt needs, collected in one pass over the file."""

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
    """Read log and events of a run; a missing file counts as an empty one."""
    summary = _summarise(events_of(folder.events))
    lines, device = _quote_log(folder.log)
    return Evidence(
        log=digest_file(folder.log),
        events=digest_file(folder.events),
        lines=lines,
        device=device if summary.devices == {device} else "",
        start={key: getattr(summary.start, key) for key in _START_KEYS} if summary.start else None,
        figures=_list_figures(summary),
        sample=_quote_sample(summary.sample),
        split=summary.split,
        warnings=summary.warnings,
        trials=[event for _, event in sorted(summary.trials.items())],
    )


def digest_file(path: Path) -> Digested:
    """Return a file's length and sha256; None and "unknown" if the file does not exist."""
    if not path.is_file():
        return {"bytes": None, "sha256": UNKNOWN}
    with open_regular(path) as content:
        return {"sha256": hashlib.file_digest(content, "sha256").hexdigest(), "bytes": content.tell()}


def _quote_log(log: Path) -> tuple[list[str], str]:
    """Return the lines that a receipt quotes, and the device that the log names first; "" if it names none.

    Only the first `device:` line counts: a later one may come from a sample, which can contain anything.
    """
    singles: dict[int, str] = {}
    checkpoint, steps = "", 0
    for line in lines_of(log):
        for place, pattern in enumerate(_SINGLES):
            if place not in singles and pattern.fullmatch(line):
                singles[place] = plain_line(line)
        steps += _STEP.fullmatch(line) is not None
        checkpoint = plain_line(line) if _CHECKPOINT.fullmatch(line) else checkpoint
    quoted = {0, (steps - 1) // 2, steps - 1}
    numbered = enumerate(line for line in lines_of(log) if _STEP.fullmatch(line))
    shown = [plain_line(line) for number, line in numbered if number in quoted]
    lines = [singles[place] for place in sorted(singles)] + shown + ([checkpoint] if checkpoint else [])
    return lines, singles.get(0, "").removeprefix("device: ")


def _summarise(events: Iterable[TrainerEvent]) -> _EventSummary:
    summary = _EventSummary()
    for event in events:
        summary.split.take(event)
        match event:
            case StartEvent():
                summary.start = summary.start or event
                summary.devices.add(event.device)
            case StepEvent():
                summary.first_step = summary.first_step or event
                summary.last_step = event
            case EvaluationEvent():
                summary.last_eval = event
                losses = [loss for loss in (event.val_loss, summary.best_val_loss) if loss is not None]
                summary.best_val_loss = min(losses, default=None)
            case CoreScoreEvent():
                summary.core = event
            case SampleEvent():
                summary.sample = event
            case AlertEvent() if len(summary.warnings) < _MOST_WARNINGS:
                at = "" if event.step is None else f"step {event.step}: "
                summary.warnings.append(f"{at}{plain_line(event.message)}")
            case StopEvent():
                summary.stop = event
            case TrialEvent(trial=int(number)) if number in summary.trials or len(summary.trials) < _MOST_TRIALS:
                summary.trials[number] = later_of_trial(summary.trials.get(number), event)
    return summary


def _list_figures(summary: _EventSummary) -> dict[str, Any]:
    """Return losses, steps, tokens and training time as the trainer reported them; None where it did not."""
    first, last, core = summary.first_step, summary.last_step, summary.core
    scored = {key: getattr(core, key) for key in ("core", "core_items", "bundle_sha256")} if core else None
    return {
        "first_step": first.step if first else None,
        "first_loss": first.loss if first else None,
        "last_step": last.step if last else None,
        "last_loss": last.loss if last else None,
        "last_val_loss": summary.last_eval.val_loss if summary.last_eval else None,
        "best_val_loss": summary.best_val_loss,
        "tokens": last.tokens if last else None,
        "train_s": summary.stop.train_s if summary.stop else None,
        **({"core": scored} if scored else {}),
    }


def _quote_sample(event: SampleEvent | None) -> ReceiptSample | None:
    if event is None:
        return None
    return {"step": event.step, "prompt": plain_line(event.prompt), "text": plain_text(event.text or "")}


def verdict_of(opened: RunOpened, machine: ReceiptMachine | None, device: str, outcome: str) -> Verdict:
    """Return the verdict of a run that trained a model; `device` is the one in `Evidence`, `outcome` how it ended."""
    if opened.endpoint:
        trained = GPU_SENTENCE if device == "cuda" else _describe_smoke(device, outcome)
        says = plain_line(f"{opened.endpoint} answered instead of {opened.provider}; {trained}")
        return _build_verdict(NOT_A_PROVIDER, says)
    if device != "cuda":
        return _build_verdict(_choose_verdict_without_gpu(opened, outcome), _describe_smoke(device, outcome))
    if opened.mode == "paid" and machine is not None and _is_reported(machine):
        return _build_verdict(RENTED, RENTED_SENTENCE)
    return _build_verdict(BY_ITS_WORD, GPU_SENTENCE)


def command_verdict(
    opened: RunOpened, machine: ReceiptMachine | None, tally: Mapping[str, Any], outcome: str
) -> Verdict:
    """Return the verdict of a user's command, by the agent's samples of the GPUs (`tally`) and not by the log."""
    own, busy, looks = (whole(tally.get(key)) or 0 for key in ("own", "busy", "looks"))
    is_on_gpu = bool(
        own or (busy and not place_facts(opened.provider).is_own_box)
    )  # On the user's own box, another program may use the GPU.
    how = _COMMAND_ENDS.get(outcome, "the command failed").replace(COMMAND.work, terms_in(opened.as_data()).work)
    seen = f"a GPU was at work in {own or busy} of {looks} looks" if is_on_gpu else "no GPU was seen at work"
    says = f"{how}; {seen}"
    if opened.challenge:
        word = opened.challenge.rpartition(":")[0]
        says = plain_line(f"{says}; opened for the challenge {word} by the signing key")
    if opened.endpoint:
        kind, says = NOT_A_PROVIDER, plain_line(f"{opened.endpoint} answered instead of {opened.provider}; {says}")
    elif not is_on_gpu:
        kind = _choose_verdict_without_gpu(opened, outcome)
    else:
        is_rented = opened.mode == "paid" and machine is not None and _is_reported(machine)
        kind = RENTED if is_rented else BY_ITS_WORD
    verdict = _build_verdict(kind, says)
    if opened.challenge:
        verdict["not_shown"] += f" {_SEED_NOT_SHOWN}"
    return verdict


def older_verdict(device: str, outcome: str) -> Verdict:
    """Return the verdict in the old form, in which it does not state its source: the provider or the machine."""
    if device == "cuda":
        return {"is": "gpu", "says": GPU_SENTENCE}
    return {"is": SMOKE, "says": _describe_smoke(device, outcome)}


def _choose_verdict_without_gpu(opened: RunOpened, outcome: str) -> str:
    """Return the verdict of a run without a GPU: `smoke`, or `not done` if it failed, was cut off or never started.

    By rules 1 it is always `smoke`.
    """
    return SMOKE if outcome in ("done", "stopped") or (opened.rules or 1) < 2 else NOT_DONE


def _build_verdict(kind: str, says: str) -> Verdict:
    return {"is": kind, "says": says, "not_shown": _NOT_SHOWN[kind]}


def _describe_smoke(device: str, outcome: str) -> str:
    if outcome not in ("done", "stopped"):
        return NOTHING_SENTENCE
    on_cpu = {"done": SMOKE_SENTENCE, "stopped": STOPPED_SENTENCE}[outcome]
    return on_cpu if device == "cpu" else UNSHOWN_SENTENCE


def _is_reported(machine: ReceiptMachine) -> bool:
    """Return whether the provider itself reported the GPU or the machine type. The user's own box has no provider."""
    unreported = machine.get("as_ordered", [])
    return (
        not place_facts(machine["provider"]).is_own_box
        and not {"gpu", "type"} <= set(unreported)
        and bool(machine["id"])
    )
