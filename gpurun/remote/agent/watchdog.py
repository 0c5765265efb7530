"""The keeper: the process that starts one trainer, watches it, records how it ended, and may end the machine."""

from __future__ import annotations

import os
import signal
import sys
import time

from gpurun.remote.agent.activity import Activity
from gpurun.remote.agent.end_early import ended
from gpurun.remote.agent.gpu_use import GpuWatcher
from gpurun.remote.agent.job_secrets import take_secrets
from gpurun.remote.agent.job_state import blank, last_heard, request_stop
from gpurun.remote.agent.login_environment import remembered_variables, select_variables
from gpurun.remote.agent.memory_limits import oom_kills, room
from gpurun.remote.agent.processes import environment, kill_all, list_processes, send_signal, trainers
from gpurun.remote.agent.system import Refusal, monotonic, path_in, read, say, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List, Optional

    from gpurun.remote.agent.s3_push import Pusher
    from gpurun.remote.agent.system import Answer, Json

BEAT_S = 1.0
# A process that survives a KILL for this long hangs in the kernel forever, for example because of a lost GPU.
DUMP_S, LAST_WORDS_S, KILLED_S = 1.0, 5.0, 60.0
TICK_S = 0.1
LONGEST_S = 6 * 3600.0
LOOK_S = 0.5


def keep(root: str, _: Json) -> Answer:
    """Run as the keeper. `ensure_keeper` starts this process and passes its lock on."""
    import ctypes

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    requests: List[str] = []
    signal.signal(signal.SIGTERM, lambda *_: requests.append("keeper_terminated"))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # The kernel delivers an earlier signal now.
    if sys.platform == "linux":  # Orphans of the trainer become children of the keeper, so that none is missed.
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    try:
        keeper = Keeper(root, requests)
    except OSError as error:
        raise Refusal("start_failed", "the trainer could not be started: %s" % error) from None
    if keeper.job.get("notice_url"):
        from gpurun.remote.agent.spot_notice import listen

        listen(keeper.job["notice_url"], lambda: requests.append("preempted"))
    pusher = None
    if os.path.exists(path_in(root, "agent", "push.json")):
        from gpurun.remote.agent.s3_push import begin_push

        pusher = begin_push(root)
    keeper.keep()
    if pusher is not None:
        pusher.finish()
        if keeper.job.get("linger_s"):
            linger(root, keeper.job, pusher)
    return {}, b""


class Keeper:
    """Watches one trainer, its lease and the request to stop. Ends when every process of the trainer has ended.

    `requests` are the reasons to stop that only this process received. All of this works on a full disk too.
    """

    def __init__(self, root: str, requests: List[str]) -> None:
        self.root, self.job, self.pulse = root, read(root, "agent", "job.json"), Pulse(root)
        self.requests, self.said, self.next_beat = requests, "", 0.0
        self.child: Any = None
        self.reason: Optional[str] = None
        self.requested_at: Optional[float] = None
        self.killed_at: Optional[float] = None
        self.pid: int = 0
        self.gpus: Any = None
        self.activity: Any = None
        self.oom_before = oom_kills()
        record, running = read(root, "agent", "keeper.json") or {}, trainers(root)
        self.started_wall = record.get("started_wall") or time.time()
        if running:  # An earlier keeper was killed. This one watches its trainer; the exit code is lost.
            self.pid = record["pid"] if record.get("pid") in running else min(running)
        else:
            self.launch()
        self.beat("running")
        self.gpus = GpuWatcher(self.root)  # Not earlier: starting a process is safest without other threads.
        self.activity = Activity(root, self.job, self.gpus, self.requests.append)
        self.activity.begin(self.pid)
        record = {"keeper_pid": os.getpid(), "pid": self.pid, "started_wall": self.started_wall}
        self.note(path_in(root, "agent", "keeper.json"), record, durable=True)

    def launch(self) -> None:
        """Start the trainer in a new session."""
        import subprocess

        known = dict(remembered_variables(self.root), PYTHONUNBUFFERED="1")
        known.update(select_variables(self.job.get("pass_env") or [], os.environ))
        known.update(self.job["env"], **take_secrets(self.root))
        with open(path_in(self.root, "out", "trainer.log"), "ab") as log:
            self.child = subprocess.Popen(
                self.job["argv"],
                cwd=path_in(self.root, self.job["cwd"]),
                env=environment(**dict(known, GPURUN_TRAINER_OF=self.root)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid, self.started_wall = self.child.pid, time.time()

    def ended(self) -> bool:
        """Return whether the trainer's first process has ended."""
        code: Optional[int] = self.child.poll() if self.child else None
        return code is not None or (self.child is None and self.pid not in trainers(self.root))

    def cannot_end(self) -> bool:
        """Return whether the trainer was killed long ago and still exists, so that waiting would only cost rent."""
        return self.killed_at is not None and monotonic() >= self.killed_at + KILLED_S

    def kill(self) -> None:
        """Kill every process of the trainer."""
        self.killed_at = self.killed_at or monotonic()
        kill_all(self.root)

    def keep(self) -> None:
        """Wait for the trainer's end, enforce the lease and requests to stop, and record how the trainer ended."""
        while not self.is_over():
            time.sleep(TICK_S if self.child else BEAT_S / 2)  # Without a child, each check walks through /proc.
        self.finish(self.child.returncode if self.child else None)

    def is_over(self) -> bool:
        """Check once, and act. Return whether the trainer has ended or cannot end; its processes are then killed."""
        try:
            if self.ended() or self.cannot_end():
                kill_all(self.root)
                return True
            self.enforce()
            if monotonic() >= self.next_beat:
                self.next_beat = monotonic() + BEAT_S
                self.beat("running")
                self.end_if_stuck()
        except OSError as error:  # Nothing else enforces the lease, so the next check tries again.
            self.say("%s: %s" % (type(error).__name__, error))
        return False

    def enforce(self) -> None:
        """Stop the trainer, or kill it, if the lease or a request requires it. The earlier of two clocks counts."""
        request, lease, now = self.requested(), read(self.root, "agent", "lease.json") or {}, monotonic()

        def due(which: str) -> bool:
            wall = min(lease.get(which + "_stop_wall", 1e18), self.job[which + "_stop_wall"])
            return bool(time.time() >= wall or now >= lease.get(which + "_mono", 1e18))

        if not (request or due("soft") or due("hard")):
            return
        self.reason = self.reason or (request["reason"] if request else "lease")
        late = request and self.requested_at is not None and now >= self.requested_at + self.job["save_s"]
        if late or due("hard") or (request and request["now"]):
            self.kill()
        elif self.requested_at is None:
            self.requested_at = now
            self.ask()

    def requested(self) -> Json:
        """Return the request to stop, if any. One that only this process received is recorded for the next keeper."""
        written: Json = read(self.root, "agent", "stop.json") or {}
        if written or not self.requests:
            return written
        try:
            request_stop(self.root, False, self.requests[0])
        except OSError as error:
            self.say("the request to stop could not be recorded: %s" % error)
        return {"now": False, "reason": self.requests[0]}

    def end_if_stuck(self) -> None:
        """End a trainer that makes no more progress: its processes print stacks, may save, and are then killed."""
        silent_s = self.pulse.overdue_s()
        if not silent_s or self.reason:  # A trainer that was asked to stop has its own time limit.
            return
        self.reason = "hang"
        self.say("the trainer was silent for %.0f s and is ended" % silent_s)
        for number, wait_s in ((signal.SIGUSR1, DUMP_S), (signal.SIGTERM, LAST_WORDS_S)):
            self.ask(number)
            end = monotonic() + wait_s
            while monotonic() < end and not self.ended():
                time.sleep(TICK_S)
        self.kill()

    def ask(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to torchrun's workers, or to the trainer if there are none.

        torchrun itself would leave its workers only 30 s. On several nodes srun has started the workers, so they are no
        descendants of this process, and a signal to srun would end them at once.
        """
        seen, mark = list_processes(), b"GPURUN_TRAINER_OF=" + os.fsencode(self.root)

        def has(pid: int, name: bytes) -> bool:
            return pid in seen and any(pair.startswith(name) for pair in seen[pid][1])

        workers = {
            pid
            for pid, (parent, pairs) in seen.items()
            if has(pid, b"LOCAL_RANK=") and not has(parent, b"LOCAL_RANK=")
            if parent == self.pid or (mark in pairs and has(pid, b"PET_NNODES="))
        }
        # gpurun's own runner passes signals on, and must know which signals its command gets.
        send_signal({self.pid} if self.job.get("runner") else workers or {self.pid}, number)

    def say(self, what: str) -> None:
        """Write a line to the agent's log, but not twice in a row."""
        if what != self.said:
            say(what)
        self.said = what

    def note(self, path: str, data: Json, durable: bool) -> bool:
        """Write a state file if possible, and return whether that succeeded: a full disk must not end the keeper."""
        try:
            write(path, data, durable)
        except OSError as error:
            self.say("%s: %s" % (path, error))
            return False
        return True

    def beat(self, state: str, **more: Any) -> None:
        """Write the heartbeat. Without disk space, set only the file's time, which needs none."""
        path = path_in(self.root, "out", "status.json")
        facts = dict(more, state=state, pid=self.pid, started_wall=self.started_wall, stop_reason=self.reason)
        if self.gpus:
            facts["gpu_tally"] = self.gpus.tally
        if state == "running" and self.gpus:
            facts["gpus"] = self.gpus.now()
        if state == "running" and self.activity:
            facts["silent_since_wall"] = self.activity.silent_since_wall
            facts["idle_at_wall"] = self.activity.idle_at_wall
        if self.activity and self.activity.people:
            facts["sessions"] = self.activity.people.tally
        if not self.note(path, dict(blank(self.root), **facts), durable=False):
            try:
                os.utime(path)
            except OSError as error:
                self.say("%s: %s" % (path, error))

    def finish(self, code: Optional[int]) -> None:
        """Record the end. On a full disk, try again for a minute."""
        by_signal = code is not None and code < 0
        end: Json = {"exit_code": None if by_signal else code, "signal": -code if code and by_signal else None}
        end.update(room(self.oom_before))
        more = {"stop_reason": self.reason, "ended_wall": time.time()}
        for _ in range(60):
            if self.note(path_in(self.root, "agent", "exit.json"), dict(end, **more), durable=True):
                break
            self.beat("running")
            time.sleep(1)
        self.beat("exited", **end)


class Pulse:
    """Watches `out/heartbeat.json`; a trainer that never wrote it never counts as stuck."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.last: Any = None
        # Not the lease's clock: while a laptop sleeps, its trainer does not train either.
        self.seen_s = time.monotonic()

    def overdue_s(self) -> float:
        """Return the seconds since the last heartbeat, if they exceed the trainer's own limit; else 0."""
        beat = read(self.root, "out", "heartbeat.json")
        if beat != self.last:
            self.last, self.seen_s = beat, time.monotonic()
        patience_s: Any = beat.get("patience_s") if isinstance(beat, dict) else None
        if type(patience_s) not in (int, float) or not 0 < patience_s <= LONGEST_S:
            return 0.0
        silent_s = time.monotonic() - self.seen_s
        return silent_s if silent_s > patience_s else 0.0


def linger(root: str, job: Json, pusher: Pusher) -> None:
    """Wait until no client has called for `linger_s`, and then let the guard end the machine.

    If the bucket lacks files that a client would fetch, the machine stays until its deadline.
    """
    seen, since = last_heard(root), monotonic()
    while monotonic() - since < job["linger_s"]:
        time.sleep(LOOK_S)
        if last_heard(root) != seen:
            seen, since = last_heard(root), monotonic()
    if not pusher.has_all():
        say("no client came, and the bucket is incomplete: the machine stays until its deadline")
        return
    say("no client came, and the bucket is complete: the machine ends itself")
    answer = ended(job["guard_folder"], 0)
    if not answer["taken"]:
        say("it did not end: %s" % answer["message"])
