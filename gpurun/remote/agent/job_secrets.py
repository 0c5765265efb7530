"""The values of --secret: outside of the run's folder, in memory where that can be, until the job has begun."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from contextlib import suppress

from gpurun.remote.agent.system import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict

    from gpurun.remote.agent.system import Answer, Json

MOST_BYTES = 1 << 20


def place(root: str) -> str:
    """Where they wait for the keeper."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    return os.path.join(folder, "gpurun-%d-%s" % (os.getuid(), hashlib.sha256(root.encode()).hexdigest()[:16]))


def secrets(root: str, options: Json) -> Answer:
    """Take them in from standard input: an object of names and values."""
    told = json.loads(sys.stdin.buffer.read(MOST_BYTES))
    if not isinstance(told, dict) or not all(isinstance(one, str) for pair in told.items() for one in pair):
        raise Refusal("usage", "secrets are names and values")
    drop_secrets(root)
    descriptor = os.open(place(root), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(told, file)
    return {"count": len(told)}, b""


def take_secrets(root: str) -> Dict[str, str]:
    """What was left for the job, which is there no more afterwards; a file of somebody else's is none."""
    try:
        descriptor = os.open(place(root), os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return {}
    with os.fdopen(descriptor) as file:
        is_ours = os.fstat(descriptor).st_uid == os.getuid()
        told: Dict[str, str] = json.loads(file.read(MOST_BYTES)) if is_ours else {}
    drop_secrets(root)
    return told


def drop_secrets(root: str) -> None:
    """Remove them, if they are there."""
    with suppress(OSError):
        os.unlink(place(root))
