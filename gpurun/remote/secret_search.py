"""Finds what has the form of a key or password: by the name of a file, and by its whole content.

Text is searched for all forms, and so is UTF-16 and what gzip, bzip2 or xz has packed, up to a limit. In other binary
content only private keys are searched for: the rest could not be told from chance.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from fnmatch import translate
from itertools import chain
from typing import Any

# Names, in lower case, that keys and passwords are kept under. `tokenizer.json` and `tokens.bin` must pass.
_NAMES = (
    *(".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass", ".my.cnf", ".htpasswd"),
    *(".aws", ".ssh", ".gnupg", ".kube", ".docker", ".azure", ".gcloud", ".boto", ".s3cfg", ".dockercfg", "kubeconfig"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks"),
    *("*.keystore", "*.kdbx", "*.gpg", "*.asc", "wallet.dat", "*.tfstate", "*.tfstate.*", ".git-credentials"),
    *("credentials", "credentials.*", "*[-_]credentials", "*[-_]credentials.*", "kaggle.json", "client_secret*.json"),
    *("service[-_]account*.json", "*[-_]service[-_]account.json", "application_default_credentials*", ".terraformrc"),
    *("token", "token.txt", "token.json", "*.token", "*[-_]token", "*[-_]token.txt", "*[-_]token.json", ".token*"),
    *("*api[-_]key", "*api[-_]key.*", "*apikey", "*apikey.*", "password", "password.txt", "passwords.txt", "*.secret"),
    *(".*_history", ".history", ".histfile", "fish_history", ".lesshst", ".viminfo", "*.tfvars", "*.tfvars.json"),
    *("rclone.conf", "*.p8"),
    *("secret", "secrets", "secret.*", "secrets.json", "secrets.toml", "secrets.y*ml", "secrets.txt", "secrets.ini"),
)
_NAME = re.compile("|".join(translate(pattern) for pattern in _NAMES))
_SOURCE = re.compile(r".+[-_].*\.pyi?")
"""`test_git_credentials.py` is a program, and is judged by its content."""

MOST_UNPACKED_BYTES = 256 << 20
"""How far into a compressed file the search goes."""
_PIECE_BYTES = 1 << 20
_BEFORE_BYTES, _FORM_BYTES = 64, 640  # How far a form reaches around its word; of a private key the head is enough.
_OVERLAP_BYTES = 4096
_PRIVATE_KEY = "a private key"
_HEAD = rb"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY-----"
# A program that reads keys has the head alone; a key has its body behind it.
_KEY_IN_BINARY = re.compile(_HEAD + rb"(?:\\[rn]|\s)*[A-Za-z0-9+/=]{16}")
_ASSIGNED = rb"[\"'\]]{0,2}\s{0,3}(?:[=:,]|=>)?\s{0,3}[\"']?"
# Each form with what all that has it contains: a search for a plain word is ten times as fast as one for a form.
_FORMS: tuple[tuple[str, tuple[bytes, ...], re.Pattern[bytes]], ...] = (
    (_PRIVATE_KEY, (b"PRIVATE KEY-----",), re.compile(_HEAD)),
    ("a key of AWS", (b"AKIA",), re.compile(rb"\bAKIA[0-9A-Z]{16}\b")),
    (
        "a secret key of AWS",
        (b"ecret_access_key", b"ECRET_ACCESS_KEY", b"ecretAccessKey"),
        re.compile(rb"(?i)secret_?access_?key" + _ASSIGNED + rb"[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])"),
    ),
    ("a token of Hugging Face", (b"hf_",), re.compile(rb"\bhf_[A-Za-z0-9]{30,}")),
    ("a key of RunPod", (b"rpa_",), re.compile(rb"\brpa_\w{30,}")),
    ("an API key (sk-)", (b"sk-",), re.compile(rb"\bsk-(?:[\w-]{0,99}?[A-Za-z0-9]{20}|(?=[\w-]{0,39}\d)[\w-]{40})")),
    ("a token of GitHub", (b"ghp_", b"gho_", b"ghs_"), re.compile(rb"\bgh[pos]_[A-Za-z0-9]{36}")),
    ("a token of GitHub", (b"github_pat_",), re.compile(rb"\bgithub_pat_\w{22,}")),
    ("a token of Slack", (b"xox",), re.compile(rb"\bxox[abeprs]-[A-Za-z0-9-]{10,}")),
    ("a key of Google", (b"AIza",), re.compile(rb"\bAIza[\w-]{35}")),
    (
        "a key of W&B",
        (b"wandb", b"WANDB", b"api_key", b"API_KEY"),
        re.compile(rb"(?i)(?:wandb[^\n/@#]{0,40}?|api_key" + _ASSIGNED + rb")(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])"),
    ),
    ("a key of W&B", (b"wandb_v1_",), re.compile(rb"\bwandb_v1_\w{40,}")),
    (
        "a line of .netrc",
        (b"machine",),
        re.compile(
            rb"(?m)^\s{0,8}machine\s{1,20}\S{1,200}\s{1,20}login\s{1,20}\S{1,200}\s{1,20}password\s{1,20}[^\s<$\[{]\S{3}"
        ),
    ),
)
_PLACEHOLDER = re.compile(rb"(?i)EXAMPLE|x{8}|\*{4}|your[-_]|sha1|commit|revision")
"""What documentation writes in the place of a key, and what else has forty hexadecimal digits."""
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_WIDE = tuple("PRIVATE KEY-----".encode(form) for form in ("utf-16-le", "utf-16-be"))
_PACKED = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}


def is_named_like_secret(name: str) -> bool:
    """Return whether files of this base name hold keys or passwords."""
    return _NAME.match(name.lower()) is not None and not _SOURCE.fullmatch(name.lower())


def secret_in(blocks: Iterable[bytes]) -> str:
    """Return what kind of key the content holds, "" if none was found; it is read once, in blocks."""
    stream = iter(blocks)
    first = next(stream, b"")
    opener = next((opener for magic, opener in _PACKED.items() if first.startswith(magic)), None)
    stream = chain([first], stream)
    is_wide, seen = first.startswith(_UTF_16), b""
    for block in stream if opener is None else _unpacked(opener, stream):
        seen = seen[-_OVERLAP_BYTES:] + (block.replace(b"\0", b"") if is_wide else block)
        if found := _form_in(seen):
            return found
    return ""


def _form_in(content: bytes) -> str:
    """Return what kind of key some bytes hold, "" if none."""
    if b"\0" in content:
        return _PRIVATE_KEY if _has_private_key(content) else ""
    for what, words, form in _FORMS:
        for word in words:
            place = content.find(word)
            while place >= 0:
                found = form.search(content, max(0, place - _BEFORE_BYTES), place + _FORM_BYTES)
                if found and not _PLACEHOLDER.search(found[0]):
                    return what
                place = content.find(word, place + len(word))
    return ""


def _has_private_key(content: bytes) -> bool:
    """Return whether binary content holds a private key, in bytes or in UTF-16."""
    if b"PRIVATE KEY-----" in content and _KEY_IN_BINARY.search(content):
        return True
    is_wide = any(word in content for word in _WIDE)
    return is_wide and _KEY_IN_BINARY.search(content.replace(b"\0", b"")) is not None


class _Blocks(io.RawIOBase):
    """Lets a decompressor read what comes in blocks."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._left = blocks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        self._left = self._left or next(self._blocks, b"")
        piece, self._left = self._left[: len(into)], self._left[len(into) :]
        into[: len(piece)] = piece
        return len(piece)


def _unpacked(opener: Any, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield what a compressed file holds, up to the limit; a damaged one ends where the damage is."""
    with opener(io.BufferedReader(_Blocks(blocks))) as file:
        for _ in range(MOST_UNPACKED_BYTES // _PIECE_BYTES):
            try:
                piece = file.read(_PIECE_BYTES)
            except (OSError, EOFError, zlib.error, lzma.LZMAError):
                return
            if not piece:
                return
            yield piece
