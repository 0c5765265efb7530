"""Describe a job as seen from this computer: how it ended, and how long the job or its machine was silent.

A command that ends with exit code 0 but without its outputs counts as failed. The message names the paths, their sizes
and what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gpurun.core.clock import utc
from gpurun.core.journal_events import Incident, Json, TrainObserved
from gpurun.core.journal_records import RunState
from gpurun.core.money import format_rate
from gpurun.core.run_plan import Mode
from gpurun.core.stop_request import read_stop_request
from gpurun.core.trainer_events import FilesLeft, OutputsEvent, StartEvent, StopEvent, events_of
from gpurun.lifecycle.connect import LONGEST_TRY_S, MOVED_S
from gpurun.lifecycle.context import Context, Note, get_instance
from gpurun.lifecycle.job_spec import limits_of
from gpurun.providers.base import Traits
from gpurun.remote.agent.runner.elsewhere import WEIGHTS
from gpurun.remote.interface import NEEDS_PERSON, MachineLost
from gpurun.remote.messages import Status
from gpurun.view.event_text import HEARD, IDLE_OVER, IDLE_SOON, JOB_HEARD, JOB_SILENT, SILENT
from gpurun.view.number_format import format_bytes, format_duration, format_files

REPORT_AFTER_S = 120.0
"""Seconds that a machine is silent before an incident is recorded. A connection that broke is usually back sooner."""
_MOST_SHOWN = 5
END_UNKNOWN = TrainObserved(
    outcome="stopped",
    reason="lease",
    exit_code=None,
    message="the lease is over; it is not known how the work ended",
    ended_wall=None,
)
AGENT_STOPS = {
    "idle": "it wrote nothing for {idle}, and no card or core was seen at work, so it was stopped (--idle)",
    "silent": "it wrote neither a log line nor a file for {silent}, so it was stopped (--silent)",
    "hang": "the trainer hung and was ended; its log shows where each process stood",
    "preempted": "the provider takes the machine back; what was saved in time is downloaded",
    "signal": "a signal on the machine told it to stop before it was done",
}


def outcome_of(status: Status, context: Context) -> TrainObserved:
    """Return the record `train.observed`, which states how the training ended."""
    last, outputs = read_last_events(context.folder.events)
    ended = _add_memory_fields(_end_fields(status, last, context), status)
    if outputs is None:
        return TrainObserved(**ended)
    traits, is_kept = context.provider.traits, context.is_shared
    if is_kept:  # Other programs write to it too, so only files named like weights count as the command's.
        names = () if context.plan.job.is_attended else WEIGHTS
        outputs = replace(outputs, elsewhere=outputs.elsewhere.ending_in(names))
    ended["outputs"] = outputs.record | ({"kept": True} if is_kept else {})
    request = read_stop_request(context.folder)
    if request is not None and request.leaves:
        ended["outputs"]["given_up"] = True
    faults = [_describe_files_elsewhere(outputs.elsewhere, traits)] if outputs.elsewhere.files else []
    if ended["outcome"] == "done" and ended["reason"] != "rehearsal":
        faults = [*_killed_processes(outputs.still_working), *_describe_unmatched(outputs.unmatched), *faults]
        if reason := _get_outputs_reason(outputs, is_kept=is_kept):
            ended |= {"outcome": "failed", "reason": reason}
    ended["message"] = "; ".join(filter(None, (ended["message"], *faults)))
    return TrainObserved(**ended)


def _get_outputs_reason(outputs: OutputsEvent, *, is_kept: bool) -> str:
    """Return why the outputs of a command with exit code 0 are incomplete, as a reason code; "" if they are complete.

    Files outside the command's folder are not lost if the machine keeps them (`is_kept`).
    """
    if outputs.still_working:
        return "still_working"
    if outputs.unmatched:
        return "no_outputs"
    return "outputs_elsewhere" if outputs.elsewhere.files and not is_kept else ""


def _killed_processes(names: tuple[str, ...]) -> list[str]:
    if not names:
        return []
    verb = "was" if len(names) == 1 else "were"
    what = f"{', '.join(names)} {verb} still working when the command ended, and {verb} ended with it"
    return [f"{what}: run it in the foreground (drop the &, or end the script with `wait`)"]


def _describe_unmatched(flags: tuple[str, ...]) -> list[str]:
    if not flags:
        return []
    return [
        f"no new file matches {' nor '.join(flags)}: check the globs against the folders that the command writes to"
    ]


def _describe_files_elsewhere(left: FilesLeft, traits: Traits) -> str:
    """Return a message about results that a collect does not download: their names, sizes and what to do."""
    what = f"{format_files(left.files)} ({format_bytes(left.bytes)}) written outside of the command's folder: "
    names = [f"{name} ({format_bytes(size)})" for name, size in left.first[:_MOST_SHOWN]]
    what += ", ".join(names) + (" and more" if left.files > len(names) else "")
    cure = _advise_on_file(left.first[0][0] if left.first else "")
    if traits.is_this_computer:
        return f"{what}; they stay there on this computer. A rented machine would lose them: {cure}"
    stay = "" if traits.removes_files else " and stay where they are"
    return f"{what}; they were not downloaded{stay}: {cure}"


def _advise_on_file(name: str) -> str:
    """Return what to do about such a file: use an --outputs glob if its folder allows one, else write elsewhere."""
    folder = name.rpartition("/")[0]
    is_below_home = name.startswith("~/") and not name.startswith("~/.")
    if not is_below_home and not name.startswith("/workspace/"):
        return "have the command write below its own folder"
    glob = name if folder in ("~", "/workspace") else f"{folder}/**"
    return f"--outputs '{glob}' downloads such files, or have the command write below its own folder"


def read_last_events(events: Path) -> tuple[StopEvent | None, OutputsEvent | None]:
    """Return the last `stop` and `outputs` events since the trainer's last `start`, if any."""
    stop: StopEvent | None = None
    outputs: OutputsEvent | None = None
    for event in events_of(events):
        if isinstance(event, StartEvent):
            stop = outputs = None
        elif isinstance(event, StopEvent):
            stop = event
        elif isinstance(event, OutputsEvent):
            outputs = event
    return stop, outputs


def _end_fields(status: Status, last: StopEvent | None, context: Context) -> Json:
    """Return fields about the job's end, from the agent's status and the trainer's last event.

    A dev box usually ends because it is idle, and its exit code has no meaning.
    """
    exit_code, reason = status.exit_code, status.stop_reason or ""
    if context.plan.job.is_attended and reason in ("idle", "lease", "user"):
        idle = format_duration(limits_of(context.plan.choices)["idle"])
        words = {"idle": f"it was not used for {idle}, so it was ended (--idle)", "lease": "its lease was over"}
        ended = _failure_fields(status, reason, words.get(reason, "it was ended by its user"))
        return {**ended, "outcome": "done" if reason == "idle" else "stopped", "exit_code": None}
    if reason in AGENT_STOPS:
        limits = {name: format_duration(seconds) for name, seconds in limits_of(context.plan.choices).items()}
        return _failure_fields(status, reason, AGENT_STOPS[reason].format(**limits))
    # None: the agent's watching process was killed after the trainer's end.
    if exit_code == 0 or (exit_code is None and last):
        outcome = {"done": "done", "signal": "stopped"}.get(last.reason if last else "", "failed")
    else:
        outcome = "stopped" if reason else "failed"
    if reason == "lease" and not context.plan.job.terms.has_model and context.plan.mode is Mode.REHEARSAL:
        return {**_failure_fields(status, "rehearsal", "it still ran when the rehearsal was over"), "outcome": "done"}
    if outcome == "stopped" and exit_code == 0 and not reason:  # A stop that gpurun did not request.
        return _failure_fields(status, "signal", AGENT_STOPS["signal"])
    message = (last.message if last else "") or _describe_exit(status)
    return {
        "outcome": outcome,
        "reason": reason if outcome == "stopped" else last.reason if last else "",
        "exit_code": exit_code,
        "message": "" if outcome == "done" else message,
        "ended_wall": status.wall,
    }


def _add_memory_fields(ended: Json, status: Status) -> Json:
    """Add the agent's figures about the machine's memory to the fields of a failed job; return the fields."""
    if ended["outcome"] != "failed":
        return ended
    room = {key: size for key in ("memory_bytes", "shm_bytes") if (size := getattr(status, key)) is not None}
    if not status.oom_kills:
        return {**ended, **room}
    killed = "a process" if status.oom_kills == 1 else f"{status.oom_kills} processes"
    had = f" of {format_bytes(status.memory_bytes)}" if status.memory_bytes else ""
    message = f"{ended['message']}; the kernel killed {killed} there, because the memory{had} was used up"
    return {**ended, "message": message, **room, "oom_kills": status.oom_kills}


def _describe_exit(status: Status) -> str:
    """Return a phrase about the end of a job that did not report its own end."""
    if status.signal is not None:
        return f"it was ended by signal {status.signal}"
    if status.exit_code is None:
        return "it has ended; its exit code is not known, for example after a restart of the machine"
    return f"it ended with exit code {status.exit_code}"


def _failure_fields(status: Status, reason: str, message: str) -> Json:
    fields = {"outcome": "failed", "reason": reason, "exit_code": status.exit_code, "message": message}
    return {**fields, "ended_wall": status.wall}


def lost_training(message: str) -> TrainObserved:
    """Return the record for a training whose end was not seen."""
    return TrainObserved(outcome="lost", reason="lost", exit_code=None, message=message, ended_wall=None)


class Outage:
    """Measures how long the machine has not answered, reports it once, and gives up after the limit that the user set.

    Time in which this computer slept does not count. Time in which the provider also cannot be reached does not count
    towards giving up.
    """

    def __init__(self, state: RunState, context: Context) -> None:
        self._state, self._context = state, context
        self._tried_mono = context.clock.monotonic()
        self._silent_s = self._counted_s = 0.0
        self._is_reported = False
        self.words = ""

    @property
    def is_given_up(self) -> bool:
        """Return whether the machine was silent for longer than allowed while its provider reported that it runs.

        The user sets the limit. Without it, only a machine that restarted, and so no longer trains, has a limit, a
        short one.
        """
        limit_s = self._context.plan.choices.give_up_after_s or (MOVED_S if self._state.moved else 0.0)
        return bool(limit_s) and self._counted_s > limit_s

    @property
    def why_given_up(self) -> str:
        """Return the reason for giving up the machine, as text for a message."""
        limit = "as --give-up-after says" if self._context.plan.choices.give_up_after_s else "because it was restarted"
        return f"{self.words}; it is given up, {limit}"

    def note_silence(self, lost: MachineLost, *, is_said_to_run: bool) -> Iterator[Note]:
        """Count another failed attempt to reach the machine. Yield an incident once the silence is long enough."""
        clock, plan = self._context.clock, self._context.plan
        gap_s = min(clock.monotonic() - self._tried_mono, LONGEST_TRY_S)
        self._tried_mono = clock.monotonic()
        self._silent_s += gap_s
        self._counted_s += gap_s if is_said_to_run else 0.0
        needs_person = lost.code == NEEDS_PERSON
        if self._silent_s < REPORT_AFTER_S and not needs_person:
            return
        since_wall = clock.wall() - self._silent_s
        says = "says that it runs" if is_said_to_run else "cannot be reached either, so this computer may be offline"
        costs = f"; it costs {format_rate(plan.offer.rate_micros_per_hour)}" if plan.offer.rate_micros_per_hour else ""
        machine = f"the machine {get_instance(self._state).id}"
        self.words = (
            f"{machine} has not answered since {utc(since_wall)[11:16]} UTC; {self._context.provider.name} {says}"
        )
        if not self._is_reported:
            self._is_reported = True
            message = f"{self.words}{costs}. The last try: {lost.what.rstrip('.')}"
            message += f". {lost.hint.rstrip('.')}" if needs_person else ""
            yield Incident(code=SILENT, message=message, since_wall=round(since_wall, 3))

    def note_answer(self) -> Iterator[Note]:
        """End the outage after an answer. Yield an incident if the outage was reported."""
        if self._is_reported:
            message = f"the machine answers again, after {format_duration(self._silent_s)}"
            yield Incident(code=HEARD, message=message)
        self._tried_mono, self._silent_s, self._counted_s = self._context.clock.monotonic(), 0.0, 0.0
        self._is_reported = False


class IdleSoon:
    """Records that a dev box is unused and will soon be ended, and later that it is used again."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._is_reported = False

    def hear(self, status: Status) -> Iterator[Note]:
        """Process the agent's status; yield an incident for each change."""
        is_soon = status.state == "running" and status.idle_at_wall is not None
        if is_soon and not self._is_reported:
            left_s = max(0.0, (status.idle_at_wall or 0.0) - status.wall)
            idle = format_duration(limits_of(self._context.plan.choices)["idle"])
            what = f"the dev box is not used and ends in {format_duration(left_s)}, after {idle} without use (--idle)"
            yield Incident(code=IDLE_SOON, message=f"{what}; a key in one of its terminals keeps it")
        elif self._is_reported and not is_soon and status.state == "running":
            yield Incident(code=IDLE_OVER, message="the dev box is used again")
        self._is_reported = is_soon


class Silence:
    """Records that the job has written nothing for a long time, as the agent reports, and later that it writes again.

    The record includes the GPUs' utilisation, but no decision depends on it: a hung collective operation shows 100 %.
    """

    def __init__(self, state: RunState, context: Context) -> None:
        self._context, self._ahead_s = context, state.clock_ahead_s
        self._since_wall = state.silent_since_wall
        self._longest_s = 0.0

    def hear(self, status: Status) -> Iterator[Note]:
        """Process the agent's status; yield an incident for each change."""
        since_wall = status.silent_since_wall
        if status.state != "running" or (since_wall is None) == (self._since_wall is None):
            return
        if since_wall is None:
            silent_s = self._context.clock.wall() - (self._since_wall or 0.0)
            self._longest_s = max(self._longest_s, silent_s)
            message = f"the job writes again, after {format_duration(silent_s)}"
            yield Incident(code=JOB_HEARD, message=message)
            self._since_wall = None
            return
        since_wall = round(since_wall - self._ahead_s, 3)
        # Do not report every pause of a job that writes rarely.
        if self._context.clock.wall() - since_wall < 2 * self._longest_s:
            return
        self._since_wall = since_wall
        words = self._describe_silence(status, self._since_wall)
        yield Incident(code=JOB_SILENT, message=words, since_wall=self._since_wall)

    def _describe_silence(self, status: Status, since_wall: float) -> str:
        """Return a message with the start of the silence, the GPUs' utilisation, the price, and what ends the job."""
        plan, used = self._context.plan, [card.use_percent for card in status.gpus if card.use_percent is not None]
        silent_s = max(0.0, self._context.clock.wall() - since_wall)
        since = f"since {utc(since_wall)[11:16]} UTC ({format_duration(silent_s)})"
        cards = f", while the cards show {round(sum(used) / len(used))} %" if used else ""
        rate = plan.offer.rate_micros_per_hour
        costs = f"; it costs {format_rate(rate)}" if rate else ""
        limits = limits_of(plan.choices)
        ends = [f"after {format_duration(limits['idle'])} without any work (--idle)"] if limits["idle"] else []
        ends += [f"after {format_duration(limits['silent'])} of silence (--silent)"] if limits["silent"] else []
        ended = f"it is ended {' or '.join(ends)}" if ends else "only the lease ends it"
        return f"the job has written no log line and no file {since}{cards}{costs}; {ended}"
