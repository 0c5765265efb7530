"""What every verb takes, answers and refuses with; docs/FORMATS.md has the protocol."""

from __future__ import annotations

TYPE_CHECKING = False  # here and everywhere in the agent: importing typing would cost a poll milliseconds
if TYPE_CHECKING:
    from typing import Any, Dict, Iterable, Tuple, Union

    Json = Dict[str, Any]
    Answer = Tuple[Json, Union[bytes, Iterable[Union[bytes, memoryview]]]]  # one JSON line, then raw bytes


class Refusal(Exception):
    """An answer of no, with a stable code; `more` holds figures for the other side."""

    def __init__(self, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.error = dict(more, code=code, message=message)
