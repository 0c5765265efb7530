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
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from gpurun import __version__
from gpurun.core.errors import ExitCode, GpurunError, MayBeBilling, NoOffer, SetupError, StoreFull
from gpurun.core.progress import Event, Phase, RunState
from gpurun.ledger.journal import Journal
from gpurun.lifecycle import collect, destroy, provision, run, salvage, settle, ship, stage
from gpurun.lifecycle.context import Context, Note, StopWanted
from gpurun.lifecycle.control import read_wish
from gpurun.lifecycle.state import Step, exit_code_of, next_step, replay

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

PAUSE_S = 3.0
_WORKING = (Phase.CREATING, Phase.CREATED, Phase.READY, Phase.SHIPPED, Phase.TRAINING, Phase.TRAINED)


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
            self._end_unrecorded(state)
            raise self._still_there(error) from error

    def _end_unrecorded(self, state: RunState) -> None:
        """Ask for the end of what cannot be driven any more; the journal takes nothing, so nothing is claimed."""
        identifier = state.instance.id if state.instance else ""
        with contextlib.suppress(GpurunError):  # A provider without a key, or one that does not show it gone.
            context = self._at(state)
            for _ in destroy.end(context.provider, context.clock, identifier, state.token, run=state.run):
                pass

    def _drive(self) -> ExitCode:
        if not any(record.event is Event.RUN_OPENED for record in self._journal.records):
            self._journal.append(Event.RUN_OPENED, self._opening())
        while True:
            state = self._heard()
            step = next_step(state, lease_over=self._at(state).seconds_left(state) <= 0)
            if step is None:
                return ExitCode(state.exit_code or 0)
            if step is Step.CLOSE:
                self._journal.append(Event.RUN_CLOSED, {"exit_code": int(exit_code_of(state))})
                continue
            self._do(step, state)

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
        return self._context.on_offer(self._place(state))

    def _place(self, state: RunState) -> int:
        """Which approved offer is being tried: the first, but for those that could not be had."""
        return min(state.passed_over, len(self._context.plan.approved) - 1)

    def _state(self) -> RunState:
        return replay(self._context.plan.run, self._journal.records)

    def _do(self, step: Step, state: RunState) -> None:
        """Run one step; what goes wrong becomes a record, so that the next step is the way out."""
        try:
            for event, data in STEPS[step](state, self._at(state)):
                self._record(event, data)
        except StopWanted:
            return
        except StoreFull as error:
            self._pause(error)
        except MayBeBilling as error:
            self._give_up(error)
        except GpurunError as error:
            self._failed(step, state, error)
        except Exception as bug:  # noqa: BLE001 - whatever is wrong with gpurun must not leave a machine running.
            traceback.print_exception(bug)
            what = f"gpurun itself failed in {step}: {type(bug).__name__}: {bug}."
            hint = f"The trace is in {self._context.folder.supervisor_log}; please report it."
            self._failed(step, state, GpurunError("bug", what, hint=hint))

    def _record(self, event: Event, data: Mapping[str, object]) -> None:
        """Append; while an instance lives and this disk is full, wait for room as long as its lease lasts."""
        while True:
            try:
                self._journal.append(event, data)
                return
            except SetupError as error:
                state = self._state()
                if error.code != "disk.full" or not state.may_be_billing or self._at(state).seconds_left(state) <= 0:
                    raise
                logging.error("%s %s", error.what, error.hint)
                self._context.clock.sleep(PAUSE_S)

    def _pause(self, error: StoreFull) -> None:
        """Say once that this disk is full, wait a little, and let the same step be tried again."""
        told = {"code": error.code, "message": f"{error.what} {error.hint}"}
        if not any(one.event is Event.INCIDENT and one.data == told for one in self._journal.records):
            self._record(Event.INCIDENT, told)
        self._context.clock.sleep(PAUSE_S)

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
