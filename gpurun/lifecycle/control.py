"""What the user wants of a running supervisor: one small file that only gets stronger."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Literal

from gpurun.core.errors import SetupError
from gpurun.core.exclusive import exclusive
from gpurun.core.paths import RunFolder, write_atomic

How = Literal["save", "now", "destroy"]
_HOW: dict[str, How] = {"save": "save", "now": "now", "destroy": "destroy"}
STRENGTH: dict[str, int] = {"": 0, "save": 1, "now": 2, "destroy": 3}


@dataclass(frozen=True)
class Wish:
    """How to stop: `save` first, `now` without a checkpoint, or `destroy` without collecting; and who asks why.

    `same_account`: the user vouches that the key used now is of the account that rented the machine.
    """

    how: How
    by: str
    reason: str
    same_account: bool = False


def read_wish(folder: RunFolder) -> Wish | None:
    """The wish that stands, if any. A file that cannot be read is the mildest one: somebody wanted a stop."""
    try:
        said = json.loads(folder.control.read_bytes())
        how, vouched = _HOW[said["how"]], said.get("same_account") is True
        return Wish(how, by=str(said["by"]), reason=str(said["reason"]), same_account=vouched)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return Wish("save", by="user", reason=f"{folder.control.name} cannot be understood")
    except OSError as error:  # Another user's, say: `sudo gpurun stop`. Whether it is there can be seen all the same.
        unread = Wish("save", by="user", reason=f"{folder.control.name} cannot be read: {error.strerror}")
        return unread if os.path.exists(folder.control) else None


def wish(folder: RunFolder, how: How, *, by: str, reason: str, same_account: bool = False) -> None:
    """Ask the supervisor to stop the run; a weaker wish than the one that stands changes nothing.

    A folder that does not take it is a SetupError: nobody was asked.
    """
    wanted = Wish(how, by=by, reason=reason, same_account=same_account)
    try:
        with exclusive(folder.path / ".control.lock"):  # Two terminals may wish at the same moment.
            standing = read_wish(folder)
            if standing is None or _strength(wanted) > _strength(standing):
                write_atomic(folder.control, json.dumps(asdict(wanted)).encode())
    except OSError as error:
        raise SetupError(
            "control.unwritable",
            f"{folder.control} cannot be written: {error.strerror}.",
            hint=f"Make room or give yourself access, and try again; `gpurun destroy {folder.name}` does without.",
        ) from error


def _strength(wish: Wish) -> tuple[int, bool]:
    return STRENGTH[wish.how], wish.same_account
