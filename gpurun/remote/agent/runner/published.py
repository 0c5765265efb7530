"""The outputs of a command: found by glob while it runs, copied once they are finished, listed in MANIFEST.json.

A file is finished when its size and time are the same at two checks and after the copy, so a checkpoint that is written
in place is downloaded completely or not at all. At the last check, when no process writes any more, every file is
hard-linked, which needs no disk space. Files that could not be published are then named. The manifest percent-encodes
names.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from urllib.parse import quote

from gpurun.remote.agent.runner.matching import STAYS, Walk, count_new_files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gpurun.remote.agent.runner.matching import MatchedFiles, Stamp

    Tell = Callable[..., None]

PLAIN = "/=+@,"
"""Characters that a manifest does not encode, besides letters, digits and `-._~`. Every other byte becomes %XX."""
MOST_FILES, MOST_MANIFEST_BYTES = 1_000_000, 256 << 20
ENTRY_BYTES = 190
"""The maximum size of a manifest entry without its name."""
WARN_SHARE = 0.8
"""The share of a limit (of the number of files, or of the size of their list) at which a warning is written."""
BLOCK_BYTES = 1 << 20
SPARE_BYTES = 1 << 30
"""The free space that a copy must leave on the disk, so that a command does not fail because of its outputs."""
RESERVED_BYTES, FOLDER_BYTES = 1 << 20, 4 << 10
QUICK_S, REST = 0.5, 10
"""After a check that took longer than QUICK_S, the next check waits REST times as long as it took."""
MOST_EVENTS = 20
"""If one check publishes more files than this, a single event states their number."""
WARN_BYTES = 1 << 20
PARTIAL, RESERVE, MANIFEST = ".publishing", ".reserve", "MANIFEST.json"


class Published:
    """One file of the manifest."""

    __slots__ = ("bytes", "kind", "sha256", "stamp", "step")

    def __init__(self, stamp: Stamp, sha256: str, step: int) -> None:
        self.bytes, self.sha256, self.kind, self.step, self.stamp = stamp[0], sha256, "output", step, stamp


class PublishedOutputs:
    """A command's outputs, published into `out`. `tell` writes an event.

    After the last check, `unpublished` has name, bytes and reason of finished files that are not in the manifest.
    `left_behind` has the files that a rule leaves out, with their bytes. `matched` has the number of new files that
    each glob has matched.
    """

    def __init__(self, work: str, out: str, order: dict[str, Any], tell: Tell) -> None:
        self.work, self.out, self.tell = work, out, tell
        patterns, checkpoints = list(order["outputs"]), str(order["checkpoints"])
        self.walk = Walk(work, os.path.dirname(out), patterns, checkpoints, has_git_rules=bool(order.get("sync_s")))
        self.looks: dict[str, Stamp] = {}
        self.published: dict[str, Published] = {}
        self.manifest_bytes = 0
        self.latest: int | None = None
        self.newest: list[str] = []
        self.warned: set[str] = set()
        self.is_changed = False
        self.unpublished: list[tuple[str, int, str]] = []
        self.left_behind: list[tuple[str, int]] = []
        self.matched: dict[str, int] = dict.fromkeys([glob.text for glob in self.walk.globs], 0)
        self.why: dict[str, str] = {}
        self.over: dict[str, int] = {}
        self.new_files: list[tuple[str, int, int]] = []
        self.took_s, self.looked_s = 0.0, -1e9
        self.reserved_bytes = 0
        os.makedirs(out, exist_ok=True)
        self.reserve(0)
        self.began_wall = time.time()
        # Uploaded files are not outputs unless the command changes them.
        self.walk.before = self.walk.find(1 << 62).files
        self.walk.held = self.published

    def look(self, step: int, is_last: bool = False) -> None:
        """Publish finished files. At the last check, when no process writes any more, publish all files."""
        began_s = time.monotonic()
        if not is_last and self.took_s > QUICK_S and began_s - self.looked_s < REST * self.took_s:
            return
        if is_last:
            # From now on the reserved space is for folders, links and the list.
            remove_file(os.path.join(self.out, RESERVE))
            self.why.clear()
        try:
            self.publish_all(step, is_last)
        except Exception as error:
            if not is_last:
                raise
            self.name_unlisted(getattr(error, "strerror", None) or "%s: %s" % (type(error).__name__, error))
        self.looked_s = time.monotonic()
        self.took_s = self.looked_s - began_s

    def name_unlisted(self, why: str) -> None:
        """Name the files that are missing from the list on disk, because that list could not be replaced."""
        listed = digests_listed(os.path.join(self.out, MANIFEST))
        for name, stamp in self.looks.items():
            entry = self.published.get(name)
            if not entry or entry.stamp != stamp or listed.get(encode_name(name)) != entry.sha256:
                self.unpublished.append((name, stamp[0], why))

    def publish_all(self, step: int, is_last: bool) -> None:
        """Check all files, and publish those that are finished."""
        found, before = self.walk.find(MOST_FILES), self.looks
        self.over.clear()
        self.looks = new = found.files
        for glob, count in zip(self.walk.globs, found.matched):  # noqa: B905 - Python 3.8 has no `strict`
            self.matched[glob.text] = max(self.matched[glob.text], count)
        listing_bytes = sum(len(encode_name(name)) + ENTRY_BYTES for name in new)
        if not is_last:
            self.reserve(listing_bytes + FOLDER_BYTES * len({os.path.dirname(name) for name in new}))
        finished = new if is_last else {name: stamp for name, stamp in new.items() if before.get(name) == stamp}
        units = [sorted(files) for _, files in sorted((max(new[n][1] for n in u), u) for u in found.units.values())]
        whole = self.publish_newest(units, finished, step, is_last)
        growing = {name for files in units if not finished.keys() >= set(files) for name in files}
        others = sorted(finished.keys() - set(whole) - growing, key=lambda name: -finished[name][1])
        for name in others:
            if self.publish(name, finished[name], step, is_last):
                self.note(name, "output", self.published[name].step)
        gone = [name for name in self.published if name not in new and name not in self.newest]
        for name in gone:
            self.forget(name)
        if self.is_changed or gone:
            self.write()
            self.is_changed = False
        for name in gone:
            remove_file(os.path.join(self.out, name))
        self.tell_published()
        self.warn_limits(len(found.files) + found.over_files, listing_bytes)
        if is_last:
            self.sum_up(found)

    def publish_newest(
        self, units: list[list[str]], finished: dict[str, Stamp], step: int, is_last: bool
    ) -> list[str]:  # fmt: skip
        """Publish the newest complete checkpoint. If that fails at the end of the run, publish the one before it.

        Return the files of that checkpoint, which must not be published one by one.
        """
        for files in reversed(units):
            if finished.keys() >= set(files):
                if self.publish_checkpoint(files, finished, step, is_last):
                    return files
                if not is_last:
                    return files  # The checkpoint is tried again at the next check, completely or not at all.
        return []

    def publish_checkpoint(self, names: list[str], stamps: dict[str, Stamp], step: int, is_last: bool) -> bool:
        """Publish the newest checkpoint, completely or not at all. The one before it becomes an ordinary output."""
        held = {name: self.published[name].stamp for name in names if name in self.published}
        if self.newest == names and held == {name: stamps[name] for name in names}:
            return True
        step = step if self.latest is None else max(step, self.latest + 1)
        if not all(self.publish(name, stamps[name], step, is_last) for name in names):
            return False
        self.latest, before, self.newest = step, self.newest, names
        for name in before:
            if name in self.published:
                self.note(name, "output", self.published[name].step)
        for name in names:
            self.note(name, "checkpoint", step)
        size = sum(self.published[name].bytes for name in names)
        common = os.path.commonpath(names) if len(names) > 1 else names[0]
        self.tell("checkpoint", step=step, bytes=size, name=short_name(common))
        return True

    def note(self, name: str, kind: str, step: int) -> None:
        """Record the kind of a published file."""
        entry = self.published[name]
        self.is_changed = self.is_changed or (entry.kind, entry.step) != (kind, step)
        entry.kind, entry.step = kind, step

    def publish(self, name: str, stamp: Stamp, step: int, is_last: bool) -> bool:
        """Copy one file (at the last check, link it). Return whether its current state is published."""
        kept = self.published.get(name)
        if kept and kept.stamp == stamp:
            return True
        size = len(encode_name(name)) + ENTRY_BYTES
        if not kept and (len(self.published) >= MOST_FILES or self.manifest_bytes + size > MOST_MANIFEST_BYTES):
            self.over[name] = stamp[0]
            return False
        source, partial = self.walk.source(name), os.path.join(self.out, PARTIAL)
        if not is_last and shutil.disk_usage(self.out).free < stamp[0] + SPARE_BYTES:
            self.warn(
                "outputs.no_room", "%s is published at the end: this disk has no room for a copy" % readable_name(name)
            )
            return False
        remove_file(partial)
        try:
            digest, stamp = link_or_copy(source, partial, stamp) if is_last else copy_file(source, partial, stamp)
            self.put(partial, name)
        except Moved:
            self.why[name] = "it was still being written"
            return False
        except OSError as error:
            remove_file(partial)  # On a full disk, an incomplete copy would occupy the space that the list needs.
            self.why[name] = error.strerror or str(error)
            self.warn("outputs.unreadable", "%s cannot be published: %s" % (readable_name(name), self.why[name]))
            return False
        if not kept:
            self.manifest_bytes += size
        self.published[name] = Published(stamp, digest, step)
        self.is_changed = True
        self.new_files.append((name, stamp[0], step))
        return True

    def put(self, partial: str, name: str) -> None:
        """Rename a complete copy to its name. Remove what has that name, because the command has replaced it."""
        target = os.path.join(self.out, name)
        try:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.replace(partial, target)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            parts = name.split("/")
            above = ["/".join(parts[:end]) for end in range(2, len(parts))]
            for path in [name_above for name_above in above if os.path.isfile(os.path.join(self.out, name_above))]:
                self.forget(path)
                remove_file(os.path.join(self.out, path))
            if os.path.isdir(target):
                for other in [known for known in self.published if known.startswith(name + "/")]:
                    self.forget(other)
                shutil.rmtree(target)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.replace(partial, target)

    def forget(self, name: str) -> None:
        """Remove a file from the manifest."""
        if self.published.pop(name, None):
            self.manifest_bytes -= len(encode_name(name)) + ENTRY_BYTES
            self.is_changed = True

    def write(self) -> None:
        """Write the manifest to a new file, entry by entry, and then put it in place of MANIFEST.json."""
        path = os.path.join(self.out, MANIFEST)
        with open(path + ".tmp", "w") as file:
            file.write('{"v": 1, "latest": %s, "best": null, "files": [' % json.dumps(self.latest))
            comma = "\n"
            for name, entry in sorted((encode_name(name), entry) for name, entry in self.published.items()):
                values = (comma, name, entry.bytes, entry.sha256, entry.kind, entry.step)
                file.write('%s{"name": "%s", "bytes": %d, "sha256": "%s", "kind": "%s", "step": %d}' % values)
                comma = ",\n"
            file.write("]}")
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".tmp", path)

    def reserve(self, size: int) -> None:
        """Reserve disk space for the last list and for its files' folders and links, if the disk has that space."""
        needed = RESERVED_BYTES + 2 * size
        if needed <= self.reserved_bytes:
            return
        try:
            with open(os.path.join(self.out, RESERVE), "ab") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, 2 * needed)
                else:
                    file.write(bytes(2 * needed - self.reserved_bytes))
            self.reserved_bytes = 2 * needed
        except OSError:
            return  # The disk is already full. Space that was reserved before stays reserved.

    def tell_published(self) -> None:
        """Write one event for each new file; if there are very many, one event for all of them."""
        if len(self.new_files) <= MOST_EVENTS:
            for name, size, step in self.new_files:
                self.tell("output", step=step, name=short_name(name), bytes=size)
        else:
            name, _, step = self.new_files[-1]
            size = sum(size for _, size, _ in self.new_files)
            self.tell("output", step=step, name=short_name(name), bytes=size, files=len(self.new_files))
        self.new_files = []

    def sum_up(self, found: MatchedFiles) -> None:
        """Report which files are not downloaded, and why."""
        here = {name: entry.stamp for name, entry in self.published.items()}
        left = {name: stamp for name, stamp in found.files.items() if here.get(name) != stamp and name not in self.over}
        why = {name: self.why.get(name, "it could not be published") for name in left}
        self.unpublished = [(name, stamp[0], why[name]) for name, stamp in left.items()]
        over_files, over_bytes = len(self.over) + found.over_files, sum(self.over.values()) + found.over_bytes
        if over_files:
            limit = "at most %d files come home, and their list may have at most %d MB" % (
                MOST_FILES,
                MOST_MANIFEST_BYTES >> 20,
            )
            self.unpublished.append(("%d more files" % over_files, over_bytes, limit))
        named = []
        for rule, paths in found.left.items():
            sums = [count_new_files(path, self.began_wall) for _, path in paths]
            size = sum(size for _, size in sums)
            if any(files for files, _ in sums):
                what = readable_name(paths[0][0].partition("/")[2]) if len(paths) == 1 else rule
                self.left_behind.append((what, size))
                if size >= WARN_BYTES or rule not in STAYS:  # A few bytes of cache are not worth a warning.
                    named.append("%s (%s bytes)" % (what, format(size, ",")))
        if named:
            self.warn("outputs.left", "a rule excludes these files from the download: %s" % ", ".join(named))

    def warn_limits(self, files: int, size: int) -> None:
        """Warn that there are nearly, or already, more files than can be downloaded."""
        if files >= WARN_SHARE * MOST_FILES or size >= WARN_SHARE * MOST_MANIFEST_BYTES:
            what = (
                "there are %d output files; at most %d come home, and their list may have %d MB: pack them into fewer"
            )
            self.warn("outputs.many", what % (files, MOST_FILES, MOST_MANIFEST_BYTES >> 20))

    def warn(self, code: str, message: str) -> None:
        """Write a warning, at most once for each code."""
        if code not in self.warned:
            self.warned.add(code)
            self.tell("warning", code=code, message=message)


class Moved(OSError):
    """A file was written or replaced while it was copied."""


def encode_name(name: str) -> str:
    """Return a name as the manifest has it: its bytes, percent-encoded."""
    return quote(os.fsencode(name), safe=PLAIN)


def readable_name(name: str) -> str:
    """Return a name for a message."""
    return os.fsencode(name).decode("utf-8", "replace")


def short_name(name: str) -> str:
    """Return a name for an event."""
    return encode_name(name)[-400:]


def digests_listed(path: str) -> dict[str, str]:
    """Return the digests in the manifest on disk, by name; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return {entry["name"]: entry["sha256"] for entry in json.load(file)["files"]}
    except (OSError, ValueError):
        return {}


def copy_file(source: str, target: str, stamp: Stamp) -> tuple[str, Stamp]:
    """Copy a file in one consistent state, and return its digest. Raise Moved if it was written meanwhile."""
    with open(target, "wb") as out:
        digest = digest_while_copying(source, out)
    if stamp_of(source) != stamp:
        raise Moved
    return digest, stamp


def link_or_copy(source: str, target: str, stamp: Stamp) -> tuple[str, Stamp]:
    """Give a file a second name, or copy it if that is impossible, for example on another disk. Return its digest.

    A file that a surviving process still writes is copied up to its current size. Raise Moved if that part changes.
    """
    try:
        os.link(source, target)
        digest = digest_while_copying(target, None)
        if stamp_of(source) == stamp:
            return digest, stamp
        remove_file(target)
    except OSError:
        remove_file(target)
    with open(target, "wb") as out:
        digest = digest_while_copying(source, out, stamp[0])
    if os.path.getsize(target) != stamp[0] or (
        stamp_of(source) != stamp and digest_while_copying(source, None, stamp[0]) != digest
    ):
        raise Moved
    return digest, stamp


def stamp_of(path: str) -> Stamp:
    """Return the size and time of a file."""
    facts = os.lstat(path)
    return facts.st_size, facts.st_mtime_ns


def digest_while_copying(source: str, out: Any, most: int = 1 << 62) -> str:
    """Return the sha256 of a file, or of its first `most` bytes, and copy them to `out` if it is given."""
    found, left = hashlib.sha256(), most
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as file:
        while left and (block := file.read(min(BLOCK_BYTES, left))):
            found.update(block)
            left -= len(block)
            if out is not None:
                out.write(block)
    return found.hexdigest()


def remove_file(path: str) -> None:
    """Remove a file, if it exists."""
    try:
        os.unlink(path)
    except OSError:
        return
