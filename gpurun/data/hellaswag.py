"""Tokenises HellaSwag's questions with the shards' own tokeniser, and writes `hellaswag.jsonl` (docs/FORMATS.md).

The questions are in their authors' format, one JSON object per line: `ctx`, four `endings`, `label`. An ending is
tokenised with a space before it, as it would follow the context, so the scores can be compared with GPT-2's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpurun.core.errors import UsageError
from gpurun.core.installed_files import items as question_items
from gpurun.core.installed_files import tokenizer as tokenizers
from gpurun.core.paths import write_atomic
from gpurun.core.untrusted import parse_object, read_object
from gpurun.data.refusals import Say, translate_refusals

ENDINGS = 4
_MOST_LINE_CHARS = 1 << 20


def write_items(questions: Path, shards: Path, say: Say) -> tuple[Path, int]:
    """Write a file's questions as items beside finished shards; return the written path and the number of items.

    The file is written atomically. UsageError if the input cannot be read, or a line is not a question with its answer.
    """
    lines, written = [], shards / question_items.FILE
    with translate_refusals("Nothing was left behind."):
        tokenizer = tokenizer_of_shards(shards, say)
        for context, endings, label in _read_questions(questions):
            first, *rest = (ids.tolist() for ids in tokenizer.encode([context, *(f" {ending}" for ending in endings)]))
            lines.append(json.dumps({"context": first, "endings": rest, "label": label}) + "\n")
        if not lines:
            raise UsageError("data.empty", f"{questions} holds no questions.", hint="Use hellaswag_val.jsonl.")
        write_atomic(written, "".join(lines).encode())
    return written, len(lines)


def tokenizer_of_shards(shards: Path, say: Say) -> tokenizers.TextTokenizer:
    """Return the tokeniser that made the shards."""
    try:
        name = read_object(shards / "data.json")["tokenizer"]["name"]
    except (OSError, ValueError, KeyError, TypeError):
        what = f"{shards} is not a folder of finished shards."
        raise UsageError("data.bad_manifest", what, hint="Make them first: gpurun data prepare.") from None
    if name == "gpt2":
        return tokenizers.load_gpt2(say)
    if not (shards / "vocab.json").is_file():
        what = f"{shards} has no vocab.json; only GPT-2's vocabulary is known without it."
        raise UsageError("data.no_vocabulary", what, hint="Copy vocab.json from the folder where the shards were made.")
    return tokenizers.tokenizer_of(name, tokenizers.read_vocabulary(shards))


def _read_questions(path: Path) -> Iterator[tuple[str, list[str], int]]:
    """Yield context, endings and label of each line."""
    number = 0
    try:
        with path.open(encoding="utf-8") as lines:
            while line := lines.readline(_MOST_LINE_CHARS):
                number += 1
                if line.strip():
                    yield _parse_question(parse_object(line))
    except OSError as error:
        raise UsageError(
            "data.unreadable", f"{path} cannot be read: {error.strerror}.", hint="Check the path."
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        what = f"Line {max(1, number)} of {path} is not a HellaSwag question with its answer: {error!r}."
        hint = "Use hellaswag_val.jsonl as its authors publish it; the test set has no answers."
        raise UsageError("data.no_question", what, hint=hint) from None


def _parse_question(record: Any) -> tuple[str, list[str], int]:
    context, endings, label = record["ctx"], record["endings"], record["label"]
    texts = [context, *endings]
    if len(endings) != ENDINGS or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError("it must have a context and four endings")
    label = int(label) if isinstance(label, str) and label.isdecimal() else label  # The hub's copy has strings.
    if type(label) is not int or not 0 <= label < ENDINGS:
        raise ValueError("its label must be 0 to 3")
    return context, list(endings), label
