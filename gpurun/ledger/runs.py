"""Finds the runs of a home and reads them without a lock; creates new runs, but never changes an existing one."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from gpurun import __version__
from gpurun.core.clock import machine_id
from gpurun.core.errors import GpurunError, RunHeld, SetupError, UsageError, VerificationFailed, did_you_mean
from gpurun.core.journal_events import Incident, RunOpened
from gpurun.core.journal_records import Event, Phase, Record, RunState
from gpurun.core.paths import Home, RunFolder, fsync_folder, make_private, read_regular, write_atomic
from gpurun.core.receipt_rules import RULES
from gpurun.core.run_plan import Candidate, Plan, Request
from gpurun.ledger.chain import has_receipt
from gpurun.ledger.journal import read_journal
from gpurun.ledger.plan_from_journal import plan_of
from gpurun.ledger.run_lock import holder_of
from gpurun.ledger.run_state import WORKING, find_offer_place, replay_journal

SOON_S = 1800.0
"""How long before the end of its lease a dev box shows a warning."""


@dataclass(frozen=True)
class Sight:
    """One run, as read from its folder. `plan` is on the offer that the run uses.

    `owner` names the process that drives the run, None if there is none. `damage` says where its journal is damaged.
    `approved` are all offers that may have been rented. If the plan's file is damaged, `plan_lost` is the error and
    `plan` only the journal's part of it: the run can be stopped and ended, but not resumed.
    """

    folder: RunFolder
    plan: Plan
    records: tuple[Record, ...]
    state: RunState
    owner: str | None
    damage: str | None
    approved: tuple[Candidate, ...] = ()
    plan_lost: VerificationFailed | None = None

    @property
    def unfinished(self) -> bool:
        """Return whether the run is not closed, or was closed although something of it may be billed."""
        return self.state.phase is not Phase.CLOSED or self.state.may_be_billing

    @property
    def opened_wall(self) -> float:
        """Return the time of its journal's first record; 0 if there is none."""
        return self.records[0].wall if self.records else 0.0


# The incidents that are only information while gpurun ends a machine. Any other incident is why it gave up.
_NOTED = frozenset(
    {
        "create.duplicate", "create.duplicate_gone", "create.late", "create.late_gone", "leftover", "leftover_gone",
        "machine.ends_itself", "machine.not_told", "machine.unwatched", "box.results_left", "box.work_left",
        "box.not_left", "account.vouched", "death.denied",
    }
)  # fmt: skip
_TRIES = (Event.DESTROY_INTENDED, Event.DESTROY_ASKED, Event.DEATH_READ)


def gave_up(sight: Sight, now: float | None = None) -> str:
    """Return why the last attempt to prove the machine's end failed; "" if none failed, or if its end is proven.

    `train`, `ps` and `audit` show this sentence, whether or not the next attempt has begun. With `now`, it also states
    if the machine was ordered to end itself and that time has passed.
    """
    is_at_work = sight.state.phase in (*WORKING, Phase.COLLECTED) and sight.state.phase is not Phase.CREATING
    for record in reversed(sight.records) if sight.state.may_be_billing and not is_at_work else ():
        incident = record.typed if record.event is Event.INCIDENT else None
        if isinstance(incident, Incident) and not _is_noted(incident.code):
            is_over = now is not None and sight.state.ends_wall is not None and sight.state.ends_wall <= now
            over = " That time has passed, and its end was not seen: it may be billing." if is_over else ""
            return f"{incident.message.rstrip('.')}.{over}"
        if record.event is not Event.INCIDENT and record.event not in _TRIES:
            return ""
    return ""


def _is_noted(code: str) -> bool:
    return code in _NOTED or code.endswith("disk_full")


def look_at_run(home: Home, name: str) -> Sight:
    """Read one run; VerificationFailed if its plan is lost completely, SetupError if its journal cannot be read."""
    folder = home.run(name)
    reading = read_journal(folder.journal)
    plan, plan_lost = plan_of(folder, reading.records)
    state = replay_journal(name, reading.records)
    if reading.hides_intent and not has_receipt(home, name):
        state = state.model_copy(update={"unread": True})
    return Sight(
        folder=folder,
        plan=plan.with_chosen(plan.approved[find_offer_place(state, plan)]),
        records=tuple(reading.records),
        state=state,
        owner=holder_of(folder.lock),
        damage=reading.damage or describe_lost_records(home, folder, state),
        approved=plan.approved,
        plan_lost=plan_lost,
    )


def describe_lost_records(home: Home, folder: RunFolder, state: RunState) -> str | None:
    """Return the damage if the journal has lost the records of a machine that the run had; else None.

    Without this check, another machine would be requested.
    """
    if state.phase is not Phase.OPENED or state.failure or state.stop:
        return None
    has_events = folder.events.exists() and folder.events.stat().st_size > state.events_before
    if has_events or has_receipt(home, folder.name):
        return "the end: the records of the run's machine are lost"
    return None


def has_requested(folder: RunFolder, token: str) -> bool:
    """Return whether a run's journal, damaged or not, contains a token.

    The token shows that a machine is this run's, because a run in another home may have the same name.
    """
    try:
        return token.encode() in read_regular(folder.journal)
    except FileNotFoundError:
        return False


def find_run(home: Home, reference: str) -> str:
    """Return the name of the run that the user means by a name, a unique beginning of a name, or `@last`.

    Raise UsageError if there is no such run, or more than one.
    """
    if not reference.strip():
        # Every name begins with "": a script with an unset $RUN would stop the only run.
        what = "The name of the run is empty."
        raise UsageError(
            "run.blank",
            what,
            hint="Name a run, or write @last. In a script, check the variable that should hold the name.",
        )
    names = sorted(folder.name for folder in home.folders() if _is_planned(folder))
    if reference == "@last" and names:
        return planned_runs(home)[-1]
    if reference in names:
        return reference
    matching = [name for name in names if name.startswith(reference)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        what = f"{reference!r} matches several runs: {', '.join(matching[:5])}."
        raise UsageError("run.ambiguous", what, hint="Write more letters.")
    there = "`gpurun ps --all` lists all runs. For a run in another home, add its --home DIR."
    hint = did_you_mean(reference, names, otherwise=there)
    raise UsageError("run.unknown", f"There is no run {reference!r} in {home.root}.", hint=hint)


def usual_run(home: Home) -> tuple[str, str]:
    """Return the run that the user means without naming one, and why in words: the only open run, else the last run."""
    still_open = planned_runs(home, only_open=True)
    if len(still_open) == 1:
        return still_open[0], "the only open run"
    if every := planned_runs(home):
        return every[-1], "the last run"
    hint = "gpurun train --dry-run makes one for free. For a run in another home, add its --home DIR."
    raise UsageError("run.none", f"There is no run in {home.root} yet.", hint=hint)


def left_alone(home: Home) -> str | None:
    """Return the only unfinished run that no process drives; None if there is none, UsageError if there are several."""
    names = [sight.folder.name for sight in unfinished_runs(home)]
    if len(names) > 1:
        hint = f"Name one: gpurun resume {names[0]}."
        raise UsageError("run.several", f"{len(names)} runs are unfinished: {', '.join(names[:5])}.", hint=hint)
    return names[0] if names else None


def demand_free(home: Home, name: str) -> None:
    """Raise RunHeld if a run of the home has or had this name."""
    if home.run(name).path.exists():
        raise _name_taken_error(name)
    if has_receipt(home, name):
        raise RunHeld(
            "run.name_taken",
            f"The chain of receipts already has a run {name}, whose folder is gone; a second would get no receipt.",
            hint="Choose another --name, or leave it out.",
        )


def _name_taken_error(name: str) -> RunHeld:
    hint = f"Choose another --name, or look at it: gpurun attach {name}."
    return RunHeld("run.name_taken", f"There is already a run {name}.", hint=hint)


def create_run(home: Home, request: Request, plan: Plan) -> RunFolder:
    """Create the folder of a new run with request, plan, shards and trainer; RunHeld if the name is taken."""
    demand_free(home, plan.run)
    folder = home.run(plan.run)
    try:
        make_private(folder.path.parent)
        folder.path.mkdir(mode=0o700)
    except FileExistsError:  # Another command was quicker.
        raise _name_taken_error(plan.run) from None
    staged = home.staged_data(plan.run)
    if staged.is_dir():
        # The shards are moved into the run's folder, and stay there beside its outputs.
        staged.rename(folder.data)
        key = "beside" if plan.data.beside else "folder"
        plan = plan.model_copy(update={"data": plan.data.model_copy(update={key: str(folder.data)})})
    if home.staged_trainer(plan.run).is_dir():
        home.staged_trainer(plan.run).rename(folder.trainer)
    write_atomic(folder.request, request.to_json().encode())
    # The plan is written last: for a folder without a plan, no machine was requested.
    write_atomic(folder.plan, plan.to_json().encode())
    fsync_folder(folder.path.parent)
    return folder


def opening_record(plan: Plan, folder: RunFolder, home: Home, *, endpoint: str, imported: Any = None) -> RunOpened:
    """Return the event that opens a run, with the digests of request and plan from `folder`.

    A field that applies only to some runs is set only for them. `endpoint` is an address in place of the provider's.
    """
    optional: dict[str, Any] = {
        **({"core_bundle_sha256": plan.data.core_sha256} if plan.data.core_sha256 else {}),
        **plan.choices.model_dump(include={"max_gpu_hours"}, exclude_none=True),
        **plan.choices.model_dump(mode="json", include={"pass_env"}, exclude_defaults=True),
        **plan.job.opened(),
        **({"imported": imported} if imported else {}),
        **({"legs": plan.choices.legs} if plan.choices.keep_going else {}),
    }
    before = {"run", "step", "steps", "receipt_sha256"}
    return RunOpened(
        run=plan.run,
        home=home.id,
        machine=machine_id(),
        endpoint=endpoint,
        rules=RULES,
        mode=plan.mode,
        recipe=plan.job.recipe,
        form=plan.job.form,
        recipe_sha256=plan.job.recipe_sha256,
        request_sha256=hashlib.sha256(read_regular(folder.request)).hexdigest(),
        plan_sha256=hashlib.sha256(read_regular(folder.plan)).hexdigest(),
        data_sha256=plan.data.sha256,
        bundle_sha256=plan.bundle_sha256,
        trainer=plan.job.trainer,
        gpurun_version=__version__,
        platform=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        provider=plan.offer.provider,
        cap_micros=plan.cap_micros,
        worst_micros=plan.most_micros,
        stage=plan.choices.stage,
        challenge=plan.job.challenge,
        continues=plan.continues.model_dump(include=before, exclude_defaults=True) if plan.continues else None,
        **optional,
    )


def unfinished_runs(home: Home) -> list[Sight]:
    """Return the unfinished runs that no process drives, oldest first."""
    return look_at_undriven(home)[0]


def look_at_undriven(home: Home) -> tuple[list[Sight], list[GpurunError]]:
    """Return the unfinished runs that no process drives, oldest first, and the errors of runs that cannot be read."""
    sights, errors = list[Sight](), list[GpurunError]()
    for sight, error in look_at_all(home, planned_runs(home, only_open=True)):
        sights += [sight] if sight and sight.unfinished and sight.owner is None else []
        errors += [error] if error else []
    return sights, errors


def planned_runs(home: Home, *, only_open: bool = False) -> list[str]:
    """Return the names of the runs that got a plan, oldest first.

    If plan.json is lost, the journal shows that there was a plan.
    """
    return [name for name in home.run_names(only_open=only_open) if _is_planned(home.run(name))]


def _is_planned(folder: RunFolder) -> bool:
    """Return whether a run got a plan; True for a folder that cannot be read, because it may contain one."""
    try:
        return folder.plan.exists() or folder.journal.exists()
    except PermissionError:
        return True


def look_at_all(home: Home, names: Iterable[str]) -> Iterator[tuple[Sight | None, GpurunError | None]]:
    """Yield each run with its error: a run that cannot be read is None, and one that lost its plan has both."""
    for name in names:
        try:
            sight = look_at_run(home, name)
        except (VerificationFailed, SetupError) as error:
            yield None, error
        else:
            yield sight, sight.plan_lost


def ends_soon(state: RunState, plan: Plan, now_wall: float) -> str:
    """Return the warning for a dev box of which the lease ends within SOON_S; "" for every other run."""
    if not plan.job.is_attended or state.phase is not Phase.TRAINING or state.deadline_wall is None:
        return ""
    started_wall = state.instance.started_wall if state.instance is not None else None
    lease = plan.lease
    ends_wall = lease.ends_wall(state.deadline_wall, started_wall)
    left_s = ends_wall - lease.destroy_s - lease.collect_s - plan.job.save_s - now_wall
    if left_s > SOON_S:
        return ""
    return (
        f"{state.run} ends in {max(0.0, left_s) / 60:.0f} min; a lease cannot be extended. For another box with its "
        f"files: gpurun stop {state.run}, then gpurun dev --from {state.run}"
    )
