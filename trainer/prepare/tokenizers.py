"""Text to token ids: by character, or by byte-pair encoding, GPT-2's or one that was trained."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np

from trainer.prepare.errors import Refusal

__all__ = [
    "NAMES",
    "BpeTokenizer",
    "CharTokenizer",
    "Gpt2Tokenizer",
    "Tokenizer",
    "count_characters",
    "load_gpt2",
    "printable_bytes",
    "sha256_of_tokens",
    "tokenizer_of",
]

NAMES = ("char", "gpt2", "bpe")
REPLACEMENT = "\ufffd"
COVERAGE = 0.9995
"""The share of a text whose characters get ids of their own; the rarest of the rest become U+FFFD."""
MOST_CHARACTERS = 8192

GPT2_MERGES = Path(__file__).parent / "gpt2" / "vocab.bpe"
GPT2_MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
GPT2_EOT = b"<|endoftext|>"
GPT2_EOT_ID = 50_256
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""How GPT-2 cuts text before it merges bytes (openai/gpt-2, encoder.py)."""
_DOWNLOAD_S = 5.0


class Tokenizer(Protocol):
    """What the shards need of a tokeniser: `tokens[i]` are the bytes of id i."""

    name: str
    tokens: tuple[bytes, ...]
    eot_id: int | None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, uint16; no text is taken for the end-of-text token."""
        ...


def sha256_of_tokens(tokens: Iterable[bytes]) -> str:
    """The digest that names a tokeniser: over every token's bytes, each after its length (4 bytes little-endian)."""
    digest = hashlib.sha256()
    for token in tokens:
        digest.update(struct.pack("<I", len(token)) + token)
    return digest.hexdigest()


class CharTokenizer:
    """One id a character, in the order of code points; the last one, U+FFFD, stands for all others.

    A vocabulary that was made elsewhere may lack U+FFFD: then there is nothing for others.
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
    def for_counts(cls, counts: np.ndarray, limit: int = 0) -> CharTokenizer:
        """Choose the characters for a corpus from `counts[code point]`.

        Kept are its printable ASCII and line ends, then the most frequent others until COVERAGE of the text is reached,
        U+FFFD included at most `limit` of them (0: MOST_CHARACTERS).
        """
        room = min(limit or MOST_CHARACTERS, 65_536) - 1
        present = np.flatnonzero(counts)
        plain = (present == 10) | ((present >= 32) & (present < 127))
        # Plain ones first, then by falling count; equal counts by code point.
        ranked = present[np.lexsort((present, -counts[present], ~plain))]
        covered = np.cumsum(counts[ranked]) - counts[ranked] >= COVERAGE * counts.sum()
        enough = max(int(plain.sum()), len(ranked) if not covered.any() else int(np.argmax(covered)))
        kept = sorted({*ranked[: min(enough, room)].tolist()} - {ord(REPLACEMENT)})
        return cls([chr(code).encode("utf-8") for code in [*kept, ord(REPLACEMENT)]])

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text; a Refusal for a character that has none."""
        return [self._ids[self._demand_known(_codes(text))] for text in texts]

    def _demand_known(self, codes: np.ndarray) -> np.ndarray:
        known = self._known[codes]
        if not known.all():
            character = chr(codes[~known][0])
            what = f"The vocabulary has no {json.dumps(character, ensure_ascii=False)} (U+{ord(character):04X})"
            hint = "Leave it out, in a prompt by sample.prompts, or prepare the text again with gpurun data prepare."
            raise Refusal("data.unknown_character", f"{what}, nor U+FFFD to stand for it.", hint=hint)
        return codes


def tokenizer_of(name: str, tokens: Sequence[bytes], threads: int = 0) -> Tokenizer:
    """The tokeniser of text with this name and vocabulary."""
    if name == CharTokenizer.name:
        return CharTokenizer(tokens)
    return Gpt2Tokenizer(tokens, threads) if name == Gpt2Tokenizer.name else BpeTokenizer(tokens, threads)


def count_characters(texts: Iterable[str]) -> np.ndarray:
    """How often each code point occurs: int64, 0x110000 long."""
    counts = np.zeros(0x110000, dtype=np.int64)
    for text in texts:
        found = np.bincount(_codes(text))
        counts[: len(found)] += found
    return counts


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


class BpeTokenizer:
    """Byte-level BPE after GPT-2's pattern, rebuilt from the bytes of its tokens, whose order is that of the merges.

    The last token is the end of text. Which two tokens were merged is nowhere written and need not be: where neighbours
    make a token together, they are merged, the earliest token first.
    """

    name = "bpe"

    def __init__(self, tokens: Sequence[bytes], threads: int = 0) -> None:
        """`threads` of 0 are as many as there are cores."""
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
        """The ids of each text, on as many threads as this tokeniser was given."""
        if self._threads == 1:
            return [self._ids(text) for text in texts]
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(self._ids, texts))

    def _ids(self, text: str) -> np.ndarray:
        # As encode_ordinary, but without a Python list of the ids, which costs a fifth of the time.
        ids: np.ndarray = self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
        return ids


class Gpt2Tokenizer(BpeTokenizer):
    """GPT-2's own."""

    name = "gpt2"


def load_gpt2(say: Callable[[str], None]) -> Gpt2Tokenizer:
    """GPT-2's tokens from tiktoken's cache, else from its download, else from the merges that lie beside this file.

    All three are pinned to the same sha256, so they never differ; a network that does not answer costs seconds at most.
    """
    tokens = _from_tiktoken()
    if tokens is None:
        say("GPT-2's merges: the copy shipped with the trainer (tiktoken has none in its cache and cannot fetch them)")
        tokens = shipped_gpt2_tokens()
    return Gpt2Tokenizer(tokens)


def shipped_gpt2_tokens(path: Path = GPT2_MERGES) -> list[bytes]:
    """The 50,257 tokens from vocab.bpe alone: the 256 bytes, then one token a merge, then the end of text."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise _damaged(f"{path} cannot be read: {error.strerror}") from None
    if hashlib.sha256(raw).hexdigest() != GPT2_MERGES_SHA256:
        raise _damaged(f"{path} is not the file that GPT-2 was published with (its sha256 differs)")
    characters = printable_bytes()
    byte_of = {character: byte for byte, character in characters.items()}
    merges = raw.decode("utf-8").split("\n")[1:-1]
    merged = [bytes(byte_of[character] for character in merge.replace(" ", "")) for merge in merges]
    return [*(bytes([byte]) for byte in characters), *merged, GPT2_EOT]


def printable_bytes() -> dict[int, str]:
    """How GPT-2's files write every byte, in the order of ids: itself where that can be printed, else 256 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _from_tiktoken() -> list[bytes] | None:
    """The tokens as tiktoken itself gets them; None when it cannot within a few seconds."""
    tiktoken = _tiktoken()
    found: list[bytes] = []

    def load() -> None:
        try:
            encoding = tiktoken.get_encoding("gpt2")
            found.extend([*map(encoding.decode_single_token_bytes, range(GPT2_EOT_ID)), GPT2_EOT])
        except (OSError, ValueError, AssertionError, ImportError):
            return  # Offline, or a damaged cache that could not be fetched again: the caller has another source.

    # The cache answers at once. The download has no time limit of its own, so it runs where it can be left behind.
    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(_DOWNLOAD_S)
    return None if thread.is_alive() or len(found) != GPT2_EOT_ID + 1 else found


def _tiktoken() -> ModuleType:
    try:
        import tiktoken
    except ImportError:
        raise Refusal(
            "tokenizer.not_installed", "Byte-pair encoding needs tiktoken.", hint="Install it: pip install tiktoken"
        ) from None
    return tiktoken


def _damaged(what: str) -> Refusal:
    return Refusal("tokenizer.damaged", f"{what}.", hint="Install gpurun again.")
