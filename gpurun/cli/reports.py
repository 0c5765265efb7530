"""What `gpurun report` does: reads run folders as they are, and brings them to the view that draws the page."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from gpurun import __version__
from gpurun.cli.listing import state_word
from gpurun.cli.receipts import view_of
from gpurun.cli.result import Result
from gpurun.cli.session import Session
from gpurun.core.errors import GpurunError, SetupError, UsageError
from gpurun.core.money import Micros, format_usd, total
from gpurun.core.paths import is_stream
from gpurun.core.plan import Earlier, Mode
from gpurun.core.progress import Event
from gpurun.ledger.receipt import read_receipt
from gpurun.ledger.untrusted import lines_of
from gpurun.lifecycle.home.local_copy import LocalCopy
from gpurun.lifecycle.runs import Sight, find_run, look
from gpurun.view.paint import render
from gpurun.view.quantities import format_bytes, format_duration, short_hash
from gpurun.view.receipt import ReceiptView
from gpurun.view.report.charts import MOST_RUNS
from gpurun.view.report.material import RunMaterial, differences
from gpurun.view.report.page import report_page
from gpurun.view.report.summary import summary
from gpurun.view.report.told import Told, hear
from gpurun.view.safe import safe_line
from gpurun.view.screen import Screen
from gpurun.view.story import tell_rate


def report_runs(session: Session, runs: list[str], *, html: str) -> Result:
    """Several runs side by side: as a page in the file `html` (`-` is standard output), else as a table."""
    if html == "-" and session.json:
        hint = "Name a file: --html report.html"
        raise UsageError("report.two_outputs", "--json and --html - both want standard output.", hint=hint)
    names = list(dict.fromkeys(find_run(session.home, run) for run in runs))
    if html and len(names) > MOST_RUNS:
        what = f"{len(names)} runs cannot be told apart in one chart; {MOST_RUNS} can."
        raise UsageError(
            "report.too_many", what, hint="Name fewer runs, or leave --html out: a table has room for all."
        )
    material = [material_of(session, look(session.home, name)) for name in names]
    data = {
        "runs": [run.as_record() for run in material],
        "differences": [{"key": key, "values": values} for key, values in differences(material)],
        "html": str(Path(html).expanduser().absolute()) if html else None,
    }
    if not html:
        after = f"The page with curves and samples: gpurun report {' '.join(names)} --html report.html"
        return Result(data=data, text=render(summary(material, session.style), session.style), after=after)
    page = report_page(material, version=__version__)
    if html == "-":
        return Result(data=data, text=page.rstrip("\n"))
    size = _write(Path(html).expanduser(), page)
    return Result(data=data, text=f"Wrote {html} ({format_bytes(size)}). Any browser opens it, offline too.")


def _write(path: Path, page: str) -> int:
    """Put the page where it was asked for, whole or not at all; its size in bytes."""
    content, part = page.encode("utf-8"), path.parent / f"{path.name}.part"
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if is_stream(path):
            return path.write_bytes(content)
        part.write_bytes(content)
        part.rename(path)
    except OSError as error:
        with suppress(OSError):  # Where it could not be made, it cannot be taken away either.
            part.unlink(missing_ok=True)
        raise SetupError("report.cannot_write", f"{path} cannot be written: {error.strerror}.",
                         hint="Choose another place with --html, or make room.") from None  # fmt: skip
    return len(content)


def material_of(session: Session, sight: Sight) -> RunMaterial:
    """Everything that the report needs to know of one run; what its machine said is heard as far as it can be read."""
    plan = sight.plan
    told = hear((line.encode() for line in lines_of(sight.folder.events)), _spending(sight))
    receipt, why = _receipt(session, sight)
    return RunMaterial(
        run=sight.folder.name,
        recipe=plan.recipe + (" (rehearsal)" if plan.form == "rehearsal" else ""),
        form=plan.form,
        mode=str(plan.mode),
        where=f"{plan.offer.provider} {plan.offer.label}",
        state=state_word(sight),
        parameters=plan.parameters,
        resolved=plan.resolved,
        shards=safe_line(f"{plan.data.source}, sha256 {short_hash(plan.data.sha256)}"),
        tokenizer_sha256=plan.data.tokenizer_sha256,
        told=told,
        receipt=receipt,
        no_receipt=why,
        spent_micros=None if receipt else _screen(sight, len(sight.records)).spent(session.clock.wall()),
        notes=tuple(_notes(sight, told)),
    )


def earlier_words(earlier: Earlier) -> str:
    """What a run went on from, and what is not in its own cost."""
    spent = earlier.spent_micros
    cost = f", which cost {format_usd(spent)} at most, not counted here" if spent else ""
    return f"{earlier.run} after step {earlier.step:,}{cost}"


def _receipt(session: Session, sight: Sight) -> tuple[ReceiptView | None, str]:
    """The run's receipt, or the reason why there is none to show."""
    if not sight.folder.receipt.exists():
        why = "it goes on" if sight.owner else "it was not finished"
        return None, why if sight.unfinished else "its receipt is not here any more"
    try:
        return view_of(read_receipt(session.home, sight.folder), sight.folder), ""
    except GpurunError as error:
        return None, error.what
    except (KeyError, TypeError, ValueError, AttributeError):
        return None, "its receipt lacks what a receipt states"


def _screen(sight: Sight, records: int) -> Screen:
    """The live view's own bookkeeping after so many records."""
    screen = Screen(sight.plan)
    screen.update(sight.records[:records], (), ())
    return screen


def _spending(sight: Sight) -> Callable[[float], Micros | None]:
    """What was spent after so many seconds of training, boot and upload included; None where it is free or unknown.

    A run that went on from another begins with what that one cost: its losses were not to be had for less.
    """
    places = [place for place, record in enumerate(sight.records) if record.event is Event.TRAIN_STARTED]
    before = sight.plan.continues.spent_micros if sight.plan.continues else Micros(0)
    if not places or sight.plan.mode is not Mode.PAID or before is None:
        return lambda seconds: None
    began, screen = sight.records[places[0]].wall, _screen(sight, places[0] + 1)
    if not screen.spent(began + 3600):
        return lambda seconds: None
    return lambda seconds: total(before, screen.spent(began + seconds))


def _notes(sight: Sight, told: Told) -> Iterator[str]:
    """What a reader of the figures has to know about them."""
    if sight.plan.mode is Mode.REHEARSAL:
        yield "A rehearsal: the recipe's small form on this machine's CPU, not the run that would be paid for."
    if (earlier := sight.plan.continues) is not None:
        yield f"It went on from {earlier_words(earlier)}."
        if earlier.spent_micros:
            yield "In the curves its dollars begin with what that one cost, its training time at nought."
    if sight.unfinished:
        yield "The run is not finished: its figures are those of this moment."
    elif (word := state_word(sight)) in ("failed", "cut off", "never started"):
        yield f"The run is over without having done what it was to: {word}."
    if sight.damage is not None:
        yield f"Its journal is damaged: {sight.damage}."
    for record in sight.records:
        if record.event is Event.RATE_OBSERVED:
            step, planned = record.data.get("step"), sight.plan.estimate.likely_s
            said = f"Planned were {format_duration(planned)} of training; after" if planned else "After"
            yield f"{said} {step} steps: {tell_rate(record.data)}."
    if not told.losses.seen:
        yield "It reported no loss."
    if told.unreadable:
        yield f"{told.unreadable:,} lines of its events could not be read and are left out."
    if told.not_finite:
        yield f"{told.not_finite:,} losses were no finite numbers and are left out."
    dropped = LocalCopy(sight.folder.events).dropped_bytes
    if dropped:
        yield f"{format_bytes(dropped)} in the middle of its events were too much to keep."
    if told.stop_reason not in ("", "done"):
        yield f"The trainer stopped: {told.stop_reason}."
