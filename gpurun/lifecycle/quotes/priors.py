"""The file of what one's own runs have shown, as plans read it; learned.py writes it.

It is advice: one that cannot be read is said and ignored.
"""

from __future__ import annotations

from pydantic import ValidationError

from gpurun.core.paths import Home
from gpurun.planning.priors import Priors

__all__ = ["load_priors"]

_MOST_BYTES = 8 << 20


def load_priors(home: Home) -> tuple[Priors, str]:
    """What is known of earlier runs, and a sentence where their file is damaged; then nothing is known."""
    try:
        if home.priors.stat().st_size > _MOST_BYTES:
            return Priors(), _damaged(home, f"it has more than {_MOST_BYTES >> 20} MiB")
        return Priors.from_json(home.priors.read_bytes()), ""
    except FileNotFoundError:
        return Priors(), ""
    except OSError as error:
        return Priors(), _damaged(home, str(error.strerror))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return Priors(), _damaged(home, f"{where}: {first['msg']}" if where else first["msg"])


def _damaged(home: Home, why: str) -> str:
    from gpurun.ledger.untrusted import plain_line

    return f"What your own runs have shown ({home.priors}) cannot be read and is ignored: {plain_line(why, 120)}."
