"""The values of --secret: outside the run's folder, in memory if possible, until the job has started."""

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
    """Return where they wait for the keeper."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    return os.path.join(folder, "gpurun-%d-%s" % (os.getuid(), hashlib.sha256(root.encode()).hexdigest()[:16]))


def secrets(root: str, options: Json) -> Answer:
    """Read them from standard input: an object of names and values."""
    values = json.loads(sys.stdin.buffer.read(MOST_BYTES))
    if not isinstance(values, dict) or not all(isinstance(one, str) for pair in values.items() for one in pair):
        raise Refusal("usage", "secrets must be names and values")
    drop_secrets(root)
    descriptor = os.open(place(root), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(values, file)
    return {"count": len(values)}, b""


def take_secrets(root: str) -> Dict[str, str]:
    """Return the secrets left for the job, and delete them; a file of another user is ignored."""
    try:
        descriptor = os.open(place(root), os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return {}
    with os.fdopen(descriptor) as file:
        is_ours = os.fstat(descriptor).st_uid == os.getuid()
        values: Dict[str, str] = json.loads(file.read(MOST_BYTES)) if is_ours else {}
    drop_secrets(root)
    return values


def drop_secrets(root: str) -> None:
    """Delete them, if they exist."""
    with suppress(OSError):
        os.unlink(place(root))
