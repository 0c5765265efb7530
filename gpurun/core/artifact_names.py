"""The names of a run's outputs: percent-encoded in every record, and the original bytes on disk where that is possible.

Some names cannot be used on this computer's file system: a name that differs from another only in capitals, one with a
refused letter, a path that is too long. Such a file is stored at `renamed/DIGEST-END`: the first 16 hex digits of the
sha256 of its name, and the end of the name in plain letters. `outputs.names.json`, beside `renamed`, maps the names.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote_from_bytes, unquote_to_bytes

from gpurun.core.paths import make_private, write_atomic
from gpurun.core.untrusted import read_object, safe_line

ANY_NAME = ("outputs", "home", "workspace")
"""The folders in which a manifest may have any name that Linux allows; in all other folders, names are plain."""
RENAMED, MAPPING = "renamed", "outputs.names.json"
PLAIN = "/=+@,"
MOST_PART_BYTES, MOST_PATH_BYTES = 255, 4096

_SIMPLE = re.compile(r"[A-Za-z0-9._=+@,~-]+(?:/[A-Za-z0-9._=+@,~-]+)*")
_DEVICE = re.compile(r"(?:^|/)(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\.[^/]*)?(?:/|$)|[. ](?:/|$)", re.IGNORECASE)
_HARD = (b"a:b", b"\xff", b"a\nb", b'a"b', b"a\\b", b"a ", b"aux", b"a.", b"\x01", b"e\xcc\x81")


def raw_name(name: str) -> bytes:
    """Return the bytes of a name from a record; ValueError if no file inside a folder can have this name."""
    if _SIMPLE.fullmatch(name) and "/." not in name and name[0] != "." and len(name) <= MOST_PART_BYTES:
        return name.encode("ascii")
    raw = unquote_to_bytes(name)
    parts = raw.split(b"/")
    if quote_from_bytes(raw, safe=PLAIN) != name or b"\0" in raw or len(raw) >= MOST_PATH_BYTES:
        raise ValueError(name)
    if any(part in (b"", b".", b"..") or len(part) > MOST_PART_BYTES for part in parts):
        raise ValueError(name)
    return raw


def readable_name(name: str) -> str:
    """Return a name for the screen: readable, and without control characters."""
    return name if _SIMPLE.fullmatch(name) else safe_line(unquote_to_bytes(name).replace(b"\n", b" "))


def path_of(folder: Path, name: str) -> Path:
    """Return the path of the file with this name below a folder, renamed or not; ValueError as in `raw_name`."""
    return folder / (substitute_path(name) if name in _find_renamed_in(folder) else os.fsdecode(raw_name(name)))


def substitute_path(name: str) -> str:
    """Return the path, below the same folder, of a file that cannot have its own name."""
    raw = raw_name(name)
    end = re.sub(rb"[^A-Za-z0-9_-]+", b"_", raw.rpartition(b"/")[2].rpartition(b".")[0][-60:])
    suffix = re.sub(rb"[^A-Za-z0-9_-]+", b"_", raw.rpartition(b"/")[2].rpartition(b".")[2][-20:])
    return f"{RENAMED}/{hashlib.sha256(raw).hexdigest()[:16]}-{(end + b'.' + suffix).decode('ascii')}"


def make_room_for_names(folder: Path, names: Iterable[str]) -> None:
    """Create the folder, and record in its mapping which of the names must be renamed; a later call only adds names.

    `names` must be the complete list, because only then are names found that differ only in capitals. Nothing is
    recorded if the disk refuses.
    """
    known, requested = _find_renamed_in(folder), set(names)
    try:
        make_private(folder)
        with _Trial(folder) as trial:
            bad = {name for name in requested if len(name) > trial.safe_bytes and trial.is_too_long(name)}
            if not trial.is_open:
                bad |= {name for name in requested if _is_odd(name) and not trial.holds(name)}
            if trial.folds:
                bad |= _find_twins(sorted(requested))
    except OSError:  # For example a full disk: the call with the next list tries again.
        return
    if bad - known:
        mapping = {"v": 1, "names": {name: substitute_path(name) for name in sorted(bad | known)}}
        write_atomic(folder / MAPPING, json.dumps(mapping, indent=1).encode())


def _is_odd(name: str) -> bool:
    """Return whether a file system may refuse a name."""
    return not _SIMPLE.fullmatch(name) or bool(_DEVICE.search(name))


def _find_twins(names: list[str]) -> set[str]:
    """Return the names that a case-folding file system confuses with an earlier name, or with another name's folder."""
    folded = {name: _fold_case(name) for name in names}
    folders = {above for place in set(folded.values()) for above in _list_folders_above(place)}
    seen, twins = set[str](), set[str]()
    for name, place in folded.items():
        if place in seen or place in folders:
            twins.add(name)
        seen.add(place)
    return twins


def _fold_case(name: str) -> str:
    if "%" not in name:
        return name.lower()
    return unicodedata.normalize("NFC", unquote_to_bytes(name).decode("utf-8", "surrogateescape")).casefold()


def _list_folders_above(place: str) -> Iterable[str]:
    """Yield the paths of all folders above a path, the nearest first."""
    end = place.rfind("/")
    while end > 0:
        yield place[:end]
        end = place.rfind("/", 0, end)


class _Trial:
    """A test of which names a folder's file system can store, made with files in a temporary folder inside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._part_bytes = os.pathconf(folder, "PC_NAME_MAX")
        self._path_bytes = os.pathconf(folder, "PC_PATH_MAX") - len(os.fsencode(folder)) - 2
        self.safe_bytes = min(self._part_bytes, self._path_bytes)
        self._parts: dict[bytes, bool] = {}

    def __enter__(self) -> _Trial:
        self._room = tempfile.TemporaryDirectory(prefix=".names-", dir=self._folder)
        self._top = os.fsencode(self._room.name)
        self.is_open = all(self._may_store_part(part) for part in _HARD)
        (Path(self._room.name) / "twin").touch()
        self.folds = os.path.lexists(os.path.join(self._top, b"TWIN"))
        return self

    def __exit__(self, *_: object) -> None:
        self._room.cleanup()

    def is_too_long(self, name: str) -> bool:
        """Return whether the path, or one part of it, is longer than this file system allows."""
        raw = raw_name(name)
        return len(raw) > self._path_bytes or any(len(part) > self._part_bytes for part in raw.split(b"/"))

    def holds(self, name: str) -> bool:
        """Return whether the file system can store each part of a name, and then lists it unchanged."""
        return self.is_open or all(self._may_store_part(part) for part in raw_name(name).split(b"/"))

    def _may_store_part(self, part: bytes) -> bool:
        if part not in self._parts:
            path = os.path.join(self._top, part)
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                self._parts[part] = part in os.listdir(self._top)
                os.unlink(path)
            except OSError:
                self._parts[part] = False
        return self._parts[part]


def _find_renamed_in(folder: Path) -> frozenset[str]:
    """Return the names that are renamed below a folder."""
    try:
        facts = os.stat(folder / MAPPING, follow_symlinks=False)
    except OSError:
        return frozenset()
    return _read_mapping(folder / MAPPING, facts.st_mtime_ns, facts.st_size)


@lru_cache(maxsize=8)
def _read_mapping(path: Path, mtime_ns: int, size: int) -> frozenset[str]:
    """Return the names in a mapping file; none if it cannot be read. `mtime_ns` and `size` are only for the cache."""
    try:
        return frozenset(map(str, read_object(path)["names"]))
    except (OSError, ValueError, TypeError, KeyError):
        return frozenset()
