"""Turns text into token ids, by character or by byte-pair encoding (GPT-2's or a trained one); also reads vocab.json.

The module needs numpy, tiktoken for byte-pair encoding, and of the trainer only its errors, because gpurun prepares
data with it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from trainer.errors import Refused

__all__ = [
    "NAMES",
    "BpeTokenizer",
    "CharTokenizer",
    "Gpt2Tokenizer",
    "TextTokenizer",
    "count_characters",
    "cut_for_encoding",
    "load_gpt2",
    "printable_bytes",
    "read_vocabulary",
    "sha256_of_tokens",
    "tokenizer_of",
    "vocabulary_json",
]

NAMES = ("char", "gpt2", "bpe")
REPLACEMENT = "\ufffd"
MOST_CHARACTERS = 65_536
"""The number of ids that uint16 can hold."""
PIECE_CHARS = 1 << 19
"""The most characters to tokenise at once: tiktoken's pattern fails on a run of a million white-space characters."""

GPT2_MERGES = Path(__file__).parent / "gpt2" / "vocab.bpe"
GPT2_MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
GPT2_EOT = b"<|endoftext|>"
GPT2_EOT_ID = 50_256
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""How GPT-2 splits text before it merges bytes (openai/gpt-2, encoder.py)."""
_DOWNLOAD_S = 5.0


class TextTokenizer(Protocol):
    """What the writer of shards needs from a tokeniser; `tokens[i]` are the bytes of id i."""

    @property
    def name(self) -> str: ...
    @property
    def tokens(self) -> tuple[bytes, ...]: ...
    @property
    def eot_id(self) -> int | None: ...

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, uint16; no text is encoded as the end-of-text token."""
        ...


def sha256_of_tokens(tokens: Iterable[bytes]) -> str:
    """Return the digest that identifies a tokeniser: every token's bytes, each after its length (4 bytes LE)."""
    digest = hashlib.sha256()
    for token in tokens:
        digest.update(struct.pack("<I", len(token)) + token)
    return digest.hexdigest()


class CharTokenizer:
    """A tokeniser with one id per character, in the order of code points; the last one, U+FFFD, stands for all others.

    A vocabulary that was made elsewhere may lack U+FFFD: then other characters are refused.
    """

    name = "char"
    eot_id = None

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tuple(tokens)
        codes = [ord(token.decode("utf-8")) for token in self.tokens]
        self._ids = np.zeros(0x110000, dtype=np.uint16)
        self._known = np.zeros(0x110000, dtype=bool)
        if ord(REPLACEMENT) in codes:
            self._ids[:], self._known[:] = codes.index(ord(REPLACEMENT)), True
        self._ids[codes], self._known[codes] = np.arange(len(codes), dtype=np.uint16), True

    @classmethod
    def from_character_counts(cls, counts: np.ndarray, limit: int = 0) -> CharTokenizer:
        """Choose the characters for a corpus from `counts[code point]`: all of them, and U+FFFD if there is room.

        If there are more than `limit` (0: MOST_CHARACTERS), U+FFFD and the most frequent ones are kept; of equally
        frequent characters, those with the lower code points.
        """
        room, unknown = min(limit or MOST_CHARACTERS, MOST_CHARACTERS), ord(REPLACEMENT)
        present = np.flatnonzero(counts)
        present = present[present != unknown]
        if len(present) > room - (counts[unknown] > 0):
            present = present[np.lexsort((present, -counts[present]))][: room - 1]
        kept = sorted(present.tolist())
        codes = [*kept, unknown] if len(kept) < room else kept
        return cls([chr(code).encode("utf-8") for code in codes])

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text; Refused for a character without an id."""
        return [self._ids[self._demand_known(_codes(text))] for text in texts]

    def _demand_known(self, codes: np.ndarray) -> np.ndarray:
        known = self._known[codes]
        if not known.all():
            character = chr(codes[~known][0])
            what = f"the vocabulary has no {json.dumps(character, ensure_ascii=False)} (U+{ord(character):04X})"
            hint = "Leave it out, in a prompt by sample.prompts, or prepare the text again with gpurun data prepare."
            raise Refused(f"{what}, nor U+FFFD to stand for it", code="data.unknown_character", hint=hint)
        return codes


def tokenizer_of(name: str, tokens: Sequence[bytes], threads: int = 0) -> TextTokenizer:
    """Return the tokeniser of text with this name and vocabulary."""
    if name == CharTokenizer.name:
        return CharTokenizer(tokens)
    return Gpt2Tokenizer(tokens, threads) if name == Gpt2Tokenizer.name else BpeTokenizer(tokens, threads)


def count_characters(texts: Iterable[str]) -> np.ndarray:
    """Return how often each code point occurs: int64, 0x110000 long."""
    counts = np.zeros(0x110000, dtype=np.int64)
    for text in texts:
        found = np.bincount(_codes(text))
        counts[: len(found)] += found
    return counts


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


class BpeTokenizer:
    """Byte-level BPE with GPT-2's pattern, rebuilt from the bytes of its tokens, which are in the order of the merges.

    The last token is the end of text. Which two tokens were merged need not be recorded: neighbours that together form
    a token are merged, the earliest token first.
    """

    name = "bpe"

    def __init__(self, tokens: Sequence[bytes], threads: int = 0) -> None:
        """Build the encoder; `threads` of 0 means one for each core."""
        tiktoken = _tiktoken()
        self._threads = threads or max(1, os.cpu_count() or 1)
        self.tokens = tuple(tokens)
        self.eot_id = len(self.tokens) - 1
        ranks = {token: rank for rank, token in enumerate(self.tokens[: self.eot_id])}
        special = {GPT2_EOT.decode(): self.eot_id}
        self._encoding = tiktoken.Encoding(
            self.name,
            pat_str=GPT2_PATTERN,
            mergeable_ranks=ranks,
            special_tokens=special,
            explicit_n_vocab=self.eot_id + 1,
        )

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, using the threads that this tokeniser was given."""
        if self._threads == 1:
            return [self._ids(text) for text in texts]
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(self._ids, texts))

    def _ids(self, text: str) -> np.ndarray:
        # Like encode_ordinary, but without a Python list of the ids, which costs a fifth of the time.
        ids: np.ndarray = self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
        return ids


class Gpt2Tokenizer(BpeTokenizer):
    """GPT-2's own tokeniser."""

    name = "gpt2"


def load_gpt2(say: Callable[[str], None]) -> Gpt2Tokenizer:
    """Return GPT-2's tokeniser: from tiktoken's cache, else its download, else the merges beside this file.

    All three are pinned to the same sha256, so they never differ; an unreachable network costs a few seconds at most.
    """
    tokens = _from_tiktoken()
    if tokens is None:
        say("GPT-2's merges: the copy shipped with the trainer (tiktoken has none in its cache and cannot fetch them)")
        tokens = shipped_gpt2_tokens()
    return Gpt2Tokenizer(tokens)


def shipped_gpt2_tokens(path: Path = GPT2_MERGES) -> list[bytes]:
    """Return the 50,257 tokens from vocab.bpe alone: the 256 bytes, then one token per merge, then the end of text."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise _damaged(f"{path} cannot be read: {error.strerror}") from None
    if hashlib.sha256(raw).hexdigest() != GPT2_MERGES_SHA256:
        raise _damaged(f"{path} is not GPT-2's published file (its sha256 differs)")
    characters = printable_bytes()
    byte_of = {character: byte for byte, character in characters.items()}
    merges = raw.decode("utf-8").split("\n")[1:-1]
    merged = [bytes(byte_of[character] for character in merge.replace(" ", "")) for merge in merges]
    return [*(bytes([byte]) for byte in characters), *merged, GPT2_EOT]


def printable_bytes() -> dict[int, str]:
    """Return the character that GPT-2's files write for each byte, in the order of ids.

    A printable byte is written as itself, another as a character from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _from_tiktoken() -> list[bytes] | None:
    """Return the tokens from tiktoken's cache or its download; None if that fails or takes more than a few seconds."""
    tiktoken = _tiktoken()
    found: list[bytes] = []

    def load() -> None:
        try:
            encoding = tiktoken.get_encoding("gpt2")
            found.extend([*map(encoding.decode_single_token_bytes, range(GPT2_EOT_ID)), GPT2_EOT])
        except (OSError, ValueError, AssertionError, ImportError):
            return  # Offline, or a damaged cache that could not be downloaded again; the caller has another source.

    # The cache answers immediately. The download has no time limit, so it runs in a thread that can be abandoned.
    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(_DOWNLOAD_S)
    return None if thread.is_alive() or len(found) != GPT2_EOT_ID + 1 else found


def _tiktoken() -> ModuleType:
    try:
        import tiktoken
    except ImportError:
        hint = "Install it: pip install tiktoken"
        raise Refused("byte-pair encoding needs tiktoken", code="tokenizer.not_installed", hint=hint) from None
    return tiktoken


def _damaged(what: str) -> Refused:
    return Refused(what, code="tokenizer.damaged", hint="Install gpurun again.")


def vocabulary_json(name: str, tokens: Sequence[bytes]) -> dict[str, Any]:
    """Return the content of vocab.json: the bytes of every token id, which turn ids into text without a tokeniser."""
    return {"v": 1, "name": name, "tokens_b64": [base64.b64encode(token).decode("ascii") for token in tokens]}


def read_vocabulary(folder: Path) -> list[bytes]:
    """Return the bytes of every token id, from a folder's vocab.json; Refused for anything else."""
    path = folder / "vocab.json"
    try:
        return [base64.b64decode(token) for token in json.loads(path.read_bytes())["tokens_b64"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{path} is not a vocabulary: {type(error).__name__}: {error}"
        hint = "Copy it from where the shards were made, or prepare the text again."
        raise Refused(what, code="data.bad_vocabulary", hint=hint) from None


def cut_for_encoding(text: str, most_chars: int = PIECE_CHARS) -> Iterator[str]:
    """Split a long text where GPT-2's encoding splits too, so that the tokens of the pieces are those of the whole.

    A split is before a line end that follows a visible character; if there is none, before a space that follows a
    visible character; if there is none either, at the limit.
    """
    start = 0
    while len(text) - start > most_chars:
        stop = _last_gap(text, start, start + most_chars)
        yield text[start:stop]
        start = stop
    yield text[start:]


def _last_gap(text: str, low: int, high: int) -> int:
    """Return the last place in (low, high] between a visible character and a line end, else a space; `high` if none."""
    for gap in "\n ":
        place = text.rfind(gap, low + 1, high + 1)
        while place > low and text[place - 1].isspace():
            place = text.rfind(gap, low + 1, place)
        if place > low:
            return place
    return high
