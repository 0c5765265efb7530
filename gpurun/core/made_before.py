"""What a request rests on that was made before it: the quote in a plan file, and the run that it continues."""

from __future__ import annotations

from gpurun.core.money import Micros
from gpurun.core.records import Frozen


class Quoted(Frozen):
    """What a plan file says that its request was quoted when it was written."""

    wall: float
    recipe_sha256: str
    where: str
    rate_micros_per_hour: Micros
    expected_micros: Micros
    worst_micros: Micros


class Earlier(Frozen):
    """The checkpoint of an earlier run that a run goes on from, and what that run cost at most, where that is known.

    `bytes` are those of its three files; `receipt_sha256` is the receipt that names them. `steps` are those that it was
    planned for; this run may take more.
    """

    run: str
    step: int
    bytes: int
    receipt_sha256: str
    spent_micros: Micros | None = None
    steps: int = 0
