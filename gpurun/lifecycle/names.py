"""Names for new runs: one stands for one run for good, since the chain of receipts knows a run by its name."""

from __future__ import annotations

import secrets
from contextlib import suppress

from gpurun.core.paths import Home
from gpurun.ledger.chain import read_chain

_ANIMALS = (
    "ant", "bat", "bee", "boa", "cat", "cod", "cow", "crab", "crow", "deer", "dog", "dove", "duck", "eel", "elk",
    "emu", "fox", "frog", "goat", "gull", "hare", "hawk", "hen", "heron", "ibex", "jay", "kiwi", "koi", "lark",
    "lion", "lynx", "mink", "mole", "moth", "mule", "newt", "orca", "owl", "ox", "panda", "pig", "pony", "puma",
    "ram", "rat", "rook", "seal", "slug", "swan", "tick", "toad", "tuna", "vole", "wasp", "wolf", "wren", "yak",
)  # fmt: skip


def free_name(home: Home) -> str:
    """A short name that no run has or had: an animal and a number, which grows where many are taken."""
    numbers = 90
    while True:
        name = f"{secrets.choice(_ANIMALS)}-{secrets.randbelow(numbers) + 10}"
        if not home.run(name).path.exists() and not has_receipt(home, name):
            return name
        numbers += 10


def has_receipt(home: Home, name: str) -> bool:
    """Whether a run of this name has its place in the chain, with or without its folder."""
    with suppress(OSError):  # A chain that cannot be read is told of when it is written to.
        return read_chain(home.ledger).of(name) is not None
    return False
