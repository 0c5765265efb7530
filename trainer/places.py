"""Where the ideas of a training stand in the code that runs: for a person who learns from it, a line of the log."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.checkpoint import CheckpointStore
from trainer.loss import chunked_cross_entropy
from trainer.model import GPT
from trainer.sample import generate
from trainer.translation.decode import beam_search
from trainer.translation.model import Attention, Translator

__all__ = ["places"]

_ROOT = Path(__file__).parents[1]


def places(model: GPT | Translator) -> str:
    """Return file and line of embedding, attention, loss, checkpoint and generation, as this model has them."""
    translates = isinstance(model, Translator)
    ideas: dict[str, Callable[..., Any]] = {
        "embedding": Translator._embed if translates else GPT.hidden,
        "attention": Attention.forward if translates else type(model.blocks[0].get_submodule("attn")).forward,
        "loss": chunked_cross_entropy,
        "checkpoint": CheckpointStore.save,
        "generation": beam_search if translates else generate,
    }
    return " | ".join(f"{idea} {_place(code)}" for idea, code in ideas.items())


def _place(code: Callable[..., Any]) -> str:
    """Return the file below the bundle and the line at which a function begins, decorators too."""
    found = inspect.unwrap(code).__code__
    return f"{found.co_filename.removeprefix(f'{_ROOT}/')}:{found.co_firstlineno}"
