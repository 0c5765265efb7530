"""What is done for a run whose folder takes no record: wait for room, but never with a machine that is to end.

An end that nobody recorded costs nothing and claims nothing: the run stays open and red, and whoever drives it once
there is room finds the machine gone, proves that, and closes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from gpurun.core.errors import GpurunError, MayBeBilling, SetupError
from gpurun.core.progress import RunState
from gpurun.ledger.durable import require_durable
from gpurun.ledger.journal import Journal
from gpurun.ledger.lock import RunLock
from gpurun.lifecycle.context import Context
from gpurun.lifecycle.control import STRENGTH, read_wish
from gpurun.lifecycle.destroy import destroy
from gpurun.lifecycle.settle import clear_all
from gpurun.lifecycle.state import Step, next_step

T = TypeVar("T")
PAUSE_S = 3.0

# A run as its journal has it, with the context of the offer that it is about.
See = Callable[[], tuple[RunState, Context]]


@contextmanager
def locked(lock: RunLock, see: See) -> Iterator[None]:
    """Hold a run's lock; for a folder that does not take it the same holds as for `open_journal`."""
    with ExitStack() as held:
        _once_it_can(lambda: held.enter_context(lock), see)
        yield


def open_journal(see: See) -> Journal:
    """Open a run's journal; as long as its folder takes no record, wait while something can still be saved.

    Raises the folder's error where nothing can be billed, and MayBeBilling after an end that could not be recorded.
    """

    def opened() -> Journal:
        _, context = see()
        require_durable(context.folder.path)
        return Journal.open(context.folder.journal, context.clock)

    return _once_it_can(opened, see)


def _once_it_can(attempt: Callable[[], T], see: See) -> T:
    is_told = False
    while True:
        try:
            return attempt()
        except SetupError as error:
            state, context = see()
            if not state.may_be_billing:
                raise
            if is_to_end(state, context):
                raise ended_unrecorded(state, context, error) from error
            if not is_told:
                logging.error("%s: %s %s", error.code, error.what, error.hint)
            is_told = True
        context.clock.sleep(PAUSE_S)


def is_to_end(state: RunState, context: Context) -> bool:
    """Whether what is billed is to end now: the lease is over, the user wants it gone, or nothing else is left."""
    wish = read_wish(context.folder)
    if wish is not None and STRENGTH[wish.how] > STRENGTH[state.stop]:
        state = state.model_copy(update={"stop": wish.how})
    is_known_late, lease_over = bool(state.late or state.leftover), context.seconds_left(state) <= 0
    return is_known_late or state.stop == "destroy" or next_step(state, lease_over=lease_over) is Step.DESTROY


def end_unrecorded(state: RunState, context: Context) -> GpurunError | None:
    """Do the destroy step with nobody to write it down; None when all was seen gone, else why not.

    So with what an earlier step found late, or beside a machine.
    """
    is_late = bool(state.late or state.leftover)
    try:
        for _ in clear_all(state, context) if is_late else destroy(state, context):
            pass
    except GpurunError as error:
        return error
    return None


def ended_unrecorded(state: RunState, context: Context, error: GpurunError) -> MayBeBilling:
    """End the machine of a run that cannot be driven on, and make the error that says what came of it."""
    run, by_hand = state.run, context.provider.traits.console_url
    still_there = end_unrecorded(state, context)
    if still_there is None:
        what = f"{error.what} The machine was asked to end and is gone, but the proof of it is not on record."
        return MayBeBilling(error.code, what, hint=f"{error.hint} Its receipt then comes with: gpurun resume {run}.")
    hint = f"{error.hint} Then: gpurun destroy {run}" + (f", or end it by hand: {by_hand}" if by_hand else ".")
    return MayBeBilling(error.code, f"{error.what} {still_there.what}", hint=hint)
