"""A TCP proxy on loopback in front of any server: it can delay, stall, cut, lose and corrupt what passes through it.

    python -m tests.emulators.proxy PORT [--round-trip 0.1] [--cut-every 5]

Run as a program, it prints the port that it listens on. When its standard input ends, it prints how many bytes it
has received from both sides.
"""

from __future__ import annotations

import argparse
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

LOOPBACK = "127.0.0.1"
_BLOCK_BYTES = 1 << 18
# The most blocks in transit in one direction: more than the SSH windows of all lanes together.
_MOST_BLOCKS = 512


class Door:
    """A listening socket with a thread that passes each new connection to `take`.

    The default address is a free port on loopback.
    """

    def __init__(self, take: Callable[[socket.socket], None], at: tuple[str, int] = (LOOPBACK, 0)) -> None:
        self._listener = socket.create_server(at, family=socket.AF_INET6 if ":" in at[0] else socket.AF_INET)
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self._take = take
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting connections; open connections stay open."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._take(connection)


class Proxy:
    """A proxy that forwards bytes in both directions, each `round_trip_s` / 2 late, until a method changes that.

    With `cut_every_s`, it cuts all connections at this interval. `sent_bytes` counts the bytes received from clients,
    `brought_bytes` those from the server. `at` is the address that it listens on; `host` and `port` are the server's.
    """

    def __init__(
        self,
        port: int,
        *,
        host: str = LOOPBACK,
        at: tuple[str, int] = (LOOPBACK, 0),
        round_trip_s: float = 0.0,
        cut_every_s: float = 0.0,
    ) -> None:
        self._target = (host, port)
        self._late_s = round_trip_s / 2
        self._flowing = threading.Event()
        self._flowing.set()
        self._closed = threading.Event()
        self._ends: list[socket.socket] = []
        self._pumps: list[threading.Thread] = []
        self._losing = False
        self._corrupting = 0
        self.sent_bytes = self.brought_bytes = 0
        self.cuts = 0
        self._door = Door(self._pass_on, at)
        self.port = self._door.port
        if cut_every_s:
            self._start(self._cut_again_and_again, cut_every_s)

    @property
    def connections(self) -> int:
        """Return how many connections the proxy has accepted so far."""
        return self._door.connections

    def stall(self) -> None:
        """Stop forwarding bytes, but keep every connection open."""
        self._flowing.clear()

    def flow(self) -> None:
        """Forward bytes again after a stall."""
        self._flowing.set()

    def lose(self) -> None:
        """Drop every byte from now on, but keep the connections open."""
        self._losing = True

    def corrupt(self, blocks: int) -> None:
        """Flip one bit in each of the next `blocks` blocks."""
        self._corrupting = blocks

    def cut(self) -> None:
        """Shut down every connection that is open now."""
        self.cuts += 1
        ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut every connection and wait until all threads have ended."""
        self._door.close()
        self._closed.set()
        self.flow()
        self.cut()
        for pump in self._pumps:
            pump.join()

    def _cut_again_and_again(self, period_s: float) -> None:
        while not self._closed.wait(period_s):
            self.cut()

    def _pass_on(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._target)
        except OSError:
            near.close()
            return
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ends += [near, far]
        both = _Both(near, far)
        for source, target in ((near, far), (far, near)):
            under_way: queue.Queue[tuple[float, bytes]] = queue.Queue(_MOST_BLOCKS)
            self._start(self._take, source, under_way, source is near)
            self._start(self._give, target, under_way, both)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._pumps.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._pumps[-1].start()

    def _take(self, source: socket.socket, under_way: queue.Queue[tuple[float, bytes]], is_near: bool) -> None:
        with suppress(OSError):
            while block := source.recv(_BLOCK_BYTES):
                self._flowing.wait()
                self.sent_bytes += len(block) * is_near
                self.brought_bytes += len(block) * (not is_near)
                under_way.put((time.monotonic() + self._late_s, self._damaged(block)))
        under_way.put((time.monotonic() + self._late_s, b""))

    def _give(self, target: socket.socket, under_way: queue.Queue[tuple[float, bytes]], both: _Both) -> None:
        broken = False
        while (due := under_way.get())[1]:
            if not broken and not self._losing:
                time.sleep(max(0.0, due[0] - time.monotonic()))
                self._flowing.wait()
                try:
                    target.sendall(due[1])
                except OSError:
                    broken = True
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)
        both.done()

    def _damaged(self, block: bytes) -> bytes:
        if self._corrupting < 1:
            return block
        self._corrupting -= 1
        return bytes([block[0] ^ 1]) + block[1:]


class _Both:
    """The two sockets of one connection through the proxy; both are closed once both directions have ended."""

    def __init__(self, *ends: socket.socket) -> None:
        self._ends, self._left, self._lock = ends, len(ends), threading.Lock()

    def done(self) -> None:
        with self._lock:
            self._left -= 1
            left = self._left
        if not left:
            for end in self._ends:
                end.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--round-trip", type=float, default=0.0)
    parser.add_argument("--cut-every", type=float, default=0.0)
    options = parser.parse_args()
    proxy = Proxy(options.port, round_trip_s=options.round_trip, cut_every_s=options.cut_every)
    print(proxy.port, flush=True)
    sys.stdin.read()
    print(proxy.sent_bytes + proxy.brought_bytes, flush=True)


if __name__ == "__main__":
    main()
