"""Key pairs in OpenSSH's format: a run's two pairs (one to log in, one for the host), and the user's own key."""

from __future__ import annotations

import base64
import binascii
import hashlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from pathlib import Path

from pydantic import SecretStr

from gpurun.core.errors import SetupError, UsageError
from gpurun.core.filelock import exclusive
from gpurun.core.paths import fsync_folder, make_private, write_atomic
from gpurun.core.records import RunKeys
from gpurun.core.untrusted import error_words

COMMENT = "gpurun"
AGENT = "agent"
"""Used instead of a private key file: any key that the user's SSH agent holds."""
_DIGEST = "SHA256:"
_PUBLIC = ("ssh-", "ecdsa-", "sk-")


def make_keys(folder: Path) -> RunKeys:
    """Return the key pairs in `folder` (client, client.pub, host, host.pub). Missing ones are created.

    Both private keys are on disk, with mode 0600, before this returns, so that the same keys are used after a crash. An
    existing key that cannot be read raises SetupError and is never replaced, because a machine may have the other half.
    """
    make_private(folder)
    with exclusive(folder / ".lock"):
        client_public, _ = _load_or_create_pair(folder, "client")
        host_public, host_private = _load_or_create_pair(folder, "host")
    return RunKeys(client_public=client_public, host_public=host_public, host_private=SecretStr(host_private))


def forget_client_key(folder: Path) -> None:
    """Delete the private key that logs in, if it exists."""
    (folder / "client").unlink(missing_ok=True)
    if folder.is_dir():
        fsync_folder(folder)


def fingerprint(public: str) -> str:
    """Return the SHA256 fingerprint of a public key, as ssh-keygen prints it.

    A fingerprint is returned without padding. Raise UsageError for anything else.
    """
    words = public.split()
    if len(words) == 1 and words[0].startswith(_DIGEST):
        digest = _decode_base64(words[0].removeprefix(_DIGEST))
        if digest is not None and len(digest) == hashlib.sha256().digest_size:
            return _format_digest(digest)
    elif len(words) > 1:
        blob = _decode_base64(words[1])
        kind = words[0].encode()
        if blob is not None and blob.startswith(len(kind).to_bytes(4, "big") + kind):
            return _format_digest(hashlib.sha256(blob).digest())
    raise UsageError(
        "host_key.malformed",
        f"{public[:200]!r} is not a host key.",
        hint="Give its public line (ssh-ed25519 AAAA…) or its fingerprint (SHA256:…), as ssh-keyscan and ssh-keygen -l "
        "print them.",
    )


def public_part(path: Path) -> bytes | None:
    """Return the key in a public file (KEY.pub), which selects one of an agent's keys; None for any other file."""
    try:
        words = _decode_text(path.read_bytes()).split()
    except OSError:
        return None
    return _decode_base64(words[1]) if len(words) > 1 and words[0].startswith(_PUBLIC) else None


def private_key(path: Path) -> tuple[str, str]:
    """Return the type of the private key in a file, and the key in OpenSSH's format.

    All formats that OpenSSH reads are accepted. Raise SetupError if the key cannot be used.
    """
    why, hint = "", "Name another with --identity, or leave that out to use gpurun's own."
    try:
        text = _decode_text(path.read_bytes())
        if text.startswith("PuTTY-"):
            why, hint = "is PuTTY's", f"Convert it to OpenSSH's form: puttygen {path} -O private-openssh -o NEW"
        else:
            return _convert_to_openssh(text)
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except TypeError:
        why, hint = "has a passphrase", f"Add it to your SSH agent and use that: ssh-add {path}; --identity agent"
    except Exception as error:  # noqa: BLE001 - a file can be anything, and every format has its own errors
        why = "is not a usable private key: " + error_words(error).partition(". ")[0]
    raise SetupError("ssh.identity", f"The key file {path} {why}.", hint=hint)


def _decode_text(content: bytes) -> str:
    """Return the text of a file, which may be from a Windows editor."""
    is_wide = content.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
    return content.decode("utf-16" if is_wide else "utf-8-sig", "replace")


def _convert_to_openssh(text: str) -> tuple[str, str]:
    """Return a private key's type, and its text in OpenSSH's format. Raise TypeError if it has a passphrase."""
    from cryptography.hazmat.primitives import serialization as form

    load = form.load_ssh_private_key if "BEGIN OPENSSH" in text else form.load_pem_private_key
    key = load(text.encode(), password=None)
    plain = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    return public.split()[0].decode("ascii"), plain.decode("ascii")


def _load_or_create_pair(folder: Path, name: str) -> tuple[str, str]:
    """Return the public line and the private text of one key. A missing key is created."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    path = folder / name
    if not path.exists():
        made = Ed25519PrivateKey.generate()
        write_atomic(path, made.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()))
    private = path.read_bytes()
    try:
        key = form.load_ssh_private_key(private, password=None)
    except (ValueError, TypeError) as error:
        hint = "Restore it from a copy. If no run uses it any more, remove it: a new one will be made."
        raise SetupError("ssh.key_damaged", f"The key {path} cannot be read: {error}", hint=hint) from None
    encoded = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    line = f"{encoded.decode('ascii')} {COMMENT}"
    public = path.with_suffix(".pub")
    if not public.exists() or public.read_text(encoding="ascii", errors="replace").strip() != line:
        write_atomic(public, f"{line}\n".encode("ascii"))
    return line, private.decode("ascii")


def _decode_base64(text: str) -> bytes | None:
    """Return the decoded base64, with or without its padding; None if it is invalid."""
    try:
        return base64.b64decode(text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None


def _format_digest(digest: bytes) -> str:
    return _DIGEST + base64.b64encode(digest).decode("ascii").rstrip("=")
