"""HellaSwag's questions, tokenised with the shards' own tokeniser, beside the shards: `hellaswag.jsonl` (FORMATS.md).

    python -m trainer.prepare.hellaswag --questions hellaswag_val.jsonl --shards DIR

The questions are as its authors publish them, one JSON object a line: `ctx`, four `endings`, `label`. An ending is
tokenised with a space before it, as it would follow the context; so the figures compare with those of GPT-2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.items import FILE
from trainer.prepare.build import reopen
from trainer.prepare.errors import Refusal
from trainer.prepare.program import run_program, say
from trainer.prepare.tokenizers import Tokenizer, load_gpt2

__all__ = ["write_items"]

ENDINGS = 4
_MOST_LINE_CHARS = 1 << 20


def write_items(questions: Path, shards: Path) -> int:
    """Write the questions of a file as items beside finished shards; return how many. There whole, or not at all.

    Raises Refusal for a file that cannot be read, and names the line that is no question with its answer.
    """
    tokenizer, count, half = _tokenizer_of(shards), 0, shards / f".{FILE}.{os.getpid()}"
    try:
        with half.open("w", encoding="utf-8") as out:
            for context, endings, label in _questions(questions):
                first, *rest = (ids.tolist() for ids in tokenizer.encode([context, *(f" {one}" for one in endings)]))
                out.write(json.dumps({"context": first, "endings": rest, "label": label}) + "\n")
                count += 1
            out.flush()
            os.fsync(out.fileno())
        if not count:
            raise Refusal("data.empty", f"{questions} holds no question.", hint="Take hellaswag_val.jsonl.")
        os.replace(half, shards / FILE)
    finally:
        half.unlink(missing_ok=True)
    return count


def _tokenizer_of(shards: Path) -> Tokenizer:
    """The tokeniser that the shards were made with."""
    try:
        name = json.loads((shards / "data.json").read_bytes())["tokenizer"]["name"]
    except (OSError, ValueError, KeyError, TypeError):
        what = f"{shards} is no folder of finished shards."
        raise Refusal("data.bad_manifest", what, hint="Make one first: gpurun data prepare.") from None
    if name == "gpt2":
        return load_gpt2(say)
    if not (shards / "vocab.json").is_file():
        what = f"{shards} has no vocab.json, and only GPT-2's vocabulary is known without one."
        raise Refusal("data.no_vocabulary", what, hint="Copy it from where the shards were made.")
    return reopen(name, shards)


def _questions(path: Path) -> Iterator[tuple[str, list[str], int]]:
    """Context, endings and label of each line."""
    number = 0
    try:
        with path.open(encoding="utf-8") as lines:
            while line := lines.readline(_MOST_LINE_CHARS):
                number += 1
                if line.strip():
                    yield _question(json.loads(line))
    except OSError as error:
        raise Refusal("data.unreadable", f"{path} cannot be read: {error.strerror}.", hint="Check the path.") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"Line {max(1, number)} of {path} is no question of HellaSwag with its answer: {error!r}."
        hint = "Take hellaswag_val.jsonl as its authors publish it; the test set has no answers."
        raise Refusal("data.no_question", what, hint=hint) from None


def _question(record: Any) -> tuple[str, list[str], int]:
    context, endings, label = record["ctx"], record["endings"], record["label"]
    texts = [context, *endings]
    if len(endings) != ENDINGS or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError("a context and four endings are wanted")
    if type(label) is not int or not 0 <= label < ENDINGS:
        raise ValueError("a label of 0 to 3 is wanted")
    return context, list(endings), label


def main() -> int:
    """Do what the command line asks for; return the exit code."""
    return run_program(_do, left="Nothing was left behind.", less="make room")


def _do(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m trainer.prepare.hellaswag", description="Questions to items.")
    parser.add_argument("--questions", type=Path, required=True, help="hellaswag_val.jsonl")
    parser.add_argument("--shards", type=Path, required=True, help="a folder of finished shards")
    given = parser.parse_args(arguments)
    say(f"{given.questions.name} beside the shards of {given.shards}")
    return {"v": 1, "items": write_items(given.questions, given.shards), "file": str(given.shards / FILE)}


if __name__ == "__main__":
    sys.exit(main())
