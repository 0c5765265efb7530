"""What is known of a provider's machines by its name alone: for whoever reads a record of a run, and asks nobody."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

AWS = "aws"
"""The store that AWS itself keeps: what leaves it for elsewhere is billed."""


@dataclass(frozen=True)
class PlaceFacts:
    """One provider's machines: the `kind` of place that they are in, and what a sentence about them says.

    `why_free` is said where nothing is charged, `trust` which host key is believed, `boot_hint` what to do about one
    that does not answer. `store` is the S3 whose traffic it does not bill.
    """

    kind: str = "cloud"
    why_free: str = "this machine is not rented"
    trust: str = "host key made here, there before boot, the only one accepted"
    boot_hint: str = "Try again, or another region or provider."
    store: str = ""

    @property
    def is_here(self) -> bool:
        """Whether it is this machine."""
        return self.kind == "here"

    @property
    def is_own_box(self) -> bool:
        """Whether it is a box of the user's, on which others may work and nothing is put unasked."""
        return self.kind == "box"

    @property
    def is_queued(self) -> bool:
        """Whether a scheduler starts and ends what runs there."""
        return self.kind == "cluster"

    @property
    def enters_image(self) -> bool:
        """Whether an image is no system of the machine, but what a job's own words are run in."""
        return self.kind == "cluster"

    @property
    def is_rented(self) -> bool:
        """Whether a machine is rented for a run."""
        return self.kind == "cloud"


PLACES: dict[str, PlaceFacts] = {
    "local": PlaceFacts(kind="here"),
    "ssh": PlaceFacts(
        kind="box", why_free="no price was given", boot_hint="Try again; log in by hand to see what it says."
    ),
    "slurm": PlaceFacts(
        kind="cluster",
        why_free="not metered",
        trust="the login node's host key, as in config.toml or as it was seen first",
        boot_hint="Is the workdir of its table one that login and compute nodes share? scontrol show job says more.",
    ),
    "aws": PlaceFacts(store=AWS),
}
"""By the provider's name; one that is not here rents out machines, and nothing else is known of it."""


def place_facts(provider: str) -> PlaceFacts:
    """Return what is known of a provider's machines by its name."""
    return PLACES.get(provider, PlaceFacts())


def place_kinds(providers: Iterable[str]) -> set[str]:
    """Return the kinds of place that these providers stand for."""
    return {place_facts(name).kind for name in providers}
