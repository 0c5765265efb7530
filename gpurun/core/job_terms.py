"""The words with which views describe each kind of job, and what belongs to it. No view tests the kind itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JobTerms:
    """The words for one kind of job.

    `verb` is the gpurun verb that starts the job, and `label` the title of what was requested. `worker` is the program
    that does the `work`, `doing` the word for this work while it runs, `files` the word for the downloaded files.
    `whole` are the kinds of file that make up a checkpoint. `has_model` means that gpurun knows the job's recipe: then
    there are parameters, tokens and an estimate, the job's own events divide its time, and a checkpoint has a loss.
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
"""The words by kind of job. The definition of a subclass of `Job` adds the words of its kind."""


def terms_in(stated: Mapping[str, Any]) -> JobTerms:
    """Return the words for the job of a receipt's predicate, or of the data of a `run.opened` record.

    An unknown kind of job gets the words of a command.
    """
    request = stated.get("asked", stated)
    kind = str(request.get("job") or ("command" if request.get("command") is not None else "trainer"))
    return TERMS.get(kind, COMMAND)
