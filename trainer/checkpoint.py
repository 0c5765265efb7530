"""Saves and reads checkpoints. Incomplete files are never trusted, and a checkpoint stays until a newer one is
complete.

A checkpoint is three files. Each is written under a temporary name, flushed to disk, and renamed. Then MANIFEST.json is
replaced by a rename, and from that moment the checkpoint exists. Files that the manifest does not name are leftovers.
Tensors are in safetensors files, which cannot run code when they are read: the length of the header in 8 bytes,
little-endian; a JSON header {name: {dtype, shape, data_offsets}}; then the tensors, one after the other.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from trainer.errors import Refused, SaveFailed
from trainer.shards import sha256_of_file

__all__ = ["Checkpoint", "CheckpointStore", "TensorFileError", "read_checkpoint", "read_tensors", "write_tensors"]

_SUFFIXES = {"weights": "model.safetensors", "optimizer": "optim.safetensors", "state": "state.json"}
_OURS = re.compile(r"\d{6}\.(model\.safetensors|optim\.safetensors|state\.json)(\.tmp)?")
_NAME = re.compile(r"(?!\.\./)[A-Za-z0-9._-]{1,80}(/[A-Za-z0-9._-]{1,80})?")

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_HEADER_LIMIT = 100_000_000

Entry = dict[str, Any]
"""One file of the manifest, with the keys name, bytes, sha256, kind, step."""


class TensorFileError(Exception):
    """Raised if a file is not a valid safetensors file."""


def write_tensors(write: Callable[[memoryview], Any], tensors: Mapping[str, Tensor]) -> None:
    """Pass the file's bytes to `write`, one tensor at a time, so that only one must fit in the host's memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write(memoryview(len(text).to_bytes(8, "little") + text))
    for tensor in tensors.values():
        if tensor.numel():
            write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _read_header(file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """Return the entries in file order and the offset of the first tensor."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _HEADER_LIMIT):
        raise TensorFileError("the header is longer than the file")
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"])), 8 + length
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TensorFileError("the header is not JSON in the expected form") from error


def _entry(name: str, entry: Any, expected_start: int) -> tuple[torch.dtype, list[int], int]:
    """Return an entry's (dtype, shape, bytes); TensorFileError if its start or its length is wrong."""
    try:
        dtype, shape, (start, end) = _DTYPES[entry["dtype"]], list(entry["shape"]), entry["data_offsets"]
        if not all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, start, end)):
            raise ValueError("sizes and offsets must be integers")
    except (KeyError, TypeError, ValueError) as error:
        raise TensorFileError(f"tensor {name} has an invalid description") from error
    bytes_wanted = math.prod(shape) * dtype.itemsize
    if start != expected_start or end - start != bytes_wanted:
        raise TensorFileError(f"tensor {name} does not have the bytes that its shape needs")
    return dtype, shape, bytes_wanted


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return every tensor of the file, on the CPU; raise TensorFileError if it is damaged."""
    tensors: dict[str, Tensor] = {}
    size = path.stat().st_size
    with path.open("rb") as file:
        header, start = _read_header(file, size)
        entries: Iterable[tuple[str, Any]] = header.items()
        offset = 0
        for name, described in entries:
            dtype, shape, length = _entry(name, described, offset)
            data = bytearray(length if start + offset + length <= size else 0)
            if file.readinto(data) != length:
                raise TensorFileError(f"the file ends before tensor {name} does")
            flat = torch.frombuffer(data, dtype=dtype) if length else torch.empty(0, dtype=dtype)
            tensors[name] = flat.reshape(shape)
            offset += length
        if start + offset != size:
            raise TensorFileError("the file is longer than its tensors")
    return tensors


@dataclass(frozen=True)
class Checkpoint:
    """What training needs to continue from a step: tensors by name, and the JSON state."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]


class _Digesting:
    """A file that is being written, with the sha256 and the length of what was written so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sha256, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.sha256.update(data)
        self.bytes += len(data)


def _sync_folder(folder: Path) -> None:
    """Flush the folder's names to disk, so that a rename survives a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: Path, fill: Callable[[_Digesting], None]) -> _Digesting:
    """Write a file completely or not at all; a failure leaves neither a part of it nor the temporary file."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            digesting = _Digesting(file)
            fill(digesting)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    return digesting


def _json_bytes(record: Any) -> bytes:
    return (json.dumps(record, indent=1, allow_nan=False) + "\n").encode()


def _is_entry(entry: Entry) -> bool:
    """Return whether an entry of a manifest has all its fields, with the right types and a safe name."""
    kinds = {"name": str, "bytes": int, "sha256": str, "kind": str, "step": int}
    return all(type(entry[key]) is kind for key, kind in kinds.items()) and bool(_NAME.fullmatch(entry["name"]))


def read_checkpoint(out: Path, step: int) -> Checkpoint:
    """Read the checkpoint of a step, whose digests the caller has verified; Refused if it cannot be read."""
    paths = {kind: out / "checkpoints" / f"{step:06d}.{suffix}" for kind, suffix in _SUFFIXES.items()}
    try:
        state = json.loads(paths["state"].read_text(encoding="utf-8"))
        if not isinstance(state, dict) or type(state.get("step")) is not int or state["step"] != step:
            raise ValueError(f"{paths['state'].name} is not of this step")
        return Checkpoint(step, read_tensors(paths["weights"]), read_tensors(paths["optimizer"]), state)
    except (OSError, ValueError, RecursionError, TensorFileError) as error:
        raise Refused(f"the checkpoint of step {step} cannot be read: {error}") from error


class CheckpointStore:
    """The folder `out/` of a run; only the first process has a store, and only it writes there.

    Kept are the two latest checkpoints, the best one, and at most `keep` earlier ones, spread over the run, whose steps
    are multiples of `every`.
    """

    def __init__(self, out: Path, *, keep: int = 0, every: int = 1) -> None:
        self._out, self._keep, self._every = out, keep, every
        self.latest: int | None = None
        self.best: dict[str, Any] | None = None
        self._files: list[Entry] = []
        self._load_manifest()

    def _load_manifest(self) -> None:
        path = self._out / "MANIFEST.json"
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            self.latest, self.best, self._files = manifest["latest"], manifest["best"], list(manifest["files"])
            judged = self.best is None or {type(self.best[key]) for key in ("step", "val_loss")} <= {int, float}
            sound = manifest["v"] == 1 and judged and all(_is_entry(e) for e in self._files)
        except FileNotFoundError:
            # A process that died during its first save left files of one step only.
            steps = {path.name[:6] for path in (self._out / "checkpoints").glob("*") if _OURS.fullmatch(path.name)}
            if len(steps) > 1:
                lost = "has checkpoints but no MANIFEST.json"
                raise Refused(f"{self._out} {lost}; restore it, or move the folder away") from None
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Refused(f"{path} cannot be understood ({error}); move {self._out} away to start over") from error
        if not sound:
            raise Refused(f"{path} is not a manifest of version 1; move {self._out} away to start over")

    def _write_manifest(self) -> None:
        record = {"v": 1, "latest": self.latest, "best": self.best, "files": self._files}
        content = _json_bytes(record)
        _write(self._out / "MANIFEST.json", lambda file: file.write(content))

    def _of(self, step: int) -> list[Entry]:
        return [e for e in self._files if e["step"] == step and e["kind"] in _SUFFIXES]

    def _is_sound(self, step: int) -> bool:
        """Return whether all three files of a checkpoint exist and have the recorded digests."""
        entries = self._of(step)
        try:
            return {e["kind"] for e in entries} == _SUFFIXES.keys() and all(
                sha256_of_file(self._out / e["name"]) == e["sha256"] for e in entries
            )
        except OSError:
            return False

    def newest_sound(self) -> tuple[int | None, list[int]]:
        """Return the step of the newest checkpoint with valid digests, and the steps of damaged checkpoints.

        The damaged checkpoints are removed from the manifest. The step is None if no checkpoint exists yet; Refused if
        all are damaged. Leftovers of a process that died while saving are deleted.
        """
        damaged: list[int] = []
        found = None
        for step in sorted({e["step"] for e in self._files if e["kind"] in _SUFFIXES}, reverse=True):
            if self._is_sound(step):
                found = step
                break
            damaged.append(step)
        if damaged and found is None:
            raise Refused(f"every checkpoint in {self._out} is damaged (steps {damaged}); move it away to start over")
        if damaged:
            self._files = [e for e in self._files if e["step"] not in damaged]
            self.latest = found
            self.best = None if self.best is not None and self.best["step"] in damaged else self.best
            self._write_manifest()
        self._clear_leftovers()
        return found, damaged

    def has_samples(self, step: int) -> bool:
        """Return whether the manifest lists samples of a step."""
        return any(e["kind"] == "sample" and e["step"] == step for e in self._files)

    def write_samples(self, step: int, texts: Sequence[str]) -> list[str]:
        """Write the samples of a step, list them in the manifest, and return their names."""
        names = [f"samples/{step:06d}-{number}.txt" for number in range(len(texts))]
        with self._saving(f"a sample of step {step}", clear=False):
            for name, text in zip(names, texts, strict=True):
                content = text.encode("utf-8", errors="replace")
                self._put(name, "sample", step, lambda file, content=content: file.write(content))  # type: ignore[misc]
            self._write_manifest()
        return names

    def write_compile_cache(self, step: int, name: str, content: bytes) -> None:
        """Write the compile cache, replacing any earlier one; the next checkpoint's manifest lists it."""
        with self._saving(f"the compile cache of step {step}"):
            put = self._put(name, "compile_cache", step, lambda file: file.write(content))
            self._files = [e for e in self._files if e["kind"] != "compile_cache" or e is put]

    def save(self, checkpoint: Checkpoint, val_loss: float | None) -> tuple[list[str], int]:
        """Save a checkpoint and return its files' names and total bytes; delete checkpoints that are not to be kept.

        `val_loss`, if it was computed at this step, decides whether this checkpoint is the best. Raise SaveFailed if it
        cannot be written; earlier checkpoints are then unchanged.
        """
        step, content = checkpoint.step, _json_bytes(checkpoint.state)
        fills: dict[str, Callable[[_Digesting], None]] = {
            "weights": lambda file: write_tensors(file.write, checkpoint.model),
            "optimizer": lambda file: write_tensors(file.write, checkpoint.optimizer),
            "state": lambda file: file.write(content),
        }
        what = f"the checkpoint of step {step}"
        with self._saving(what):
            names = {kind: f"checkpoints/{step:06d}.{suffix}" for kind, suffix in _SUFFIXES.items()}
            written = [self._put(names[kind], kind, step, fill) for kind, fill in fills.items()]
        with self._saving(what, clear=False):
            self.latest = step
            self._announce(val_loss)
        self._clear_leftovers()
        return [e["name"] for e in written], sum(e["bytes"] for e in written)

    def judge(self, val_loss: float) -> None:
        """Record the validation loss of the latest checkpoint, which was saved before the loss was known."""
        with self._saving(f"the validation loss of step {self.latest}", clear=False):
            self._announce(val_loss)
        self._clear_leftovers()

    def _announce(self, val_loss: float | None) -> None:
        """Write the manifest with the latest checkpoint, whose validation loss is `val_loss`; None if it is unknown."""
        if val_loss is not None and (self.best is None or val_loss < self.best["val_loss"]):
            self.best = {"step": self.latest, "val_loss": val_loss}
        self._forget_old()
        self._write_manifest()

    @contextlib.contextmanager
    def _saving(self, what: str, *, clear: bool = True) -> Iterator[None]:
        """Turn a failed write into SaveFailed, with this object unchanged, and delete the incomplete files.

        If a new manifest may already be on disk, `clear` must be false, because the files that it names are not
        leftovers.
        """
        before = list(self._files), self.latest, self.best
        try:
            yield
        except OSError as error:
            self._files, self.latest, self.best = before
            if clear:
                self._clear_leftovers()
            left = "no checkpoint exists" if self.latest is None else f"the checkpoint of step {self.latest} is intact"
            why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error.strerror)
            raise SaveFailed(f"{what} could not be written to {self._out}: {why}; {left}") from error

    def _put(self, name: str, kind: str, step: int, fill: Callable[[_Digesting], None]) -> Entry:
        """Write one file under `out/` and add it to the next manifest."""
        path = self._out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if any(e["name"] == name for e in self._files):  # A manifest must never list a file with other content.
            self._files = [e for e in self._files if e["name"] != name]
            self._write_manifest()
        digesting = _write(path, fill)
        entry = {"name": name, "bytes": digesting.bytes, "sha256": digesting.sha256.hexdigest()}
        entry |= {"kind": kind, "step": step}
        self._files = [*self._files, entry]
        return entry

    def _forget_old(self) -> None:
        """Remove checkpoints from the list, except the latest two, the best, and those that are spread over the run.

        Samples stay in the list.
        """
        steps = sorted({e["step"] for e in self._files if e["kind"] in _SUFFIXES})
        keep = {*steps[-2:], self.best["step"] if self.best else None}
        if self._keep:
            apart = self._every
            while steps[-1] // apart > self._keep:
                apart *= 2
            keep |= {step for step in steps if step % apart == 0}
        self._files = [e for e in self._files if e["kind"] not in _SUFFIXES or e["step"] in keep]

    def _clear_leftovers(self) -> None:
        """Delete checkpoint files that the manifest on disk does not name."""
        named = {e["name"] for e in self._files}
        folder = self._out / "checkpoints"
        for path in folder.iterdir() if folder.is_dir() else []:
            if _OURS.fullmatch(path.name) and f"checkpoints/{path.name}" not in named:
                with contextlib.suppress(OSError):
                    path.unlink()
