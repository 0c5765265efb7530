"""What a kind of job calls its things, and which of them it has: the one place where a view asks what ran."""

from __future__ import annotations

from dataclasses import dataclass


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
