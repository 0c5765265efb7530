"""Presents each trial of a sweep as a separate run in the report, the best trial first."""

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
    """Return what the report needs about a run; for a sweep, one item per trial that has begun, the best first."""
    whole, job = material_of(home, sight, now), sight.plan.job
    events: dict[int, list[TrialEvent]] = {}
    for event in events_of(sight.folder.events) if isinstance(job, SweepJob) else ():
        if isinstance(event, TrialEvent) and event.trial is not None:
            before = events.get(event.trial, [])
            # Unless the event restores or continues a trial, the trial starts again, and its earlier events are
            # dropped.
            kept = before if event.is_restored or event.seconds else []
            events[event.trial] = [*kept, later_of_trial(before[-1] if before else None, event)]
    if not isinstance(job, SweepJob) or not events:
        return [whole]
    paid_s = {
        number: 0.0 if trial_events[-1].is_restored else trial_events[-1].seconds or 0.0
        for number, trial_events in events.items()
    }
    cost, all_s = whole.cost_micros, sum(paid_s.values())
    found = [
        _trial_material(whole, job, trial_events, None if cost is None else share_of(cost, paid_s[number], all_s))
        for number, trial_events in sorted(events.items(), key=lambda pair: (pair[1][-1].rank, pair[0]))
    ]
    notes = [note for note in whole.notes if note != "It reported no loss."]
    return [replace(trial, notes=tuple(notes) if trial is found[0] else ()) for trial in found]


def _trial_material(whole: RunMaterial, job: SweepJob, events: list[TrialEvent], micros: Micros | None) -> RunMaterial:
    """Return one trial as a run: the settings of the sweep's job, with the trial's own settings filled in."""
    last, params = events[-1], dict(events[-1].params)
    known = {name: params.get(name, "") for name in job.sweep.space}
    trained: Job | None = job.with_settings(known) if all(known.values()) else None
    words = tuple(_fill_placeholders(word, params) for word in job.argv)
    return replace(
        whole,
        run=f"{whole.run}/{last.trial:03d}",
        recipe=job.trial.recipe,
        state=last.state,
        resolved=trained.resolved if trained else {},
        parameters=trained.parameters or None if trained else None,
        history=_trial_curves(events, micros),
        receipt=None,
        no_receipt=last.state,
        spent_micros=micros,
        terms=TRAINER if trained else COMMAND,
        argv=words,
    )


def _trial_curves(events: list[TrialEvent], micros: Micros | None) -> RunHistory:
    """Return one trial's curves, with its own steps, tokens and seconds, and its share of the cost."""
    trial_events, last = RunHistory(), events[-1]
    trial_events.steps, trial_events.seconds = last.steps, last.seconds or 0.0
    validated = None
    for event in events:
        if event.step is None:
            continue
        seconds = event.seconds or 0.0
        spent = None if micros is None else share_of(micros, min(seconds, trial_events.seconds), trial_events.seconds)
        if event.loss is not None:
            trial_events.losses.add(Mark(event.step, event.loss, event.tokens, seconds, spent))
        if event.val_loss is not None and event.val_loss != validated:
            validated = event.val_loss
            mark = Mark(event.step, validated, event.tokens, seconds, spent)
            trial_events.validation.add(mark)
            trial_events.best = (
                mark if trial_events.best is None or mark.loss < trial_events.best.loss else trial_events.best
            )
    return trial_events


def _fill_placeholders(word: str, params: dict[str, str]) -> str:
    for name, value in params.items():
        word = word.replace(f"{{{name}}}", value)
    return word
