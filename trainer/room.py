"""Which micro-batch fits on a card: every checkpoint carries it, and until the next one is made a note does.

The note is for processes that share a model. Each of their forwards is a collective: one whose memory ran out cannot
take its step again while the others wait elsewhere. It leaves `out/room.json` and ends, the others lose it and end too,
and trainer/launch.py begins again. Where nobody would, as under plain torchrun, the run ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.data import BatchPlan, smaller
from trainer.distributed import BEGINNING
from trainer.errors import BeginAnew, OutOfMemory, TrainerError

__all__ = ["begins_anew", "read_room", "without_room"]

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


def without_room(
    out: Path,
    plan: BatchPlan,
    *,
    context: int,
    step: int,
    asked: Mapping[str, Any],
    is_collective: bool,
    is_stopping: bool,
) -> TrainerError:
    """Return how this process ends, whose memory ran out where it cannot go on: BeginAnew once the note says how.

    `asked` is which card was to take which micro-batch; a forward that `is_collective` needs all processes.
    """
    full = OutOfMemory(
        f"micro_batch {plan.micro_batch} of context {context} does not fit into the card's memory; "
        "halve train.micro_batch"
    )
    if BEGINNING not in os.environ or not is_collective:
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
