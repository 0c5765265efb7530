"""The data of a run: shards that a person brings are checked to the last token, text is tokenised here and now.

Tokenising and checking happen on the laptop, before anything is rented. The formats stand in docs/FORMATS.md; the work
is done by `python -m trainer.prepare`, a program of its own, because gpurun shares files with the trainer, not code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpurun.core.errors import UsageError
from gpurun.core.model import digest_of
from gpurun.core.plan import DataSummary
from gpurun.lifecycle.corpus.preparer import run_preparer

HEADER_BYTES = 1024
MAGIC = 20240520
BUILT_IN = ("stdlib", "copy", "english-german")
"""Sources that need no --data: text and parallel texts that the trainer's tokeniser finds or makes."""
_BLOCK_BYTES = 16 << 20


def prepared(
    resolved: Mapping[str, Any], data: str | None, *, into: Path, cache: Path, root: Path, say: Callable[[str], None]
) -> DataSummary:
    """Shards for a resolved recipe: those in the folder `data`, else text from `data` or the recipe's source.

    Text is tokenised into the new folder `into`; what was tokenised before comes from the cache.
    """
    wanted = resolved["data"]
    if data is not None and (Path(data).expanduser() / "data.json").exists():
        place = Path(data).expanduser().absolute()
        model = resolved["model"]
        found = inspect(place, tokenizer=wanted["tokenizer"], vocab_size=model["vocab_size"], context=model["context"])
        beside = ["--shards", str(place), "--context", str(model["context"])]
        _prepare(beside, resolved, into=into, root=root, say=say)
        _demand_questions(resolved, into, data)
        return found.model_copy(update={"beside": str(into)})
    if data is None and wanted["source"] not in BUILT_IN:
        raise missing_shards(wanted["source"])
    source = wanted["source"] if data is None else _absolute(data, wanted["tokenizer"])
    text = ["--source", source, "--tokenizer", wanted["tokenizer"], "--cache", str(cache)]
    text += ["--val-fraction", str(wanted["val_fraction"]), "--limit-bytes", str(wanted["limit_mb"] << 20)]
    text += ["--vocab-limit", str(wanted["vocab_size"])]
    text += ["--context", str(resolved["model"]["context"])]
    _prepare(text, resolved, into=into, root=root, say=say)
    _demand_questions(resolved, into, "DIR")
    return inspect(into, tokenizer=wanted["tokenizer"], vocab_size=0)


def _demand_questions(resolved: Mapping[str, Any], folder: Path, data: str) -> None:
    """Refuse here what the trainer would refuse on paid time: HellaSwag's items are wanted and are not there."""
    items = resolved["eval"]["hellaswag_items"]
    if items and not (folder / "hellaswag.jsonl").is_file():
        raise UsageError(
            "data.no_hellaswag",
            f"eval.hellaswag_items is {items}, and there is no hellaswag.jsonl beside the shards.",
            hint=f"gpurun data hellaswag hellaswag_val.jsonl {data} makes it; or --set eval.hellaswag_items=0.",
        )


def _absolute(data: str, tokenizer: str) -> str:
    """The text that --data names; a parallel text may be two files with a comma between them."""
    files = data.split(",") if tokenizer.endswith("-pairs") else [data]
    return ",".join(str(Path(file).expanduser().absolute()) for file in files)


def missing_shards(source: str, recipe: str = "RECIPE") -> UsageError:
    """The recipe wants shards that are nowhere."""
    return UsageError(
        "data.missing",
        f"The recipe trains on {source}, and no --data was given.",
        hint=f"Make the shards once, on this machine: gpurun data prepare {recipe} --out DIR (docs/DATA.md); then add "
        "--data DIR. To try the recipe now, add --dry-run.",
    )


def _prepare(
    what: list[str], resolved: Mapping[str, Any], *, into: Path, root: Path, say: Callable[[str], None]
) -> None:
    """Run the trainer's own tokeniser on a text of at most some hundred megabytes."""
    prompts = json.dumps(resolved["sample"]["prompts"])
    run_preparer("trainer.prepare", [*what, "--prompts", prompts, "--out", str(into)], root=root, say=say)


def inspect(folder: Path, *, tokenizer: str, vocab_size: int, context: int = 0) -> DataSummary:
    """Check a folder of shards against its manifest: sizes, magic, digests, every token id.

    `vocab_size` and `context` are the model's, 0 where it takes what comes: a sentence pair must fit into the latter.
    """
    manifest = read_manifest(folder)
    made_by = manifest["tokenizer"]
    if made_by["name"] != tokenizer:
        raise UsageError(
            "data.other_tokenizer",
            f"{folder} was tokenised with {made_by['name']!r}; the recipe uses {tokenizer!r}.",
            hint="Prepare the text again with the recipe's tokeniser, or choose the recipe that fits the shards.",
        )
    longest = manifest.get("pairs", {}).get("longest", 0)
    if 0 < context < longest:
        raise UsageError(
            "data.pair_too_long",
            f"{folder} has a sentence of {longest} positions; model.context is {context}.",
            hint=f"Prepare the text again for this context, or add --set context={longest}.",
        )
    limit = min(made_by["vocab_size"], vocab_size or made_by["vocab_size"])
    sizes = [_check_shard(folder, shard, limit) for part in ("train", "val") for shard in manifest[part]]
    return DataSummary(
        folder=str(folder.absolute()),
        tokenizer=made_by["name"],
        tokenizer_sha256=made_by["sha256"],
        vocab_size=made_by["vocab_size"],
        train_tokens=sum(shard["tokens"] for shard in manifest["train"]),
        val_tokens=sum(shard["tokens"] for shard in manifest["val"]),
        bytes=sum(sizes),
        sha256=digest_of(manifest),
        source=str(manifest["source"].get("kind", "shards")),
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """`data.json`, with the keys that are needed; anything else is a UsageError that says what is wrong."""
    try:
        manifest: dict[str, Any] = json.loads((folder / "data.json").read_bytes())
        parts = [
            shard[key] for part in ("train", "val") for shard in manifest[part] for key in ("name", "tokens", "sha256")
        ]
        wanted = [manifest["tokenizer"][key] for key in ("name", "sha256", "vocab_size")]
        if not manifest["train"] or not parts or not wanted or "source" not in manifest:
            raise KeyError("train")
    except OSError as error:
        raise UsageError("data.unreadable", f"{folder}/data.json cannot be read: {error.strerror}.",
                         hint="Check the path and its permissions.") from None  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError("data.bad_manifest", f"{folder}/data.json is not a manifest of shards: {error!r}.",
                         hint="Prepare the data again; docs/FORMATS.md has the form.") from None  # fmt: skip
    return manifest


def _check_shard(folder: Path, shard: Mapping[str, Any], vocab_size: int) -> int:
    """One shard's size in bytes, once its header, length, digest and token ids hold."""
    import numpy as np

    path = folder / Path(str(shard["name"])).name
    if not path.is_file():
        raise _bad_shard(path, "missing", "is named in data.json and is not there")
    header_bytes = HEADER_BYTES if path.suffix == ".bin" and shard.get("header", True) else 0
    size = path.stat().st_size
    if shard["tokens"] < 1 or size <= header_bytes:
        raise _bad_shard(path, "empty", "holds no tokens")
    digest = hashlib.sha256()
    highest = 0
    with path.open("rb") as content:
        head = content.read(header_bytes)
        digest.update(head)
        if header_bytes and int(np.frombuffer(head[:4], "<i4")[0]) != MAGIC:
            raise _bad_shard(path, "magic", "does not begin like a shard of llm.c")
        if path.suffix == ".bin" and size != header_bytes + 2 * shard["tokens"]:
            raise _bad_shard(path, "truncated", f"has {size} bytes where {shard['tokens']} tokens need another number")
        while block := content.read(_BLOCK_BYTES):
            digest.update(block)
            if path.suffix == ".bin":
                highest = max(highest, int(np.frombuffer(block, "<u2").max()))
    if highest >= vocab_size:
        raise _bad_shard(path, "token_too_high", f"has the token {highest}; the vocabulary ends at {vocab_size - 1}")
    if digest.hexdigest() != shard["sha256"]:
        raise _bad_shard(path, "digest", "is not what data.json says it is: its sha256 differs")
    return size


def _bad_shard(path: Path, code: str, what: str) -> UsageError:
    return UsageError(
        f"data.{code}", f"{path} {what}.", hint="Prepare the data again, or copy it again from its source."
    )
