"""What became of a training: by the agent's report, the last event, and what its command left where no collect looks.

A command that ended with exit code 0 has done nothing that its user can use where its outputs are missing: then the run
failed, and its message names the paths, their sizes and the cure.
"""

from __future__ import annotations

from pathlib import Path

from gpurun.core.run_plan import Mode
from gpurun.core.trainer_events import Left, Outputs, Start, Stop, events_of
from gpurun.lifecycle.context import Context
from gpurun.lifecycle.job_spec import limits_of
from gpurun.providers.base import Traits
from gpurun.remote.messages import Status
from gpurun.view.number_format import format_bytes, format_duration, format_files

_MOST_SHOWN = 5
UNHEARD: dict[str, object] = {
    "outcome": "stopped",
    "reason": "lease",
    "exit_code": None,
    "message": "the lease left no more time; how the work ended was not heard",
    "ended_wall": None,
}
NOT_OURS = {
    "idle": "it wrote nothing for {idle}, and no card and no core was seen at work, so it was stopped (--idle)",
    "silent": "it wrote neither a log line nor a file for {silent}, so it was stopped (--silent)",
    "hang": "the trainer stood still and was ended; its log says where each process stood",
    "preempted": "the provider takes the machine back; what was saved in time comes home",
    "signal": "somebody or something on the machine told it to stop before it was done",
}


def outcome_of(status: Status, context: Context) -> dict[str, object]:
    """What became of the training, as `train.observed` has it."""
    last, outputs = last_words(context.folder.events)
    ended = _with_memory(_ended(status, last, context), status)
    if outputs is None:
        return ended
    is_here = context.provider.traits.is_this_computer
    ended["outputs"] = outputs.record | ({"kept": True} if is_here else {})
    faults = [_elsewhere(outputs.elsewhere, context.provider.traits)] if outputs.elsewhere.files else []
    if ended["outcome"] == "done" and ended["reason"] != "rehearsal":
        faults = [*_working(outputs.still_working), *_unmatched(outputs.unmatched), *faults]
        if _reason(outputs, is_here=is_here):
            ended |= {"outcome": "failed", "reason": _reason(outputs, is_here=is_here)}
    return ended | {"message": "; ".join(filter(None, (str(ended["message"]), *faults)))}


def _reason(outputs: Outputs, *, is_here: bool) -> str:
    """The word for why a command that ended well has not done what it was run for; "" where it has."""
    if outputs.still_working:
        return "still_working"
    if outputs.unmatched:
        return "no_outputs"
    return "outputs_elsewhere" if outputs.elsewhere.files and not is_here else ""


def _working(names: tuple[str, ...]) -> list[str]:
    if not names:
        return []
    verb = "was" if len(names) == 1 else "were"
    told = f"{', '.join(names)} {verb} still working when the command ended, and {verb} ended with it"
    return [f"{told}: run it in the foreground (drop the &, or end the script with `wait`)"]


def _unmatched(flags: tuple[str, ...]) -> list[str]:
    if not flags:
        return []
    return [
        f"no new file matches {' nor '.join(flags)}: check the globs against the folders that the command writes to"
    ]


def _elsewhere(left: Left, traits: Traits) -> str:
    """Where results lie that no collect brings, and the cure."""
    told = f"{format_files(left.files)} ({format_bytes(left.bytes)}) written outside of the command's folder: "
    names = [f"{name} ({format_bytes(size)})" for name, size in left.first[:_MOST_SHOWN]]
    told += ", ".join(names) + (" and more" if left.files > len(names) else "")
    cure = _cure(left.first[0][0] if left.first else "")
    if traits.is_this_computer:
        return f"{told}; they stay there on this computer. A rented machine would lose them: {cure}"
    place = "did not come home" if traits.takes_files else "did not come home and stay where they are"
    return f"{told}; they {place}: {cure}"


def _cure(name: str) -> str:
    """What brings such a file: a glob, where one may name its place, or another place."""
    folder = name.rpartition("/")[0]
    is_below_home = name.startswith("~/") and not name.startswith("~/.")
    if not is_below_home and not name.startswith("/workspace/"):
        return "have the command write below its own folder"
    glob = name if folder in ("~", "/workspace") else f"{folder}/**"
    return f"--outputs '{glob}' brings such files, or have the command write below its own folder"


def last_words(events: Path) -> tuple[Stop | None, Outputs | None]:
    """The last `stop` and `outputs` events since the trainer's last `start`, if any."""
    stop: Stop | None = None
    outputs: Outputs | None = None
    for event in events_of(events):
        if isinstance(event, Start):
            stop = outputs = None
        elif isinstance(event, Stop):
            stop = event
        elif isinstance(event, Outputs):
            outputs = event
    return stop, outputs


def _ended(status: Status, last: Stop | None, context: Context) -> dict[str, object]:
    """How it ended, by the agent's report and the trainer's last word."""
    exit_code, reason = status.exit_code, status.stop_reason or ""
    if reason in NOT_OURS:
        limits = {name: format_duration(seconds) for name, seconds in limits_of(context.plan.choices).items()}
        return _failed(status, reason, NOT_OURS[reason].format(**limits))
    if exit_code == 0 or (exit_code is None and last):  # None: the keeper was killed, but the trainer had said its end.
        outcome = {"done": "done", "signal": "stopped"}.get(last.reason if last else "", "failed")
    else:
        outcome = "stopped" if reason else "failed"
    if reason == "lease" and context.plan.command and context.plan.mode is Mode.REHEARSAL:
        return {**_failed(status, "rehearsal", "it still ran when the rehearsal was over"), "outcome": "done"}
    if outcome == "stopped" and exit_code == 0 and not reason:  # The agent, which passes on all that is asked here.
        return _failed(status, "signal", NOT_OURS["signal"])
    told = (last.message if last else "") or _seen(status)
    return {
        "outcome": outcome,
        "reason": reason if outcome == "stopped" else last.reason if last else "",
        "exit_code": exit_code,
        "message": "" if outcome == "done" else told,
        "ended_wall": status.wall,
    }


def _with_memory(ended: dict[str, object], status: Status) -> dict[str, object]:
    """Return the same; of what failed with what the agent saw of the machine's memory."""
    if ended["outcome"] != "failed":
        return ended
    room = {key: size for key in ("memory_bytes", "shm_bytes") if (size := getattr(status, key)) is not None}
    if not status.oom_kills:
        return {**ended, **room}
    killed = "a process" if status.oom_kills == 1 else f"{status.oom_kills} processes"
    had = f" of {format_bytes(status.memory_bytes)}" if status.memory_bytes else ""
    message = f"{ended['message']}; the kernel killed {killed} there, as the memory{had} was used up"
    return {**ended, "message": message, **room, "oom_kills": status.oom_kills}


def _seen(status: Status) -> str:
    """Return how a job ended that has not said so itself."""
    if status.signal is not None:
        return f"it was ended by signal {status.signal}"
    if status.exit_code is None:
        return "it has ended; how was not seen, as after a restart of the machine"
    return f"it ended with exit code {status.exit_code}"


def _failed(status: Status, reason: str, message: str) -> dict[str, object]:
    told = {"outcome": "failed", "reason": reason, "exit_code": status.exit_code, "message": message}
    return {**told, "ended_wall": status.wall}


def lost_training(message: str) -> dict[str, object]:
    """The end of a training that was not seen to end."""
    return {"outcome": "lost", "reason": "lost", "exit_code": None, "message": message, "ended_wall": None}
