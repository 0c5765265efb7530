"""The loop that train.py runs where `train.loop` is "huggingface"."""

from __future__ import annotations

import tempfile

from trainer.errors import Refused
from trainer.run import After, Run

__all__ = ["loop"]

LEAST_TRANSFORMERS = (5, 6)
"""Up to 5.5.0 the gradient of a step in portions is divided twice by their number; before 5.2 settings are missing."""


def loop(run: Run, after: After) -> str:
    """Take all steps, doing `after` after each; return why it ended: "done" or "signal".

    Refused where this loop cannot do what is asked.
    """
    _check(run)
    try:
        import accelerate  # noqa: F401  their Trainer asks for it late, in a sentence of its own
        import transformers

        _check_version(transformers.__version__)
        from trainer.huggingface.stock import train
    except ImportError as error:
        need = "which needs transformers and accelerate"
        raise Refused(f'train.loop is "huggingface", {need}: {error}; install them first') from error
    if run.progress.step == run.recipe.train.steps:
        return "done"
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        return train(run, folder, after)


def _check_version(version: str) -> None:
    """Refuse a library that would train otherwise than the recipe says."""
    if tuple(int(part) for part in version.split(".")[:2]) < LEAST_TRANSFORMERS:
        least = ".".join(map(str, LEAST_TRANSFORMERS))
        raise Refused(f'train.loop is "huggingface", which needs transformers {least} or newer; here is {version}')


def _check(run: Run) -> None:
    """Refuse what only the machine shows; the rest has been refused with the recipe."""
    if run.processes.several:
        told = f"here are {run.processes.count} processes"
        raise Refused(f'train.loop is "huggingface", which trains in one process; {told}')
    if run.device.precision == "fp16":
        told = f'train.precision "{run.recipe.train.precision}" is fp16 on {run.device.cuda_name or "a CPU"}'
        raise Refused(f'train.loop is "huggingface", which trains in fp32 or bf16 here; {told}')
