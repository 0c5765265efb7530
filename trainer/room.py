"""Which micro-batch fits on a card: every checkpoint carries it, and until the next one is made a note does.

A single process takes the step again in smaller portions. Of several, the one whose memory ran out leaves
`out/room.json` and ends; the others, which may wait for it on their cards, see that and end too, and trainer/launch.py
begins again from the newest checkpoint. Under plain torchrun, which would not, the run ends.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.data import BatchPlan, smaller
from trainer.distributed import BEGINNING, leave
from trainer.errors import BeginAnew, OutOfMemory, TrainerError

__all__ = ["begins_anew", "end_with_the_others", "read_room", "without_room"]

LOOK_S = 0.5
"""How often a process looks for a note of another."""
LEAVE_S, MOST_WRITING_S = 4.0, 25.0
"""How long after the note it goes on at most, and for a checkpoint that it writes: torchrun kills it after 30 s."""
_NOTE = "room.json"
_KEYS = {"planned": int, "fits": int, "step": int, "message": str, "beginning": str}


def read_room(out: Path) -> dict[str, Any]:
    """Return the note of an out folder; nothing where there is none, or one that makes no sense."""
    try:
        room = json.loads((out / _NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    makes_sense = isinstance(room, dict) and all(type(room.get(key)) is kind for key, kind in _KEYS.items())
    return room if makes_sense else {}


def begins_anew(out: Path) -> bool:
    """Tell whether a process of this beginning has left the note: then all end, and what another meets is no cause."""
    beginning = os.environ.get(BEGINNING)
    return beginning is not None and read_room(out).get("beginning") == beginning


def end_with_the_others(out: Path, is_writing: Callable[[], bool]) -> None:
    """Have this process end soon after a note of this beginning, wherever it is then; a save under way is waited for.

    What waits for the others on a card hears no signal: torchrun would kill it after half a minute, which is paid for.
    """

    def watch() -> None:
        while not begins_anew(out):
            time.sleep(LOOK_S)
        seen_s = time.monotonic()
        time.sleep(LEAVE_S)
        while is_writing() and time.monotonic() < seen_s + MOST_WRITING_S:
            time.sleep(LOOK_S)
        leave(BeginAnew.exit_code)

    if BEGINNING in os.environ:
        threading.Thread(target=watch, name="room", daemon=True).start()


def without_room(
    out: Path,
    plan: BatchPlan,
    *,
    context: int,
    step: int,
    asked: Mapping[str, Any],
    is_several: bool,
    is_stopping: bool,
) -> TrainerError:
    """Return how this process ends, whose memory ran out where it cannot go on: BeginAnew once the note says how.

    `asked` is which card was to take which micro-batch; `is_several`, that other processes wait for this one.
    """
    full = OutOfMemory(
        f"micro_batch {plan.micro_batch} of context {context} does not fit into the card's memory; "
        f"halve it: --set train.micro_batch={max(1, plan.micro_batch // 2)}"
    )
    if BEGINNING not in os.environ or not is_several:
        return full
    if begins_anew(out):  # Asked first: torchrun has told this process to stop since, as one that failed is gone.
        return BeginAnew("memory ran out in another process too")
    less = smaller(plan)
    if less is None:
        return OutOfMemory(f"one sequence of context {context} does not fit into the card's memory")
    if is_stopping:  # Who begins again has not heard of the stop, and there is nothing new to save.
        return full
    message = f"memory ran out after step {step}: micro_batch {plan.micro_batch} became {less.micro_batch}"
    message += f", in {less.accumulation} portions; all processes begin again from the newest checkpoint"
    room = {"v": 1, **asked, "fits": less.micro_batch, "step": step, "message": message}
    # All cards may run out at once: each process has a temporary file of its own, and their notes say the same.
    temporary = out / f"{_NOTE}.{os.getpid()}.tmp"
    try:
        temporary.write_text(json.dumps(room | {"beginning": os.environ[BEGINNING]}), encoding="utf-8")
        temporary.replace(out / _NOTE)
    except OSError:  # Without the note the next beginning would be no smaller.
        return full
    return BeginAnew(message)
