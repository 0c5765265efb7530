"""A machine over SSH, which implements `Machine`. It connects when needed, and again if the connection was lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from copy import copy
from math import inf
from pathlib import Path

from gpurun.core.clock import Clock
from gpurun.core.errors import GpurunError, SetupError
from gpurun.core.records import Address
from gpurun.core.untrusted import last_words
from gpurun.remote.interface import FarRefusal, MachineLost, Reply, Take
from gpurun.remote.key_pairs import fingerprint
from gpurun.remote.ssh.host_key import ALGORITHMS, ExpectedKey, Jump
from gpurun.remote.ssh.program import Connection, NoRoom, RemoteProgram, kill_argv, put_argv

# A connection over which no byte came for this long is dead: four keepalives got no reply. During an upload the server
# regularly sends window updates.
STALL_S = 60.0
KILL_S = 5.0
LEAST_S = 2.0
PUT_S = 300.0
_LONGEST_PAUSE_S = 15.0
_RUNS_SOME = (
    "`ssh USER@HOST echo ok` must print ok: a login shell that runs commands (no menu, no start-up file that starts "
    "another program instead), and a writable home."
)
_FULL = ("no space left", "quota exceeded")


class RemoteMachine:
    """Runs programs in `folder` of the host at `address`, whose key must be `host_key`.

    `host_key` is a public line or a fingerprint. `folder` is below the login's home unless it is absolute. The first
    call connects. Calls of several threads share one connection, or use another one if the server allows no more
    programs on the first.

    `client_key` is the only key that is ever offered, or `agent` for the keys of the SSH agent. No password is used.
    With a `jump` the host is reached through another host, which accepts the same key. No call waits longer than until
    `last_mono`, the monotonic time at which the machine's end must be requested.
    """

    def __init__(
        self,
        address: Address,
        *,
        client_key: Path | str | None,
        host_key: str,
        folder: str,
        clock: Clock,
        last_mono: float = inf,
        jump: Jump | None = None,
    ) -> None:
        self._address = address
        self._where = f"{address.user}@{address.place}"
        self._jump = jump
        self._client_key = client_key
        self._expected = ExpectedKey.parse(host_key)
        self._folder = folder
        self._clock = clock
        self._last_mono = last_mono
        self._connection: Connection | None = None
        self._tries = 0
        self._next_try_mono = clock.monotonic()
        self._connecting = threading.Lock()
        self._closes = 0
        self._beside: RemoteMachine | None = None

    def call(
        self, argv: Sequence[str], *, stdin: Iterable[bytes] | None = None, sink: Take | None = None, timeout_s: float
    ) -> Reply:
        """Run a program in the folder; see `Machine.call`. It ends when its outputs end, including its children's.

        Raise HostKeyMismatch if another host replies. Exit code 127 means a missing program, and 128 + n a signal.
        """
        timeout_s = min(timeout_s, max(LEAST_S, self._last_mono - self._clock.monotonic()))
        end_mono = self._clock.monotonic() + timeout_s
        connection = self._ensure_connection(end_mono)
        try:
            reply = self._run(connection, argv, stdin, sink, end_mono, timeout_s)
        except NoRoom:
            left_s = end_mono - self._clock.monotonic()
            return self._machine_beside().call(argv, stdin=stdin, sink=sink, timeout_s=left_s)
        except MachineLost:
            self._drop(connection)  # Do not use a connection again that failed once.
            raise
        self._tries = 0
        return reply

    def put(self, path: str, content: bytes) -> None:
        """Replace a whole file of the folder, readable only by its owner; see `Machine.put`."""
        reply = self.call(put_argv(path, len(content)), stdin=[content], timeout_s=PUT_S)
        if reply.exit_code:
            words = last_words(reply.stderr)
            raise FarRefusal(_choose_reason(words), f"{path} cannot be written on {self._where}: {words}.")

    def answers(self, limit_s: float) -> bool:
        """See `Answers.answers`. This makes a new connection: an existing one may not know yet that it was cut off."""
        try:
            return self.shown(limit_s) is not None
        except MachineLost:
            return False

    def shown(self, limit_s: float) -> str | None:
        """Return the public line of the expected host key if the host shows it now; None if it shows only others."""
        from gpurun.remote.ssh.connection import shown_key

        for offer in self._expected.offers:
            line = shown_key(self._address, offer, self._clock, limit_s, self._client_key, self._jump)
            if line is not None and fingerprint(line) == self._expected.fingerprint:
                return line
        return None

    def lane(self) -> RemoteMachine:
        """Return a machine with its own connection; see `Machine.lane`."""
        lane = copy(self)
        lane._connection = None
        lane._tries = 0
        lane._next_try_mono = self._clock.monotonic()
        lane._connecting, lane._beside = threading.Lock(), None
        return lane

    @property
    def round_trip_s(self) -> float:
        """Return the shortest round-trip time in seconds on the current connection; see `Machine.round_trip_s`."""
        return self._connection.round_trip_s if self._connection is not None else 0.0

    def close(self) -> None:
        """Close this connection and those beside it. Waiting calls end too; the next call makes a new connection."""
        self._closes += 1
        if self._connection is not None:
            self._drop(self._connection)
        if self._beside is not None:
            self._beside.close()

    def _machine_beside(self) -> RemoteMachine:
        """Return this machine over one more connection, which is kept: a server may limit the programs on one."""
        with self._connecting:
            self._beside = self._beside or self.lane()
            return self._beside

    def _drop(self, connection: Connection) -> None:
        """Close a connection, and forget it unless another thread has made a new one meanwhile."""
        if self._connection is connection:
            self._connection = None
        connection.close()

    def _ensure_connection(self, end_mono: float) -> Connection:
        """Return the kept connection or a new one. One thread makes it while the others wait."""
        closes = self._closes
        with self._connecting:
            connection = self._connect(end_mono) if closes == self._closes else None
        if closes == self._closes and connection is not None:
            return connection
        if connection is not None:
            self._drop(connection)
        raise MachineLost(f"The connection to {self._where} was ended here.")

    def _connect(self, end_mono: float) -> Connection:
        """Return the kept connection or a new one. The pauses between failed attempts become longer."""
        if self._connection is not None:
            if self._connection.alive:
                return self._connection
            self._drop(self._connection)
        pause_s = self._next_try_mono - self._clock.monotonic()
        self._clock.sleep(min(pause_s, end_mono - self._clock.monotonic()))
        left_s = end_mono - self._clock.monotonic()
        if left_s <= 0:
            raise MachineLost(f"{self._where} was not reached in time.")
        try:
            self._connection = self._open(left_s)
        finally:
            self._tries += 1
            longest_s = min(_LONGEST_PAUSE_S, 0.25 * 2**self._tries)
            self._next_try_mono = self._clock.monotonic() + longest_s * random.uniform(0.5, 1.0)
        return self._connection

    def _open(self, limit_s: float) -> Connection:
        """Log in. An exception is raised to the caller, and the next call tries again."""
        from gpurun.remote.ssh.connection import connect

        return connect(self._address, self._client_key, self._expected, self._clock, limit_s, self._jump)

    def _run(
        self,
        connection: Connection,
        argv: Sequence[str],
        stdin: Iterable[bytes] | None,
        sink: Take | None,
        end_mono: float,
        timeout_s: float,
    ) -> Reply:
        """Run one program on a connection. If this raises, the program was ended or can no longer be reached."""
        program = RemoteProgram(connection, self._folder, argv, stdin, sink)
        begun_mono = self._clock.monotonic()

        def still() -> None:
            now = self._clock.monotonic()
            if now >= end_mono and program.group is None:
                raise self._no_programs_error(f"{program.said_instead} in {timeout_s:.0f} s")
            if now >= end_mono:
                raise MachineLost(f"{self._where} did not answer {argv[-1][:80]!r} in {timeout_s:.0f} s.")
            if now - max(begun_mono, connection.heard_mono) > STALL_S:
                self._drop(connection)
                raise MachineLost(f"The connection to {self._where} is dead: no byte arrived for {STALL_S:.0f} s.")

        try:
            reply = program.wait(still)
        except NoRoom:
            raise
        except BaseException:
            self._kill(connection, program)
            program.close()
            raise
        finally:
            if program.group is not None:
                # The machine was reached: after an occasional break, the next call tries again at once.
                self._tries = 0
        if reply is None:
            raise self._no_reply_error(connection, program)
        return reply

    def _kill(self, connection: Connection, program: RemoteProgram) -> None:
        """End a program for which no caller waits, before it can take the end of its input as complete.

        If that fails, the connection is closed, so that the server ends the session when it notices.
        """
        if program.exit_code(within_s=0) is not None:
            return
        if program.group is not None and connection.alive:
            killer = RemoteProgram(connection, self._folder, kill_argv(program.group))
            exit_code = killer.exit_code(within_s=KILL_S)
            killer.close()
            if exit_code == 0:
                return
        self._drop(connection)

    def _no_reply_error(self, connection: Connection, program: RemoteProgram) -> GpurunError:
        """Return why a program that has ended gave no complete reply."""
        words = program.said_instead
        if program.group is not None or not connection.alive:
            return MachineLost(f"The connection to {self._where} was lost before the whole answer had arrived.")
        if _choose_reason(words) == "disk_full":
            return FarRefusal("disk_full", f"{self._folder} cannot be made on {self._where}: {words}.")
        return self._no_programs_error(words)

    def _no_programs_error(self, words: str) -> MachineLost:
        what = f"{self._where} runs no programs: {words}."
        return MachineLost(what, code="ssh.no_programs", hint=_RUNS_SOME)


def scan_host_key(
    host: str, port: int, clock: Clock, timeout_s: float, *, key: Path | str | None = None, jump: Jump | None = None
) -> str:
    """Return the public line of the host key that an address shows, ed25519 if it has one. There is no login to it.

    If there is a host on the way, the key logs in to that one. Raise MachineLost if the address cannot be reached, and
    SetupError if it has no usable host key.
    """
    from gpurun.remote.ssh.connection import shown_key

    address = Address(kind="ssh", host=host, port=port)
    algorithms = tuple(name for names in ALGORITHMS.values() for name in names)
    line = shown_key(address, algorithms, clock, timeout_s, key, jump)
    if line is None:
        hint = "Its SSH server is too old for this; it needs an ed25519, ECDSA or RSA host key."
        raise SetupError("host.no_key", f"{address.place} shows no host key that can be checked.", hint=hint)
    return line


def _choose_reason(words: str) -> str:
    return "disk_full" if any(full in words.lower() for full in _FULL) else "os_error"
