"""What the user wants of a running supervisor: one small file that only gets stronger."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Literal

from gpurun.core.errors import SetupError
from gpurun.core.filelock import exclusive
from gpurun.core.paths import RunFolder, read_regular, write_atomic

How = Literal["save", "now", "destroy"]
_HOW: dict[str, How] = {"save": "save", "now": "now", "destroy": "destroy"}
STRENGTH: dict[str, int] = {"": 0, "save": 1, "now": 2, "destroy": 3}


@dataclass(frozen=True)
class StopRequest:
    """How to stop: `save` first, `now` without a checkpoint, or `destroy` without collecting; and who asks why.

    `same_account`: the user states that the key used now is of the account that rented the machine. `signal` names
    the one that it answers ("SIGINT", "SIGTERM"), if it does. `leaves`: the user was told what does not come home, and
    gives it up.
    """

    how: How
    by: str
    reason: str
    same_account: bool = False
    signal: str = ""
    leaves: bool = False


def read_stop_request(folder: RunFolder) -> StopRequest | None:
    """The request that stands, if any. A file that cannot be read is the mildest one: somebody wanted a stop."""
    try:
        said = json.loads(read_regular(folder.control))
        how, same_account = _HOW[said["how"]], said.get("same_account") is True
        return StopRequest(
            how,
            by=str(said["by"]),
            reason=str(said["reason"]),
            same_account=same_account,
            signal=str(said.get("signal", "")),
            leaves=said.get("leaves") is True,
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return StopRequest("save", by="user", reason=f"{folder.control.name} cannot be understood")
    except OSError as error:  # Another user's, say: `sudo gpurun stop`. Whether it is there can be seen all the same.
        unread = StopRequest("save", by="user", reason=f"{folder.control.name} cannot be read: {error.strerror}")
        return unread if os.path.exists(folder.control) else None


def ask_to_stop(
    folder: RunFolder, how: How, *, by: str, reason: str, same_account: bool = False, signal: str = "",
    leaves: bool = False,
) -> None:  # fmt: skip
    """Ask the supervisor to stop the run; a weaker request than the one that stands changes nothing.

    A folder that does not take it is a SetupError: nobody was asked.
    """
    wanted = StopRequest(how, by=by, reason=reason, same_account=same_account, signal=signal, leaves=leaves)
    try:
        with exclusive(folder.path / ".control.lock"):  # Two terminals may ask at the same moment.
            standing = read_stop_request(folder)
            if standing is None or _strength(wanted) > _strength(standing):
                write_atomic(folder.control, json.dumps(asdict(wanted)).encode())
    except OSError as error:
        raise SetupError(
            "control.unwritable",
            f"{folder.control} cannot be written: {error.strerror}.",
            hint=f"Make room or give yourself access, and try again; `gpurun destroy {folder.name}` does without.",
        ) from error


def _strength(request: StopRequest) -> tuple[int, bool]:
    return STRENGTH[request.how], request.same_account
