"""Ready shards that are public, on the Hugging Face hub or in a list of addresses: the machine downloads them itself.

Here only their names, sizes and digests are asked for, and the first bytes of one shard. No key is sent: a set that
needs one could not be downloaded by a rented machine, on which there never is one.
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
    """A public set: its name with its revision, its files under their own names, and the hub that a user named."""

    name: str
    files: tuple[PublicFile, ...]
    origin: str = ""

    def shards(self, split: str) -> list[PublicFile]:
        """The shards of a split in the order of their names, under the names that shards have among a run's data."""
        found = sorted((one for one in self.files if split_of(Path(one.name)) == split), key=lambda one: one.name)
        numbered = enumerate(found, 1 if split == "train" else 0)
        return [one.model_copy(update={"name": f"{split}_{number:06d}.bin"}) for number, one in numbered]


def downloaded_by_the_machine(
    data: str, resolved: Mapping[str, Any], into: Path, say: Callable[[str], None]
) -> DataSummary:
    """What the machine will download of a public set for a resolved recipe: no more shards than its steps read.

    `into` gets data.json and vocab.json. UsageError for a set that is not there, needs a key, or has no shards of
    llm.c's kind.
    """
    name, train = resolved["data"]["tokenizer"], resolved["train"]
    if name != "gpt2":
        what = f"The recipe's tokeniser is {name}; shards of {data} have GPT-2's tokens."
        raise UsageError("data.other_tokenizer", what, hint="Take a recipe with GPT-2's tokens, or data of your own.")
    found = _hub_set(data.removeprefix(HUB), say) if data.startswith(HUB) else _listed_set(Path(data).expanduser())
    shards = {split: found.shards(split) for split in ("train", "val")}
    if missing := [split for split, files in shards.items() if not files]:
        what = f"{data} has no shards of llm.c (.bin) with {' or '.join(missing)} in their names."
        hint = f"Of a set of texts make shards first: gpurun data prepare RECIPE --source {shlex.quote(data)}"
        raise UsageError("data.no_public_shards", what, hint=hint)
    shards["train"] = _enough(shards["train"], train["steps"] * train["batch_tokens"])
    files = [*shards["train"], *shards["val"]]
    if len({one.sha256 for one in files}) < len(files):
        what = f"Two shards of {data} hold the same tokens: what is trained on twice, or held out too, tells nothing."
        raise UsageError("data.same_shard", what, hint="Take another set, or another revision of it.")
    _demand_kind(files[-1])
    tokenizer = tokenizers.load_gpt2(say)
    entries = {split: [_entry(one) for one in some] for split, some in shards.items()}
    digest = hashlib.sha256("".join(one.sha256 for one in files).encode()).hexdigest()
    source = {"kind": "public", "name": found.name, "digest": digest}
    manifest = shard_files.manifest_of(name, tokenizer.tokens, tokenizer.eot_id, source, entries)
    into.mkdir(parents=True)
    shard_files.write_json(into / "vocab.json", tokenizers.vocabulary_json(name, tokenizer.tokens))
    shard_files.write_json(into / "data.json", manifest)
    size = sum(one.bytes for one in files)
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


def _tokens_in(file: PublicFile) -> int:
    return (file.bytes - HEADER_BYTES) // 2


def _entry(file: PublicFile) -> dict[str, Any]:
    return {"name": file.name, "tokens": _tokens_in(file), "bytes": file.bytes, "sha256": file.sha256}


def _enough(train: list[PublicFile], tokens: int) -> list[PublicFile]:
    """The first shards that have more than so many tokens together; all of them where they have fewer."""
    kept, total = list[PublicFile](), 0
    for file in train:
        if total <= tokens:
            kept.append(file)
            total += _tokens_in(file)
    return kept


def _demand_kind(file: PublicFile) -> None:
    """Refuse what is no shard of llm.c, by the header of one; whether all tokens are there only the digest tells."""
    wanted = _LLM_C + _tokens_in(file).to_bytes(4, "little")
    if _asked(file.url, {"Range": f"bytes=0-{len(wanted) - 1}"})[0][: len(wanted)] != wanted:
        what = f"{file.url} is no shard of llm.c with {_tokens_in(file):,} tokens."
        raise UsageError("data.no_public_shards", what, hint=f"Only those can be trained on as they are. {_DOWNLOADED}")


def files_of_the_hub(data: str, into: Path, say: Callable[[str], None]) -> DataSummary:
    """All files of a data set, or of a folder of it, for a command that reads them by itself.

    What the hub knows by its digest (LFS) the machine downloads; the others are small, and come into `into` now.
    """
    found = _listing(data.removeprefix(HUB), say)
    public, size = list[PublicFile](), 0
    for path, entry in found.entries.items():
        sha256 = str((entry.get("lfs") or {}).get("oid"))
        if _SHA256.fullmatch(sha256):
            public.append(PublicFile(name=path, url=found.url(entry), bytes=entry["lfs"]["size"], sha256=sha256))
        else:
            target = into / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(_asked(found.url(entry), {})[0])
            size += target.stat().st_size
    if not found.entries:
        raise UsageError("data.hub_missing", f"There is no file in {data}.", hint="Check its name on huggingface.co.")
    into.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(json.dumps(sorted((one.name, one.sha256) for one in public)).encode()).hexdigest()
    say(f"the machine will download {len(public)} files of {found.name} itself")
    return DataSummary(
        folder=str(into),
        bytes=size + sum(one.bytes for one in public),
        sha256=digest,
        source=found.name,
        public=tuple(public),
        public_origin=found.origin if found.origin != _HUB else "",
    )


@dataclass(frozen=True)
class _Listing:
    """What a set, or a folder of it, has at one commit: the hub's entries by their paths below that folder."""

    name: str
    origin: str
    resolve: str
    entries: Mapping[str, Any]

    def url(self, entry: Mapping[str, Any]) -> str:
        """Where a file is."""
        return f"{self.resolve}/{quote(entry['path'])}"


def _listing(name: str, say: Callable[[str], None]) -> _Listing:
    """What a data set has at the commit that its revision means now, which is then the plan's."""
    place, _, revision = name.partition("@")
    dataset, folder = "/".join(place.split("/")[:2]), place.split("/")[2:]
    origin = (os.environ.get("HF_ENDPOINT") or _HUB).rstrip("/")
    say(f"asking the hub for {dataset}")
    api, at = f"{origin}/api/datasets/{dataset}", quote(revision or "main", safe="")
    try:
        about = parse_object(_asked(f"{api}/revision/{at}", {}, name)[0])
        if about.get("gated") or about.get("private"):
            what = f"hf:{name} needs HF_TOKEN and its owner's leave, and no rented machine is given a key."
            raise UsageError("data.gated", what, hint=_DOWNLOADED)
        commit = str(about["sha"])
        tree = _tree("/".join([f"{api}/tree/{commit}", *map(quote, folder)]), name)
        paths = {PurePosixPath(one["path"]): one for one in tree if one["type"] == "file"}
        entries = {str(path.relative_to("/".join(folder))): one for path, one in paths.items() if _is_inside(path)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"The hub's answer about hf:{name} is not understood: {type(error).__name__}."
        raise UsageError("data.hub_unreachable", what, hint="Try again later, or prepare shards here.") from error
    return _Listing(f"hf:{place}@{commit}", origin, f"{origin}/datasets/{dataset}/resolve/{commit}", entries)


def _is_inside(path: PurePosixPath) -> bool:
    """Whether a path of the hub stays below the folder that it is put into."""
    return not path.is_absolute() and ".." not in path.parts


def _hub_set(name: str, say: Callable[[str], None]) -> _Set:
    """The shards of a data set of the hub."""
    found = _listing(name, say)
    try:
        files = [
            PublicFile(
                name=PurePosixPath(one["path"]).name,
                url=found.url(one),
                bytes=one["lfs"]["size"],
                sha256=one["lfs"]["oid"],
            )
            for one in found.entries.values()
            if one["path"].endswith(".bin") and _SHA256.fullmatch(str((one.get("lfs") or {}).get("oid")))
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        what = f"The hub's answer about hf:{name} is not understood: {type(error).__name__}."
        raise UsageError("data.hub_unreachable", what, hint="Try again later, or prepare shards here.") from error
    return _Set(found.name, tuple(files), found.origin if found.origin != _HUB else "")


def _tree(url: str, name: str) -> Iterator[Any]:
    """The files below a folder of the hub, which tells them in pages."""
    page = f"{url}?recursive=true"
    while page:
        raw, headers = _asked(page, {}, name)
        yield from parse_json(raw)
        found = _NEXT.search(headers.get("Link") or "")
        page = found[1] if found else ""


def _asked(url: str, headers: Mapping[str, str], name: str = "") -> tuple[bytes, http.client.HTTPMessage]:
    """What an address answers; UsageError says why it does not, and what to do."""
    hint = "Check the name and your network. `gpurun data prepare` makes shards here, of what is here."
    try:
        request = urllib.request.Request(url, headers={**headers, "User-Agent": "gpurun"})
        with urllib.request.urlopen(request, timeout=_TALK_S) as answer:
            return answer.read(_MOST_BYTES), answer.headers
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 404) and name:
            what = f"The hub has no data set hf:{name} that is open to everybody ({error.code})."
            hint = (
                f"Check its name on huggingface.co. One that needs HF_TOKEN is not for a rented machine. {_DOWNLOADED}"
            )
            raise UsageError("data.hub_missing", what, hint=hint) from None
        raise UsageError("data.hub_unreachable", f"{url} answered {error.code}.", hint=hint) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        what = f"{urlsplit(url).netloc} cannot be asked: {getattr(error, 'reason', error)}."
        raise UsageError("data.hub_unreachable", what, hint=hint) from None


def _listed_set(path: Path) -> _Set:
    """The shards of a list: tables `train` and `val` of `url`, `bytes` and `sha256`."""
    try:
        told = recipe_files.parse_toml(path.read_text(encoding="utf-8"))
        listed = [{**one, "name": PurePosixPath(urlsplit(one["url"]).path).name} for one in told["train"] + told["val"]]
        files = TypeAdapter(tuple[PublicFile, ...]).validate_python(listed)
        wrong = [one.url for one in files if not one.url.startswith("https://") or not _SHA256.fullmatch(one.sha256)]
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        wrong = [" ".join(str(error).split())[:120]]
        files = ()
    if wrong:
        what = f"{path} is no list of public shards: {wrong[0]}."
        hint = "It has [[train]] and [[val]] tables, each with url (https), bytes and sha256."
        raise UsageError("data.bad_list", what, hint=hint)
    return _Set(path.name, files)
