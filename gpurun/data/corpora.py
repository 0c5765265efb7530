"""A corpus of any size made into shards, once, for all runs that train on it; and what such a folder holds.

The work is done by `python -m trainer.prepare.corpora`, which streams, and goes on where it was ended (docs/DATA.md).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpurun.core.errors import UsageError
from gpurun.core.run_plan import DataSummary
from gpurun.data.preparer import run_preparer
from gpurun.data.run_shards import BUILT_IN, demand_whole, inspect, read_manifest

HUB = "hf:"
ON_THE_HUB = {
    "fineweb-edu-10b": "hf:HuggingFaceFW/fineweb-edu/sample/10BT",
    "fineweb-100b": "hf:HuggingFaceFW/fineweb/sample/100BT",
}
"""Where the sources of the bundled recipes are to be had."""
_PAIRS = "-pairs"
_THE_HUBS = re.compile(r"HF_.*|XDG_CACHE_HOME|SSL_CERT_(FILE|DIR)|(?i:(https?|all|no)_proxy)")
"""The variables that its client reads: all of its own, and those of the network."""


def prepare_data(
    resolved: Mapping[str, Any],
    *,
    source: str,
    out: Path,
    options: Sequence[str],
    root: Path,
    say: Callable[[str], None],
    progress: Callable[[dict[str, int]], None],
) -> dict[str, Any]:
    """Make `out` a folder of shards for a resolved recipe, or go on with it: {"data": DataSummary's fields, "made": …}.

    `source` "" is the recipe's own; `options` go to the program as they are. Ended at any moment, the same call goes
    on. Raises UsageError for what cannot be prepared.
    """
    wanted = resolved["data"]
    tokenizer = wanted["tokenizer"]
    if tokenizer.endswith(_PAIRS):
        raise UsageError(
            "data.parallel",
            f"The recipe reads sentence pairs ({tokenizer}), which are prepared as a run begins.",
            hint="Hand the pairs to the run itself: gpurun train RECIPE --data FILE.tsv",
        )
    named = source or _own_source(wanted["source"])
    place = named if named in BUILT_IN or named.startswith(HUB) else str(Path(named).expanduser().absolute())
    arguments = ["--source", place, "--tokenizer", tokenizer, "--out", str(out), *options]
    arguments += ["--vocab-size", str(wanted["vocab_size"])]
    # A step of the optimiser must have its tokens, an evaluation at least one window; a window's last is only a target.
    least = {"train": resolved["train"]["batch_tokens"] + 1, "val": resolved["model"]["context"] + 1}
    for split, tokens in least.items():
        arguments += [f"--least-{split}-tokens", str(tokens)]
    # Its cache, its token and the way to it, for those who read from it.
    hub = {name: value for name, value in os.environ.items() if place.startswith(HUB) and _THE_HUBS.fullmatch(name)}
    module = "trainer.prepare.corpora"
    return run_preparer(
        module, arguments, root=root, say=say, progress=progress, environment=hub,
        if_killed="What is finished stays: the same command goes on where it stood. If it is killed again, memory may "
        "be the reason: take fewer --workers.",
    )  # fmt: skip


def add_hellaswag(questions: Path, shards: Path, *, root: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Put HellaSwag's questions, tokenised, beside finished shards: {"items", "file"}."""
    paths = ["--questions", str(questions.expanduser().absolute()), "--shards", str(shards.expanduser().absolute())]
    return run_preparer("trainer.prepare.hellaswag", paths, root=root, say=say)


def inspect_data(folder: Path) -> tuple[DataSummary, dict[str, Any]]:
    """What a folder of shards holds, and its manifest, every byte checked; a UsageError says what is wrong."""
    demand_whole(folder)
    manifest = read_manifest(folder)
    found = inspect(folder, tokenizer=manifest["tokenizer"]["name"], vocab_size=0)
    _check_vocabulary(folder, found.tokenizer_sha256)
    return found, manifest


def _own_source(name: str) -> str:
    """What a recipe's source means here: text that is always there, or a data set of the hub."""
    if name in BUILT_IN or name in ON_THE_HUB:
        return ON_THE_HUB.get(name, name)
    raise UsageError(
        "data.no_source",
        f"The recipe trains on {name}, which is to be had under no name that is known here.",
        hint="Say where its text is: --source FILE, FOLDER or hf:OWNER/NAME.",
    )


def _check_vocabulary(folder: Path, sha256: str) -> None:
    """Hold vocab.json, where there is one, against the tokeniser that data.json names."""
    path = folder / "vocab.json"
    if not path.exists():
        return
    digest = hashlib.sha256()
    try:
        for token in json.loads(path.read_bytes())["tokens_b64"]:
            raw = base64.b64decode(token)
            digest.update(struct.pack("<I", len(raw)) + raw)
        same = digest.hexdigest() == sha256
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    if not same:
        raise UsageError(
            "data.other_tokenizer",
            f"{path} is not the vocabulary that data.json names.",
            hint="Prepare the data again, or copy vocab.json from where the shards were made.",
        )
