"""Calls that run in the background: the caller waits for the result in short pieces, and can work in between."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Task(Protocol[T_co]):
    """A call that was started, and that may still be running."""

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for the call to end, and return whether it has ended."""
        ...

    def result(self) -> T_co:
        """Return the result of a call that has ended, or raise what it raised."""
        ...


Begin = Callable[[Callable[[], Any]], Task[Any]]
"""A function that starts a call that may hang, and returns its task: `Inline` or `Background`."""


class Inline(Generic[T]):
    """A call that runs to its end in the constructor: for simulated time, where threads would have no fixed order."""

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
        except BaseException as error:  # noqa: BLE001 - `result` raises it.
            self._error = error


class Background(Inline[T]):
    """A call on a daemon thread. The caller may abandon it, because it does not keep this process alive."""

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
        threading.Thread(target=self._work_and_set_ended, daemon=True).start()

    def _work_and_set_ended(self) -> None:
        super()._work()
        self._ended.set()
