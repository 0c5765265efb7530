"""The messages that the agent may send. The machine may be hostile, so a wrong shape, size or name is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError
from pydantic.dataclasses import dataclass

from gpurun.core.artifact_names import ANY_NAME, MOST_PATH_BYTES, path_of, raw_name
from gpurun.remote.interface import FarRefusal
from gpurun.remote.machine_facts import Count, MachineAnswer, Sha256, Text, Wall

MOST_LINE_BYTES = 1 << 20
MOST_MANIFEST_BYTES = 256 << 20
MOST_MANIFEST_FILES = 1_000_000
# The free space is checked for each file: one file may fit although all together do not.
MOST_ANNOUNCED_BYTES = 1 << 50
MOST_GATHERED = 8192
"""How many small files one call requests at most."""
MOST_CHECKPOINTS = 16  # The trainer keeps three.

Name = Annotated[str, Field(max_length=3 * MOST_PATH_BYTES)]  # Each byte of a path may be encoded as %XX.

_PART = re.compile(r"[A-Za-z0-9._=+@,-]{1,80}")
_MOST_PARTS = 9
ANY_NAME_BELOW = tuple(f"{folder}/" for folder in ANY_NAME)
_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)


class BeginAnswer(MachineAnswer):
    """Announces a list of `bytes` bytes: the files ("held") or parts ("verified") of a pack on the machine."""

    codecs: Annotated[tuple[Literal["zstd", "gzip"], ...], FailFast(), Field(min_length=1, max_length=2)]
    kind: Literal["held", "verified"]
    bytes: Count
    sha256: Sha256


class Received(MachineAnswer):
    """How many parts arrived in one call of `receive`."""

    parts: Count


class Shipped(MachineAnswer):
    """The files that the machine has verified. `unpack_s` is how long that took, measured on this computer."""

    files: Count
    bytes: Count
    manifest_sha256: Sha256
    unpack_s: float | None = None


class SetUp(MachineAnswer):
    """The state of the user's set-up script. `bytes` of its log follow; `size` is the log's size, `tail` its end.

    The script is "lost" if no process watches it and no end is recorded, and "rebooted" if the machine was rebooted.
    """

    state: Literal["none", "running", "ended", "killed", "lost", "rebooted"]
    ran_s: Annotated[float, Field(ge=0, le=1e9)]
    exit_code: int | None
    signal: int | None
    size: Count
    bytes: Count
    tail: Annotated[str, Field(max_length=4000)]


class Started(MachineAnswer):
    """The process that watches the job. `already` is True if an earlier call had started the job."""

    keeper_pid: Count
    already: bool
    started_wall: Wall


class GpuNow(MachineAnswer):
    """The current figures of one GPU, as far as it reports them."""

    use_percent: Count | None
    memory_mib: Count | None
    memory_of_mib: Count | None
    celsius: Count | None
    watts: Count | None


class GpuTally(MachineAnswer):
    """Samples of the GPUs during the job: `looks` in all, `busy` with a GPU in use, `own` with a process of the job."""

    looks: Count
    busy: Count
    own: Count
    most_mib: Count


class Sessions(MachineAnswer):
    """The use of a dev box: terminals opened, terminals open now, seconds with one open, seconds in use."""

    terminals: Count
    open: Count
    open_s: Annotated[float, Field(ge=0, le=1e9)]
    used_s: Annotated[float, Field(ge=0, le=1e9)]


class Status(MachineAnswer):
    """The heartbeat. `wall` is when the keeper last wrote it, by the machine's own clock.

    `silent_since_wall` is when the job last wrote a log line or a file, if that is long ago. `idle_at_wall` is when a
    dev box will be ended as idle, if that is soon. For an ended job, `oom_kills` counts the processes that the kernel
    killed for lack of memory while the job ran.
    """

    v: Literal[1]
    state: Literal["idle", "running", "exited"]
    wall: Wall
    pid: Count | None
    started_wall: Wall | None
    exit_code: int | None
    signal: int | None
    stop_reason: Text | None
    soft_stop_wall: Wall | None
    hard_stop_wall: Wall | None
    gpus: Annotated[tuple[GpuNow, ...], FailFast(), Field(max_length=64)] = ()
    gpu_tally: GpuTally | None = None
    silent_since_wall: Wall | None = None
    idle_at_wall: Wall | None = None
    sessions: Sessions | None = None
    oom_kills: Count | None = None
    memory_bytes: Count | None = None
    shm_bytes: Count | None = None


class Lab(MachineAnswer):
    """JupyterLab's port on the machine's loopback, and its token."""

    port: Annotated[int, Field(gt=0, lt=65536)]
    token: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,200}$")]


class Doors(MachineAnswer):
    """How users reach a dev box: the machine's name, the folder on it, and JupyterLab once it has started."""

    host: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,252}$")] = "NODE"
    folder: Annotated[str, Field(pattern=r"^/[^\x00-\x1f\x7f]*$", max_length=MOST_PATH_BYTES)]
    jupyter: Lab | None


class UnsavedFile(MachineAnswer):
    """A file or folder that is not downloaded."""

    name: Annotated[str, Field(max_length=MOST_PATH_BYTES)]
    bytes: Count


class Unsaved(MachineAnswer):
    """What the end of a dev box would destroy: `files` with `bytes`, the `first` of them, and unpushed `commits`."""

    files: Count
    bytes: Count
    first: Annotated[tuple[UnsavedFile, ...], FailFast(), Field(max_length=20)]
    commits: Count
    terminals: Count


class Piece(MachineAnswer):
    """Announces `bytes` bytes of a file, from `offset` on; the whole file has `size` bytes."""

    name: Name
    offset: Count
    bytes: Count
    size: Count


class Polled(MachineAnswer):
    """The first line of the reply to `poll`."""

    status: Status
    chunks: Annotated[tuple[Piece, ...], FailFast(), Field(max_length=16)]


class LeaseAnswer(MachineAnswer):
    """When the keeper stops the trainer, and when it kills the trainer."""

    soft_stop_wall: Wall
    hard_stop_wall: Wall


class StopAnswer(MachineAnswer):
    """Whether a trainer was running and was asked to stop."""

    asked: bool


class EndAnswer(MachineAnswer):
    """Whether the machine's dead-man timer accepted the given time, or already has an earlier one.

    `deadline` is read from the timer afterwards, in whole seconds by the machine's clock. `message` says what failed.
    """

    taken: bool
    deadline: Count | None
    message: Text


class FarewellAnswer(MachineAnswer):
    """How many processes of the run were ended. Its files are gone, except those kept on request."""

    killed: Count


class Gathered(MachineAnswer):
    """How many bytes of small files follow, and the positions of the missing files in the requested list."""

    bytes: Count
    left: Annotated[tuple[Count, ...], FailFast(), Field(max_length=MOST_GATHERED)]


class Sized(MachineAnswer):
    """The length and the digest of the raw bytes that follow."""

    bytes: Count
    sha256: Sha256


class No(MachineAnswer):
    """The reason why the agent refuses a call."""

    code: Annotated[str, Field(pattern=r"^[a-z_]{1,40}$")]
    message: Annotated[str, Field(max_length=4000)]
    needed_bytes: Count | None = None


class _Refused(MachineAnswer):
    error: No


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid", strict=True))
class ManifestFile:
    """A finished file: its percent-encoded name below `out/`, its size and its digest.

    There may be a million of these, and a pydantic model for each would need three times the memory.
    """

    name: Name
    bytes: Count
    sha256: Sha256
    kind: Literal["weights", "optimizer", "state", "sample", "compile_cache", "checkpoint", "output"]
    step: Count

    def as_json(self) -> dict[str, Any]:
        """Return the file's fields as plain data, for a record."""
        return {"name": self.name, "bytes": self.bytes, "sha256": self.sha256, "kind": self.kind, "step": self.step}


class Best(MachineAnswer):
    """The step with the lowest validation loss so far."""

    step: Count
    val_loss: float


class Manifest(MachineAnswer):
    """The list of finished files. A file that is not in this list counts as missing."""

    v: Literal[1] = 1
    latest: Count | None = None
    best: Best | None = None
    files: Annotated[tuple[ManifestFile, ...], FailFast(), Field(max_length=MOST_MANIFEST_FILES)] = ()

    @property
    def total_bytes(self) -> int:
        """Return the total size of all files."""
        return sum(file.bytes for file in self.files)


Model = TypeVar("Model", bound=BaseModel)


def parse_message(model: type[Model], line: bytes, most_bytes: int = MOST_LINE_BYTES) -> Model:
    """Parse one JSON text into the model. Raise FarRefusal `nonsense` if it does not fit."""
    if len(line) > most_bytes:
        raise FarRefusal("nonsense", f"The instance sent {len(line)} bytes, but at most {most_bytes} make sense.")
    try:
        return model.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])[:100]
        raise FarRefusal(
            "nonsense", f"The instance's {model.__name__} is malformed at {place!r}: {first['msg']}."
        ) from None


def refusal_in(line: bytes) -> FarRefusal | None:
    """Return the agent's refusal, if this line is one."""
    try:
        no = parse_message(_Refused, line).error
    except FarRefusal:
        return None
    return FarRefusal(no.code, no.message, needed_bytes=no.needed_bytes)


def understood_manifest(content: bytes, most_bytes: int) -> Manifest:
    """Parse the trainer's MANIFEST.json. Raise FarRefusal `bad_manifest` for a bad name, size or duplicate."""
    manifest = parse_message(Manifest, content, MOST_MANIFEST_BYTES)
    demand_sound(manifest, most_bytes)
    return manifest


def demand_sound(manifest: Manifest, most_bytes: int) -> None:
    """Raise FarRefusal `bad_manifest` if the files do not fit into one folder, or into `most_bytes`.

    Two names must not be equal (for plain names, in any case of letters), and no file may have the name of a folder.
    The number of checkpoints is limited too.
    """
    taken, folders = set[str](), set[str]()
    for file in manifest.files:
        check_name(file.name)
        folded = file.name if file.name.startswith(ANY_NAME_BELOW) else file.name.lower()
        if folded in taken:
            raise FarRefusal("bad_manifest", f"The instance's manifest names {file.name[:100]!r} twice.")
        taken.add(folded)
        folder = folded.rpartition("/")[0]
        while folder and folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    if not folders.isdisjoint(taken):
        raise FarRefusal("bad_manifest", "The instance's manifest has a name that is both a file and a folder.")
    if len({file.step for file in manifest.files if file.kind in ("weights", "optimizer", "state")}) > MOST_CHECKPOINTS:
        raise FarRefusal("bad_manifest", f"The instance's manifest has more than {MOST_CHECKPOINTS} checkpoints.")
    if manifest.total_bytes > most_bytes:
        raise FarRefusal(
            "bad_manifest",
            f"The instance's manifest announces {manifest.total_bytes:,} bytes; at most {most_bytes:,} fit.",
        )


def check_name(name: str) -> None:
    """Raise FarRefusal `bad_manifest` for a name that leads out of its folder, or that FORMATS.md does not allow.

    A command's outputs may have any name that Linux allows, percent-encoded. Other names must be plain.
    """
    try:
        harmless = bool(raw_name(name)) if name.startswith(ANY_NAME_BELOW) else _is_plain(name)
    except ValueError:
        harmless = False
    if not harmless:
        raise FarRefusal("bad_manifest", f"The instance's manifest has the name {name[:100]!r}.")


def locate_file(folder: Path, name: str) -> Path:
    """Return the path below `folder` for a file of the manifest. Raise FarRefusal as `check_name` does."""
    check_name(name)
    return path_of(folder, name) if name.startswith(ANY_NAME_BELOW) else folder / name


def _is_plain(name: str) -> bool:
    """Return whether a name is safe on every file system."""
    parts = name.split("/")
    return len(parts) <= _MOST_PARTS and all(
        _PART.fullmatch(part) and part[0] != "." and part[-1] != "." and not _DEVICE.fullmatch(part) for part in parts
    )
