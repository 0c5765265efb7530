"""Settings that a user makes once. The first of these wins: flag, environment, project file, user file, default.

The user file is `config.toml` in the home, and may set every key. The project file is `gpurun.toml` in the working
folder, which may be a stranger's: it may only set PROJECT_KEYS, and it can lower the user's cap but not raise or set
it. Its tables [run.NAME] are named commands, which `jobs/commands/named_command.py` reads. Every value has its source,
which `gpurun config show` and the plan show.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gpurun.core.errors import SetupError, UsageError, did_you_mean
from gpurun.core.installed_files import recipe_file
from gpurun.core.money import parse_usd
from gpurun.core.paths import Home, read_regular

if TYPE_CHECKING:
    from gpurun.core.cluster import Cluster

DEFAULTS: Mapping[str, str] = {
    "recipe": "gpt2-124m",
    "max_cost": "",
    "providers": "",
    "color": "auto",
    "on_interrupt": "ask",
    "uplink": "",
    "keep_going": "false",
    "budget.month": "",
    "notify.url": "",
    "notify.exec": "",
}
_USER_FILE = "user file config.toml"
PROJECT_FILE = "gpurun.toml"
_OF_PROJECT = f"project file {PROJECT_FILE}"
PROJECT_KEYS = ("recipe", "max_cost", "color")
_METADATA = {"fd00:ec2::254", "100.100.100.200", "192.0.0.192"}
"""Metadata addresses besides 169.254.169.254, which is link-local: AWS over IPv6, Alibaba, Oracle."""
_CHOICES = {
    "color": ("auto", "always", "never"),
    "on_interrupt": ("ask", "detach", "stop"),
    "keep_going": ("true", "false"),
}


@dataclass(frozen=True)
class Setting:
    """The value of a setting, as text, and its source in words."""

    value: str
    source: str


def load_settings(home: Home, *, project: Path, environment: Mapping[str, str]) -> dict[str, Setting]:
    """Return all settings by key. `project` is the folder in which a project file may be.

    Raise UsageError, with the place, for a malformed setting, and SetupError for a file that cannot be read.
    """
    found = {key: Setting(value, "built in") for key, value in DEFAULTS.items()}
    found |= _read(home.config, _USER_FILE)
    if found["notify.exec"].value:
        _demand_unshared(home)
    for key, setting in _read(project / PROJECT_FILE, _OF_PROJECT).items():
        if key not in PROJECT_KEYS:
            what = f"The {_OF_PROJECT} sets {key}, but it may only set {', '.join(PROJECT_KEYS)}."
            raise UsageError("config.not_for_a_project", what, hint=f"Remove it, or set it in {home.config}.")
        found[key] = _choose_lower_cap(found[key], setting) if key == "max_cost" else setting
    for key in DEFAULTS:
        variable = variable_of(key)
        if environment.get(variable):
            found[key] = check_setting(key, environment[variable], f"environment {variable}")
    return found


def _demand_unshared(home: Home) -> None:
    """Raise SetupError if other users can change config.toml, which names a program that gpurun runs as this user."""
    for path in (home.root, home.config):
        if stat.S_IMODE(path.stat().st_mode) & 0o022:
            what = f"notify.exec in {home.config} does not run: other users can change {path}."
            raise SetupError("config.open_file", what, hint=f"Check its content, then run chmod go-w {path}")


def variable_of(key: str) -> str:
    """Return the environment variable that sets a key."""
    return f"GPURUN_{key.upper().replace('.', '_')}"


def _choose_lower_cap(own: Setting, of_project: Setting) -> Setting:
    """Return the smaller of two caps; if the user has none, no cap, because a stranger's folder must not set one."""
    if not own.value:
        return Setting("", f"built in: no cap, and the one in the {of_project.source} can only lower a cap of yours")
    return min(of_project, own, key=lambda setting: parse_usd(setting.value))


def check_setting(key: str, value: str, source: str) -> Setting:
    """Return a setting after checking its value. UsageError, with the source, for a value that no verb would accept."""
    place = f"{key} in the {source}"
    if key in ("max_cost", "budget.month") and value:
        parse_usd(value, name=place, example=f"{key} = 25")
    if key == "uplink" and value and not _is_upload_speed(value):
        what = f"{place} is {value!r}, which is not an upload speed: a number of Mbit/s from 0.1 to 100000."
        raise UsageError("usage.uplink", what, hint="Write for example uplink = 48, or leave it out: then gpurun uses "
                "the speed of earlier uploads.")  # fmt: skip
    if key == "notify.url" and value:
        _demand_notice_address(place, value)
    choices = _CHOICES.get(key, ())
    if choices and value not in choices:
        what = f"{place} is {value!r}, which is not one of {', '.join(choices)}."
        raise UsageError(f"usage.{key}", what, hint="Choose one of them, or leave it out.")
    return Setting(value, source)


def _demand_notice_address(place: str, text: str) -> None:
    """Raise UsageError for an address that must not get notices: it needs https or 127.0.0.1, and no password in it."""
    hint = 'Write for example url = "https://ntfy.sh/my-runs".'
    try:
        parts = urlsplit(text)
        host, is_known = parts.hostname or "", "@" in parts.netloc
    except ValueError:
        host, is_known = "", False
    shown = "" if is_known else f" is {text!r}"  # It may contain a password.
    if not host or (parts.scheme != "https" and (parts.scheme, host) != ("http", "127.0.0.1")):
        what = f"{place}{shown}: notices need an address that begins with https://."
        raise UsageError("usage.notify", what, hint=hint)
    if is_known:
        what = f"{place} contains a name or a password, which would show up in logs and process lists."
        raise UsageError("usage.notify", what, hint=f"{hint} A secret topic protects it as well.")
    if is_of_the_link(host):
        what = f"{place} is {text!r}: notices must not go to the address that gives a cloud's machines their keys."
        raise UsageError("usage.notify", what, hint=hint)


def is_of_the_link(host: str) -> bool:
    """Return whether an IP address is link-local, or a cloud's metadata address, which gives out keys."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_link_local or str(address) in _METADATA


def _is_upload_speed(text: str) -> bool:
    """Return whether a text is a possible upload speed in Mbit/s."""
    try:
        return 0.1 <= float(text) <= 100_000
    except ValueError:
        return False


def load_clusters(home: Home, broken: dict[str, UsageError] | None = None) -> dict[str, Cluster]:
    """Return the Slurm clusters of the user file, by name.

    An invalid table is a UsageError; with `broken`, the error is stored there by the table's name instead.
    """
    return _parse_clusters(_table(home.config).get("slurm", {}), broken)


def find_cluster(home: Home, name: str | None) -> Cluster:
    """Return the cluster with this name or, without a name, the only one; UsageError if there is no such cluster.

    An invalid table is an error only if it is the named one, or if no table is valid.
    """
    from gpurun.core.cluster import cluster_of

    broken = dict[str, UsageError]()
    known = load_clusters(home, broken)
    if fault := broken.get(name or "", None if known else next(iter(broken.values()), None)):
        raise fault
    return cluster_of(known, name)


def project_runs(project: Path) -> dict[str, Any]:
    """Return the tables [run.NAME] of a folder's gpurun.toml by name, unchecked; {} if there is no such file."""
    tables = _table(project / PROJECT_FILE).get("run", {})
    return tables if isinstance(tables, dict) else {}


def _parse_clusters(tables: object, broken: dict[str, UsageError] | None = None) -> dict[str, Cluster]:
    from gpurun.core.cluster import clusters_in

    return clusters_in(tables if isinstance(tables, dict) else {"": tables}, _USER_FILE, broken)


def _read(path: Path, source: str) -> dict[str, Setting]:
    """Return the checked settings of one file by key; {} if the file does not exist."""
    table = _table(path)
    if source == _USER_FILE and "slurm" in table:
        _parse_clusters(table.pop("slurm"))  # Only to raise an error for an invalid table.
    if source == _OF_PROJECT and isinstance(table.get("run"), dict):
        table.pop("run")  # `project_runs` reads it.
    for name, value in list(table.items()):
        if isinstance(value, dict):  # TOML turns a key with a dot into a table.
            table |= {f"{name}.{key}": inner for key, inner in table.pop(name).items()}
    for key in table:
        if key not in DEFAULTS:
            hint = did_you_mean(key, DEFAULTS, otherwise=f"Known keys: {', '.join(DEFAULTS)}.")
            raise UsageError("config.unknown_key", f"{path} has the unknown key {key!r}.", hint=hint)
    texts = {key: _format_value(value) for key, value in table.items()}
    return {key: check_setting(key, text, source) for key, text in texts.items()}


def _format_value(value: object) -> str:
    """Return a TOML value in the form that the environment variable of its key would have."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _table(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file; {} if it does not exist, SetupError or UsageError if it cannot be read."""
    try:
        return recipe_file.parse_toml(read_regular(path).decode("utf-8-sig"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        hint = "Make it a file that you can read, or move it away. To use another home: --home DIR or GPURUN_HOME."
        raise SetupError("config.unreadable", f"{path} cannot be read: {error.strerror}.", hint=hint) from None
    except ValueError as error:
        raise UsageError(
            "config.malformed",
            f"{path} is not valid TOML: {error}.",
            hint="Fix that line, or move the file away.",
        ) from None
