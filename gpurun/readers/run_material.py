"""Collects everything that a run's folder contains about the run, for the report and a model card."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpurun.core.clock import utc
from gpurun.core.errors import GpurunError
from gpurun.core.journal_events import Event, RateObserved
from gpurun.core.money import Micros, format_usd, total
from gpurun.core.paths import Home, read_regular
from gpurun.core.receipt_record import Receipt
from gpurun.core.run_plan import Earlier, Mode, Request
from gpurun.core.untrusted import lines_of, safe_line
from gpurun.ledger.runs import Sight
from gpurun.ledger.spending import spent_by
from gpurun.ledger.write_receipt import read_receipt
from gpurun.lifecycle.artifacts.log_copy import LocalCopy
from gpurun.readers.run_status import state_word
from gpurun.readers.weights import steps_at_home
from gpurun.view.event_text import tell_pace, tell_rate
from gpurun.view.number_format import format_bytes, format_duration, short_hash
from gpurun.view.receipt_screen import NOT_HERE
from gpurun.view.report.report_model import RunMaterial
from gpurun.view.report.series import RunHistory, hear

_ENDED = {"failed": "failed", "cut off": "was cut off", "never started": "never started"}


def material_of(home: Home, sight: Sight, now: float) -> RunMaterial:
    """Return everything that the report needs about one run. Unreadable lines in the machine's files are skipped."""
    plan = sight.plan
    history = hear(lines_of(sight.folder.events), spending_of(sight))
    receipt, why = _receipt_or_reason(home, sight)
    return RunMaterial(
        run=sight.folder.name,
        recipe=plan.job.recipe + (" (rehearsal)" if plan.job.form == "rehearsal" else ""),
        form=plan.job.form,
        mode=str(plan.mode),
        where=f"{plan.offer.provider} {plan.offer.label}",
        state=state_word(sight),
        parameters=plan.job.parameters or None,
        resolved=plan.job.resolved,
        shards=safe_line(f"{plan.data.source}, sha256 {short_hash(plan.data.sha256)}".removesuffix(", sha256 ")),
        tokenizer_sha256=plan.data.tokenizer_sha256,
        history=history,
        receipt=receipt,
        no_receipt=why,
        spent_micros=None if receipt else spent_by(sight.records, now),
        notes=tuple(_notes(sight, history, receipt)),
        terms=plan.job.terms,
        argv=plan.job.argv,
        folder_sha256=plan.bundle_sha256,
        began_wall=sight.opened_wall or None,
        given=_typed_keys(sight),
        trainer=plan.job.trainer,
        env=plan.job.env,
        pip=plan.job.pip,
    )


def _typed_keys(sight: Sight) -> tuple[str, ...]:
    """Return the recipe's keys that the user typed with --set; () if the request cannot be read."""
    try:
        request = Request.from_json(read_regular(sight.folder.request))
    except (OSError, GpurunError, ValueError):
        return ()
    return tuple(safe_line(text.partition("=")[0].strip()) for text in request.overrides)


def earlier_words(earlier: Earlier) -> str:
    """Return a phrase with the continued run, its step, and its cost, which is not included in the new run's cost."""
    spent = earlier.spent_micros
    cost = f", which cost {format_usd(spent)} at most, not counted here" if spent else ""
    return f"{earlier.run} after step {earlier.step:,}{cost}"


def _pace_sentence(sight: Sight, wall: float, rate: RateObserved, receipt: Receipt | None) -> str:
    """Return a sentence with the planned time, the measured speed and, if training has ended, the time taken."""
    step, planned_s, terms = rate.step, sight.plan.estimate.likely_s, sight.plan.job.terms
    plan = f"Planned: {format_duration(planned_s)} of {terms.doing}; " if planned_s else ""
    if sight.unfinished:
        return f"{plan}at {utc(wall)[:16]}Z, after {step} steps: {tell_rate(rate, terms)}."
    took_s = receipt.predicate["training"]["seconds"]["train_s"] if receipt else None
    took = f"; it took {format_duration(took_s)}" if took_s is not None else ""
    return f"{plan}measured after {step} steps: {tell_pace(rate)}{took}."


def _receipt_or_reason(home: Home, sight: Sight) -> tuple[Receipt | None, str]:
    """Return the run's receipt and ""; or None and the reason why there is no receipt to show."""
    if not sight.folder.receipt.exists():
        why = "it is under way" if sight.owner else "it was not finished"
        return None, why if sight.unfinished else "its receipt is no longer here"
    try:
        return read_receipt(home, sight.folder), ""
    except GpurunError as error:
        return None, error.what


def spending_of(sight: Sight) -> Callable[[float], Micros | None]:
    """Return a function from seconds of training to the total cost, including boot and upload.

    The function returns None if the run is free or its price is unknown. For a run that continued another run, the cost
    begins with that run's cost, because the losses could not have been reached for less.
    """
    places = [place for place, record in enumerate(sight.records) if record.event is Event.TRAIN_STARTED]
    before = sight.plan.continues.spent_micros if sight.plan.continues else Micros(0)
    if not places or sight.plan.mode is not Mode.PAID or before is None:
        return lambda seconds: None
    began, records = sight.records[places[0]].wall, sight.records[: places[0] + 1]
    if not spent_by(records, began + 3600):
        return lambda seconds: None
    return lambda seconds: total(before, spent_by(records, began + seconds))


def _notes(sight: Sight, history: RunHistory, receipt: Receipt | None) -> Iterator[str]:
    """Yield notes that a reader needs to interpret the figures."""
    terms = sight.plan.job.terms
    if sight.plan.mode is Mode.REHEARSAL:
        small = "the recipe's small form on this machine's CPU" if terms.has_model else "a short run on this machine"
        yield f"This is a rehearsal: {small}, not the paid run."
    if (earlier := sight.plan.continues) is not None:
        yield f"It continued from {earlier_words(earlier)}."
        if earlier.spent_micros:
            yield "In the curves, the cost begins with that run's cost, and the time begins at zero."
    if sight.unfinished:
        yield "The run is not finished: these are its current figures."
    elif (word := state_word(sight)) in _ENDED:
        yield f"The run {_ENDED[word]}."
    if sight.damage is not None:
        yield f"Its journal is damaged: {sight.damage}."
    for record in sight.records:
        if isinstance(rate := record.typed, RateObserved):
            yield _pace_sentence(sight, record.wall, rate, receipt)
    # For a command it is not known which output belongs to that loss.
    if (
        terms.has_model
        and history.best is not None
        and not sight.unfinished
        and history.best.step not in steps_at_home(sight)
    ):
        yield f"Its best validation loss was at step {history.best.step:,}, {NOT_HERE}."
    if not history.losses.seen:
        yield "It reported no loss."
    if history.unreadable:
        yield f"{history.unreadable:,} lines of its events could not be read and are left out."
    if history.not_finite:
        yield f"{history.not_finite:,} losses were not finite numbers and are left out."
    dropped = LocalCopy(sight.folder.events).dropped_bytes
    if dropped:
        yield f"{format_bytes(dropped)} in the middle of its events were too large to keep."
    if history.stop_reason not in ("", "done"):
        said = history.stop_message or f"{terms.worker} stopped: {history.stop_reason}"
        yield f"{said[:1].upper()}{said[1:].rstrip('.')}."
