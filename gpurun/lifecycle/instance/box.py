"""Judging the box: whether it is what was rented, and whether the trainer can run there.

It is judged before anything is uploaded, as every minute on a wrong box is paid for.
"""

from __future__ import annotations

import re

from gpurun.core.errors import NoOffer, SetupError
from gpurun.core.model import Offer
from gpurun.machine.answers import Facts
from gpurun.planning.software import LEAST_TORCH

# A card's own figure is some percent under the one it is sold by.
LEAST_MEMORY = 0.9
_BETTER_IMAGE = "Choose an image with torch {} or newer and numpy: --image; on a box of your own, install them."
_ANOTHER = "Try again, or with another --region or --provider; of a box of your own, say what it has with --gpu."


def check_box(facts: Facts, offer: Offer, *, accept_cpu: bool, least_torch: str = LEAST_TORCH) -> tuple[str, ...]:
    """Warnings about a machine that will do.

    Raises SetupError where the image lacks what the trainer needs, NoOffer where the GPUs are not those of the offer.
    With `accept_cpu` a machine without a CUDA device will do.
    """
    warnings = _check_python(facts, least_torch)
    if not offer.gpu_count:
        return warnings
    if not facts.torch.devices and accept_cpu:
        return (*warnings, f"torch can use no CUDA device there ({_seen(facts)}): it trains on the CPU")
    _check_count(facts, offer)
    _check_kind(facts, offer)
    _check_health(facts)
    if facts.gpus and len(facts.gpus) != len(facts.torch.devices):
        warnings += (f"torch can use {len(facts.torch.devices)} GPUs there, but {_seen(facts)}",)
    return warnings


def _check_python(facts: Facts, least_torch: str) -> tuple[str, ...]:
    """Whether some Python there has a torch that is new enough, and numpy."""
    torch, better = facts.torch, _BETTER_IMAGE.format(least_torch)
    if not torch.found:
        raise SetupError("box.no_torch", "No Python on the instance imports torch.", hint=better)
    if torch.numpy is None:
        raise SetupError("box.no_numpy", f"{torch.python} on the instance has no numpy.", hint=better)
    version = re.match(r"(\d+)\.(\d+)", torch.version or "")
    if version is None:
        return (f"torch there calls itself {torch.version!r}: whether that is {least_torch} or newer is unknown",)
    if (int(version[1]), int(version[2])) < tuple(map(int, least_torch.split("."))):
        what = f"The instance has torch {torch.version}; the trainer needs {least_torch} or newer for this recipe."
        raise SetupError("box.old_torch", what, hint=better)
    return ()


def _check_count(facts: Facts, offer: Offer) -> None:
    """Whether torch can use as many devices as are paid for; where the driver has them, the image is to blame."""
    usable = len(facts.torch.devices)
    if usable >= offer.gpu_count:
        return
    if len(facts.gpus) >= offer.gpu_count:
        raise SetupError(
            "box.driver_mismatch",
            f"The instance has what was ordered ({offer.gpu_count} × {offer.gpu}), but torch {facts.torch.version} "
            f"there can use {usable} of that: {_seen(facts)}.",
            hint="That torch is made for no CUDA, or for another driver: choose another image (--image).",
        )
    code = "box.fewer_gpus" if usable else "box.no_gpu"
    what = f"{offer.label} was ordered; torch on the instance can use {usable} GPUs, and {_seen(facts)}."
    raise NoOffer(code, what, hint=f"{_ANOTHER} To train without a GPU: --accept-cpu.")


def _check_kind(facts: Facts, offer: Offer) -> None:
    """Whether every device is of the family that was ordered, with the memory that the plan counts on."""
    family = _family(offer.gpu)
    for device in facts.torch.devices:
        if family and not re.search(rf"(?<![0-9A-Z]){family}(?![0-9A-Z])", device.name.upper().replace("RTX", "RTX ")):
            raise NoOffer("box.other_gpu", f"{offer.label} was ordered; the instance has {device.name}.", hint=_ANOTHER)
        if device.memory_bytes < LEAST_MEMORY * offer.vram_gb * 1e9:
            raise NoOffer(
                "box.less_memory",
                f"{offer.vram_gb} GB a GPU were ordered; {device.name} there has {device.memory_bytes / 1e9:.1f} GB.",
                hint=_ANOTHER,
            )


def _check_health(facts: Facts) -> None:
    """Whether no card's memory has lost a bit since its driver was loaded."""
    for place, card in enumerate(facts.gpus):
        if card.ecc_errors:
            errors = f"{card.ecc_errors} uncorrected memory error{'s' if card.ecc_errors > 1 else ''}"
            raise NoOffer("box.ecc_errors", f"GPU {place} of the instance ({card.name}) has {errors}.", hint=_ANOTHER)


def _family(gpu: str) -> str:
    """The word that names the model: A100 of "A100 SXM", 4090 of "RTX 4090"; empty where there is none."""
    words = [word for word in gpu.upper().replace("RTX", "RTX ").split() if re.search(r"\d", word)]
    return re.escape(words[0]) if words else ""


def _seen(facts: Facts) -> str:
    """What the driver says, in words."""
    if not facts.gpus:
        return "nvidia-smi tells of no GPU"
    return f"nvidia-smi sees {len(facts.gpus)} (driver {facts.gpus[0].driver})"
