"""Turns sentence pairs into token ids: characters, or words, of both languages after three special ids. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from trainer.tokenizer import CharTokenizer, TextTokenizer, count_characters

__all__ = ["ENDS", "END_ID", "PAD_ID", "START_ID", "TOKENIZERS", "Pair", "PairTokenizer", "WordTokenizer"]

TOKENIZERS = ("char-pairs", "word-pairs")
SPECIAL = (b"<pad>", b"<s>", b"</s>")
"""The ids 0, 1 and 2; no text is encoded as these."""
PAD_ID, START_ID, END_ID = range(3)
ENDS = 2
"""The positions of a sentence besides its tokens: its start and its end."""
UNKNOWN = b"<unk>"
MOST_WORDS = 32_000
RAREST = 2
"""A word that occurs less often in the training pairs counts as unknown, as in the annotated Transformer."""

Pair = tuple[str, str]


class WordTokenizer:
    """A tokeniser with one id per word or sign, including the space before it; frequent words have lower ids.

    The first id stands for all words that are not in the vocabulary.
    """

    _PIECES = re.compile(r" ?\w+| ?[^\w\s]")

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tuple(tokens)
        self._ids = {token.decode("utf-8"): number for number, token in enumerate(self.tokens) if number}

    @classmethod
    def pieces(cls, text: str) -> list[str]:
        """Split a text into words and signs. Joined, they give the text with single spaces and a space before it."""
        return cls._PIECES.findall(" " + " ".join(text.split()))

    @classmethod
    def for_texts(cls, texts: Iterator[str], limit: int = 0) -> WordTokenizer:
        """Choose the words for a corpus: those that occur at least RAREST times, up to `limit` ids (0: MOST_WORDS)."""
        counts = Counter(piece for text in texts for piece in cls.pieces(text))
        ranked = sorted((-count, piece) for piece, count in counts.items() if count >= RAREST)
        kept = [piece.encode("utf-8") for _, piece in ranked[: (limit or MOST_WORDS) - 1]]
        return cls([UNKNOWN, *kept])

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text."""
        return [np.array([self._ids.get(piece, 0) for piece in self.pieces(text)], dtype=np.uint16) for text in texts]


class PairTokenizer:
    """A tokeniser of single sentences in two languages; its ids follow the three special ids."""

    eot_id = START_ID

    def __init__(self, name: str, inner: TextTokenizer | WordTokenizer) -> None:
        self.name, self._inner = name, inner
        self.tokens = (*SPECIAL, *inner.tokens)

    @classmethod
    def for_pairs(cls, name: str, pairs: Sequence[Pair], limit: int = 0) -> PairTokenizer:
        """Make the tokeniser for some pairs, with one vocabulary of at most `limit` ids for both languages."""
        texts, room = (text for pair in pairs for text in pair), max(0, limit - len(SPECIAL))
        if name == "word-pairs":
            return cls(name, WordTokenizer.for_texts(texts, room))
        return cls(name, CharTokenizer.from_character_counts(count_characters(texts), room))

    @classmethod
    def from_tokens(cls, name: str, tokens: Sequence[bytes]) -> PairTokenizer:
        """Return the tokeniser with this vocabulary, which includes the special ids."""
        known = tokens[len(SPECIAL) :]
        return cls(name, WordTokenizer(known) if name == "word-pairs" else CharTokenizer(known))

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, without the start and the end."""
        return [ids + np.uint16(len(SPECIAL)) for ids in self._inner.encode(texts)]
