"""Start the trainer on the instance and watch it: the far side works alone, this only reads, and may ask it to stop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpurun.core.errors import GpurunError, SetupError, StoreFull
from gpurun.core.model import digest_of
from gpurun.core.plan import Lease
from gpurun.core.progress import Event, RunState
from gpurun.ledger.untrusted import events_of
from gpurun.lifecycle.bucket.push import Pushing
from gpurun.lifecycle.context import Context, Note, instance_of
from gpurun.lifecycle.control import STRENGTH, read_wish
from gpurun.lifecycle.hearing import POLL_S, SILENCE_S, Hearing
from gpurun.lifecycle.home.allowance import Allowance
from gpurun.lifecycle.home.early import Early
from gpurun.lifecycle.home.tail import Tail, is_behind
from gpurun.lifecycle.instance.duplicates import once
from gpurun.lifecycle.job import job_of
from gpurun.lifecycle.patience import Patience
from gpurun.lifecycle.quotes.rate import Rating
from gpurun.machine.answers import Status
from gpurun.machine.base import FarRefusal, MachineLost
from gpurun.machine.bucket.trouble import BucketLost
from gpurun.machine.far import FarSide
from gpurun.machine.remote import HostKeyMismatch

MOST_DRAIN_S = 120.0
GRACE_S = 15.0  # For the agent to end the trainer and to say so.
_UNHEARD: dict[str, object] = {
    "outcome": "stopped",
    "reason": "lease",
    "exit_code": None,
    "message": "the lease left no more time to train; how the trainer ended was not heard",
    "ended_wall": None,
}
NOT_OURS = {
    "hang": "the trainer stood still and was ended; its log says where each process stood",
    "preempted": "the provider takes the machine back; what was saved in time comes home",
    "signal": "somebody or something on the machine told the trainer to stop before its last step; it saved first",
}


def start(state: RunState, context: Context) -> Iterator[Note]:
    """Start the trainer, detached; asking twice starts it once."""
    far, patience, pushed = context.reach(instance_of(state)), Patience(state, context), state.pushed
    try:
        pushed = patience.until_done(Pushing(state, context, far).give)
    except (SetupError, BucketLost) as error:
        message = f"the machine pushes no checkpoints to the bucket: {error.what}"
        yield Event.INCIDENT, {"code": "stage.no_push", "message": message}
    # In the intent too: whether the start is answered or not, what it makes is looked for there.
    place = {"pushed": pushed} if pushed else {}
    job = job_of(state, context)
    stops = {key: job[key] for key in ("soft_stop_wall", "hard_stop_wall")}
    yield Event.TRAIN_INTENDED, {"job_sha256": digest_of(job), "argv": job["argv"], **stops, **place}
    started = patience.until_done(lambda: far.start(job))
    told = {"keeper_pid": started.keeper_pid, "started_wall": started.started_wall, "already": started.already}
    yield Event.TRAIN_STARTED, {**told, **place}


def watch(state: RunState, context: Context) -> Iterator[Note]:
    """Copy events and log as they come until the trainer has ended; pass on a wish to stop.

    Unreachable is not dead: only the provider's word, the lease or the agent's own report end the watch. StoreFull
    while the copies here cannot be read: training does not need them.
    """
    instance = instance_of(state)
    far = context.reach(instance)
    is_elsewhere = instance.address is not None and instance.address.kind != "folder"
    allowance = Allowance.of(context.folder, context.plan)
    with Early(far if context.brings_early and is_elsewhere else None, context.folder, allowance) as early:
        try:
            yield from _watch(state, context, far, early, Pushing(state, context, far))
        except OSError as error:
            what = f"{error.filename or context.folder.path} cannot be read: {error.strerror or error}."
            hint = "Mend what is said there: it goes on by itself. Training does too, until its lease."
            raise StoreFull("watch.disk_full", what, hint=hint) from error


def _watch(state: RunState, context: Context, far: FarSide, early: Early, pushing: Pushing) -> Iterator[Note]:
    told = "" if STRENGTH[state.stop] == 0 else _tell(far, state.stop)
    hearing, rating, tail = Hearing(context), Rating(state, context), Tail(far, context.folder)
    ended_mono = float("inf")
    while context.seconds_left(state) > _reserve_s(context.plan.lease):
        wish = read_wish(context.folder)
        if wish is not None and STRENGTH[wish.how] > STRENGTH[told]:
            if STRENGTH[wish.how] > STRENGTH[state.stop]:
                yield Event.STOP_REQUESTED, {"how": wish.how, "by": wish.by, "reason": wish.reason}
                state = state.model_copy(update={"stop": wish.how})
            if wish.how == "destroy":
                return
            told = _tell(far, wish.how)
        hearing.ask()
        try:
            poll = tail.bring()
            early.look(poll.chunks["events.jsonl"].data)
            pushing.refresh()
        except MachineLost as lost:
            if context.is_down(instance_of(state)):
                yield Event.TRAIN_OBSERVED, _lost(f"the instance is gone: {lost.what}")
                return
            if isinstance(lost, HostKeyMismatch):
                yield from once((Event.INCIDENT, {"code": lost.code, "message": lost.what}), context)
            context.clock.sleep(POLL_S)
            continue
        except FarRefusal:
            # One answer that makes no sense (it was short of memory, say) ends no training; a minute of them does.
            if hearing.is_refused_too_long():
                raise
            context.clock.sleep(POLL_S)
            continue
        hearing.hear(poll)
        rating.hear(poll.chunks["events.jsonl"].data)
        if poll.status.state == "exited":
            ended_mono = min(ended_mono, context.clock.monotonic())
        # The end is not believed before all is here, but no flood of log is paid for without an end.
        is_draining = context.clock.monotonic() - ended_mono < MOST_DRAIN_S
        if is_behind(poll, "events.jsonl") or (is_behind(poll, "trainer.log") and is_draining):
            continue
        yield from rating.notes(state)
        if poll.status.state == "exited":
            yield Event.TRAIN_OBSERVED, _outcome(poll.status, context)
            return
        if hearing.is_silent():
            yield Event.TRAIN_OBSERVED, _lost(f"the agent has been silent for {SILENCE_S:.0f} s")
            return
        context.clock.sleep(hearing.pause_s())
    if context.seconds_left(state) > 0:
        yield Event.TRAIN_OBSERVED, _last_word(tail, context)


def _last_word(tail: Tail, context: Context) -> dict[str, object]:
    """What became of the training, as far as one more look tells, once only the time to collect is left."""
    try:
        status = tail.bring().status
        return _outcome(status, context) if status.state == "exited" else _UNHEARD
    except (GpurunError, OSError):
        return _UNHEARD


def _reserve_s(lease: Lease) -> float:
    """What the watch leaves of the lease: by then the agent has ended the trainer, and what there is must come home."""
    return lease.collect_s - min(GRACE_S, lease.collect_s / 4)


def _tell(far: FarSide, how: str) -> str:
    """Pass a wish on to the agent; what could not be said is said again at the next look."""
    try:
        far.stop(now=how != "save", reason="user")
    except (MachineLost, FarRefusal):
        return ""
    return how


def _outcome(status: Status, context: Context) -> dict[str, object]:
    """What became of the training, by the agent's report and the trainer's last event."""
    last = _last_stop(context.folder.events)
    exit_code, reason = status.exit_code, status.stop_reason or ""
    if reason in NOT_OURS:
        return _failed(status, reason, NOT_OURS[reason])
    if exit_code == 0 or (exit_code is None and last):  # None: the keeper was killed, but the trainer had said its end.
        outcome = {"done": "done", "signal": "stopped"}.get(str(last.get("reason")), "failed")
    else:
        outcome = "stopped" if reason else "failed"
    if outcome == "stopped" and exit_code == 0 and not reason:  # The agent, which passes on all that is asked here.
        return _failed(status, "signal", NOT_OURS["signal"])
    told = str(last.get("message") or "") or _seen(status)
    return {
        "outcome": outcome,
        "reason": reason if outcome == "stopped" else str(last.get("reason") or ""),
        "exit_code": exit_code,
        "message": "" if outcome == "done" else told,
        "ended_wall": status.wall,
    }


def _seen(status: Status) -> str:
    """How a trainer ended that has not said so itself."""
    if status.signal is not None:
        return f"the trainer was ended by signal {status.signal}"
    if status.exit_code is None:
        return "the trainer has ended; how was not seen, as after a restart of the machine"
    return f"the trainer ended with exit code {status.exit_code}"


def _failed(status: Status, reason: str, message: str) -> dict[str, object]:
    told = {"outcome": "failed", "reason": reason, "exit_code": status.exit_code, "message": message}
    return {**told, "ended_wall": status.wall}


def _lost(message: str) -> dict[str, object]:
    return {"outcome": "lost", "reason": "lost", "exit_code": None, "message": message, "ended_wall": None}


def _last_stop(events: Path) -> dict[str, Any]:
    """The trainer's last `stop` event since its last `start`, or nothing."""
    stop: dict[str, Any] = {}
    for event in events_of(events) if events.exists() else ():
        if event.get("kind") in ("start", "stop"):
            stop = event if event["kind"] == "stop" else {}
    return stop
