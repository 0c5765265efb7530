"""The chain of receipts: `ledger.jsonl` has one line for each receipt, which names the receipt before it.

    {"prev": SHA256, "receipt_sha256": SHA256, "run": "fox-41", "seq": 17}

Apart from the receipt's own digest, a line contains nothing that is not in the receipt, too. The chain shows which
receipts exist, so a missing one is noticed. A process that appends a line holds the file's kernel lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from gpurun.core.errors import SetupError
from gpurun.core.filelock import exclusive
from gpurun.core.paths import Home, fsync_folder, read_regular
from gpurun.core.records import Frozen, canonical
from gpurun.ledger.fsync import append_durably, unwritable_error

GENESIS = "0" * 64


class Link(Frozen):
    """One line of the chain: the place of a receipt. `prev` is the sha256 of the receipt before."""

    seq: int
    run: str
    receipt_sha256: str
    prev: str


@dataclass(frozen=True)
class Chain:
    """The readable links of a chain; unreadable lines are left out here, and reported by the audit.

    `good_bytes` is the length of the complete lines, `torn_bytes` that of an unfinished last line.
    """

    links: tuple[Link, ...]
    good_bytes: int
    torn_bytes: int

    def link_of(self, run: str) -> Link | None:
        """Return the link of a run; None if the run has no receipt in the chain."""
        return next((link for link in self.links if link.run == run), None)

    @property
    def next_seq(self) -> int:
        """Return the number of the next receipt; the first is 1."""
        return self.links[-1].seq + 1 if self.links else 1

    @property
    def head(self) -> str:
        """Return the sha256 of the last receipt; 64 zeros before the first."""
        return self.links[-1].receipt_sha256 if self.links else GENESIS


def read_chain(path: Path) -> Chain:
    """Read the file of a chain; a missing file is an empty chain."""
    *lines, rest = (read_regular(path) if path.exists() else b"").split(b"\n")
    if not rest and lines and b"\0" in lines[-1]:
        # A power cut left zeros: this write never returned, so the line counts as torn and its run is added again.
        rest = lines.pop() + b"\n"
    links = []
    for line in lines:
        try:
            links.append(Link.from_json(line))
        except ValidationError:
            continue
    return Chain(tuple(links), good_bytes=sum(len(line) + 1 for line in lines), torn_bytes=len(rest))


def append_link(path: Path, chain: Chain, link: Link) -> None:
    """Append a link to the file of `chain`, after cutting off a torn last line. The caller holds the lock.

    Raise VerificationFailed if the file has changed since it was read, SetupError if the disk refuses.
    """
    if chain.torn_bytes:
        os.truncate(path, chain.good_bytes)
    append_durably(path, canonical(link.model_dump()) + b"\n", after=chain.good_bytes)


@contextmanager
def chain_locked(path: Path) -> Iterator[None]:
    """Wait for the chain's lock and hold it during the `with` block. An OSError in the block becomes a SetupError.

    The SetupError names the file that could not be read or written.
    """
    try:
        with exclusive(path):
            fsync_folder(path.parent)
            yield
    except OSError as error:
        if error.filename and Path(error.filename) != path:  # A file of the run for which the receipt is made.
            raise SetupError(
                "ledger.unreadable",
                f"{error.filename} cannot be read: {error.strerror}.",
                hint="Make it readable for you again; `gpurun resume` then continues from the last record.",
            ) from error
        raise unwritable_error(path, error) from error


def has_receipt(home: Home, name: str) -> bool:
    """Return whether a run of this name is in the chain, even if its folder is gone; False for an unreadable chain."""
    with suppress(OSError):  # The next write to the chain reports the error.
        return read_chain(home.ledger).link_of(name) is not None
    return False
