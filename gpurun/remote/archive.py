"""Makes the upload as a tar stream: the same bytes for the same files, in one pass, and never with a secret.

`survey` first checks each file's name and kind, and searches its content for keys. Files that must not leave this
computer are listed by name, and then nothing is packed. The stream contains each file and, at its end, a manifest with
all digests. The manifest's own sha256 is the name of the whole pack (docs/FORMATS.md).
"""

from __future__ import annotations

import errno
import hashlib
import io
import lzma
import os
import stat
import tarfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol

from gpurun.core.errors import UsageError
from gpurun.core.records import canonical
from gpurun.remote import secret_forms as forms

Codec = Literal["zstd", "gzip"]
Content = Path | bytes
Sources = Mapping[str, Content]

MANIFEST_NAME = ".manifest.json"
MOST_FILES = 100_000
_BLOCK_BYTES = 1 << 20
# Measured on 16-bit tokens: tests/bench/bench_pack.py. Each thread needs about 10 MB.
_ZSTD_LEVEL = 3
_MOST_THREADS = 4
_GZIP_LEVEL = 1

_LEFT_OUT = frozenset(
    {"__pycache__", ".git", ".hg", ".svn", ".DS_Store", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".venv"}
)


@dataclass(frozen=True)
class Elsewhere:
    """The content of a file that is not on this computer: the machine downloads it and checks its digest."""

    sha256: str


Source = str | bytes | Elsewhere


@dataclass(frozen=True)
class PackedFile:
    """A surveyed file: its name in the pack, its size, and a stamp that shows whether it has changed since.

    `source` is the file's path, its content, or a reference to content elsewhere.
    """

    name: str
    bytes: int
    source: Source
    seen: tuple[int, ...] = ()

    @property
    def is_here(self) -> bool:
        """Return whether the content is on this computer and can be sent from it."""
        return not isinstance(self.source, Elsewhere)


@dataclass(frozen=True)
class RefusedPath:
    """A path that must not be uploaded, and why."""

    path: str
    reason: str
    code: str


@dataclass(frozen=True)
class Survey:
    """The files that a pack would contain, sorted by name, and the paths that must not be uploaded."""

    files: tuple[PackedFile, ...]
    refusals: tuple[RefusedPath, ...]

    @property
    def total_bytes(self) -> int:
        """Return the total size of the files' content."""
        return sum(file.bytes for file in self.files)

    def demand_clean(self) -> None:
        """Raise UsageError with the paths that must not be uploaded, if any."""
        if not self.refusals:
            return
        first, more = self.refusals[0], len(self.refusals) - 1
        others = f" ({more} more: gpurun pack --dry-run lists them)" if more else ""
        hint = "Move it out of the folder, or point --data at a folder that holds only data."
        if first.code == "pack.secret":
            hint += " If it is not a key: gpurun pack --allow-secret FILE, or gpurun run --include FILE."
        raise UsageError(first.code, f"{first.path} is not uploaded: {first.reason}{others}.", hint=hint)


def survey(sources: Sources, allowed: Collection[str] = ()) -> Survey:
    """Return the files that would be packed. The absolute paths in `allowed` are packed even if they look like secrets.

    Sources map a name in the pack (`bundle/trainer`, `data`) to a file, a folder (with everything in it) or bytes. A
    source itself may be reached through a link, but links below it are never followed. Caches and version control are
    left out. Unreadable or missing files are refused.
    """
    files: list[PackedFile] = []
    refusals: list[RefusedPath] = []
    for name, source in sources.items():
        if isinstance(source, bytes):
            files.append(PackedFile(name, len(source), source))
        else:
            found: list[PackedFile] = []
            _collect_path(name, str(source.resolve()), allowed, found, refusals)
            # An explicit source for a name takes precedence over a folder's file of that name.
            files += [file for file in found if file.name == name or file.name not in sources]
    if len(files) > MOST_FILES:
        raise UsageError(
            "pack.too_many",
            f"There are {len(files):,} files to upload; the limit is {MOST_FILES:,}.",
            hint="Prepare the data as shards; gpurun plan shows how.",
        )
    ordered = sorted(files, key=lambda file: file.name.encode("utf-8", "surrogateescape"))
    return Survey(tuple(ordered), tuple(sorted(refusals, key=lambda refusal: refusal.path)))


def _collect_path(
    name: str, path: str, allowed: Collection[str], files: list[PackedFile], refusals: list[RefusedPath]
) -> None:
    """Add one path, and everything below it, to `files` or to `refusals`."""
    try:
        reason, facts = _describe_name_objection(os.path.basename(path), path in allowed), os.lstat(path)
        if reason is None and stat.S_ISDIR(facts.st_mode):
            for below in sorted(os.listdir(path)):
                if below not in _LEFT_OUT:
                    _collect_path(f"{name}/{below}", os.path.join(path, below), allowed, files, refusals)
            return
        reason = reason or _describe_kind_objection(facts.st_mode)
        if reason is None and not os.access(path, os.R_OK):
            reason = ("pack.unreadable", "it cannot be read")
        file = PackedFile(name, facts.st_size, path, _identify_version(facts))
        if reason is None and path not in allowed:
            reason = _describe_content_objection(file)
    except OSError as error:
        reason = ("pack.unreadable", (error.strerror or str(error)).lower())
    if reason is not None:
        refusals.append(RefusedPath(path.encode("utf-8", "replace").decode(), reason[1], reason[0]))
    else:
        files.append(file)


def _describe_name_objection(name: str, is_allowed: bool) -> tuple[str, str] | None:
    """Return why a file with this name must not be uploaded, as error code and reason; None if it may be."""
    if is_named_like_secret(name) and not is_allowed:
        return "pack.secret", "its name suggests that it holds a key or password"
    if not name.isprintable() or "\\" in name:
        return "pack.name", "its name has characters that other systems cannot hold"
    return None


def _describe_kind_objection(mode: int) -> tuple[str, str] | None:
    """Return why a file with this mode must not be uploaded, as error code and reason; None for a regular file."""
    if stat.S_ISLNK(mode):
        return "pack.link", "it is a symbolic link, and links are never followed"
    if not stat.S_ISREG(mode):
        return "pack.device", "it is a device, pipe or socket"
    return None


def _describe_content_objection(file: PackedFile) -> tuple[str, str] | None:
    """Return why a file's content must not be uploaded, as error code and reason; None if it may be."""
    found = secret_in(read_blocks(file))
    return ("pack.secret", f"it holds what looks like {found}") if found else None


def _identify_version(facts: os.stat_result) -> tuple[int, ...]:
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


@dataclass
class Pack:
    """The pack of the files in a survey, and how much of them has been read.

    `known` maps the name of each completely read file to its sha256. `sent_bytes` is the compressed size so far.
    """

    survey: Survey
    content_bytes: int = 0
    manifest_sha256: str | None = None
    known: dict[str, str] = field(default_factory=dict)
    sent_bytes: int = 0

    def __post_init__(self) -> None:
        elsewhere = ((file.name, file.source) for file in self.survey.files)
        self.known |= {name: source.sha256 for name, source in elsewhere if isinstance(source, Elsewhere)}

    def stream(self, codec: Codec = "zstd") -> Iterator[bytes]:
        """Yield the pack from its beginning, in chunks of about 1 MB and in constant memory.

        Raise UsageError if the survey has refusals, or if a file has changed since the survey (`pack.changed`).
        """
        compressor = _open_compressor(codec)
        for block in self._stream_tar():
            if chunk := compressor.compress(block):
                yield chunk
        yield compressor.flush()

    def name(self) -> str:
        """Return the sha256 of the manifest. This reads every file once, and sends nothing."""
        for _ in self._stream_tar():
            continue
        assert self.manifest_sha256 is not None
        return self.manifest_sha256

    def _stream_tar(self) -> Iterator[bytes]:
        """Yield the uncompressed tar stream."""
        self.survey.demand_clean()
        self.content_bytes, self.manifest_sha256 = 0, None
        for file in self.survey.files:
            yield from self._stream_entry(file)
        manifest = self.manifest()
        padding = bytes(-len(manifest) % tarfile.BLOCKSIZE)
        yield _build_header(MANIFEST_NAME, len(manifest)) + manifest + padding + bytes(2 * tarfile.BLOCKSIZE)

    def manifest(self) -> bytes:
        """Return the manifest, once every file is known. Set `manifest_sha256` to its sha256."""
        files = [{"name": f.name, "bytes": f.bytes, "sha256": self.known[f.name]} for f in self.survey.files]
        content = canonical({"v": 1, "files": files})
        self.manifest_sha256 = hashlib.sha256(content).hexdigest()
        return content

    def _stream_entry(self, file: PackedFile) -> Iterator[bytes]:
        """Yield the header, content and padding of one file, which is read once."""
        yield _build_header(file.name, file.bytes)
        digest = hashlib.sha256()
        for block in read_blocks(file):
            digest.update(block)
            self.content_bytes += len(block)
            yield block
        yield bytes(-file.bytes % tarfile.BLOCKSIZE)
        self.known[file.name] = digest.hexdigest()


def read_blocks(file: PackedFile) -> Iterator[bytes]:
    """Yield a file's content in blocks. Raise UsageError if it differs from the surveyed file."""
    for offset in range(0, max(1, file.bytes), _BLOCK_BYTES):
        yield content_at(file, offset, min(file.bytes - offset, _BLOCK_BYTES))
    demand_unchanged(file)


def demand_unchanged(file: PackedFile) -> None:
    """Raise UsageError `pack.changed` if the file has changed since the survey."""
    if isinstance(file.source, str):
        try:
            same = _identify_version(os.lstat(file.source)) == file.seen
        except OSError:
            same = False
        if not same:
            raise _changed_file_error(file.source)


def content_at(file: PackedFile, offset: int, size: int) -> bytes:
    """Return `size` bytes of a file, beginning at `offset`. Raise UsageError if it has changed or cannot be read."""
    if isinstance(file.source, bytes):
        return file.source[offset : offset + size]
    if isinstance(file.source, Elsewhere):
        raise UsageError("pack.elsewhere", f"{file.name} is not here.", hint="The machine downloads it itself.")
    try:
        descriptor = os.open(file.source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            content = os.pread(descriptor, size, offset)
            while len(content) < size and (more := os.pread(descriptor, size - len(content), offset + len(content))):
                content += more
            # This is checked after reading, so that an earlier change is noticed too.
            if len(content) != size or _identify_version(os.fstat(descriptor)) != file.seen:
                raise _changed_file_error(file.source)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EACCES):
            raise _changed_file_error(file.source) from error
        what = f"{file.source} cannot be read: {error.strerror}."
        raise UsageError(
            "pack.unreadable", what, hint="Check the disk that holds the file, then run the command again."
        ) from error
    return content


def _changed_file_error(path: str) -> UsageError:
    return UsageError(
        "pack.changed",
        f"{path} changed while it was being packed.",
        hint="Wait until whatever writes it has finished, then run the command again.",
    )


def _build_header(name: str, size: int) -> bytes:
    """Return a file's tar header. Everything in it except name and size is the same for every file."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o644
    return entry.tobuf(tarfile.GNU_FORMAT, "utf-8", "strict")


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


def _open_compressor(codec: Codec) -> _Compressor:
    if codec == "gzip":
        return zlib.compressobj(_GZIP_LEVEL, wbits=31)
    import zstandard

    threads = min(os.cpu_count() or 1, _MOST_THREADS)
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL, threads=threads).compressobj()


def is_named_like_secret(name: str) -> bool:
    """Return whether files with this base name hold keys or passwords."""
    return forms.SECRET_NAME.match(name.lower()) is not None and not forms.SOURCE_NAME.fullmatch(name.lower())


def secret_in(blocks: Iterable[bytes]) -> str:
    """Return the kind of key in the content, "" if none was found. The content is read once, in blocks."""
    stream = iter(blocks)
    first = next(stream, b"")
    opener = next((opener for magic, opener in forms.PACKED.items() if first.startswith(magic)), None)
    stream = chain([first], stream)
    is_wide, tail = first.startswith(forms.UTF_16), b""
    for block in stream if opener is None else _decompress_blocks(opener, stream):
        tail = tail[-forms.OVERLAP_BYTES :] + (block.replace(b"\0", b"") if is_wide else block)
        if found := _find_key_kind(tail):
            return found
    return ""


def _find_key_kind(content: bytes) -> str:
    """Return the kind of key in some bytes, "" if there is none."""
    if b"\0" in content:
        return forms.PRIVATE_KEY if _has_private_key(content) else ""
    for what, words, form in forms.FORMS:
        for word in words:
            place = content.find(word)
            while place >= 0:
                found = form.search(content, max(0, place - forms.BEFORE_BYTES), place + forms.FORM_BYTES)
                if found and not forms.PLACEHOLDER.search(found[0]):
                    return what
                place = content.find(word, place + len(word))
    return ""


def _has_private_key(content: bytes) -> bool:
    """Return whether binary content contains a private key, in bytes or in UTF-16."""
    if b"PRIVATE KEY-----" in content and forms.KEY_IN_BINARY.search(content):
        return True
    is_wide = any(word in content for word in forms.WIDE_PRIVATE_KEYS)
    return is_wide and forms.KEY_IN_BINARY.search(content.replace(b"\0", b"")) is not None


class _Blocks(io.RawIOBase):
    """Lets a decompressor read from an iterator of blocks."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._left = blocks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        self._left = self._left or next(self._blocks, b"")
        piece, self._left = self._left[: len(into)], self._left[len(into) :]
        into[: len(piece)] = piece
        return len(piece)


def _decompress_blocks(opener: Any, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the decompressed content, at most MOST_UNPACKED_BYTES. If the file is damaged, stop without an error."""
    with opener(io.BufferedReader(_Blocks(blocks))) as file:
        for _ in range(forms.MOST_UNPACKED_BYTES // _BLOCK_BYTES):
            try:
                piece = file.read(_BLOCK_BYTES)
            except (OSError, EOFError, zlib.error, lzma.LZMAError):
                return
            if not piece:
                return
            yield piece
