"""A machine with scripted answers, and answers for it, for test_far_hostile.py and other tests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gpurun.remote.interface import Reply, Take

GOOD = "checkpoints/000010.model.safetensors"


CONTENT = b"weights" * 1000


class Answers:
    """A machine whose agent answers each verb by the function that the test gives for it."""

    def __init__(self, **answers: Callable[[list[str]], bytes]) -> None:
        self.answers = answers

    def call(
        self, argv: Sequence[str], *, stdin: Iterable[bytes] | None = None, sink: Take | None = None, timeout_s: float
    ) -> Reply:
        said = self.answers[argv[argv.index("agent.pyz") + 1]](list(argv))
        if sink is not None:
            sink(said)
        return Reply(0, said if sink is None else b"", b"")

    def put(self, path: str, content: bytes) -> None:
        raise AssertionError("nothing is put there here")

    def lane(self) -> Answers:
        """See `Machine.lane`."""
        return self

    def close(self) -> None:
        pass

    round_trip_s = 0.0


def sized(content: bytes) -> bytes:
    head = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return json.dumps(head).encode() + b"\n" + content


def entry(name: str = GOOD, content: bytes = CONTENT, **changes: Any) -> dict[str, Any]:
    fields = {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), "kind": "weights"}
    return {**fields, "step": 10, **changes}


def manifest(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"v": 1, "latest": 10, "best": None, "files": entries}).encode()
