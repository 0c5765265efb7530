"""Unpacking: what is shipped comes in whole and verified, or nothing of it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import tarfile

from gpurun.machine.agent.decompress import decompressed
from gpurun.machine.agent.files import MOST_JSON_BYTES, at, locked, read, sync_folder, write
from gpurun.machine.agent.protocol import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List, Tuple, Type

    from gpurun.machine.agent.protocol import Answer, Json

MOST_FILES = 100_000
STALL_S = 120


def unpack(root: str, options: Json) -> Answer:
    """Take the pack in whole, or leave nothing of it."""
    limit, incoming = int(options["limit"]), at(root, ".incoming")
    locked(root, "unpack.lock", STALL_S + 10)  # a sender that was cut off is given up by then
    signal.signal(signal.SIGALRM, stalled)
    signal.alarm(STALL_S)
    shutil.rmtree(incoming, ignore_errors=True)
    source, errors = decompressed(options["codec"])
    damaged: Tuple[Type[Exception], ...] = (tarfile.TarError, *errors)
    try:
        free = shutil.disk_usage(root).free
        if limit > free:
            raise Refusal("disk_full", "%d bytes are needed, %d are free" % (limit, free), needed_bytes=limit)
        os.mkdir(incoming)
        found, manifest = receive(source, incoming, limit)
        return settle(root, incoming, found, manifest), b""
    except damaged as error:
        raise Refusal("cut_stream", "the pack is damaged or cut: %s" % error) from None
    finally:
        signal.alarm(0)
        shutil.rmtree(incoming, ignore_errors=True)


def receive(source: Any, incoming: str, limit: int) -> Tuple[List[Json], bytes]:
    """Take a tar stream in; what was written, and the manifest that ended the stream."""
    found: List[Json] = []
    total, manifest = 0, b""
    with tarfile.open(fileobj=source, mode="r|", bufsize=1 << 20) as tar:
        for member in tar:
            signal.alarm(STALL_S)
            content = tar.extractfile(member) if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) else None
            if content is None or member.issparse():
                raise Refusal("not_regular", "the pack's entry %r is no regular file" % member.name)
            if manifest or len(found) >= MOST_FILES:
                raise Refusal("too_many", "the pack has more entries than it may have")
            if member.name == ".manifest.json":
                manifest = content.read(MOST_JSON_BYTES)
                continue
            total += member.size
            if total > limit:
                raise Refusal("too_big", "the pack holds more than the %d bytes announced" % limit)
            path = target(incoming, member.name)
            found.append({"name": member.name, "bytes": member.size, "sha256": store(content, path)})
    while source.read(1 << 20):
        signal.alarm(STALL_S)
    return found, manifest


def target(incoming: str, name: str) -> str:
    """Where an entry of the pack goes; a name that is not plainly inside bundle/ or data/ is a refusal."""
    parts = name.split("/")
    plain = all(part not in ("", ".", "..") and part.isprintable() and "\\" not in part for part in parts)
    if not plain or len(parts) < 2 or parts[0] not in ("bundle", "data"):
        raise Refusal("bad_name", "the pack has the entry %r" % name)
    os.makedirs(at(incoming, *parts[:-1]), exist_ok=True)
    return at(incoming, *parts)


def store(source: Any, path: str) -> str:
    """Write one new file while hashing it; its sha256."""
    digest = hashlib.sha256()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    except FileExistsError:
        raise Refusal("duplicate", "the pack has %r twice" % os.path.basename(path)) from None
    with open(descriptor, "wb", buffering=0) as out:
        for block in iter(lambda: source.read(1 << 20), b""):
            signal.alarm(STALL_S)
            digest.update(block)
            view = memoryview(block)
            while view:
                view = view[out.write(view) :]
        signal.alarm(0)  # the disk may take its time
        os.fsync(descriptor)
        signal.alarm(STALL_S)
    return digest.hexdigest()


def settle(root: str, incoming: str, found: List[Json], manifest: bytes) -> Json:
    """Check what came against its manifest and rename it into place; `shipped.json` is the last thing written."""
    if not manifest:
        raise Refusal("cut_stream", "the pack ended before its manifest")
    listed = {entry["name"]: entry for entry in json.loads(manifest)["files"]}
    if listed != {entry["name"]: entry for entry in found}:
        names = sorted({e["name"] for e in found} ^ set(listed)) or [e["name"] for e in found if listed[e["name"]] != e]
        raise Refusal("wrong_digest", "%d files are not as the manifest has them: %s" % (len(names), names[:3]))
    shipped = {"files": len(found), "bytes": sum(e["bytes"] for e in found)}
    shipped["manifest_sha256"] = hashlib.sha256(manifest).hexdigest()
    if read(root, "agent", "shipped.json") == shipped:
        return shipped
    if read(root, "agent", "job.json"):
        raise Refusal("started", "a job was started here; its code and data are not replaced")
    if os.path.exists(at(root, "agent", "shipped.json")):
        os.unlink(at(root, "agent", "shipped.json"))
    for name in ("bundle", "data"):
        shutil.rmtree(at(root, name), ignore_errors=True)
        if os.path.isdir(at(incoming, name)):
            os.rename(at(incoming, name), at(root, name))
    sync_folder(root)
    write(at(root, "agent", "shipped.json"), shipped)
    return shipped


def stalled(*_: Any) -> None:
    """Give up on a sender that is gone without a word."""
    raise Refusal("cut_stream", "nothing came for %d s" % STALL_S)
