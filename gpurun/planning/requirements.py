"""What a recipe needs on the machine beside torch 2.8 and numpy, and how a machine whose image lacks it comes to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpurun.core.run_plan import Choices
from gpurun.planning.catalog import terms_of
from gpurun.planning.recipe import RecipeTables

__all__ = ["HUGGINGFACE_PACKAGES", "images_by_provider", "least_torch_of", "outfitted", "setup_limit_s"]

LEAST_TORCH = "2.8"
"""The first torch that the trainer runs on."""
SETUP_LIMIT_S = 600
"""How long a script that sets the machine up may take where nobody says it."""
MUON_TORCH = "2.9"
"""The first torch that has Muon."""
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
    said: list[str] = []
    if recipe.train.loop == "huggingface":
        choices, words = _with_huggingface(provider, choices)
        said.append(words)
    if recipe.optim.kind == "muon":
        choices, words = _with_muon(provider, choices)
        said.append(words)
    return choices, tuple(said)


def setup_limit_s(recipe: RecipeTables, choices: Choices, *, is_rented: bool) -> int:
    """How long the script may take that runs on the machine before anything is sent; 0 where there is none."""
    runs = choices.setup or (is_rented and recipe.train.loop == "huggingface")
    return (choices.setup_limit_s or SETUP_LIMIT_S) if runs else 0


def least_torch_of(resolved: Mapping[str, Any]) -> str:
    """The first torch that can train the tables of a plan."""
    return MUON_TORCH if resolved.get("optim", {}).get("kind") == "muon" else LEAST_TORCH


def images_by_provider(recipe: RecipeTables, providers: Iterable[str], choices: Choices) -> dict[str, str] | None:
    """The image of each provider that needs another than its usual one for this recipe; None where there is none."""
    found = {name: outfitted(recipe, name, choices)[0].image for name in providers}
    return {name: image for name, image in found.items() if image != choices.image} or None


def _with_huggingface(provider: str, choices: Choices) -> tuple[Choices, str]:
    need = 'train.loop "huggingface" needs transformers and accelerate'
    if choices.setup:
        return choices, f"{need}: the script of --setup, or the image, must bring them."
    if provider == "ssh":
        return choices, f"{need}: the box must have them already, or get them from --setup."
    script = choices.model_copy(update={"setup": HUGGINGFACE_SETUP})
    return script, f"{need}, which the image has not: pip installs them there first, in a time of its own."


def _with_muon(provider: str, choices: Choices) -> tuple[Choices, str]:
    need, terms = f'optim.kind "muon" needs torch {MUON_TORCH} or newer', terms_of(provider)
    if choices.image or choices.setup or not terms.image_torch:
        whose = f"the image {choices.image}" if choices.image else "the machine"
        return choices, f"{need}; what {whose} has is seen there, before anything is sent."
    if _version(terms.image_torch) >= _version(MUON_TORCH):
        return choices, f"{need}; {provider}'s image has {terms.image_torch}."
    newer = choices.model_copy(update={"image": terms.newer_image})
    return newer, f"{need}, and {provider}'s usual image has {terms.image_torch}: {terms.newer_image} is booted."


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
