"""What a recipe needs on the machine beside torch 2.8 and numpy, and how a machine whose image lacks it comes to it."""

from __future__ import annotations

from gpurun.core.run_plan import Choices
from gpurun.planning.recipe import RecipeTables

__all__ = ["HUGGINGFACE_PACKAGES", "LEAST_TORCH", "outfitted", "setup_limit_s"]

LEAST_TORCH = "2.8"
"""The first torch that the trainer runs on."""
SETUP_LIMIT_S = 600
"""How long a script that sets the machine up may take where nobody says it."""
HUGGINGFACE_PACKAGES = ("accelerate", "transformers")
HUGGINGFACE_SETUP = """\
# The Hugging Face Trainer, for the Python that has torch; torch itself stays as it is.
for python in /opt/pytorch/bin/python python3; do
    if "$python" -c 'import torch' 2>/dev/null; then
        export PIP_BREAK_SYSTEM_PACKAGES=1
        exec "$python" -m pip install -q --no-input 'accelerate>=1.1,<2' 'transformers>=5.6,<6'
    fi
done
echo 'no Python here imports torch' >&2
exit 1
"""


def outfitted(recipe: RecipeTables, provider: str, choices: Choices) -> tuple[Choices, tuple[str, ...]]:
    """The choices with which a provider's machine has what the recipe needs, and what should be said about that.

    What the user chose stands: an image or a script of the user's own is only told what it must bring. No image that a
    provider boots by itself is known to have the Hugging Face libraries. Nothing is put on a box of the user's unasked.
    """
    if recipe.train.loop != "huggingface":
        return choices, ()
    choices, words = _with_huggingface(provider, choices)
    return choices, (words,)


def setup_limit_s(recipe: RecipeTables, choices: Choices, *, is_rented: bool) -> int:
    """How long the script may take that runs on the machine before anything is sent; 0 where there is none."""
    runs = choices.setup or (is_rented and recipe.train.loop == "huggingface")
    return (choices.setup_limit_s or SETUP_LIMIT_S) if runs else 0


def _with_huggingface(provider: str, choices: Choices) -> tuple[Choices, str]:
    need = 'train.loop "huggingface" needs transformers and accelerate'
    if choices.setup:
        return choices, f"{need}: the script of --setup, or the image, must bring them."
    if provider == "ssh":
        return choices, f"{need}: the box must have them already, or get them from --setup."
    script = choices.model_copy(update={"setup": HUGGINGFACE_SETUP})
    return script, f"{need}, which the image has not: pip installs them there first, in a time of its own."
