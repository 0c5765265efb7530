"""What a box that is kept remembers of earlier runs: files of data by their digest, beside the run folders.

Only where the laptop asks for it. What is in the store is a link to the run's own file, so it takes no room twice; it
is found by its size, and believed only once its digest was found again.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress

from gpurun.machine.agent.files import at, lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List, Set

    from gpurun.machine.agent.protocol import Json

FOLDER = "store"
# Smaller files are sent again sooner than they are looked for.
LEAST_BYTES = 1 << 20
LOCK_S = 20


def store_of(root: str) -> str:
    """The store of the machine that a run's folder is on."""
    return at(os.path.dirname(root), FOLDER)


def stored(folder: str) -> List[str]:
    """The digests that a store has, those that were used longest ago first."""
    found = [name for name in os.listdir(folder) if re.fullmatch(r"[0-9a-f]{64}", name)]
    return sorted(found, key=lambda name: os.stat(at(folder, name)).st_mtime)


def take_out(root: str, sizes: Set[int], into: str) -> None:
    """Link what is as large as something that is to come into a folder, in which its digest will be taken."""
    folder = store_of(root)
    held = lock(folder, "store.lock", LOCK_S) if os.path.isdir(at(folder, "agent")) else None
    if held is None:
        return
    for name in stored(folder):
        path, place = at(folder, name), at(into, name)
        if os.path.getsize(path) in sizes and not os.path.lexists(place):
            os.makedirs(into, exist_ok=True)
            with suppress(FileNotFoundError):  # What a bucket has brought of it, verified, says nothing of this one.
                os.unlink(place + ".parts")
            os.link(path, place)
            os.utime(path)
    os.close(held)


def keep(root: str, entries: List[Json], most_bytes: int) -> None:
    """Keep the data of a pack that is in place, and let go of what was used longest ago.

    All of it together stays below `most_bytes`, and below half of what the disk could take without it.
    """
    folder = store_of(root)
    os.makedirs(at(folder, "agent"), mode=0o700, exist_ok=True)
    held = lock(folder, "store.lock", LOCK_S)
    if held is None:
        return
    try:
        link(root, folder, entries)
        make_room(folder, most_bytes)
    finally:
        os.close(held)  # Else the process that syncs would have it for as long as that takes.


def link(root: str, folder: str, entries: List[Json]) -> None:
    """Put the data of a pack into a store."""
    for entry in entries:
        path, place = at(root, entry["name"]), at(folder, entry["sha256"])
        if entry["name"].startswith("data/") and entry["bytes"] >= LEAST_BYTES:
            if os.path.lexists(place) and not os.path.samefile(path, place):
                os.unlink(place)  # The one that was just verified is the better one.
            if not os.path.lexists(place):
                os.link(path, place)
            os.chmod(place, 0o444)  # The run's own file with it: nobody is to write into what the next run may use.
            os.utime(place)


def make_room(folder: str, most_bytes: int) -> None:
    """Let go of what was used longest ago."""
    sizes = {name: os.path.getsize(at(folder, name)) for name in stored(folder)}
    total = sum(sizes.values())
    most_bytes = min(most_bytes, (shutil.disk_usage(folder).free + total) // 2)
    for name in sizes:
        if total > most_bytes:
            os.unlink(at(folder, name))
            total -= sizes[name]
