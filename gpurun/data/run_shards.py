"""The data of a run: shards that a person brings are checked to the last token, text is tokenised here and now.

Tokenising and checking happen on the laptop, before anything is rented. The formats stand in docs/FORMATS.md; the work
is done by `python -m trainer.prepare`, a program of its own, because gpurun shares files with the trainer, not code.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpurun.core.errors import UsageError
from gpurun.core.installed_files import page
from gpurun.core.records import digest_of
from gpurun.core.run_plan import DataSummary
from gpurun.data.preparer import run_preparer

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
        beside += ["--hellaswag-items", str(resolved["eval"]["hellaswag_items"])]
        _prepare(beside, resolved, into=into, root=root, say=say)
        _demand_questions(resolved, into, data)
        _demand_a_batch(found, resolved, data)
        return found.model_copy(update={"beside": str(into)})
    if data is None and wanted["source"] not in BUILT_IN:
        raise missing_shards(wanted["source"])
    if data is not None:
        demand_whole(Path(data).expanduser())
    source = wanted["source"] if data is None else _absolute(data, wanted["tokenizer"])
    text = ["--source", source, "--tokenizer", wanted["tokenizer"], "--cache", str(cache)]
    text += ["--val-fraction", str(wanted["val_fraction"]), "--limit-bytes", str(wanted["limit_mb"] << 20)]
    text += ["--vocab-limit", str(wanted["vocab_size"])]
    text += ["--context", str(resolved["model"]["context"])]
    made = _prepare(text, resolved, into=into, root=root, say=say)
    _demand_questions(resolved, into, "DIR")
    found = inspect(into, tokenizer=wanted["tokenizer"], vocab_size=resolved["model"]["vocab_size"])
    _demand_a_batch(found, resolved, source)
    named = {} if source in BUILT_IN else made["skipped"]
    return found.model_copy(update={"passed_over": ", ".join(f"{count} {why}" for why, count in named.items())})


def _demand_a_batch(found: DataSummary, resolved: Mapping[str, Any], source: str) -> None:
    """Refuse a text of which one step would read all, and some of it twice; sentence pairs are counted otherwise."""
    batch = resolved["train"]["batch_tokens"]
    if found.train_tokens > batch or found.tokenizer.endswith("-pairs"):
        return
    raise UsageError(
        "data.too_small",
        f"{source} gives {found.train_tokens:,} tokens to train; a step of the recipe reads {batch:,} and one more.",
        hint="Take more text, or a smaller batch: --set train.batch_tokens=N, which the context divides.",
    )


def _demand_questions(resolved: Mapping[str, Any], folder: Path, data: str) -> None:
    """Refuse here what the trainer would refuse on paid time: HellaSwag's items are wanted and are not there."""
    items = resolved["eval"]["hellaswag_items"]
    if items and not (folder / "hellaswag.jsonl").is_file():
        raise UsageError(
            "data.no_hellaswag",
            f"eval.hellaswag_items is {items}, and there is no hellaswag.jsonl beside the shards.",
            hint=f"gpurun data hellaswag hellaswag_val.jsonl {shlex.quote(data)} makes it; "
            "or --set eval.hellaswag_items=0.",
        )


def _absolute(data: str, tokenizer: str) -> str:
    """The text that --data names; a parallel text may be two files with a comma between them."""
    files = data.split(",") if tokenizer.endswith("-pairs") else [data]
    return ",".join(str(Path(file).expanduser().absolute()) for file in files)


def missing_shards(source: str, recipe: str = "RECIPE") -> UsageError:
    """The recipe wants shards that are nowhere; a path is told where paths go."""
    hint = (
        f"Make the shards once, on this machine: gpurun data prepare {recipe} --out DIR; then add --data DIR. "
        f"To try the recipe now, add --dry-run. More of that: {page('DATA.md')}"
    )
    if any(Path(part).expanduser().exists() for part in source.split(",")):
        hint = f"data.source is a name; a text or shards of your own are named by --data {shlex.quote(source)}."
    return UsageError("data.missing", f"The recipe trains on {source}, and no --data was given.", hint=hint)


def _prepare(
    what: list[str], resolved: Mapping[str, Any], *, into: Path, root: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run the trainer's own tokeniser on a text of at most some hundred megabytes; what it answers."""
    prompts = json.dumps(resolved["sample"]["prompts"])
    return run_preparer("trainer.prepare", [*what, "--prompts", prompts, "--out", str(into)], root=root, say=say)


def demand_whole(folder: Path) -> None:
    """Refuse a folder of shards without its data.json, and one above such folders: its vocabulary would pass for text.

    Raises UsageError; a folder with a data.json, a file, and what is not there are for others to judge.
    """
    if not folder.is_dir() or (folder / "data.json").exists():
        return
    if (folder / "prepare.json").is_file():
        raise UsageError(
            "data.unfinished",
            f"{folder} holds a prepare that was begun and not ended.",
            hint="Run the same `gpurun data prepare` again: it goes on where it stood.",
        )
    if (folder / "vocab.json").is_file() and any(folder.glob("*.bin")):
        raise UsageError(
            "data.no_manifest",
            f"{folder} holds shards and a vocabulary, and no data.json that says what they are.",
            hint="Copy data.json from where the shards were made, or prepare the data again.",
        )
    for below in sorted(folder.iterdir()):
        if (below / "vocab.json").is_file() and any((below / name).is_file() for name in ("data.json", "prepare.json")):
            what = f"{below} is a folder of shards, and {folder} would be read as text."
            raise UsageError("data.shards_below", what, hint=f"Name the shards themselves: --data {below}")


def inspect(folder: Path, *, tokenizer: str, vocab_size: int, context: int = 0) -> DataSummary:
    """Check a folder of shards against its manifest: sizes, magic, digests, every token id.

    `vocab_size` and `context` are the model's, 0 where it takes what comes: a sentence pair must fit into the latter.
    """
    manifest = read_manifest(folder)
    demand_made_for(folder, manifest, tokenizer=tokenizer, vocab_size=vocab_size, context=context)
    made_by = manifest["tokenizer"]
    sizes = [
        _check_shard(folder, shard, made_by["vocab_size"]) for part in ("train", "val") for shard in manifest[part]
    ]
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


def demand_made_for(
    folder: Path, manifest: Mapping[str, Any], *, tokenizer: str, vocab_size: int, context: int = 0
) -> None:
    """Refuse shards that say of themselves that they were made for another tokeniser or model; see `inspect`."""
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
    tokens = made_by["vocab_size"]
    if 0 < vocab_size < tokens:
        raise UsageError(
            "data.vocabulary_larger",
            f"model.vocab_size is {vocab_size}, and the tokeniser {tokenizer!r} of the data has {tokens} tokens.",
            hint=f"Take its own number with --set model.vocab_size=0, or at least {tokens}.",
        )


def read_manifest(folder: Path) -> dict[str, Any]:
    """`data.json`, with the keys that are needed; anything else is a UsageError that says what is wrong."""
    try:
        manifest: dict[str, Any] = json.loads((folder / "data.json").read_bytes())
        of_shards = {"name": str, "tokens": int, "sha256": str}
        for table in (*manifest["train"], *manifest["val"]):
            _demand_types(table, of_shards)
        _demand_types(manifest["tokenizer"], {"name": str, "sha256": str, "vocab_size": int})
        _demand_types(manifest, {"source": dict})
        if not manifest["train"]:
            raise KeyError("train")
    except OSError as error:
        raise UsageError("data.unreadable", f"{folder}/data.json cannot be read: {error.strerror}.",
                         hint="Check the path and its permissions.") from None  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError("data.bad_manifest", f"{folder}/data.json is not a manifest of shards: {error!r}.",
                         hint=f"Prepare the data again; {page('FORMATS.md')} has the form.") from None  # fmt: skip
    return manifest


def _demand_types(table: Mapping[str, Any], types: Mapping[str, type]) -> None:
    """Raise KeyError or TypeError, naming the key, where a table of the manifest has not these keys and types."""
    for key, kind in types.items():
        if type(table[key]) is not kind:
            raise TypeError(f"{key} is {json.dumps(table[key])[:80]}")


def _check_shard(folder: Path, shard: Mapping[str, Any], vocab_size: int) -> int:
    """One shard's size in bytes, once its header, length, digest and token ids hold."""
    import numpy as np

    path = folder / Path(str(shard["name"])).name
    if not path.is_file():
        raise _bad_shard(path, "missing", "is named in data.json and is not there")
    size = path.stat().st_size
    # nanoGPT's have no header: then the size alone says that it is one of those.
    header_bytes = 0 if path.suffix == ".npy" or size == 2 * shard["tokens"] else HEADER_BYTES
    if shard["tokens"] < 1 or size in (0, header_bytes):
        raise _bad_shard(path, "empty", "holds no tokens")
    digest = hashlib.sha256()
    highest = _highest_of_npy(path, shard["tokens"]) if path.suffix == ".npy" else 0
    with path.open("rb") as content:
        head = content.read(header_bytes)
        digest.update(head)
        if header_bytes and head[:4] != MAGIC.to_bytes(4, "little"):
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


def _highest_of_npy(path: Path, tokens: int) -> int:
    """The highest token id of a .npy shard, which must be one row of so many uint16."""
    import numpy as np

    try:
        row = np.load(path, mmap_mode="r")
    except (ValueError, OSError, EOFError) as error:
        raise _bad_shard(path, "npy", f"is not a sound .npy file: {error}") from None
    if row.dtype != np.dtype("<u2") or row.shape != (tokens,):
        raise _bad_shard(path, "npy", f"holds {row.dtype} of the shape {row.shape}, not one row of {tokens} uint16")
    return int(row.max())


def _bad_shard(path: Path, code: str, what: str) -> UsageError:
    return UsageError(
        f"data.{code}", f"{path} {what}.", hint="Prepare the data again, or copy it again from its source."
    )
