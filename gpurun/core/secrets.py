"""Secret strings that are never shown, and the environment that a child process may get."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# The variables that a child process needs. It gets no others, above all no cloud keys.
_PASSED_ON = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LANGUAGE",
    "LC_ALL",
    "LC_CTYPE",
    "TMPDIR",
    "TZ",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTHONDONTWRITEBYTECODE",
)


class Secret:
    """A string that never shows its value: `str` and `repr` print dots."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """Return the value, for code that sends or stores it."""
        return self._value

    def __repr__(self) -> str:
        return "•••"

    __str__ = __repr__

    def __bool__(self) -> bool:
        return bool(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a child process: the allowed variables of this process, plus `extra`."""
    kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {**kept, **(extra or {})}


@contextmanager
def only_for_children(*also: str) -> Iterator[None]:
    """Reduce this process's environment to a child's during the `with` block, for a library that starts programs.

    `also` names variables that the library reads itself; they stay.
    """
    whole = dict(os.environ)
    known = child_environment({name: whole[name] for name in also if name in whole})
    os.environ.clear()
    os.environ.update(known)
    try:
        yield
    finally:
        os.environ.update(whole)
