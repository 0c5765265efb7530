"""The outputs of a command: found by glob while it runs, copied once they are finished, listed in MANIFEST.json.

A file is finished when its size and time are the same at two looks and after it was copied: so a checkpoint that is
written in place comes home whole or not at all.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Stamp = tuple[int, int]
    Tell = Callable[..., None]

FOLDER = "outputs"
PART = re.compile(r"[A-Za-z0-9_=+@,-][A-Za-z0-9._=+@,-]{0,79}")
MOST_PARTS = 8
MOST_FILES = 5000
BLOCK_BYTES = 1 << 20
SPARE_BYTES = 1 << 30
"""What a copy leaves free on the disk: a command that finds none would fail for its outputs' sake."""


class Outputs:
    """What a command leaves below `work`, published into `out`; `tell` writes an event."""

    def __init__(self, work: str, out: str, order: dict[str, Any], tell: Tell) -> None:
        self.work, self.out, self.tell = work, out, tell
        self.patterns: list[str] = list(order["outputs"])
        self.checkpoints: str = order["checkpoints"]
        self.looks: dict[str, Stamp] = {}
        self.published: dict[str, dict[str, Any]] = {}
        self.latest: int | None = None
        self.newest: list[str] = []
        self.warned: set[str] = set()
        self.listed: dict[str, Stamp] = {}
        self.left_behind: list[tuple[str, int]] = []
        self.is_changed = False
        os.makedirs(os.path.join(out, FOLDER), exist_ok=True)
        # What was uploaded is no output, unless the command changes it.
        self.before: dict[str, Stamp] = {name: stamp for name, stamp in self.found().items() if stamp}

    def found(self) -> dict[str, Stamp]:
        """Every regular file that a glob matches, with its size and time."""
        names: dict[str, Stamp] = {}
        for pattern in [*self.patterns, *([self.checkpoints] if self.checkpoints else [])]:
            for name in self.below(pattern):
                try:
                    facts = os.lstat(os.path.join(self.work, name))
                except OSError:
                    continue  # It was removed meanwhile.
                if stat.S_ISREG(facts.st_mode):
                    names[name] = facts.st_size, facts.st_mtime_ns
        return names

    def below(self, pattern: str) -> list[str]:
        """The files that a glob matches, and all below the folders that it matches, relative to the command's own."""
        paths = []
        for path in glob.glob(os.path.join(glob.escape(self.work), pattern), recursive=True):
            if not os.path.isdir(path) or os.path.islink(path):
                paths.append(path)
            elif not pattern.endswith("**"):  # Which has named them already.
                paths += [os.path.join(folder, name) for folder, _, files in os.walk(path) for name in files]
        names = [os.path.relpath(path, self.work) for path in paths]
        return [name for name in names if "__pycache__" not in name.split("/")]

    @property
    def new(self) -> dict[str, Stamp]:
        """What the globs match of the last look and was not there before."""
        return {name: stamp for name, stamp in self.looks.items() if stamp != self.before.get(name)}

    @property
    def unpublished(self) -> list[tuple[str, int, str]]:
        """What is finished and not listed, with why."""
        left = {name: stamp for name, stamp in self.new.items() if self.listed.get(name) != stamp}
        return [(name, stamp[0], "it could not be listed") for name, stamp in sorted(left.items())]

    @property
    def matched(self) -> dict[str, int]:
        """How many new files each glob matches."""
        new, globs = self.new, [*self.patterns, *([self.checkpoints] if self.checkpoints else [])]
        return {pattern: len(new.keys() & set(self.below(pattern))) for pattern in globs}

    def units(self) -> list[list[str]]:
        """The checkpoints that there are, each the files that belong to it, the newest last."""
        if not self.checkpoints:
            return []
        units = []
        for path in glob.glob(os.path.join(glob.escape(self.work), self.checkpoints), recursive=True):
            name = os.path.relpath(path, self.work)
            files = self.below(glob.escape(name)) if os.path.isdir(path) else [name]
            files = [one for one in files if one in self.looks and self.looks[one] != self.before.get(one)]
            if files:
                units.append((max(self.looks[one][1] for one in files), sorted(files)))
        return [files for _, files in sorted(units)]

    def look(self, step: int, is_last: bool = False) -> None:
        """Publish what is finished; at the last look, when nothing writes any more, all that there is."""
        before, self.looks = self.looks, self.found()
        new = {name: stamp for name, stamp in self.looks.items() if stamp != self.before.get(name)}
        self.warn_names(new)
        finished = {n: s for n, s in new.items() if is_plain(n) and (is_last or before.get(n) == s)}
        units = self.units()
        whole = next((files for files in reversed(units) if finished.keys() >= set(files)), [])
        if whole:
            self.publish_checkpoint(whole, finished, step, is_last)
        growing = {name for files in units if not finished.keys() >= set(files) for name in files}
        others = sorted(finished.keys() - set(whole) - growing, key=lambda name: -finished[name][1])
        for name in others[:MOST_FILES]:
            if self.publish(name, finished[name], step, is_last):
                self.note(name, "output", self.published[name]["step"])
        gone = [name for name in self.published if name not in self.looks and name not in self.newest]
        for name in gone:
            del self.published[name]
        if self.is_changed or gone:
            self.write()
            self.is_changed = False
        for name in gone:
            remove(os.path.join(self.out, FOLDER, name))

    def publish_checkpoint(self, names: list[str], stamps: dict[str, Stamp], step: int, is_last: bool) -> None:
        """Publish the newest checkpoint, all of it or nothing; the one before is an output from then on."""
        held = {name: self.published[name]["stamp"] for name in names if name in self.published}
        if self.newest == names and held == {name: stamps[name] for name in names}:
            return
        step = step if self.latest is None else max(step, self.latest + 1)
        if not all(self.publish(name, stamps[name], step, is_last) for name in names):
            return
        self.latest, before, self.newest = step, self.newest, names
        for name in before:
            self.note(name, "output", self.published[name]["step"])
        for name in names:
            self.note(name, "checkpoint", step)
        size = sum(self.published[name]["bytes"] for name in names)
        self.tell("checkpoint", step=step, bytes=size, name=os.path.commonpath(names) if len(names) > 1 else names[0])

    def note(self, name: str, kind: str, step: int) -> None:
        """Note what a published file is."""
        entry = self.published[name]
        self.is_changed = self.is_changed or (entry["kind"], entry["step"]) != (kind, step)
        entry.update(kind=kind, step=step)

    def publish(self, name: str, stamp: Stamp, step: int, is_last: bool) -> bool:
        """Copy one file, which at the last look needs no room; whether it is there as it is now."""
        kept = self.published.get(name)
        if kept and kept["stamp"] == stamp:
            return True
        source, target = os.path.join(self.work, name), os.path.join(self.out, FOLDER, name)
        partial = os.path.join(self.out, ".publishing")
        if not is_last and shutil.disk_usage(self.out).free < stamp[0] + SPARE_BYTES:
            self.warn("outputs.no_room", "%s waits for the end: this disk has no room for a copy of it" % name)
            return False
        os.makedirs(os.path.dirname(target), exist_ok=True)
        remove(partial)
        try:
            digest = linked(source, partial) if is_last else copied(source, partial)
            facts = os.lstat(source)
        except OSError as error:
            self.warn("outputs.unreadable", "%s cannot be read: %s" % (name, error.strerror))
            return False
        if (facts.st_size, facts.st_mtime_ns) != stamp:
            return False  # It was written meanwhile.
        os.replace(partial, target)
        self.published[name] = {"bytes": stamp[0], "sha256": digest, "kind": "output", "step": step, "stamp": stamp}
        self.is_changed = True
        self.tell("output", step=step, name=name, bytes=stamp[0])
        return True

    def write(self) -> None:
        """Replace MANIFEST.json."""
        files = [
            {"name": "%s/%s" % (FOLDER, name), **{key: one[key] for key in ("bytes", "sha256", "kind", "step")}}
            for name, one in sorted(self.published.items())
        ]
        path = os.path.join(self.out, "MANIFEST.json")
        with open(path + ".tmp", "w") as file:
            json.dump({"v": 1, "latest": self.latest, "best": None, "files": files}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".tmp", path)
        self.listed = {name: one["stamp"] for name, one in self.published.items()}

    def warn_names(self, names: dict[str, Stamp]) -> None:
        """Say which files do not come home for their names, and that there are too many."""
        odd = sorted(name for name in names if not is_plain(name))
        if odd:
            what = "%s and %d more" % (ascii(odd[0]), len(odd) - 1) if len(odd) > 1 else ascii(odd[0])
            self.warn("outputs.name", "%s has a name that other systems cannot hold, and stays there" % what)
        if len(names) > MOST_FILES:
            what = "the outputs are %d files; the %d newest come home: pack the others into one"
            self.warn("outputs.many", what % (len(names), MOST_FILES))

    def warn(self, code: str, message: str) -> None:
        """Say it once."""
        if code not in self.warned:
            self.warned.add(code)
            self.tell("warning", code=code, message=message)


def is_plain(name: str) -> bool:
    """Whether a name may stand in a manifest."""
    parts = name.split("/")
    return len(parts) <= MOST_PARTS and all(PART.fullmatch(one) and one[-1] != "." for one in parts)


def copied(source: str, target: str) -> str:
    """Copy a file; its digest."""
    with open(target, "wb") as out:
        return digest(source, out)


def linked(source: str, target: str) -> str:
    """Give a file that nobody writes any more a second name, or copy it where that cannot be; its digest."""
    try:
        os.link(source, target)
    except OSError:
        return copied(source, target)
    return digest(source, None)


def digest(source: str, out: Any) -> str:
    """The sha256 of a file, which is written to `out` meanwhile, if there is one."""
    found = hashlib.sha256()
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as file:
        for block in iter(lambda: file.read(BLOCK_BYTES), b""):
            found.update(block)
            if out is not None:
                out.write(block)
    return found.hexdigest()


def remove(path: str) -> None:
    """Remove a file, if it is there."""
    try:
        os.unlink(path)
    except OSError:
        return
