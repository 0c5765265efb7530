"""Which documents a source has, how they are read, and which of them are held out.

Everything here is a function of names and bytes alone: the same source gives the same documents in the same order on
every machine. At most one document is in memory at a time.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.prepare.errors import Refusal, not_utf8, refuse_utf16, unreadable
from trainer.prepare.listing import STDLIB, files_of, tally

__all__ = [
    "Corpus",
    "Document",
    "Part",
    "hold_out",
    "open_corpus",
    "pieces",
    "read_text",
    "why_no_text",
]

PIECE_CHARS = 1 << 19
"""What is tokenised at once at the most: of a run of white space, tiktoken's pattern can take no million characters."""
_IN_ROWS = re.compile(r".*\.(jsonl|ndjson|parquet)(\.(gz|zst))?", re.IGNORECASE)
"""Files of many texts, each within a row: as plain text, a model would learn the names and brackets around them."""
_SNIFF_BYTES = 8192
_NEAR_CHARS = 64 << 10
"""How far from where a text is to be divided the end of a line is looked for, or half of what is asked for."""


@dataclass(frozen=True)
class Document:
    """A text: its name within the source, where it lies, how many bytes of it are taken, and their sha256."""

    name: str
    path: Path
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Part:
    """Characters `start` to `stop` (None: the end) of a document."""

    document: Document
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class Corpus:
    """The documents of a source, by name; `skipped` counts files that are no text, by reason."""

    kind: str
    documents: tuple[Document, ...]
    skipped: dict[str, int]

    @property
    def bytes(self) -> int:
        """Bytes of text taken."""
        return sum(document.bytes for document in self.documents)

    @property
    def digest(self) -> str:
        """The sha256 over the names and digests of the documents; it names the corpus."""
        lines = (f"{document.name}\0{document.sha256}\n" for document in self.documents)
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def open_corpus(source: str, limit_bytes: int = 0) -> Corpus:
    """Find and check every document of a source: `stdlib`, a text file or a folder of text files.

    With a limit, documents are taken in an order that depends on their names alone but favours no part of the folder,
    and the last one is cut at the end of a line near the limit, else at a space. Raises Refusal for what is missing,
    unreadable, empty, not UTF-8 or too large for memory. Files of rows are passed over, as binary ones are.
    """
    kind, root, names, skipped = files_of(source)
    if limit_bytes:
        names.sort(key=_name_hash)
    documents: list[Document] = []
    left = limit_bytes
    for name, path in ((name, root / name) for name in names):
        in_rows = _IN_ROWS.fullmatch(path.name)
        raw = b"" if in_rows else _read(path, left + 1 if limit_bytes else -1)
        cut = bool(limit_bytes) and len(raw) > left
        reason = "in rows" if in_rows else why_no_text(raw, path, cut=cut, strict=kind != STDLIB)
        if reason:
            skipped[reason] = skipped.get(reason, 0) + 1
            continue
        taken = _cut_bytes(raw, left) if cut else raw
        if taken.strip():
            documents.append(Document(name, path, len(taken), hashlib.sha256(taken).hexdigest()))
        left -= len(taken)
        if limit_bytes and (cut or not left):
            break
    if not documents:
        raise Refusal(
            "data.empty",
            f"{source} holds no text" + (f" (skipped: {tally(skipped)})." if skipped else "."),
            hint="Name a UTF-8 text file, or a folder that has some; JSON Lines and Parquet want gpurun data prepare.",
        )
    return Corpus(kind, tuple(sorted(documents, key=lambda document: document.name)), skipped)


def read_text(document: Document) -> str:
    """Read a document again, without byte-order mark, lines ending in \\n; a file that changed is a Refusal."""
    raw = _read(document.path, document.bytes)
    if hashlib.sha256(raw).hexdigest() != document.sha256:
        raise Refusal(
            "data.changed",
            f"{document.path} changed while it was being prepared.",
            hint="Prepare again once nothing writes to it, or from a copy.",
        )
    return raw.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")


def hold_out(corpus: Corpus, fraction: float) -> tuple[list[Part], list[Part]]:
    """Split into (train, val) by whole documents, drawn by the hash of their names.

    The held-out ones stay in that order: an evaluation that reads only the first tokens reads a mixture. Where whole
    documents cannot come near the fraction (one book, a few long files), the end of the longest one is held out as
    well, from the end of a line on where one is near, else from a space.
    """
    target = int(corpus.bytes * fraction)
    held: dict[str, Document] = {}
    held_bytes = 0
    for document in sorted(corpus.documents, key=lambda document: _name_hash("val\0" + document.name)):
        if held_bytes + document.bytes <= target and len(held) < len(corpus.documents) - 1:
            held[document.name] = document
            held_bytes += document.bytes
    train = [Part(document) for document in corpus.documents if document.name not in held]
    val = [Part(document) for document in held.values()]
    if held_bytes < target / 2:
        place = max(range(len(train)), key=lambda i: train[i].document.bytes)
        longest = train[place].document
        text = read_text(longest)
        share = min(1.0, (target - held_bytes) / longest.bytes)
        held_chars = int(len(text) * share)
        cut = _gap_near(text, len(text) - held_chars, held_chars)
        train[place] = Part(longest, 0, cut)
        val.append(Part(longest, cut))
    return [part for part in train if part.stop != 0], val


def pieces(text: str, most_chars: int = PIECE_CHARS) -> Iterator[str]:
    """Cut a long text where GPT-2's encoding cuts too, so that the tokens of the pieces are those of the whole.

    That is: before a line end that follows a visible character, or else before such a space. A text without any is cut
    where it must be.
    """
    start = 0
    while len(text) - start > most_chars:
        stop = _last_gap(text, start, start + most_chars)
        yield text[start:stop]
        start = stop
    yield text[start:]


def _last_gap(text: str, low: int, high: int) -> int:
    """The last place in (low, high] after a visible character and before a line end or else a space, else `high`."""
    for gap in "\n ":
        place = text.rfind(gap, low + 1, high + 1)
        while place > low and text[place - 1].isspace():
            place = text.rfind(gap, low + 1, place)
        if place > low:
            return place
    return high


def _gap_near(text: str, place: int, asked_chars: int) -> int:
    """Where to divide a text at `place`, or a little before it, so that about `asked_chars` come of it."""
    return _last_gap(text, max(0, place - min(_NEAR_CHARS, asked_chars // 2)), place)


def _name_hash(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()


def why_no_text(raw: bytes, path: Path, *, cut: bool, strict: bool) -> str:
    """Why a file is passed over ("": it is a text); one that is not UTF-8 is a Refusal when strict.

    The bytes may be cut within their last character.
    """
    if strict:
        refuse_utf16(raw, path)
    if b"\0" in raw[:_SNIFF_BYTES]:
        return "binary"
    try:
        codecs.utf_8_decode(raw, "strict", not cut)
    except UnicodeDecodeError as error:
        if not strict:
            return "not UTF-8"
        raise not_utf8(path, raw[error.start], error.start) from None
    return ""


def _read(path: Path, most: int) -> bytes:
    """The first `most` bytes of a file (-1: all), or its beginning alone if that shows it to be no text."""
    try:
        with open(path, "rb") as file:
            head = file.read(_SNIFF_BYTES)
            if b"\0" in head:
                return head
            size = os.fstat(file.fileno()).st_size
            _check_memory(path, size if most < 0 else min(most, size))
            file.seek(0)
            return file.read(most)
    except OSError as error:
        raise unreadable(path, error) from None


def _check_memory(path: Path, size: int) -> None:
    """Raise Refusal where a file cannot be in memory as bytes and as text."""
    memory_bytes = _memory_bytes()
    if 2 * size > memory_bytes:
        raise Refusal(
            "memory.full",
            f"{path} has {size / 1e9:,.1f} GB and must fit into memory twice; {memory_bytes / 1e9:,.1f} GB are there.",
            hint="Prepare it first, which takes little memory: gpurun data prepare RECIPE --source FILE --out FOLDER, "
            "then --data FOLDER; or take less of it: --set data.limit_mb=100.",
        )


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cut_bytes(raw: bytes, most: int) -> bytes:
    """The first `most` bytes at the most, whole characters only, up to the end of a line where one is near."""
    text, _ = codecs.utf_8_decode(raw[:most], "strict", False)
    return text[: _gap_near(text, len(text), len(text))].encode("utf-8")
