"""Taking parts in: each is verified, written to its place and noted; a cut costs what was under way, and no more."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import struct
import sys

from gpurun.machine.agent.decompress import inflater
from gpurun.machine.agent.files import at
from gpurun.machine.agent.incoming import FOLDER, Incoming
from gpurun.machine.agent.protocol import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpurun.machine.agent.protocol import Answer, Json

# Before each part: its index, its length, its length as sent, its sha256. An index without end ends the stream.
HEAD = struct.Struct(">QII32s")
END = (1 << 64) - 1
STALL_S = 120


def receive(root: str, options: Json) -> Answer:
    """Take parts in from standard input until its end is told."""
    signal.signal(signal.SIGALRM, stalled)
    head = HEAD.unpack(exactly(HEAD.size))  # whoever is early waits here until `begin` has answered
    if head[0] == END:
        return {"parts": 0}, b""
    inflate, count = inflater(options["codec"]), 0  # not before: whoever is early may have guessed another codec
    incoming = Incoming(at(root, FOLDER, options["sha256"]))
    log = os.open(at(incoming.folder, "verified"), os.O_WRONLY | os.O_APPEND)
    try:
        while head[0] != END:
            index, size, sent, sha256 = head
            if size != incoming.size_of(index) or not size or sent > 2 * incoming.part_bytes + 4096:
                raise Refusal("too_big", "part %d is not as the layout has it" % index)
            content = inflate(exactly(sent), size)
            signal.alarm(0)  # the disk may take its time
            if len(content) != size or hashlib.sha256(content).digest() != sha256:
                raise Refusal("wrong_digest", "part %d did not arrive as it was sent" % index)
            keep(incoming, index, content)
            os.write(log, b"%d %s\n" % (index, sha256.hex().encode()))
            count += 1
            head = HEAD.unpack(exactly(HEAD.size))
        return {"parts": count}, b""
    finally:
        signal.alarm(0)
        os.close(log)


def keep(incoming: Incoming, index: int, content: bytes) -> None:
    """Store a part; a disk that is full is a refusal with the size that is needed in all."""
    try:
        store(incoming, index, content)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        what = "there is no room for the %d bytes that come in" % incoming.total
        raise Refusal("disk_full", what, needed_bytes=incoming.total) from None


def store(incoming: Incoming, index: int, content: bytes) -> None:
    """Write a part to its place in the files."""
    view = memoryview(content)
    for name, offset, length in incoming.places(index):
        path = incoming.path(name)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:
            if not os.path.exists(at(incoming.folder, "layout.json")):
                raise Refusal("no_layout", "another pack is on its way in by now") from None
            os.makedirs(os.path.dirname(path), exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            while length:
                written = os.pwrite(descriptor, view[:length], offset)
                view, offset, length = view[written:], offset + written, length - written
        finally:
            os.close(descriptor)


def exactly(size: int) -> bytes:
    """So many bytes of standard input; an end before that is a refusal."""
    signal.alarm(STALL_S)
    content = sys.stdin.buffer.read(size)
    if len(content) != size:
        raise Refusal("cut_stream", "the stream of parts is cut")
    return content


def stalled(*_: Any) -> None:
    """Give up on a sender that is gone without a word."""
    raise Refusal("cut_stream", "nothing came for %d s" % STALL_S)
