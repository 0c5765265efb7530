"""The report's view of a sweep: each of its trials as a separate run, the best first."""

from __future__ import annotations

from dataclasses import replace

from gpurun.core.job_terms import COMMAND, TRAINER
from gpurun.core.money import Micros, share_of
from gpurun.core.paths import Home
from gpurun.core.run_plan import Job
from gpurun.core.trainer_events import TrialEvent, events_of, later_of_trial
from gpurun.jobs.sweep import SweepJob
from gpurun.ledger.runs import Sight
from gpurun.readers.run_material import material_of
from gpurun.view.report.report_model import RunMaterial
from gpurun.view.report.series import Mark, RunHistory


def materials_of(home: Home, sight: Sight, now: float) -> list[RunMaterial]:
    """Return what the report needs about a run; for a sweep, one item for each trial that has begun."""
    whole, job = material_of(home, sight, now), sight.plan.job
    events: dict[int, list[TrialEvent]] = {}
    for event in events_of(sight.folder.events) if isinstance(job, SweepJob) else ():
        if isinstance(event, TrialEvent) and event.trial is not None:
            before = events.get(event.trial, [])
            kept = (
                before if event.is_restored or event.seconds else []
            )  # A trial that starts again loses its earlier figures.
            events[event.trial] = [*kept, later_of_trial(before[-1] if before else None, event)]
    if not isinstance(job, SweepJob) or not events:
        return [whole]
    paid_s = {
        number: 0.0 if trial_events[-1].is_restored else trial_events[-1].seconds or 0.0
        for number, trial_events in events.items()
    }
    cost, all_s = whole.cost_micros, sum(paid_s.values())
    found = [
        _material(whole, job, trial_events, None if cost is None else share_of(cost, paid_s[number], all_s))
        for number, trial_events in sorted(events.items(), key=lambda pair: (pair[1][-1].rank, pair[0]))
    ]
    notes = [note for note in whole.notes if note != "It reported no loss."]
    return [replace(material, notes=tuple(notes) if material is found[0] else ()) for material in found]


def _material(whole: RunMaterial, job: SweepJob, events: list[TrialEvent], micros: Micros | None) -> RunMaterial:
    """Return one trial as a run: its settings are those of the sweep's job, with its own filled in."""
    last, params = events[-1], dict(events[-1].params)
    known = {name: params.get(name, "") for name in job.sweep.space}
    trained: Job | None = job.with_settings(known) if all(known.values()) else None
    words = tuple(_filled(word, params) for word in job.argv)
    return replace(
        whole,
        run=f"{whole.run}/{last.trial:03d}",
        recipe=job.trial.recipe,
        state=last.state,
        resolved=trained.resolved if trained else {},
        parameters=trained.parameters or None if trained else None,
        history=_history_of(events, micros),
        receipt=None,
        no_receipt=last.state,
        spent_micros=micros,
        terms=TRAINER if trained else COMMAND,
        argv=words,
    )


def _history_of(events: list[TrialEvent], micros: Micros | None) -> RunHistory:
    """Return the curve of one trial, in its own steps, tokens and seconds, and with its share of the dollars."""
    history, last = RunHistory(), events[-1]
    history.steps, history.seconds = last.steps, last.seconds or 0.0
    validated = None
    for event in events:
        if event.step is None:
            continue
        seconds = event.seconds or 0.0
        spent = None if micros is None else share_of(micros, min(seconds, history.seconds), history.seconds)
        if event.loss is not None:
            history.losses.add(Mark(event.step, event.loss, event.tokens, seconds, spent))
        if event.val_loss is not None and event.val_loss != validated:
            validated = event.val_loss
            mark = Mark(event.step, validated, event.tokens, seconds, spent)
            history.validation.add(mark)
            history.best = mark if history.best is None or mark.loss < history.best.loss else history.best
    return history


def _filled(word: str, params: dict[str, str]) -> str:
    for name, value in params.items():
        word = word.replace(f"{{{name}}}", value)
    return word
