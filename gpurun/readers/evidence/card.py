"""Packs and reads an evidence card: a zip with a run's evidence, whose files and digests card.json lists.

A card is untrusted. File names for unpacking do not come from the card, each file is read only up to a limit, and a
file that is not a card is refused with a reason. docs/FORMATS.md has the format.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpurun.core.errors import UsageError
from gpurun.core.paths import RunFolder, open_regular, read_regular
from gpurun.core.records import canonical
from gpurun.core.untrusted import Malformed, parse_object, plain_line
from gpurun.ledger.signing import PUBLIC_NAME

VERSION = 1
INDEX = "card.json"
KEY = "key.pub"
RECEIPT = "receipt.json"
JOURNAL = "journal.jsonl"
PLAN = "plan.json"
LOG = "run.log"
EVENTS = "events.jsonl"
_SMALL = {INDEX: 1 << 20, KEY: 1 << 14, RECEIPT: 4 << 20, PLAN: 4 << 20, "card.md": 1 << 20, "card.html": 2 << 20}
_LARGE = {JOURNAL: 16 << 20, LOG: 16 << 20, EVENTS: 32 << 20}
_CHECKPOINT = re.compile(r"checkpoints/\d{6}\.(model\.safetensors|optim\.safetensors|state\.json)")
_OUTPUT = re.compile(
    r"outputs/(?:(?!\.)[A-Za-z0-9._-]{1,80}/){0,6}(?!\.)[A-Za-z0-9._-]{1,80}\.(?:pt|pth|ckpt|safetensors|bin)"
)
"""The usual suffixes of checkpoints, by which the checkpoints of a command are recognised."""
MOST_OUTPUTS, MOST_SHARDS = 50, 100
"""The most checkpoints of a command, and the most shards, in a card.

With its other files, a card then has fewer than `MOST_ENTRIES` entries.
"""
_SHARD = re.compile(r"data/(?!\.)[A-Za-z0-9._-]{1,80}")
MOST_STATE_BYTES = 1 << 20
MOST_ENTRIES = 200
MOST_SHARD_BYTES = 64 << 20
"""The limit for the shards in a card: enough for a learner's text, but not for a corpus."""
MOST_WEIGHTS_BYTES = 4 << 30
MOST_DENSE = 8
"""The factor by which the files of a card may grow when they are unpacked, apart from shards."""
_ABSOLUTE = re.compile(rb'"(?:~?/[^"/]+/|[A-Za-z]:\\\\)')
_END, _END_BYTES = b"PK\x05\x06", 22
_STAMP = (1980, 1, 1, 0, 0, 0)  # A fixed time, so that packing the same run gives the same bytes.


class NoCard(Malformed):
    """The error for a file that is not accepted as a card. Its text is a sentence without a full stop."""


@dataclass
class EvidenceCard:
    """A card that was read. `files` has its small files by name; weights and shards remain in the zip until needed."""

    path: Path
    files: dict[str, bytes]
    left_out: dict[str, str]
    large: dict[str, str] = field(default_factory=dict)
    """The digests of the files that remain in the zip: checkpoints and shards."""

    def unpack_large(self, folder: Path) -> None:
        """Write weights and shards to a folder, under gpurun's own names. Raise NoCard if one differs from card.json.

        Such files compress badly, so a file that grows a lot when it is unpacked was made to fill the disk, and is
        refused.
        """
        with open_regular(self.path) as file, _open_zip(file) as archive:
            left = MOST_DENSE * file.seek(0, 2) + MOST_SHARD_BYTES
            for name, sha256 in self.large.items():
                into, digest, size = folder / name, hashlib.sha256(), 0
                into.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(name) as source, into.open("wb") as target:
                    while block := source.read(1 << 20):
                        size, left = size + len(block), left - len(block)
                        if size > MOST_WEIGHTS_BYTES or left < 0:
                            most = f"{MOST_WEIGHTS_BYTES >> 30} GB"
                            raise NoCard(f"{name} is larger than {most}, or than its packed size allows")
                        digest.update(block)
                        target.write(block)
                if digest.hexdigest() != sha256:
                    raise NoCard(f"{name} differs from the file that card.json lists")


def pack_card(
    run: RunFolder, keys: Path, plan: Mapping[str, Any], pages: Mapping[str, str], predicate: Mapping[str, Any],
    *, private: tuple[str, ...], with_checkpoint: bool, data: Path | None,
    secrets: Mapping[str, Sequence[bytes]] | None = None,
) -> tuple[bytes, dict[str, str]]:  # fmt: skip
    """Return the bytes of a run's card, and the files that were left out, each with the reason.

    `private` are folders of this computer that must not appear in a card. `data` is the folder of the shards. `secrets`
    has the encoded forms of each secret's value, keyed by the secret's name. Raise UsageError if a file contains one of
    them.
    """
    sources = {RECEIPT: run.receipt, JOURNAL: run.journal, LOG: run.log, EVENTS: run.events, KEY: keys / PUBLIC_NAME}
    files: dict[str, bytes | Path] = {name: read_regular(path) for name, path in sources.items() if path.is_file()}
    files[PLAN] = canonical(without_values(without_paths(plan)))
    files |= {name: text.encode() for name, text in pages.items()}
    left_out = {name: why for name in (JOURNAL, LOG, EVENTS) if (why := _why_left_out(name, files.get(name), private))}
    files = {name: content for name, content in files.items() if name not in left_out}
    files |= dict(_checkpoint_files(run, predicate, with_checkpoint=with_checkpoint))
    if with_checkpoint:
        outputs, not_taken = _saved_models(run, predicate)
        files, left_out = files | outputs, left_out | not_taken
    if with_checkpoint and data is not None:
        shards = [path for path in sorted(data.glob("*")) if path.is_file() and _SHARD.fullmatch(f"data/{path.name}")]
        if len(shards) <= MOST_SHARDS and sum(path.stat().st_size for path in shards) <= MOST_SHARD_BYTES:
            files |= {f"data/{path.name}": path for path in shards}
        else:
            left_out["data"] = f"the shards are more than {MOST_SHARDS} files, or {MOST_SHARD_BYTES >> 20} MB"
    _refuse_secrets(files, secrets or {})
    return _zip_files(files, str(predicate["run"]), left_out), left_out


def _refuse_secrets(files: Mapping[str, bytes | Path], secrets: Mapping[str, Sequence[bytes]]) -> None:
    """Raise UsageError if a file contains a secret's value. Files of tensors and tokens are not searched."""
    texts = {name: source for name, source in files.items() if not name.endswith((".safetensors", ".bin", ".npy"))}
    for secret, forms in secrets.items():
        for name, source in texts.items():
            content = source if isinstance(source, bytes) else read_regular(source, MOST_WEIGHTS_BYTES)
            if any(form in content for form in forms):
                what = f"{name} contains the value of {secret}, at least in part. Nothing was written."
                hint = "It cannot be removed from the file, because the receipt has the file's digest. "
                hint += f"Revoke that value, unset {secret}, then make the card again."
                raise UsageError("evidence.secret", what, hint=hint)


def _checkpoint_files(
    run: RunFolder, predicate: Mapping[str, Any], *, with_checkpoint: bool
) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) for the downloaded checkpoints' files; without `with_checkpoint`, only the last state file."""
    files = [entry for entry in predicate["checkpoint"]["files"] if entry["kind"] in ("weights", "optimizer", "state")]
    last = max((entry["step"] for entry in files), default=None)
    for entry in files:
        path = run.artifacts / entry["name"]
        if (with_checkpoint or (entry["step"], entry["kind"]) == (last, "state")) and path.is_file():
            yield str(entry["name"]), path


def _saved_models(run: RunFolder, predicate: Mapping[str, Any]) -> tuple[dict[str, bytes | Path], dict[str, str]]:
    """Return the checkpoints among a command's outputs, newest first, and those left out, each with the reason."""
    files = [file for file in predicate["checkpoint"]["files"] if is_saved_model(file)]
    taken, left_out, left = dict[str, bytes | Path](), dict[str, str](), MOST_WEIGHTS_BYTES
    for file in sorted(files, key=lambda file: -(file["step"] or 0)):
        name, path = str(file["name"]), run.artifacts / file["name"]
        size = path.stat().st_size if path.is_file() else None
        if not _OUTPUT.fullmatch(name):
            left_out[name] = "its name is not allowed in a card"
        elif size is None:
            left_out[name] = "it is not in the run's folder"
        elif size > left or len(taken) == MOST_OUTPUTS:
            left_out[name] = f"a card takes at most {MOST_OUTPUTS} checkpoints, {MOST_WEIGHTS_BYTES >> 30} GB together"
        else:
            taken[name], left = path, left - size
    if not files and any(file["kind"] == "output" for file in predicate["checkpoint"]["files"]):
        left_out["outputs"] = "none has the name of a checkpoint (.pt, .pth, .ckpt, .safetensors, .bin)"
    return taken, dict(list(left_out.items())[:MOST_OUTPUTS])


def is_saved_model(file: Mapping[str, Any]) -> bool:
    """Return whether a file in a receipt is a command's checkpoint, according to --checkpoint-glob or its suffix."""
    return file["kind"] == "checkpoint" or (file["kind"] == "output" and bool(_OUTPUT.fullmatch(str(file["name"]))))


def without_values(plan: Any) -> Any:
    """Return a plan's data without the values of the command's variables, because other people will read the card."""
    command = plan.get("command")
    return {**plan, "command": {**command, "env": dict.fromkeys(command["env"], "")}} if command else plan


def without_paths(value: Any) -> Any:
    """Return a plan's data with each absolute path shortened to its last part, because the rest is private.

    The recipe is not changed, because the journal has its digest. Notes and warnings are removed.
    """
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key not in ("notes", "warnings")}
        return {key: item if key == "resolved" else without_paths(item) for key, item in kept.items()}
    if isinstance(value, list | tuple):
        return [without_paths(item) for item in value]
    is_path = isinstance(value, str) and re.match(r"(~?/|[A-Za-z]:\\)", value)
    return re.split(r"[/\\]", value.rstrip("/\\"))[-1] if is_path else value


def _why_left_out(name: str, content: bytes | Path | None, private: tuple[str, ...]) -> str:
    """Return why a file is left out of a card; "" if it is included."""
    if not isinstance(content, bytes):
        return "it is not in the run's folder"
    if len(content) > _LARGE[name]:
        return f"it has more than {_LARGE[name] >> 20} MB"
    own = any(len(folder) > 1 and folder.encode() in content for folder in private)
    has_path = own or (name == JOURNAL and _ABSOLUTE.search(content))
    return "it contains the path of a folder on this computer" if has_path else ""


def _zip_files(files: Mapping[str, bytes | Path], run: str, left_out: Mapping[str, str]) -> bytes:
    out = io.BytesIO()
    listed: dict[str, dict[str, Any]] = {}
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            content = files[name]
            content = content if isinstance(content, bytes) else read_regular(content, MOST_WEIGHTS_BYTES)
            listed[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            _add_file(archive, name, content)
        index = {"v": VERSION, "run": run, "files": listed, "left_out": dict(left_out)}
        _add_file(archive, INDEX, json.dumps(index, indent=1, sort_keys=True).encode() + b"\n")
    return out.getvalue()


def _add_file(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    member = zipfile.ZipInfo(name, _STAMP)
    is_dense = name.endswith((".safetensors", ".bin")) or bool(_OUTPUT.fullmatch(name))
    member.compress_type = zipfile.ZIP_STORED if is_dense else zipfile.ZIP_DEFLATED
    member.external_attr = 0o644 << 16
    archive.writestr(member, content)


def read_card(path: Path) -> EvidenceCard:
    """Read a card's small files. Raise NoCard if the file is not a card. The size limits also limit the time."""
    card = read_listed(path)
    if RECEIPT not in card.files or KEY not in card.files:
        raise NoCard("it has no receipt, or no public key; a notebook's evidence first needs `gpurun import`")
    return card


def read_listed(path: Path) -> EvidenceCard:
    """Read a file in the card's format that may lack a receipt, such as a notebook's evidence (docs/FORMATS.md)."""
    try:
        with open_regular(path) as file, _open_zip(file) as archive:
            names = [member.filename for member in archive.infolist()]
            _check_names(archive, names)
            index = _parse_index(_read_member(archive, INDEX, _SMALL[INDEX]))
            listed = {str(name): dict(entry) for name, entry in index["files"].items()}
            if unlisted := sorted(set(names) ^ {*listed, INDEX}):
                raise NoCard(f"{plain_line(unlisted[0])} is listed but missing, or present but not listed")
            bounds = {name: _read_limit(name) for name in listed}
            files = {name: _read_member(archive, name, most) for name, most in bounds.items() if most}
    except OSError as error:
        raise NoCard(f"it cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zipfile.LargeZipFile, ValueError, KeyError, TypeError, AttributeError, RuntimeError,
            NotImplementedError, RecursionError, struct.error, EOFError) as error:  # fmt: skip
        if isinstance(error, NoCard):
            raise
        raise NoCard(f"it is not a valid zip file of a card ({type(error).__name__})") from error
    except Exception as error:  # zlib.error is derived directly from Exception.
        raise NoCard(f"it is damaged ({type(error).__name__})") from error
    for name, content in files.items():
        if hashlib.sha256(content).hexdigest() != listed[name].get("sha256"):
            raise NoCard(f"{name} was changed after the card was packed: its digest differs from card.json")
    left_out = {plain_line(str(name)): plain_line(str(why)) for name, why in dict(index.get("left_out", {})).items()}
    large = {name: str(listed[name].get("sha256")) for name, most in bounds.items() if not most}
    return EvidenceCard(path, files, left_out, large)


def _open_zip(file: Any) -> zipfile.ZipFile:
    """Open the zip. First check the number of entries in its end record, because zipfile reads all entries."""
    size = file.seek(0, 2)
    file.seek(max(0, size - _END_BYTES - 65_535))
    tail = file.read()
    place = tail.rfind(_END)
    if place < 0 or len(tail) < place + _END_BYTES:
        raise NoCard("it is not a zip file, or it was cut short")
    if struct.unpack("<H", tail[place + 10 : place + 12])[0] > MOST_ENTRIES:
        raise NoCard(f"it has more than {MOST_ENTRIES} entries")
    file.seek(0)
    return zipfile.ZipFile(file)


def _check_names(archive: zipfile.ZipFile, names: list[str]) -> None:
    for member in archive.infolist():
        name = member.filename
        known = name in _SMALL or name in _LARGE or any(form.fullmatch(name) for form in (_CHECKPOINT, _OUTPUT, _SHARD))
        if not known:
            raise NoCard(f"it holds {plain_line(member.filename)!r}, which is not part of any card")
        if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise NoCard(f"{member.filename} uses a compression that cards do not use")
    if len(set(names)) != len(names):
        raise NoCard("it has two files with the same name")
    if INDEX not in names:
        raise NoCard("it has no card.json")


def _read_limit(name: str) -> int:
    """Return the limit in bytes for a file that is read into memory; 0 for files that remain in the zip."""
    if name in _SMALL or name in _LARGE:
        return _SMALL.get(name) or _LARGE[name]
    return MOST_STATE_BYTES if name.endswith(".state.json") and name.startswith("checkpoints/") else 0


def _read_member(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    """Return a file's bytes. Raise NoCard if there are more than `most`, whatever size the zip states."""
    with archive.open(name) as member:
        content = member.read(most + 1)
    if len(content) > most:
        raise NoCard(f"{name} has more than {most >> 10:,} KB")
    return content


def _parse_index(content: bytes) -> dict[str, Any]:
    index = parse_object(content)
    if type(index.get("v")) is not int:
        raise NoCard("its card.json is invalid")
    if index["v"] > VERSION:
        raise NoCard(f"a newer gpurun made it (version {index['v']}); this one reads version {VERSION}")
    if index["v"] != VERSION or not isinstance(index.get("files"), dict):
        raise NoCard("its card.json is invalid")
    return index
