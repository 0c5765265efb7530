"""What is known about a provider's machines from its name alone, for readers of a run's records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

AWS = "aws"
"""AWS's own S3: data that leaves it for another place is billed."""


@dataclass(frozen=True)
class PlaceFacts:
    """Facts about one provider's machines: the `kind` of place that they are in, and parts of sentences about them.

    `why_free` says why nothing is charged, `trust` which host key is accepted, `boot_hint` what to do about a machine
    that does not answer. `store` is the S3 whose traffic it does not bill.
    """

    kind: str = "cloud"
    why_free: str = "this machine is not rented"
    trust: str = "host key made here and installed before boot; no other is accepted"
    boot_hint: str = "Try again, or another region or provider."
    store: str = ""

    @property
    def is_here(self) -> bool:
        """Return whether it is this machine."""
        return self.kind == "here"

    @property
    def is_own_box(self) -> bool:
        """Return whether it is the user's own box, where others may work and where nothing is installed unasked."""
        return self.kind == "box"

    @property
    def is_queued(self) -> bool:
        """Return whether a scheduler starts and ends its jobs."""
        return self.kind == "cluster"

    @property
    def enters_image(self) -> bool:
        """Return whether an image is not the machine's system, but a container in which the user's command runs."""
        return self.kind == "cluster"

    @property
    def is_rented(self) -> bool:
        """Return whether a machine is rented for a run."""
        return self.kind == "cloud"


PLACES: dict[str, PlaceFacts] = {
    "local": PlaceFacts(kind="here"),
    "ssh": PlaceFacts(
        kind="box", why_free="no price was given", boot_hint="Try again, or log in by hand to see its error."
    ),
    "slurm": PlaceFacts(
        kind="cluster",
        why_free="not metered",
        trust="the login node's host key, from config.toml or as seen at first use",
        boot_hint="Check that login and compute nodes share the workdir in config.toml; scontrol show job has details.",
    ),
    "aws": PlaceFacts(store=AWS),
}
"""By the provider's name; a provider that is not here rents out machines, and nothing else is known about it."""


def place_facts(provider: str) -> PlaceFacts:
    """Return what is known about a provider's machines from its name."""
    return PLACES.get(provider, PlaceFacts())


def place_kinds(providers: Iterable[str]) -> set[str]:
    """Return the kinds of place that these providers belong to."""
    return {place_facts(name).kind for name in providers}
