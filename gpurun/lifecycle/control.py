"""What the user wants of a running supervisor: one small file that only gets stronger."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from gpurun.core.paths import RunFolder, write_atomic

How = Literal["save", "now", "destroy"]
STRENGTH: dict[str, int] = {"": 0, "save": 1, "now": 2, "destroy": 3}


@dataclass(frozen=True)
class Wish:
    """How to stop: `save` first, `now` without a checkpoint, or `destroy` without collecting; and who asks why."""

    how: How
    by: str
    reason: str


def read_wish(folder: RunFolder) -> Wish | None:
    """The wish that stands, if any. The file is replaced whole, so it is never half there."""
    try:
        return Wish(**json.loads(folder.control.read_bytes()))
    except FileNotFoundError:
        return None


def wish(folder: RunFolder, how: How, *, by: str, reason: str) -> None:
    """Ask the supervisor to stop the run; a weaker wish than the one that stands changes nothing."""
    standing = read_wish(folder)
    if standing is None or STRENGTH[how] > STRENGTH[standing.how]:
        write_atomic(folder.control, json.dumps({"how": how, "by": by, "reason": reason}).encode())
