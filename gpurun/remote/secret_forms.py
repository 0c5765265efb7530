"""The forms by which keys and passwords are recognised: the names of their files, and their content.

Text is searched for all forms. So are UTF-16 and content compressed by gzip, bzip2 or xz, up to a limit. Other binary
content is searched only for private keys: the other forms could occur in it by chance.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
from fnmatch import translate

# Names, in lower case, of files with keys and passwords. `tokenizer.json` and `tokens.bin` must not match.
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
SECRET_NAME = re.compile("|".join(translate(pattern) for pattern in _NAMES))
SOURCE_NAME = re.compile(r".+[-_].*\.pyi?")
"""Names of programs, like `test_git_credentials.py`: only their content is checked."""

MOST_UNPACKED_BYTES = 256 << 20
"""How much of a compressed file's content is searched."""
BEFORE_BYTES, FORM_BYTES = 64, 640  # How far a form extends around its word; of a private key the head is enough.
OVERLAP_BYTES = 4096
PRIVATE_KEY = "a private key"
_HEAD = rb"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY-----"
# A program that reads keys contains only the head. A key file also has a body.
KEY_IN_BINARY = re.compile(_HEAD + rb"(?:\\[rn]|\s)*[A-Za-z0-9+/=]{16}")
_ASSIGNED = rb"[\"'\]]{0,2}\s{0,3}(?:[=:,]|=>)?\s{0,3}[\"']?"
# Each form has plain strings of which every match contains one: searching for these first is ten times as fast.
FORMS: tuple[tuple[str, tuple[bytes, ...], re.Pattern[bytes]], ...] = (
    (PRIVATE_KEY, (b"PRIVATE KEY-----",), re.compile(_HEAD)),
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
PLACEHOLDER = re.compile(rb"(?i)EXAMPLE|x{8}|\*{4}|your[-_]|sha1|commit|revision")
"""Placeholders in documentation, and other strings of forty hexadecimal digits."""
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
WIDE_PRIVATE_KEYS = tuple("PRIVATE KEY-----".encode(form) for form in ("utf-16-le", "utf-16-be"))
PACKED = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
