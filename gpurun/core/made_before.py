"""The earlier work on which a request builds: the quote in a plan file, and the run that it continues."""

from __future__ import annotations

from gpurun.core.money import Micros
from gpurun.core.records import Frozen


class Quoted(Frozen):
    """The quote in a plan file: the cost of its request, as estimated when the file was written (`wall`)."""

    wall: float
    recipe_sha256: str
    where: str
    rate_micros_per_hour: Micros
    expected_micros: Micros
    worst_micros: Micros


class Earlier(Frozen):
    """The checkpoint of an earlier run from which a run continues, and the upper bound of that run's cost, if known.

    `bytes` is the size of its three files; `receipt_sha256` is the receipt that names them. `steps` is how many the
    earlier run was planned for; this run may take more.
    """

    run: str
    step: int
    bytes: int
    receipt_sha256: str
    spent_micros: Micros | None = None
    steps: int = 0
