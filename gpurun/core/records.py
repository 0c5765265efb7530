"""The records that flow from step to step: frozen and typed; an unknown key is dropped.

Names contain units: `_s` seconds, `_bytes`, `_micros` millionths of a dollar, `_wall` seconds since the epoch.
"""

from __future__ import annotations

import hashlib
import json
import operator
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_core import PydanticCustomError

from gpurun.core.money import Micros
from gpurun.core.untrusted import Malformed, parse_json


class Frozen(BaseModel):
    """An immutable record; a key that a newer gpurun added is dropped."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    def to_json(self) -> str:
        """Return the record as indented JSON with sorted keys, for a file that people may open."""
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` wrote, or an altered form of it; ValidationError if it is not such a record."""
        try:
            value = parse_json(text)
        except Malformed as error:
            raise ValidationError.from_exception_data(
                cls.__name__, [{"type": PydanticCustomError("malformed", "{why}", {"why": str(error)}), "input": None}]
            ) from None
        return cls.model_validate_json(
            json.dumps(value)
        )  # In JSON mode a list is accepted as a tuple; with Python data it is not.


def canonical(data: Any) -> bytes:
    """Return the one byte form of JSON data for digests: sorted keys, no spaces, UTF-8.

    Half a surrogate pair, which a provider's reply can contain and UTF-8 cannot, stays a JSON escape.
    """
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace")


def digest_json(data: Any) -> str:
    """Return the sha256 (hex) of JSON data in canonical form."""
    return hashlib.sha256(canonical(data)).hexdigest()


class InstanceState(StrEnum):
    """A provider's state of an instance. STOPPED may still be billed; UNKNOWN proves nothing."""

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
    RELEASED = "released"
    STOPPED_DISK_BILLED = "stopped_disk_billed"
    EXPIRES_AT = "expires_at"
    USER_OPERATED = "user_operated"
    NOT_PROVEN = "not_proven"


class GpuNeed(Frozen):
    """The requested GPUs: `8xA100-80GB` is count 8, name A100, memory_gb 80. `cpu` is a count of 0.

    The name `any` is for every card. The count is that of one node: `2x8xA100` is 2 nodes with 8 each. Where they need
    nothing of one another they are `jobs` instead, and each may begin as soon as there is room for it.
    """

    count: int
    name: str
    memory_gb: int | None = None
    nodes: int = 1
    jobs: int = Field(default=1, exclude=True)  # A request is written as its user typed it.

    @property
    def is_any(self) -> bool:
        """Return whether every GPU is accepted."""
        return self.name == "any"

    @property
    def processes(self) -> int:
        """How many train on it: one for each card, or for each node without any."""
        return self.jobs * self.nodes * max(1, self.count)

    @property
    def apart(self) -> GpuNeed:
        """The same for what needs nothing of another node: each node is a job of its own."""
        return self.model_copy(update={"nodes": 1, "jobs": self.nodes * self.jobs})

    def __str__(self) -> str:
        many = f"{self.nodes * self.jobs}x" if self.nodes * self.jobs > 1 else ""
        if not self.count:
            return f"{many}cpu"
        if self.is_any and self.processes == 1:
            return "any"
        return f"{many}{self.count}x{self.name}" + (f"-{self.memory_gb}GB" if self.memory_gb else "")


class Offer(Frozen):
    """One thing that can be rented: a machine type at a price, as observed at a time.

    `memory_gb` is the machine's own where it has no GPU; 0: not known. `tier` is the provider's own word for what else
    is chosen with it (RunPod: secure or community); `spot` may be taken away at any time, and then
    `on_demand_micros_per_hour` is the price of the same on demand, where it is known. `gpu_count` is that of all its
    `nodes` together, and of all its `jobs` (`GpuNeed`).
    """

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
    memory_gb: int = 0
    tier: str = ""
    spot: bool = False
    nodes: int = 1
    on_demand_micros_per_hour: Micros | None = Field(default=None, exclude_if=operator.not_)
    jobs: int = Field(default=1, exclude_if=(1).__eq__)

    @property
    def gpus_per_node(self) -> int:
        """The cards of each node."""
        return self.gpu_count // (self.nodes * self.jobs)

    @property
    def processes_per_node(self) -> int:
        """Return how many processes train on each node: one for each GPU, or one."""
        return max(1, self.gpus_per_node)

    @property
    def processes(self) -> int:
        """How many train on it all."""
        return self.jobs * self.nodes * self.processes_per_node

    @property
    def label(self) -> str:
        """Return `8×A100 80G`, `2×8×A100 80G`, or `cpu`; without memory if that of the GPU is unknown."""
        memory = f" {self.vram_gb}G" if self.vram_gb else ""
        cards = f"{self.gpus_per_node}×{self.gpu}{memory}" if self.gpu_count else "cpu"
        return f"{self.nodes * self.jobs}×{cards}" if self.nodes * self.jobs > 1 else cards

    @property
    def place(self) -> str:
        """Return where and how it is rented: `us-east-1`, `secure`, `EU-RO-1 community spot`."""
        words = (self.region if self.region != "any" else "", self.tier, "spot" if self.spot else "")
        return " ".join(filter(None, words)) or "any"


class RunKeys(Frozen):
    """The two key pairs of one run, in OpenSSH's form: the client's, for login, and the host's, expected there.

    The host's private key is sent to the machine before it boots; the client's never leaves this computer.
    """

    client_public: str
    host_public: str
    host_private: SecretStr


class Order(Frozen):
    """A create request to a provider. The token is its name, its tag and its idempotency key.

    `image` overrides the provider's default. `deadline_wall` is by the provider's clock. `lease_s` is the same deadline
    as seconds after create was sent (or after the start of a queued job), for a machine whose clock is wrong. The
    same order sent twice is the same request byte for byte.
    """

    run: str
    token: str
    attempt: int
    offer: Offer
    deadline_wall: float
    lease_s: int = 0
    keys: RunKeys | None = None
    disk_gb: int = 0
    image: str = ""


class Address(Frozen):
    """How to reach an instance: a folder of this home (an older gpurun wrote its whole path), or a host over SSH.

    A job of a cluster has a folder on the login host.
    """

    kind: Literal["folder", "ssh"]
    folder: str = ""
    host: str = ""
    port: int = 22
    user: str = ""

    @property
    def place(self) -> str:
        """Return `host:port` for messages; an IPv6 address is in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Instance(Frozen):
    """A provider's description of what exists.

    `type_id` is the machine type read back, for comparison with the offer's. `said` is the provider's own word for the
    state ("unhealthy", "preempted"). With `rate_is_limit` the provider reports only the most that it bills per hour, as
    AWS does for spot. `ended_wall` is the provider's time of the end, if it reports one. For a queued job
    `started_wall` is when it began to run, by our clock, and `ran_s` is how long it ran, once it is over.
    """

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
    type_id: str = ""
    said: str = ""
    rate_is_limit: bool = Field(default=False, exclude_if=operator.not_)
    ended_wall: float | None = None
    started_wall: float | None = None
    ran_s: float | None = None


class Leftover(Frozen):
    """A side resource that a rental leaves at a provider: a key, a firewall group, a volume, a schedule.

    `deadline_wall` is its rental's, if the resource carries it: after that it is no longer needed, unless it
    `holds` finished results of a training.
    """

    provider: str
    kind: str
    id: str
    run: str
    token: str
    region: str = ""
    billed: bool = False
    holds: bool = False
    deadline_wall: float | None = None


class Charge(Frozen):
    """The amount that a provider says it billed for an instance; `settled` once it no longer changes."""

    provider: str
    instance_id: str
    micros: Micros
    settled: bool


class Account(Frozen):
    """The owner of a key, and the permissions that the key lacks.

    `balance_micros` is what is left on a prepaid account, `clock_ahead_s` how far this machine's clock is ahead of the
    provider's; None if the provider does not report it.
    """

    provider: str
    identity: str
    missing: tuple[str, ...] = ()
    balance_micros: Micros | None = None
    clock_ahead_s: float | None = None
