"""Writes token files as llm.c has them, and data.json, vocab.json and prompts.json beside them (docs/FORMATS.md)."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from trainer.prepare.errors import Refusal
from trainer.prepare.tokenizers import REPLACEMENT, Tokenizer

__all__ = [
    "ShardWriter",
    "read_vocabulary",
    "sha256_of_file",
    "sync_folder",
    "write_json",
    "write_prompts",
    "write_vocabulary",
]

MAGIC, VERSION, HEADER_INTS = 20240520, 1, 256
SHARD_TOKENS = 100_000_000


class ShardWriter:
    """Writes the tokens of one split, a new file every `shard_tokens`; `entries` lists the finished files.

    llm.c numbers held-out files from 0 and training files from 1; `number` is another first number. A token file's
    header holds its length, so the header is written last.
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
                self._file.write(bytes(4 * HEADER_INTS))
            now, ids = ids[: self._most - self._in_file], ids[self._most - self._in_file :]
            self._file.write(now.astype("<u2", copy=False).tobytes())
            self._in_file += len(now)
            self.tokens += len(now)
            if self._in_file == self._most:
                self._finish()

    def _path(self) -> Path:
        return self._folder / f"{self._split}_{self._number:06d}.bin"

    def _finish(self) -> None:
        """Write the header, make the file last, and list it."""
        if self._file is None:
            return
        header = np.zeros(HEADER_INTS, dtype="<i4")
        header[:3] = MAGIC, VERSION, self._in_file
        with self._file as file:
            file.seek(0)
            file.write(header.tobytes())
            file.flush()
            os.fsync(file.fileno())
        path = self._path()
        size, digest = path.stat().st_size, sha256_of_file(path)
        self.entries.append({"name": path.name, "tokens": self._in_file, "bytes": size, "sha256": digest})
        self._file, self._in_file, self._number = None, 0, self._number + 1


def sha256_of_file(path: Path) -> str:
    """The sha256 (hex) of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, data: Any) -> None:
    """Write JSON and make it last."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(data, file)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def write_vocabulary(folder: Path, name: str, tokens: Sequence[bytes]) -> None:
    """Write vocab.json: the bytes of every token id, so that text can be made of ids without a tokeniser."""
    tokens_b64 = [base64.b64encode(token).decode("ascii") for token in tokens]
    write_json(folder / "vocab.json", {"v": 1, "name": name, "tokens_b64": tokens_b64})


def read_vocabulary(folder: Path) -> list[bytes]:
    """Read what `write_vocabulary` wrote; a Refusal for anything else."""
    path = folder / "vocab.json"
    try:
        return [base64.b64decode(token) for token in json.loads(path.read_bytes())["tokens_b64"]]
    except (ValueError, KeyError, TypeError) as error:
        what = f"{path} is no vocabulary: {type(error).__name__}: {error}."
        hint = "Copy it from where the shards were made, or prepare the text again."
        raise Refusal("data.bad_vocabulary", what, hint=hint) from None


def write_prompts(
    folder: Path, tokenizer: Tokenizer, prompts: Sequence[str], say: Callable[[str], None], *, most: int | None = None
) -> None:
    """Write prompts.json; a Refusal for a prompt that the trainer would refuse, which it does on paid time.

    `most` is how many tokens one may have: a sentence must fit into the context, where a text loses its beginning.
    Characters of one that the vocabulary lacks are no mistake of a recipe's: that they are read as U+FFFD is said.
    """
    rows = [ids.tolist() for ids in tokenizer.encode(prompts)]
    for text, ids in zip(prompts, rows, strict=True):
        if not ids and tokenizer.eot_id is None:
            what = f"The prompt {json.dumps(text)} has no token, and the tokeniser {tokenizer.name} no end of text."
            hint = "Give it something to begin with: the recipe's sample.prompts, or --set 'sample.prompts=[\"The \"]'."
            raise Refusal("prompt.empty", what, hint=hint)
        if most is not None and len(ids) > most:
            what = f"The prompt {json.dumps(text[:40])} has {len(ids)} tokens; model.context leaves room for {most}."
            raise Refusal("prompt.too_long", what, hint="Shorten it in sample.prompts, or choose a longer context.")
        if lacking := _lacking(tokenizer, text):
            shown = [json.dumps(one, ensure_ascii=False) for one in (text[:40], lacking[:40])]
            say(f"the prompt {shown[0]} has characters that the vocabulary has not, read as U+FFFD: {shown[1]}")
    write_json(folder / "prompts.json", [{"text": text, "ids": ids} for text, ids in zip(prompts, rows, strict=True)])


def _lacking(tokenizer: Tokenizer, text: str) -> str:
    """Return the characters for which the tokeniser has U+FFFD alone."""
    characters = sorted({*text} - {REPLACEMENT})
    unknown = [REPLACEMENT.encode()]
    found = zip(characters, tokenizer.encode(characters), strict=True)
    return "".join(one for one, ids in found if [tokenizer.tokens[i] for i in ids] == unknown)
