"""The host keys of the user's own boxes, as each box showed its key at first use: `known_hosts.json` in the home.

A machine that gpurun rents is never in the file, because gpurun makes its key before it boots. The file is a JSON
object with entries `"[host]:port": "ssh-ed25519 AAAA…"`; for a box behind another host, `host` is "HOST by OTHER". A
file that cannot be read is an error and never an empty list: otherwise damaging it would make gpurun accept a new key.
"""

from __future__ import annotations

import json
import stat

from gpurun.core.errors import SetupError
from gpurun.core.filelock import exclusive
from gpurun.core.paths import Home, write_atomic
from gpurun.core.untrusted import read_object

_NAME = "known_hosts.json"


def find_host_key(home: Home, host: str, port: int) -> str | None:
    """Return the public key that a box showed at first use, as `type base64`; None for a box that was never used."""
    return _read(home).get(_format_host_port(host, port))


def remember_host(home: Home, host: str, port: int, public_line: str) -> None:
    """Store a box's public key (`type base64`, without a comment) in place of any earlier one."""
    kind, encoded, *_ = public_line.split()
    with exclusive(home.prepare().root / f".{_NAME}.lock"):
        kept = {**_read(home), _format_host_port(host, port): f"{kind} {encoded}"}
        write_atomic(home.root / _NAME, json.dumps(kept, indent=2, sort_keys=True).encode() + b"\n")


def _format_host_port(host: str, port: int) -> str:
    return f"[{host.lower()}]:{port}"


def _read(home: Home) -> dict[str, str]:
    path = home.root / _NAME
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o022:
            why, hint = "can be changed by other users", f"Check its content, then run chmod 600 {path}"
            raise SetupError("known_hosts.open_file", f"{path} {why}.", hint=hint)
        content = read_object(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _damaged_file_error(path, str(error)) from None
    if not all(isinstance(line, str) for line in content.values()):
        raise _damaged_file_error(path, "it is not a table of host keys")
    return content


def _damaged_file_error(path: object, why: str) -> SetupError:
    hint = "Restore it from a copy, or move it away and compare the key of each box again at its next use."
    return SetupError("known_hosts.damaged", f"{path} cannot be read: {why}.", hint=hint)
