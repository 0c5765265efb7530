"""Check before the upload that a machine's GPUs are the ordered ones, work, and are free.

Every message quotes what the machine reported. For a fault of the machine itself, the hint names another machine, never
an installation.
"""

from __future__ import annotations

import re

from gpurun.core.errors import NoOffer, SetupError
from gpurun.core.places import place_facts
from gpurun.core.records import Offer
from gpurun.remote.machine_facts import CardFacts, Gpu, MachineFacts
from gpurun.view.number_format import format_bytes

# A GPU reports a few percent less than its nominal memory.
LEAST_MEMORY = 0.9
LEAST_FREE, USUALLY_FREE = 0.5, 0.9
"""The share of a GPU's memory that must be free, and the share below which a warning is given."""

# Messages of torch and nvidia-smi on a faulty machine, and what to do on the user's own box.
_FAULTS = {
    r"error 802|system not yet initialized": "Start the fabric manager there (systemctl start nvidia-fabricmanager)",
    r"off the bus|gpu is lost|unable to determine the device handle|\bxid\b|unspecified launch failure|uncorrectable": (
        "Restart the box; a card that disappears again is broken"
    ),
    r"driver/library version mismatch": "Restart the box: its driver was updated while it ran",
    r"busy or unavailable": "Check there with nvidia-smi which process holds the card, or whether it allows only one",
    r"did not answer within": "Restart the box: its driver or a card hangs",
}
_NO_KERNEL = re.compile(r"no kernel image is available", re.IGNORECASE)
# For each GPU capability, the oldest CUDA version for which torch must be built to have kernels for the GPU.
_LEAST_CUDA = {(12, 1): "13.0", (12, 0): "12.8", (11, 0): "13.0", (10, 3): "12.9", (10, 0): "12.8", (0, 0): "11.8"}
_OLD, _LAST_CUDA_OF_OLD = (7, 5), "12.6"


def check_cards(facts: MachineFacts, offer: Offer) -> tuple[str, ...]:
    """Return warnings about GPUs that can be used.

    Raise NoOffer for a fault that another machine may not have, and SetupError for a torch that does not support the
    GPU.
    """
    _check_count(facts, offer)
    _check_work(facts, offer)
    check_kind(facts, offer)
    _check_health(facts, offer)
    warnings = _check_room(facts, offer)
    if facts.gpus and len(facts.gpus) != len(facts.torch.devices):
        warnings += (f"torch can use {len(facts.torch.devices)} GPUs there, but {visible_gpus(facts)}",)
    return warnings


def other_machine_hint(offer: Offer) -> str:
    """Return the hint for a machine that is not what was ordered."""
    if place_facts(offer.provider).is_own_box:
        return "State with --gpu what your box has."
    return "Try again, or with another --region or --provider."


def _check_count(facts: MachineFacts, offer: Offer) -> None:
    """Raise an error unless torch can use as many devices as are paid for.

    It is SetupError if the driver shows enough GPUs, because then the image is at fault; otherwise NoOffer.
    """
    usable, torch = len(facts.torch.devices), facts.torch
    if usable >= offer.gpus_per_node:
        return
    lacks = f"{offer.label} was ordered; torch on the instance can use {usable} GPUs, and {visible_gpus(facts)}"
    words = f"{lacks}.{_quoted_messages(facts)}"
    _raise_if_faulty(f"{torch.error or ''} {facts.driver_words or ''}", words, offer)
    in_parts = [index for index, card in enumerate(facts.gpus) if card.mig]
    if in_parts:
        what = f"MIG is switched on for GPU {', '.join(map(str, in_parts))}, which has no instance that torch can use."
        cure = "Switch it off there (nvidia-smi -mig 0), or make instances (nvidia-smi mig -cgi)"
        raise NoOffer("box.mig", f"{what} {words}", hint=fault_hint(offer, cure))
    if torch.found and len(facts.gpus) >= offer.gpus_per_node:
        where = "install another" if place_facts(offer.provider).is_own_box else "choose another image (--image)"
        made = f"built for CUDA {torch.built_for}, for which this driver may be too old"
        cause = f"That torch is {made if torch.built_for else 'built without CUDA, or for another driver'}"
        raise SetupError(
            "box.driver_mismatch",
            f"The instance has what was ordered ({offer.gpus_per_node} × {offer.gpu}), but torch {torch.version} "
            f"there can use only {usable} of them: {visible_gpus(facts)}.{_quoted_messages(facts)}",
            hint=f"{cause}: {where}.",
        )
    code = "box.fewer_gpus" if usable else "box.no_gpu"
    raise NoOffer(code, words, hint=f"{other_machine_hint(offer)} To train without a GPU: --accept-cpu.")


def check_kind(facts: MachineFacts, offer: Offer) -> None:
    """Raise NoOffer unless every device has the ordered model and the memory that the plan needs."""
    model = _model_name(offer.gpu)
    for device in facts.torch.devices:
        if model and not re.search(rf"(?<![0-9A-Z]){model}(?![0-9A-Z])", device.name.upper().replace("RTX", "RTX ")):
            raise NoOffer(
                "box.other_gpu",
                f"{offer.label} was ordered; the instance has {device.name}.",
                hint=other_machine_hint(offer),
            )
        if device.memory_bytes < LEAST_MEMORY * offer.vram_gb * 1e9:
            raise NoOffer(
                "box.less_memory",
                f"{offer.vram_gb} GB a GPU were ordered; {device.name} there has {device.memory_bytes / 1e9:.1f} GB.",
                hint=other_machine_hint(offer),
            )


def _check_health(facts: MachineFacts, offer: Offer) -> None:
    """Raise NoOffer if a GPU has had an uncorrected memory error since its driver was loaded."""
    for index, card in enumerate(facts.gpus):
        if card.ecc_errors:
            errors = f"{card.ecc_errors} uncorrected memory error{'s' if card.ecc_errors > 1 else ''}"
            raise NoOffer(
                "box.ecc_errors",
                f"GPU {index} of the instance ({card.name}) has {errors}.",
                hint=other_machine_hint(offer),
            )


def _check_work(facts: MachineFacts, offer: Offer) -> None:
    """Raise an error unless a small kernel ran on every GPU and computed the right result."""
    torch = facts.torch
    for index, device in enumerate(torch.devices):
        if device.error is None:
            continue
        if _NO_KERNEL.search(device.error):
            arch = f"sm_{(device.capability or '?').replace('.', '')}"
            for_cuda = f" for CUDA {torch.built_for}" if torch.built_for else ""
            has = f" (it has them for {', '.join(torch.archs)})" if torch.archs else ""
            what = f"torch {torch.version} there is made{for_cuda} and has no kernels for {device.name}, {arch}{has}"
            raise SetupError("box.no_kernels", f"{what}: {device.error}", hint=_torch_hint(device, offer))
        what = f"A small matrix product on GPU {index} of the instance ({device.name}) failed: {device.error}"
        _raise_if_faulty(device.error, what, offer)
        raise NoOffer("box.gpu_fails", what, hint=fault_hint(offer, "Make sure that the card works there"))


def _check_room(facts: MachineFacts, offer: Offer) -> tuple[str, ...]:
    """Return warnings about GPU memory that other processes use.

    Raise NoOffer if they use more than half of it.
    """
    warnings: tuple[str, ...] = ()
    for index, device in enumerate(facts.torch.devices[: offer.gpus_per_node]):
        card = _find_card(device, index, facts)
        free_bytes = device.free_bytes
        if free_bytes is None and card is not None and card.used_bytes is not None:
            free_bytes = max(0, device.memory_bytes - card.used_bytes)
        if free_bytes is None or free_bytes >= USUALLY_FREE * device.memory_bytes:
            continue
        held = f"{format_bytes(device.memory_bytes - free_bytes)} of {format_bytes(device.memory_bytes)}"
        who = ", ".join(card.holders) if card is not None else ""
        by = f"by {who}" if who else "by processes that nvidia-smi does not name"
        what = f"{held} on GPU {index} of the instance ({device.name}) are held {by}"
        if free_bytes < LEAST_FREE * device.memory_bytes:
            raise NoOffer("box.gpu_held", f"{what}.", hint=fault_hint(offer, "End that there, or use other cards"))
        warnings += (what,)
    return warnings


def _find_card(device: Gpu, index: int, facts: MachineFacts) -> CardFacts | None:
    """Return nvidia-smi's record of a torch device: by its UUID, or by its index if the counts agree."""
    uuid = device.uuid.removeprefix("GPU-")
    same = [card for card in facts.gpus if uuid and card.uuid.removeprefix("GPU-") == uuid]
    if same or len(facts.gpus) != len(facts.torch.devices):
        return same[0] if same else None
    return facts.gpus[index]


def _torch_hint(device: Gpu, offer: Offer) -> str:
    """Return the hint that names a torch build with kernels for a GPU."""
    version = re.fullmatch(r"(\d{1,2})\.(\d)", device.capability or "")
    capability = (int(version[1]), int(version[2])) if version else (99, 0)
    if capability < _OLD:
        cuda, made = _LAST_CUDA_OF_OLD, f"CUDA {_LAST_CUDA_OF_OLD} or older"
    else:
        cuda = next(least for card, least in _LEAST_CUDA.items() if capability >= card)
        made = f"CUDA {cuda} or newer"
    install = f"pip install torch --index-url https://download.pytorch.org/whl/cu{cuda.replace('.', '')}"
    if place_facts(offer.provider).is_own_box:
        return f"A torch that is made for {made} runs on it. Install one there: {install}"
    return f"A torch that is made for {made} runs on it: choose such an image (--image), or --setup with: {install}"


def _raise_if_faulty(words: str, what: str, offer: Offer) -> None:
    """Raise NoOffer if the words match a known message of a faulty machine, because another machine may work."""
    for pattern, cure in _FAULTS.items():
        if re.search(pattern, words, re.IGNORECASE):
            raise NoOffer("box.gpu_ill", what, hint=fault_hint(offer, cure))


def fault_hint(offer: Offer, cure: str) -> str:
    """Return the hint for a fault that another machine may not have. `cure` is what to do on the user's own box."""
    if place_facts(offer.provider).is_own_box:
        return f"{cure}, or take another box."
    return "Another machine may work: try another offer (again, or with another --region or --provider)."


def _quoted_messages(facts: MachineFacts) -> str:
    """Return sentences that quote the messages of torch and the driver."""
    words = [f"torch says: {facts.torch.error.rstrip('.')}."] if facts.torch.error else []
    words += [f"nvidia-smi says: {facts.driver_words.rstrip('.')}."] if facts.driver_words else []
    return "".join(f" {sentence}" for sentence in words)


def _model_name(gpu: str) -> str:
    """Return the model in a GPU's name as a pattern: A100 for "A100 SXM", 4090 for "RTX 4090"; "" if there is none."""
    words = [word for word in gpu.upper().replace("RTX", "RTX ").split() if re.search(r"\d", word)]
    return re.escape(words[0]) if words else ""


def visible_gpus(facts: MachineFacts) -> str:
    """Return a clause about the GPUs that the driver shows."""
    if not facts.gpus:
        return "nvidia-smi shows no GPU"
    return f"nvidia-smi sees {len(facts.gpus)} (driver {facts.gpus[0].driver})"
