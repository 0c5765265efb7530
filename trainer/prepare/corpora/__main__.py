"""`python -m trainer.prepare.corpora`: a corpus of any size, in parallel; called again, it goes on where it was ended.

Talk and `progress {JSON}` lines on stderr, one JSON line on stdout, exit 2 with {"error": …} for a refusal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from trainer.prepare.corpora.executors import EXECUTORS
from trainer.prepare.corpora.pipeline import Order, prepare_corpus
from trainer.prepare.dedupe.signatures import Dedupe
from trainer.prepare.errors import Refusal
from trainer.prepare.program import run_program, say
from trainer.prepare.shards import SHARD_TOKENS
from trainer.prepare.tokenizers import NAMES

_PROGRESS_S = 0.25


def main() -> int:
    """Prepare what the command line asks for; return the exit code."""
    left = "What is finished stays; the same command goes on with it."
    return run_program(_do, left=left, less="name a folder on another disk with --out")


def _do(arguments: list[str]) -> dict[str, Any]:
    return prepare_corpus(_order(arguments), say, _Teller())


class _Teller:
    """Passes on how far it is, now and then, and at the very end."""

    def __init__(self) -> None:
        self._due = 0.0

    def __call__(self, figures: dict[str, int]) -> None:
        now = time.monotonic()
        if now >= self._due or figures["tasks"] == figures["total_tasks"]:
            self._due = now + _PROGRESS_S
            print(f"progress {json.dumps(figures)}", file=sys.stderr, flush=True)


def _order(arguments: list[str]) -> Order:
    """Read the command line; a value that cannot be is a Refusal."""
    parser = argparse.ArgumentParser(prog="python -m trainer.prepare.corpora", description="A corpus in, shards out.")
    parser.add_argument("--source", required=True, help="stdlib, a file, a folder, or hf:OWNER/NAME[/DIR][@REVISION]")
    parser.add_argument("--tokenizer", default="gpt2", choices=NAMES)
    parser.add_argument("--vocab-size", type=int, default=0, help="tokens of bpe, or characters at most")
    parser.add_argument("--dedupe", default="none", help="what makes a duplicate: url,exact,near, or none")
    parser.add_argument("--similarity", type=float, default=Dedupe.threshold, help="of near ones; 0.3 to 1")
    parser.add_argument("--out", type=Path, required=True, help="the folder to make, or to go on with")
    parser.add_argument("--val-fraction", type=float, default=Order.val_fraction, help="the share that is held out")
    parser.add_argument("--shard-tokens", type=int, default=SHARD_TOKENS, help="about as many tokens a shard")
    parser.add_argument("--text-column", default="text", dest="column", help="where rows have their text")
    parser.add_argument("--executor", default="processes", help="who does it; see docs/DATA.md")
    parser.add_argument("--workers", type=int, default=0, help="processes (0: as many as there are cores)")
    parser.add_argument("--least-train-tokens", type=int, default=1, help="fewer are refused")
    parser.add_argument("--least-val-tokens", type=int, default=1, help="fewer are refused")
    given = vars(parser.parse_args(arguments))
    given["out"] = given["out"].absolute()
    kinds, similarity = given.pop("dedupe"), given.pop("similarity")
    given["dedupe"] = None if kinds == "none" else Dedupe(tuple(kinds.split(",")), similarity)
    given["workers"] = given["workers"] or os.cpu_count() or 1
    if not 0.0 < given["val_fraction"] < 1.0:
        what = f"A val-fraction of {given['val_fraction']} is not between 0 and 1."
        raise Refusal("usage.val_fraction", what, hint="Try 0.005.")
    if given["executor"] not in EXECUTORS:
        what = f"--executor {given['executor']} is nobody here."
        raise Refusal("usage.executor", what, hint=f"There are: {', '.join(EXECUTORS)}.")
    # A shard's header counts its tokens in 32 bits; a row group more may come into it.
    for name, least, most in (("workers", 1, 10_000), ("shard_tokens", 1000, 10**9)):
        if not least <= given[name] <= most:
            what = f"--{name.replace('_', '-')} {given[name]} is too {'few' if given[name] < least else 'many'}."
            raise Refusal(f"usage.{name}", what, hint=f"Take {least:,} to {most:,}.")
    return Order(**given)


if __name__ == "__main__":
    sys.exit(main())
