"""Run the script of --setup on the machine to its end, and copy its output to this computer."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from math import ceil
from pathlib import Path

from gpurun.core.errors import SetupError
from gpurun.core.journal_records import RunState
from gpurun.core.transfer_progress import moving
from gpurun.core.untrusted import safe_text
from gpurun.jobs.requirements import PIP_MARK
from gpurun.lifecycle.connect import Patience
from gpurun.lifecycle.context import Context
from gpurun.remote.client import FarSide
from gpurun.remote.messages import SetUp
from gpurun.view.number_format import format_duration

POLL_S, SOON_S = 2.0, 0.2
# Seconds after the limit within which the machine kills the script's processes and reports the end.
KILL_ALLOWANCE_S = 60.0
PART_BYTES = 256 << 10
MOST_LOG_BYTES = 4 << 20
LAST_LINES, LAST_CHARS = 15, 2000


def set_up(far: FarSide, state: RunState, context: Context, planned_s: float) -> float:
    """Run the script of --setup to its end; return the seconds that it took.

    Each call is short, so that a stop request is noticed between two calls. Repeating a call whose reply was lost does
    not start the script again. Raise SetupError if the script failed, and TrainingFailed if the machine stays lost.
    """
    limit_s = max(1.0, min(planned_s, context.seconds_left(state)))
    script, log = context.plan.choices.setup.encode(), _Log(context.folder.setup_log)
    begun_mono = context.clock.monotonic()
    patience = Patience(state, context, limit_s=limit_s + KILL_ALLOWANCE_S)
    with moving(context.folder, context.clock, "setup", ceil(limit_s)) as tell:
        while True:
            poll = partial(far.set_up, script, limit_s=limit_s, offset=log.size, most=log.room)
            said, part = patience.until_done(poll)
            is_on = said.state in ("none", "running")
            is_behind = log.take(part, said)
            tell(int(said.ran_s), said.tail)
            took_s = context.clock.monotonic() - begun_mono
            if is_on and took_s > limit_s + KILL_ALLOWANCE_S:
                raise _make_script_error(said, limit_s, context)
            if not is_on and not is_behind:
                break
            if not is_behind:
                context.clock.sleep(min(POLL_S, SOON_S + said.ran_s / 4))  # After a quick script, do not wait long.
    log.close(said)
    if (said.state, said.exit_code) != ("ended", 0):
        raise _make_script_error(said, limit_s, context)
    return took_s


def _make_script_error(said: SetUp, limit_s: float, context: Context) -> SetupError:
    """Return the error for a script that failed, with its last lines."""
    code, hint = "setup.failed", "Fix the script; your own machine is a cheap place to try it."
    if PIP_MARK in said.tail:
        hint = "Change what --pip names; gpurun run --dry-run installs it here, for free."
    if said.state == "ended":
        how = f"signal {said.signal}" if said.exit_code is None else str(said.exit_code)
        what = f"ended with {how} on the machine after {format_duration(said.ran_s)}"
    elif said.state in ("lost", "rebooted"):
        why = "the machine was restarted" if said.state == "rebooted" else "the process that watched it was killed"
        code, what = "setup.lost", f"was started on the machine, but it is not known how it ended: {why}"
    else:
        code, what = "setup.limit", f"was still running at its limit of {format_duration(limit_s)}, and was ended"
        hint = "Give it more time (--setup-limit MINUTES), or leave work to an --image."
    lines = [line[:LAST_CHARS] for line in safe_text(said.tail.rstrip(), most_lines=4000) if line.strip()]
    words = "\n".join(lines[-LAST_LINES:])[-LAST_CHARS:]
    last = f" Its last lines:\n{words}" if words else " It printed nothing."
    subject = "The installation of --pip" if PIP_MARK in said.tail else "The script of --setup"
    return SetupError(code, f"{subject} {what}.{last}", hint=f"{hint} Its output: setup.log in the folder of the run.")


class _Log:
    """The local copy of the script's log: its first bytes as it grows, and its last lines if it is too long.

    Errors of the local disk are ignored, because they must not end a set-up that costs money.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def size(self) -> int:
        with suppress(OSError):
            return self._path.stat().st_size
        return 0

    @property
    def room(self) -> int:
        """Return how many bytes of the log to request in one call."""
        return max(0, min(PART_BYTES, MOST_LOG_BYTES - self.size))

    def take(self, part: bytes, said: SetUp) -> bool:
        """Append the next part. Return whether more of the log can be fetched now."""
        if said.size < min(self.size, MOST_LOG_BYTES):  # The copy is from an earlier machine.
            with suppress(OSError):
                self._path.unlink()
            return self.size == 0
        before = self.size
        self._write(part)
        return self.size > before and self.size < min(said.size, MOST_LOG_BYTES)

    def close(self, said: SetUp) -> None:
        """Append the script's last lines, if its log is longer than the copy may be."""
        if said.size > self.size == MOST_LOG_BYTES:
            gap = f"\n[... {said.size - self.size:,} more bytes; the last of them:]\n"
            self._write(f"{gap}{said.tail}".encode())

    def _write(self, content: bytes) -> None:
        with suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "ab") as out:
                out.write(content)
