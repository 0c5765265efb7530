"""The records that gpurun's steps and providers exchange: frozen and typed. A key without a field is dropped.

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
        """Return the record in a JSON text, in the form of `to_json` or another; ValidationError if it is not valid."""
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
    """Return JSON data as the bytes from which digests are made: sorted keys, no spaces, UTF-8.

    Half a surrogate pair, which a provider's reply can contain but UTF-8 cannot, becomes a backslash escape.
    """
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace")


def digest_json(data: Any) -> str:
    """Return the sha256 (hex) of JSON data in canonical form."""
    return hashlib.sha256(canonical(data)).hexdigest()


class InstanceState(StrEnum):
    """The state of an instance, from its provider. A STOPPED one may still be billed; UNKNOWN proves nothing."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    GONE = "GONE"
    UNKNOWN = "UNKNOWN"


class Teardown(StrEnum):
    """The kinds of end that a machine can have."""

    DESTROYED = "destroyed"
    PROCESSES_KILLED_HOST_KEPT = "processes_killed_host_kept"
    RELEASED = "released"
    STOPPED_DISK_BILLED = "stopped_disk_billed"
    EXPIRES_AT = "expires_at"
    USER_OPERATED = "user_operated"
    NOT_PROVEN = "not_proven"


class GpuNeed(Frozen):
    """The requested GPUs: `8xA100-80GB` is count 8, name A100, memory_gb 80. `cpu` is a count of 0.

    The name `any` accepts every GPU. `count` is for one node: `2x8xA100` is 2 nodes with 8 GPUs each. Nodes that need
    nothing of each other are counted in `jobs` instead: each is a job that may begin as soon as there is room for it.
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
        """Return how many processes train on it: one for each GPU, or one for each node without GPUs."""
        return self.jobs * self.nodes * max(1, self.count)

    @property
    def apart(self) -> GpuNeed:
        """Return the same request with each node as a job of its own, for work in which nodes need no connection."""
        return self.model_copy(update={"nodes": 1, "jobs": self.nodes * self.jobs})

    def __str__(self) -> str:
        many = f"{self.nodes * self.jobs}x" if self.nodes * self.jobs > 1 else ""
        if not self.count:
            return f"{many}cpu"
        if self.is_any and self.processes == 1:
            return "any"
        return f"{many}{self.count}x{self.name}" + (f"-{self.memory_gb}GB" if self.memory_gb else "")


class Offer(Frozen):
    """One thing that can be rented: a machine type at a price, as the provider offered it at one time.

    `gpu_count` is the number of GPUs in all `nodes` and all `jobs` (`GpuNeed`) together. `memory_gb` is the main memory
    of a machine without GPUs, 0 if not known. `tier` is a provider's own name for a further choice (RunPod: secure or
    community). A `spot` machine may be taken away at any time; `on_demand_micros_per_hour` is the price of the same
    machine on demand, if known. `dies_by_itself` describes in words how the machine ends at its deadline.
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
        """Return the number of GPUs in each node."""
        return self.gpu_count // (self.nodes * self.jobs)

    @property
    def processes_per_node(self) -> int:
        """Return how many processes train on each node: one for each GPU, or one if the node has none."""
        return max(1, self.gpus_per_node)

    @property
    def processes(self) -> int:
        """Return how many processes train on all nodes and jobs together."""
        return self.jobs * self.nodes * self.processes_per_node

    @property
    def label(self) -> str:
        """Return `8×A100 80G`, `2×8×A100 80G`, or `cpu`; without the memory if it is unknown."""
        memory = f" {self.vram_gb}G" if self.vram_gb else ""
        cards = f"{self.gpus_per_node}×{self.gpu}{memory}" if self.gpu_count else "cpu"
        return f"{self.nodes * self.jobs}×{cards}" if self.nodes * self.jobs > 1 else cards

    @property
    def place(self) -> str:
        """Return region, tier and spot in words: `us-east-1`, `EU-RO-1 community spot`; "any" if none is set."""
        words = (self.region if self.region != "any" else "", self.tier, "spot" if self.spot else "")
        return " ".join(filter(None, words)) or "any"


class RunKeys(Frozen):
    """The two key pairs of one run, in OpenSSH's form: the client's for login, and the machine's host key.

    The host's private key is sent to the machine before it boots; the client's never leaves this computer.
    """

    client_public: str
    host_public: str
    host_private: SecretStr


class Order(Frozen):
    """A create request to a provider. The token is the machine's name and tag, and the request's idempotency key.

    `image` overrides the provider's default. `deadline_wall` is by the provider's clock. `lease_s` is the same deadline
    in seconds after the request was sent (or after the start of a queued job), for a machine whose clock is wrong. The
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
    """How to reach an instance: a host over SSH, or a folder.

    The folder is in this home (an older gpurun wrote its whole path), or for a cluster's job on the login node.
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
    """A provider's description of a machine that exists or existed.

    `type_id` is the machine type as read back, for comparison with the offer. `said` is the provider's own word for the
    state ("unhealthy", "preempted"). `rate_is_limit` means that the provider reports only the most that it bills per
    hour, as AWS does for spot. `ended_wall` is the provider's time of the end, if it reports one. For a queued job,
    `started_wall` is when it began to run, by this computer's clock, and `ran_s` how long it ran, once it has ended.
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

    `deadline_wall` is the rental's deadline, if the resource states it. After that the resource is no longer needed,
    unless it `holds` finished results of a training.
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
    """The amount that a provider billed for an instance, as it reports it; `settled` once it no longer changes."""

    provider: str
    instance_id: str
    micros: Micros
    settled: bool


class Account(Frozen):
    """The account that a provider's key belongs to, and the permissions that the key lacks (`missing`).

    `balance_micros` is the balance of a prepaid account; `clock_ahead_s` is how far this computer's clock is ahead of
    the provider's. Each is None if the provider does not report it.
    """

    provider: str
    identity: str
    missing: tuple[str, ...] = ()
    balance_micros: Micros | None = None
    clock_ahead_s: float | None = None
