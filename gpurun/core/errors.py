"""Every error of gpurun, each with an exit code that a test freezes.

    GpurunError                 1   a bug in gpurun
    ├── UsageError              2   wrong input, or an answer was needed and input is off
    ├── Declined                3   declined at the prompt, nothing spent
    ├── SetupError              4   credentials, configuration, a missing extra
    ├── NoOffer                 5   no offer under the cap, no capacity
    ├── TrainingFailed          6   training failed; destroyed; receipt written
    ├── BudgetStop              7   stopped by cap or lease; the existing files were collected
    ├── MayBeBilling            9   an instance may still be billing; outranks every other code
    ├── VerificationFailed     10   an audit failed, or one of our digests does not match
    ├── CollectFailed          11   collected data failed its digest or could not be stored
    │   └── StoreFull          11   nothing can be stored here now; the instance is kept until its lease ends
    ├── RunHeld                12   another gpurun holds this run
    └── Interrupted           130   Ctrl-C before anything had begun

An error says what happened, why, and what to do next; nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from enum import IntEnum
from functools import partial
from typing import Any

__all__ = [
    "BudgetStop",
    "CollectFailed",
    "Declined",
    "ExitCode",
    "GpurunError",
    "Interrupted",
    "MayBeBilling",
    "NoOffer",
    "RunHeld",
    "SetupError",
    "StoreFull",
    "TrainingFailed",
    "UsageError",
    "VerificationFailed",
    "did_you_mean",
]


class ExitCode(IntEnum):
    """The exit codes that a script may rely on. Only 9 needs a test of its own: it outranks all others.

    INTERRUPTED and TERMINATED are for a run that a signal stopped early; a shell reports other commands the same way.
    """

    DONE = 0
    BUG = 1
    USAGE = 2
    DECLINED = 3
    SETUP = 4
    NO_OFFER = 5
    TRAINING_FAILED = 6
    BUDGET_STOP = 7
    PENDING = 8
    MAY_BE_BILLING = 9
    VERIFICATION_FAILED = 10
    COLLECT_FAILED = 11
    RUN_HELD = 12
    INTERRUPTED = 130
    TERMINATED = 143


def as_exit_code(number: int) -> ExitCode:
    """Return the exit code with this number; an unknown number, from a newer gpurun, becomes the general failure."""
    return ExitCode(number) if number in set(ExitCode) else ExitCode.BUG


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str, cutoff: float = 0.6) -> str:
    """Return a hint with the one or two known words nearest to a mistyped word, or `otherwise` if none is near.

    A known word that begins with the typed one is nearer than one that looks similar.
    """
    words = list(known)
    begin = word.lower().replace("-", "")
    begun = [other for other in words if begin and other.lower().replace("-", "").startswith(begin)]
    near = (begun or get_close_matches(word, words, n=1, cutoff=cutoff))[:2]
    return f"Did you mean {' or '.join(near)}?" if near else otherwise


class GpurunError(Exception):
    """An error for people: `what` happened (and why), a `hint` with what to do, and a stable dotted `code`."""

    exit_code: ExitCode = ExitCode.BUG

    def __init__(self, code: str, what: str, *, hint: str) -> None:
        if not hint:
            raise ValueError(f"error {code} has no hint")
        super().__init__(what)
        self.code = code
        self.what = what
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        """Let the error travel from a worker process to its parent."""
        return partial(type(self), hint=self.hint), (self.code, self.what)

    def as_record(self) -> dict[str, str]:
        """Return the error as the JSON envelope and the journal hold it."""
        return {"code": self.code, "message": self.what, "hint": self.hint}


class UsageError(GpurunError):
    """The request cannot be understood, or its parts do not fit together."""

    exit_code = ExitCode.USAGE


class Declined(GpurunError):
    """The user declined; nothing was spent."""

    exit_code = ExitCode.DECLINED


class SetupError(GpurunError):
    """Credentials, configuration or an installed extra are missing."""

    exit_code = ExitCode.SETUP


class NoOffer(GpurunError):
    """No offer fits the recipe and the cap."""

    exit_code = ExitCode.NO_OFFER


class TrainingFailed(GpurunError):
    """Training failed; the instance is destroyed anyway."""

    exit_code = ExitCode.TRAINING_FAILED


class BudgetStop(GpurunError):
    """The cap or the lease ended the run, as promised."""

    exit_code = ExitCode.BUDGET_STOP


class MayBeBilling(GpurunError):
    """An instance is not proven gone."""

    exit_code = ExitCode.MAY_BE_BILLING


class VerificationFailed(GpurunError):
    """A signature, a chain, a figure or a digest does not hold."""

    exit_code = ExitCode.VERIFICATION_FAILED


class CollectFailed(GpurunError):
    """A file that came home differs from what the instance announced, or could not be stored."""

    exit_code = ExitCode.COLLECT_FAILED


class StoreFull(CollectFailed):
    """This machine's disk is full or missing; the files elsewhere wait there until that changes or the lease ends."""


class RunHeld(GpurunError):
    """Another gpurun process holds this run."""

    exit_code = ExitCode.RUN_HELD


class Interrupted(GpurunError):
    """Ctrl-C, before a run had begun that could handle it."""

    exit_code = ExitCode.INTERRUPTED


def clauses(sentences: Iterable[object]) -> str:
    """Join several sentences into one as clauses, without their full stops and without repeats."""
    return "; ".join(dict.fromkeys(str(sentence).rstrip(".") for sentence in sentences))
