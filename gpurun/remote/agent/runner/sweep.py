"""Runs the trials of a sweep on one machine: as many at a time as fit, no trial twice, keeping the best.

  python start_sweep.py sweep.json     (in bundle/work, as the command of run_command.py)

When a trial ends, its row is written to gpurun-sweep/trials.json, from which a sweep resumes, on this or another
machine. The files of the best trials are in best/NNN/ beside that file. All other files of trials are removed.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

from gpurun.remote.agent.runner.command_events import CommandEvents
from gpurun.remote.agent.runner.hands import Hands
from gpurun.remote.agent.runner.last_words import LastWords
from gpurun.remote.agent.runner.masked import forms_of, mask
from gpurun.remote.agent.runner.matching import Walk
from gpurun.remote.agent.runner.number_text import text_of
from gpurun.remote.agent.runner.progress_lines import Progress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

    Params = dict[str, str]

FOLDER, TABLE, BEST = "gpurun-sweep", "trials.json", "best"
TICK_S, EVENT_S = 0.05, 1.0
ETA, RUNGS = 3, 3
"""After 1/27, 1/9 and 1/3 of its steps a trial is compared with the others. The best third continues."""
MOST_FAILED = 3
"""If this many trials fail and none succeeds, the sweep ends, because the settings are not the cause."""
MOST_DRAWS, MOST_ASKED = 1000, 20
MOST_WORDS, MOST_LINE = 300, 4000
ROOM_BYTES = 1 << 20
"""The disk space that is reserved for the table of trials, in case a trial fills the disk."""
HANDS_END_S = 5.0
OVER = ("done", "pruned", "failed", "nan")


class Row:
    """The facts of one trial. `result` is its lowest validation loss or, without one, its last training loss."""

    def __init__(self, number: int, params: Params) -> None:
        self.number, self.params, self.state = number, params, "running"
        self.step: int | None = None
        self.steps: int | None = None
        self.loss: float | None = None
        self.val_loss: float | None = None
        self.lowest: float | None = None
        self.tokens: int | None = None
        self.seconds = 0.0
        self.why = ""
        self.is_restored = False
        self.rungs: dict[str, float] = {}

    @property
    def result(self) -> float | None:
        """Return the figure that ranks trials; None if there is none, or if it is not a finite number."""
        found = self.lowest if self.val_loss is not None else self.loss
        return found if found is not None and math.isfinite(found) else None

    @property
    def is_lost(self) -> bool:
        """Return whether a latest loss of the trial is no longer a finite number."""
        last = [loss for loss in (self.loss, self.val_loss) if loss is not None]
        return not all(map(math.isfinite, last))

    def hear(self, figures: dict[str, Any]) -> bool:
        """Add the trial's figures. Return whether they include a loss."""
        if figures.get("step") is not None:
            self.step = figures["step"]
        self.tokens = figures.get("tokens", self.tokens)
        if "loss" in figures:
            self.loss = figures["loss"]
        if "val_loss" in figures:
            self.val_loss = value = figures["val_loss"]
            if math.isfinite(value) and (self.lowest is None or value < self.lowest):
                self.lowest = value
        return "loss" in figures or "val_loss" in figures

    def record(self) -> dict[str, Any]:
        """Return the row as data. A figure that is not finite becomes None."""
        figures = {name: getattr(self, name) for name in ("loss", "val_loss", "lowest")}
        return {
            "trial": self.number, "state": self.state, "params": self.params, "step": self.step, "steps": self.steps,
            **{name: figure if figure is None or math.isfinite(figure) else None for name, figure in figures.items()},
            "result": self.result, "tokens": self.tokens, "seconds": round(self.seconds, 3), "why": self.why,
        }  # fmt: skip


def row_of(record: dict[str, Any]) -> Row:
    """Return the row from a record that an earlier machine wrote."""
    row = Row(int(record["trial"]), dict(record["params"]))
    for name in ("state", "step", "steps", "loss", "val_loss", "lowest", "tokens", "seconds", "why", "rungs"):
        setattr(row, name, record[name])
    row.is_restored = True
    return row


class TrainerLines:
    """Reads the events of the bundled trainer, whose figures are not rounded."""

    def __init__(self, path: str) -> None:
        self.path, self.place, self.rest = path, 0, b""
        self.reason = ""

    def read(self) -> list[dict[str, Any]]:
        """Return the figures of each new line."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.place)
                piece = file.read()
        except OSError:
            return []
        self.place += len(piece)
        lines = (self.rest + piece).split(b"\n")
        self.rest = lines.pop()
        return [figures for line in lines for figures in self.take(line)]

    def take(self, line: bytes) -> Iterator[dict[str, Any]]:
        """Yield the figures of a line. The trainer writes null for a figure that is not finite."""
        with suppress(ValueError):
            event = json.loads(line)
            if event["kind"] == "start":
                yield {"total_steps": event["steps"]}
            elif event["kind"] in ("step", "eval"):
                names = [name for name in ("loss", "val_loss") if name in event]
                figures = {name: math.nan if event[name] is None else event[name] for name in names}
                yield dict({name: event[name] for name in ("step", "tokens") if event.get(name) is not None}, **figures)
            elif event["kind"] == "stop":
                self.reason = event["reason"]


class Trial:
    """One running trial, in its own folder."""

    def __init__(self, row: Row, sweep: RunningSweep, slot: tuple[str, int]) -> None:
        self.row, self.sweep, self.slot, self.began = row, sweep, slot, time.monotonic()
        self.folder = sweep.folder_of(row)
        self.out = os.path.join(self.folder, "out")
        self.written_s, self.lock, self.words = 0.0, threading.Lock(), LastWords()
        self.walk: Walk | None = None
        shutil.rmtree(self.folder, ignore_errors=True)
        os.makedirs(self.out)
        self.is_ending = ""
        order = sweep.order
        cwd = sweep.bundle
        if not order["is_recipe"]:
            cwd = os.path.join(self.folder, "work")
            shutil.copytree(sweep.work, cwd, symlinks=True, ignore=lambda at, _: [FOLDER] if at == sweep.work else [])
            self.walk = Walk(cwd, self.folder, order["outputs"], "")
            self.walk.before = self.walk.find(1 << 62).files
        own = os.path.join(self.folder, "events.jsonl")
        self.reported: Any = (
            TrainerLines(os.path.join(self.out, "events.jsonl")) if order["is_recipe"] else CommandEvents(own)
        )
        self.progress = None if order["is_recipe"] else Progress(order["total_steps"])
        job, place = slot
        if job:
            env, card = trial_environment(row, own, [], place), place % max(1, order["cards"])
            self.child = sweep.hands.start(job, card, self.argv(), cwd, self.folder, env, order["env"])
        else:
            self.child = subprocess.Popen(
                self.argv(), cwd=cwd, env=trial_environment(row, own, sweep.cards, place), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def argv(self) -> list[str]:
        """Return the trial's command with its settings filled in. For a recipe the settings follow --set."""
        order, params = self.sweep.order, self.row.params
        words = [sys.executable if word == "{python}" else word for word in order["argv"]]
        if order["is_recipe"]:
            sets = [word for name, value in params.items() for word in ("--set", "%s=%s" % (name, value))]
            return [self.out if word == "{out}" else word for word in words] + sets
        return [fill_in(word, params) for word in words]

    def read(self) -> None:
        """Pass on the trial's output, each line preceded by the trial's number, and parse it."""
        assert self.child.stdout is not None
        held = b""
        while True:
            piece = os.read(self.child.stdout.fileno(), 1 << 16)
            *lines, held = (held + piece.replace(b"\r", b"\n")).split(b"\n")
            if not piece or len(held) > MOST_LINE:
                lines, held = [*lines, held], b""
            for line in lines:
                if line.strip():
                    self.pass_on(mask(line, self.sweep.secrets).decode("utf-8", "replace").rstrip())
            if not piece:
                return

    def pass_on(self, line: str) -> None:
        """Write one line to the sweep's log, and parse it for figures."""
        self.words.take(line)
        with suppress(OSError):
            sys.stdout.write("%03d | %s\n" % (self.row.number, line))
            sys.stdout.flush()
        if self.progress is not None and not getattr(self.reported, "place", 0):
            found = self.progress.take(line.strip())
            if found is not None:
                self.hear(dict(found, total_steps=self.progress.total))

    def look(self) -> None:
        """Read what the trial has written since the last call."""
        for figures in self.reported.read():
            self.hear(figures)

    def hear(self, figures: dict[str, Any]) -> None:
        """Add the trial's figures. Report a training loss at most once a second, and a validation loss always."""
        with self.lock:
            row = self.row
            row.steps = figures.get("total_steps") or row.steps or self.sweep.order["total_steps"] or None
            is_loss = row.hear(figures)
            row.seconds = time.monotonic() - self.began
            if is_loss and ("val_loss" in figures or time.monotonic() - self.written_s >= EVENT_S):
                self.written_s = time.monotonic()
                self.sweep.tell(row)

    def end(self, state: str, number: int = signal.SIGKILL) -> None:
        """Signal the trial to end, and record the state that it will have."""
        self.is_ending = self.is_ending or state
        if self.slot[0]:
            self.sweep.hands.signal(self.slot[0], self.folder, signal.Signals(number).name[3:])
            return
        with suppress(OSError):
            os.killpg(self.child.pid, number)

    def close(self) -> None:
        """Record how the trial ended, and its last figures."""
        code = self.child.wait()
        with suppress(OSError):  # Processes that the trial left would otherwise run beside the next trial.
            os.killpg(self.child.pid, signal.SIGKILL)
        self.reader.join(2.0)
        self.look()
        row = self.row
        row.seconds = time.monotonic() - self.began
        is_nan = row.is_lost or (
            self.reported.reason == "nonfinite" if isinstance(self.reported, TrainerLines) else False
        )
        if self.is_ending:
            row.state = self.is_ending
        elif is_nan:
            row.state = "nan"
        elif code:
            how = "signal %d" % -code if code < 0 else "exit code %d" % code
            row.state, row.why = "failed", ("%s; %s" % (how, self.words.text) if self.words.text else how)[:MOST_WORDS]
        elif row.result is None:
            row.state, row.why = "failed", "it succeeded but reported no loss"
        else:
            row.state = "done"

    def files(self) -> Iterator[tuple[str, str]]:
        """Yield name and path of each file of the trial: for a recipe, its out folder; for a command, its new files."""
        if self.walk is not None:
            for name in self.walk.find(1 << 62).files:
                yield name.partition("/")[2], self.walk.source(name)
            return
        for folder, _, names in os.walk(self.out):
            for name in names:
                if not name.startswith(".") and name != "heartbeat.json":
                    path = os.path.join(folder, name)
                    yield os.path.relpath(path, self.out), path


class RunningSweep:
    """All trials of one sweep, and their state."""

    def __init__(self, order: dict[str, Any], bundle: str) -> None:
        self.order, self.bundle, self.began = order, bundle, time.monotonic()
        self.work, self.trials = os.path.join(bundle, "work"), os.path.join(bundle, "trials")
        self.folder = os.path.join(self.work, FOLDER)
        self.hands = Hands(os.path.dirname(bundle), order["jobs"] - 1)
        self.room = os.path.join(bundle, ".room")
        self.events = os.path.join(os.path.dirname(bundle), "out", "events.jsonl")
        self.rows: dict[int, Row] = {}
        self.running: list[Trial] = []
        self.is_stopped, self.is_exhausted, self.fault = False, False, ""
        self.cards = cards_of(order["cards"])
        # The runner masks the log, but a trial's last words also go into its row.
        self.secrets = forms_of([os.environ[name] for name in order["secrets"] if os.environ.get(name)])
        os.makedirs(os.path.join(self.folder, BEST), exist_ok=True)
        with suppress(OSError), open(self.room, "wb") as file:
            file.write(os.urandom(ROOM_BYTES))  # A disk that compresses would not reserve space for zeros.
        self.restore()
        self.sampler: Any = None
        if order["sampler"] == "tpe":
            self.open_sampler()
        self.lock = threading.Lock()

    def open_sampler(self) -> None:
        """Use optuna's sampler if this machine has optuna. Otherwise draw settings at random, and write a warning."""
        try:
            from gpurun.remote.agent.runner.tpe import Tpe

            self.sampler = Tpe(self.order, len(self.rows))
        except Exception as error:  # noqa: BLE001 - no error of optuna may end a sweep that is paid for
            why = "%s: %s" % (type(error).__name__, error)
            message = "optuna cannot be used there (%s): settings are drawn at random, as with --sampler random" % why
            sys.stdout.write("warning: %s\n" % message)
            self.event("warning", code="optuna.missing", message=message[:MOST_WORDS])
            return
        for row in self.rows.values():
            self.learn(row)

    def restore(self) -> None:
        """Read the rows of an earlier machine. A trial that had not ended starts again."""
        places = [self.folder, *(os.path.join(self.work, place) for place in self.order["earlier"])]
        for place in places:
            try:
                with open(os.path.join(place, TABLE)) as file:
                    records = json.load(file)["rows"]
            except OSError:
                continue
            self.rows = {row.number: row for row in map(row_of, records) if row.state in OVER}
            break
        kept = {"%03d" % row.number for row in self.best()}
        for place in places[1:]:
            for name in kept.difference(os.listdir(os.path.join(self.folder, BEST))):
                if os.path.isdir(source := os.path.join(place, BEST, name)):
                    target = os.path.join(self.folder, BEST, name)
                    shutil.copytree(source, target, copy_function=shutil.copyfile)
        for row in self.rows.values():
            self.tell(row)

    def folder_of(self, row: Row) -> str:
        """Return the folder in which a trial runs."""
        return os.path.join(self.trials, "%03d" % row.number)

    def free_slot(self) -> tuple[str, int] | None:
        """Return a job ("" is this job) with room for a trial, and the trial's place in it; None if all are full."""
        if len(self.running) >= self.order["at_once"]:
            return None
        taken = [trial.slot for trial in self.running]
        each = -(-self.order["at_once"] // self.order["jobs"])
        free = ((job, place) for job in ["", *self.hands.jobs()] for place in range(each))
        return next((slot for slot in free if slot not in taken), None)

    def run(self) -> int:
        """Run trials until none is left or the sweep is stopped. Return the sweep's exit code."""
        self.progress(None)
        while True:
            for trial in list(self.running):
                trial.look()
                if trial.child.poll() is not None:
                    self.running.remove(trial)
                    self.close(trial)
                elif self.is_stopped and not trial.is_ending:  # The trial was starting when the stop arrived.
                    self.end_stopped(trial)
                elif self.is_beaten(trial):
                    trial.end("nan" if trial.row.is_lost else "pruned")
            while not self.is_over():
                slot = self.free_slot()
                if slot is None or not self.start(slot):
                    break
            if not self.running and self.is_over():
                break
            time.sleep(TICK_S)
        return self.finish()

    def is_over(self) -> bool:
        """Return whether no more trials will start."""
        return bool(self.is_stopped or self.fault or self.is_exhausted or len(self.rows) >= self.order["trials"])

    def start(self, slot: tuple[str, int]) -> bool:
        """Start the next trial. Return whether there was one."""
        number = next(number for number in itertools.count(1) if number not in self.rows)
        params = self.next_params(number)
        if params is None:
            self.is_exhausted = True
            return False
        row = self.rows[number] = Row(number, params)
        self.tell(row)
        try:
            trial = Trial(row, self, slot)
        except OSError as error:
            row.state, row.why = "failed", ("it cannot be started: %s" % words_of(error))[:MOST_WORDS]
            shutil.rmtree(self.folder_of(row), ignore_errors=True)
            self.ended(row)
            return True
        self.running.append(trial)
        return True

    def next_params(self, number: int) -> Params | None:
        """Return the settings of a trial, different from those of all other trials; None if there are no more."""
        taken = [row.params for row in self.rows.values()]
        if self.order["sampler"] == "grid":
            return next((settings for settings in grid_of(self.order["space"]) if settings not in taken), None)
        for attempt in range(MOST_DRAWS):
            is_asked = self.sampler is not None and attempt < MOST_ASKED
            params = self.sampler.ask() if self.sampler and is_asked else draw_settings(self.order, number, attempt)
            if params not in taken:
                return params
        return None

    def is_beaten(self, trial: Trial) -> bool:
        """Return whether a trial must end early: its loss is not finite, or it is not in the best third at a rung."""
        row = trial.row
        with trial.lock:
            figure = row.loss if row.val_loss is None else row.val_loss
            if self.order["prune"] != "asha" or trial.is_ending or not row.steps or row.step is None or figure is None:
                return False
            if not math.isfinite(figure):
                return True
            for rung in range(RUNGS, 0, -1):
                if str(rung) in row.rungs or row.step * ETA**rung < row.steps or row.step >= row.steps:
                    continue
                row.rungs[str(rung)] = figure
                others = sorted(other.rungs[str(rung)] for other in self.rows.values() if str(rung) in other.rungs)
                if figure > others[max(0, len(others) // ETA - 1)]:
                    return True
        return False

    def close(self, trial: Trial) -> None:
        """Record a trial's end, and keep its files if it is among the best.

        If its job was lost, the trial will start again: its row is reported and deleted, and its files are not kept.
        """
        trial.close()
        row, job = trial.row, trial.slot[0]
        if job and row.state == "failed" and (why := self.hands.why_lost(job, trial.folder, trial.child.returncode)):
            row.state, row.why = "stopped", ("it starts again: %s" % why)[:MOST_WORDS]
            self.tell(row)
            sys.stdout.write("%03d | %s\n" % (row.number, row.why))
            del self.rows[row.number]
        elif row.state in ("done", "stopped") and row in self.best():
            place = os.path.join(self.folder, BEST, "%03d" % row.number)
            shutil.rmtree(place, ignore_errors=True)
            try:
                for name, path in trial.files():
                    os.makedirs(os.path.dirname(os.path.join(place, name)), exist_ok=True)
                    shutil.move(path, os.path.join(place, name))
            except OSError as error:  # For example on a full disk. The best trials before this one stay the best.
                shutil.rmtree(place, ignore_errors=True)
                row.state, row.why = "failed", ("its files cannot be kept: %s" % words_of(error))[:MOST_WORDS]
        shutil.rmtree(trial.folder, ignore_errors=True)
        if row.number in self.rows:
            self.ended(row)

    def ended(self, row: Row) -> None:
        """Record that a trial is over, before its files are removed or another trial starts."""
        over = [trial for trial in self.rows.values() if trial.state != "running"]
        failed = [trial for trial in over if trial.state == "failed"]
        if len(failed) == len(over) and len(over) in (MOST_FAILED, self.order["trials"]) and not self.is_stopped:
            self.end_all("%d of %d trials failed, and none succeeded: %s" % (len(failed), len(over), row.why))
        self.write()
        kept = {"%03d" % trial.number for trial in self.best()}
        for name in os.listdir(os.path.join(self.folder, BEST)):
            if name not in kept:
                shutil.rmtree(os.path.join(self.folder, BEST, name), ignore_errors=True)
        self.tell(row)
        self.progress(row)
        self.learn(row)

    def learn(self, row: Row) -> None:
        """Report a trial's result to the sampler, if there is one."""
        if self.sampler is not None and row.result is not None:
            self.sampler.tell(row.params, row.result)

    def best(self) -> list[Row]:
        """Return the rows whose files are kept, best first. Stopped trials come after all finished trials.

        A stopped trial may have reported a lower loss without having saved anything, so the files of a finished trial
        are not removed for it.
        """
        ranked = [row for row in self.rows.values() if row.state in ("done", "stopped") and row.result is not None]
        return sorted(ranked, key=lambda row: (row.state != "done", row.result, row.number))[: self.order["keep"]]

    def end_all(self, fault: str) -> None:
        """End all trials, and record the fault of the sweep that is the reason."""
        self.fault = self.fault or fault
        for trial in self.running:
            trial.end("stopped")

    def write(self) -> None:
        """Replace the table of all trials. On a full disk, use the reserved space, or else end the sweep."""
        try:
            self.replace_table()
        except OSError:
            with suppress(OSError):
                os.unlink(self.room)
            try:
                self.replace_table()
            except OSError as error:
                self.end_all("the table of the trials cannot be written: %s" % words_of(error))

    def replace_table(self) -> None:
        """Replace the table of all trials. Raise OSError if the disk is full."""
        path = os.path.join(self.folder, TABLE)
        rows = [dict(row.record(), rungs=row.rungs) for _, row in sorted(self.rows.items())]
        best = [row.number for row in self.best()]
        with open(path + ".tmp", "w") as file:
            json.dump({"v": 1, "best": best, "trials": self.order["trials"], "rows": rows}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".tmp", path)

    def tell(self, row: Row) -> None:
        """Write a row to the events of the run. A full disk must not end the sweep."""
        self.event("trial", **dict(row.record(), is_restored=row.is_restored))

    def event(self, kind: str, **more: Any) -> None:
        """Write an event of the run."""
        elapsed_s = round(time.monotonic() - self.began, 3)
        event = dict(more, kind=kind, wall=round(time.time(), 3), elapsed_s=elapsed_s)
        with suppress(OSError):
            file = os.open(self.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(file, json.dumps(event).encode() + b"\n")
            finally:
                os.close(file)

    def progress(self, row: Row | None) -> None:
        """Report to the runner how many trials are over, and the last result."""
        over = sum(trial.state != "running" for trial in self.rows.values())
        lines = [{"step": over, "total_steps": self.order["trials"]}]
        if row is not None and row.state in ("done", "stopped") and row.result is not None:
            lines.append({"step": over, "val_loss": row.result})
        with suppress(OSError), open(os.environ["GPURUN_EVENTS"], "a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def stop(self, *_: Any) -> None:
        """End all trials. Each has time to save."""
        if self.is_stopped:
            return
        self.is_stopped = True
        for trial in self.running:
            self.end_stopped(trial)
        threading.Thread(target=self.kill, daemon=True).start()

    def end_stopped(self, trial: Trial) -> None:
        """Request that a trial saves and ends."""
        trial.end("stopped", getattr(signal, "SIG" + self.order["stop_signal"]))

    def kill(self) -> None:
        """Kill the trials that have not ended within their time to save."""
        time.sleep(self.order["grace_s"])
        for trial in list(self.running):
            trial.end("stopped")
        time.sleep(HANDS_END_S)
        for trial in list(self.running):  # This is srun, if it waits for a job that no longer answers.
            with suppress(OSError):
                os.killpg(trial.child.pid, signal.SIGKILL)

    def finish(self) -> int:
        """Write the table and the best result. Return the exit code."""
        self.write()
        best = self.best()
        for row in best[:1]:
            words = ", ".join("%s=%s" % pair for pair in row.params.items())
            sys.stdout.write("best: trial %03d, %s, with %s\n" % (row.number, repr(row.result), words))
        if self.is_exhausted:
            sys.stdout.write("there were no more settings after %d trials\n" % len(self.rows))
        if self.fault or not (best or self.is_stopped):
            states = [row.state for row in self.rows.values()]
            counts = ", ".join("%d %s" % (states.count(state), state) for state in sorted(set(states)))
            sys.stdout.write("error: %s\n" % (self.fault or "no trial has a result: %s" % counts))
            return 1
        return 0


def words_of(error: OSError) -> str:
    """Return the system's message about a failure."""
    return error.strerror or str(error)


def trial_environment(row: Row, events: str, cards: list[str], slot: int) -> dict[str, str]:
    """Return the environment of a trial: the sweep's own, plus its number, its events file and its GPU."""
    own = {"GPURUN_TRIAL": "%03d" % row.number, "GPURUN_EVENTS": events}
    if cards:
        own["CUDA_VISIBLE_DEVICES"] = cards[slot % len(cards)]
    return dict(os.environ, **own)


def grid_of(space: dict[str, Any]) -> Iterator[Params]:
    """Yield every combination, the last setting changing first."""
    for values in itertools.product(*space.values()):
        yield dict(zip(space, values))  # noqa: B905 - Python 3.8 has no `strict`


def draw_settings(order: dict[str, Any], number: int, attempt: int) -> Params:
    """Return random settings: the same for the same trial of the same sweep on any machine."""
    dice = random.Random("%d:%d:%d" % (order["seed"], number, attempt))
    return {name: drawn_value(axis, dice) for name, axis in order["space"].items()}


def drawn_value(axis: Any, dice: random.Random) -> str:
    """Return one value of a list, or a number from a range, as text."""
    if isinstance(axis, list):
        return str(dice.choice(axis))
    low, high = axis["low"], axis["high"]
    if axis["log"]:
        found = math.exp(dice.uniform(math.log(low), math.log(high)))
    else:
        found = dice.uniform(low, high)
    return text_of(min(high, max(low, round(found))) if axis["whole"] else found)


def fill_in(word: str, params: Params) -> str:
    """Return a word of a command with the values filled in."""
    for name, value in params.items():
        word = word.replace("{%s}" % name, value)
    return word


def cards_of(count: int) -> list[str]:
    """Return the usable GPUs: those in the machine's own variable, at most as many as the plan has."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (named.split(",") if named else list(map(str, range(count))))[:count]


def main() -> int:
    """Run the sweep described in sweep.json."""
    with open(sys.argv[1]) as file:
        order = json.load(file)
    try:
        sweep = RunningSweep(order, os.path.dirname(os.getcwd()))
    except OSError as error:
        sys.stdout.write("error: the sweep cannot start: %s\n" % words_of(error))
        return 1
    signal.signal(signal.SIGTERM, sweep.stop)
    return sweep.run()
