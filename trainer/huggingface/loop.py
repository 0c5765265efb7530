"""Takes the steps for train.py if `train.loop` is "huggingface"."""

from __future__ import annotations

import tempfile
from collections.abc import Generator

from trainer.errors import Refused
from trainer.run import RunIO, Setup, State, StepResult

__all__ = ["steps"]

LEAST_TRANSFORMERS = (5, 6)
"""Until 5.5.0, the gradient of a step in portions is divided twice by their number; 5.1 lacks settings."""


def steps(setup: Setup, state: State, io: RunIO) -> Generator[StepResult, None, None]:
    """Take a step whenever the next one is requested, until all are taken.

    Refused if this loop does not support the settings.
    """
    _check(setup)
    try:
        import accelerate  # noqa: F401  otherwise their Trainer requires it later, with its own message
        import transformers

        if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < LEAST_TRANSFORMERS:
            least = f"transformers {'.'.join(map(str, LEAST_TRANSFORMERS))} or newer"
            raise Refused(f'train.loop is "huggingface", which needs {least}; installed is {transformers.__version__}')
        from trainer.huggingface.stock import stock_steps
    except ImportError as error:
        need = "which needs transformers and accelerate"
        raise Refused(f'train.loop is "huggingface", {need}: {error}; install them first') from error
    if state.step < setup.recipe.train.steps:
        with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
            yield from stock_steps(setup, state, io, folder)


def _check(setup: Setup) -> None:
    """Refuse what only this machine shows: several processes, or fp16. Other settings were refused with the recipe."""
    if setup.processes.several:
        here = f"this run has {setup.processes.count} processes"
        raise Refused(f'train.loop is "huggingface", which trains in one process; {here}')
    if setup.device.precision == "fp16":
        fp16 = f'train.precision "{setup.recipe.train.precision}" is fp16 on {setup.device.cuda_name or "a CPU"}'
        raise Refused(f'train.loop is "huggingface", which trains in fp32 or bf16 here; {fp16}')
