"""Start the trainer on the instance and watch it. The agent works alone; this step only reads and forwards stops.

After the first training steps, the measured throughput replaces the plan's estimate and is compared with cap and lease.
That changes only the forecast; neither the lease nor the highest cost grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from math import ceil
from signal import SIGTERM

from gpurun.core.errors import GpurunError, SetupError, StoreFull
from gpurun.core.gpu_reading import write_gpus
from gpurun.core.journal_events import Incident, Json, RateObserved, TrainIntended, TrainObserved, TrainStarted
from gpurun.core.journal_records import RunState
from gpurun.core.money import Micros, total
from gpurun.core.records import InstanceState, digest_json
from gpurun.core.trainer_events import EventLines, StopEvent, TrainerEvent, events_of
from gpurun.jobs.training.throughput import MeasuredSpeed, Meter
from gpurun.ledger.run_state import CANCELLED
from gpurun.lifecycle.artifacts.downloader import BackgroundDownload
from gpurun.lifecycle.artifacts.inventory import EgressBudget
from gpurun.lifecycle.artifacts.log_copy import Drain, Tail, bytes_before, is_behind
from gpurun.lifecycle.connect import BY_USER, Patience
from gpurun.lifecycle.context import Context, Note, get_instance
from gpurun.lifecycle.instance.job_folder import last_status
from gpurun.lifecycle.instance.job_signs import END_UNKNOWN, IdleSoon, Outage, Silence, lost_training, outcome_of
from gpurun.lifecycle.instance.terminate import note_once
from gpurun.lifecycle.job_spec import Pushing, ends_unwatched, job_of, secrets_of
from gpurun.planning.budget import expected_end_s, rental_cost
from gpurun.providers.base import Rejected, Unknown
from gpurun.remote.client import FarSide, Poll
from gpurun.remote.interface import FarRefusal, MachineLost
from gpurun.remote.messages import Status
from gpurun.remote.s3.s3_errors import BucketLost
from gpurun.remote.ssh import HostKeyMismatch

POLL_S, ENDING_POLL_S = 0.5, 0.1
LATE_SHARE = 0.1
"""The time between two polls after the last training step, as a share of the time since that step."""
SILENCE_S = 60.0
PAUSE_S = 30.0
MARGIN = 1.05
"""The factor on the measured time for a suggested cap: it allows 5 % more."""
GRACE_S = 15.0  # Time for the agent to end the trainer and report its end.


def start_job(state: RunState, context: Context) -> Iterator[Note]:
    """Start the trainer as a detached process. Repeating the request does not start a second process."""
    far, patience, pushed = context.reach(get_instance(state)), Patience(state, context), state.pushed
    try:
        pushed = patience.until_done(Pushing(state, context, far).give)
    except (SetupError, BucketLost) as error:
        message = f"the machine pushes no checkpoints to the bucket: {error.what}"
        yield Incident(code="stage.no_push", message=message)
    # The intent also has the folder, so that checkpoints are found even if the reply to the start is lost.
    place: Json = {"pushed": pushed} if pushed else {}
    job = job_of(state.model_copy(update={"pushed": pushed}), context)
    stops: Json = {key: job[key] for key in ("soft_stop_wall", "hard_stop_wall", "linger_s") if key in job}
    yield TrainIntended(job_sha256=digest_json(job), argv=job["argv"], **stops, **place)
    Drain(context.folder, context.clock, 0, 0).begin()
    if secrets := secrets_of(context):
        patience.until_done(lambda: far.hand_secrets(secrets))
    started = patience.until_done(lambda: far.start(job))
    yield TrainStarted(
        keeper_pid=started.keeper_pid, started_wall=started.started_wall, already=started.already, **place
    )


def watch(state: RunState, context: Context) -> Iterator[Note]:
    """Copy events and log until the trainer has ended, and forward recorded stops to the agent.

    A machine that cannot be reached may still run, so only the provider, the lease, the agent's report or the user's
    own limit ends the watch. Raise StoreFull if the local copies cannot be read or written; training continues without
    them.
    """
    instance = get_instance(state)
    far = context.reach(instance)
    is_elsewhere = instance.address is not None and instance.address.kind != "folder"
    is_attended = context.plan.job.is_attended  # Users may change their files later, so each version is downloaded.
    budget = EgressBudget.from_plan(context.folder, context.plan)
    source = far if context.brings_early and (is_elsewhere or is_attended) else None
    with BackgroundDownload(source, context.folder, budget, context.clock, is_attended) as background:
        try:
            yield from _watch(state, context, far, background, Pushing(state, context, far))
        except OSError as error:
            what = f"{error.filename or context.folder.path} cannot be read: {error.strerror or error}."
            hint = "Fix that; gpurun then continues. Training continues until its lease ends."
            raise StoreFull("watch.disk_full", what, hint=hint) from error


def _watch(
    state: RunState, context: Context, far: FarSide, background: BackgroundDownload, pushing: Pushing
) -> Iterator[Note]:
    sent_stop = ""
    hearing, rating, tail = (
        Hearing(context),
        Rating(state, context),
        Tail(far, context.folder, before=bytes_before(state)),
    )
    lines, outage, silence = EventLines(), Outage(state, context), Silence(state, context)
    idle_soon = IdleSoon(context)
    drain = Drain(context.folder, context.clock, context.collect_s, context.plan.job.home_bytes)
    while context.seconds_left(state) > _reserve_s(context):
        context.raise_if_stopped(state)
        if sent_stop != state.stop:
            sent_stop = _send_stop(far, state.stop)
        hearing.ask()
        try:
            poll = tail.bring()
            events = lines.take(poll.chunks["events.jsonl"].data)
            background.look(events)
            pushing.refresh()
        except MachineLost as lost:
            why = context.is_down(state)
            if why:
                yield from _lost_machine(why, state, context)
                return
            if isinstance(lost, HostKeyMismatch):
                yield from note_once(Incident(code=lost.code, message=lost.what), context)
            yield from outage.note_silence(lost, is_said_to_run=why is not None)
            if outage.is_given_up:
                yield lost_training(outage.why_given_up)
                return
            context.clock.sleep(POLL_S)
            continue
        except FarRefusal:
            # One bad reply (for example when memory is short) does not end a training; a minute of bad replies does.
            if hearing.is_refused_too_long():
                raise
            context.clock.sleep(POLL_S)
            continue
        hearing.hear(poll, events)
        yield from outage.note_answer()
        yield from silence.hear(poll.status)
        yield from idle_soon.hear(poll.status)
        if cards := [card.model_dump() for card in poll.status.gpus]:
            write_gpus(context.folder, context.clock.wall(), cards)
        rating.hear(events)
        # Accept the end only when all output has arrived, but do not pay for endless output.
        if (
            drain.may_continue(poll)
            if poll.status.state == "exited"
            else any(is_behind(poll, name) for name in poll.chunks)
        ):
            continue
        yield from rating.notes(state)
        if poll.status.state == "exited":
            tally = poll.status.gpu_tally
            seen: Json = {"gpu_tally": tally.model_dump()} if tally and tally.looks else {}
            seen |= {"sessions": poll.status.sessions.model_dump()} if poll.status.sessions else {}
            if left := drain.left(poll):
                message = f"{left} stay on the machine: after training, only a limited amount is downloaded"
                yield from note_once(Incident(code="log.left", message=message), context)
            ended = outcome_of(poll.status, context).model_copy(update={**seen, **drain.record()})
            is_lost = _is_signalled(ended, poll.status) and _is_ending(state, context)
            yield _make_lost_record(ended, "its machine is ending", state, context) if is_lost else ended
            return
        if hearing.is_silent():
            yield lost_training(f"the agent has been silent for {SILENCE_S:.0f} s")
            return
        context.clock.sleep(hearing.pause_s())
    if context.seconds_left(state) > 0:
        yield _last_poll(tail, context)


def _lost_machine(why: str, state: RunState, context: Context) -> Iterator[Note]:
    """Yield how the training ended if its machine no longer runs.

    The folder of a cluster's job may show that the training was completed before.
    """
    why += f"; {ends_unwatched(state)}" if state.linger_s else ""
    message = f"the machine {get_instance(state).id} no longer runs: {why}"
    if (status := last_status(get_instance(state), context)) is not None:
        ended = outcome_of(status, context)
        yield _make_lost_record(ended, message, state, context) if _is_signalled(ended, status) else ended
        return
    yield Incident(code="machine.lost", message=message)
    yield _make_lost_record(lost_training(message), message, state, context)


def _is_signalled(ended: TrainObserved, status: Status) -> bool:
    """Return whether a signal ended the job before it was done. A machine that ends sends one to all of its processes.

    A shell reports the signal of its command as an exit code.
    """
    by_signal = status.signal == SIGTERM or status.exit_code == 128 + SIGTERM
    return ended.outcome == "failed" and (ended.reason == "signal" or by_signal)


def _is_ending(state: RunState, context: Context) -> bool:
    """Return whether the provider reports that the run's machine no longer runs, or is about to end."""
    with suppress(Unknown, Rejected, SetupError):
        return context.provider.read(get_instance(state).id).state is not InstanceState.RUNNING
    return False


def _make_lost_record(ended: TrainObserved, why: str, state: RunState, context: Context) -> TrainObserved:
    """Return the record of a training that ended with its machine; it states whether the user ended the machine."""
    is_by_user = context.is_ended_by_user(state)
    lost = {"outcome": "lost", "reason": CANCELLED if is_by_user else "lost", "exit_code": None}
    return ended.model_copy(update={**lost, "message": why + BY_USER if is_by_user else why})


def _last_poll(tail: Tail, context: Context) -> TrainObserved:
    """Return the training's end after one last poll, when only the time for the download is left."""
    try:
        status = tail.bring().status
        return outcome_of(status, context) if status.state == "exited" else END_UNKNOWN
    except (GpurunError, OSError):
        return END_UNKNOWN


def _reserve_s(context: Context) -> float:
    """Return the seconds of the lease that the watch step leaves for the download."""
    return context.collect_s - min(GRACE_S, context.collect_s / 4)


def _send_stop(far: FarSide, how: str) -> str:
    """Request a stop from the agent, and return `how`.

    Return "" if the agent was not reached, so that the caller repeats the request.
    """
    try:
        far.stop(now=how != "save", reason="user")
    except (MachineLost, FarRefusal):
        return ""
    return how


class Hearing:
    """Measures how long the agent was silent, and decides when to poll again.

    After the last training step it polls more often, because idle time is billed. Silence is counted up to the poll,
    not up to the reading of its reply, because this computer may have slept before it read the reply.
    """

    def __init__(self, context: Context) -> None:
        self._clock, self._beat = context.clock, 0.0
        self._asked_mono = self._beat_mono = self._clock.monotonic()
        self._refused_mono = self._refused_last_mono = float("-inf")
        self._last_step = context.plan.job.steps or -1  # A command may not know its last step.
        self._ending_mono: float | None = None

    def ask(self) -> None:
        """Note when a poll is sent."""
        self._asked_mono = self._clock.monotonic()

    def is_refused_too_long(self) -> bool:
        """Count a refusal. Return whether the agent has only refused for SILENCE_S, without a pause over PAUSE_S."""
        if self._asked_mono - self._refused_last_mono > PAUSE_S:
            self._refused_mono = self._asked_mono
        self._refused_last_mono = self._asked_mono
        return self._asked_mono - self._refused_mono > SILENCE_S

    def hear(self, poll: Poll, events: Iterable[TrainerEvent]) -> None:
        """Process a reply and its events.

        The first event with the number of the last step counts as the end of the training steps.
        """
        self._refused_last_mono = float("-inf")
        if poll.status.wall != self._beat:
            self._beat, self._beat_mono = poll.status.wall, self._clock.monotonic()
        is_ending = any(isinstance(event, StopEvent) or event.step == self._last_step for event in events)
        if self._ending_mono is None and is_ending:
            self._ending_mono = self._clock.monotonic()

    def is_silent(self) -> bool:
        """Return whether the agent's status has not changed for SILENCE_S."""
        return self._asked_mono - self._beat_mono > SILENCE_S

    def pause_s(self) -> float:
        """Return the seconds until the next poll."""
        if self._ending_mono is None:
            return POLL_S
        return min(POLL_S, max(ENDING_POLL_S, LATE_SHARE * (self._clock.monotonic() - self._ending_mono)))


class Rating:
    """Measures the trainer's speed from its events during the watch, and records it once."""

    def __init__(self, state: RunState, context: Context) -> None:
        plan = context.plan
        self._context = context
        self._meter = Meter(plan.job.resolved, 0 if plan.job.terms.has_model else plan.job.steps)
        self._is_reported = state.rated
        self._measured: MeasuredSpeed | None = None
        if not self._is_reported:
            # Events from before a restart of the supervisor; if they cannot be read, later events suffice.
            with suppress(OSError):
                for event in events_of(context.folder.events):
                    self._meter.take(event)

    def hear(self, new: Iterable[TrainerEvent]) -> None:
        """Process the trainer's new events. The last measurement counts."""
        for event in () if self._is_reported else new:
            self._measured = self._meter.take(event) or self._measured

    def notes(self, state: RunState) -> Iterator[Note]:
        """Yield the record of the speed as soon as the speed is known, once."""
        if self._measured is not None and not self._is_reported:
            self._is_reported = True
            yield verdict(self._measured, state, self._context)


def verdict(measured: MeasuredSpeed, state: RunState, context: Context) -> RateObserved:
    """Return the forecast from the measured speed: whether training finishes, its last step, and the cost."""
    plan, lease = context.plan, context.plan.lease
    limit_s = max(0.0, context.seconds_left(state) - context.collect_s - plan.job.save_s)
    if lease.hours_s is not None:
        limit_s = min(limit_s, max(0.0, lease.hours_s - measured.elapsed_s))
    finishes = measured.left_s <= limit_s
    share = 1.0 if finishes else limit_s / measured.left_s
    expected_s = context.paid_s(state) + min(measured.left_s, limit_s) + expected_end_s(lease.collect_s)
    longer = lease.model_copy(update={"train_s": ceil(MARGIN * (measured.elapsed_s + measured.left_s))})
    needed = None if finishes else _compute_cost(context, longer.total_s + longer.kill_allowance_s)
    return RateObserved(
        step=measured.step,
        steps=measured.steps,
        step_s=round(measured.step_s, 6),
        tokens_per_s=round(measured.tokens_per_s, 3) if plan.job.terms.has_model else None,
        elapsed_s=round(measured.elapsed_s, 3),
        left_s=round(measured.left_s, 3),
        limit_s=round(min(limit_s, 1e9), 3),
        finishes=finishes,
        ends_at_step=measured.step + int((measured.steps - measured.step) * share),
        expected_micros=_compute_cost(context, expected_s),
        cap_micros=plan.cap_micros,
        needed_micros=needed,
        memory_peak_bytes=measured.memory_peak_bytes,
    )


def _compute_cost(context: Context, seconds: float) -> Micros:
    """Return the cost of a rental of that many seconds, with disk, egress and the cost of earlier legs."""
    plan, offer = context.plan, context.plan.offer
    if not offer.rate_micros_per_hour:
        return Micros(0)
    before = plan.leg.spent_micros if plan.leg is not None else Micros(0)
    return total(before, rental_cost(offer, seconds, plan.job.home_bytes, plan.job.disk_gb))
