"""An upload in progress: its files, and which of its parts have arrived and been verified.

gpurun/remote/chunks.py describes the protocol.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import struct
import sys
from bisect import bisect_right

from gpurun.remote.agent.decompress import codecs, inflater
from gpurun.remote.agent.system import MOST_PART_BYTES, Refusal, boot_id, locked, path_in, read

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, List, Set, Tuple, Union

    from gpurun.remote.agent.system import Answer, Json


MOST_FILES = 100_000
MOST_LIST_BYTES = 32 << 20
WAIT_S = 60
FOLDER = ".incoming"
PULLED = ".pulled"
# Before each part come its index, its length, its compressed length and its sha256. The index END ends the stream.
HEAD = struct.Struct(">QII32s")
END = (1 << 64) - 1
STALL_S = 120


def begin(root: str, options: Json) -> Answer:
    """Prepare for a pack. Return which parts of it have already arrived, as lines of text.

    With `--held ask`, return instead the files of an earlier pack that may be in this one, if there are any.
    """
    content = read_list(options)
    layout = checked_layout(json.loads(content))
    held = locked(root, "unpack.lock", WAIT_S)
    sizes = {size for _, size in layout["files"]} if options["held"] == "ask" else set()
    kind, lines = "held", held_lines(root, sizes) if sizes else []
    if not lines:
        kind, folder = "verified", path_in(root, FOLDER, options["sha256"])
        verified = Incoming(folder).verified if os.path.exists(path_in(folder, "layout.json")) else {}
        lines = ["%d %s\n" % pair for pair in sorted(verified.items())]
        drop_partial(root)
        check_room(root, sum(size for _, size in layout["files"]) - len(verified) * layout["part_bytes"])
        if not verified:
            shutil.rmtree(path_in(root, FOLDER), ignore_errors=True)
            os.makedirs(path_in(folder, "files"))
            begin_list(path_in(folder, "verified"))
            with open(path_in(folder, "layout.json"), "wb") as out:
                out.write(content)
    os.close(held)
    body = "".join(lines).encode()
    return {"codecs": codecs(), "kind": kind, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}, body


def read_list(options: Json) -> bytes:
    """Return all of standard input. Raise Refusal if it does not have the announced digest."""
    content = sys.stdin.buffer.read(MOST_LIST_BYTES + 1)
    if hashlib.sha256(content).hexdigest() != options["sha256"]:
        raise Refusal("cut_stream", "the list is damaged, cut or too long")
    return content


def checked_layout(layout: Json) -> Json:
    """Return the requested layout. Raise Refusal for a name that is not plainly inside bundle/ or data/."""
    files = layout["files"]
    taken: Set[str] = set()
    folders: Set[str] = set()
    if len(files) > MOST_FILES:
        raise Refusal("too_many", "the pack has too many files")
    if not 0 < layout["part_bytes"] <= MOST_PART_BYTES:
        raise Refusal("usage", "parts of %r bytes are not accepted" % layout["part_bytes"])
    for name, size in files:
        check_name(name)
        if name in taken or not (isinstance(size, int) and 0 <= size < 1 << 62):
            raise Refusal("duplicate" if name in taken else "usage", "the pack has %r twice, or without a size" % name)
        taken.add(name)
        folders.add(name.rpartition("/")[0])
    for folder in list(folders):
        while folder:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    if taken & folders:
        raise Refusal("bad_name", "the pack has %r as a file and as a folder" % min(taken & folders))
    return dict(layout)


def check_name(name: str) -> None:
    """Raise Refusal for a name that could lead out of the folder."""
    parts = name.split("/")
    plain = name.isprintable() and "\\" not in name and not {"", ".", ".."}.intersection(parts)
    if not plain or len(parts) < 2 or parts[0] not in ("bundle", "data"):
        raise Refusal("bad_name", "the pack has the entry %r" % name)


def check_room(root: str, needed: int) -> None:
    """Raise Refusal, with the required size, for an upload that does not fit on the disk."""
    free = shutil.disk_usage(root).free
    if needed > free:
        raise Refusal("disk_full", "%d bytes are needed, %d are free" % (needed, free), needed_bytes=needed)


def drop_partial(root: str) -> None:
    """Delete partial files from a bucket. Those files are now sent completely, and there may be no room for both."""
    for name in os.listdir(path_in(root, PULLED)) if os.path.isdir(path_in(root, PULLED)) else ():
        if name.endswith(".part"):
            os.unlink(path_in(root, PULLED, name))


def held_files(root: str) -> Dict[str, Tuple[str, int]]:
    """Return, by digest, the path and size of every existing file that an earlier pack or a bucket has brought."""
    found = {}
    for name in os.listdir(path_in(root, PULLED)) if os.path.isdir(path_in(root, PULLED)) else ():
        if re.fullmatch(r"[0-9a-f]{64}", name):
            found[name] = (path_in(root, PULLED, name), os.path.getsize(path_in(root, PULLED, name)))
    for entry in (read(root, "agent", "pack.json") or {"files": []})["files"]:
        path = path_in(root, entry["name"])
        if os.path.isfile(path) and os.path.getsize(path) == entry["bytes"]:
            found[entry["sha256"]] = (path, entry["bytes"])
    return found


def held_lines(root: str, sizes: Set[int]) -> List[str]:
    """Return a line with digest and size for each unchanged local file whose size is one of `sizes`."""
    found = [(sha256, *held) for sha256, held in sorted(held_files(root).items()) if held[1] in sizes]
    # Files pulled since this boot were verified part by part, like those over SSH. The others are read again.
    pulled = [path_in(root, PULLED, sha256) for sha256, _, _ in found]
    fresh = {path for path in pulled if verified_parts(path + ".parts")}
    good = [part for part in found if part[1] in fresh or hash_file(part[1]) == part[0]]
    return ["%s %d\n" % (sha256, size) for sha256, _, size in good]


def hash_file(path: str) -> str:
    """Return the sha256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def begin_list(path: str) -> None:
    """Start a list of the parts that have arrived. Its first line identifies the boot."""
    with open(path, "w") as log:
        log.write("boot %s\n" % boot_id())


def put_at(descriptor: int, content: Union[bytes, memoryview], offset: int) -> None:
    """Write all of the content to its place in an open file."""
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def verified_parts(path: str) -> Dict[int, str]:
    """Return the digest of each part in a list of parts; none after a reboot: parts are not synced to disk."""
    try:
        with open(path) as log:
            lines = log.readlines()
    except FileNotFoundError:
        return {}
    if not lines or lines[0] != "boot %s\n" % boot_id():
        return {}
    found = (re.fullmatch(r"(\d{1,9}) ([0-9a-f]{64})\n", line) for line in lines[1:])
    return {int(line[1]): line[2] for line in found if line}


class Incoming:
    """The folder of one pack that is being received."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        try:
            with open(path_in(folder, "layout.json"), "rb") as file:
                layout = json.loads(file.read(MOST_LIST_BYTES))
        except FileNotFoundError:
            raise Refusal("no_layout", "no layout was announced") from None
        self.files: List[Tuple[str, int]] = [(name, size) for name, size in layout["files"] if size]
        self.empty: List[str] = [name for name, size in layout["files"] if not size]
        self.part_bytes: int = layout["part_bytes"]
        self.starts, self.total = [], 0
        for _, size in self.files:
            self.starts.append(self.total)
            self.total += size

    @property
    def parts(self) -> int:
        """Return the number of parts."""
        return -(-self.total // self.part_bytes)

    @property
    def verified(self) -> Dict[int, str]:
        """Return the digest of each part that has arrived; none after a reboot: parts are not synced to disk."""
        return verified_parts(path_in(self.folder, "verified"))

    def path(self, name: str) -> str:
        """Return the path at which a file is assembled."""
        return "%s/files/%s" % (self.folder, name)  # `os.path.join` would take 20 ms for ten thousand files.

    def size_of(self, index: int) -> int:
        """Return the length of a part in bytes; 0 if there is no such part."""
        return max(0, min(self.part_bytes, self.total - index * self.part_bytes))

    def places(self, index: int) -> Iterator[Tuple[str, int, int]]:
        """Yield the ranges of files that a part fills, as (file, offset in the file, number of bytes)."""
        start = index * self.part_bytes
        end, place = start + self.size_of(index), bisect_right(self.starts, start) - 1
        while start < end:
            name, size = self.files[place]
            length = min(end, self.starts[place] + size) - start
            yield name, start - self.starts[place], length
            start, place = start + length, place + 1


def receive(root: str, options: Json) -> Answer:
    """Receive parts from standard input until the end of the stream is announced."""
    signal.signal(signal.SIGALRM, refuse_stalled)
    inflate, count = inflater(options["codec"]), 0
    incoming = Incoming(path_in(root, FOLDER, options["sha256"]))
    log = os.open(path_in(incoming.folder, "verified"), os.O_WRONLY | os.O_APPEND)
    try:
        head = HEAD.unpack(read_exactly(HEAD.size))
        while head[0] != END:
            index, size, sent, sha256 = head
            if size != incoming.size_of(index) or not size or sent > 2 * incoming.part_bytes + 4096:
                raise Refusal("too_big", "part %d does not match the layout" % index)
            content = inflate(read_exactly(sent), size)
            signal.alarm(0)  # The alarm is for the sender; the disk may be slow.
            if len(content) != size or hashlib.sha256(content).digest() != sha256:
                raise Refusal("wrong_digest", "part %d did not arrive as it was sent" % index)
            store_part(incoming, index, content)
            os.write(log, b"%d %s\n" % (index, sha256.hex().encode()))
            count += 1
            head = HEAD.unpack(read_exactly(HEAD.size))
        return {"parts": count}, b""
    finally:
        signal.alarm(0)
        os.close(log)


def store_part(incoming: Incoming, index: int, content: bytes) -> None:
    """Store a part. If the disk is full, raise Refusal with the total size that is needed."""
    try:
        store(incoming, index, content)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        what = "there is no room for the upload of %d bytes" % incoming.total
        raise Refusal("disk_full", what, needed_bytes=incoming.total) from None


def store(incoming: Incoming, index: int, content: bytes) -> None:
    """Write a part to its places in the files."""
    view = memoryview(content)
    for name, offset, length in incoming.places(index):
        path = incoming.path(name)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:
            if not os.path.exists(path_in(incoming.folder, "layout.json")):
                raise Refusal("no_layout", "another pack is being received now") from None
            os.makedirs(os.path.dirname(path), exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            put_at(descriptor, view[:length], offset)
            view = view[length:]
        finally:
            os.close(descriptor)


def read_exactly(size: int) -> bytes:
    """Return `size` bytes of standard input. Raise Refusal if the input ends earlier or stalls."""
    signal.alarm(STALL_S)
    content = sys.stdin.buffer.read(size)
    if len(content) != size:
        raise Refusal("cut_stream", "the stream of parts is cut")
    return content


def refuse_stalled(*_: Any) -> None:
    """Raise Refusal, because the sender has sent nothing for STALL_S seconds."""
    raise Refusal("cut_stream", "nothing arrived for %d s" % STALL_S)
