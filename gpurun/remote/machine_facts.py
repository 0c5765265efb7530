"""The facts that a machine reports about itself, in strict types."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field

from gpurun.core.untrusted import safe_line

Count = Annotated[int, Field(ge=0, le=1 << 62)]
Wall = Annotated[float, Field(ge=0, le=1e12)]
Text = Annotated[str, Field(max_length=500)]
Words = Annotated[str, Field(max_length=500), AfterValidator(safe_line)]
"""Output of programs on the machine, made safe for messages."""
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class MachineAnswer(BaseModel):
    """One reply: strict types, only known keys, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)


class Gpu(MachineAnswer):
    """One CUDA device. `error` says how a small test kernel failed on it."""

    name: Text
    memory_bytes: Count
    capability: Text | None = None
    uuid: Text = ""
    free_bytes: Count | None = None
    error: Words | None = None


class CardFacts(MachineAnswer):
    """One GPU as reported by nvidia-smi. `ecc_errors` are the uncorrected errors since the driver was loaded.

    `used_bytes` of its memory were used before the job, by the processes `holders`, as far as those are visible.
    """

    name: Text
    memory_bytes: Count | None
    driver: Text
    ecc_errors: Count | None
    uuid: Text = ""
    used_bytes: Count | None = None
    mig: bool = False
    holders: Annotated[tuple[Words, ...], FailFast(), Field(max_length=8)] = ()


class FailedTorchLook(MachineAnswer):
    """A Python in which torch did not work, and its last output. `answered` is False after the time limit."""

    python: Words
    answered: bool
    words: Words


class Packages(MachineAnswer):
    """How many distributions a Python has, and the sha256 of their sorted lines NAME==VERSION."""

    count: Count
    sha256: Sha256


class Torch(MachineAnswer):
    """The Python that has torch. `cuda` is torch's CUDA version, or None if no device can be used.

    `built_for` is the CUDA version that torch was built for, and `archs` are the GPU architectures. `error` says why
    torch cannot use the devices. `packages` are the packages in that Python, after --setup.
    """

    found: bool
    python: Text | None
    version: Text | None
    numpy: Text | None = None
    cuda: Text | None
    devices: Annotated[tuple[Gpu, ...], FailFast(), Field(max_length=256)]
    built_for: Text | None = None
    packages: Packages | None = None
    archs: Annotated[tuple[Text, ...], FailFast(), Field(max_length=64)] = ()
    error: Words | None = None
    looks: Annotated[tuple[FailedTorchLook, ...], FailFast(), Field(max_length=64)] = ()


_Names = Annotated[tuple[Words, ...], FailFast(), Field(max_length=256)]


class Exported(MachineAnswer):
    """Names of variables that a login exports: those passed to the job, those withheld, and possible keys."""

    passed: _Names = ()
    withheld: _Names = ()
    keys: _Names = ()
    note: Words = ""


class _Waiting(MachineAnswer):
    seconds: Count
    waits_for: Text


class Looking(MachineAnswer):
    """How long the search for torch has taken, and which Pythons it waits for."""

    looking: _Waiting


class Missing(MachineAnswer):
    """The modules that the job's Python cannot find. `note` says what could not be determined."""

    python: Words
    missing: _Names
    note: Words = ""


class MachineFacts(MachineAnswer):
    """The facts of the machine."""

    v: Literal[1]
    python: Text
    platform: Text
    cpus: Count | None
    memory_bytes: Count
    disk_free_bytes: Count
    codecs: Annotated[tuple[Literal["zstd", "gzip"], ...], FailFast(), Field(min_length=1, max_length=2)]
    wall: Wall
    boot_id: Text
    shipped_sha256: Sha256 | None
    gpus: Annotated[tuple[CardFacts, ...], FailFast(), Field(max_length=256)] = ()
    torch: Torch
    shm_bytes: Count | None = None
    driver_words: Words | None = None
    exported: Exported = Exported()


class Node(MachineAnswer):
    """One node of a job, and the CUDA devices that torch can use on it."""

    name: Text
    devices: Annotated[tuple[Gpu, ...], FailFast(), Field(max_length=256)]


class LinkSpeed(MachineAnswer):
    """The result of an all-reduce over all nodes of a job: the speed of each process in GB/s.

    The speed is None if a node has fewer devices than processes: then nothing was measured.
    """

    nodes: Annotated[tuple[Node, ...], FailFast(), Field(max_length=1024)]
    backend: Literal["nccl", "gloo"]
    seconds: Annotated[float, Field(ge=0, le=1e6)]
    gigabytes_per_s: Annotated[float, Field(ge=0, le=1e6)] | None
