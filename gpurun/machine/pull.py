"""A part of a far file as it streams in: refused as soon as it is not the part that was asked for."""

from __future__ import annotations

from typing import Protocol

from gpurun.machine.answers import MOST_LINE_BYTES, Piece, refusal_in, understood
from gpurun.machine.base import FarRefusal, Take

_LIMIT_S = 300.0


class Incoming:
    """What `get` answers, as it comes: its line, and then as many bytes as that says, which are passed on."""

    def __init__(self, name: str, offset: int, most: int, take: Take) -> None:
        self.line = bytearray()
        self.left_bytes = 0
        self._name, self._offset, self._most, self._take = name, offset, most, take
        self._has_line = False

    def __call__(self, block: bytes) -> None:
        """Take what has come next; FarRefusal `nonsense` when it is more than was announced, or something else."""
        if not self._has_line:
            head, newline, block = block.partition(b"\n")
            self.line += head
            if len(self.line) > MOST_LINE_BYTES:
                raise FarRefusal("nonsense", f"The instance answered {len(self.line)} bytes without an end of line.")
            if not newline:
                return
            self._read_line()
        if len(block) > self.left_bytes:
            raise FarRefusal("nonsense", f"The instance sends more of {self._name!r} than it announced.")
        self.left_bytes -= len(block)
        self._take(block)

    def _read_line(self) -> None:
        self._has_line = True
        if refusal_in(bytes(self.line)) is not None:
            return
        piece = understood(Piece, bytes(self.line))
        if piece.offset != self._offset or piece.bytes > self._most:
            raise FarRefusal("nonsense", f"The instance answered another part of {piece.name!r} than was asked for.")
        self.left_bytes = piece.bytes


class Gets(Protocol):
    """A far side, as far as this needs it."""

    def ask(self, verb: str, *options: str, sink: Incoming, timeout_s: float) -> tuple[bytes, bytes]:
        """One call of the agent, whose answer goes into the sink."""
        ...


def pull(far: Gets, name: str, offset: int, most: int, take: Take) -> None:
    """Have a part of a file of the manifest handed over as it comes; fewer bytes than asked for may."""
    sink = Incoming(name, offset, most, take)
    options = ("--name", name, "--offset", str(offset), "--most", str(most))
    far.ask("get", *options, sink=sink, timeout_s=_LIMIT_S)
    if sink.left_bytes:
        raise FarRefusal("nonsense", f"The instance sends less of {name!r} than it announced.")
