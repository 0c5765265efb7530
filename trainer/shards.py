"""Writes and reads the token files of `data/`, and refuses any file that would make training meaningless.

Three kinds of shard, all uint16: llm.c's `.bin` (a header of 1,024 bytes), nanoGPT's headerless `.bin`, NumPy's `.npy`.
Only llm.c's are written. The module needs numpy, and of the trainer only its errors, because gpurun prepares data with
it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from trainer.errors import Refused

__all__ = [
    "Prompt",
    "Shard",
    "ShardWriter",
    "TokenData",
    "Tokenizer",
    "load_tokenizer",
    "manifest_of",
    "open_data",
    "read_json",
    "sha256_of_file",
    "sync_folder",
    "windows_in",
    "write_json",
]

_MAGIC, _VERSION, _HEADER_BYTES = 20240520, 1, 1024
_NAME = re.compile(r"[A-Za-z0-9._-]{1,80}")
_SCAN_TOKENS = 1 << 22
SHARD_TOKENS = 100_000_000
"""The most tokens in a file, as in the files of llm.c."""
_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The memory limit in control groups of version 2, and of version 1 on older hosts."""


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary: its name and digest, the end-of-text id (None: none), and the bytes of each token id."""

    name: str
    sha256: str
    eot_id: int | None
    tokens: tuple[bytes, ...]

    @property
    def vocab_size(self) -> int:
        """Return how many token ids there are."""
        return len(self.tokens)

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids; an incomplete character becomes U+FFFD."""
        return b"".join(self.tokens[i] for i in ids).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Prompt:
    """A text to continue, with its token ids (never empty)."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """One token file whose length and header have been checked; `offset` is where its tokens begin."""

    path: Path
    tokens: int
    offset: int
    sha256: str

    def mapped(self) -> np.ndarray:
        """Return the tokens as a read-only map of the file."""
        return np.memmap(self.path, dtype="<u2", mode="r", offset=self.offset, shape=(self.tokens,))

    def loaded(self) -> np.ndarray:
        """Return the tokens in memory."""
        return np.fromfile(self.path, dtype="<u2", count=self.tokens, offset=self.offset)

    def check_ids(self, vocab_size: int) -> None:
        """Refuse a token id that is not in the vocabulary; reads the whole file, a chunk at a time."""
        tokens = self.mapped()
        for start in range(0, self.tokens, _SCAN_TOKENS):
            chunk = tokens[start : start + _SCAN_TOKENS]
            if chunk.max() >= vocab_size:
                at = int(np.argmax(chunk >= vocab_size))
                found, name = int(chunk[at]), self.path.name
                raise Refused(f"{name} has token id {found} at {start + at}, but the vocabulary ends at {vocab_size}")


@dataclass(frozen=True)
class TokenData:
    """The content of `data/`, checked except for the token ids themselves (see Shard.check_ids)."""

    tokenizer: Tokenizer
    train: tuple[Shard, ...]
    val: tuple[Shard, ...]
    prompts: tuple[Prompt, ...]

    def identity(self) -> dict[str, Any]:
        """Return the identity of the data, which a checkpoint records so that it never continues on other data."""
        digests = [shard.sha256 for shard in self.train], [shard.sha256 for shard in self.val]
        return {"tokenizer": self.tokenizer.sha256, "train": digests[0], "val": digests[1]}


def read_json(path: Path) -> Any:
    """Return the content of a JSON file of a data folder; Refused if it cannot be read or is invalid."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refused(f"{path.name} cannot be read from the data folder {path.parent}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path.name} is not JSON: {error}") from error


def _get(record: Any, key: str, kind: type | tuple[type, ...], where: str) -> Any:
    """Return record[key]; Refused names the file and the key."""
    if not isinstance(record, dict) or key not in record:
        raise Refused(f'{where} has no "{key}"')
    if not isinstance(record[key], kind) or isinstance(record[key], bool):
        raise Refused(f'"{key}" in {where} is {json.dumps(record[key])[:80]}, which does not have the expected type')
    return record[key]


def load_tokenizer(folder: Path, manifest: Any, expected: str) -> Tokenizer:
    """Read vocab.json and check it against data.json: training on another tokeniser's shards would show no error."""
    described, vocab = _get(manifest, "tokenizer", dict, "data.json"), read_json(folder / "vocab.json")
    name, sha256 = (_get(described, key, str, "data.json") for key in ("name", "sha256"))
    try:
        tokens = tuple(base64.b64decode(text, validate=True) for text in _get(vocab, "tokens_b64", list, "vocab.json"))
    except (ValueError, TypeError) as error:
        raise Refused(f"vocab.json holds a token that is not base64: {error}") from error
    digest = hashlib.sha256()
    for token in tokens:
        digest.update(len(token).to_bytes(4, "little") + token)
    if name != expected:
        raise Refused(f'the shards were made with the tokeniser "{name}", but the recipe needs "{expected}"')
    if digest.hexdigest() != sha256:
        raise Refused(
            f"vocab.json is not the vocabulary of the tokeniser ({name}) that made the shards: sha256 differs"
        )
    size, eot_id = _get(described, "vocab_size", int, "data.json"), described.get("eot_id")
    if size != len(tokens) or not tokens:
        raise Refused(f"data.json says that the vocabulary has {size} tokens, but vocab.json has {len(tokens)}")
    if eot_id is not None and (type(eot_id) is not int or not 0 <= eot_id < size):
        raise Refused(f"the end-of-text id {eot_id} in data.json is not in the vocabulary of {size}")
    return Tokenizer(name, sha256, eot_id, tokens)


def _npy_offset(path: Path, tokens: int) -> int:
    """Return where the tokens of a .npy file begin."""
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, OSError, EOFError) as error:
        raise Refused(f"{path.name} is not a valid .npy file: {error}") from error
    if array.dtype != np.dtype("<u2") or array.ndim != 1:
        raise Refused(f"{path.name} holds {array.dtype} with {array.ndim} dimensions; a shard is one row of uint16")
    if len(array) != tokens:
        raise Refused(f"{path.name} holds {len(array)} tokens, but data.json says {tokens}")
    return int(array.offset)


def _bin_offset(path: Path, size: int, tokens: int) -> int:
    """Return where the tokens of a .bin file begin: after llm.c's header, or at the start.

    A headerless file cannot be mistaken for one with a header: the lower half of the magic number would be token 55432,
    which is above GPT-2's last id.
    """
    header = np.fromfile(path, dtype="<i4", count=min(256, size // 4))
    if len(header) == 0 or header[0] != _MAGIC:
        if size == 2 * tokens:
            return 0
        raise Refused(f"{path.name} starts with {header[0] if len(header) else 'nothing'}, not with {_MAGIC}")
    if size < _HEADER_BYTES or header[1] != _VERSION:
        raise Refused(
            f"{path.name} has version {header[1] if len(header) > 1 else 'none'}; this trainer reads {_VERSION}"
        )
    if header[2] != tokens:
        raise Refused(f"the header of {path.name} says {header[2]} tokens, but data.json says {tokens}")
    if size != _HEADER_BYTES + 2 * tokens:
        raise Refused(f"{path.name} is truncated: {size} bytes for {tokens} tokens")
    return _HEADER_BYTES


def _open_shard(folder: Path, entry: Any) -> Shard:
    """Check one shard's name, length and header against data.json."""
    name, sha256 = (_get(entry, key, str, "data.json") for key in ("name", "sha256"))
    tokens, length = (_get(entry, key, int, "data.json") for key in ("tokens", "bytes"))
    if not _NAME.fullmatch(name) or not name.endswith((".bin", ".npy")):
        raise Refused(f'"{name[:80]}" in data.json is not the name of a shard (.bin or .npy, in the data folder)')
    path = folder / name
    if not path.is_file():
        raise Refused(f"the shard {name} is missing from the data folder {folder}")
    if tokens < 1:
        raise Refused(f"the shard {name} is empty")
    size = path.stat().st_size
    if size != length:
        what = "truncated" if size < length else "longer than it should be"
        raise Refused(f"the shard {name} is {what}: {size} bytes, but data.json says {length}")
    offset = _npy_offset(path, tokens) if name.endswith(".npy") else _bin_offset(path, size, tokens)
    return Shard(path, tokens, offset, sha256)


def _load_prompts(folder: Path, expected: tuple[str, ...], tokenizer: Tokenizer) -> tuple[Prompt, ...]:
    """Return the recipe's prompts with their ids in prompts.json; an empty prompt becomes the end-of-text token."""
    known: dict[str, list[int]] = {}
    for entry in read_json(folder / "prompts.json") if expected else []:
        known[_get(entry, "text", str, "prompts.json")] = _get(entry, "ids", list, "prompts.json")
    prompts = []
    for text in expected:
        if text not in known:
            raise Refused(f"prompts.json does not have the recipe's prompt {json.dumps(text)}: prepare the data again")
        ids = known[text] or ([] if tokenizer.eot_id is None else [tokenizer.eot_id])
        if not ids or not all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in ids):
            raise Refused(f"the prompt {json.dumps(text)} in prompts.json has no tokens of this vocabulary")
        prompts.append(Prompt(text, tuple(ids)))
    return tuple(prompts)


def open_data(folder: Path, tokenizer: str, prompts: tuple[str, ...], *, shards_in: Path | None = None) -> TokenData:
    """Open the data folder for a recipe with this tokeniser and these prompts; Refused if anything does not fit.

    `shards_in` is the folder of the shards, if that is another folder, as it may be before the upload.
    """
    manifest = read_json(folder / "data.json")
    if (manifest.get("v") if isinstance(manifest, dict) else None) != 1:
        raise Refused("data.json is not in version 1, the only one that this trainer reads")
    if manifest.get("dtype") != "uint16":
        raise Refused(f"the shards hold {manifest.get('dtype')}; this trainer reads uint16")
    vocabulary = load_tokenizer(folder, manifest, tokenizer)
    shards = {}
    for part in ("train", "val"):
        entries = _get(manifest, part, list, "data.json")
        shards[part] = tuple(_open_shard(shards_in or folder, entry) for entry in entries)
        if not entries:
            raise Refused(f'data.json lists no shard under "{part}"')
    trained = {shard.sha256 for shard in shards["train"]}
    for shard in shards["val"]:
        if shard.sha256 in trained:
            raise Refused(f"{shard.path.name} is both held out and trained on: its loss would be meaningless")
    return TokenData(vocabulary, shards["train"], shards["val"], _load_prompts(folder, prompts, vocabulary))


def windows_in(tokens: int, context: int, name: str) -> int:
    """Return how many windows of `context` tokens a split of `tokens` has; Refused if it has none.

    A window needs one token more than the context, because its last token is only a target.
    """
    windows = (tokens - 1) // context
    if windows < 1:
        raise Refused(f"the {name} shards hold {tokens} tokens; one window of model.context {context} needs one more")
    return windows


class ShardWriter:
    """Writes the tokens of one split, a new file every `shard_tokens`; `entries` are the finished files, as in
    data.json.

    llm.c numbers held-out files from 0 and training files from 1; `number` sets another first number. A file's header
    contains its length, so the header is written last.
    """

    def __init__(
        self, folder: Path, split: str, shard_tokens: int = SHARD_TOKENS, *, number: int | None = None
    ) -> None:
        self._folder, self._split, self._most = folder, split, shard_tokens
        self._number = number if number is not None else 0 if split == "val" else 1
        self._file: Any = None
        self._in_file = 0
        self.tokens = 0
        self.entries: list[dict[str, Any]] = []

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self._finish()
        elif self._file is not None:
            self._file.close()

    def write(self, ids: np.ndarray) -> None:
        """Append tokens (uint16), across the ends of files."""
        while len(ids):
            if self._file is None:
                self._file = open(self._path(), "wb")  # noqa: SIM115  closed by _finish or __exit__
                self._file.write(bytes(_HEADER_BYTES))
            now, ids = ids[: self._most - self._in_file], ids[self._most - self._in_file :]
            self._file.write(now.astype("<u2", copy=False).tobytes())
            self._in_file += len(now)
            self.tokens += len(now)
            if self._in_file == self._most:
                self._finish()

    def _path(self) -> Path:
        return self._folder / f"{self._split}_{self._number:06d}.bin"

    def _finish(self) -> None:
        """Write the header, flush the file to disk, and list it."""
        if self._file is None:
            return
        header = np.zeros(_HEADER_BYTES // 4, dtype="<i4")
        header[:3] = _MAGIC, _VERSION, self._in_file
        with self._file as file:
            file.seek(0)
            file.write(header.tobytes())
            file.flush()
            os.fsync(file.fileno())
        path = self._path()
        size, digest = path.stat().st_size, sha256_of_file(path)
        self.entries.append({"name": path.name, "tokens": self._in_file, "bytes": size, "sha256": digest})
        self._file, self._in_file, self._number = None, 0, self._number + 1


def manifest_of(
    name: str, tokens: Sequence[bytes], eot_id: int | None, source: dict[str, Any], shards: dict[str, list[Any]]
) -> dict[str, Any]:
    """Return data.json: the tokeniser (its sha256 as in docs/FORMATS.md), the source, and every file by split."""
    digest = hashlib.sha256()
    for token in tokens:
        digest.update(len(token).to_bytes(4, "little") + token)
    tokenizer = {"name": name, "sha256": digest.hexdigest(), "vocab_size": len(tokens), "eot_id": eot_id}
    eot = "none" if eot_id is None else "before"
    return {"v": 1, "dtype": "uint16", "eot": eot, "tokenizer": tokenizer, "source": source, **shards}


def write_json(path: Path, record: Any) -> None:
    """Write a JSON file completely or not at all, and flush it to disk."""
    half = path.with_name(f".{path.name}-{os.getpid()}")
    with open(half, "w", encoding="utf-8") as file:
        json.dump(record, file)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.rename(half, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, so that a rename survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of_file(path: Path) -> str:
    """Return the sha256 (hex) of a file."""
    digest = hashlib.sha256()  # Not file_digest: a machine may have an older Python.
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def spare_memory_bytes() -> int:
    """Return how many bytes of memory are available: what the machine has left, or the container's limit if less."""
    limit = 1 << 62
    for path in _CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # another version; "max"
            limit = min(limit, int(path.read_text()))
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return min(limit, available)
