"""Tests that gpurun believes a machine's replies about a pack only as far as they match what was sent."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from conftest import Box

from gpurun.core.errors import UsageError
from gpurun.remote.archive import Pack, survey
from gpurun.remote.client import FarSide
from gpurun.remote.interface import FarRefusal
from gpurun.remote.upload import _Upload
from tests.refusals import refusal

FILES = {"bundle/a.py": b"print(1)", "data/x.bin": random.Random(3).randbytes(3500)}
Lie = Callable[[bytes, bytes], tuple[bytes, bytes]]


class Lying(FarSide):
    """A far side that changes some of its agent's replies."""

    def __init__(self, box: Box, **lies: Lie) -> None:
        super().__init__(box.machine, python=box.far._python)
        self._lies = lies

    def ask(  # type: ignore[override]
        self, verb: str, *options: str, stdin: Iterable[bytes] | None = None, site: bool = False, timeout_s: float = 20
    ) -> tuple[bytes, bytes]:
        """Make the call, and return its reply after the lie for this verb, if any, has changed it."""
        line, content = super().ask(verb, *options, stdin=stdin, site=site, timeout_s=timeout_s)
        return self._lies.get(verb, lambda *answer: answer)(line, content)


def another_pack(line: bytes, content: bytes) -> tuple[bytes, bytes]:
    return json.dumps({**json.loads(line), "manifest_sha256": "0" * 64}).encode(), content


def another_part(line: bytes, content: bytes) -> tuple[bytes, bytes]:
    """Return the reply with a wrong digest of the same length in the line of a part."""
    index, _, digest = content.partition(b" ")
    return line, index + b" " + bytes(reversed(digest.rstrip())) + b"\n" if content else content


def says(kind: str, content: bytes) -> Lie:
    """Return a lie that replaces the reply's list of parts by `content`, with matching size and digest."""

    def lie(line: bytes, _: bytes) -> tuple[bytes, bytes]:
        fields = {"kind": kind, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        return json.dumps({**json.loads(line), **fields}).encode(), content

    return lie


def test_a_machine_that_took_in_another_pack_is_not_trained_on(box: Box) -> None:
    with refusal(FarRefusal, "far.nonsense", "pack"):
        Lying(box, settle=another_pack).unpack(Pack(survey(FILES)))


def test_a_list_of_parts_altered_on_its_way_is_not_believed(box: Box) -> None:
    box.alter_agent("check_parts(incoming, json.loads(digests))", "raise Refusal('wrong_digest', 'a bad day')")
    with refusal(FarRefusal, "far.wrong_digest", "a bad day"):
        box.far.unpack(Pack(survey(FILES)))
    with refusal(FarRefusal, "far.nonsense"):
        Lying(box, begin=another_part).unpack(Pack(survey(FILES)))


@pytest.mark.parametrize(
    "lie",
    [says("held", b""), says("verified", b"9" * 5000 + b" " + b"a" * 64 + b"\n")],
    ids=["files that are none", "a number without end"],
)
def test_a_list_of_what_is_there_that_makes_no_sense_is_refused(box: Box, lie: Lie) -> None:
    with pytest.raises(FarRefusal, match="malformed"):
        Lying(box, begin=lie).unpack(Pack(survey(FILES)))


def test_a_file_changed_after_its_last_byte_is_not_put_in_place(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "x.bin").write_bytes(FILES["data/x.bin"])
    send_parts = _Upload.send_parts

    def then_changed(upload: _Upload) -> None:
        send_parts(upload)
        (data / "x.bin").write_bytes(b"other")

    monkeypatch.setattr(_Upload, "send_parts", then_changed)
    with refusal(UsageError, "pack.changed", "data/x.bin"):
        box.far.unpack(Pack(survey({"data": data})))
    assert not (box.folder / "data").exists()
