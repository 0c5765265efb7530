"""The host keys of boxes that the user has already, as they were seen at first use: `known_hosts.json` in the home.

A machine that gpurun rents never stands here: its key was made before it booted. The file is a table of
`"[host]:port": "ssh-ed25519 AAAA…"`; what is reached by another host has that beside its own name. A file that cannot
be read is an error, never an empty list: one who breaks it must not win a new "first use".
"""

from __future__ import annotations

import json
import stat

from gpurun.core.errors import SetupError
from gpurun.core.filelock import exclusive
from gpurun.core.paths import Home, write_atomic
from gpurun.core.untrusted import read_object

_NAME = "known_hosts.json"


def known_host(home: Home, host: str, port: int) -> str | None:
    """The public key that a box showed at first use, as `type base64`; None for a box that was never used."""
    return _read(home).get(_key(host, port))


def remember_host(home: Home, host: str, port: int, public_line: str) -> None:
    """Keep a box's public key (`type base64`, a comment is dropped) in the place of any earlier one."""
    kind, encoded, *_ = public_line.split()
    with exclusive(home.prepare().root / f".{_NAME}.lock"):
        kept = {**_read(home), _key(host, port): f"{kind} {encoded}"}
        write_atomic(home.root / _NAME, json.dumps(kept, indent=2, sort_keys=True).encode() + b"\n")


def _key(host: str, port: int) -> str:
    return f"[{host.lower()}]:{port}"


def _read(home: Home) -> dict[str, str]:
    path = home.root / _NAME
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o022:
            why, hint = "can be written by others", f"Check what is in it, then: chmod 600 {path}"
            raise SetupError("known_hosts.open_file", f"{path} {why}.", hint=hint)
        told = read_object(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from None
    if not all(isinstance(line, str) for line in told.values()):
        raise _damaged(path, "it is not a table of host keys")
    return told


def _damaged(path: object, why: str) -> SetupError:
    hint = "Put it back from a copy; or move it away, and compare each box's key again at its next use."
    return SetupError("known_hosts.damaged", f"{path} cannot be read: {why}.", hint=hint)
