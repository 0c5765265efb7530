"""Runs one command as the trainer is run: its log on standard output, its steps as events, its outputs in a manifest.

    python -m gpurun.remote.agent.runner.run_command command.json     (in bundle/; the command runs in bundle/work)

It ends with the command's own exit code, once every finished output is published.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

from gpurun.remote.agent.runner.cloned import NotCloned, clone
from gpurun.remote.agent.runner.elsewhere import MOST_NAMED
from gpurun.remote.agent.runner.elsewhere import find_results as look_elsewhere
from gpurun.remote.agent.runner.last_words import LastWords
from gpurun.remote.agent.runner.left_running import end_left_running
from gpurun.remote.agent.runner.masked import begun, forms_of, mask
from gpurun.remote.agent.runner.progress_lines import Progress
from gpurun.remote.agent.runner.published import PublishedOutputs, encoded, words
from gpurun.remote.agent.runner.told_events import NAME, ToldEvents

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable

LAST_WORDS_BYTES = 1 << 20
LOOK_S, TICK_S, IDLE_S, EVENT_S = 2.0, 0.1, 0.5, 0.5
NOTHING_S = 300.0
"""How long a command may run before it is said that its globs match nothing."""
MOST_HELD_BYTES = 64 << 10
MOST_WORDS = 300
MOST_CHARS, MOST_EVENT_BYTES = 400, 48 << 10
END_S = 8.0
"""Of the time that a stopped command has beside its grace, so much is for its outputs and the look elsewhere."""


class Events:
    """Appends to events.jsonl; for its last words there is room even on a disk that the command has filled."""

    def __init__(self, out: str) -> None:
        self.room = os.path.join(out, ".room")
        try:
            with open(self.room, "wb") as file:
                file.write(os.urandom(LAST_WORDS_BYTES))  # A disk that packs zeros would keep no room for them.
        except OSError:
            self.free()
        self.began = time.monotonic()
        self.lock = threading.Lock()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self.file = os.open(os.path.join(out, "events.jsonl"), flags, 0o644)

    def free(self) -> None:
        """Give back the room that was kept for the end."""
        with suppress(OSError):
            os.unlink(self.room)

    def tell(self, kind: str, **more: Any) -> None:
        """Write one event; a disk that is full must not end the command."""
        elapsed_s = time.monotonic() - self.began
        told = dict(more, kind=kind, wall=round(time.time(), 3), elapsed_s=round(elapsed_s, 3))
        told = {key: None if isinstance(one, float) and not math.isfinite(one) else one for key, one in told.items()}
        with self.lock:
            try:
                os.write(self.file, json.dumps(told).encode() + b"\n")
            except OSError:
                return


class ProgressEvents:
    """Turns what a command tells into `step` and `eval` events, at most two steps a second: the last is never lost.

    What it writes into $GPURUN_EVENTS counts, and from then on no line of its log does.
    """

    def __init__(self, events: Events, told: ToldEvents, total: int) -> None:
        self.events, self.told, self.progress = events, told, Progress(total)
        self.waiting: dict[str, Any] | None = None
        self.told_s, self.last = 0.0, (0, 0.0)
        self.is_lost = self.is_told = self.is_warned = False
        self.lock = threading.Lock()

    @property
    def step(self) -> int | None:
        """How far the command is, where it tells that."""
        return self.progress.step

    def take(self, line: str) -> None:
        """Hear a line, unless the command has written an event by then."""
        with self.lock:
            found = None if self.is_told else self.progress.take(line)
            if found is not None:
                self.hear_told()
            if found is not None and not self.is_told:
                self.put(found)

    def take_told(self) -> bool:
        """Hear what the command has written into $GPURUN_EVENTS since; whether there was anything."""
        with self.lock:
            return self.hear_told()

    def hear_told(self) -> bool:
        """The same; the lock is held."""
        told = self.told.read()
        for found in told:
            self.is_told, self.progress.step = True, found["step"]
            self.progress.set_total(found.pop("total_steps", self.progress.total))
            self.put(found)
        if self.told.malformed and not self.is_warned:
            self.is_warned = True
            message = "a line of $GPURUN_EVENTS is no JSON object with a step and figures: " + self.told.malformed
            self.events.tell("warning", code="events.malformed", message=message)
        return bool(told)

    def put(self, found: dict[str, Any]) -> None:
        """Write what was told, or let a step wait for the next one."""
        if "core" in found or "bits_per_byte" in found:
            self.write()
            self.events.tell("core" if "core" in found else "eval", **found)
            return
        val_loss = found.pop("val_loss", None)
        if found["step"] is not None and (val_loss is None or "loss" in found):
            self.warn_lost(found)
            self.waiting = dict(found, at=time.monotonic() - self.events.began)
        if val_loss is not None or time.monotonic() - self.told_s >= EVENT_S:
            self.write()
        if val_loss is not None:
            self.events.tell("eval", step=found["step"], val_loss=val_loss)

    def flush(self) -> None:
        """Write the step that waits."""
        with self.lock:
            self.write()

    def write(self) -> None:
        """Write the step that waits; the lock is held."""
        if self.waiting is None:
            return
        told, self.waiting = self.waiting, None
        step, at = told["step"], told.pop("at")
        took_s = at - self.last[1]
        if self.last[0] and step > self.last[0] and took_s >= TICK_S:  # What comes at once was not done at once.
            told["step_s"] = round(took_s / (step - self.last[0]), 6)
        if "step_s" in told or step <= self.last[0] or not self.last[0]:
            self.last = (step, at)
        self.told_s = time.monotonic()
        self.events.tell("step", steps=self.progress.total or None, **told)

    def warn_lost(self, told: dict[str, Any]) -> None:
        """Say once that the loss is not a number any more."""
        if not math.isfinite(told.get("loss", 0.0)) and not self.is_lost:
            self.is_lost = True
            message = "the loss is %s at step %d" % (told["loss"], told["step"])
            self.events.tell("warning", step=told["step"], code="loss_not_finite", message=message)


class Log:
    """Passes on what the command prints, line by line, without the values that are secret in any of their forms."""

    def __init__(self, secrets: list[str], curve: ProgressEvents) -> None:
        self.forms, self.curve, self.held = forms_of(secrets), curve, b""
        self.words = LastWords()

    def take(self, piece: bytes) -> None:
        """Take in what was printed; half a line waits for its end, or until the command is idle."""
        self.held += piece
        if len(self.held) > MOST_HELD_BYTES:
            self.flush()
        self.pass_on(max(self.held.rfind(b"\n"), self.held.rfind(b"\r")) + 1)

    def flush(self, is_last: bool = False) -> None:
        """Pass on half a line, too."""
        self.pass_on(len(self.held), is_last)

    def pass_on(self, end: int, is_last: bool = False) -> None:
        """Pass on what is held up to a place, but for what may be the beginning of a secret, which may have lines."""
        ready = self.held[:end]
        end -= 0 if is_last else max([0, *(begun(ready, one) for one in self.forms)])
        self.put(self.held[:end])
        self.held = self.held[end:]

    def put(self, content: bytes) -> None:
        """Write it to the log, and hear its lines."""
        content = mask(content, self.forms)
        if not content:
            return
        try:
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
        except OSError:  # A disk that is full ends no command.
            return
        for line in content.replace(b"\r", b"\n").split(b"\n"):
            if line.strip():
                text = line.decode("utf-8", "replace")
                self.words.take(text)
                self.curve.take(text.strip())


class RunningCommand:
    """The command, while it runs."""

    def __init__(self, order: dict[str, Any], root: str) -> None:
        out, work = os.path.join(root, "out"), os.path.join(root, "bundle", "work")
        os.makedirs(work, exist_ok=True)
        for name in order["executable"]:  # An upload keeps no modes.
            os.chmod(os.path.join(work, name), 0o755)
        self.order, self.events, self.asked_s = order, Events(out), 0.0
        if order.get("clone"):
            self.events.tell("clone", commit=clone(order["clone"], work))
        told = ToldEvents(os.path.join(root, NAME))
        self.curve = ProgressEvents(self.events, told, order["total_steps"])
        self.log = Log([os.environ[name] for name in order["secrets"] if os.environ.get(name)], self.curve)
        self.outputs = PublishedOutputs(work, out, order, self.tell_file)
        self.began_wall, self.root = time.time(), root
        self.events.tell("start", steps=order["total_steps"] or None, python=sys.version.split()[0])
        self.child = subprocess.Popen(
            [sys.executable if word == "{python}" else word for word in order["argv"]],
            cwd=work, env=command_environment(root), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.looker = threading.Thread(target=self.look, daemon=True)
        self.over = threading.Event()

    def tell_file(self, kind: str, **more: Any) -> None:
        """Write an event about its files; the step of one is left out where the command has told none."""
        if kind == "output" and self.curve.step is None:
            more.pop("step", None)
        self.events.tell(kind, **more)

    def read(self) -> None:
        """Pass on what it prints until nobody has its end of the pipe any more."""
        assert self.child.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self.child.stdout, selectors.EVENT_READ)
            while True:
                if not ready.select(IDLE_S):
                    self.log.flush()
                    self.curve.flush()
                    if self.over.is_set():  # What it left running holds the pipe.
                        return
                    continue
                piece = os.read(self.child.stdout.fileno(), 1 << 16)
                if not piece:
                    return
                self.log.take(piece)

    def look(self) -> None:
        """Publish what is finished, again and again; of a dev box by two looks each time: one alone sees no end."""
        said, began, sync_s = False, time.monotonic(), self.order.get("sync_s") or 0.0
        while not self.over.wait(sync_s or LOOK_S):
            self.publish()
            if sync_s and not self.over.wait(min(LOOK_S, sync_s)):
                self.publish()
            if not (said or self.outputs.published) and time.monotonic() - began > NOTHING_S:
                said = True
                self.warn_nothing()

    def publish(self, is_last: bool = False) -> None:
        """Publish what is finished; what fails, as on a full disk, is tried at the next look and hides no end."""
        try:
            self.outputs.look(self.curve.step or 0, is_last)
        except Exception as error:  # noqa: BLE001 - whatever it is, the command's own end is told
            self.outputs.warn("outputs.failed", "%s: %s" % (type(error).__name__, error))

    def warn_nothing(self) -> None:
        """Say while it still runs that no output is there, with what its folder has."""
        globs = self.order["outputs"] + ([self.order["checkpoints"]] if self.order["checkpoints"] else [])
        if globs:
            there = ", ".join(sorted(os.listdir(self.outputs.work))[:8]) or "nothing"
            message = "nothing new matches %s yet; its folder has %s" % (", ".join(globs), there)
            self.events.tell("warning", code="outputs.none", message=message)

    def tell_outputs(self, working: list[str]) -> None:
        """Say what there is at the end: what comes home, what does not and why, and what was still at work."""
        outputs, limit_s = self.outputs, self.order["look_s"]
        if self.asked_s:  # It is killed once its time to end is over, and has its last word to say.
            limit_s = min(limit_s, max(1.0, self.asked_s + self.order["grace_s"] + END_S - time.monotonic()))
        named = [*outputs.published, *(name for name, _, _ in outputs.unpublished)]
        passed_by = [self.root, os.path.join(self.root, "data"), *map(outputs.walk.source, named)]
        try:
            elsewhere = look_elsewhere(self.began_wall, passed_by, limit_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, the command's own end is told
            outputs.warn("outputs.not_looked_for", "%s: %s" % (type(error).__name__, error))
            elsewhere = counted([])
        told = {
            "step": self.curve.progress.step,
            "published": dict(counted((name, entry.bytes) for name, entry in outputs.published.items()), first=[]),
            "matched": dict(sorted(outputs.matched.items())[:MOST_NAMED]),
            "unmatched": self.unmatched(),
            "unpublished": counted((encoded(name), size) for name, size, _ in outputs.unpublished),
            "left_behind": counted(outputs.left_behind),
            "elsewhere": elsewhere,
            "still_working": working,
        }
        self.events.tell("outputs", **within_a_line(told))
        if self.order.get("sync_s"):  # So that the next box with this folder does not have them again.
            gone = [name for name in outputs.walk.before if not os.path.lexists(outputs.walk.source(name))]
            if gone:
                self.events.tell("removed", names=list(bounded(map(encoded, sorted(gone)))))

    def unmatched(self) -> list[str]:
        """The flags that the user gave and whose globs no new file matches."""
        flags = [("--outputs", self.order["outputs"]), ("--checkpoint-glob", [self.order["checkpoints"]])]
        given = [(flag, globs) for flag, globs in flags if "**" not in globs and globs != [""]]
        matched = self.outputs.matched
        return ["%s %s" % (flag, ",".join(globs)) for flag, globs in given if not any(map(matched.get, globs))]

    def stop(self, *_: Any) -> None:
        """Ask it to stop, with all that it has started in its session."""
        self.asked_s = self.asked_s or time.monotonic()
        self.send(getattr(signal, "SIG" + self.order["stop_signal"]))

    def send(self, number: int) -> None:
        """Signal its processes."""
        try:
            os.killpg(self.child.pid, number)
        except OSError:
            return

    def run(self) -> int:
        """Wait for its end, publish, and say how it ended; its exit code."""
        signal.signal(signal.SIGTERM, self.stop)
        self.reader.start()
        self.looker.start()
        while self.child.poll() is None:
            if self.asked_s and time.monotonic() - self.asked_s > self.order["grace_s"]:
                self.send(signal.SIGKILL)
            self.curve.take_told()
            time.sleep(TICK_S)
        left, working = end_left_running(is_stopped=bool(self.asked_s))
        self.over.set()
        self.reader.join(IDLE_S * 4)
        self.log.flush(is_last=True)
        while self.curve.take_told():
            pass
        self.curve.flush()
        self.looker.join()
        self.events.free()
        if left:
            what = "the command has ended and left %s running, which was ended: run it in the foreground"
            self.events.tell("warning", code="command.left_running", message=what % ", ".join(left[:5]))
        self.publish(is_last=True)
        self.tell_outputs(working)
        code = self.child.returncode
        reason = "signal" if self.asked_s else "failed" if code else "done"
        how = "the command ended " + ("by signal %d" % -code if code < 0 else "with exit code %d" % code)
        if code and self.log.words.text:
            how += "; its last words: " + self.log.words.text[:MOST_WORDS]
        self.events.tell("stop", reason=reason, message=how if code else "", step=self.curve.step)
        return code if code >= 0 else 128 - code


def command_environment(root: str) -> dict[str, str]:
    """Its environment: this process's own, and the folder of this Python first in the path."""
    there = os.environ.get("PATH", os.defpath)
    data = os.path.join(root, "data")
    more = {"GPURUN_DATA": data} if os.path.isdir(data) else {}
    more["GPURUN_EVENTS"] = os.path.join(root, NAME)
    return dict(os.environ, PATH=os.path.dirname(sys.executable) + os.pathsep + there, **more)


def counted(files: Iterable[tuple[str, int]]) -> dict[str, Any]:
    """How many files, their bytes, and the first of them by name."""
    listed = list(files)
    first = [{"name": words(name)[-MOST_CHARS:], "bytes": size} for name, size in listed[:MOST_NAMED]]
    return {"files": len(listed), "bytes": sum(size for _, size in listed), "first": first}


def bounded(names: Iterable[str]) -> Iterable[str]:
    """As many of the names as a line of events holds."""
    left = MOST_EVENT_BYTES
    for name in names:
        left -= len(name) + 4
        if left < 0:
            return
        yield name


def within_a_line(told: dict[str, Any]) -> dict[str, Any]:
    """The same with fewer names where they are so long that a reader would take no such line."""
    for most in (MOST_NAMED // 2, MOST_NAMED // 4, 0):
        if len(json.dumps(told)) > MOST_EVENT_BYTES:
            for left in [one for one in told.values() if isinstance(one, dict) and "first" in one]:
                left["first"] = left["first"][:most]
    return told


def main() -> int:
    """Run what COMMAND.json says."""
    with open(sys.argv[1]) as file:
        order = json.load(file)
    if sys.platform == "linux":  # What it leaves behind becomes a child of this process, and is seen.
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    root = os.path.dirname(os.getcwd())
    try:
        command = RunningCommand(order, root)
    except (OSError, NotCloned) as error:
        why = "%s cannot be started: %s" % (order["argv"][0], getattr(error, "strerror", ""))
        why = str(error) if isinstance(error, NotCloned) else why
        sys.stdout.write(why + "\n")
        Events(os.path.join(root, "out")).tell("stop", reason="failed", message=why)
        return 127
    return command.run()


if __name__ == "__main__":
    sys.exit(main())
