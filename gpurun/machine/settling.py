"""The last step of what is sent, asked for early: a program takes some round trips before it reads its first byte."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future

from gpurun.core.model import canonical
from gpurun.machine.base import FarRefusal, MachineLost
from gpurun.machine.pack import Pack, demand_unchanged
from gpurun.machine.parts import Parts

JOIN_S = 2.0
# Asks the far side to settle; it is fed with the list of all, and waits so many seconds for parts that are under way.
Ask = Callable[[Iterable[bytes], float], bytes]
# The last parts are on their way when it is told of them; one that was cut is sent again in this time, or never.
_WAIT_S = 60.0


class Settling:
    """One call, which begins while parts are on their way, is told of them all, and waits over there for the last."""

    def __init__(self, ask: Ask, pack: Pack, parts: Parts) -> None:
        self._ask, self._pack, self._parts = ask, pack, parts
        self._content: Future[bytes] = Future()
        self._line: Future[bytes] = Future()
        self._thread: threading.Thread | None = None
        self._telling = threading.Lock()

    def begin(self) -> None:
        """Ask for it, once, without waiting for anything."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def tell(self) -> bytes:
        """Tell it of all parts, once, when all of them were read; UsageError `pack.changed` as in `finish`."""
        with self._telling:
            if not self._content.done():
                self._content.set_result(self._listed())
            return self._content.result()

    def finish(self) -> bytes:
        """Its answer, once all parts are there; what was begun and lost is asked for again.

        UsageError `pack.changed` when a file is no longer what was sent.
        """
        content = self.tell()
        if self._thread is not None:
            try:
                return self._line.result()
            except (MachineLost, FarRefusal):  # Perhaps it was cut with a lane; what it refuses now is told below.
                pass
        return self._ask([content], 0.0)

    def end(self) -> None:
        """Give up what was begun and never told anything; harmless after `finish`."""
        self._content.cancel()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            self._line.set_result(self._ask(self._told(), _WAIT_S))
        except BaseException as error:  # noqa: BLE001 - raised again in `finish`, on the caller's thread
            self._line.set_exception(error)

    def _told(self) -> Iterator[bytes]:
        yield self._content.result()

    def _listed(self) -> bytes:
        """The digest of what follows, that of every part, and the manifest."""
        for file in self._pack.survey.files:
            demand_unchanged(file)
        manifest = self._pack.manifest()
        content = canonical(self._parts.digests) + b"\n" + manifest
        return hashlib.sha256(content).hexdigest().encode() + b"\n" + content
