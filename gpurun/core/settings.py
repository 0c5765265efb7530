"""Defaults a person may set once: flag > environment > project file > user file > built in.

The project file is `gpurun.toml` in the working folder, the user file `config.toml` in the home. Both hold the same
flat keys. Every value is returned with the place it came from, so that `gpurun config show` can say it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpurun.core.errors import SetupError, UsageError, did_you_mean
from gpurun.core.money import parse_usd
from gpurun.core.paths import Home

DEFAULTS: Mapping[str, str] = {
    "recipe": "gpt2-124m",
    "max_cost": "",
    "providers": "",
    "color": "auto",
    "on_interrupt": "ask",
    "uplink": "",
}
_CHOICES = {"color": ("auto", "always", "never"), "on_interrupt": ("ask", "detach", "stop")}


@dataclass(frozen=True)
class Setting:
    """A value and where it came from."""

    value: str
    source: str


def load_settings(home: Home, *, project: Path, environment: Mapping[str, str]) -> dict[str, Setting]:
    """All settings with their sources; what is written wrong is a UsageError with the place in it.

    A file that cannot be read is a SetupError.
    """
    found = {key: Setting(value, "built in") for key, value in DEFAULTS.items()}
    for path, label in (
        (home.config, f"user file {home.config}"),
        (project / "gpurun.toml", "project file gpurun.toml"),
    ):
        for key, value in _read(path).items():
            found[key] = Setting(value, label)
    for key in DEFAULTS:
        variable = f"GPURUN_{key.upper()}"
        if environment.get(variable):
            found[key] = Setting(environment[variable], f"environment {variable}")
    for key, setting in found.items():
        _check(key, setting)
    return found


def _check(key: str, setting: Setting) -> None:
    """Refuse a value that no verb could take, where it was written and not where it is used."""
    place = f"{key} in the {setting.source}"
    if key == "max_cost" and setting.value:
        parse_usd(setting.value, name=place, example="max_cost = 25")
    if key == "uplink" and setting.value and not _is_line(setting.value):
        what = f"{place} is {setting.value!r}, which is no speed of a line: a number of Mbit/s from 0.1 to 100000."
        raise UsageError("usage.uplink", what, hint="Write for instance uplink = 48, or leave it out: then it is what "
                         "earlier uploads have shown.")  # fmt: skip
    choices = _CHOICES.get(key, ())
    if choices and setting.value not in choices:
        what = f"{place} is {setting.value!r}, which is not one of {', '.join(choices)}."
        raise UsageError(f"usage.{key}", what, hint="Leave it out, or choose one of the three.")


def _is_line(text: str) -> bool:
    """Whether a text is a speed of a line that there is, in Mbit/s."""
    try:
        return 0.1 <= float(text) <= 100_000
    except ValueError:
        return False


def _read(path: Path) -> dict[str, str]:
    """One file's keys as text; a file that is not there has none."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        hint = "Make it a file that you can read, or move it away. Another home: --home DIR or GPURUN_HOME."
        raise SetupError("config.unreadable", f"{path} cannot be read: {error.strerror}.", hint=hint) from None
    except ValueError as error:  # No TOML, no UTF-8, or a number of more digits than Python reads.
        raise UsageError(
            "config.malformed",
            f"{path} is not valid TOML: {error}.",
            hint="Mend the line it names, or move the file away.",
        ) from None
    for key in table:
        if key not in DEFAULTS:
            hint = did_you_mean(key, DEFAULTS, otherwise=f"Known keys: {', '.join(DEFAULTS)}.")
            raise UsageError("config.unknown_key", f"{path} has the unknown key {key!r}.", hint=hint)
    return {key: ",".join(map(str, value)) if isinstance(value, list) else str(value) for key, value in table.items()}
