"""A call whose answer is waited for a little at a time, so that the caller can attend to something else meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Task(Protocol[T_co]):
    """A call that was begun."""

    def wait(self, seconds: float) -> bool:
        """Wait for its end, so long at most; whether it has ended."""
        ...

    def result(self) -> T_co:
        """What it returned once it has ended; what it raised is raised."""
        ...


Begin = Callable[[Callable[[], Any]], Task[Any]]
"""Starts a call that may hang: one of the two below."""


class Inline(Generic[T]):
    """A call that has ended once it was begun: for time that is simulated, in which threads would have no order."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._answer: T
        self._error: BaseException | None = None
        self._work()

    def wait(self, seconds: float) -> bool:
        """See `Task.wait`."""
        return True

    def result(self) -> T:
        """See `Task.result`."""
        if self._error is not None:
            raise self._error
        return self._answer

    def _work(self) -> None:
        try:
            self._answer = self._call()
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for.
            self._error = error


class Background(Inline[T]):
    """A call on a thread of its own, which nobody has to wait for: not even the end of this process does."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._ended = threading.Event()
        super().__init__(call)

    def wait(self, seconds: float) -> bool:
        """See `Task.wait`."""
        return self._ended.wait(seconds)

    def result(self) -> T:
        """See `Task.result`."""
        self._ended.wait()
        return super().result()

    def _work(self) -> None:
        threading.Thread(target=self._on_thread, daemon=True).start()

    def _on_thread(self) -> None:
        super()._work()
        self._ended.set()
