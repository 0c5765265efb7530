"""Facts about a provider's machines that follow from its name alone, for readers of a run's records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

AWS = "aws"
"""The name of AWS's own S3: AWS bills data that it sends to machines of other providers."""


@dataclass(frozen=True)
class PlaceFacts:
    """Facts about one provider's machines: the `kind` of place, and phrases for sentences about the machines.

    `why_free` says why nothing is charged, `trust` which host key is accepted, `boot_hint` what to do about a machine
    that does not answer. `store` is the S3 service to and from which the provider bills no traffic; "" if none.
    """

    kind: str = "cloud"
    why_free: str = "this machine is not rented"
    trust: str = "host key made here and installed before boot; no other is accepted"
    boot_hint: str = "Try again, or another region or provider."
    store: str = ""

    @property
    def is_here(self) -> bool:
        """Return whether the machine is this computer."""
        return self.kind == "here"

    @property
    def is_own_box(self) -> bool:
        """Return whether it is the user's own box: others may use it too, and installing needs the user's request."""
        return self.kind == "box"

    @property
    def is_queued(self) -> bool:
        """Return whether its machines are jobs, which a scheduler starts and ends."""
        return self.kind == "cluster"

    @property
    def enters_image(self) -> bool:
        """Return whether an image is a container for the user's command, and not the system of the machine."""
        return self.kind == "cluster"

    @property
    def is_rented(self) -> bool:
        """Return whether its machines are rented, one for each run."""
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
"""The facts by the provider's name; a provider that is missing here is a cloud that rents out machines."""


def place_facts(provider: str) -> PlaceFacts:
    """Return the facts about the machines of the provider with this name."""
    return PLACES.get(provider, PlaceFacts())


def place_kinds(providers: Iterable[str]) -> set[str]:
    """Return the kinds of place that these providers belong to."""
    return {place_facts(name).kind for name in providers}
