"""What is done with a task's documents, by any executor: written as shards, or signed to find duplicates.

A job goes to each process once, pickled. What it makes of a task lies on the disk afterwards, whole or not at all, and
is the same wherever it was made; so it may be done again, and elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.prepare.corpora.task import read_record, write_task
from trainer.prepare.corpora.workers import Tell
from trainer.prepare.dedupe.dropped import drop_filter, is_signed, sign_task
from trainer.prepare.dedupe.signatures import Dedupe
from trainer.prepare.shards import read_vocabulary
from trainer.prepare.texts import Text
from trainer.prepare.tokenizers import tokenizer_of

__all__ = ["Signer", "TaskWriter", "TextJob"]


class TextJob(Protocol):
    """Something that is done with the documents of every task."""

    def open(self) -> Callable[[int, Iterable[Text], Tell], Any]:
        """Load what every task needs, in the process that works or one that forks it; the function that does one."""
        ...

    def result(self, index: int) -> Any:
        """What lies on the disk of a task that was done, once its digests hold; None if it was not."""
        ...


@dataclass(frozen=True)
class TaskWriter:
    """Writes a task's shards, with the tokeniser whose vocabulary lies in the folder; its result is the record."""

    folder: Path
    tokenizer: str
    val_fraction: float
    identity: str = ""
    duplicates: Path | None = None
    """Where it is written which documents go."""

    def open(self) -> Callable[[int, Iterable[Text], Tell], dict[str, Any]]:
        """Load the tokeniser."""
        tokenizer = tokenizer_of(self.tokenizer, read_vocabulary(self.folder), threads=1)

        def write(index: int, texts: Iterable[Text], tell: Tell) -> dict[str, Any]:
            drop = drop_filter(self.duplicates, index) if self.duplicates else None
            how = {"val_fraction": self.val_fraction, "identity": self.identity}
            return write_task(texts, tokenizer, self.folder, index, **how, drop=drop, tell=tell)

        return write

    def result(self, index: int) -> dict[str, Any] | None:
        """The task's record."""
        return read_record(self.folder, index, self.identity)


@dataclass(frozen=True)
class Signer:
    """Writes the fingerprints of a task's documents; its result is True."""

    folder: Path
    dedupe: Dedupe
    identity: str

    def open(self) -> Callable[[int, Iterable[Text], Tell], bool]:
        """There is nothing to load."""

        def sign(index: int, texts: Iterable[Text], tell: Tell) -> bool:
            sign_task(texts, self.dedupe, self.folder, index, identity=self.identity, tell=tell)
            return True

        return sign

    def result(self, index: int) -> bool | None:
        """Whether the task is signed."""
        return is_signed(self.folder, index, self.dedupe, self.identity) or None
