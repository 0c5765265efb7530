"""Trains on the cards of one machine: `python -m trainer.launch --processes 8 --recipe … --data … --out …`.

This is torchrun, run in this process: what signals its children signals the processes that train. Where memory runs out
in one of them and the step cannot be taken again, all of them end, and it begins again from the newest checkpoint, in
smaller portions of the same tokens, twice at most. Exit codes: as trainer/train.py has them, from the process that
failed; 1 where none of them says more.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from trainer.distributed import BEGINNING, leave
from trainer.errors import BeginAnew, OutOfMemory
from trainer.events import UNKNOWN_S, Reporter

__all__ = ["main"]

MOST_TIMES = 2
"""How often it begins again: what does not fit into a quarter does not fit."""
PROGRAM = ("-m", "trainer.train")
"""What each process runs, in torchrun's words."""


def _train(processes: int, argv: Sequence[str]) -> int:
    """Run all processes to their end once, and return the exit code that says most of it."""
    try:
        torchrun.run(torchrun.parse_args(["--standalone", f"--nproc-per-node={processes}", *PROGRAM, *argv]))
    except ChildFailedError as error:
        failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        codes = [failure.exitcode for failure in failures]
        if BeginAnew.exit_code in codes:
            return BeginAnew.exit_code
        print(error, file=sys.stderr)
        # One that lost its connection to the one that failed ends with 1, one that is killed for it below 0.
        return next((code for code in codes if code > 1), 1)
    return 0


def _smaller_micro_batch(out: Path, fits: int, times: int, began_monotonic_s: float) -> int | None:
    """Report that all begin again, and return the micro-batch; None, and the end, if that is not below `fits`.

    It is the end, too, after so many `times` as are worth paying for.
    """
    from trainer.room import read_room
    from trainer.saving import latest_step

    # Imported with all of the trainer, for which nobody waits where memory never runs out.
    room, reporter = read_room(out), Reporter(out, is_first=True, since_monotonic_s=began_monotonic_s)
    is_less = room.get("beginning") == os.environ[BEGINNING] and room["fits"] < fits
    if not is_less or times > MOST_TIMES:
        message = "memory ran out again with the smaller micro-batch"
        if is_less:
            message = f"memory ran out {times} times; go on with less: --set train.micro_batch={room['fits']}"
        reporter.stop(room.get("step", 0), OutOfMemory.reason, message, time.monotonic() - began_monotonic_s, None)
        return None
    reporter.beat(UNKNOWN_S)  # The next beat comes once torch is imported, the shards are read and the model is back.
    lost = max(0, room["step"] - latest_step(out))
    reporter.warning(room["step"], "memory.micro_batch", f"{room['message']}; {lost} steps were lost")
    return int(room["fits"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; a signal is passed on to the processes and ends it, as torchrun."""
    description = "Train with several processes on this machine; all further words go to trainer.train."
    parser = argparse.ArgumentParser(prog="python -m trainer.launch", description=description, allow_abbrev=False)
    parser.add_argument("--processes", type=int, required=True, help="how many, one for each card")
    parser.add_argument("--out", type=Path, required=True, help="the folder for events, checkpoints and samples")
    arguments, others = parser.parse_known_args(argv)
    fits = sys.maxsize
    for times in itertools.count(1):
        os.environ[BEGINNING], began_monotonic_s = uuid.uuid4().hex, time.monotonic()
        code = _train(arguments.processes, [*others, "--out", str(arguments.out)])
        if code != BeginAnew.exit_code:
            return code
        less = _smaller_micro_batch(arguments.out, fits, times, began_monotonic_s)
        if less is None:
            break
        fits = less
    return OutOfMemory.exit_code


if __name__ == "__main__":
    leave(main())
