"""The receipt as a person reads it: for the terminal, and as Markdown to hand in or to paste.

`ReceiptView` is what this room needs to know; whoever reads the signed statement fills it. Unknown stays unknown: a
field that nobody measured is empty, and is then left out or called unknown, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gpurun.core.clock import local_time, utc
from gpurun.core.money import Micros, format_usd, left_of, percent_of
from gpurun.view.paint import Cell, Line, Span, fold, line, spell, spread, width_of, wrap
from gpurun.view.quantities import UNKNOWN, format_duration, short_hash
from gpurun.view.safe import safe_line, safe_text
from gpurun.view.style import Style
from gpurun.view.tables import fields


@dataclass(frozen=True)
class FileProof:
    """A checkpoint that came home, and its sha256."""

    name: str
    sha256: str


@dataclass(frozen=True)
class PhaseTime:
    """How long a phase took, and what the plan allowed it at most, where it had a limit of its own."""

    name: str
    seconds: float
    limit_s: float | None = None


@dataclass(frozen=True)
class ReceiptView:
    """Everything that stands on a receipt.

    `cost_label` says what the cost rests on: measured, provider-reported or billed. `verdict` is "gpu" or "smoke", and
    `sentence` what that means. `phases` are by this laptop's clock and add up to `billable_s`; `in_training` divides
    the training phase by the machine's word. `missing` was finished over there and did not come home. `machine` are the
    facts of the platform, one a part; `log_lines` and `sample` are the trainer's words and are made harmless here.
    """

    run: str
    recipe: str
    verdict: str
    sentence: str
    seq: int | None = None
    digest: str = ""
    previous: str = ""
    signature: Literal["signed", "unsigned", "bad"] = "unsigned"
    recipe_sha256: str = ""
    trainer_sha256: str = ""
    data_sha256: str = ""
    gpurun_version: str = ""
    sent: Sequence[str] = ()
    instance: str = ""
    machine: Sequence[str] = ()
    timeline: Sequence[tuple[str, float | None]] = ()
    training_s: float | None = None
    billable_s: float | None = None
    phases: Sequence[PhaseTime] = ()
    expected_train_s: tuple[float, float] | None = None
    in_training: Sequence[PhaseTime] = ()
    cost_micros: Micros | None = None
    cost_label: str = "measured"
    billed_micros: Micros | None = None
    cap_micros: Micros | None = None
    result: str = ""
    teardown: str = ""
    proof: str = ""
    proof_sha256: str = ""
    shutdown: str = ""
    checkpoints: Sequence[FileProof] = ()
    missing: Sequence[str] = ()
    incidents: Sequence[str] = ()
    log_lines: Sequence[str] = ()
    sample: str = ""
    next_command: str = ""


_TEARDOWNS = {
    "destroyed": ("Destroyed", "PROVEN", "good"),
    "processes_killed_host_kept": ("Ended", "PROVEN, this machine stays", "good"),
    "stopped_disk_billed": ("Stopped", "its disk is still billed", "warn"),
    "expires_at": ("Teardown", "expires by itself", "warn"),
    "user_operated": ("Teardown", "yours to do: gpurun does not end this machine", "warn"),
    "not_proven": ("Teardown", "NOT PROVEN, may be billing", "bad"),
    "": ("Teardown", "no machine was made, none to end", ""),
}


def receipt_screen(view: ReceiptView, style: Style, *, now: float) -> list[Line]:
    """The receipt for a terminal; ends with the next command where there is one."""
    mark = {
        "signed": Span("signed ✔", "good"),
        "unsigned": Span("unsigned", "warn"),
        "bad": Span("BAD SIGNATURE", "bad"),
    }
    number = "" if view.seq is None else f"#{view.seq:04d}  "
    chain = f"sha256 {short_hash(view.digest)}  " if view.digest else ""
    right = line(Span(number, "title"), Span(chain, "dim"), mark[view.signature])
    lines = [line(), *_headed(line("  ", Span(f"Receipt {view.run}", "title")), right, style), line()]
    lines += fields([(name, parts) for name, parts in _pairs(view, now) if parts], style)
    for title, texts in (("log", list(view.log_lines)), ("sample", safe_text(view.sample, most_lines=12))):
        if any(texts):
            lines += [line(), line(Span(f"  ── {title} " + "─" * (style.width - 6 - len(title)), "dim"))]
            for text in texts:
                lines += fold(safe_line(text), style, indent=2)
    smoke = view.verdict != "gpu"
    lines += [line(), *wrap(view.sentence, style, indent=2, look="warn" if smoke else "good")]
    return lines


def _headed(title: Line, right: Line, style: Style) -> list[Line]:
    """Title and number in a line, or in two where the name would be cut."""
    if width_of(title) + 2 + width_of(spell(span, style) for span in right) <= style.width:
        return [spread(title, right, style)]
    return [title, (Span("  "), *right)]


def _pairs(view: ReceiptView, now: float) -> list[tuple[str, list[Cell]]]:
    """The fields of both forms, in their order."""
    name, said, look = _TEARDOWNS.get(view.teardown, ("Teardown", view.teardown or UNKNOWN, "bad"))
    shutdown = Span(view.shutdown, "bad" if view.shutdown.startswith("SHUTDOWN NOT") else "good")
    ended: list[Cell] = [Span(said, look), view.proof, _hashed("evidence", view.proof_sha256), shutdown]
    chain = _hashed("after", view.previous) if view.previous.strip("0") else "the first receipt of this home"
    by = f"by gpurun {view.gpurun_version}" if view.gpurun_version else ""
    return [
        ("Recipe", [view.recipe, _hashed("sha256", view.recipe_sha256)]),
        ("Shipped", [_hashed("trainer", view.trainer_sha256), _hashed("data", view.data_sha256), by]),
        ("Sent", list(view.sent)),
        ("Instance", [view.instance]),
        ("Machine", list(view.machine)),
        ("Timeline", [f"{_plain(step)} {_when(wall, now)}" for step, wall in view.timeline]),
        ("Runtime", _runtime(view)),
        ("Paid time", _phases(view)),
        ("In training", _in_training(view)),
        ("Cost", _cost(view)),
        ("Result", [Span(view.result, "title")] if view.result else []),
        ("Checkpoints", [f"{file.name} {short_hash(file.sha256)}" for file in view.checkpoints]),
        ("Not home", [Span(one, "bad") for one in view.missing]),
        (name, ended),
        ("Incidents", [Span(incident, "warn") for incident in view.incidents]),
        ("Chain", [chain] if view.previous else []),
        ("Next", [Span(view.next_command, "accent")] if view.next_command else []),
    ]


def _hashed(word: str, digest: str) -> str:
    return f"{word} {short_hash(digest)}" if digest else ""


def _plain(step: str) -> str:
    return step.replace("_", " ")


def _when(wall: float | None, now: float) -> str:
    return UNKNOWN if wall is None else local_time(wall, now=now)


def _runtime(view: ReceiptView) -> list[Cell]:
    begun = any(step == "train_start" and wall is not None for step, wall in view.timeline)
    unknown = "training unknown" if begun else "no training"
    train = unknown if view.training_s is None else f"{format_duration(view.training_s)} training"
    billed = "billable unknown" if view.billable_s is None else f"{format_duration(view.billable_s)} billable"
    return [train, billed]


def _phases(view: ReceiptView) -> list[Cell]:
    """Where the paid seconds went, each phase beside what the plan allowed it; nothing is left out but zeros."""
    cells: list[Cell] = []
    for phase in view.phases:
        limit = "" if phase.limit_s is None else f" of {format_duration(phase.limit_s)}"
        late = phase.limit_s is not None and phase.seconds > phase.limit_s
        if int(phase.seconds) or limit:
            cells.append(Span(f"{phase.name} {format_duration(phase.seconds)}{limit}", "warn" if late else ""))
    if view.expected_train_s is not None and cells:
        low, high = view.expected_train_s
        cells.append(f"training expected {format_duration(low)} to {format_duration(high)}")
    return cells


def _in_training(view: ReceiptView) -> list[Cell]:
    told: list[Cell] = [f"{one.name} {format_duration(one.seconds)}" for one in view.in_training if int(one.seconds)]
    return [*told, "by the machine's word"] if told else []


def _cost(view: ReceiptView) -> list[Cell]:
    cost: Cell = "unknown" if view.cost_micros is None else Span(format_usd(view.cost_micros), "money")
    parts: list[Cell] = [cost, view.cost_label]
    if view.billed_micros is not None:
        parts.append(f"provider bill {format_usd(view.billed_micros)}")
    if view.cap_micros is not None and view.cost_micros is not None and view.cost_micros > view.cap_micros:
        over = format_usd(left_of(view.cost_micros, view.cap_micros))
        parts.append(Span(f"cap {format_usd(view.cap_micros)} NOT KEPT, {over} over it", "bad"))
    elif view.cap_micros is not None:
        used = "" if view.cost_micros is None else f", used {percent_of(view.cost_micros, view.cap_micros):.0f} %"
        parts.append(f"cap {format_usd(view.cap_micros)}{used}")
    return parts


_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#~!&])")


def receipt_markdown(view: ReceiptView) -> str:
    """The same as Markdown: a table with whole digests and UTC times, then log and sample as literal blocks."""
    number = "" if view.seq is None else f" #{view.seq:04d}"
    lines = [
        f"# Receipt {_escape(view.run)}{number}",
        "",
        f"**{_escape(view.sentence)}**",
        "",
        "| | |",
        "| --- | --- |",
    ]
    lines += [f"| {name} | {_escape(value)} |" for name, value in _markdown_pairs(view)]
    if view.checkpoints:
        lines += ["", "| checkpoint | sha256 |", "| --- | --- |"]
        lines += [f"| {_escape(file.name)} | `{_escape(file.sha256)}` |" for file in view.checkpoints]
    for title, texts in (("Log", [safe_line(text) for text in view.log_lines]), ("Sample", safe_text(view.sample))):
        if any(texts):
            longest = max((len(run) for text in texts for run in re.findall("`+", text)), default=0)
            fence = "`" * max(3, longest + 1)
            lines += ["", f"## {title}", "", f"{fence}text", *texts, fence]
    return "\n".join(lines)


def _markdown_pairs(view: ReceiptView) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for name, parts in _pairs(view, 0.0):
        texts = [part.text if isinstance(part, Span) else part for part in parts]
        if name == "Timeline":
            texts = [f"{_plain(step)} {UNKNOWN if wall is None else utc(wall)}" for step, wall in view.timeline]
        if name not in ("Checkpoints", "Next", "Chain", "Shipped") and any(texts):
            pairs.append((name, " · ".join(text for text in texts if text)))
    digests = (
        ("Recipe sha256", view.recipe_sha256),
        ("Trainer sha256", view.trainer_sha256),
        ("Data sha256", view.data_sha256),
        ("Evidence sha256", view.proof_sha256),
        ("Receipt sha256", view.digest),
        ("After", view.previous),
    )
    signature = {"signed": "signed, ed25519", "unsigned": "unsigned", "bad": "BAD SIGNATURE"}[view.signature]
    return [*pairs, *((name, digest) for name, digest in digests if digest), ("Signature", signature)]


def _escape(text: str) -> str:
    """Text that Markdown and HTML leave as it is."""
    return _MARKDOWN.sub(r"\\\1", safe_line(text))
