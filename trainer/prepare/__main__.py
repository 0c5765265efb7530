"""`python -m trainer.prepare`: progress on stderr, one JSON line on stdout, exit 2 with {"error": …} for a refusal."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from trainer.prepare.build import Request, accompany, prepare
from trainer.prepare.errors import Refusal
from trainer.prepare.pairs.build import BUILT_IN, PairRequest, prepare_pairs
from trainer.prepare.pairs.tokenizers import TOKENIZERS
from trainer.prepare.program import run_program, say
from trainer.prepare.tokenizers import NAMES


def main() -> int:
    """Prepare what the command line asks for; return the exit code."""
    less = "prepare less text with --set data.limit_mb=10"
    return run_program(_do, left="Nothing was left behind.", less=less)


def _do(arguments: list[str]) -> dict[str, Any]:
    """Prepare a text, or what shards that exist already need beside them."""
    given = _given(arguments)
    shards, items = given.pop("shards"), given.pop("hellaswag_items")
    if shards is None:
        return _prepare(given)
    context = given["context"]
    return accompany(shards.absolute(), given["prompts"], given["out"], say, context=context, items=items)


def _prepare(given: dict[str, Any]) -> dict[str, Any]:
    """Prepare a text, or sentence pairs where the tokeniser is one of pairs."""
    if given["tokenizer"] in TOKENIZERS:
        del given["cache"]  # Pairs are few, and tokenised in seconds.
        return prepare_pairs(PairRequest(**given), say)
    if given["source"] in BUILT_IN:
        what = f"{given['source']} is sentence pairs, and the tokeniser {given['tokenizer']} makes none."
        raise Refusal("data.parallel", what, hint=f"Take one of: {', '.join(TOKENIZERS)}.")
    # A window's last token is only ever a target.
    least = given.pop("context") + 1
    return prepare(Request(**given, min_tokens=least), say)


def _given(arguments: list[str]) -> dict[str, Any]:
    """Read the command line; a value that cannot be is a Refusal."""
    parser = argparse.ArgumentParser(prog="python -m trainer.prepare", description="Text in, token shards out.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--source", help="a UTF-8 text file, a folder of them, or: stdlib, copy, english-german")
    what.add_argument("--shards", type=Path, help="shards that exist: only write what they need beside them")
    parser.add_argument("--tokenizer", default="gpt2", choices=(*NAMES, *TOKENIZERS))
    parser.add_argument("--val-fraction", type=float, default=0.1, help="the share of the text that is held out")
    parser.add_argument("--prompts", default="[]", help='what samples start from, as JSON: ["The ", "def "]')
    parser.add_argument("--out", type=Path, required=True, help="the folder to make")
    parser.add_argument("--cache", type=Path, help="where tokenised text is kept for the next time")
    parser.add_argument("--limit-bytes", type=int, default=0, help="take this much text (0: all)")
    size = "at most so many characters, words, or trained tokens (0: as many as matter)"
    parser.add_argument("--vocab-limit", type=int, default=0, help=size)
    parser.add_argument("--context", type=int, default=64, help="the model's: what a split must fill, a pair must not")
    parser.add_argument("--hellaswag-items", type=int, default=0, help="so many of those by the shards are asked")
    given = vars(parser.parse_args(arguments))
    given["prompts"] = _prompts(given["prompts"])
    given["out"] = given["out"].absolute()
    if not 0.0 < given["val_fraction"] < 1.0:
        raise Refusal(
            "usage.val_fraction", f"A val_fraction of {given['val_fraction']} is not between 0 and 1.", hint="Try 0.1."
        )
    for name in ("limit_bytes", "vocab_limit"):
        if given[name] < 0:
            raise Refusal(f"usage.{name}", f"A {name} of {given[name]} is negative.", hint="0 means no limit.")
    return given


def _prompts(text: str) -> tuple[str, ...]:
    try:
        prompts = json.loads(text)
    except ValueError:
        prompts = None
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise Refusal(
            "usage.prompts", "--prompts is not a JSON list of strings.", hint="""Write --prompts '["The "]'."""
        )
    return tuple(prompts)


if __name__ == "__main__":
    sys.exit(main())
