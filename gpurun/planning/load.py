"""What has to travel: shards and program there, checkpoints home, and how long a link takes for that."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from gpurun.planning.catalog import terms_of
from gpurun.planning.recipe import ResolvedRecipe, parameters_of

UPLINK_BITS_PER_S = 20e6
DOWNLINK_BITS_PER_S = 50e6
BUCKET_BITS_PER_S = 1e9  # What a rented machine is counted to pull with, until it is measured.
WORTH_A_BUCKET_S = 120
"""Of paid time that going by a bucket saves: less is not worth a word."""
SHIP_START_S = 30  # Connecting, unpacking, checking every digest.
COLLECT_START_S = 60  # Saving, hashing, connecting.
SAVE_START_S = 60  # What the trainer is given to end its step and save, before it is stopped the hard way,
SAVE_BYTES_PER_S = 80e6  # and for each so many bytes a second more: 86 MB/s were measured, of two cores at other work.
CHECKPOINT_BYTES = 12  # A parameter: fp32 weights and AdamW's two moments.
MUON_CHECKPOINT_BYTES = 8  # At least: its matrices have one moment.
CHECKPOINTS_ON_DISK = 4  # The trainer keeps the latest two and the best while it writes another.
KEPT_CHECKPOINTS = 2  # The latest and the best: they come home at the end.
EARLY_CHECKPOINTS = 6  # That come home while it trains, where each byte that leaves is charged; elsewhere all do.


@dataclass(frozen=True)
class Load:
    """What has to travel and to be stored, and over which link (an assumption until it is measured)."""

    ship_bytes: int
    collect_bytes: int
    disk_gb: int
    uplink_bits_per_s: float = UPLINK_BITS_PER_S
    downlink_bits_per_s: float = DOWNLINK_BITS_PER_S

    @property
    def ship_s(self) -> int:
        """The limit for shipping."""
        return SHIP_START_S + ceil(8 * self.ship_bytes / self.uplink_bits_per_s)

    @property
    def collect_s(self) -> int:
        """The limit for saving and bringing home."""
        return COLLECT_START_S + ceil(8 * self.collect_bytes / self.downlink_bits_per_s)

    @property
    def leaving_bytes(self) -> int:
        """The most that leaves the machine where that is charged: what comes home at the end, and what does before."""
        return ceil(self.collect_bytes * (KEPT_CHECKPOINTS + EARLY_CHECKPOINTS) / KEPT_CHECKPOINTS)


def load_of(recipe: ResolvedRecipe, ship_bytes: int, *, vocab_size: int = 0) -> Load:
    """The load of a recipe: what is shipped, and the two checkpoints that come home."""
    return load_home(parameters_of(recipe.tables.model, vocab_size), recipe.tables.hardware.disk_gb, ship_bytes)


def load_home(parameters: int, disk_gb: int, ship_bytes: int = 0) -> Load:
    """What is stored and comes home of a model, whatever was shipped."""
    return Load(ship_bytes, KEPT_CHECKPOINTS * CHECKPOINT_BYTES * parameters, disk_gb)


def least_disk_gb(recipe: ResolvedRecipe, ship_bytes: int, *, vocab_size: int = 0) -> int:
    """How large a disk must be at least: what is shipped, with a tenth to spare, and checkpoints side by side."""
    train = recipe.tables.train
    each = MUON_CHECKPOINT_BYTES if recipe.tables.optim.kind == "muon" else CHECKPOINT_BYTES
    count = min(CHECKPOINTS_ON_DISK, ceil(recipe.steps_left / train.checkpoint_every))
    needed = ship_bytes * 11 // 10 + count * each * parameters_of(recipe.tables.model, vocab_size)
    return ceil(needed / 2**30)


def early_bytes(provider: str, parameters: int) -> int | None:
    """How much may come home before the end, as the plan has paid for it; None where the provider charges nothing."""
    return EARLY_CHECKPOINTS * CHECKPOINT_BYTES * parameters if terms_of(provider).egress_per_gb else None


def save_s(parameters: int) -> int:
    """How long the trainer is given to end its step and save a checkpoint of so many parameters."""
    return SAVE_START_S + int(CHECKPOINT_BYTES * parameters / SAVE_BYTES_PER_S)
