"""Byte-level BPE, trained on the user's own text by the `tokenizers` library and encoded by tiktoken, like GPT-2's.

The text is split by GPT-2's pattern; then the most frequent pair of neighbours becomes a token, repeatedly. Ids follow
GPT-2 too: the 256 bytes in its order, then the merges in theirs, then the end of text. So the list of tokens is the
whole tokeniser: encoding and decoding do not need the library that trained it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from gpurun.core.errors import UsageError
from gpurun.core.installed_files import install_line
from gpurun.core.installed_files import tokenizer as tokenizers

__all__ = ["DEFAULT_TOKENS", "LEAST_TOKENS", "MOST_TOKENS", "check_vocab_size", "train_bpe"]

LEAST_TOKENS, MOST_TOKENS = 257, 50_257
"""The bytes, the merges and the end of text: as many as GPT-2 has."""
DEFAULT_TOKENS = 8192
SAMPLE_CHARS = 32 << 20
"""A larger text is sampled, because the library keeps every different word in memory."""
_LONGEST_WORD_CHARS = 4096
"""A longer run without a gap is split, because the library's time for a word grows with the square of its length."""
_RAREST = 2


def check_vocab_size(vocab_size: int) -> int:
    """Return the requested number of tokens, DEFAULT_TOKENS for 0; UsageError for an impossible number."""
    tokens = vocab_size or DEFAULT_TOKENS
    if not LEAST_TOKENS <= tokens <= MOST_TOKENS:
        raise UsageError(
            "tokenizer.vocab_size",
            f"A vocabulary of {tokens:,} tokens cannot be trained: it must have {LEAST_TOKENS} to {MOST_TOKENS:,}.",
            hint="Set another size: --set data.vocab_size=8192.",
        )
    return tokens


def train_bpe(texts: Iterable[str], vocab_size: int = 0) -> list[bytes]:
    """Train on the first SAMPLE_CHARS of the texts, and return the tokens in the order of their ids.

    With the end of text there are `vocab_size` of them (0: DEFAULT_TOKENS), or fewer if no remaining pair occurs
    twice. The same texts give the same tokens.
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
    tokenizer.train_from_iterator(_sample(texts), trainer)
    vocab: dict[str, int] = json.loads(tokenizer.to_str())["model"]["vocab"]
    byte_of = {character: byte for byte, character in tokenizers.printable_bytes().items()}
    written = sorted(vocab, key=lambda token: vocab[token])
    return [*(bytes(byte_of[character] for character in token) for token in written), tokenizers.GPT2_EOT]


def _sample(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts in pieces, split where the encoding splits, up to the sample size."""
    left = SAMPLE_CHARS
    for text in texts:
        for piece in tokenizers.cut_for_encoding(text, _LONGEST_WORD_CHARS):
            # Half a surrogate pair has no UTF-8; the library gets a question mark for it.
            yield piece[:left].encode("utf-8", "replace").decode("utf-8")
            left -= len(piece)
            if left <= 0:
                return
