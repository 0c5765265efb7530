"""Trains a byte-level BPE tokeniser, like GPT-2's, on the user's own text, with the `tokenizers` library.

The text is split by GPT-2's pattern; then, repeatedly, the most frequent pair of neighbours becomes a token. The ids
also follow GPT-2: the 256 bytes in GPT-2's order, the merges in the order of training, and the end of text. The list
of tokens is therefore the whole tokeniser: tiktoken encodes and decodes with it, without the `tokenizers` library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from gpurun.core.errors import UsageError
from gpurun.core.installed_files import install_line
from gpurun.core.installed_files import tokenizer as tokenizers

__all__ = ["DEFAULT_TOKENS", "LEAST_TOKENS", "MOST_TOKENS", "check_vocab_size", "train_bpe"]

LEAST_TOKENS, MOST_TOKENS = 257, 50_257
"""The number of tokens, including the bytes and the end of text: the same as in GPT-2."""
DEFAULT_TOKENS = 8192
SAMPLE_CHARS = 32 << 20
"""A larger text is sampled, because the library keeps every different word in memory."""
_LONGEST_WORD_CHARS = 4096
"""A longer run without white space is split, because the library's time grows with the square of a word's length."""
_RAREST = 2


def check_vocab_size(vocab_size: int) -> int:
    """Return the requested number of tokens (0: DEFAULT_TOKENS); UsageError if the number is impossible."""
    tokens = vocab_size or DEFAULT_TOKENS
    if not LEAST_TOKENS <= tokens <= MOST_TOKENS:
        raise UsageError(
            "tokenizer.vocab_size",
            f"A vocabulary cannot have {tokens:,} tokens; the limits are {LEAST_TOKENS} and {MOST_TOKENS:,}.",
            hint="Set another size: --set data.vocab_size=8192.",
        )
    return tokens


def train_bpe(texts: Iterable[str], vocab_size: int = 0) -> list[bytes]:
    """Train on the first SAMPLE_CHARS of the texts, and return the tokens in the order of their ids.

    There are `vocab_size` tokens including the end of text (0: DEFAULT_TOKENS), or fewer if no remaining pair of tokens
    occurs twice. The same texts give the same tokens.
    """
    tokens = check_vocab_size(vocab_size)
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        raise UsageError(
            "tokenizer.not_installed",
            "Training a tokeniser needs the tokenizers library.",
            hint=f"{install_line('data')}; or use GPT-2's: --set data.tokenizer=gpt2.",
        ) from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=tokens - 1,
        min_frequency=_RAREST,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
    )
    tokenizer.train_from_iterator(_sample_pieces(texts), trainer)
    vocab: dict[str, int] = json.loads(tokenizer.to_str())["model"]["vocab"]
    byte_of = {character: byte for byte, character in tokenizers.printable_bytes().items()}
    written = sorted(vocab, key=lambda token: vocab[token])
    return [*(bytes(byte_of[character] for character in token) for token in written), tokenizers.GPT2_EOT]


def _sample_pieces(texts: Iterable[str]) -> Iterator[str]:
    """Yield pieces of the texts, up to the sample size; they are split where the encoding also splits."""
    left = SAMPLE_CHARS
    for text in texts:
        for piece in tokenizers.cut_for_encoding(text, _LONGEST_WORD_CHARS):
            # Half a surrogate pair has no UTF-8; the library gets a question mark for it.
            yield piece[:left].encode("utf-8", "replace").decode("utf-8")
            left -= len(piece)
            if left <= 0:
                return
