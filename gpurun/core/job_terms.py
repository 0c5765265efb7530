"""What a kind of job calls its things, and which of them it has: the one place where a view asks what ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JobTerms:
    """The words for one kind of job.

    `verb` is the verb of gpurun that begins it, `label` names what was asked for, `worker` does the `work`, which is
    `doing` while it lasts, and `files` come home. `whole` are the kinds of file that one checkpoint has. `has_model`:
    its recipe is known here. So parameters, tokens and an estimate can be told, its time is divided by its own events,
    and a loss belongs to a checkpoint.
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
"""By the kind of job; every other kind puts its own here when it is made."""


def terms_in(stated: Mapping[str, Any]) -> JobTerms:
    """Return the words for what ran by a receipt's predicate, or by the record that opened a run.

    Of a kind of job that is not known here it is said what may be said of a command.
    """
    asked = stated.get("asked", stated)
    kind = str(asked.get("job") or ("command" if asked.get("command") is not None else "trainer"))
    return TERMS.get(kind, COMMAND)
