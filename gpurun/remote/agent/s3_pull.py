"""Pulls files by URLs, in parallel ranges: staged files from a bucket, public files from the web.

The order comes on standard input. gpurun/remote/s3/__init__.py describes its content, and when a part or a file counts
as pulled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import time

from gpurun.remote.agent.decompress import inflater
from gpurun.remote.agent.login_environment import remembered_variables
from gpurun.remote.agent.presigned import UrlRefused, open_url, read_range
from gpurun.remote.agent.public_files import opened_public
from gpurun.remote.agent.receive import (
    PULLED,
    WAIT_S,
    begin_list,
    check_room,
    hash_file,
    held_files,
    put_at,
    read_list,
    verified_parts,
)
from gpurun.remote.agent.system import MOST_PART_BYTES, Refusal, locked, path_in

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, List, Optional, Tuple

    from gpurun.remote.agent.system import Answer, Json

LANES = 8
RANGE_BYTES = 8 << 20
TELL_S = 0.5
TRIES, PAUSE_S = 3, 0.5
PUBLIC = "0" * 64
"""The digest of a part if only the digest of the whole file is known."""
# Permanent faults of a URL, which are not retried.
FINAL = ("expired", "denied", "absent", "altered", "no_ranges", "not_public")


def pull(root: str, options: Json) -> Answer:
    """Pull the missing files of an order. Lines of progress follow, then a line with the files that have arrived."""
    order = json.loads(read_list(options))
    os.environ.update(remembered_variables(root))  # urllib uses the login's proxy variables.
    held = locked(root, "unpack.lock", WAIT_S)
    os.makedirs(path_in(root, PULLED), exist_ok=True)
    here = held_files(root)
    files = [PulledFile(root, file, here, order.get("origin") or "") for file in order["files"]]
    check_room(root, sum(file.missing_bytes for file in files))
    return {"files": len(files)}, Pulling(files, held).lines()


class PulledFile:
    """One file of the order, and how much of it has arrived."""

    def __init__(self, root: str, entry: Json, here: Dict[str, Tuple[str, int]], origin: str = "") -> None:
        sha256, size, part_bytes = entry["sha256"], entry["bytes"], entry["part_bytes"]
        self.is_public = entry["parts"] is None
        parts: List[Tuple[int, str]] = entry["parts"] or []
        if self.is_public:
            parts = [(min(part_bytes, size - start), PUBLIC) for start in range(0, size, part_bytes)]
        if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
            raise Refusal("usage", "%r is not a digest" % sha256[:80])
        self.sha256: str = sha256
        self.bytes: int = size
        self.part_bytes: int = part_bytes
        self.url: str = entry["url"]
        # A hub in the user's private network is used as it was named. Other addresses must be public and https.
        is_plain = not self.is_public or (origin and self.url.startswith(origin + "/"))
        self.open = open_url if is_plain else opened_public
        self.digests: List[str] = [digest for _, digest in parts]
        self.starts: List[int] = [0]
        for sent, _ in parts:
            self.starts.append(self.starts[-1] + sent)
        if not 0 < self.part_bytes <= MOST_PART_BYTES or len(parts) != -(-self.bytes // self.part_bytes):
            raise Refusal("usage", "the sizes of %d parts do not add up to %d bytes" % (len(parts), self.bytes))
        self.inflate = None if self.is_public else inflater(entry["codec"])
        self.path = path_in(root, PULLED, sha256)
        self.failed: Optional[Tuple[str, str]] = None
        self.left = set(range(len(parts)))
        # A file that an earlier pack left is not pulled either; `begin` will report that file.
        path = here[sha256][0] if sha256 in here else None
        self.is_here = path is not None and (path == self.path or hash_file(path) == sha256)
        if self.is_here:
            self.left = set()
        elif os.path.exists(self.path + ".part"):
            verified = verified_parts(self.path + ".parts")
            self.left = {index for index in self.left if verified.get(index) != self.digests[index]}
        if len(self.left) == len(parts):
            begin_list(self.path + ".parts")
            open(self.path + ".part", "wb").close()

    @property
    def missing_bytes(self) -> int:
        """Return how many bytes of disk the file still needs at most."""
        return min(self.bytes, len(self.left) * self.part_bytes)

    def ranges(self) -> Iterator[Tuple[int, int]]:
        """Yield ranges of consecutive missing parts, each of which is one request."""
        first = None
        for index in range(len(self.digests) + 1):
            is_wanted = index in self.left
            if first is not None and (not is_wanted or self.starts[index] - self.starts[first] >= RANGE_BYTES):
                yield first, index
                first = None
            if is_wanted and first is None:
                first = index

    def take(self, index: int, data: bytes) -> bool:
        """Store one part. Return False if it does not have the right digest."""
        size = min(self.part_bytes, self.bytes - index * self.part_bytes)
        try:
            content = self.inflate(data, size) if self.inflate else data
        except Refusal:
            return False
        if len(content) != size or self.digests[index] not in (PUBLIC, hashlib.sha256(content).hexdigest()):
            return False
        with open(self.path + ".part", "r+b", buffering=0) as out:
            put_at(out.fileno(), content, index * self.part_bytes)
        with open(self.path + ".parts", "ab", buffering=0) as log:
            log.write(b"%d %s\n" % (index, self.digests[index].encode()))
        return True


class Pulling:
    """The files of one order in transfer, and the threads that pull them."""

    def __init__(self, files: List[PulledFile], held: int) -> None:
        self.files, self.held = files, held
        self.todo = [(file, first, end) for file in files for first, end in file.ranges()]
        self.todo.reverse()
        self.lock = threading.Lock()
        self.came = 0
        self.trouble: Optional[Refusal] = None

    def lines(self) -> Iterator[bytes]:
        """Pull the files, and yield progress."""
        for file in self.files:
            self.settle(file)
        threads = [threading.Thread(target=self.work, daemon=True) for _ in range(min(LANES, len(self.todo)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(TELL_S)
                yield self.line({"bytes": self.came})
        os.close(self.held)
        if self.trouble is not None:
            yield self.line({"bytes": self.came, "error": self.trouble.error})
            return
        failed = [{"sha256": f.sha256, "code": f.failed[0], "message": f.failed[1]} for f in self.files if f.failed]
        yield self.line({"bytes": self.came, "pulled": [f.sha256 for f in self.files if f.is_here], "failed": failed})

    def line(self, event: Json) -> bytes:
        """Return one line of the reply, after sending the lines before it."""
        import sys

        sys.stdout.buffer.flush()
        return json.dumps(event).encode() + b"\n"

    def work(self) -> None:
        """Pull one range after another, until none is left or the disk fails."""
        while self.trouble is None:
            with self.lock:
                if not self.todo:
                    return
                file, first, end = self.todo.pop()
            if file.failed is None:
                try:
                    self.bring(file, first, end)
                except OSError as error:
                    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                    needed: Dict[str, Any] = {"needed_bytes": sum(f.bytes for f in self.files)} if full else {}
                    self.trouble = Refusal("disk_full" if full else "os_error", str(error), **needed)

    def bring(self, file: PulledFile, first: int, end: int) -> None:
        """Pull one range of a file. After a permanent or repeated fault, give up the whole file."""
        tries = 0
        while first < end and file.failed is None:
            before = first
            try:
                for data in read_range(file.url, file.starts[first : end + 1], file.open):
                    if not file.take(first, data):
                        raise UrlRefused("altered", "part %d has another digest than the uploaded one" % first)
                    with self.lock:
                        self.came += len(data)
                        file.left.discard(first)
                    first += 1
            except UrlRefused as refused:
                tries = 1 if first > before else tries + 1
                # A part is requested twice before it counts as altered, because the transfer may have damaged it.
                final = refused.code in FINAL and not (refused.code == "altered" and tries < 2)
                if final or tries >= TRIES:
                    file.failed = (refused.code, str(refused))
                    return
                time.sleep(PAUSE_S * tries)
        with self.lock:
            self.settle(file)

    def settle(self, file: PulledFile) -> None:
        """Rename a complete file to its digest. A public file is renamed only if its digest is right."""
        if file.left or file.is_here or file.failed is not None:
            return
        if file.is_public and hash_file(file.path + ".part") != file.sha256:
            for name in (file.path + ".part", file.path + ".parts"):
                os.unlink(name)
            file.failed = ("altered", "its digest is not the expected one")
            return
        os.rename(file.path + ".part", file.path)
        file.is_here = True
