"""Chooses the name of a new run."""

from __future__ import annotations

import secrets

from gpurun.core.paths import Home
from gpurun.ledger.chain import has_receipt

_ANIMALS = (
    "ant", "bat", "bee", "boa", "cat", "cod", "cow", "crab", "crow", "deer", "dog", "dove", "duck", "eel", "elk",
    "emu", "fox", "frog", "goat", "gull", "hare", "hawk", "hen", "heron", "ibex", "jay", "kiwi", "koi", "lark",
    "lion", "lynx", "mink", "mole", "moth", "mule", "newt", "orca", "owl", "ox", "panda", "pig", "pony", "puma",
    "ram", "rat", "rook", "seal", "slug", "swan", "tick", "toad", "tuna", "vole", "wasp", "wolf", "wren", "yak",
)  # fmt: skip


def free_name(home: Home) -> str:
    """Return a name that no run of the home has or had: an animal and a number, which is larger if many are taken."""
    numbers = 90
    while True:
        name = f"{secrets.choice(_ANIMALS)}-{secrets.randbelow(numbers) + 10}"
        if not home.run(name).path.exists() and not has_receipt(home, name):
            return name
        numbers += 10
