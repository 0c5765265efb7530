"""Estimate the transfers: uploads of shards and program, downloads of checkpoints, their times, and notes for plans.

The size of shards that do not exist yet is estimated. No shards are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from gpurun.core.errors import UsageError
from gpurun.core.money import cost_of, format_usd, times
from gpurun.core.places import AWS, place_facts
from gpurun.core.records import Offer, digest_json
from gpurun.core.run_plan import DataSummary, Plan, Request
from gpurun.core.uplink import Uplink
from gpurun.data.shard_folder import read_manifest, refuse_undescribed_shards, require_fitting_shards
from gpurun.data.source_names import BUILT_IN, PUBLIC, PUBLIC_SHARDS, YOUR_TEXT, require_public_name
from gpurun.jobs.trainer import CHECKPOINT_BYTES, KEPT_CHECKPOINTS
from gpurun.jobs.training.recipe import LoadedRecipe, ResolvedRecipe, known_override
from gpurun.providers.catalog import terms_of
from gpurun.view.number_format import format_bytes, format_duration

DOWNLINK_BITS_PER_S = 50e6
BUCKET_BITS_PER_S = 1e9  # The assumed download speed of a rented machine.
PUBLIC_BITS_PER_S = 5e8  # Assumed for public shards; the time limit is twice the time that follows.
WORTH_A_BUCKET_S = 120
"""Seconds of paid time that a bucket must save to be worth mentioning."""
SHIP_START_S = 30  # For connecting, unpacking and checking every digest.
COLLECT_START_S = 60  # For saving, hashing and connecting.
MUON_CHECKPOINT_BYTES = 8  # Per parameter, at least: under Muon, matrices have one moment.
CHECKPOINTS_ON_DISK = 4  # The trainer keeps the latest two and the best while it writes another one.
EARLY_CHECKPOINTS = 6  # Downloads during training if egress is charged; otherwise there is no limit.


@dataclass(frozen=True)
class Load:
    """The bytes to transfer and store, and the speeds. The speed of a bucket is an assumption.

    `setup_s` is the time limit of the --setup script, which runs before the upload. The machine itself downloads
    `public_bytes` of the `ship_bytes`.
    """

    ship_bytes: int
    collect_bytes: int
    disk_gb: int
    public_bytes: int = 0
    uplink_bits_per_s: float = Uplink().bits_per_s
    downlink_bits_per_s: float = DOWNLINK_BITS_PER_S
    setup_s: int = 0

    @property
    def ship_s(self) -> int:
        """Return the time limit for the upload, in seconds."""
        sent_s = 8 * (self.ship_bytes - self.public_bytes) / self.uplink_bits_per_s
        return SHIP_START_S + ceil(sent_s + download_s(self.public_bytes))

    @property
    def collect_s(self) -> int:
        """Return the time limit for saving and downloading, in seconds."""
        return COLLECT_START_S + ceil(8 * self.collect_bytes / self.downlink_bits_per_s)

    @property
    def leaving_bytes(self) -> int:
        """Return the most bytes that leave a machine whose egress is charged: downloads during and after training."""
        return ceil(self.collect_bytes * (KEPT_CHECKPOINTS + EARLY_CHECKPOINTS) / KEPT_CHECKPOINTS)


def download_s(public_bytes: int) -> float:
    """Return the assumed seconds for downloading public shards."""
    return 8 * public_bytes / PUBLIC_BITS_PER_S


def estimate_load(recipe: ResolvedRecipe, ship_bytes: int, *, vocab_size: int = 0) -> Load:
    """Return the load of a recipe: the upload, and the checkpoints to download."""
    count = KEPT_CHECKPOINTS + recipe.tables.train.keep_checkpoints
    size = CHECKPOINT_BYTES * recipe.parameters(vocab_size)
    return Load(ship_bytes, count * size, recipe.tables.hardware.disk_gb)


def least_disk_gb(recipe: ResolvedRecipe, ship_bytes: int, *, vocab_size: int = 0) -> int:
    """Return the smallest sufficient disk in a cloud's GB (2^30 bytes).

    It holds the upload plus a tenth, and the checkpoints that exist together.
    """
    train = recipe.tables.train
    each = MUON_CHECKPOINT_BYTES if recipe.tables.optim.kind == "muon" else CHECKPOINT_BYTES
    count = min(CHECKPOINTS_ON_DISK + train.keep_checkpoints, ceil(recipe.steps_left / train.checkpoint_every))
    needed = ship_bytes * 11 // 10 + count * each * recipe.parameters(vocab_size)
    return ceil(needed / 2**30)


def early_bytes(plan: Plan) -> int | None:
    """Return the bytes of downloads during training that the plan pays for; None if egress is free."""
    return EARLY_CHECKPOINTS * plan.job.checkpoint_bytes if terms_of(plan.offer.provider).egress_per_gb else None


BYTES_PER_TOKEN = 2
VOCABULARIES = {"gpt2": 50257, "bpe": 8192, "char": 128, "char-pairs": 128, "word-pairs": 32_000}
DEFAULT_TEXT_MB = 32
SOURCE_TOKENS = {
    "climbmix-12b": 12_200_000_000,
    "corpus-12gb": 3_000_000_000,
    "fineweb-10b": 10_300_000_000,
    "fineweb-100b": 100_000_000_000,
    "fineweb-edu-10b": 10_000_000_000,
    "openwebtext": 9_040_000_000,
    "tiny-shakespeare": 1_120_000,
    "wikitext-2": 2_600_000,
}
"""The number of tokens in each source of the bundled recipes. Training may read them more than once."""


def public_shards(request: Request, source: str) -> str:
    """Return the name of the public shards that the machine downloads; "" if the data is uploaded from this computer.

    Raise UsageError for an unknown public name.
    """
    if request.data is not None:
        require_public_name(request.data)
    named = PUBLIC_SHARDS.get(source, "") if request.data is None else request.data
    return named if PUBLIC.fullmatch(named) else ""


def load_for(
    request: Request, full: ResolvedRecipe, data: DataSummary | None, uplink: Uplink
) -> tuple[Load, tuple[str, ...]]:
    """Return what a paid run transfers, over the user's connection or a bucket (--stage), and notes about it.

    Without `data`, the size is estimated from --data or from the recipe's shards, which may not exist yet.
    """
    source, carried = full.tables.data.source, full.earlier.bytes if full.earlier else 0
    if data is not None:
        load = estimate_load(full, data.bytes, vocab_size=data.vocab_size)
        if data.public:
            return replace(load, public_bytes=data.public_bytes, uplink_bits_per_s=uplink.bits_per_s), ()
        return _set_uplink_speed(load, Path(data.folder), request, uplink), ()
    if public := public_shards(request, source):
        size = _count_future_tokens(full) * BYTES_PER_TOKEN
        load = estimate_load(full, carried + size, vocab_size=vocabulary_of(full))
        load = replace(load, public_bytes=size, uplink_bits_per_s=uplink.bits_per_s)
        note = f"The machine downloads {public} itself, about {format_bytes(size)} in {format_duration(load.ship_s)}"
        return load, (f"{note}; `train` reads its list of files and digests before anything is rented.",)
    if request.data is not None or source in BUILT_IN:
        size, shards = (
            _measure_data(request.data, full) if request.data is not None else (_text_bytes(None, full), None)
        )
        return _set_uplink_speed(
            estimate_load(full, carried + size, vocab_size=vocabulary_of(full)), shards, request, uplink
        ), ()
    size = carried + _count_future_tokens(full) * BYTES_PER_TOKEN
    load = _set_uplink_speed(estimate_load(full, size, vocab_size=vocabulary_of(full)), None, request, uplink)
    way = "pulled from the bucket" if request.choices.stage else f"sent from here ({uplink.words})"
    note = f"They are counted as {way}, in {format_duration(load.ship_s)}."
    if source == YOUR_TEXT:
        counted = f"Until one is named, {format_bytes(size)} are counted as {way}"
        return load, (f"The recipe needs your own text: --data text.txt. {counted}.",)
    return load, (f"The shards of {source} (about {format_bytes(size)}) are not here yet. {note}",)


def not_prepared(request: Request, full: ResolvedRecipe, size: int) -> DataSummary:
    """Return the summary of data that is not prepared. If there are finished shards, it is based on their manifest."""
    data = full.tables.data
    source, train_tokens = f"{data.source} (not prepared)", _count_future_tokens(full)
    if public := public_shards(request, data.source):
        source = public
    elif request.data is not None:
        place = Path(request.data).expanduser()
        shards = _read_fitting_shards(full, place) if (place / "data.json").exists() else []
        state = "not checked" if shards else "not prepared"
        source, train_tokens = f"{request.data} ({state})", sum(shard["tokens"] for shard in shards)
    return DataSummary(
        folder="",
        tokenizer=data.tokenizer,
        tokenizer_sha256="",
        vocab_size=vocabulary_of(full),
        train_tokens=train_tokens,
        val_tokens=0,
        bytes=size,
        sha256="",
        source=source,
    )


def _read_fitting_shards(full: ResolvedRecipe, folder: Path) -> list[Mapping[str, Any]]:
    """Return the training shards in the manifest. Raise UsageError if they are for another tokeniser or model."""
    manifest, model = read_manifest(folder), full.tables.model
    tokenizer = full.tables.data.tokenizer
    require_fitting_shards(folder, manifest, tokenizer=tokenizer, vocab_size=model.vocab_size, context=model.context)
    return list(manifest["train"])


def named_data(request: Request) -> str:
    """Return the digest under which earlier runs recorded the data of --data; "" without --data.

    A text has no digest yet. A word that matches no run is returned for it, so that a loss on other data is never
    quoted.
    """
    if request.data is None:
        return ""
    place = Path(request.data).expanduser()
    return digest_json(read_manifest(place)) if (place / "data.json").exists() else "not prepared"


def vocabulary_of(full: ResolvedRecipe) -> int:
    """Return the recipe's vocabulary size. If only the text decides it, return a default for the tokeniser."""
    data = full.tables.data
    return full.tables.model.vocab_size or data.vocab_size or VOCABULARIES[data.tokenizer]


def _count_future_tokens(full: ResolvedRecipe) -> int:
    """Return the number of tokens in shards that do not exist yet: as many as training reads or the source has."""
    train = full.tables.train
    read = train.steps * train.batch_tokens
    return min(read, SOURCE_TOKENS.get(full.tables.data.source, read))


def _set_uplink_speed(load: Load, shards: Path | None, request: Request, uplink: Uplink) -> Load:
    """Return the load with the speed of the user's connection, or of the bucket if --stage names one.

    `shards` is the folder with the shards, if they exist.
    """
    if not request.choices.stage or not load.ship_bytes:
        return replace(load, uplink_bits_per_s=uplink.bits_per_s)
    if shards is None:
        return replace(load, uplink_bits_per_s=BUCKET_BITS_PER_S)
    return replace(load, uplink_bits_per_s=staged_uplink_bits_per_s(shards, load.ship_bytes, uplink))


def staged_uplink_bits_per_s(folder: Path, size_bytes: int, uplink: Uplink) -> float:
    """Return the average speed at which a folder of shards reaches a machine, in bits per second.

    Large files come from the bucket, the others from this computer.
    """
    from gpurun.remote.s3.objects import is_worth_staging

    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    small = min(size_bytes, sum(size for size in sizes if not is_worth_staging(size)))
    seconds = small / uplink.bits_per_s + (size_bytes - small) / BUCKET_BITS_PER_S
    return size_bytes / seconds if seconds else BUCKET_BITS_PER_S


def _measure_data(data: str, full: ResolvedRecipe) -> tuple[int, Path | None]:
    """Return the bytes to transfer for --data, and its folder if that has finished shards, else None.

    `data` may name the two files of a parallel text, separated by a comma.
    """
    places = [Path(data).expanduser()]
    if not places[0].exists():
        places = [Path(part).expanduser() for part in data.split(",")]
    for place in places:
        if not place.exists():
            raise UsageError("data.missing", f"{place} does not exist.", hint="Check the path that --data names.")
        refuse_undescribed_shards(place)
    files = [path for place in places for path in [place, *place.rglob("*")] if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return (size, places[0]) if (places[0] / "data.json").exists() else (_text_bytes(size, full), None)


def _text_bytes(size: int | None, full: ResolvedRecipe) -> int:
    """Return the upper bound of the shards' size: two bytes per character, or the text's own size for BPE."""
    data = full.tables.data
    limit = data.limit_mb << 20 or (size if size is not None else DEFAULT_TEXT_MB << 20)
    text = limit if size is None else min(size, limit)
    return text * BYTES_PER_TOKEN if data.tokenizer in ("char", "char-pairs") else text


_TOLERANCE = 0.25
"""The relative difference allowed between held-out and requested share: only whole documents are held out."""


def unused_notes(request: Request, recipe: LoadedRecipe, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note about the user's `data` settings that differ from how the finished shards were made.

    A recipe's own settings for its rehearsal are ignored. A run that continues gets no note, because it already has its
    shards.
    """
    if request.data is None or request.continues or not (Path(request.data).expanduser() / "data.json").exists():
        return ()
    manifest = read_manifest(Path(request.data).expanduser())
    train, val = (sum(shard["tokens"] for shard in manifest[part]) for part in ("train", "val"))
    share, vocab_size = val / max(1, train + val), manifest["tokenizer"]["vocab_size"]
    holds = {
        "limit_mb": not settings["limit_mb"],
        "val_fraction": abs(share - settings["val_fraction"]) <= _TOLERANCE * settings["val_fraction"],
        "vocab_size": settings["vocab_size"] in (0, vocab_size),
    }
    named = {key: getattr(recipe.tables.data, key) for key in recipe.written["data"]}
    overrides = filter(None, map(known_override, request.overrides))
    named |= {path[-1]: value for path, value in overrides if path[-2] == "data"}
    unused = [
        f"data.{key} {settings[key]}" for key, held in holds.items() if not held and named.get(key) == settings[key]
    ]
    if not unused:
        return ()
    what = f"{request.data} holds finished shards ({share:.1%} held out, a vocabulary of {vocab_size:,})"
    return (f"{what}: {' and '.join(unused)} have no effect on them, only on text.",)


def advice(offer: Offer, uplink: Uplink, size_bytes: int) -> tuple[str, ...]:
    """Return a note on what would shorten the paid upload of that many bytes; () if that saves little."""
    sent_s = 8 * size_bytes / uplink.bits_per_s
    saved_s = sent_s - 8 * size_bytes / BUCKET_BITS_PER_S
    if not offer.rate_micros_per_hour or saved_s < WORTH_A_BUCKET_S:
        return ()

    def worth(seconds: float) -> str:
        return f"{seconds / 60:.0f} min, {format_usd(cost_of(offer.rate_micros_per_hour, seconds, 1))}"

    bill = (
        f" (AWS bills data that leaves its buckets: {aws_bill(size_bytes)})"
        if place_facts(offer.provider).store != AWS
        else ""
    )
    what = f"The upload is paid time, {worth(saved_s)} more than with a bucket: add --stage s3://BUCKET/PREFIX{bill}"
    line = f"A line twice as fast would save {worth(sent_s / 2)}; a tenth fewer tokens, {worth(sent_s / 10)}"
    return (f"{what}. {line}.",)


def aws_bill(size_bytes: int) -> str:
    """Return what AWS charges for that many bytes of egress, in dollars."""
    return format_usd(times(terms_of(AWS).egress_per_gb, ceil(size_bytes / 1e9)))
