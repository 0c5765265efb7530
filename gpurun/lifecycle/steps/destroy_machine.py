"""End the run's machine: through its provider, or by its own guard if the provider refuses. Leave a user's box."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from gpurun.core.clock import local_time, ticks
from gpurun.core.command import WORK
from gpurun.core.errors import GpurunError, SetupError
from gpurun.core.journal_events import DestroyIntended, Incident, MachineEndsItself
from gpurun.core.journal_records import RunState
from gpurun.core.money import format_usd
from gpurun.ledger.journal import read_journal
from gpurun.ledger.spending import spent_by
from gpurun.lifecycle.artifacts.inventory import Inventory, due_files
from gpurun.lifecycle.context import RETRY_S, Context, Note, get_instance
from gpurun.lifecycle.instance.terminate import check_account, make_answer_check, note_once, prove_termination
from gpurun.providers.base import EndsBy, Guarded, Provider
from gpurun.remote.client import FarSide
from gpurun.remote.interface import FarRefusal, MachineLost
from gpurun.remote.messages import MOST_ANNOUNCED_BYTES
from gpurun.view.number_format import format_files

LEAVE_S = 60.0
ANSWER_S = 10.0
"""Seconds that a machine has to accept the request to end itself; its guard reads the time every five seconds."""


def destroy(state: RunState, context: Context) -> Iterator[Note]:
    """Destroy the machine in the journal and every other machine with the run's token, and prove that they are gone."""
    identifier = state.instance.id if state.instance else ""
    reason = "failure" if state.failure or state.moves_on else state.stop or state.outcome or "lease"
    # A guard on the machine is not a guarantee: root can stop it, and the provider can refuse its request.
    is_limited = context.provider.traits.ends_by is EndsBy.PROVIDER
    yield DestroyIntended(id=identifier, token=state.token, reason=reason, timer=is_limited)
    if context.plan.box is not None:
        yield from _leave_box(state, context)
    hidden_s, check = context.hidden_s(state), partial(check_account, state, context)
    cloud, clock, begin = context.provider, context.clock, context.begin
    refused = partial(_ask_machine_to_end, state, context)
    ending = prove_termination(
        cloud,
        clock,
        identifier,
        state.token,
        run=state.run,
        hidden_s=hidden_s,
        check_account=check,
        begin=begin,
        refused=refused,
        knock=make_answer_check(state, context, identifier),
        was_gone=state.was_gone,
    )
    for note in ending:
        if isinstance(note, Incident):
            yield from note_once(note, context)
        else:
            yield note


def _leave_box(state: RunState, context: Context) -> Iterator[Note]:
    """Leave the user's box: end the training and remove the run's folder, if the box can be reached.

    Files that were not downloaded stay on the box as the only copy, unless the user gave them up.
    """
    is_unwanted = state.stop == "destroy" and state.reason != "lease"
    lost = "it was never tried"
    for _ in ticks(context.clock, RETRY_S, LEAVE_S):
        try:
            far = context.reach(get_instance(state))
            kept = "" if is_unwanted else _describe_undownloaded_files(far, context)
            unlisted = 0 if is_unwanted else int(state.unpublished.get("files", 0))
            far.farewell(keep_results=bool(kept), keep_work=unlisted > 0)
        except GpurunError as error:  # For example a changed host key, which must not keep the run open.
            lost = error.what.rstrip(".")
            continue
        if unlisted:
            message = f"{format_files(unlisted)} that the command finished but could not list are"
            message = f"{message} kept on the box, in ~/.gpurun/{state.token}/{WORK}"
            yield from note_once(Incident(code="box.work_left", message=message), context)
        if kept:
            message = f"{kept} kept on the box, in ~/.gpurun/{state.token}/out"
            yield from note_once(Incident(code="box.results_left", message=message), context)
        return
    message = f"the box could not be reached to end the training ({lost}); its agent does so when the lease is over"
    yield from note_once(Incident(code="box.not_left", message=message), context)


def _describe_undownloaded_files(far: FarSide, context: Context) -> str:
    """Return a phrase about finished files on the box that are not on this computer; "" if there are none."""
    try:
        manifest = far.manifest(MOST_ANNOUNCED_BYTES)
    except FarRefusal as refusal:
        return f"its finished files cannot be listed ({refusal.what.rstrip('.')}) and are"
    inventory = Inventory(context.folder)
    left = [file for file in due_files(manifest) if not inventory.has(file)]
    total_bytes = sum(file.bytes for file in left)
    return f"{len(left)} files ({total_bytes:,} bytes) that were not downloaded are" if left else ""


def _ask_machine_to_end(state: RunState, context: Context, trouble: Exception) -> list[Note]:
    """Request over SSH that the machine end itself soon. Return a note with the time, or with the reason why it cannot.

    `trouble` is the provider's error for the request to end the machine. Return [] if the machine does not answer, if
    its agent was never reached, or if its guard has already accepted.
    """
    state = context.latest(state)
    folder = context.timer_of(state)
    if not folder or state.ends_wall is not None:
        return []
    instance = get_instance(state)
    if isinstance(trouble, SetupError) and _shares_key(state, context):
        return [_cannot_end_note(f"{instance.id} cannot end itself either: its timer uses the same key")]
    try:
        ended = context.reach(instance).end(folder, context.clock.wall() + state.clock_ahead_s + ANSWER_S)
    except MachineLost:
        return []
    except GpurunError as error:
        return [_cannot_end_note(f"{instance.id} could not be told to end itself: {error.what}")]
    if not ended.taken or ended.deadline is None:
        return [_cannot_end_note(f"{instance.id} did not accept that it should end itself: {ended.message}")]
    ends_wall = ended.deadline - state.clock_ahead_s
    now_wall, plan = context.clock.wall(), context.plan
    most = spent_by(read_journal(context.folder.journal).records, ends_wall + plan.lease.kill_allowance_s)
    message = f"{instance.id} was told over SSH to end itself, and its own timer accepted: "
    message += _describe_end(context.provider, local_time(ends_wall, now=now_wall), format_usd(most))
    return [MachineEndsItself(message=message, ends_wall=ends_wall)]


def _describe_end(provider: Provider, when: str, most: str) -> str:
    """Return a clause that states what will happen at that time and what it costs at most."""
    if provider.traits.ends_by is EndsBy.REQUEST:
        return f"at {when} it will ask {provider.name} to end it; if that works, it costs at most {most} in all"
    return f"it will end itself at {when}, at most {most} in all, unless something on it prevents that"


def _shares_key(state: RunState, context: Context) -> bool:
    """Return whether the guard uses the create request's key. The journal decides: keys may have changed since."""
    if state.timer_shares_key is not None:
        return state.timer_shares_key
    return isinstance(context.provider, Guarded) and context.provider.guard_shares_key


def _cannot_end_note(message: str) -> Note:
    return Incident(code="machine.not_told", message=message)
