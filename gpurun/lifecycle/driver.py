"""The state table: replay the journal, do the next step, record what it intends and observes; nothing else appends.

A step is a generator of notes. The driver writes a note to disk before it lets the step run on, so "intent first" is
not a habit of the steps but the way they are driven. After a crash the journal is replayed and the next step runs:
there is no other recovery path.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NoReturn

from gpurun import __version__
from gpurun.core.errors import ExitCode, GpurunError, MayBeBilling, NoOffer, SetupError, StoreFull
from gpurun.core.progress import Event, Phase, RunState
from gpurun.ledger.journal import Journal, damaged
from gpurun.lifecycle import collect, destroy, provision, run, salvage, settle, ship, stage
from gpurun.lifecycle.context import Context, Note, StopWanted
from gpurun.lifecycle.control import read_wish
from gpurun.lifecycle.runs import lost_records
from gpurun.lifecycle.state import Step, exit_code_of, next_step, place_of, replay
from gpurun.lifecycle.unrecorded import PAUSE_S, end_unrecorded, ended_unrecorded, is_to_end

STEPS: dict[Step, Callable[[RunState, Context], Iterator[Note]]] = {
    Step.STAGE: stage.stage,
    Step.CREATE: provision.create,
    Step.AWAIT_READY: provision.await_ready,
    Step.SHIP: ship.ship,
    Step.START: run.start,
    Step.WATCH: run.watch,
    Step.COLLECT: collect.collect,
    Step.DESTROY: destroy.destroy,
    Step.SALVAGE: salvage.salvage,
    Step.SETTLE: settle.settle,
}

AGAIN_S = 30.0
# What no later life of a supervisor would find out again.
_KNOWN_ONCE = (Event.COLLECT_OBSERVED, Event.STEP_FAILED)
_WORKING = (Phase.CREATING, Phase.CREATED, Phase.READY, Phase.SHIPPED, Phase.TRAINING, Phase.TRAINED)


class Unrecorded(SetupError):
    """The journal takes no record, and waiting for it saves nothing: no step goes on."""


class Driver:
    """Drives one run to its end. The caller holds the run's lock."""

    def __init__(self, context: Context, journal: Journal) -> None:
        self._context = context
        self._journal = journal

    def drive(self) -> ExitCode:
        """Do steps until the run is closed; a run that cannot be proven gone ends in MayBeBilling, unclosed."""
        try:
            return self._drive()
        except MayBeBilling:
            raise
        except GpurunError as error:
            state = self._state()
            if not state.may_be_billing:
                raise
            raise self._ended(state, error) from error

    def _ended(self, state: RunState, error: GpurunError) -> MayBeBilling:
        """Ask for the end of what cannot be driven any more; the journal takes nothing, so nothing is claimed."""
        try:
            context = self._at(state)
        except GpurunError:  # A provider without a key.
            return self._still_there(error)
        return ended_unrecorded(state, context, error)

    def _drive(self) -> ExitCode:
        state = self._state()
        lost = lost_records(self._context.home, self._context.folder, state)
        if lost is not None:
            raise damaged(self._context.folder.journal, lost)
        if state.may_be_billing:
            self._context = replace(self._context, ends_mono=self._at(state).ends_by_their_clock(state))
        if not any(record.event is Event.RUN_OPENED for record in self._journal.records):
            self._journal.append(Event.RUN_OPENED, self._opening())
        while True:
            try:
                code = self._turn()
            except GpurunError:
                raise
            except Exception as bug:  # noqa: BLE001 - told by whoever outlives it; raised where nothing is billed.
                self._outlive(bug)
                continue
            if code is not None:
                return code

    def _turn(self) -> ExitCode | None:
        """One step; the run's exit code once it is closed."""
        state = self._heard()
        step = next_step(state, lease_over=self._at(state).seconds_left(state) <= 0)
        if step is None:
            return ExitCode(state.exit_code or 0)
        if step is Step.CLOSE:
            self._journal.append(Event.RUN_CLOSED, {"exit_code": int(exit_code_of(state))})
        else:
            self._do(step, state)
        return None

    def _outlive(self, bug: Exception) -> None:
        """Wait a little after a failure between two steps, as long as there is a machine that need not end yet."""
        state = self._state()
        if not state.may_be_billing:
            raise bug
        error = self._told(bug, "between two steps")
        if is_to_end(state, self._at(state)):
            raise error from bug
        self._note_once(error)
        self._context.clock.sleep(AGAIN_S)

    def _heard(self) -> RunState:
        """The state, once the user's wish and the end of the lease have been recorded."""
        state = self._state()
        wish = read_wish(self._context.folder)
        if wish is not None and self._context.wants_stop(state) and state.phase not in (Phase.SETTLED, Phase.CLOSED):
            self._record(Event.STOP_REQUESTED, {"how": wish.how, "by": wish.by, "reason": wish.reason})
            state = self._state()
        if state.phase in _WORKING and state.stop != "destroy" and self._at(state).seconds_left(state) <= 0:
            # On record, so that neither a clock set back nor a crash lets the run go on or calls it done.
            self._record(Event.STOP_REQUESTED, {"how": "destroy", "by": "lease", "reason": "the lease is over"})
        return self._state()

    def _at(self, state: RunState) -> Context:
        """The context on the offer that this attempt is about."""
        return self._context.on_offer(place_of(state, self._context.plan))

    def _state(self) -> RunState:
        return replay(self._context.plan.run, self._journal.records)

    def _do(self, step: Step, state: RunState) -> None:
        """Run one step; what goes wrong becomes a record, so that the next step is the way out."""
        try:
            for event, data in STEPS[step](state, self._at(state)):
                self._record(event, data)
        except StopWanted:
            return
        except Unrecorded:
            raise
        except StoreFull as error:
            self._note_once(error)
            self._context.clock.sleep(PAUSE_S)
        except MayBeBilling as error:
            self._give_up(error)
        except GpurunError as error:
            self._failed(step, state, error)
        except Exception as bug:  # noqa: BLE001 - whatever is wrong with gpurun must not leave a machine running.
            self._failed(step, state, self._told(bug, f"in {step}"))

    def _told(self, bug: Exception, where: str) -> GpurunError:
        """The error for people, and the trace in the log, if that takes it: what is only told ends nothing."""
        logging.error("gpurun itself failed %s.", where, exc_info=bug)
        what = f"gpurun itself failed {where}: {type(bug).__name__}: {bug}."
        hint = f"The trace is in {self._context.folder.supervisor_log}; please report it."
        return GpurunError("bug", what, hint=hint)

    def _record(self, event: Event, data: Mapping[str, object]) -> None:
        """Append. While an instance works and this disk is full, wait for room.

        An instance that is to end once this is on record, or whose lease is over meanwhile, is ended first; after that
        only what would be forgotten is waited with. So is a machine that is known from this record alone.
        """
        is_gone = is_told = False
        while True:
            try:
                self._journal.append(event, data)
                return
            except SetupError as error:
                state, after = self._state(), self._after(event, data)
                is_new = event is Event.INCIDENT and after.may_be_billing and not state.may_be_billing
                is_working = state.may_be_billing and state.phase in _WORKING
                may_wait = is_new or (is_working and error.code == "disk.full")
                is_gone = is_gone or (may_wait and self._is_ended(after if is_new else state, after))
                if not may_wait or (is_gone and not is_new and event not in _KNOWN_ONCE):
                    raise Unrecorded(error.code, error.what, hint=error.hint) from error
                if not is_told:
                    logging.error("%s %s", error.what, error.hint)
                is_told = True
                self._context.clock.sleep(PAUSE_S)

    def _after(self, event: Event, data: Mapping[str, object]) -> RunState:
        """The state once this is on record."""
        records = self._journal.records
        return replay(self._context.plan.run, [*records, records[-1].model_copy(update={"event": event, "data": data})])

    def _is_ended(self, state: RunState, after: RunState) -> bool:
        """End an instance of which nothing more is wanted after the next record; whether it was seen gone."""
        context = self._at(state)
        return is_to_end(after, context) and end_unrecorded(state, context) is None

    def _note_once(self, error: GpurunError) -> None:
        """Record an incident, unless it stands there already."""
        told = {"code": error.code, "message": f"{error.what} {error.hint}"}
        if not any(one.event is Event.INCIDENT and one.data == told for one in self._journal.records):
            self._record(Event.INCIDENT, told)

    def _failed(self, step: Step, before: RunState, error: GpurunError) -> None:
        """Record a failure. Where the next step would be the same one again, it is told instead of tried for ever."""
        if step is Step.SETTLE:
            raise error
        if step is Step.DESTROY:
            self._give_up(self._still_there(error))
        record = {"step": str(step), **error.as_record(), "exit_code": int(error.exit_code)}
        self._record(Event.STEP_FAILED, record)
        still = before.phase is Phase.CREATING and self._state().phase is Phase.CREATING
        if still and not isinstance(error, NoOffer):
            self._give_up(self._still_there(error))

    def _give_up(self, error: MayBeBilling) -> NoReturn:
        """End this attempt to drive the run: the run stays open and red, and the next one goes on from here."""
        self._record(Event.INCIDENT, {"code": error.code, "message": f"{error.what} {error.hint}"})
        raise error

    def _still_there(self, error: GpurunError) -> MayBeBilling:
        """The same error, with the code that outranks all others: something that was asked for is not proven gone."""
        run, by_hand = self._context.plan.run, self._console_url()
        hint = f"{error.hint} Then: gpurun destroy {run}" + (f", or end it by hand: {by_hand}" if by_hand else ".")
        return MayBeBilling(error.code, error.what, hint=hint)

    def _console_url(self) -> str:
        """Where the machine of this attempt can be ended by hand; nowhere, if its provider cannot even be opened."""
        with contextlib.suppress(GpurunError):
            return self._at(self._state()).provider.traits.console_url
        return ""

    def _opening(self) -> dict[str, object]:
        """What the run was opened with, by digest."""
        plan, folder = self._context.plan, self._context.folder
        return {
            "run": plan.run,
            "mode": plan.mode,
            "recipe": plan.recipe,
            "form": plan.form,
            "recipe_sha256": plan.recipe_sha256,
            "request_sha256": hashlib.sha256(folder.request.read_bytes()).hexdigest(),
            "plan_sha256": hashlib.sha256(folder.plan.read_bytes()).hexdigest(),
            "data_sha256": plan.data.sha256,
            "bundle_sha256": plan.bundle_sha256,
            "gpurun_version": __version__,
            "platform": f"{platform.platform()}, Python {platform.python_version()}",
            "provider": plan.offer.provider,
            "cap_micros": plan.cap_micros,
            "worst_micros": plan.most_micros,
            "stage": plan.choices.stage,
            "continues": plan.continues.model_dump(include={"run", "step", "receipt_sha256"})
            if plan.continues
            else None,
        }
