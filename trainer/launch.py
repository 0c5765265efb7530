"""Trains on the GPUs of one machine: `python -m trainer.launch --processes 8 --recipe … --data … --out …`.

This is torchrun, run in this process, so that a signal to its children reaches the training processes. If memory runs
out in one of them and the step cannot be repeated, all of them end. They are then restarted from the newest checkpoint,
with smaller micro-batches of the same tokens, at most twice. Exit codes: as in trainer/train.py, from the process that
failed; 1 if no process has a more specific code.
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

from trainer.distributed import leave
from trainer.errors import OutOfMemory, Restart
from trainer.out_of_memory import BEGINNING, micro_batch_of_restart

__all__ = ["main"]

PROGRAM = ("-m", "trainer.train")
"""The command of each process, as torchrun's arguments."""


def _train(processes: int, argv: Sequence[str]) -> int:
    """Run all processes to their end once, and return their most specific exit code."""
    try:
        # A numeric address, because a Mac's host name often does not resolve, and the processes would wait for one
        # another.
        options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={processes}"]
        torchrun.run(torchrun.parse_args([*options, *PROGRAM, *argv]))
    except ChildFailedError as error:
        failures = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        codes = [failure.exitcode for failure in failures]
        if Restart.exit_code in codes:
            return Restart.exit_code
        print(error, file=sys.stderr)
        # A process that lost its connection to the failed one ends with 1; one that torchrun then killed has a negative
        # code.
        return next((code for code in codes if code > 1), 1)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; as in torchrun, a signal is passed on and ends all processes."""
    description = "Train with several processes on this machine; all other arguments go to trainer.train."
    parser = argparse.ArgumentParser(prog="python -m trainer.launch", description=description, allow_abbrev=False)
    parser.add_argument("--processes", type=int, required=True, help="how many, one for each GPU")
    parser.add_argument("--out", type=Path, required=True, help="the folder for events, checkpoints and samples")
    arguments, others = parser.parse_known_args(argv)
    fits = sys.maxsize
    for times in itertools.count(1):
        os.environ[BEGINNING], began_monotonic_s = uuid.uuid4().hex, time.monotonic()
        code = _train(arguments.processes, [*others, "--out", str(arguments.out)])
        if code != Restart.exit_code:
            return code
        less = micro_batch_of_restart(arguments.out, fits, times, began_monotonic_s)
        if less is None:
            break
        fits = less
    return OutOfMemory.exit_code


if __name__ == "__main__":
    leave(main())
