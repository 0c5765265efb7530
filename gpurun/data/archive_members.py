"""Reads the files in a zip or tar archive in place, without unpacking them to the disk.

A member's path is the archive's path followed by the member's name. An archive's list of members is also limited: in
the number of names, and in the size of a tar header, because tarfile reads a whole header into memory.
"""

from __future__ import annotations

import contextlib
import io
import stat
import struct
import tarfile
import zipfile
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast

from gpurun.core.errors import UsageError
from gpurun.core.untrusted import plain_line
from gpurun.data.packing import BLOCK_BYTES, MAGIC_BYTES, cut_short, naming_faults, packing_of, unpack_content
from gpurun.data.refusals import MOST_ROW_BYTES

ARCHIVE_SUFFIXES = (".zip", ".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst")
"""The suffixes of archives, which a packing's suffix may follow. In a folder, no other files are opened as archives."""
MOST_MEMBERS = 1_000_000
_MOST_DIRECTORY_BYTES = 128 << 20
"""The limit for a zip archive's list of files, which is held in memory."""
_MOST_HEADER_BYTES = 1 << 20
_ZIP_END, _ZIP_END_BYTES, _MOST_COMMENT_BYTES = b"PK\5\6", 22, 1 << 16
_ZIP64_END, _ZIP64_BYTES = b"PK\6\6", 56 + 20
_ZIP_PACKED = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2}


class Member(NamedTuple):
    """A file in an archive: its unpacked size, and its offset in a tar's content or its name in a zip."""

    bytes: int
    place: int | str


class Archive(NamedTuple):
    """The regular files of an archive in order, and the number of other entries."""

    kind: str
    packing: str
    members: dict[str, Member]
    others: int


def members_of(path: Path) -> Archive | None:
    """Return an archive's members; None if the file is not an archive. UsageError if it cannot be read in place."""
    about = path.stat()
    return _list_members(path, about.st_size, about.st_mtime_ns)


def member_of(path: Path) -> tuple[Path, Member]:
    """Split a path into its archive and the member in it; NotADirectoryError if there is no such member."""
    archive = next((parent for parent in path.parents if parent.is_file()), None)
    found = members_of(archive) if archive is not None else None
    name = path.relative_to(archive).as_posix() if archive is not None else ""
    if archive is None or found is None or name not in found.members:
        raise NotADirectoryError(20, "there is no such file in the archive", str(path))
    return archive, found.members[name]


def opened_member(path: Path) -> BinaryIO:
    """Open a file in an archive; its path is the archive's path followed by the member's name."""
    archive, member = member_of(path)
    if isinstance(member.place, str):
        about = archive.stat()
        raw: Any = _open_zip(archive, about.st_size, about.st_mtime_ns).open(member.place)
    else:
        raw = _cursor.opened(archive, member.place, member.bytes)
    return cast(BinaryIO, io.BufferedReader(raw, BLOCK_BYTES))


@lru_cache(maxsize=4)
def _list_members(path: Path, size: int, modified_ns: int) -> Archive | None:
    with naming_faults(path), open(path, "rb") as file:
        head = file.peek(MAGIC_BYTES)[:MAGIC_BYTES]
        if head.startswith(b"PK\3\4"):
            return _list_zip_members(_open_zip(path, size, modified_ns), path)
        how = packing_of(head)
        with unpack_content(file, how) as stream:
            return _list_tar_members(stream, how, path)


def _list_zip_members(archive: zipfile.ZipFile, path: Path) -> Archive:
    members, others = {}, 0
    for info in archive.infolist():
        if info.is_dir():
            continue
        if info.flag_bits & 1 or info.compress_type not in _ZIP_PACKED:
            how = "is encrypted" if info.flag_bits & 1 else "uses a compression other than stored, deflate and bzip2"
            what = f"{path} cannot be read in place, because its member {plain_line(info.filename, 80)} {how}."
            raise UsageError("data.archive", what, hint="Unpack it, then name the folder.")
        name = _build_inner_path(info.filename)
        if not name or stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG):
            others += 1
        else:
            members[name] = Member(info.file_size, info.filename)
    return Archive("zip", "", members, others)


@lru_cache(maxsize=2)
def _open_zip(path: Path, size: int, modified_ns: int) -> zipfile.ZipFile:
    """Open a zip archive after checking the size of its list of files."""
    with open(path, "rb") as file:
        file.seek(max(0, size - _MOST_COMMENT_BYTES - _ZIP_END_BYTES - _ZIP64_BYTES))
        tail = file.read()
    place, place64 = tail.rfind(_ZIP_END), tail.rfind(_ZIP64_END)
    listed = int.from_bytes(tail[place + 12 : place + 16], "little") if place >= 0 else 0
    if listed == 0xFFFFFFFF and place64 >= 0:
        listed = int.from_bytes(tail[place64 + 40 : place64 + 48], "little")
    if listed > _MOST_DIRECTORY_BYTES:
        raise _too_many_error(path)
    try:
        return zipfile.ZipFile(path)
    except (NotImplementedError, ValueError, struct.error) as error:
        raise cut_short(path, str(error)) from None


def _list_tar_members(stream: BinaryIO, how: str, path: Path) -> Archive | None:
    members: dict[str, Member] = {}
    others, file = 0, _Headers(stream)
    if not file.is_tar:
        return None
    try:
        with tarfile.open(fileobj=cast(BinaryIO, file), mode="r:") as archive:
            while (info := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # tarfile would keep all of them.
                name = _build_inner_path(info.name)
                if info.isreg() and not info.issparse() and name:
                    members[name] = Member(info.size, info.offset_data)
                else:
                    others += not info.isdir()
                if len(members) + others > MOST_MEMBERS:
                    raise _too_many_error(path)
    except tarfile.TarError as error:
        raise cut_short(path, str(error)) from None
    if not file.last or file.last.strip(b"\0"):  # tarfile treats a damaged header as the end.
        raise cut_short(path, f"its list of files ends abruptly after the first {len(members):,}")
    return Archive("tar", how, members, others)


def _build_inner_path(name: str) -> str:
    """Return a member's path inside the archive; "" if the name leads out of the archive."""
    path = PurePosixPath(name.lstrip("/"))
    return "" if ".." in path.parts else path.as_posix()


def _too_many_error(path: Path) -> UsageError:
    what = f"{path} holds more than {MOST_MEMBERS:,} files, the limit for an archive."
    return UsageError("data.archive", what, hint="Unpack it, then name the folder.")


class _Headers:
    """A tar's content as a file for tarfile, which reads only headers; a header above 1 MB is refused."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._at = stream, 0
        self._first = stream.read(tarfile.BLOCKSIZE)
        self.is_tar, self.last = self._first[257:262] == b"ustar", b""

    def tell(self) -> int:
        return self._at

    def read(self, size: int) -> bytes:
        if size > _MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        self.last, self._first = self._first or self._stream.read(size), b""
        self._at += len(self.last)
        return self.last

    def seek(self, place: int) -> None:
        if self._stream.seekable():
            self._stream.seek(place)
            self._at = place
        while self._at < place and (block := self._stream.read(min(place - self._at, BLOCK_BYTES))):
            self._at += len(block)


class _Cursor:
    """Keeps this process's position in a packed tar open, because members are read in order, some of them twice."""

    def __init__(self) -> None:
        self._key: tuple[Path, int, int] | None = None
        self._closing = contextlib.ExitStack()
        self._stream: BinaryIO = io.BytesIO()
        self._at, self._held = 0, (-1, b"")

    def opened(self, archive: Path, place: int, size: int) -> Any:
        """Return a member's bytes as an unbuffered stream; a small member is kept in memory."""
        about, found, closing = archive.stat(), members_of(archive), contextlib.ExitStack()
        how = found.packing if found is not None else ""
        if not how:
            file = closing.enter_context(open(archive, "rb", buffering=0))  # noqa: SIM115
            file.seek(place)
            return _Part(cast(BinaryIO, file), size, closing)
        if size > MOST_ROW_BYTES:
            return _Part(_open_unpacked(archive, how, place, closing), size, closing)
        key = (archive, about.st_size, about.st_mtime_ns)
        if key != self._key or place != self._held[0]:
            self._keep_in_memory(key, how, place, size)
        return _Part(io.BytesIO(self._held[1]), size, closing)

    def _keep_in_memory(self, key: tuple[Path, int, int], how: str, place: int, size: int) -> None:
        if key != self._key or place < self._at:
            self._closing.close()
            self._stream, self._at = _open_unpacked(key[0], how, 0, self._closing), 0
        self._key = None  # Set again only on success.
        _skip(self._stream, place - self._at)
        self._held, self._at = (place, self._stream.read(size)), place + size
        self._key = key


def _open_unpacked(archive: Path, how: str, place: int, closing: contextlib.ExitStack) -> BinaryIO:
    file = closing.enter_context(open(archive, "rb"))  # noqa: SIM115
    stream = closing.enter_context(unpack_content(file, how))
    _skip(stream, place)
    return stream


_cursor = _Cursor()


def _skip(stream: BinaryIO, size: int) -> None:
    while size > 0 and (block := stream.read(min(size, BLOCK_BYTES))):
        size -= len(block)


class _Part(io.RawIOBase):
    """The next `size` bytes of a stream; EOFError if the stream ends earlier."""

    def __init__(self, stream: BinaryIO, size: int, closing: contextlib.ExitStack) -> None:
        self._stream, self._left, self._closing = stream, size, closing

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        raw = self._stream.read(min(len(buffer), self._left))
        if not raw and self._left and len(buffer):
            raise EOFError("the archive ends inside this file")
        buffer[: len(raw)] = raw
        self._left -= len(raw)
        return len(raw)

    def close(self) -> None:
        self._closing.close()
        super().close()
