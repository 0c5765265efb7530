"""A reader of user-data that understands a part of cloud-init's keys, and refuses or reports all others."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_BASE64 = ("b64", "base64")


@dataclass(frozen=True)
class WrittenFile:
    """One entry of write_files."""

    path: str
    content: bytes = b""
    permissions: int = 0o644
    owner: str = "root:root"
    append: bool = False


@dataclass(frozen=True)
class CloudConfig:
    """The settings in user-data. The defaults are cloud-init's, but without an RSA host key, which takes too long."""

    ssh_deletekeys: bool = True
    ssh_genkeytypes: tuple[str, ...] = ("ecdsa", "ed25519")
    ssh_keys: dict[str, str] = field(default_factory=dict)
    """Contents of host key files by name, such as `ed25519_private` and `ed25519_public`."""
    ssh_authorized_keys: tuple[str, ...] = ()
    disable_root: bool = True
    ssh_pwauth: bool = False
    bootcmd: str = ""
    """A shell script, run at every boot before sshd."""
    write_files: tuple[WrittenFile, ...] = ()
    runcmd: str = ""
    """A shell script, run once, after sshd."""
    script: str = ""
    """User-data that is itself a program; run once, after sshd."""
    complaints: tuple[str, ...] = ()
    """Lines for the console about what was not understood."""


def read(user_data: str, *, strict: bool = False) -> CloudConfig:
    """Parse user-data; report what is not emulated in `complaints`, or raise ValueError if `strict`."""
    if not user_data.strip():
        return CloudConfig()
    if user_data.startswith("#!"):
        return CloudConfig(script=user_data)
    known, complaints = _known(user_data)
    if strict and complaints:
        raise ValueError("; ".join(complaints))
    return CloudConfig(**known, complaints=tuple(complaints))


def _known(user_data: str) -> tuple[dict[str, Any], list[str]]:
    """Return the known keys with values in the shapes of CloudConfig, and a complaint about each other key."""
    import yaml

    if user_data.split("\n", 1)[0].strip() != "#cloud-config":
        return {}, ["user-data is neither a script nor #cloud-config: it is ignored"]
    try:
        said = yaml.safe_load(user_data)
    except yaml.YAMLError as error:
        return {}, [f"user-data is no YAML, all of it is ignored: {error}"]
    if not isinstance(said, dict):
        return {}, ["user-data is no mapping: all of it is ignored"]
    known: dict[str, Any] = {}
    complaints = []
    for key, value in said.items():
        if key not in _SHAPES:
            complaints.append(f"user-data: {key!r} is not emulated: it is ignored")
            continue
        try:
            known[key] = _SHAPES[key](value)
        except (ValueError, TypeError, KeyError) as error:
            complaints.append(f"user-data: {key} is not understood ({error}): it is ignored")
    return known, complaints


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError("it is no list of texts")
    return tuple(value)


def _host_keys(value: Any) -> dict[str, str]:
    names = {f"{kind}_{half}" for kind in ("rsa", "ecdsa", "ed25519") for half in ("private", "public")}
    if not isinstance(value, dict) or not set(value) <= names:
        raise ValueError(f"only {', '.join(sorted(names))} can be given")
    return {name: str(text) for name, text in value.items()}


def _shell(value: Any) -> str:
    """Return the script that cloud-init makes of commands: it quotes a list and keeps a text as it is."""
    if not isinstance(value, list):
        raise ValueError("it is no list of commands")
    lines = [shlex.join(map(str, item)) if isinstance(item, list) else str(item) for item in value]
    return "\n".join(["#!/bin/sh", *lines, ""])


def _files(value: Any) -> tuple[WrittenFile, ...]:
    if not isinstance(value, list):
        raise ValueError("it is no list of files")
    return tuple(_file(**item) for item in value)


def _file(
    path: str,
    content: str | bytes = "",
    permissions: str | int = "0644",
    owner: str = "root:root",
    encoding: str = "",
    append: bool = False,
) -> WrittenFile:
    data = content if isinstance(content, bytes) else content.encode()
    if encoding not in ("", "text/plain", *_BASE64):
        raise ValueError(f"the encoding {encoding!r} is not emulated")
    if encoding in _BASE64:
        data = base64.b64decode(data, validate=False)
    mode = permissions if isinstance(permissions, int) else int(permissions, 8)
    return WrittenFile(path, data, mode, owner, append)


_SHAPES: dict[str, Callable[[Any], Any]] = {
    "ssh_deletekeys": _truth,
    "ssh_genkeytypes": _texts,
    "ssh_keys": _host_keys,
    "ssh_authorized_keys": _texts,
    "disable_root": _truth,
    "ssh_pwauth": _truth,
    "bootcmd": _shell,
    "write_files": _files,
    "runcmd": _shell,
}
