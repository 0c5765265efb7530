"""The records that flow from step to step. Frozen, typed, and refused when a key is unknown.

Units stand in the names: `_s` seconds, `_bytes`, `_micros` millionths of a dollar, `_wall` seconds since the epoch.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict

from gpurun.core.money import Micros


class Frozen(BaseModel):
    """A record: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_json(self) -> str:
        """The record as indented JSON with sorted keys, for a file that a person may open."""
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` wrote."""
        return cls.model_validate_json(text)


def canonical(data: Any) -> bytes:
    """The one byte form of JSON data that digests are taken over: sorted keys, no spaces, UTF-8."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_of(data: Any) -> str:
    """The sha256 (hex) of JSON data in canonical form."""
    return hashlib.sha256(canonical(data)).hexdigest()


class Mode(StrEnum):
    """What kind of run this is: paid for, on this machine, or the free rehearsal of a paid one."""

    PAID = "paid"
    LOCAL = "local"
    REHEARSAL = "rehearsal"


class InstanceState(StrEnum):
    """What a provider says of an instance. STOPPED may still be billed; UNKNOWN proves nothing."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    GONE = "GONE"
    UNKNOWN = "UNKNOWN"


class Teardown(StrEnum):
    """How a machine ended: never a bare "ok"."""

    DESTROYED = "destroyed"
    PROCESSES_KILLED_HOST_KEPT = "processes_killed_host_kept"
    STOPPED_DISK_BILLED = "stopped_disk_billed"
    EXPIRES_AT = "expires_at"
    USER_OPERATED = "user_operated"
    NOT_PROVEN = "not_proven"


class GpuNeed(Frozen):
    """What was asked for: `8xA100-80GB` is count 8, name A100, memory_gb 80. `cpu` is a count of 0."""

    count: int
    name: str
    memory_gb: int | None = None

    def __str__(self) -> str:
        if not self.count:
            return "cpu"
        return f"{self.count}x{self.name}" + (f"-{self.memory_gb}GB" if self.memory_gb else "")


class Request(Frozen):
    """What the user asked for, as typed, before anything was decided."""

    recipe: str
    overrides: tuple[str, ...] = ()
    gpu: GpuNeed | None = None
    max_cost_micros: Micros | None = None
    providers: tuple[str, ...] = ()
    region: str | None = None
    data: str | None = None
    hours: float | None = None
    dry_run: bool = False


class Offer(Frozen):
    """One thing that can be rented: a machine type at a price, as seen at a time."""

    provider: str
    type_id: str
    gpu: str
    gpu_count: int
    vram_gb: int
    region: str
    rate_micros_per_hour: Micros
    billing_unit_s: int
    boot_s: int
    price_source: str
    dies_by_itself: str
    arch: str = "x86_64"

    @property
    def label(self) -> str:
        """`8×A100 80G`, or `cpu`."""
        return f"{self.gpu_count}×{self.gpu} {self.vram_gb}G" if self.gpu_count else "cpu"


class Estimate(Frozen):
    """What a recipe is expected to need on an offer; ranges are low to high, `basis` says what they rest on."""

    fits: bool
    peak_bytes: int
    micro_batch: int
    tokens_per_s: tuple[float, float] | None
    train_s: tuple[float, float] | None
    basis: str


class Lease(Frozen):
    """The longest that each part of a rental may take; the deadline is their sum after create is sent."""

    boot_s: int
    ship_s: int
    train_s: int
    collect_s: int
    destroy_s: int
    kill_allowance_s: int = 60

    @property
    def total_s(self) -> int:
        """From create sent to destroy done."""
        return self.boot_s + self.ship_s + self.train_s + self.collect_s + self.destroy_s


class Candidate(Frozen):
    """An offer with what it would take and cost to finish there."""

    offer: Offer
    estimate: Estimate
    lease: Lease | None
    expected_micros: Micros | None
    worst_micros: Micros | None
    finishes: bool
    why_not: str = ""


class DataSummary(Frozen):
    """The shards that a run trains on, in `folder`.

    `beside` is a folder with data.json, vocab.json and prompts.json, for shards that belong to nobody's run; else "".
    """

    folder: str
    beside: str = ""
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    train_tokens: int
    val_tokens: int
    bytes: int
    sha256: str
    source: str


class Plan(Frozen):
    """What will be done and what it may cost at most: shown, agreed to, and then not changed."""

    v: Literal[1] = 1
    run: str
    mode: Mode
    recipe: str
    form: Literal["full", "rehearsal"]
    recipe_sha256: str
    resolved: dict[str, Any]
    parameters: int
    processes: int
    offer: Offer
    estimate: Estimate
    lease: Lease
    cap_micros: Micros | None
    expected_micros: Micros
    worst_micros: Micros
    candidates: tuple[Candidate, ...]
    data: DataSummary
    bundle_sha256: str
    ship_files: int
    ship_bytes: int
    notes: tuple[str, ...] = ()


class Order(Frozen):
    """What a provider is asked to make. The token is its name, its tag and its idempotency key."""

    run: str
    token: str
    attempt: int
    offer: Offer
    deadline_wall: float


class Address(Frozen):
    """How to reach an instance: a folder on this machine, or a host over SSH."""

    kind: Literal["folder", "ssh"]
    folder: str = ""
    host: str = ""
    port: int = 22
    user: str = ""


class Instance(Frozen):
    """What a provider says exists."""

    id: str
    provider: str
    token: str
    run: str
    state: InstanceState
    address: Address | None = None
    gpu: str = ""
    gpu_count: int = 0
    rate_micros_per_hour: Micros | None = None
    created_wall: float | None = None
    deadline_wall: float | None = None
    region: str = ""


class Account(Frozen):
    """Whom a key belongs to, and which permissions it lacks."""

    provider: str
    identity: str
    missing: tuple[str, ...] = ()
