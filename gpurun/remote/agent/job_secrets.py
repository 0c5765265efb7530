"""Stores the values of --secret until the job has started: outside the run's folder, in memory if possible."""

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


def secrets_path(root: str) -> str:
    """Return the path of the file in which the secrets are stored for the keeper."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    return os.path.join(folder, "gpurun-%d-%s" % (os.getuid(), hashlib.sha256(root.encode()).hexdigest()[:16]))


def secrets(root: str, options: Json) -> Answer:
    """Store the secrets from standard input, an object of names and values. Return how many there are."""
    values = json.loads(sys.stdin.buffer.read(MOST_BYTES))
    if not isinstance(values, dict) or not all(isinstance(text, str) for pair in values.items() for text in pair):
        raise Refusal("usage", "secrets must be names and values")
    drop_secrets(root)
    descriptor = os.open(secrets_path(root), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(values, file)
    return {"count": len(values)}, b""


def take_secrets(root: str) -> Dict[str, str]:
    """Return the secrets that were stored for the job, and delete them. A file of another user is ignored."""
    try:
        descriptor = os.open(secrets_path(root), os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return {}
    with os.fdopen(descriptor) as file:
        is_ours = os.fstat(descriptor).st_uid == os.getuid()
        values: Dict[str, str] = json.loads(file.read(MOST_BYTES)) if is_ours else {}
    drop_secrets(root)
    return values


def drop_secrets(root: str) -> None:
    """Delete the stored secrets, if they exist."""
    with suppress(OSError):
        os.unlink(secrets_path(root))
