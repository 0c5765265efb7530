"""Runs one command like the trainer: its log on standard output, its steps as events, its outputs in a manifest.

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
from gpurun.remote.agent.runner.command_events import NAME, CommandEvents
from gpurun.remote.agent.runner.elsewhere import MOST_NAMED
from gpurun.remote.agent.runner.elsewhere import find_results as look_elsewhere
from gpurun.remote.agent.runner.last_words import LastWords
from gpurun.remote.agent.runner.left_running import end_left_running
from gpurun.remote.agent.runner.masked import begun_form_bytes, forms_of, mask
from gpurun.remote.agent.runner.progress_lines import Progress
from gpurun.remote.agent.runner.published import PublishedOutputs, encode_name, readable_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable

LAST_WORDS_BYTES = 1 << 20
LOOK_S, TICK_S, IDLE_S, EVENT_S = 2.0, 0.1, 0.5, 0.5
NOTHING_S = 300.0
"""The seconds that a command may run before a warning that its globs match nothing."""
MOST_HELD_BYTES = 64 << 10
MOST_WORDS = 300
MOST_CHARS, MOST_EVENT_BYTES = 400, 48 << 10
END_S = 8.0
"""The seconds of a stopped command's extra time that its outputs and the search for other results may take."""


class Events:
    """Appends to events.jsonl. Disk space is reserved so that the last events fit even on a full disk."""

    def __init__(self, out: str) -> None:
        self.room = os.path.join(out, ".room")
        try:
            with open(self.room, "wb") as file:
                file.write(os.urandom(LAST_WORDS_BYTES))  # A disk that compresses would not reserve space for zeros.
        except OSError:
            self.free()
        self.began = time.monotonic()
        self.lock = threading.Lock()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self.file = os.open(os.path.join(out, "events.jsonl"), flags, 0o644)

    def free(self) -> None:
        """Free the disk space that was reserved for the end."""
        with suppress(OSError):
            os.unlink(self.room)

    def tell(self, kind: str, **more: Any) -> None:
        """Write one event. A full disk must not end the command."""
        elapsed_s = time.monotonic() - self.began
        event = dict(more, kind=kind, wall=round(time.time(), 3), elapsed_s=round(elapsed_s, 3))
        event = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in event.items()
        }
        with self.lock:
            try:
                os.write(self.file, json.dumps(event).encode() + b"\n")
            except OSError:
                return


class ProgressEvents:
    """Turns a command's figures into `step` and `eval` events, at most two steps a second, always with the last.

    Once the command has written to $GPURUN_EVENTS, only that file counts, and its log is no longer parsed.
    """

    def __init__(self, events: Events, reported: CommandEvents, total: int) -> None:
        self.events, self.reported, self.progress = events, reported, Progress(total)
        self.waiting: dict[str, Any] | None = None
        self.written_s, self.last = 0.0, (0, 0.0)
        self.is_lost = self.has_reported = self.is_warned = False
        self.lock = threading.Lock()

    @property
    def step(self) -> int | None:
        """Return the command's current step, if known."""
        return self.progress.step

    def take(self, line: str) -> None:
        """Parse a line of the log, unless the command has written an event."""
        with self.lock:
            found = None if self.has_reported else self.progress.take(line)
            if found is not None:
                self.read_reported()
            if found is not None and not self.has_reported:
                self.put(found)

    def take_reported(self) -> bool:
        """Read what the command has written to $GPURUN_EVENTS since the last call. Return whether it wrote anything."""
        with self.lock:
            return self.read_reported()

    def read_reported(self) -> bool:
        """Read the events for `take_reported`. The caller has the lock."""
        new = self.reported.read()
        for found in new:
            self.has_reported, self.progress.step = True, found["step"]
            self.progress.set_total(found.pop("total_steps", self.progress.total))
            self.put(found)
        if self.reported.malformed and not self.is_warned:
            self.is_warned = True
            message = (
                "a line of $GPURUN_EVENTS is not a JSON object with a step and figures: " + self.reported.malformed
            )
            self.events.tell("warning", code="events.malformed", message=message)
        return bool(new)

    def put(self, found: dict[str, Any]) -> None:
        """Write an evaluation at once; keep the newest step until the next event is due."""
        if "core" in found or "bits_per_byte" in found:
            self.write()
            self.events.tell("core" if "core" in found else "eval", **found)
            return
        val_loss = found.pop("val_loss", None)
        if found["step"] is not None and (val_loss is None or "loss" in found):
            self.warn_lost(found)
            self.waiting = dict(found, at=time.monotonic() - self.events.began)
        if val_loss is not None or time.monotonic() - self.written_s >= EVENT_S:
            self.write()
        if val_loss is not None:
            self.events.tell("eval", step=found["step"], val_loss=val_loss)

    def flush(self) -> None:
        """Write the step that was kept."""
        with self.lock:
            self.write()

    def write(self) -> None:
        """Write the step that was kept. The caller has the lock."""
        if self.waiting is None:
            return
        figures, self.waiting = self.waiting, None
        step, at = figures["step"], figures.pop("at")
        took_s = at - self.last[1]
        if self.last[0] and step > self.last[0] and took_s >= TICK_S:  # Lines that arrive together do not show a speed.
            figures["step_s"] = round(took_s / (step - self.last[0]), 6)
        if "step_s" in figures or step <= self.last[0] or not self.last[0]:
            self.last = (step, at)
        self.written_s = time.monotonic()
        self.events.tell("step", steps=self.progress.total or None, **figures)

    def warn_lost(self, figures: dict[str, Any]) -> None:
        """Warn, once, that the loss is no longer a finite number."""
        if not math.isfinite(figures.get("loss", 0.0)) and not self.is_lost:
            self.is_lost = True
            message = "the loss is %s at step %d" % (figures["loss"], figures["step"])
            self.events.tell("warning", step=figures["step"], code="loss_not_finite", message=message)


class Log:
    """Passes on the command's output, line by line, with secrets masked in all their forms."""

    def __init__(self, secrets: list[str], curve: ProgressEvents) -> None:
        self.forms, self.curve, self.held = forms_of(secrets), curve, b""
        self.words = LastWords()

    def take(self, piece: bytes) -> None:
        """Add output. An incomplete line is kept until its end arrives, or until the command is idle."""
        self.held += piece
        if len(self.held) > MOST_HELD_BYTES:
            self.flush()
        self.pass_on(max(self.held.rfind(b"\n"), self.held.rfind(b"\r")) + 1)

    def flush(self, is_last: bool = False) -> None:
        """Pass on the incomplete line too."""
        self.pass_on(len(self.held), is_last)

    def pass_on(self, end: int, is_last: bool = False) -> None:
        """Pass on the kept output up to a position, except what may be the beginning of a secret."""
        ready = self.held[:end]
        end -= 0 if is_last else max([0, *(begun_form_bytes(ready, form) for form in self.forms)])
        self.put(self.held[:end])
        self.held = self.held[end:]

    def put(self, content: bytes) -> None:
        """Write output to the log, and parse its lines."""
        content = mask(content, self.forms)
        if not content:
            return
        try:
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
        except OSError:  # A full disk must not end the command.
            return
        for line in content.replace(b"\r", b"\n").split(b"\n"):
            if line.strip():
                text = line.decode("utf-8", "replace")
                self.words.take(text)
                self.curve.take(text.strip())


class RunningCommand:
    """The command while it runs."""

    def __init__(self, order: dict[str, Any], root: str) -> None:
        out, work = os.path.join(root, "out"), os.path.join(root, "bundle", "work")
        os.makedirs(work, exist_ok=True)
        for name in order["executable"]:  # An upload does not preserve file modes.
            os.chmod(os.path.join(work, name), 0o755)
        self.order, self.events, self.asked_s = order, Events(out), 0.0
        if order.get("clone"):
            self.events.tell("clone", commit=clone(order["clone"], work))
        reported = CommandEvents(os.path.join(root, NAME))
        self.curve = ProgressEvents(self.events, reported, order["total_steps"])
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
        """Write an event about the command's files, without a step if the command has reported none."""
        if kind == "output" and self.curve.step is None:
            more.pop("step", None)
        self.events.tell(kind, **more)

    def read(self) -> None:
        """Pass on the command's output until no process has the other end of the pipe open."""
        assert self.child.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self.child.stdout, selectors.EVENT_READ)
            while True:
                if not ready.select(IDLE_S):
                    self.log.flush()
                    self.curve.flush()
                    if self.over.is_set():  # A process that the command left running has the pipe open.
                        return
                    continue
                piece = os.read(self.child.stdout.fileno(), 1 << 16)
                if not piece:
                    return
                self.log.take(piece)

    def look(self) -> None:
        """Publish finished files repeatedly.

        For a dev box, check twice each time, because a file must be unchanged between two checks.
        """
        said, began, sync_s = False, time.monotonic(), self.order.get("sync_s") or 0.0
        while not self.over.wait(sync_s or LOOK_S):
            self.publish()
            if sync_s and not self.over.wait(min(LOOK_S, sync_s)):
                self.publish()
            if not (said or self.outputs.published) and time.monotonic() - began > NOTHING_S:
                said = True
                self.warn_nothing()

    def publish(self, is_last: bool = False) -> None:
        """Publish finished files.

        A failure, for example on a full disk, is retried at the next check, and does not hide how the command ended.
        """
        try:
            self.outputs.look(self.curve.step or 0, is_last)
        except Exception as error:  # noqa: BLE001 - the command's own end must be reported in any case
            self.outputs.warn("outputs.failed", "%s: %s" % (type(error).__name__, error))

    def warn_nothing(self) -> None:
        """Warn, while the command still runs, that there is no output. Name the content of its folder."""
        globs = self.order["outputs"] + ([self.order["checkpoints"]] if self.order["checkpoints"] else [])
        if globs:
            there = ", ".join(sorted(os.listdir(self.outputs.work))[:8]) or "nothing"
            message = "no new file matches %s yet; the command's folder has %s" % (", ".join(globs), there)
            self.events.tell("warning", code="outputs.none", message=message)

    def tell_outputs(self, working: list[str]) -> None:
        """Report at the end which files are downloaded, which are not and why, and which processes still worked."""
        outputs, limit_s = self.outputs, self.order["look_s"]
        if self.asked_s:  # This process is killed when its time is over, and must report the command's end before that.
            limit_s = min(limit_s, max(1.0, self.asked_s + self.order["grace_s"] + END_S - time.monotonic()))
        named = [*outputs.published, *(name for name, _, _ in outputs.unpublished)]
        passed_by = [self.root, os.path.join(self.root, "data"), *map(outputs.walk.source, named)]
        try:
            elsewhere = look_elsewhere(self.began_wall, passed_by, limit_s)
        except Exception as error:  # noqa: BLE001 - the command's own end must be reported in any case
            outputs.warn("outputs.not_looked_for", "%s: %s" % (type(error).__name__, error))
            elsewhere = count_files([])
        event = {
            "step": self.curve.progress.step,
            "published": dict(count_files((name, entry.bytes) for name, entry in outputs.published.items()), first=[]),
            "matched": dict(sorted(outputs.matched.items())[:MOST_NAMED]),
            "unmatched": self.unmatched(),
            "unpublished": count_files((encode_name(name), size) for name, size, _ in outputs.unpublished),
            "left_behind": count_files(outputs.left_behind),
            "elsewhere": elsewhere,
            "still_working": working,
        }
        self.events.tell("outputs", **within_a_line(event))
        if self.order.get("sync_s"):  # The next box with this folder must not get these files again.
            gone = [name for name in outputs.walk.before if not os.path.lexists(outputs.walk.source(name))]
            if gone:
                self.events.tell("removed", names=list(names_for_event(map(encode_name, sorted(gone)))))

    def unmatched(self) -> list[str]:
        """Return the user's flags whose globs match no new file."""
        flags = [("--outputs", self.order["outputs"]), ("--checkpoint-glob", [self.order["checkpoints"]])]
        given = [(flag, globs) for flag, globs in flags if "**" not in globs and globs != [""]]
        matched = self.outputs.matched
        return ["%s %s" % (flag, ",".join(globs)) for flag, globs in given if not any(map(matched.get, globs))]

    def stop(self, *_: Any) -> None:
        """Ask the command to stop, with all processes in its process group."""
        self.asked_s = self.asked_s or time.monotonic()
        self.send(getattr(signal, "SIG" + self.order["stop_signal"]))

    def send(self, number: int) -> None:
        """Send a signal to the command's processes."""
        try:
            os.killpg(self.child.pid, number)
        except OSError:
            return

    def run(self) -> int:
        """Wait for the command's end, publish its outputs, and report how it ended. Return its exit code."""
        signal.signal(signal.SIGTERM, self.stop)
        self.reader.start()
        self.looker.start()
        while self.child.poll() is None:
            if self.asked_s and time.monotonic() - self.asked_s > self.order["grace_s"]:
                self.send(signal.SIGKILL)
            self.curve.take_reported()
            time.sleep(TICK_S)
        left, working = end_left_running(is_stopped=bool(self.asked_s))
        self.over.set()
        self.reader.join(IDLE_S * 4)
        self.log.flush(is_last=True)
        while self.curve.take_reported():
            pass
        self.curve.flush()
        self.looker.join()
        self.events.free()
        if left:
            what = "the command ended but left %s running, which was killed: run it in the foreground"
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
    """Return the command's environment: this process's own, with the folder of this Python first in PATH."""
    there = os.environ.get("PATH", os.defpath)
    data = os.path.join(root, "data")
    more = {"GPURUN_DATA": data} if os.path.isdir(data) else {}
    more["GPURUN_EVENTS"] = os.path.join(root, NAME)
    return dict(os.environ, PATH=os.path.dirname(sys.executable) + os.pathsep + there, **more)


def count_files(files: Iterable[tuple[str, int]]) -> dict[str, Any]:
    """Return the number of files, their total bytes, and the first few by name."""
    listed = list(files)
    first = [{"name": readable_name(name)[-MOST_CHARS:], "bytes": size} for name, size in listed[:MOST_NAMED]]
    return {"files": len(listed), "bytes": sum(size for _, size in listed), "first": first}


def names_for_event(names: Iterable[str]) -> Iterable[str]:
    """Return as many of the names as fit into one line of events."""
    left = MOST_EVENT_BYTES
    for name in names:
        left -= len(name) + 4
        if left < 0:
            return
        yield name


def within_a_line(event: dict[str, Any]) -> dict[str, Any]:
    """Return the event, with fewer names if its line would be too long for its reader."""
    for most in (MOST_NAMED // 2, MOST_NAMED // 4, 0):
        if len(json.dumps(event)) > MOST_EVENT_BYTES:
            for left in [value for value in event.values() if isinstance(value, dict) and "first" in value]:
                left["first"] = left["first"][:most]
    return event


def main() -> int:
    """Run the command described in COMMAND.json."""
    with open(sys.argv[1]) as file:
        order = json.load(file)
    if sys.platform == "linux":  # Processes that the command leaves behind then become children of this process.
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
