"""`--set table.key=value`: one key of a recipe replaced on the command line."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from gpurun.core.errors import UsageError, did_you_mean
from gpurun.planning.tables import REHEARSED, TABLES

_BARE_WORD = re.compile(r"[A-Za-z0-9_./:~+-]+")


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Read `table.key=value` into its path and its value.

    A key alone will do where only one table has it; `rehearsal.` in front means the rehearsal's. The value is TOML; a
    bare word is a string. Raises UsageError for what cannot be read and for a key that no table has.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise UsageError(
            "set.malformed",
            f"--set {text!r} is not of the form key=value.",
            hint="Write for instance --set train.steps=500",
        )
    return _path_of(name.strip()), _value_of(value.strip(), text)


def _value_of(value: str, text: str) -> Any:
    """A TOML value, or the word itself."""
    try:
        parsed = tomllib.loads(f"value = {value}")
    except ValueError:  # No TOML, or a number of more digits than Python reads.
        parsed = {}
    if parsed.keys() == {"value"}:
        return parsed["value"]
    if _BARE_WORD.fullmatch(value):
        return value
    raise UsageError(
        "set.malformed",
        f"The value in --set {text!r} is not TOML.",
        hint="""Put a text in quotes, twice over for the shell: --set 'data.source="my texts"'""",
    )


def _path_of(name: str) -> tuple[str, ...]:
    """The path of a key: (table, key), or ("rehearsal", …)."""
    paths = _paths()
    if name in paths:
        return paths[name]
    bare = [path for path in paths.values() if path[-1] == name and path[0] != "rehearsal"]
    if len(bare) == 1:
        return bare[0]
    if bare:
        both = " or ".join(".".join(path) for path in bare)
        raise UsageError("set.ambiguous", f"--set {name}: more than one table has it.", hint=f"Say which: {both}.")
    names = [*paths, *(path[-1] for path in paths.values())]
    hint = did_you_mean(name, names, otherwise="gpurun recipes show NAME lists the keys.")
    raise UsageError("set.unknown_key", f"No recipe has a key {name!r}.", hint=hint)


def _paths() -> dict[str, tuple[str, ...]]:
    """Every key that may be set, by its dotted name."""
    plain = [(table, key) for table, fields in TABLES.items() for key in fields.model_fields]
    rehearsed = [("rehearsal", *path) for path in plain if path[0] in REHEARSED]
    return {".".join(path): path for path in [*plain, *rehearsed, ("rehearsal", "processes")]}
