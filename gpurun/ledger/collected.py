"""What came home of a run, as journal and receipt have it: each file up to a bound, of more one list and its digest.

The list lies in the run's folder: a line a file, `SHA256 BYTES KIND STEP NAME`, sorted by name. So neither a line of
the journal nor a receipt grows with what a command leaves, and each file is still held to its digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpurun.core.collected_record import HERE, MISSING
from gpurun.core.paths import RunFolder, write_atomic

LISTED = 1000
"""Of so many files each stands in the record itself."""
NAMED = 20
"""So many of those that are missing are named in a receipt, which has the number of all."""


def told_files(folder: RunFolder, files: Sequence[Mapping[str, Any]], missing: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a record about what is at home and what is not; of very many the list is written first.

    OSError where this disk does not take the list.
    """
    told: dict[str, Any] = {"files": list(files[:LISTED]), "missing": list(missing[:LISTED])}
    if len(files) > LISTED:
        lines = "".join(f"{f['sha256']} {f['bytes']} {f['kind']} {f['step']} {f['name']}\n" for f in by_name(files))
        told["listed"] = {"files": len(files), "bytes": sum(int(file["bytes"]) for file in files)}
        told["listed"] |= _written(folder, HERE, lines)
    if len(missing) > NAMED:
        told["missing_files"] = {"files": len(missing)}
        told["missing_files"] |= _written(folder, MISSING, "".join(f"{name}\n" for name in sorted(missing)))
    return told


def by_name(files: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The files in the order of their list."""
    return sorted(files, key=lambda file: str(file["name"]))


def _written(folder: RunFolder, name: str, text: str) -> dict[str, str]:
    content = text.encode("ascii", "backslashreplace")
    write_atomic(folder.path / name, content)
    return {"sha256": hashlib.sha256(content).hexdigest()}
