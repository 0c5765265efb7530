"""The ways in which training ends badly, each with the exit code and the `stop` reason that tell it.

TrainerError        1  "error"          the trainer could not go on
├── Refused         2  "error"          recipe, data or checkpoint are not what they should be
├── NonFinite       3  "nonfinite"      the loss or the gradient is NaN or infinite
├── OutOfMemory     4  "out_of_memory"  not even the smallest micro-batch fits on the card
├── Spiked          5  "spike"          loss or gradient jumped, and the recipe stops then; what was before is saved
├── Restart         6  (no end)         memory ran out in one of several; trainer/launch.py starts them all again
└── SaveFailed      1  "error"          a checkpoint could not be written; those before it are intact
"""

from __future__ import annotations

from typing import ClassVar

__all__ = ["NonFinite", "OutOfMemory", "Refused", "Restart", "SaveFailed", "Spiked", "TrainerError"]


class TrainerError(Exception):
    """An error whose text is one sentence for a person."""

    exit_code: ClassVar[int] = 1
    reason: ClassVar[str] = "error"


class Refused(TrainerError):
    """What was handed in cannot be trained on; nothing was changed.

    `code` and `hint` are for who shows it at home: what kind it is, and what to do.
    """

    exit_code = 2

    def __init__(self, sentence: str, *, code: str = "data.refused", hint: str = "") -> None:
        super().__init__(sentence)
        self.code, self.hint = code, hint


class NonFinite(TrainerError):
    """Training diverged; the optimiser did not move."""

    exit_code = 3
    reason = "nonfinite"


class OutOfMemory(TrainerError):
    """The card's memory ran out."""

    exit_code = 4
    reason = "out_of_memory"


class Spiked(TrainerError):
    """The loss or the gradient norm jumped; the optimiser did not move."""

    exit_code = 5
    reason = "spike"


class Restart(TrainerError):
    """The card's memory ran out where others wait: all processes end, and train on in smaller portions; no `stop`."""

    exit_code = 6


class SaveFailed(TrainerError):
    """The checkpoint of this step does not exist; earlier ones do."""
