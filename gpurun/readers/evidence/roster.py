"""Defines a class: its learners, and a challenge for each learner.

A challenge is random. A run with it therefore cannot be older than the challenge, and cannot be another learner's run.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from gpurun.core.errors import UsageError
from gpurun.core.paths import read_regular
from gpurun.core.records import Frozen
from gpurun.core.untrusted import plain_line

CLASS_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
OFFICIAL = "official"
MOST_STUDENTS = 10_000
_DIGEST = re.compile("[0-9a-f]{12,64}")
_MOST_BYTES = 4 << 20
# Without characters that are easily confused when they are read from a blackboard.
_ALPHABET = "23456789abcdefghjkmnpqrstuvwxyz"


class Student(Frozen):
    """A learner: the name as the teacher wrote it, and the challenge."""

    name: str
    challenge: str


class ClassTask(Frozen):
    """What a class must train. A card that differs has a problem; a field that is not set is not checked.

    `steps` is the number of steps that must be planned and trained. `data` is the sha256 of the shards in a receipt, or
    its beginning. `trainer` is "official", or the sha256 of a modified trainer, or its beginning.
    """

    recipe: str = ""
    steps: int = 0
    data: str = ""
    trainer: str = ""


class Roster(Frozen):
    """A class that `roster new` made at `made_wall`. A run that is older cannot belong to the class."""

    v: Literal[1] = 1
    name: str
    made_wall: float
    students: tuple[Student, ...]
    task: ClassTask = ClassTask()


def new_roster(name: str, students: Sequence[str], wall: float, task: ClassTask = ClassTask()) -> Roster:  # noqa: B008 - frozen
    """Return a class with a random challenge for each learner. Raise UsageError for an invalid name or task."""
    if not CLASS_NAME.fullmatch(name):
        what = f"{name!r} cannot be the name of a class."
        raise UsageError("roster.name", what, hint="Use letters, digits, dots and dashes, at most 40: ml-2026.")
    _check_task(task)
    drawn = [f"{name}-{''.join(secrets.choice(_ALPHABET) for _ in range(12))}" for _ in students]
    made = (Student(name=student, challenge=word) for student, word in zip(students, drawn, strict=True))
    return Roster(name=name, made_wall=wall, students=tuple(made), task=task)


def _check_task(task: ClassTask) -> None:
    if task.data and not _DIGEST.fullmatch(task.data):
        what = f"--data {task.data[:80]!r} is not the beginning of a sha256."
        hint = "Take it from the receipt of a run on this data: gpurun receipt RUN --json, digests.data."
        raise UsageError("roster.data", what, hint=hint)
    if task.trainer not in ("", OFFICIAL) and not _DIGEST.fullmatch(task.trainer):
        what = f"--trainer {task.trainer[:80]!r} is neither {OFFICIAL} nor the beginning of a sha256."
        raise UsageError("roster.trainer", what, hint="Take it from the receipt of a run: digests.trainer.")
    if task.steps < 0:
        raise UsageError("roster.steps", f"--steps {task.steps} is negative.", hint="Give a number of steps.")


def read_students(path: Path) -> list[str]:
    """Return the names in a file, one per line, without blank lines. Raise UsageError for none, or a repeated name."""
    try:
        text = read_regular(path, _MOST_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        what = f"--students {path} cannot be read: {why}."
        raise UsageError("roster.unreadable", what, hint="Write one name per line.") from None
    names = [plain_line(line.strip()) for line in text.splitlines() if line.strip()]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if not names or twice or len(names) > MOST_STUDENTS:
        what = f"{path} names {twice[0]} twice." if twice else f"{path} names {len(names)} learners."
        raise UsageError("roster.students", what, hint=f"Write 1 to {MOST_STUDENTS:,} names, each once, one per line.")
    return names


def read_roster(path: Path) -> Roster:
    """Read a class from its file. Raise UsageError if the file is not a roster."""
    try:
        return Roster.from_json(read_regular(path, _MOST_BYTES))
    except (OSError, ValidationError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a roster that this gpurun knows"
        what = f"--class {path} cannot be read: {why}."
        hint = "`gpurun roster new CLASS --students FILE` makes one."
        raise UsageError("roster.unreadable", what, hint=hint) from None
