"""Tests of DSSE envelopes and the signing key: one key even in a race, and no silent replacement of a lost key."""

from __future__ import annotations

import base64
import json
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from gpurun.core.receipt_record import Signature
from gpurun.ledger import signing
from gpurun.ledger.signing import (
    PRIVATE_NAME,
    PUBLIC_NAME,
    Signer,
    load_signer,
    make_envelope,
    pae,
    parse_public_key,
    payload_of,
    public_keys,
    verify,
)


def test_the_signed_bytes_are_those_of_the_specification() -> None:
    """The expected bytes are the example of the DSSE specification, protocol.md."""
    assert (
        pae("http://example.com/HelloWorld", b"hello world")
        == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )


def test_an_envelope_verifies_and_gives_its_payload_back(tmp_path: Path) -> None:
    signer = load_signer(tmp_path / "keys")
    assert signer is not None
    envelope = json.loads(json.dumps(make_envelope(b'{"a":1}', signer)))
    assert verify(envelope, public_keys(tmp_path / "keys")) is Signature.OK
    assert payload_of(envelope) == b'{"a":1}'
    assert envelope == make_envelope(b'{"a":1}', signer), "the same payload gives the same envelope"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_agrees_about_the_signature(tmp_path: Path) -> None:
    signer = load_signer(tmp_path)
    assert signer is not None
    message = pae("application/vnd.in-toto+json", b"{}")
    (tmp_path / "message").write_bytes(message)
    (tmp_path / "signature").write_bytes(base64.b64decode(make_envelope(b"{}", signer)["signatures"][0]["sig"]))
    checked = subprocess.run(
        [
            "openssl",
            "pkeyutl",
            "-verify",
            "-pubin",
            "-rawin",
            "-inkey",
            PUBLIC_NAME,
            "-in",
            "message",
            "-sigfile",
            "signature",
        ],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_in_an_envelope_does_not_verify(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int
) -> None:
    keys = _keys(tmp_path_factory)
    signer = load_signer(keys)
    payload, sig = b'{"cost":1}', base64.b64decode(make_envelope(b'{"cost":1}', signer)["signatures"][0]["sig"])
    both = bytearray(payload + sig)
    both[place % len(both)] ^= 1 << bit
    envelope = make_envelope(bytes(both[: len(payload)]), signer)
    envelope["signatures"][0]["sig"] = base64.b64encode(bytes(both[len(payload) :])).decode()
    assert verify(envelope, public_keys(keys)) is Signature.BAD


_made: dict[int, Path] = {}


def _keys(factory: pytest.TempPathFactory) -> Path:
    """Return a folder for a key that all examples of a property test share."""
    return _made.setdefault(os.getpid(), factory.mktemp("keys"))


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ({"signatures": []}, Signature.UNSIGNED),
        ({"signatures": [{"keyid": "0" * 64, "sig": "AAAA"}]}, Signature.UNKNOWN_KEY),
        ({"payloadType": "text/plain"}, Signature.BAD),
        ({"payload": "not base64!"}, Signature.BAD),
        ({"signatures": "yes"}, Signature.BAD),
        ({"signatures": [{"keyid": "0" * 64}]}, Signature.BAD),
    ],
)
def test_whatever_an_envelope_holds_it_gets_an_answer(
    tmp_path: Path, change: dict[str, Any], answer: Signature
) -> None:
    envelope = {**make_envelope(b"{}", load_signer(tmp_path)), **change}
    assert verify(envelope, public_keys(tmp_path)) is answer


def test_the_key_is_private_and_made_once(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    first, again = load_signer(keys), load_signer(keys)
    assert first is not None
    assert again is not None
    assert first.keyid == again.keyid
    assert stat.S_IMODE((keys / PRIVATE_NAME).stat().st_mode) == 0o600
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    assert sorted(path.name for path in keys.iterdir()) == [PRIVATE_NAME, PUBLIC_NAME]


def test_who_loses_the_race_for_the_first_key_takes_the_winners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process finds no key, and another one makes a key before this one does: both must use that key."""
    winners: list[Signer | None] = []
    generate = Ed25519PrivateKey.generate

    def after_another() -> Ed25519PrivateKey:
        if not winners:
            winners.append(None)
            winners[0] = load_signer(tmp_path)
        return generate()

    monkeypatch.setattr(signing.Ed25519PrivateKey, "generate", after_another)
    loser = load_signer(tmp_path)
    assert loser is not None
    assert winners[0] is not None
    assert loser.keyid == winners[0].keyid
    assert sorted(path.name for path in tmp_path.iterdir()) == [PRIVATE_NAME, PUBLIC_NAME]


@pytest.mark.parametrize("loss", ["removed", "emptied", "another kind"])
def test_a_lost_key_is_not_replaced_quietly(tmp_path: Path, loss: str) -> None:
    load_signer(tmp_path)
    private, public = tmp_path / PRIVATE_NAME, (tmp_path / PUBLIC_NAME).read_bytes()
    if loss == "removed":
        private.unlink()
    else:
        private.write_bytes(b"" if loss == "emptied" else public)
    assert load_signer(tmp_path) is None
    assert (tmp_path / PUBLIC_NAME).read_bytes() == public


def test_a_public_key_lost_in_a_crash_comes_from_the_private_one(tmp_path: Path) -> None:
    load_signer(tmp_path)
    before = (tmp_path / PUBLIC_NAME).read_bytes()
    (tmp_path / PUBLIC_NAME).unlink()
    load_signer(tmp_path)
    assert (tmp_path / PUBLIC_NAME).read_bytes() == before


def test_a_file_that_is_no_key_trusts_nobody(tmp_path: Path) -> None:
    (tmp_path / "old.pub").write_bytes(b"-----BEGIN NOTHING-----")
    assert public_keys(tmp_path) == {}
    with pytest.raises(ValueError, match=r"."):
        parse_public_key(b"nothing")
