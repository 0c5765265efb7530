"""A tokeniser as the files that transformers and tokenizers read, made from the bytes of its tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from trainer.tokenizer import GPT2_EOT, GPT2_MERGES, REPLACEMENT, printable_bytes

__all__ = ["tokenizer_files"]


def tokenizer_files(name: str, tokens: Sequence[bytes], context: int) -> dict[str, str]:
    """Return the files' texts by name for a tokeniser of text; `context` is the most a model reads."""
    files = _char(tokens) if name == "char" else _bytes(tokens, _published() if name == "gpt2" else _merges(tokens))
    config = files["tokenizer_config.json"] | {"model_max_length": context, "clean_up_tokenization_spaces": False}
    texts = {file: record if isinstance(record, str) else _json(record) for file, record in files.items()}
    return texts | {"tokenizer_config.json": _json(config)}


def _json(record: Any) -> str:
    return json.dumps(record, ensure_ascii=False, indent=1) + "\n"


def _tokenizer(**parts: Any) -> dict[str, Any]:
    """Return the content of a tokenizer.json with the parts that are not empty."""
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", "added_tokens": [], **empty, **parts}


def _published() -> list[str]:
    """Return GPT-2's merges, a line each."""
    return GPT2_MERGES.read_text(encoding="utf-8").split("\n")[1:-1]


def _merges(tokens: Sequence[bytes]) -> list[str]:
    """Return a line for every two tokens that make a third one, in the order in which those were learned.

    That is what the tokens mean where merges are not written down (`BpeTokenizer`), and how transformers reads such.
    """
    ids = {token: index for index, token in enumerate(tokens[:-1])}
    printable, lines = printable_bytes(), []
    for token in tokens[256:-1]:
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = sorted((ids[left], ids[right]) for left, right in pairs if left in ids and right in ids)
        lines += [" ".join(_printed(tokens[index], printable) for index in pair) for pair in known]
    return lines


def _printed(token: bytes, printable: dict[int, str]) -> str:
    return "".join(printable[byte] for byte in token)


def _bytes(tokens: Sequence[bytes], merges: Sequence[str]) -> dict[str, Any]:
    """Return byte-level BPE: every byte a printable character, merged in that order."""
    printable, end = printable_bytes(), GPT2_EOT.decode()
    written = [_printed(token, printable) for token in tokens[:-1]]
    vocab = {token: index for index, token in enumerate([*written, end])}
    pairs = [line.split(" ") for line in merges]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
    }
    model |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": pairs}
    bytes_in = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False}
    config |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), end)
    return {
        "vocab.json": json.dumps(vocab, ensure_ascii=False),
        "merges.txt": "\n".join(["#version: 0.2", *merges, ""]),
        "tokenizer.json": _tokenizer(
            added_tokens=[{"id": len(tokens) - 1, "content": end, **flags}],
            pre_tokenizer=bytes_in,
            post_processor=bytes_in,
            decoder=bytes_in,
            model=model,
        ),
        "tokenizer_config.json": config,
    }


def _char(tokens: Sequence[bytes]) -> dict[str, Any]:
    """Return one token a character; what is unknown becomes U+FFFD, as it did in the training text."""
    vocab = {token.decode("utf-8"): index for index, token in enumerate(tokens)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": REPLACEMENT}
    unknown = {"unk_token": REPLACEMENT} if REPLACEMENT in vocab else {}
    split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    return {
        "tokenizer.json": _tokenizer(pre_tokenizer=split, decoder={"type": "Fuse"}, model=model),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **unknown},
    }
