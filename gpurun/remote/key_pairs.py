"""The two key pairs of a run, in OpenSSH's form: who may log in to its machine, and whom to expect there."""

from __future__ import annotations

import base64
import binascii
import hashlib
from pathlib import Path

from pydantic import SecretStr

from gpurun.core.errors import SetupError, UsageError
from gpurun.core.filelock import exclusive
from gpurun.core.paths import fsync_folder, make_private, write_atomic
from gpurun.core.records import RunKeys

COMMENT = "gpurun"
_DIGEST = "SHA256:"


def make_keys(folder: Path) -> RunKeys:
    """The key pairs in `folder` (client, client.pub, host, host.pub); what is not there yet is made.

    Both private keys are on disk, mode 0600, before it returns, so that after a crash the same keys are told again. A
    key that is there and cannot be read is a SetupError, never replaced: a machine may have been told the other half.
    """
    make_private(folder)
    with exclusive(folder / ".lock"):
        client_public, _ = _pair(folder, "client")
        host_public, host_private = _pair(folder, "host")
    return RunKeys(client_public=client_public, host_public=host_public, host_private=SecretStr(host_private))


def forget_client_key(folder: Path) -> None:
    """Remove the private key that logs in; harmless when it is gone, or was never made."""
    (folder / "client").unlink(missing_ok=True)
    if folder.is_dir():
        fsync_folder(folder)


def fingerprint(public: str) -> str:
    """The SHA256 fingerprint of a public key, as ssh-keygen prints it; what is a fingerprint already stays as it is.

    Anything else is a UsageError.
    """
    words = public.split()
    if len(words) == 1 and words[0].startswith(_DIGEST):
        digest = _decoded(words[0].removeprefix(_DIGEST))
        if digest is not None and len(digest) == hashlib.sha256().digest_size:
            return _digest_text(digest)
    elif len(words) > 1:
        blob = _decoded(words[1])
        kind = words[0].encode()
        if blob is not None and blob.startswith(len(kind).to_bytes(4, "big") + kind):
            return _digest_text(hashlib.sha256(blob).digest())
    raise UsageError(
        "host_key.malformed",
        f"{public[:200]!r} is not a host key.",
        hint="Give its public line (ssh-ed25519 AAAA…) or its fingerprint (SHA256:…), as ssh-keyscan and ssh-keygen -l "
        "print them.",
    )


def _pair(folder: Path, name: str) -> tuple[str, str]:
    """The public line and the private text of one key, made where it is missing."""
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
        hint = "Put it back from a copy. If no run uses it any more, remove it: a new one is made."
        raise SetupError("ssh.key_damaged", f"The key {path} cannot be read: {error}", hint=hint) from None
    encoded = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    line = f"{encoded.decode('ascii')} {COMMENT}"
    public = path.with_suffix(".pub")
    if not public.exists() or public.read_text(encoding="ascii", errors="replace").strip() != line:
        write_atomic(public, f"{line}\n".encode("ascii"))
    return line, private.decode("ascii")


def _decoded(text: str) -> bytes | None:
    """Base64, with or without its padding."""
    try:
        return base64.b64decode(text.rstrip("=") + "=" * (-len(text.rstrip("=")) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None


def _digest_text(digest: bytes) -> str:
    return _DIGEST + base64.b64encode(digest).decode("ascii").rstrip("=")
