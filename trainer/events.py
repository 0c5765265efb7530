"""Reports a run: in events.jsonl for programs, and as lines for people.

An event is one line, which is written and flushed immediately. Only the first process reports. One exception: a process
that fails alone adds its own `stop`, because only it knows the reason.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from trainer import STARTED_MONOTONIC_S

__all__ = ["UNKNOWN_S", "Reporter"]

BEAT_S = 1.0
"""The shortest time in seconds between two heartbeats, because a step may take milliseconds."""
UNKNOWN_S = 1800.0
"""How many seconds an operation of unknown length may take before the trainer counts as stuck."""


class Reporter:
    """Appends events to `out/events.jsonl`; prints lines, also to `out/trainer.log` unless stdout is that file."""

    def __init__(self, out: Path, *, is_first: bool, since_monotonic_s: float = STARTED_MONOTONIC_S) -> None:
        self._is_first, self._since_monotonic_s = is_first, since_monotonic_s
        # The thread that writes checkpoints also reports them.
        self._lock = threading.Lock()
        self._path = out / "events.jsonl"
        self._before = self._path.stat().st_size if self._path.exists() else 0
        self._heartbeat = out / "heartbeat.json"
        self._patience_s, self._beaten_s = 0.0, 0.0
        self._train_began_s: float | None = None
        self._log: Any = None
        if not is_first:
            return
        out.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab+") as file:
            # A killed process may have left an incomplete line, to which the next event must not be appended.
            if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                file.write(b"\n")
        self._log = self._open_log(out / "trainer.log")

    @staticmethod
    def _open_log(path: Path) -> Any:
        log = path.open("a", encoding="utf-8", errors="replace")
        try:
            already = os.path.samestat(os.fstat(sys.stdout.fileno()), os.fstat(log.fileno()))
        except (OSError, ValueError, AttributeError):
            already = False
        if already:
            log.close()
            return None
        return log

    def say(self, line: str) -> None:
        """Print one line for people."""
        if not self._is_first:
            return
        encoding = sys.stdout.encoding or "utf-8"
        with self._lock:
            print(line.encode(encoding, errors="replace").decode(encoding), flush=True)
            if self._log is not None:
                print(line, file=self._log, flush=True)

    def beat(self, patience_s: float) -> None:
        """Promise the next heartbeat within `patience_s`: a watcher may treat a longer silence as a hang."""
        now_s = time.monotonic()
        if not self._is_first or (patience_s == self._patience_s and now_s < self._beaten_s + BEAT_S):
            return
        self._patience_s, self._beaten_s = patience_s, now_s
        temporary = self._heartbeat.with_suffix(".tmp")
        with contextlib.suppress(OSError):  # A full disk must not end training here; the next checkpoint reports it.
            temporary.write_text(json.dumps({"v": 1, "wall": time.time(), "patience_s": patience_s}))
            temporary.replace(self._heartbeat)

    def emit(self, kind: str, step: int, **values: Any) -> None:
        """Append one event."""
        if self._is_first:
            self._append(kind, step, values)

    def _append(self, kind: str, step: int, values: dict[str, Any]) -> None:
        event: dict[str, Any] = {"kind": kind, "wall": time.time(), "elapsed_s": self.elapsed_s(), "step": step}
        for name, value in values.items():  # NaN and infinity become null: JSON has no such numbers.
            event[name] = None if isinstance(value, float) and not math.isfinite(value) else value
        line = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"
        with self._lock, self._path.open("ab") as file:
            file.write(line.encode("utf-8", errors="replace"))
            file.flush()

    def elapsed_s(self) -> float:
        """Return the seconds since this process started, or since `since_monotonic_s` if that was given."""
        return round(time.monotonic() - self._since_monotonic_s, 3)

    def begin_training(self) -> None:
        """Start the clock of `train_s`."""
        self._train_began_s = time.monotonic()

    def train_s(self) -> float:
        """Return the seconds since training began in this process; 0 before training."""
        return 0.0 if self._train_began_s is None else time.monotonic() - self._train_began_s

    def start(self, step: int, values: dict[str, Any]) -> None:
        """Report what will run, and on which hardware."""
        self.emit("start", step, **values)
        self.say(f"device: {values['device']}")
        if values["cuda_name"] is not None:
            self.say(f"cuda_name: {values['cuda_name']}")
        self.say(f"parameters: {values['parameters']:,}")

    def compile(self, step: int, found: int, made: int) -> None:
        """Report how many graphs were found in the compile cache and how many were compiled, up to this step."""
        cache = "partial" if found and made else "miss" if made else "hit"
        self.emit("compile", step, cache=cache, found=found, made=made)
        self.say(f"compile cache: {cache} | found {found} | made {made}")

    def step(self, step: int, values: dict[str, Any]) -> None:
        """Report one optimiser step."""
        self.emit("step", step, **values)
        loss, lr = values["loss"], values["lr"]
        self.say(f"step {step:04d} | loss {loss:.4f} | lr {lr:.2e} | elapsed {self.elapsed_s():.1f} s")

    def eval(self, step: int, values: dict[str, Any]) -> None:
        """Report a validation loss."""
        self.emit("eval", step, **values)
        line = f"eval {step:04d} | val_loss {values['val_loss']:.4f} | perplexity {values['perplexity']:.2f}"
        self.say(line if values["hellaswag"] is None else f"{line} | hellaswag {values['hellaswag']:.4f}")

    def core(self, step: int, values: dict[str, Any]) -> None:
        """Report CORE, which is computed after the last step."""
        self.emit("core", step, **values)
        each = " | ".join(f"{label} {task['centered']:.4f}" for label, task in values["tasks"].items())
        self.say(f"core {step:04d} | CORE {values['core']:.4f} | items {values['core_items']:,} | {each}")

    def sample(self, step: int, prompt: str, text: str, name: str) -> None:
        """Report a sample whose file has been written."""
        self.emit("sample", step, prompt=prompt, text=text, name=name)
        # A model of bytes may well produce control characters.
        printable = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
        self.say(f"--- sample ---\n{printable}")

    def checkpoint(self, step: int, files: list[str], size: int, *, save_s: float, stall_s: float) -> None:
        """Report a checkpoint that is on disk: saving took `save_s` seconds, of which training paused `stall_s`."""
        self.emit("checkpoint", step, files=files, bytes=size, save_s=save_s, stall_s=stall_s)
        self.say(f"checkpoint: {files[0]}")

    def warning(self, step: int, code: str, message: str) -> None:
        """Report something that a person should know and that does not stop training."""
        self.emit("warning", step, code=code, message=message)
        self.say(f"warning: {message}")

    def stop(
        self, step: int, reason: str, message: str, train_s: float, final_loss: float | None, *, alone: bool = False
    ) -> None:
        """Report why training ended; with `alone`, this process failed while the others do not know the reason.

        The others then see only a broken connection; a lone `stop` that follows another process's `stop` is not
        written.
        """
        if not self._is_first and not alone:
            return
        # On a machine without the first process, the folder may not exist yet.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not (alone and self._is_end_reported()):
            values = {"reason": reason, "message": message, "train_s": round(train_s, 3), "final_loss": final_loss}
            self._append("stop", step, values)
        self.say(f"stop: {reason} | {message}" if message else f"stop: {reason}")

    def _is_end_reported(self) -> bool:
        """Return whether any process has reported why training ended, since this process started."""
        if not self._path.exists():
            return False
        with self._path.open("rb") as file:
            file.seek(self._before)
            return any(line.startswith(b'{"kind":"stop"') for line in file)
