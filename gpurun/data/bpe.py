"""Byte-level BPE trained on one's own text, by the `tokenizers` library; encoded by tiktoken, as GPT-2's is.

The text is cut by GPT-2's pattern, then the most frequent pair of neighbours becomes a token, again and again. Ids are
GPT-2's way too: the 256 bytes in its order, the merges in theirs, the end of text last. So the tokens alone are the
tokeniser: nobody who encodes or decodes needs the library that trained it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from gpurun.core.errors import UsageError
from gpurun.core.installed_files import install_line
from gpurun.core.installed_files import tokenizer as tokenizers

__all__ = ["DEFAULT_TOKENS", "LEAST_TOKENS", "MOST_TOKENS", "check_vocab_size", "train_bpe"]

LEAST_TOKENS, MOST_TOKENS = 257, 50_257
"""The bytes and the end of text; what GPT-2 has."""
DEFAULT_TOKENS = 8192
SAMPLE_CHARS = 32 << 20
"""Of a larger text a sample is looked at: the library keeps every different word in memory."""
_LONGEST_WORD_CHARS = 4096
"""A longer run without a gap is cut: the time that the library takes for a word grows with the square of its length."""
_RAREST = 2


def check_vocab_size(vocab_size: int) -> int:
    """The number of tokens that is asked for, DEFAULT_TOKENS for 0; a UsageError for one that cannot be."""
    wanted = vocab_size or DEFAULT_TOKENS
    if not LEAST_TOKENS <= wanted <= MOST_TOKENS:
        raise UsageError(
            "tokenizer.vocab_size",
            f"A vocabulary of {wanted:,} tokens cannot be trained: {LEAST_TOKENS} to {MOST_TOKENS:,} can.",
            hint="Set another one: --set data.vocab_size=8192.",
        )
    return wanted


def train_bpe(texts: Iterable[str], vocab_size: int = 0) -> list[bytes]:
    """Train on the texts, of which the first SAMPLE_CHARS are read, and return the tokens in the order of their ids.

    They are `vocab_size` in all with the end of text (0: DEFAULT_TOKENS), or fewer where no pair is left that occurs
    twice. The same texts give the same tokens.
    """
    wanted = check_vocab_size(vocab_size)
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        raise UsageError(
            "tokenizer.not_installed",
            "Training a tokeniser needs the tokenizers library.",
            hint=f"{install_line('data')}; or take GPT-2's: --set data.tokenizer=gpt2.",
        ) from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=wanted - 1,
        min_frequency=_RAREST,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
    )
    tokenizer.train_from_iterator(_sample(texts), trainer)
    vocab: dict[str, int] = json.loads(tokenizer.to_str())["model"]["vocab"]
    byte_of = {character: byte for byte, character in tokenizers.printable_bytes().items()}
    written = sorted(vocab, key=lambda token: vocab[token])
    return [*(bytes(byte_of[character] for character in token) for token in written), tokenizers.GPT2_EOT]


def _sample(texts: Iterable[str]) -> Iterator[str]:
    """The texts in pieces that are cut where the encoding cuts, until there is enough."""
    left = SAMPLE_CHARS
    for text in texts:
        for piece in tokenizers.cut_for_encoding(text, _LONGEST_WORD_CHARS):
            # What is half of a surrogate pair has no UTF-8; it becomes a question mark for the library.
            yield piece[:left].encode("utf-8", "replace").decode("utf-8")
            left -= len(piece)
            if left <= 0:
                return
