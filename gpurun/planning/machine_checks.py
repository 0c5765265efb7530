"""Whether a machine has what a job needs, by its own words: before anything is uploaded, and a box before its plan."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpurun.core.errors import NoOffer, SetupError
from gpurun.core.places import place_facts
from gpurun.core.records import Offer
from gpurun.jobs.requirements import LEAST_TORCH
from gpurun.planning.card_checks import check_cards, elsewhere, seen
from gpurun.remote.client import LOOK_S
from gpurun.remote.machine_facts import Facts, Gpu
from gpurun.view.number_format import format_bytes

LEAST_SHM_BYTES = 1 << 30
"""What the workers of a DataLoader may need to hand over batches; Docker's own is 64 MB."""


def check_box(facts: Facts, offer: Offer, *, accept_cpu: bool, needs_torch: bool = True) -> tuple[str, ...]:
    """Warnings about a machine that will do.

    Raises SetupError where the image lacks what the trainer needs, NoOffer where the GPUs are not those of the offer.
    With `accept_cpu` a machine without a CUDA device will do. What a command needs beside its cards is its own affair:
    where nothing there has torch, the driver is asked for them.
    """
    warnings = () if needs_torch else _command_warnings(facts, offer)
    if not needs_torch and not facts.torch.found:
        cards = tuple(Gpu(name=card.name, memory_bytes=card.memory_bytes or 0, uuid=card.uuid) for card in facts.gpus)
        facts = facts.model_copy(update={"torch": facts.torch.model_copy(update={"devices": cards})})
    better = f"Choose an image with torch {LEAST_TORCH} or newer and numpy: --image."
    if place_facts(offer.provider).is_own_box:
        better = (
            f"Install torch {LEAST_TORCH} or newer and numpy there, or name the Python that has them: --python PATH."
        )
    warnings += _check_python(facts, offer, better) if needs_torch else ()
    if not offer.gpu_count:
        return warnings
    if not facts.torch.devices and accept_cpu:
        return (*warnings, f"torch can use no CUDA device there ({seen(facts)}): it trains on the CPU")
    return (*warnings, *check_cards(facts, offer))


def _command_warnings(facts: Facts, offer: Offer) -> tuple[str, ...]:
    """Return what a command should know of a machine that the bundled trainer does not need."""
    warnings: tuple[str, ...] = ()
    silent = [look.python for look in facts.torch.looks if not look.answered]
    if silent and not facts.torch.found:
        warnings += (f"{_silence(silent)}: whether it has torch is not known",)
    if offer.gpu_count and facts.shm_bytes is not None and facts.shm_bytes < LEAST_SHM_BYTES:
        size = format_bytes(facts.shm_bytes)
        warnings += (
            f"/dev/shm has {size} there: a DataLoader with workers may end with a bus error. Use num_workers=0, or "
            "give the container more (docker run --shm-size=8g, --ipc=host)",
        )
    return warnings


def _silence(pythons: Sequence[str]) -> str:
    """That Pythons did not answer in time."""
    return f"{', '.join(pythons)} did not answer within {LOOK_S} s while it imported torch"


def _check_python(facts: Facts, offer: Offer, hint: str) -> tuple[str, ...]:
    """Whether some Python there has a torch that is new enough, and numpy."""
    torch = facts.torch
    silent = [look.python for look in torch.looks if not look.answered]
    words = "".join(f" {look.python}: {look.words}." for look in torch.looks if look.answered and look.words)
    if not torch.found and silent:
        slow = "Its disk is slow, or a card hangs: import torch there by hand, name another Python (--python PATH)"
        what = f"{_silence(silent)}; no other Python of the instance has torch.{words}"
        raise NoOffer("box.torch_silent", what, hint=elsewhere(offer, slow))
    if not torch.found:
        raise SetupError("box.no_torch", f"No Python on the instance imports torch.{words}", hint=hint)
    if torch.numpy is None:
        raise SetupError("box.no_numpy", f"{torch.python} on the instance has no numpy.", hint=hint)
    version = re.match(r"(\d+)\.(\d+)", torch.version or "")
    if version is None:
        return (f"torch there calls itself {torch.version!r}: whether that is {LEAST_TORCH} or newer is unknown",)
    if (int(version[1]), int(version[2])) < tuple(map(int, LEAST_TORCH.split("."))):
        what = f"The instance has torch {torch.version}; the trainer needs {LEAST_TORCH} or newer."
        raise SetupError("box.old_torch", what, hint=hint)
    return ()
