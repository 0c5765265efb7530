"""The last step of a shipment begins before the last part is there: nothing is taken for whole by that."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from gpurun.core.errors import UsageError
from gpurun.machine.base import FarRefusal, MachineLost
from gpurun.machine.outbox import Outbox
from gpurun.machine.pack import Pack, survey
from gpurun.machine.parts import Parts
from gpurun.machine.settling import Settling
from gpurun.machine.squeeze import Squeeze


class FarSettle:
    """Answers each call with what is next in line, once it was told everything; a None waits for what it is told."""

    def __init__(self, *answers: bytes | Exception) -> None:
        self.answers, self.told, self.waits = list(answers), [], []
        self.asked = threading.Semaphore(0)

    def __call__(self, stdin: Iterable[bytes], wait_s: float) -> bytes:
        self.waits.append(wait_s)
        answer = self.answers.pop(0)
        self.asked.release()
        if isinstance(answer, MachineLost):
            raise answer  # Before it was told anything.
        self.told.append(b"".join(stdin))
        if isinstance(answer, Exception):
            raise answer
        return answer


def read_whole(pack: Pack) -> Parts:
    parts = Parts(pack.survey.files, pack.known)
    for index in range(parts.count):
        parts.read(index)
    return parts


def settling(far: FarSettle, pack: Pack) -> Settling:
    return Settling(far, pack, read_whole(pack))


def test_it_is_asked_for_once_and_told_all_of_it_with_its_digest() -> None:
    far = FarSettle(b"done")
    one = settling(far, pack := Pack(survey({"data/x.bin": b"22"})))
    one.begin()
    one.begin()
    assert one.tell() == one.tell()
    assert one.finish() == b"done"
    sha256, _, content = far.told[0].partition(b"\n")
    assert sha256.decode() == hashlib.sha256(content).hexdigest()
    assert json.loads(content.splitlines()[0]) == [hashlib.sha256(b"22").hexdigest()]
    assert hashlib.sha256(content.partition(b"\n")[2]).hexdigest() == pack.manifest_sha256


@pytest.mark.parametrize("trouble", [MachineLost("cut"), FarRefusal("wrong_digest", "a part was sent again too late")])
def test_what_was_begun_and_came_to_nothing_is_asked_for_again_and_waits_for_nothing(trouble: Exception) -> None:
    far = FarSettle(trouble, b"done")
    one = settling(far, Pack(survey({"data/x.bin": b"22"})))
    one.begin()
    assert one.finish() == b"done"
    assert far.waits[0] > 0
    assert far.waits[1] == 0


def test_what_it_refuses_when_all_parts_are_there_is_told() -> None:
    far = FarSettle(FarRefusal("wrong_digest", "once"), FarRefusal("disk_full", "twice"))
    one = settling(far, Pack(survey({"data/x.bin": b"22"})))
    one.begin()
    with pytest.raises(FarRefusal, match="twice"):
        one.finish()


def test_a_file_that_changed_after_it_was_read_is_never_told_of(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"22")
    far = FarSettle(b"done")
    one = settling(far, Pack(survey({"data": tmp_path})))
    one.begin()
    (tmp_path / "x.bin").write_bytes(b"333")
    with pytest.raises(UsageError, match=r"x\.bin changed while"):
        one.finish()
    one.end()
    assert far.told == []


def test_one_that_is_given_up_leaves_no_thread() -> None:
    before = threading.active_count()
    far = FarSettle(b"never")
    one = settling(far, Pack(survey({"data/x.bin": b"22"})))
    one.begin()
    assert far.asked.acquire(timeout=20)
    one.end()
    given_up = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < given_up:
        time.sleep(0.01)
    assert threading.active_count() == before


# What is read ahead of that


def outbox(tmp_path: Path, codec: str = "zstd") -> Outbox:
    (tmp_path / "x.bin").write_bytes(bytes(5 << 20))
    pack = Pack(survey({"data": tmp_path}))
    return Outbox(pack, Parts(pack.survey.files, pack.known), codec)  # type: ignore[arg-type]


def test_parts_that_were_read_ahead_are_sent_as_they_were_compressed(tmp_path: Path) -> None:
    box, taken = outbox(tmp_path), []
    box.read_ahead()
    box.learn({}, ["zstd", "gzip"])
    (tmp_path / "x.bin").unlink()
    sizes = [len(box.squeezed(part)) for part in iter(lambda: box.next(taken), None)]
    assert taken == [0, 1, 2, 3, 4]
    assert all(0 < size < 10_000 for size in sizes)


def test_what_was_compressed_for_another_codec_is_compressed_again(tmp_path: Path) -> None:
    box = outbox(tmp_path)
    box.read_ahead()
    box.learn({}, ["gzip"])
    first = box.next([])
    assert first is not None
    assert box.squeezed(first).startswith(b"\x1f\x8b")


def test_what_was_being_compressed_when_another_codec_was_asked_for_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, squeezed = outbox(tmp_path), Squeeze.squeezed

    def asked_meanwhile(squeeze: Squeeze, content: bytes) -> bytes:
        box.learn({}, ["gzip"])
        return squeezed(squeeze, content)

    with monkeypatch.context() as patch:
        patch.setattr(Squeeze, "squeezed", asked_meanwhile)
        box.read_ahead()
    first = box.next([])
    assert first is not None
    assert box.squeezed(first).startswith(b"\x1f\x8b")


def test_what_is_there_already_is_read_ahead_and_not_sent(tmp_path: Path) -> None:
    box, taken = outbox(tmp_path), []
    assert box.read_ahead(), "all of it was read"
    box.learn({index: hashlib.sha256(bytes(1 << 20)).hexdigest() for index in (0, 2, 3)}, ["zstd"])
    assert [part.index for part in iter(lambda: box.next(taken), None)] == taken == [1, 4]


def test_what_is_known_to_be_there_is_not_compressed(tmp_path: Path) -> None:
    box = outbox(tmp_path)
    box.learn({index: hashlib.sha256(bytes(1 << 20)).hexdigest() for index in (0, 2, 3)}, ["zstd"])
    assert box.read_ahead()
    assert sorted(box._ahead) == [1, 4]


def test_reading_ahead_ends_when_a_sender_has_come_as_far_and_keeps_nothing_that_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, squeezed, taken = outbox(tmp_path), Squeeze.squeezed, []

    def taken_meanwhile(squeeze: Squeeze, content: bytes) -> bytes:
        box.next(taken)
        return squeezed(squeeze, content)

    monkeypatch.setattr(Squeeze, "squeezed", taken_meanwhile)
    assert not box.read_ahead(), "the rest was left to who sends"
    assert (taken, box._ahead) == ([0], {})


def test_reading_ahead_takes_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpurun.machine.outbox.MOST_AHEAD_BYTES", 50)
    box = outbox(tmp_path)
    assert not box.read_ahead()
    assert len(box._ahead) == 1
    assert not box.read_ahead()
    assert len(box._ahead) == 1, "nor does it after each cut"


@pytest.mark.parametrize(
    ("squeeze_s", "send_s", "level"),
    [(0.01, 1.0, 9), (0.02, 0.04, 3), (0.05, 0.01, 1)],
    ids=["a slow line", "as it should be", "a line that waits for the cores"],
)
def test_how_hard_parts_are_compressed_follows_the_line(
    tmp_path: Path, squeeze_s: float, send_s: float, level: int
) -> None:
    box = outbox(tmp_path)
    for _ in range(20):
        box.sent(squeeze_s, send_s)
    assert box._squeeze.level == level
