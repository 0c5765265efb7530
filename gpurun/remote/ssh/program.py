"""One program over a connection: its input is written and its outputs are read at the same time.

A write to a stalled connection blocks forever. So the caller's thread only waits, and may close everything.

The command lines are constant one-line programs; everything variable is an argument. The login shell may be any (sh,
fish, csh), so it only has to start `sh`. None of these programs contains a backslash, an exclamation mark or a line
break, which those shells interpret differently between quotes.
"""

from __future__ import annotations

import re
import secrets
import shlex
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from gpurun.core.untrusted import error_words, last_words
from gpurun.remote.interface import MOST_REPLY_BYTES, MachineLost, Reply, Take

TICK_S = 0.1
DRAIN_S = 5.0
_PIECE_BYTES = 32 << 10
# Streamed output is processed as it arrives: this allows 80 MB/s at 100 ms, and there are several lanes.
STREAM_WINDOW_BYTES = 8 << 20
_BLOCK_BYTES = 256 << 10
# The limit for the output of a login before the program's output.
_MOST_NOISE_BYTES = 1 << 20
_NOISE_BLOCK_BYTES = 16 << 10

# $1 the mark, $2 the folder, then the program. The mark shows that all further output is the program's own, and names
# its process group. The shell stays, so that a program ended by a signal also has an exit code (128 + signal).
_RUN = '(umask 077; mkdir -p -- "$2") && cd -- "$2" && echo "$1 $$" && shift 2 && "$@"; exit'

# $1 the file, $2 its length. The new content is written beside the file, and synced before it replaces the file.
_PUT = (
    "LC_ALL=C; export LC_ALL; umask 077; part=$1.$$.part; "
    'if [ -d "$1" ]; then echo "$1 is a folder" >&2; exit 1; fi; '
    'mkdir -p -- "$(dirname -- "$1")" && dd of="$part" bs=65536 conv=fsync && '
    '[ "$(wc -c < "$part")" -eq "$2" ] && mv -f -- "$part" "$1" && exit; '
    'code=$?; rm -f -- "$part"; exit "$code"'
)

# $1 the process group. If the server creates none (dropbear), $1 is the shell, and the program is its child.
_KILL = 'kill -s KILL -- "-$1" || kill -s KILL $(cat "/proc/$1/task/$1/children") "$1"'


class Channel(Protocol):
    """One program's input and output, with paramiko's interface."""

    @property
    def status_event(self) -> threading.Event: ...

    @property
    def exit_status(self) -> int: ...

    @property
    def eof_received(self) -> int: ...

    def exec_command(self, command: str) -> None: ...

    def recv(self, nbytes: int, /) -> bytes: ...

    def recv_stderr(self, nbytes: int, /) -> bytes: ...

    def send(self, s: bytes, /) -> int: ...

    def shutdown_write(self) -> None: ...

    def close(self) -> None: ...


class Connection(Protocol):
    """A completed login: by paramiko in `connection`, by the system's own ssh in `openssh`."""

    where: str
    round_trip_s: float

    @property
    def alive(self) -> bool: ...

    @property
    def heard_mono(self) -> float: ...

    def channel(self, window_bytes: int = ..., take: Take | None = None) -> Channel | None: ...

    def close(self) -> None: ...


class NoRoom(MachineLost):
    """The connection works but allows no further program. The requested program was never started."""


def _new_mark() -> str:
    """Return an unpredictable mark, which is printed before a program's own output."""
    return f"gpurun-{secrets.token_hex(8)}"


def put_argv(path: str, size_bytes: int) -> list[str]:
    """Return the program that replaces a file by its input, if the input has the given size."""
    return ["sh", "-c", _PUT, "gpurun", path, str(size_bytes)]


def kill_argv(group: int) -> list[str]:
    """Return the program that kills a process group: a program and all its children that it did not detach."""
    return ["sh", "-c", _KILL, "gpurun", str(group)]


class RemoteProgram:
    """A program in a folder, which is created private if missing. The program starts at once.

    Its output counts from its mark on (`MARK GROUP`); before the mark it gets no input. `group` is its process group on
    the machine, or None until it has started.
    """

    def __init__(
        self,
        connection: Connection,
        folder: str,
        argv: Sequence[str],
        stdin: Iterable[bytes] | None = None,
        sink: Take | None = None,
    ) -> None:
        self.group: int | None = None
        self._connection = connection
        self._sink = sink
        self._channel: Channel | None = None
        mark = _new_mark()
        # `exec` keeps the process that leads the server's session, so that the process's group is the program's.
        line = "exec " + shlex.join(["sh", "-c", _RUN, "gpurun", mark, folder, *argv])
        self._mark = re.compile(mark.encode("ascii") + rb" (\d{1,19})\n")
        self._noise = bytearray()
        self._stdout = bytearray()
        self._stderr = bytearray()
        self._error: BaseException | None = None
        self._begun, self._ended = threading.Event(), threading.Event()
        self._is_fed = stdin is not None  # Otherwise the input ends at once: a shell must not wait for it.
        self._feeder = _start_thread(self._run, line, iter(stdin or ()))

    def wait(self, still: Callable[[], None]) -> Reply | None:
        """Wait for the program's end. Return its result, or None if the result did not arrive completely.

        `still` is called several times a second. An exception of `still`, or an error of the input, ends the wait.
        """
        while not self._ended.wait(TICK_S):
            still()
        if self._error is None:
            self._feeder.join(DRAIN_S)
        if self._error is not None:
            raise self._error
        return self._build_reply()

    def exit_code(self, within_s: float) -> int | None:
        """Return the exit code (negative: not reported), or None if the program still runs.

        This waits at most `within_s` for the program's start, and as long again for its end.
        """
        if self._begun.wait(within_s) and self._channel is not None and self._channel.status_event.wait(within_s):
            return self._channel.exit_status
        return None

    def close(self) -> None:
        """Stop reading the output. Another thread tells the server, because that may take forever."""
        _start_thread(self._close)

    def _close(self) -> None:
        if self._channel is not None:
            with suppress(Exception):  # If the connection has ended, the channel has too.
                self._channel.close()

    @property
    def said_instead(self) -> str:
        """Return what both outputs contain instead of the mark."""
        words, noise = last_words(bytes(self._stderr)), last_words(bytes(self._noise))
        return "; on standard output: ".join(filter(None, (words, noise))) or "it said nothing"

    def _run(self, line: str, chunks: Iterator[bytes]) -> None:
        """Request the program, and write its input once it has started."""
        try:
            if self._sink is None:
                channel = self._connection.channel()
            else:
                channel = self._connection.channel(STREAM_WINDOW_BYTES, self._take_block)
            if channel is None:
                self._fail(NoRoom(f"{self._connection.where} runs no more programs in parallel over one connection."))
                return
            self._channel = channel
            stderr = _start_thread(self._drain, channel.recv_stderr, self._stderr)
            _start_thread(self._watch, channel, stderr)
            channel.exec_command(line)
        except Exception as error:  # noqa: BLE001 - refused or cut off: the library has many errors for it
            self._fail(MachineLost(f"{self._connection.where} could not start a program: {error_words(error)}."))
            return
        if not self._is_fed or (self._begun.wait() and self.group is not None):
            self._feed(channel, chunks)

    def _feed(self, channel: Channel, chunks: Iterator[bytes]) -> None:
        """Send the input and its end.

        If the source fails, the end is not sent: the program must be killed before it sees the end of incomplete input.
        """
        while True:
            try:
                chunk = next(chunks, None)
            except BaseException as error:  # noqa: BLE001 - raised again in `wait`, on the caller's thread
                self._fail(error)
                return
            try:
                if chunk is None:
                    channel.shutdown_write()
                    return
                self._send(channel, memoryview(chunk))
            except Exception:  # noqa: BLE001 - it ended early or was cut off; its result shows which
                return

    def _send(self, channel: Channel, rest: memoryview) -> None:
        """Send a chunk as fast as it is accepted. Raise OSError if the program accepts no more."""
        while rest:
            rest = rest[channel.send(bytes(rest[:_PIECE_BYTES])) :]

    def _watch(self, channel: Channel, stderr: threading.Thread) -> None:
        """Find the mark, read what follows, and report when both outputs have ended and the exit code has arrived."""
        while self.group is None and self._error is None and (block := self._receive(channel.recv, _NOISE_BLOCK_BYTES)):
            self._take_block(block)
        self._drain(channel.recv, self._stdout)
        stderr.join()
        channel.status_event.wait()
        self._begun.set()
        self._ended.set()

    def _take_block(self, block: bytes) -> None:
        """Add the next block, unless an error occurred. For streamed output the connection's own thread calls this."""
        if self._error is None and self.group is None:
            self._append_capped(self._noise, block, _MOST_NOISE_BYTES)
            self._look_for_mark()
        elif self._error is None:
            self._append_capped(self._stdout, block, MOST_REPLY_BYTES)

    def _look_for_mark(self) -> None:
        if found := self._mark.search(self._noise):
            self.group = int(found[1])
            self._append_capped(self._stdout, bytes(self._noise[found.end() :]), MOST_REPLY_BYTES)
            self._begun.set()

    def _drain(self, receive: Callable[[int], bytes], into: bytearray) -> None:
        while self._error is None and (block := self._receive(receive, _BLOCK_BYTES)):
            self._append_capped(into, block, MOST_REPLY_BYTES)

    def _receive(self, receive: Callable[[int], bytes], most_bytes: int) -> bytes:
        """Return what `receive` returns: bytes that have arrived, or b"" at the end or after an error.

        Reading can raise, because paramiko then allows the server to send more, which fails on a broken connection.
        """
        try:
            return receive(most_bytes)
        except Exception as error:  # noqa: BLE001 - as in `_run`
            self._fail(MachineLost(f"{self._connection.where} was cut off: {error_words(error)}."))
            return b""

    def _append_capped(self, into: bytearray, block: bytes, most_bytes: int) -> None:
        if into is self._stdout and self._sink is not None:
            try:
                self._sink(block)
            except BaseException as error:  # noqa: BLE001 - raised again in `wait`, on the caller's thread
                self._fail(error)
        elif len(into) + len(block) > most_bytes:
            self._fail(MachineLost(f"{self._connection.where} answered more than {most_bytes} bytes."))
        else:
            into += block

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._begun.set()
        self._ended.set()

    def _build_reply(self) -> Reply | None:
        channel = self._channel
        if channel is None or self.group is None or channel.exit_status < 0 or not channel.eof_received:
            return None
        return Reply(channel.exit_status, bytes(self._stdout), bytes(self._stderr))


def _start_thread(target: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread
