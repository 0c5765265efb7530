"""Lists public ready-made shards, on the Hugging Face hub or in a list of addresses, for the machine to download.

This computer requests only the shards' names, sizes and digests, and the first bytes of one shard. It sends no key,
because a rented machine never has a key, and could not download a data set that needs one.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import shlex
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, urlsplit

from pydantic import TypeAdapter, ValidationError

from gpurun.core.errors import UsageError
from gpurun.core.installed_files import recipe_file as recipe_files
from gpurun.core.installed_files import shards as shard_files
from gpurun.core.installed_files import tokenizer as tokenizers
from gpurun.core.run_plan import DataSummary, PublicFile
from gpurun.core.untrusted import parse_json, parse_object
from gpurun.data.foreign_shards import split_of
from gpurun.data.shard_folder import HEADER_BYTES
from gpurun.data.source_names import HUB

__all__ = ["downloaded_by_the_machine", "files_of_the_hub"]

_HUB = "https://huggingface.co"
_TALK_S = 20.0
_MOST_BYTES = 16 << 20
_LLM_C = (20240520).to_bytes(4, "little") + (1).to_bytes(4, "little")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NEXT = re.compile(r'<([^>]+)>; *rel="next"')
_DOWNLOADED = "Download it here, then: --data FOLDER --stage s3://BUCKET/PREFIX."


@dataclass(frozen=True)
class _Set:
    """A public set of shards: its name and revision, its files by their original names, and the hub's address."""

    name: str
    files: tuple[PublicFile, ...]
    origin: str = ""

    def shards(self, split: str) -> list[PublicFile]:
        """Return a split's shards in the order of their names, renamed as in a run's data."""
        found = sorted((file for file in self.files if split_of(Path(file.name)) == split), key=lambda file: file.name)
        numbered = enumerate(found, 1 if split == "train" else 0)
        return [file.model_copy(update={"name": f"{split}_{number:06d}.bin"}) for number, file in numbered]


def downloaded_by_the_machine(
    data: str, resolved: Mapping[str, Any], into: Path, say: Callable[[str], None]
) -> DataSummary:
    """Return the shards that the machine will download: as many of a public set as the recipe's steps need.

    Write data.json and vocab.json to `into`. UsageError if the set does not exist, needs a key, or has no shards in
    llm.c's format.
    """
    name, train = resolved["data"]["tokenizer"], resolved["train"]
    if name != "gpt2":
        what = f"The recipe's tokeniser is {name}; shards of {data} have GPT-2's tokens."
        raise UsageError("data.other_tokenizer", what, hint="Use a recipe with GPT-2's tokens, or your own data.")
    found = (
        _list_hub_set(data.removeprefix(HUB), say)
        if data.startswith(HUB)
        else _read_listed_set(Path(data).expanduser())
    )
    shards = {split: found.shards(split) for split in ("train", "val")}
    if missing := [split for split, files in shards.items() if not files]:
        what = f"{data} has no llm.c shards (.bin) with {' or '.join(missing)} in their names."
        hint = f"If it is a set of texts, make shards first: gpurun data prepare RECIPE --source {shlex.quote(data)}"
        raise UsageError("data.no_public_shards", what, hint=hint)
    shards["train"] = _select_first_shards(shards["train"], train["steps"] * train["batch_tokens"])
    files = [*shards["train"], *shards["val"]]
    if len({file.sha256 for file in files}) < len(files):
        what = f"Two shards of {data} contain the same tokens, so its results would be wrong."
        raise UsageError("data.same_shard", what, hint="Use another set, or another revision of it.")
    _require_llm_c(files[-1])
    tokenizer = tokenizers.load_gpt2(say)
    entries = {split: [_build_entry(file) for file in some] for split, some in shards.items()}
    digest = hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()
    source = {"kind": "public", "name": found.name, "digest": digest}
    manifest = shard_files.manifest_of(name, tokenizer.tokens, tokenizer.eot_id, source, entries)
    into.mkdir(parents=True)
    shard_files.write_json(into / "vocab.json", tokenizers.vocabulary_json(name, tokenizer.tokens))
    shard_files.write_json(into / "data.json", manifest)
    size = sum(file.bytes for file in files)
    say(f"the machine will download {len(files)} shards of {found.name} itself, {size / 1e9:,.2f} GB")
    return DataSummary(
        folder=str(into),
        tokenizer=name,
        tokenizer_sha256=manifest["tokenizer"]["sha256"],
        vocab_size=len(tokenizer.tokens),
        train_tokens=sum(entry["tokens"] for entry in entries["train"]),
        val_tokens=sum(entry["tokens"] for entry in entries["val"]),
        bytes=size,
        sha256=digest,
        source=found.name,
        public=tuple(files),
        public_origin=found.origin,
    )


def _count_tokens_in(file: PublicFile) -> int:
    return (file.bytes - HEADER_BYTES) // 2


def _build_entry(file: PublicFile) -> dict[str, Any]:
    return {"name": file.name, "tokens": _count_tokens_in(file), "bytes": file.bytes, "sha256": file.sha256}


def _select_first_shards(train: list[PublicFile], tokens: int) -> list[PublicFile]:
    """Return the first shards that together have more than `tokens` tokens; all shards if they have fewer."""
    kept, total = list[PublicFile](), 0
    for file in train:
        if total <= tokens:
            kept.append(file)
            total += _count_tokens_in(file)
    return kept


def _require_llm_c(file: PublicFile) -> None:
    """Raise UsageError if a file does not have an llm.c shard's header; the machine later checks the digest."""
    expected = _LLM_C + _count_tokens_in(file).to_bytes(4, "little")
    if _fetch(file.url, {"Range": f"bytes=0-{len(expected) - 1}"})[0][: len(expected)] != expected:
        what = f"{file.url} is not an llm.c shard with {_count_tokens_in(file):,} tokens."
        raise UsageError("data.no_public_shards", what, hint=f"Other shards cannot be used directly. {_DOWNLOADED}")


def files_of_the_hub(data: str, into: Path, say: Callable[[str], None]) -> DataSummary:
    """Return all files of a data set, or of a folder in it, for a command that reads them itself.

    The machine downloads the files whose digest the hub knows (LFS). The other files are small, and are downloaded to
    `into` now.
    """
    found = _fetch_listing(data.removeprefix(HUB), say)
    public, size = list[PublicFile](), 0
    for path, entry in found.entries.items():
        sha256 = str((entry.get("lfs") or {}).get("oid"))
        if _SHA256.fullmatch(sha256):
            public.append(PublicFile(name=path, url=found.url(entry), bytes=entry["lfs"]["size"], sha256=sha256))
        else:
            target = into / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(_fetch(found.url(entry), {})[0])
            size += target.stat().st_size
    if not found.entries:
        raise UsageError("data.hub_missing", f"{data} contains no file.", hint="Check its name on huggingface.co.")
    into.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(json.dumps(sorted((file.name, file.sha256) for file in public)).encode()).hexdigest()
    say(f"the machine will download {len(public)} files of {found.name} itself")
    return DataSummary(
        folder=str(into),
        bytes=size + sum(file.bytes for file in public),
        sha256=digest,
        source=found.name,
        public=tuple(public),
        public_origin=found.origin if found.origin != _HUB else "",
    )


@dataclass(frozen=True)
class _Listing:
    """A data set, or a folder of it, at one commit: the hub's entries, keyed by their paths below that folder."""

    name: str
    origin: str
    resolve: str
    entries: Mapping[str, Any]

    def url(self, entry: Mapping[str, Any]) -> str:
        """Return the address of a file."""
        return f"{self.resolve}/{quote(entry['path'])}"


def _fetch_listing(name: str, say: Callable[[str], None]) -> _Listing:
    """Return a data set's content at the commit that its revision refers to now; the plan is fixed to that commit."""
    place, _, revision = name.partition("@")
    dataset, folder = "/".join(place.split("/")[:2]), place.split("/")[2:]
    origin = (os.environ.get("HF_ENDPOINT") or _HUB).rstrip("/")
    say(f"asking the hub for {dataset}")
    api, at = f"{origin}/api/datasets/{dataset}", quote(revision or "main", safe="")
    try:
        about = parse_object(_fetch(f"{api}/revision/{at}", {}, name)[0])
        if about.get("gated") or about.get("private"):
            what = f"hf:{name} needs HF_TOKEN and its owner's permission, but a rented machine never gets a key."
            raise UsageError("data.gated", what, hint=_DOWNLOADED)
        commit = str(about["sha"])
        tree = _list_tree("/".join([f"{api}/tree/{commit}", *map(quote, folder)]), name)
        paths = {PurePosixPath(entry["path"]): entry for entry in tree if entry["type"] == "file"}
        entries = {str(path.relative_to("/".join(folder))): entry for path, entry in paths.items() if _is_inside(path)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"The hub's answer about hf:{name} cannot be understood: {type(error).__name__}."
        raise UsageError("data.hub_unreachable", what, hint="Try again later, or prepare shards here.") from error
    return _Listing(f"hf:{place}@{commit}", origin, f"{origin}/datasets/{dataset}/resolve/{commit}", entries)


def _is_inside(path: PurePosixPath) -> bool:
    """Return whether a path on the hub stays inside the target folder."""
    return not path.is_absolute() and ".." not in path.parts


def _list_hub_set(name: str, say: Callable[[str], None]) -> _Set:
    """Return the shards of a data set of the hub."""
    found = _fetch_listing(name, say)
    try:
        files = [
            PublicFile(
                name=PurePosixPath(entry["path"]).name,
                url=found.url(entry),
                bytes=entry["lfs"]["size"],
                sha256=entry["lfs"]["oid"],
            )
            for entry in found.entries.values()
            if entry["path"].endswith(".bin") and _SHA256.fullmatch(str((entry.get("lfs") or {}).get("oid")))
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        what = f"The hub's answer about hf:{name} cannot be understood: {type(error).__name__}."
        raise UsageError("data.hub_unreachable", what, hint="Try again later, or prepare shards here.") from error
    return _Set(found.name, tuple(files), found.origin if found.origin != _HUB else "")


def _list_tree(url: str, name: str) -> Iterator[Any]:
    """Yield the entries below a folder on the hub, which lists them in pages."""
    page = f"{url}?recursive=true"
    while page:
        raw, headers = _fetch(page, {}, name)
        yield from parse_json(raw)
        found = _NEXT.search(headers.get("Link") or "")
        page = found[1] if found else ""


def _fetch(url: str, headers: Mapping[str, str], name: str = "") -> tuple[bytes, http.client.HTTPMessage]:
    """Request an address, and return its body and headers; UsageError if that fails."""
    hint = "Check the name and your network. `gpurun data prepare` makes shards from files on this computer."
    try:
        request = urllib.request.Request(url, headers={**headers, "User-Agent": "gpurun"})
        with urllib.request.urlopen(request, timeout=_TALK_S) as answer:
            return answer.read(_MOST_BYTES), answer.headers
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 404) and name:
            what = f"The hub has no public data set hf:{name} ({error.code})."
            hint = (
                f"Check its name on huggingface.co. A rented machine cannot use sets that need HF_TOKEN. {_DOWNLOADED}"
            )
            raise UsageError("data.hub_missing", what, hint=hint) from None
        raise UsageError("data.hub_unreachable", f"{url} returned the status {error.code}.", hint=hint) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        what = f"{urlsplit(url).netloc} cannot be reached: {getattr(error, 'reason', error)}."
        raise UsageError("data.hub_unreachable", what, hint=hint) from None


def _read_listed_set(path: Path) -> _Set:
    """Return the shards in a list file: tables `train` and `val`, each with `url`, `bytes` and `sha256`."""
    try:
        content = recipe_files.parse_toml(path.read_text(encoding="utf-8"))
        listed = [
            {**entry, "name": PurePosixPath(urlsplit(entry["url"]).path).name}
            for entry in content["train"] + content["val"]
        ]
        files = TypeAdapter(tuple[PublicFile, ...]).validate_python(listed)
        wrong = [
            entry.url for entry in files if not entry.url.startswith("https://") or not _SHA256.fullmatch(entry.sha256)
        ]
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        wrong = [" ".join(str(error).split())[:120]]
        files = ()
    if wrong:
        what = f"{path} is not a list of public shards: {wrong[0]}."
        hint = "It must have [[train]] and [[val]] tables, each with url (https), bytes and sha256."
        raise UsageError("data.bad_list", what, hint=hint)
    return _Set(path.name, files)
