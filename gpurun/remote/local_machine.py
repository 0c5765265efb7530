"""This computer in the role of a remote machine: the same calls as over SSH, in a folder for the instance."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from gpurun.core.paths import write_atomic
from gpurun.core.secrets import child_environment
from gpurun.remote.interface import MOST_REPLY_BYTES, FarRefusal, MachineLost, Reply, Take

_DRAIN_S = 5.0


class LocalMachine:
    """Runs programs in `folder`, each in its own session, with the instance's token and without any secret."""

    def __init__(self, folder: Path, token: str) -> None:
        self._folder = folder
        self._token = token

    def call(
        self, argv: Sequence[str], *, stdin: Iterable[bytes] | None = None, sink: Take | None = None, timeout_s: float
    ) -> Reply:
        """Run a program in the folder; see `Machine.call`."""
        try:
            child = subprocess.Popen(
                list(argv),
                cwd=self._folder,
                env=child_environment({"GPURUN_INSTANCE": self._token}),
                stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise MachineLost(
                f"The local instance in {self._folder} cannot run {argv[0]}: {error.strerror}."
            ) from error
        threads = _Threads(child, stdin, sink)
        try:
            exit_code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise MachineLost(f"The local instance did not answer {argv[-1]} in {timeout_s:.0f} s.") from None
        finally:
            _kill(child)
            child.wait()
            threads.join()
        if threads.error is not None:
            raise threads.error
        if threads.flooded:
            raise MachineLost(f"The local instance answered more than {MOST_REPLY_BYTES} bytes.")
        return Reply(exit_code, bytes(threads.stdout), bytes(threads.stderr))

    def put(self, path: str, content: bytes) -> None:
        """Replace a whole file of the folder. The folder is never created: its absence proves that it was destroyed."""
        if not self._folder.is_dir():
            raise MachineLost(f"The local instance in {self._folder} is gone.")
        target = self._folder / path
        try:
            if target.parent != self._folder:
                target.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomic(target, content)
        except OSError as error:
            reason = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "os_error"
            raise FarRefusal(reason, f"{target} cannot be written: {error.strerror}.") from error

    def lane(self) -> LocalMachine:
        """See `Machine.lane`: each call is a separate process."""
        return self

    def close(self) -> None:
        """See `Machine.close`: nothing is kept open."""

    @property
    def round_trip_s(self) -> float:
        """See `Machine.round_trip_s`."""
        return 0.0


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a program and the processes of its session, unless it has ended."""
    if child.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


class _Threads:
    """Writes a program's input and reads both its outputs in parallel, so that no full pipe can block the others."""

    def __init__(self, child: subprocess.Popen[bytes], stdin: Iterable[bytes] | None, sink: Take | None) -> None:
        self.stdout, self.stderr = bytearray(), bytearray()
        self.error: BaseException | None = None
        self.flooded = False
        self._child = child
        self._all = [
            threading.Thread(target=self._drain, args=(child.stdout, self.stdout, sink), daemon=True),
            threading.Thread(target=self._drain, args=(child.stderr, self.stderr, None), daemon=True),
        ]
        if stdin is not None:
            self._all.append(threading.Thread(target=self._feed, args=(child.stdin, stdin), daemon=True))
        for thread in self._all:
            thread.start()

    def join(self) -> None:
        """Wait for the threads, once the program has ended."""
        for thread in self._all:
            thread.join(_DRAIN_S)

    def _feed(self, pipe: IO[bytes], chunks: Iterable[bytes]) -> None:
        try:
            for chunk in chunks:
                pipe.write(chunk)
            pipe.close()
        except BrokenPipeError:
            with suppress(BrokenPipeError):  # The program ended before it read everything; its output says why.
                pipe.close()
        except BaseException as error:  # noqa: BLE001 - raised again in `call`, on the caller's thread
            self.error = error
            _kill(self._child)  # The pipe is still open, so that half a pack never looks complete.

    def _drain(self, pipe: IO[bytes], into: bytearray, sink: Take | None) -> None:
        with pipe:
            while block := os.read(pipe.fileno(), 1 << 20):
                if sink is not None:
                    try:
                        sink(block)
                    except BaseException as error:  # noqa: BLE001 - as in `_feed`
                        self.error = self.error or error
                        _kill(self._child)
                        return
                elif len(into) + len(block) > MOST_REPLY_BYTES:
                    self.flooded = True
                    _kill(self._child)
                    return
                else:
                    into += block
