"""The words for the parts of a kind of job, and which parts it has: views ask this module and no other what ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JobTerms:
    """The words for one kind of job.

    `verb` is the gpurun verb that starts it, `label` names what was requested, `worker` is what does the `work`,
    `doing` describes the work under way, and `files` come home. `whole` are the kinds of file that make up a
    checkpoint. `has_model`: gpurun knows its recipe. So there are parameters, tokens and an estimate, its time is
    divided by its own events, and a loss belongs to a checkpoint.
    """

    verb: str
    label: str
    worker: str
    work: str
    doing: str
    files: str
    whole: frozenset[str]
    has_model: bool


TRAINER = JobTerms(
    verb="train",
    label="Recipe",
    worker="the trainer",
    work="training",
    doing="training",
    files="checkpoints",
    whole=frozenset({"weights", "optimizer", "state"}),
    has_model=True,
)
COMMAND = JobTerms(
    verb="run",
    label="Command",
    worker="the command",
    work="the command",
    doing="running",
    files="outputs",
    whole=frozenset({"checkpoint"}),
    has_model=False,
)
DEV_BOX = JobTerms(
    verb="dev",
    label="Dev box",
    worker="the dev box",
    work="the dev box",
    doing="running",
    files="files",
    whole=frozenset({"checkpoint"}),
    has_model=False,
)
SWEEP = JobTerms(
    verb="sweep",
    label="Sweep",
    worker="the sweep",
    work="the trials",
    doing="trying",
    files="checkpoints of the best",
    whole=frozenset({"checkpoint"}),
    has_model=False,
)

TERMS: dict[str, JobTerms] = {"trainer": TRAINER, "command": COMMAND, "dev_box": DEV_BOX, "sweep": SWEEP}
"""By kind of job; a kind that is not here adds its own when its class is defined."""


def terms_in(stated: Mapping[str, Any]) -> JobTerms:
    """Return the words for what ran, from a receipt's predicate or from the record that opened the run.

    An unknown kind of job gets the words of a command.
    """
    request = stated.get("asked", stated)
    kind = str(request.get("job") or ("command" if request.get("command") is not None else "trainer"))
    return TERMS.get(kind, COMMAND)
