"""Slurm clusters, as tables `[slurm.NAME]` of config.toml describe them, and the interface of a login node.

Each value becomes part of a command line on the login node, or of a batch script. A value that the shell could
interpret is therefore refused, with the place in which the user wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gpurun.core.errors import UsageError, did_you_mean
from gpurun.core.money import Micros, parse_usd

_FREE = Micros(0)
LOCAL = "local"
"""The value of `host` which means that this computer is the login node of the cluster, and has sbatch."""

FORBIDDEN = ("--time", "--export", "--wrap", "--job-name", "--array", "--wait")
_SHORT = ("-t", "-J", "-a", "-W")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f'\"\\`]")
_EXAMPLE = '[slurm.lab] host = "login.example.org", user = "me", workdir = "/scratch/me/gpurun"'


@dataclass(frozen=True)
class LoginNodeResult:
    """The result of a command on a login node."""

    exit_code: int
    stdout: str
    stderr: str


class NoAnswer(Exception):
    """The login node did not answer, so the command may or may not have run. `hint` is a remedy for a known cause."""

    def __init__(self, what: str, *, hint: str = "") -> None:
        super().__init__(what)
        self.hint = hint


class LoginNode(Protocol):
    """The interface of a login node, on which gpurun runs the commands of a cluster."""

    def run(self, argv: Sequence[str], stdin: bytes = b"", *, timeout_s: float = 60.0) -> LoginNodeResult:
        """Run a command and return its result; NoAnswer if its end is unknown, SetupError if no command can run."""
        ...


@dataclass(frozen=True)
class Cluster:
    """One table `[slurm.NAME]`: how to reach the login node, and what each job gets.

    `transport` is `openssh` if `host` is an entry of ~/.ssh/config, which the user's own ssh then reaches. `workdir` is
    a folder that login node and compute nodes share. `gres` is the name of a GPU in Slurm; a job requests it with the
    number of GPUs appended. `setup` is a shell line that runs first in the job. `container` is the image in which the
    user's command runs: a file on the cluster, or an address such as docker://. `extra` has further options of sbatch.
    `price_per_gpu_hour` is the price that the cluster bills, 0 for none; a node without GPUs is billed as one GPU.
    """

    name: str
    host: str
    workdir: str
    port: int = 22
    user: str = ""
    host_key: str = ""
    identity: str = ""
    jump: str = ""
    transport: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    gres: str = "gpu"
    python: str = "python3"
    setup: str = ""
    container: str = ""
    price_per_gpu_hour: Micros = _FREE
    extra: tuple[str, ...] = ()

    @property
    def is_here(self) -> bool:
        """Return whether this computer is the cluster's login node."""
        return self.host == LOCAL

    @property
    def is_pulled(self) -> bool:
        """Return whether a job must download its container image first."""
        return "://" in self.container


_KEYS = tuple(key for key in Cluster.__dataclass_fields__ if key != "name")


def clusters_in(
    tables: Mapping[str, Any], place: str, broken: dict[str, UsageError] | None = None
) -> dict[str, Cluster]:
    """Return the clusters by name, from the tables below `slurm` in a file; `place` names the file in messages.

    An invalid value is a UsageError that names its key. With `broken`, the error is stored there by the table's name
    instead, and the other clusters are still returned, because gpurun must be able to find their jobs.
    """
    found = dict[str, Cluster]()
    for name, table in tables.items():
        try:
            found[name] = _parse_cluster(name, table, place)
        except UsageError as error:
            if broken is None:
                raise
            broken[name] = error
    return found


def with_flags(cluster: Cluster, *, partition: str, account: str, qos: str, container: str) -> Cluster:
    """Return the cluster with one run's options in place of the table's values; an option of "" changes nothing."""
    changed = replace(
        cluster,
        partition=partition or cluster.partition,
        account=account or cluster.account,
        qos=qos or cluster.qos,
        container=container or cluster.container,
    )
    _check_cluster(changed, "")  # The table's own values were checked when it was read.
    return changed


def cluster_of(clusters: Mapping[str, Cluster], name: str | None) -> Cluster:
    """Return the cluster with this name or, without a name, the only one; UsageError if there is no such cluster."""
    if name is None and len(clusters) == 1:
        return next(iter(clusters.values()))
    if not clusters:
        hint = f"Add a table to config.toml: {_EXAMPLE} (docs/SLURM.md)."
        raise UsageError("slurm.none", "config.toml describes no Slurm cluster.", hint=hint)
    known = ", ".join(clusters)
    if name is None:
        hint = f"Name one: --provider slurm:{next(iter(clusters))}"
        raise UsageError("slurm.which", f"config.toml describes several clusters: {known}.", hint=hint)
    if name not in clusters:
        hint = did_you_mean(name, clusters, otherwise=f"It has: {known}.")
        raise UsageError("slurm.unknown", f"config.toml describes no Slurm cluster {name!r}.", hint=hint)
    return clusters[name]


def _parse_cluster(name: str, table: Any, place: str) -> Cluster:
    where = f"slurm.{name} in the {place}"
    if not _NAME.fullmatch(name) or not isinstance(table, dict):
        raise _setting_error(
            f"{where} is not a table that describes a cluster", "A name has small letters, digits, - and _."
        )
    for key in table:
        if key not in _KEYS:
            hint = did_you_mean(key, _KEYS, otherwise=f"Known keys: {', '.join(_KEYS)}.")
            raise _setting_error(f"{where} has the unknown key {key!r}", hint)
    for key, value in table.items():
        if key == _PRICE:
            continue
        kind: type = int if key == "port" else list if key == "extra" else str
        if not isinstance(value, kind) or isinstance(value, bool):
            raise _setting_error(f"{key} of {where} is {value!r}", f"Write it as {_KINDS[kind]}.")
        for part in list(value) if isinstance(value, list) else [value]:
            if kind is list and not isinstance(part, str):
                raise _setting_error(f"{key} of {where} has {part!r}", "Write a list of strings.")
            if _UNSAFE.search(str(part).replace("\\", "") if key == "user" else str(part)):  # LAB\you of an AD.
                raise _setting_error(f"{key} of {where} has a quote, a backslash or a line break", "Leave it out.")
    for key in ("host", "workdir"):
        if not table.get(key):
            raise _setting_error(f"{where} has no {key}", f"For instance {_EXAMPLE}.")
    fields = table | {"extra": tuple(table.get("extra", ())), _PRICE: _parse_price(table.get(_PRICE, 0), where)}
    found = Cluster(name=name, **fields)
    _check_cluster(found, where)
    return found


def _parse_price(value: Any, where: str) -> Micros:
    """Return the price of a GPU-hour, rounded up; 0 means that nothing is billed."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _setting_error(f"{_PRICE} of {where} is {value!r}", _PRICE_HINT)
    try:
        return parse_usd(str(value), is_limit=False) if value else _FREE
    except UsageError:
        raise _setting_error(f"{_PRICE} of {where} is {value!r}", _PRICE_HINT) from None


_PRICE, _PRICE_HINT = "price_per_gpu_hour", "Write the dollars per GPU-hour, for example 1.25."
_KINDS: Mapping[type, str] = {str: "a string", int: "a number", list: "a list of strings"}
_SHAPES = {
    "host": r"[A-Za-z0-9][A-Za-z0-9.:-]*",
    "user": r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]*",
    "workdir": r"/[A-Za-z0-9_./+@:-]+",
    "partition": r"[A-Za-z0-9_][\w,.-]*",
    "account": r"\w[\w.-]*",
    "qos": r"\w[\w.-]*",
    "transport": r"openssh",
    "gres": r"[A-Za-z][\w:.-]*",
    "python": r"[A-Za-z0-9_/][\w./+@-]*",
    "container": r"[a-z][a-z-]*://[\w./:@+-]+|/[\w./+@-]+",
}

_HINTS = {"container": "Give the absolute path of an image file there, or an address: docker://HOST/NAME:TAG."}


def _check_cluster(cluster: Cluster, where: str) -> None:
    """Refuse values that sbatch, the shell or ssh would misread."""
    for key, shape in _SHAPES.items():
        value = getattr(cluster, key)
        if value and not re.fullmatch(shape, value, re.ASCII):
            name = f"{key} of {where}" if where else "--image" if key == "container" else f"--{key}"
            raise _setting_error(f"{name} is {value!r}", _HINTS.get(key, "docs/SLURM.md describes each key."))
    if ".." in cluster.workdir.split("/"):
        raise _setting_error(
            f"workdir of {where} is {cluster.workdir!r}", "Write the absolute path of a shared folder."
        )
    if not 1 <= cluster.port <= 65535:
        raise _setting_error(f"port of {where} is {cluster.port}", "Write a number from 1 to 65535.")
    if not (cluster.is_here or cluster.user or cluster.transport):
        raise _setting_error(f"{where} has no user", "Write the name of the user who logs in there.")
    for option in cluster.extra:
        word = option.partition("=")[0]
        # getopt accepts any unambiguous beginning of a long option.
        is_begun = len(word) > len("--") and word.startswith("--") and any(f.startswith(word) for f in FORBIDDEN)
        if not option.startswith("-") or is_begun or word.startswith(FORBIDDEN) or option.startswith(_SHORT):
            hint = f"gpurun itself sets {', '.join(FORBIDDEN)}. Write other options as --option=value."
            raise _setting_error(f"extra of {where} has {option!r}", hint)


def _setting_error(what: str, hint: str) -> UsageError:
    return UsageError("config.slurm", f"{what}.", hint=hint)
