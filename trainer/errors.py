"""The errors that end training, each with its exit code and its reason in the `stop` event.

TrainerError        1  "error"          the trainer could not continue
├── Refused         2  "error"          recipe, data or checkpoint are not valid
├── NonFinite       3  "nonfinite"      the loss or the gradient is NaN or infinite
├── OutOfMemory     4  "out_of_memory"  not even the smallest micro-batch fits on the GPU
├── Spiked          5  "spike"          loss or gradient jumped, and the recipe stops then; earlier steps are saved
├── Restart         6  (no stop)        memory ran out in one of several; trainer/launch.py starts them all again
└── SaveFailed      1  "error"          a checkpoint could not be written; earlier ones are intact
"""

from __future__ import annotations

from typing import ClassVar

__all__ = ["NonFinite", "OutOfMemory", "Refused", "Restart", "SaveFailed", "Spiked", "TrainerError"]


class TrainerError(Exception):
    """An error whose text is one sentence for a person."""

    exit_code: ClassVar[int] = 1
    reason: ClassVar[str] = "error"


class Refused(TrainerError):
    """Raised if the recipe, data or checkpoint is not valid; nothing was changed.

    `code` and `hint` are for gpurun, which shows the error on the local computer: the kind of error, and what to do.
    """

    exit_code = 2

    def __init__(self, sentence: str, *, code: str = "data.refused", hint: str = "") -> None:
        super().__init__(sentence)
        self.code, self.hint = code, hint


class NonFinite(TrainerError):
    """Raised if training diverged; the optimiser did not step."""

    exit_code = 3
    reason = "nonfinite"


class OutOfMemory(TrainerError):
    """Raised if the GPU's memory ran out."""

    exit_code = 4
    reason = "out_of_memory"


class Spiked(TrainerError):
    """Raised if the loss or the gradient norm jumped; the optimiser did not step."""

    exit_code = 5
    reason = "spike"


class Restart(TrainerError):
    """Raised if a GPU's memory ran out while other processes wait for it.

    All processes end without a `stop` event, and restart with smaller micro-batches.
    """

    exit_code = 6


class SaveFailed(TrainerError):
    """Raised if the checkpoint of this step could not be written; earlier checkpoints are intact."""
