"""Finds and stores providers' keys: in the environment, the system's keyring, or a private file.

A key is never an argument, never printed and never in a run folder. AWS has no key here, because its SDK finds the
credentials itself.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpurun.core.errors import SetupError, UsageError
from gpurun.core.paths import Home, make_private, write_atomic
from gpurun.core.secrets import Secret

VARIABLES: Mapping[str, str] = {"runpod": "RUNPOD_API_KEY", "lambda": "LAMBDA_API_KEY"}
"""The environment variable of each provider's key."""

KEYS = (*VARIABLES, "lambda-guard")
"""The names under which a key can be stored: each provider, and the key that `--lambda-guard` puts on the machine."""

SERVICE = "gpurun"

LONGEST_KEY = 1024

# What may follow "Bearer" (RFC 6750): a paste with quotes, blanks or NAME= in it is not a key.
_KEY = re.compile(r"[A-Za-z0-9._~+/-]+=*")

_AWS_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_SECRET_VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN")
# A file that only sets a region has no credentials.
_AWS_KEYS = re.compile(
    r"^\s*(aws_access_key_id|credential_process|credential_source|login_session|role_arn|sso_session|sso_start_url"
    r"|web_identity_token_file)\s*=",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Credential:
    """A key, and a description of where it was found."""

    secret: Secret
    source: str


def clean_key(text: str) -> Secret:
    """Return a typed or pasted key without surrounding blanks. If it is invalid, a UsageError says why without it."""
    key = text.strip()
    if not key:
        raise UsageError("auth.empty_key", "No key was given.", hint="Paste the key at the prompt, or pipe it in.")
    if len(key.split()) > 1 or len(key) > LONGEST_KEY or not _KEY.fullmatch(key):
        why = "it has blanks or several lines" if len(key.split()) > 1 else "it has characters that a key cannot have"
        why = "it is too long" if len(key) > LONGEST_KEY else why
        hint = "Give only the key: one word, without quotes and without NAME= before it."
        raise UsageError("auth.malformed_key", f"That is not a key: {why}.", hint=hint)
    return Secret(key)


def find_credential(name: str, home: Home) -> Credential | None:
    """Return the key for a name of KEYS, from the environment, else the keyring, else its file; None if there is none.

    Raise SetupError if other users can read the file, or if this user cannot.
    """
    variable = VARIABLES.get(name, "")
    given = os.environ.get(variable, "").strip() if variable else ""
    if given:
        return Credential(Secret(given), f"environment {variable}")
    kept = _read_from_keyring(name)
    if kept:
        return Credential(Secret(kept), "system keyring")
    path = file_of(name, home)
    stored = _read_from_file(path)
    return Credential(Secret(stored), f"file {path}") if stored else None


def require_credential(name: str, home: Home) -> Credential:
    """Return the key for a name of KEYS; if there is none, a SetupError says how to set it."""
    found = find_credential(name, home)
    if found is None:
        variable = VARIABLES.get(name)
        hint = f"gpurun auth set {name}" + (f", or put it into {variable}." if variable else ".")
        raise SetupError("auth.no_key", f"There is no key for {name}.", hint=hint)
    return found


def require_secret(name: str) -> Secret:
    """Return the value for --secret NAME, from the environment or the keyring's `secret:NAME`; SetupError if unset."""
    value = os.environ.get(name, "") or _read_from_keyring(f"secret:{name}")
    if not value:
        hint = f"Set it in this shell, or keep it: keyring set {SERVICE} secret:{name}"
        raise SetupError("secret.missing", f"--secret {name}: neither this shell nor the keyring has it.", hint=hint)
    return Secret(value)


def secrets_at_hand(names: Iterable[str]) -> dict[str, str]:
    """Return the secrets that this process can see, by name: these names, and the known variables with keys.

    `names` are looked up in the environment and the keyring, the variables only in the environment.
    """
    values = {name: os.environ.get(name, "") or _read_from_keyring(f"secret:{name}") or "" for name in names}
    values |= {name: os.environ.get(name, "") for name in (*VARIABLES.values(), *_SECRET_VARIABLES)}
    return {name: value for name, value in values.items() if value}


def store_credential(name: str, secret: Secret, home: Home) -> str:
    """Store a key in the keyring or, if that is missing or refuses, in a private file; return the place in words."""
    path = file_of(name, home)
    ring = keyring()
    if ring is not None:
        with suppress(_keyring_error()):
            ring.set_password(SERVICE, name, secret.reveal())
            path.unlink(missing_ok=True)  # Otherwise the file's old key would be used when the keyring does not open.
            return "system keyring"
    make_private(home.prepare().keys)
    write_atomic(path, secret.reveal().encode() + b"\n")
    return f"file {path}"


def forget_credential(name: str, home: Home) -> list[str]:
    """Remove a key from its file and from the keyring; return where it was, in words. The environment is not changed.

    Raise SetupError if the keyring cannot be opened, because it may still have the key.
    """
    places = []
    path = file_of(name, home)
    if path.exists():
        path.unlink()
        places.append(f"file {path}")
    ring = keyring()
    if ring is None:
        return places
    try:
        if ring.get_password(SERVICE, name):
            ring.delete_password(SERVICE, name)
            places.append("system keyring")
    except _keyring_error() as error:
        what = f"The system's keyring does not open, so it may still hold the key for {name}: {type(error).__name__}."
        raise SetupError("auth.keyring", what, hint="Unlock the keyring and run the command again.") from None
    return places


def file_of(name: str, home: Home) -> Path:
    """Return the path of the file in which a key is stored if there is no keyring."""
    return home.keys / f"{name}.key"


def keyring() -> Any | None:
    """Return the keyring package if it has a working backend, else None. It is optional, and servers often lack it."""
    try:
        import keyring as package
        from keyring.backends import fail, null
    except ImportError:
        return None
    backend = package.get_keyring()
    return None if isinstance(backend, fail.Keyring | null.Keyring) else package


def _keyring_error() -> type[Exception]:
    """Return the error class of the keyring package, which must be installed."""
    from keyring.errors import KeyringError

    return KeyringError


def _read_from_keyring(name: str) -> str:
    """Return the key with this name in the system's keyring; "" if there is none, or if the keyring does not open."""
    ring = keyring()
    if ring is None:
        return ""
    with suppress(_keyring_error()):
        return str(ring.get_password(SERVICE, name) or "").strip()
    return ""


def _read_from_file(path: Path) -> str:
    """Return the key in a private file; "" without a file, SetupError if others can read it or this user cannot."""
    try:
        with path.open(encoding="utf-8") as content:
            if stat.S_IMODE(os.fstat(content.fileno()).st_mode) & 0o077:
                hint = f"Run chmod 600 {path}; better, make a new key and set that one."
                raise SetupError("auth.open_file", f"Other users can read {path}.", hint=hint)
            return content.read(LONGEST_KEY + 2).strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        hint = f"Remove it and set the key again: gpurun auth set {path.stem}"
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise SetupError("auth.unreadable_file", f"{path} cannot be read: {why}.", hint=hint) from None


def aws_source() -> str | None:
    """Return in words where the AWS SDK will find credentials, None if nowhere. Neither the SDK nor AWS is asked."""
    for variable in _AWS_VARIABLES:
        if os.environ.get(variable):
            return f"environment {variable}"
    for variable, usual in (("AWS_SHARED_CREDENTIALS_FILE", "credentials"), ("AWS_CONFIG_FILE", "config")):
        path = Path(os.environ.get(variable) or Path.home() / ".aws" / usual).expanduser()
        with suppress(OSError):
            if _AWS_KEYS.search(path.read_text(encoding="utf-8", errors="replace")):
                return f"file {path}"
    return None
