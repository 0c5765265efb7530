"""The user's request to a supervisor to stop: one small file in the run folder. A request can only become stronger."""

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
    """A request to stop a run: `how` is "save" (a checkpoint first), "now" (without it) or "destroy" (no download).

    `same_account` means that the user confirms that the present key belongs to the account that rented the machine.
    `signal` names the signal behind the request ("SIGINT", "SIGTERM"), if any. `leaves` means that the user has seen
    which files do not come home, and gives them up.
    """

    how: How
    by: str
    reason: str
    same_account: bool = False
    signal: str = ""
    leaves: bool = False


def read_stop_request(folder: RunFolder) -> StopRequest | None:
    """Return the current request; None if there is none. A file that cannot be read counts as the weakest request."""
    try:
        content = json.loads(read_regular(folder.control))
        how, same_account = _HOW[content["how"]], content.get("same_account") is True
        return StopRequest(
            how,
            by=str(content["by"]),
            reason=str(content["reason"]),
            same_account=same_account,
            signal=str(content.get("signal", "")),
            leaves=content.get("leaves") is True,
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return StopRequest("save", by="user", reason=f"{folder.control.name} cannot be understood")
    except OSError as error:  # For example, `sudo gpurun stop` wrote a file that only root can read.
        unread = StopRequest("save", by="user", reason=f"{folder.control.name} cannot be read: {error.strerror}")
        return unread if os.path.exists(folder.control) else None


def ask_to_stop(
    folder: RunFolder, how: How, *, by: str, reason: str, same_account: bool = False, signal: str = "",
    leaves: bool = False,
) -> None:  # fmt: skip
    """Ask the supervisor to stop the run; a weaker request than the current one changes nothing.

    Raise SetupError if the folder cannot be written; then the supervisor gets no request.
    """
    request = StopRequest(how, by=by, reason=reason, same_account=same_account, signal=signal, leaves=leaves)
    try:
        with exclusive(folder.path / ".control.lock"):  # Two terminals may ask at the same moment.
            standing = read_stop_request(folder)
            if standing is None or _rank_request(request) > _rank_request(standing):
                write_atomic(folder.control, json.dumps(asdict(request)).encode())
    except OSError as error:
        raise SetupError(
            "control.unwritable",
            f"{folder.control} cannot be written: {error.strerror}.",
            hint=f"Free disk space or give yourself access, then try again; `gpurun destroy {folder.name}` also works.",
        ) from error


def _rank_request(request: StopRequest) -> tuple[int, bool]:
    return STRENGTH[request.how], request.same_account
