"""The keeper: the process that starts one trainer, watches it, and writes down how it ended."""

from __future__ import annotations

import os
import signal
import sys
import time

from gpurun.machine.agent.clocks import monotonic
from gpurun.machine.agent.files import at, read, say, write
from gpurun.machine.agent.processes import environment, kill_all, processes, send, trainers
from gpurun.machine.agent.protocol import Refusal
from gpurun.machine.agent.pulse import Pulse
from gpurun.machine.agent.state import blank, wish_stop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List, Optional

    from gpurun.machine.agent.protocol import Answer, Json

BEAT_S = 1.0
# One that is still there so long after a KILL hangs in the kernel, as with a card that fell off the bus, for good.
DUMP_S, LAST_WORDS_S, KILLED_S = 1.0, 5.0, 60.0
TICK_S = 0.1


def keep(root: str, _: Json) -> Answer:
    """Be the keeper (started by `ensure_keeper`, which passes its lock on)."""
    import ctypes

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    wishes: List[str] = []
    signal.signal(signal.SIGTERM, lambda *_: wishes.append("keeper_terminated"))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # One that was sent before now waits in the kernel.
    if sys.platform == "linux":  # orphans of the trainer become the keeper's children, so none can hide
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    try:
        keeper = Keeper(root, wishes)
    except OSError as error:
        raise Refusal("start_failed", "the trainer could not be started: %s" % error) from None
    if keeper.job.get("notice_url"):
        from gpurun.machine.agent.notice import listen

        listen(keeper.job["notice_url"], lambda: wishes.append("preempted"))
    pusher = None
    if os.path.exists(at(root, "agent", "push.json")):
        from gpurun.machine.agent.push import begin

        pusher = begin(root)
    keeper.keep()
    if pusher is not None:
        pusher.finish()
    return {}, b""


class Keeper:
    """Watches one trainer, its lease and the wish to stop; ends when every process of the trainer has ended.

    `wishes` are the reasons to stop that this process alone was told. A disk that is full takes none of this away.
    """

    def __init__(self, root: str, wishes: List[str]) -> None:
        self.root, self.job, self.pulse = root, read(root, "agent", "job.json"), Pulse(root)
        self.wishes, self.said, self.next_beat = wishes, "", 0.0
        self.child: Any = None
        self.reason: Optional[str] = None
        self.asked_at: Optional[float] = None
        self.killed_at: Optional[float] = None
        self.pid: int = 0
        record, running = read(root, "agent", "keeper.json") or {}, trainers(root)
        self.started_wall = record.get("started_wall") or time.time()
        if running:  # an earlier keeper was killed: keep its trainer, whose exit code nobody will know
            self.pid = record["pid"] if record.get("pid") in running else min(running)
        else:
            self.launch()
        self.beat("running")
        record = {"keeper_pid": os.getpid(), "pid": self.pid, "started_wall": self.started_wall}
        self.note(at(root, "agent", "keeper.json"), record, durable=True)

    def launch(self) -> None:
        """Start the trainer in a session of its own."""
        import subprocess

        with open(at(self.root, "out", "trainer.log"), "ab") as log:
            self.child = subprocess.Popen(
                self.job["argv"],
                cwd=at(self.root, self.job["cwd"]),
                env=environment(**dict({"PYTHONUNBUFFERED": "1"}, **self.job["env"]), GPURUN_TRAINER_OF=self.root),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid, self.started_wall = self.child.pid, time.time()

    def ended(self) -> bool:
        """Whether the trainer's first process has ended."""
        code: Optional[int] = self.child.poll() if self.child else None
        return code is not None or (self.child is None and self.pid not in trainers(self.root))

    def cannot_end(self) -> bool:
        """Whether it was killed long ago and is still there: nobody is to wait for that, as the machine is paid."""
        return self.killed_at is not None and monotonic() >= self.killed_at + KILLED_S

    def kill(self) -> None:
        """Kill all of the trainer."""
        self.killed_at = self.killed_at or monotonic()
        kill_all(self.root)

    def keep(self) -> None:
        """Wait for the end, enforce lease and wishes, and write down how it ended."""
        while not self.is_over():
            time.sleep(TICK_S if self.child else BEAT_S / 2)  # without a child, to look costs a walk through /proc
        self.finish(self.child.returncode if self.child else None)

    def is_over(self) -> bool:
        """Look around once, and act; whether all of the trainer has ended."""
        try:
            if self.ended() or self.cannot_end():
                kill_all(self.root)
                return True
            self.enforce()
            if monotonic() >= self.next_beat:
                self.next_beat = monotonic() + BEAT_S
                self.beat("running")
                self.end_if_stuck()
        except OSError as error:  # Whatever it is, nobody else would hold the lease: the next look may be better.
            self.say("%s: %s" % (type(error).__name__, error))
        return False

    def enforce(self) -> None:
        """Ask the trainer to stop, or kill it, when the lease or a wish says so; the earlier clock wins."""
        wish, lease, now = self.wish(), read(self.root, "agent", "lease.json") or {}, monotonic()

        def due(which: str) -> bool:
            wall = min(lease.get(which + "_stop_wall", 1e18), self.job[which + "_stop_wall"])
            return bool(time.time() >= wall or now >= lease.get(which + "_mono", 1e18))

        if not (wish or due("soft") or due("hard")):
            return
        self.reason = self.reason or (wish["reason"] if wish else "lease")
        late = wish and self.asked_at is not None and now >= self.asked_at + self.job["save_s"]
        if late or due("hard") or (wish and wish["now"]):
            self.kill()
        elif self.asked_at is None:
            self.asked_at = now
            self.ask()

    def wish(self) -> Json:
        """The wish to stop, if there is one; what only this process was told is written down for the next keeper."""
        written: Json = read(self.root, "agent", "stop.json") or {}
        if written or not self.wishes:
            return written
        try:
            wish_stop(self.root, False, self.wishes[0])
        except OSError as error:
            self.say("the wish to stop is not written down: %s" % error)
        return {"now": False, "reason": self.wishes[0]}

    def end_if_stuck(self) -> None:
        """End a trainer that does not move any more: every process writes down where it stands, may save, is killed."""
        silent_s = self.pulse.overdue_s()
        if not silent_s or self.reason:  # One that was asked to stop has its own end.
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
        """Signal torchrun's workers, to which it would itself leave 30 s only; without such, the trainer."""
        workers = {
            pid
            for pid, (parent, pairs) in processes().items()
            if parent == self.pid and any(pair.startswith(b"LOCAL_RANK=") for pair in pairs)
        }
        send(workers or {self.pid}, number)

    def say(self, what: str) -> None:
        """Write to the agent's log, once for each trouble."""
        if what != self.said:
            say(what)
        self.said = what

    def note(self, path: str, data: Json, durable: bool) -> bool:
        """Write a state file if the disk lets us: a full one must not take the keeper away from its trainer."""
        try:
            write(path, data, durable)
        except OSError as error:
            self.say("%s: %s" % (path, error))
            return False
        return True

    def beat(self, state: str, **more: Any) -> None:
        """Write the heartbeat; where there is no room for it, its time alone, which needs none."""
        path = at(self.root, "out", "status.json")
        facts = dict(more, state=state, pid=self.pid, started_wall=self.started_wall, stop_reason=self.reason)
        if not self.note(path, dict(blank(self.root), **facts), durable=False):
            try:
                os.utime(path)
            except OSError as error:
                self.say("%s: %s" % (path, error))

    def finish(self, code: Optional[int]) -> None:
        """Write down the end; on a full disk, try for a minute."""
        by_signal = code is not None and code < 0
        end: Json = {"exit_code": None if by_signal else code, "signal": -code if code and by_signal else None}
        more = {"stop_reason": self.reason, "ended_wall": time.time()}
        for _ in range(60):
            if self.note(at(self.root, "agent", "exit.json"), dict(end, **more), durable=True):
                break
            self.beat("running")
            time.sleep(1)
        self.beat("exited", **end)
