"""What the far side may say, and nothing else: the instance is hostile, so a wrong shape, size or name is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError
from pydantic.dataclasses import dataclass

from gpurun.core.artifact_names import ANY_NAME, MOST_PATH_BYTES, path_of, raw_name
from gpurun.remote.interface import FarRefusal
from gpurun.remote.machine_facts import Count, Sha256, Text, Wall
from gpurun.remote.machine_facts import MachineAnswer as _Said

MOST_LINE_BYTES = 1 << 20
MOST_MANIFEST_BYTES = 256 << 20
MOST_MANIFEST_FILES = 1_000_000
# Whether there is room for it is seen file by file: one may fit where all do not.
MOST_ANNOUNCED_BYTES = 1 << 50
MOST_GATHERED = 8192
"""How many small files one call asks for."""
MOST_CHECKPOINTS = 16  # The trainer keeps three.

Name = Annotated[str, Field(max_length=3 * MOST_PATH_BYTES)]  # Each byte of a path may be written as %XX.

_PART = re.compile(r"[A-Za-z0-9._=+@,-]{1,80}")
_MOST_PARTS = 9
ANY_NAME_BELOW = tuple(f"{folder}/" for folder in ANY_NAME)
_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)


class BeginAnswer(_Said):
    """What the far side has of a pack that is to come: `bytes` of lines follow, about parts or about whole files."""

    codecs: Annotated[tuple[Literal["zstd", "gzip"], ...], FailFast(), Field(min_length=1, max_length=2)]
    kind: Literal["held", "verified"]
    bytes: Count
    sha256: Sha256


class Received(_Said):
    """How many parts one stream brought."""

    parts: Count


class Shipped(_Said):
    """What was unpacked and verified over there; how long the last of it took, once all was sent, is measured here."""

    files: Count
    bytes: Count
    manifest_sha256: Sha256
    unpack_s: float | None = None


class SetUp(_Said):
    """How the user's own script is over there, and how much of its log follows; `tail` is the end of that log.

    It is "lost" where nobody attends to it and no end of it is on record, and "rebooted" where the machine was.
    """

    state: Literal["none", "running", "ended", "killed", "lost", "rebooted"]
    ran_s: Annotated[float, Field(ge=0, le=1e9)]
    exit_code: int | None
    signal: int | None
    size: Count
    bytes: Count
    tail: Annotated[str, Field(max_length=4000)]


class Started(_Said):
    """The job's keeper; `already` when an earlier call had started it."""

    keeper_pid: Count
    already: bool
    started_wall: Wall


class GpuNow(_Said):
    """What one card does, where it tells that."""

    use_percent: Count | None
    memory_mib: Count | None
    memory_of_mib: Count | None
    celsius: Count | None
    watts: Count | None


class GpuTally(_Said):
    """How often the cards were looked at while the job ran: at work, held by a process of the job, with most memory."""

    looks: Count
    busy: Count
    own: Count
    most_mib: Count


class Sessions(_Said):
    """How people used a dev box: terminals that were opened and that are open, the seconds with one open, or in use."""

    terminals: Count
    open: Count
    open_s: Annotated[float, Field(ge=0, le=1e9)]
    used_s: Annotated[float, Field(ge=0, le=1e9)]


class Status(_Said):
    """The heartbeat: `wall` is when the keeper last wrote it, by the machine's own clock.

    `silent_since_wall` is when the job last wrote a log line or a file, once that is long ago. `idle_at_wall` is when a
    dev box will be ended as idle, once that is soon. Of a job that has ended `oom_kills` are the processes that the
    kernel killed for want of memory while it ran.
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


class Lab(_Said):
    """Where JupyterLab listens on the machine's loopback, and the token that it wants."""

    port: Annotated[int, Field(gt=0, lt=65536)]
    token: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{0,200}$")]


class Doors(_Said):
    """Where people work on a dev box: the machine's name, the folder there, and JupyterLab once it has begun."""

    host: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,252}$")] = "NODE"
    folder: Annotated[str, Field(pattern=r"^/[^\x00-\x1f\x7f]*$", max_length=MOST_PATH_BYTES)]
    jupyter: Lab | None


class UnsavedFile(_Said):
    """A file, or a folder, that does not come home."""

    name: Annotated[str, Field(max_length=MOST_PATH_BYTES)]
    bytes: Count


class Unsaved(_Said):
    """What of a dev box its end would take away, the first of it by name, and how many terminals are open."""

    files: Count
    bytes: Count
    first: Annotated[tuple[UnsavedFile, ...], FailFast(), Field(max_length=20)]
    commits: Count
    terminals: Count


class Piece(_Said):
    """Where the raw bytes that follow belong: `size` is the whole file's."""

    name: Name
    offset: Count
    bytes: Count
    size: Count


class Polled(_Said):
    """The line that `poll` answers."""

    status: Status
    chunks: Annotated[tuple[Piece, ...], FailFast(), Field(max_length=16)]


class LeaseAnswer(_Said):
    """When the keeper stops the trainer, and when it kills it."""

    soft_stop_wall: Wall
    hard_stop_wall: Wall


class StopAnswer(_Said):
    """Whether there was anybody to ask."""

    asked: bool


class EndAnswer(_Said):
    """Whether the machine's dead-man timer goes by the time that it was given, or by an earlier one.

    `deadline` is the timer's own word, in whole seconds by the machine's clock; `message` says what could not be done.
    """

    taken: bool
    deadline: Count | None
    message: Text


class FarewellAnswer(_Said):
    """How many processes of the run were ended; nothing of it is there any more, but what was to be kept."""

    killed: Count


class Gathered(_Said):
    """How many bytes of small files follow, and the places of those in the list that are not there."""

    bytes: Count
    left: Annotated[tuple[Count, ...], FailFast(), Field(max_length=MOST_GATHERED)]


class Sized(_Said):
    """The length and digest of what follows."""

    bytes: Count
    sha256: Sha256


class No(_Said):
    """A refusal."""

    code: Annotated[str, Field(pattern=r"^[a-z_]{1,40}$")]
    message: Annotated[str, Field(max_length=4000)]
    needed_bytes: Count | None = None


class _Refused(_Said):
    error: No


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid", strict=True))
class ManifestFile:
    """A finished file: its name below `out/`, percent-encoded, and what it must weigh and hash to.

    There may be a million of them: a model of each would take three times the room.
    """

    name: Name
    bytes: Count
    sha256: Sha256
    kind: Literal["weights", "optimizer", "state", "sample", "compile_cache", "checkpoint", "output"]
    step: Count

    def as_json(self) -> dict[str, Any]:
        """The same as plain data, for a record."""
        return {"name": self.name, "bytes": self.bytes, "sha256": self.sha256, "kind": self.kind, "step": self.step}


class Best(_Said):
    """The step with the lowest validation loss so far."""

    step: Count
    val_loss: float


class Manifest(_Said):
    """Everything that is finished; a file that is not here does not exist."""

    v: Literal[1] = 1
    latest: Count | None = None
    best: Best | None = None
    files: Annotated[tuple[ManifestFile, ...], FailFast(), Field(max_length=MOST_MANIFEST_FILES)] = ()

    @property
    def total_bytes(self) -> int:
        """All files together."""
        return sum(file.bytes for file in self.files)


Model = TypeVar("Model", bound=BaseModel)


def understood(model: type[Model], line: bytes, most_bytes: int = MOST_LINE_BYTES) -> Model:
    """One JSON text as the model; FarRefusal `nonsense` when it is anything else."""
    if len(line) > most_bytes:
        raise FarRefusal("nonsense", f"The instance answered {len(line)} bytes where at most {most_bytes} make sense.")
    try:
        return model.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])[:100]
        raise FarRefusal(
            "nonsense", f"The instance's {model.__name__} is malformed at {place!r}: {first['msg']}."
        ) from None


def refusal_in(line: bytes) -> FarRefusal | None:
    """The far side's refusal, if this line is one."""
    try:
        no = understood(_Refused, line).error
    except FarRefusal:
        return None
    return FarRefusal(no.code, no.message, needed_bytes=no.needed_bytes)


def understood_manifest(content: bytes, most_bytes: int) -> Manifest:
    """MANIFEST.json as the trainer wrote it; one bad name, size or double makes all of it `bad_manifest`."""
    manifest = understood(Manifest, content, MOST_MANIFEST_BYTES)
    demand_sound(manifest, most_bytes)
    return manifest


def demand_sound(manifest: Manifest, most_bytes: int) -> None:
    """FarRefusal `bad_manifest` where its names could not lie side by side in one folder, or it announces too much."""
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
        raise FarRefusal("bad_manifest", "The instance's manifest has a name that is a file and a folder.")
    if len({file.step for file in manifest.files if file.kind in ("weights", "optimizer", "state")}) > MOST_CHECKPOINTS:
        raise FarRefusal("bad_manifest", f"The instance's manifest has more than {MOST_CHECKPOINTS} checkpoints.")
    if manifest.total_bytes > most_bytes:
        raise FarRefusal(
            "bad_manifest",
            f"The instance's manifest announces {manifest.total_bytes:,} bytes; at most {most_bytes:,} fit.",
        )


def check_name(name: str) -> None:
    """FarRefusal `bad_manifest` for a name that leads out of its folder, or out of its own list (FORMATS.md).

    What a command leaves may have any name that Linux allows, percent-encoded; other names are plain ones.
    """
    try:
        harmless = bool(raw_name(name)) if name.startswith(ANY_NAME_BELOW) else _is_plain(name)
    except ValueError:
        harmless = False
    if not harmless:
        raise FarRefusal("bad_manifest", f"The instance's manifest has the name {name[:100]!r}.")


def locate_file(folder: Path, name: str) -> Path:
    """Where a file of that name lies below a folder; FarRefusal as `check_name`."""
    check_name(name)
    return path_of(folder, name) if name.startswith(ANY_NAME_BELOW) else folder / name


def _is_plain(name: str) -> bool:
    """Whether a name is harmless on every file system."""
    parts = name.split("/")
    return len(parts) <= _MOST_PARTS and all(
        _PART.fullmatch(part) and part[0] != "." and part[-1] != "." and not _DEVICE.fullmatch(part) for part in parts
    )
