"""How much disk the shards of a corpus will take, said before they are made."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from trainer.prepare.corpora.division import Task
from trainer.prepare.corpus import pieces
from trainer.prepare.errors import Refusal
from trainer.prepare.sources.files import Span
from trainer.prepare.sources.reading import read_spans
from trainer.prepare.tokenizers import Tokenizer

__all__ = ["check_room"]

_SAMPLE_BYTES = 256 << 10
_ALLOWANCE = 1.1
"""What a sample of a corpus may be wrong by."""
_TOKEN_BYTES = 2


def check_room(
    folder: Path, tasks: Sequence[Task], tokenizer: Tokenizer | None, column: str, say: Callable[[str], None]
) -> None:
    """Say what the shards of these tasks will take, by a sample of their texts; raise Refusal if there is no room.

    Without a tokeniser every character is a token.
    """
    text_bytes = sum(span.text_bytes for task in tasks for span in task)
    if not text_bytes:
        return
    need = int(text_bytes * _tokens_per_byte(tasks, tokenizer, column) * _TOKEN_BYTES * _ALLOWANCE)
    free = shutil.disk_usage(folder).free
    say(f"the shards need about {_amount(need)} of disk; {_amount(free)} are free")
    if need > free:
        raise Refusal(
            "disk.too_small",
            f"The shards need about {_amount(need)}; the disk of {folder} has {_amount(free)} free.",
            hint=f"Make {_amount(need - free)} of room, or name a folder on another disk with --out.",
        )


def _tokens_per_byte(tasks: Sequence[Task], tokenizer: Tokenizer | None, column: str) -> float:
    """Tokens for every byte of text, from the beginnings of the first, a middle and the last file."""
    files = list({span.file: None for task in tasks for span in task})
    chosen = {files[place]: None for place in (0, len(files) // 2, len(files) - 1)}
    tokens = size = 0
    for file in chosen:
        stop = 1 if file.form == "parquet" else file.text_bytes
        for text in _beginning(Span(file, 0, stop), column):
            size += len(text.encode("utf-8"))
            tokens += sum(len(ids) + 1 for ids in tokenizer.encode([text])) if tokenizer else len(text)
    return tokens / size if size else 1.0


def _beginning(span: Span, column: str) -> Iterator[str]:
    taken = 0
    for text in read_spans([span], column):
        for piece in pieces(text.text, _SAMPLE_BYTES):
            yield piece
            taken += len(piece)
            if taken >= _SAMPLE_BYTES:
                return


def _amount(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 10**9 else f"{size / 1e6:,.1f} MB"
