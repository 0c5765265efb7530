"""Signs payloads in DSSE envelopes with ed25519, and checks them.

The envelope is the Dead Simple Signing Envelope, version 1 (github.com/secure-systems-lab/dsse). A key's id is the
sha256 of its DER public key, as `openssl pkey -pubin -in ed25519.pub -outform DER | sha256sum` gives it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from gpurun.core.paths import fsync_file, fsync_folder, make_private, read_regular, write_atomic
from gpurun.core.receipt_record import Signature
from gpurun.core.untrusted import Malformed

PAYLOAD_TYPE = "application/vnd.in-toto+json"
PRIVATE_NAME, PUBLIC_NAME = "ed25519.pem", "ed25519.pub"


@dataclass(frozen=True)
class Signer:
    """A private key, and the id that is stored with its signatures."""

    keyid: str
    private: Ed25519PrivateKey

    def sign(self, message: bytes) -> bytes:
        """Return the ed25519 signature of a message: always the same 64 bytes for the same message."""
        return self.private.sign(message)


def pae(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes that a DSSE signature covers: payload type and payload, each after its length."""
    kind = payload_type.encode()
    return b" ".join((b"DSSEv1", str(len(kind)).encode(), kind, str(len(payload)).encode(), payload))


def make_envelope(payload: bytes, signer: Signer | None, payload_type: str = PAYLOAD_TYPE) -> dict[str, Any]:
    """Return a signed envelope with a payload; without a signer it has no signature."""
    signatures = []
    if signer is not None:
        made = signer.sign(pae(payload_type, payload))
        signatures.append({"keyid": signer.keyid, "sig": base64.b64encode(made).decode()})
    return {"payload": base64.b64encode(payload).decode(), "payloadType": payload_type, "signatures": signatures}


def payload_of(envelope: Mapping[str, Any]) -> bytes:
    """Return the payload of an envelope without checking a signature; Malformed, a ValueError, if there is none."""
    try:
        return base64.b64decode(envelope["payload"], validate=True)
    except (KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise Malformed("the envelope has no payload") from error


def verify(
    envelope: Mapping[str, Any], keys: Mapping[str, Ed25519PublicKey], payload_type: str = PAYLOAD_TYPE
) -> Signature:
    """Check all signatures of an envelope with the public keys, which are given by id.

    The result is BAD for a malformed envelope, for an invalid signature, and for a signed payload of another type,
    because a receipt is not a mandate. The first signature that is invalid or by an unknown key decides.
    """
    try:
        payload = payload_of(envelope)
        message = pae(str(envelope["payloadType"]), payload)
        signed = [
            (str(signature["keyid"]), base64.b64decode(signature["sig"], validate=True))
            for signature in envelope["signatures"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return Signature.BAD
    if not signed:
        return Signature.UNSIGNED
    if envelope["payloadType"] != payload_type:
        return Signature.BAD
    for keyid, made in signed:
        if keyid not in keys:
            return Signature.UNKNOWN_KEY
        try:
            keys[keyid].verify(made, message)
        except InvalidSignature:
            return Signature.BAD
    return Signature.OK


def load_signer(keys: Path) -> Signer | None:
    """Return the signing key in a folder, which is made on first use; None if it was lost or cannot be read.

    If the folder has a public key but no private key, the private key was lost: no new key is made in its place.
    """
    path = keys / PRIVATE_NAME
    try:
        if not path.exists() and not (keys / PUBLIC_NAME).exists():
            _make_key(keys)
        private = serialization.load_pem_private_key(read_regular(path), password=None)
        if not isinstance(private, Ed25519PrivateKey):
            return None
        if not (keys / PUBLIC_NAME).exists():
            write_atomic(keys / PUBLIC_NAME, _encode_as_pem(private.public_key()))
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return Signer(keyid_of(private.public_key()), private)


def _make_key(keys: Path) -> None:
    """Write a new private key. A hard link puts it in place as a whole; if another process was first, its key stays."""
    make_private(keys)
    content = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    descriptor, temporary = tempfile.mkstemp(dir=keys)  # Mode 0600 from the start.
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(content)
            out.flush()
            fsync_file(out.fileno())
        try:
            os.link(temporary, keys / PRIVATE_NAME)
        except FileExistsError:
            return
    finally:
        os.unlink(temporary)
    fsync_folder(keys)


def keyid_of(public: Ed25519PublicKey) -> str:
    """Return the sha256 (hex) of a public key in DER."""
    der = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def _encode_as_pem(public: Ed25519PublicKey) -> bytes:
    return public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def parse_public_key(pem: bytes) -> dict[str, Ed25519PublicKey]:
    """Return a table with one public key by its id; ValueError if the text is not an ed25519 public key in PEM."""
    try:
        public = serialization.load_pem_public_key(pem)
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from error
    if not isinstance(public, Ed25519PublicKey):
        raise ValueError("not an ed25519 key")
    return {keyid_of(public): public}


def public_keys(keys: Path) -> dict[str, Ed25519PublicKey]:
    """Return every public key (`*.pub`) in a folder by its id; files that are not public keys are left out."""
    found: dict[str, Ed25519PublicKey] = {}
    for path in sorted(keys.glob("*.pub")):
        try:
            found.update(parse_public_key(read_regular(path)))
        except (OSError, ValueError):
            continue
    return found
