"""Addresses in 127.0.0.0/8 that no other guest on this computer has, whichever test runs the guest."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

_choice = random.SystemRandom()


def take(address: str | None = None) -> tuple[str, socket.socket]:
    """Take an address; return it with its claim, which holds while any process has the claim open.

    The claim is a name in the kernel's abstract socket space, so that a crash leaves nothing to clean up. Raise OSError
    if the requested address is in use.
    """
    if address is not None:
        return address, _claim(address)
    while True:
        # Beyond the few low addresses that people configure by hand.
        address = ".".join(["127", *(str(_choice.randint(low, 254)) for low in (64, 0, 1))])
        with suppress(OSError):
            return address, _claim(address)


def _claim(address: str) -> socket.socket:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0gpurun-emulated-guest-{address}")
    except OSError:
        claim.close()
        raise
    return claim
