"""How the programs here speak: talk on stderr, one JSON line on stdout, exit 2 with {"error": …} for a refusal."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from trainer.prepare.errors import Refusal

__all__ = ["run_program", "say"]

_ENDS_WITH_STDIN = "PREPARE_ENDS_WITH_STDIN"
_LETTING_GO_S = 5.0


def run_program(do: Callable[[list[str]], dict[str, Any]], *, left: str, less: str) -> int:
    """Do what the command line asks for; return the exit code.

    `left` says what a failed write leaves behind, `less` how to ask for less.
    """
    # A SIGTERM unwinds like Ctrl-C, so that what is half made is removed.
    signal.signal(signal.SIGTERM, _leave)
    if os.environ.pop(_ENDS_WITH_STDIN, ""):
        # Nobody else is to wait for a word there.
        pipe, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    try:
        print(json.dumps(do(sys.argv[1:])), flush=True)
    except Refusal as refusal:
        return _refuse(refusal)
    except OSError as error:
        return _refuse(_not_written(error, left, less))
    except MemoryError:
        what = "One of the files is too large to be read into memory"
        return _refuse(Refusal("memory.full", f"{what}.", hint=f"Split it, or {less}."))
    except KeyboardInterrupt:
        return 130
    return 0


def say(line: str) -> None:
    """Talk to the caller that waits."""
    print(f"prepare: {line}", file=sys.stderr, flush=True)


def _refuse(refusal: Refusal) -> int:
    print(json.dumps({"error": refusal.as_record()}), flush=True)
    return 2


def _leave(number: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + number)


def _end_with(pipe: int) -> None:
    """End as soon as who waits for this program is gone: a download, or datatrove's work, would go on for hours."""
    os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LETTING_GO_S)
    os._exit(128 + signal.SIGTERM)


def _not_written(error: OSError, left: str, less: str) -> Refusal:
    """What reading raises is a Refusal already, so this came from writing."""
    where = f"{error.filename} " if error.filename else "The data "
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"{where}could not be written: the disk is full. {left}"
        return Refusal("disk.full", what, hint=f"Free some space, or {less}.")
    return Refusal(
        "disk.write_failed",
        f"{where}could not be written: {error.strerror}. {left}",
        hint="Check that the folder is yours and the disk is sound.",
    )
