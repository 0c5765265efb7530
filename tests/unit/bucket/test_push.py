"""Tests of a machine that pushes checkpoints to prepared URLs: its signed list names only what is in the bucket."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpurun.core.errors import CollectFailed
from gpurun.remote.agent import s3_push
from gpurun.remote.agent.presigned import UrlRefused
from gpurun.remote.agent.s3_push import Later, Pusher
from gpurun.remote.agent.system import Refusal
from gpurun.remote.download import WantedFile
from gpurun.remote.s3 import push_slots
from gpurun.remote.s3.pushed_files import Pushed, fetch_pushed, read_pushed
from gpurun.remote.s3.s3_client import Bucket
from tests.emulators.s3 import S3Emulator
from tests.refusals import lacking, refusal

PLACE, KEY = "team/gpt/runs/fox-41/gr-1", "k" * 64
SLOT_BYTES = 2 << 20


class Trainer:
    """A machine's run folder, whose checkpoints are saved as the trainer saves them and pushed on demand."""

    def __init__(self, root: Path, bucket: Bucket) -> None:
        self.root, self.bucket = root, bucket
        for name in ("agent", "out/checkpoints", "out/samples"):
            (root / name).mkdir(parents=True)
        self.order()
        self.pusher = Pusher(str(root))

    def order(self, seconds: float = 3600, **changes: Any) -> None:
        order = push_slots.push_order(self.bucket, PLACE, run="fox-41", key=KEY, slot_bytes=SLOT_BYTES, seconds=seconds)
        (self.root / "agent" / "push.json").write_text(json.dumps({**json.loads(order), **changes}))

    def save(self, *steps: int, size: int = 5 << 20) -> dict[str, bytes]:
        """Save these checkpoints and remove others; return the files by name. The weights are larger than a slot."""
        files, contents = [], {}
        for old in (self.root / "out" / "checkpoints").iterdir():
            if int(old.name[:6]) not in steps:
                old.unlink()
        for step in steps:
            random_bytes = random.Random(step).randbytes(size)
            saved = {"weights": random_bytes, "optimizer": random_bytes[::-1], "state": b"{%d}" % step}
            for kind, content in saved.items():
                name = f"checkpoints/{step:06d}.{kind}"
                (self.root / "out" / name).write_bytes(content)
                digest = hashlib.sha256(content).hexdigest()
                files.append({"name": name, "bytes": len(content), "sha256": digest, "kind": kind, "step": step})
                contents[name] = content
        manifest = {"v": 1, "latest": max(steps), "best": {"step": min(steps), "val_loss": 2.5}, "files": files}
        (self.root / "out" / "MANIFEST.json").write_text(json.dumps(manifest))
        return contents

    def pushed(self) -> Pushed | None:
        return read_pushed(self.bucket, PLACE, run="fox-41", key=KEY, most_bytes=1 << 40)

    def brought(self, into: Path) -> dict[str, bytes]:
        """Download every file that the pushed list names, and return the files by name."""
        found = self.pushed()
        assert found is not None
        for file in found.manifest.files:
            fetch_pushed(self.bucket, PLACE, found, WantedFile(file.name, file.bytes, file.sha256), into)
        return {file.name: (into / file.name).read_bytes() for file in found.manifest.files}


@pytest.fixture
def trainer(s3: S3Emulator, bucket: Bucket, tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "box", bucket)


def test_what_is_pushed_comes_home_byte_for_byte(trainer: Trainer, tmp_path: Path) -> None:
    assert trainer.pushed() is None
    saved = trainer.save(10, 20)
    trainer.pusher.push()
    assert trainer.brought(tmp_path / "home") == saved
    found = trainer.pushed()
    assert found is not None
    assert (found.manifest.latest, found.seq, found.left_out) == (20, 1, ())


def test_what_is_there_already_is_not_pushed_again(s3: S3Emulator, trainer: Trainer, tmp_path: Path) -> None:
    trainer.save(10)
    trainer.pusher.push()
    before = s3.uploaded_bytes()
    trainer.pusher.push()
    assert s3.uploaded_bytes() == before
    saved = trainer.save(10, 20)
    trainer.pusher.push()
    assert s3.uploaded_bytes() - before < 1.1 * (10 << 20)
    assert trainer.brought(tmp_path / "home") == saved


def test_all_is_there_once_the_last_list_has_latest_and_best(trainer: Trainer) -> None:
    """`has_all` must be exact, because a machine that no client polls ends itself once it is true."""
    assert not trainer.pusher.has_all()
    trainer.save(10, 20, size=1 << 20)
    assert not trainer.pusher.has_all()
    trainer.pusher.push()
    assert trainer.pusher.has_all()
    assert Pusher(str(trainer.root)).has_all(), "a keeper that takes over knows it too"
    manifest = trainer.root / "out" / "MANIFEST.json"
    listed = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**listed, "files": listed["files"][::-1]}))
    assert not trainer.pusher.has_all(), "the list that is there is an older one"
    trainer.save(10, 30, size=1 << 20)
    assert not trainer.pusher.has_all(), "another latest one"
    trainer.order(most_bytes=30 << 20, steps=30)
    trainer.save(10, 30, 40, size=1 << 20)
    trainer.pusher.over.set()
    trainer.pusher.push()
    assert trainer.pusher.has_all(), "nobody misses the one between, which was not worth its bytes"
    trainer.save(10, 40, size=2 << 20)
    trainer.pusher.push()
    assert not trainer.pusher.has_all(), "the best was replaced, and only the latest pushed"


def test_a_keeper_that_takes_over_knows_what_is_there(s3: S3Emulator, trainer: Trainer) -> None:
    trainer.save(10)
    trainer.pusher.push()
    before = s3.uploaded_bytes()
    Pusher(str(trainer.root)).push()
    assert s3.uploaded_bytes() == before


def test_slots_are_used_again_for_any_number_of_checkpoints(s3: S3Emulator, trainer: Trainer, tmp_path: Path) -> None:
    for step in range(20, 400, 20):
        saved = trainer.save(step - 10, step, size=1 << 20)
        trainer.pusher.push()
    assert trainer.brought(tmp_path / "home") == saved
    assert len(s3.keys(PLACE)) <= 20


def test_whatever_is_cut_the_list_promises_only_what_is_there(s3: S3Emulator, trainer: Trainer, tmp_path: Path) -> None:
    first = trainer.save(10)
    trainer.pusher.push()
    for kept in range(1, 7):
        trainer.save(10 + kept)
        s3.deny_after(kept)
        with pytest.raises(UrlRefused):
            trainer.pusher.push()
        s3.deny_after(None)
        assert trainer.brought(tmp_path / f"home-{kept}") == first, "the list of before, and all that it names"
    saved = trainer.save(30)
    trainer.pusher.push()
    assert trainer.brought(tmp_path / "home") == saved


def test_a_lost_answer_to_the_list_leaves_both_lists_whole(s3: S3Emulator, trainer: Trainer, tmp_path: Path) -> None:
    trainer.save(10)
    trainer.pusher.push()
    second = trainer.save(20)
    s3.lose_answer_to("head")
    with pytest.raises(UrlRefused):
        trainer.pusher.push()
    assert trainer.brought(tmp_path / "home") == second, "it had arrived"
    trainer.save(30)
    fresh = Pusher(str(trainer.root))
    s3.deny_after(5)
    with pytest.raises(UrlRefused):
        fresh.push()
    s3.deny_after(None)
    assert trainer.brought(tmp_path / "again") == second, "a new keeper has not written over what it speaks of"


def test_expired_urls_are_waited_for_and_fresh_ones_used(s3: S3Emulator, trainer: Trainer) -> None:
    trainer.order(seconds=1)
    s3.ahead_s = 60
    trainer.save(10)
    with pytest.raises(UrlRefused) as refused:
        trainer.pusher.push()
    assert refused.value.code == "expired"
    s3.ahead_s = 0
    trainer.order()
    trainer.pusher.push()
    assert trainer.pushed() is not None


def test_a_checkpoint_that_does_not_fit_replaces_none_that_did(trainer: Trainer, tmp_path: Path) -> None:
    first = trainer.save(10)
    trainer.pusher.push()
    few = json.loads((trainer.root / "agent" / "push.json").read_text())["slots"][:16]
    trainer.order(slots=few)
    trainer.save(20, size=11 << 20)
    with pytest.raises(Later, match="no room"):
        trainer.pusher.push()
    assert trainer.brought(tmp_path / "home") == first


def test_a_file_that_is_replaced_while_it_is_pushed_is_no_news(trainer: Trainer) -> None:
    trainer.save(10)
    (trainer.root / "out" / "checkpoints" / "000010.weights").unlink()
    with pytest.raises(Later, match=r"000010\.weights"):
        trainer.pusher.push()
    assert trainer.pushed() is None


def test_whatever_ends_the_sending_of_a_slot_no_list_promises_it(trainer: Trainer, tmp_path: Path) -> None:
    first = trainer.save(10)
    trainer.pusher.push()
    trainer.save(20)
    path = trainer.root / "out" / "checkpoints" / "000020.optimizer"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(Refusal):
        trainer.pusher.push()
    assert trainer.brought(tmp_path / "home") == first


def test_a_machine_without_a_spare_thread_pushes_slot_by_slot(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A container may limit its processes, and the trainer's loaders may use all of them: the push needs no thread."""
    refused: list[int] = []

    class Scarce(threading.Thread):
        def start(self) -> None:
            refused.append(1)
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(s3_push, "threading", SimpleNamespace(Thread=Scarce, Lock=threading.Lock))
    saved = trainer.save(10)
    trainer.pusher.push()
    assert refused
    assert trainer.brought(tmp_path / "home") == saved


def test_an_unforeseen_error_is_retried_like_any_other(
    trainer: Trainer, start_pusher: Pusher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls, pushed = [MemoryError(), Refusal("not_regular", "it cannot be read so")], Pusher.push

    def push_once(pusher: Pusher) -> None:
        if calls:
            raise calls.pop()
        pushed(pusher)

    monkeypatch.setattr(Pusher, "push", push_once)
    saved = trainer.save(10)
    start_pusher.finish()
    assert trainer.brought(tmp_path / "home") == saved


def _forged(trainer: Trainer, change: Callable[[dict[str, Any]], None]) -> None:
    content = trainer.bucket.get(push_slots.head_key(PLACE), 1 << 20)
    assert content is not None
    mark, _, body = content.partition(b"\n")
    head = json.loads(body)
    change(head)
    trainer.bucket.put(push_slots.head_key(PLACE), mark + b"\n" + json.dumps(head).encode())


def test_a_list_that_the_machine_has_not_signed_is_not_believed(trainer: Trainer) -> None:
    trainer.save(10)
    trainer.pusher.push()
    _forged(trainer, lambda head: head["manifest"].update(latest=99))
    with refusal(CollectFailed, "collect.bucket_altered"):
        trainer.pushed()


NOWHERE = {"name": "samples/a.txt", "bytes": 0, "sha256": hashlib.sha256().hexdigest(), "kind": "sample", "step": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"run": "another-1"},
        {"places": {}},
        {"places": {}, "manifest": {"v": 1, "latest": 1, "best": None, "files": [NOWHERE]}},
        {"manifest": {"v": 1, "latest": float("nan"), "best": None, "files": []}},
        {"manifest": {"v": 1, "latest": float("inf"), "best": None, "files": []}},
    ],
    ids=["of another run", "without its places", "without a place for nothing", "not a number", "without an end"],
)
def test_a_signed_list_that_makes_no_sense_is_not_believed(
    trainer: Trainer, bucket: Bucket, change: dict[str, Any]
) -> None:
    """A machine has the key, but may be hostile: a signed list must be checked like any other."""
    trainer.save(10)
    trainer.pusher.push()
    signed = (bucket.get(push_slots.head_key(PLACE), 1 << 20) or b"").partition(b"\n")[2]
    body = json.dumps({**json.loads(signed), **change}).encode()
    bucket.put(
        push_slots.head_key(PLACE), hmac.new(KEY.encode(), body, hashlib.sha256).hexdigest().encode() + b"\n" + body
    )
    with pytest.raises(CollectFailed) as refused:
        trainer.pushed()
    assert refused.value.code == "collect.bad_manifest"


def test_a_slot_that_was_altered_gives_no_file_its_name(s3: S3Emulator, trainer: Trainer, tmp_path: Path) -> None:
    trainer.save(10)
    trainer.pusher.push()
    found = trainer.pushed()
    assert found is not None
    slot = found.places["checkpoints/000010.weights"][1][0]
    s3.alter(push_slots.slot_key(PLACE, slot))
    with refusal(CollectFailed, "collect.wrong_digest"):
        trainer.brought(tmp_path / "home")
    names = [path.name for path in (tmp_path / "home").rglob("*") if path.is_file() and ".partial" not in path.parts]
    assert "000010.weights" not in names


def test_names_that_lead_elsewhere_are_not_pushed(s3: S3Emulator, trainer: Trainer) -> None:
    trainer.save(10)
    (trainer.root / "secret").write_bytes(b"x" * 100)
    path = trainer.root / "out" / "MANIFEST.json"
    manifest = json.loads(path.read_text())
    manifest["files"].append({"name": "../secret", "bytes": 100, "sha256": "0" * 64, "kind": "sample", "step": None})
    path.write_text(json.dumps(manifest))
    trainer.pusher.push()
    found = trainer.pushed()
    assert found is not None
    assert [file.name for file in found.manifest.files if not file.name.startswith("checkpoints/000010.")] == []
    assert len(found.manifest.files) == 3
    assert not any(b"x" * 100 in s3.content(key) for key in s3.keys(PLACE))


@pytest.fixture
def start_pusher(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pusher]:
    """Yield a pusher that works on its thread, as in the keeper, with short pauses."""
    monkeypatch.setattr(s3_push, "LOOK_S", 0.02)
    monkeypatch.setattr(s3_push, "AGAIN_S", 0.02)
    pusher = s3_push.begin_push(str(trainer.root))
    yield pusher
    pusher.finish()
    assert not pusher.thread.is_alive()


def test_the_last_checkpoint_is_pushed_after_the_end_over_cuts(
    s3: S3Emulator, trainer: Trainer, start_pusher: Pusher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    s3.fail(5)
    saved = trainer.save(10)
    start_pusher.finish()
    assert trainer.brought(tmp_path / "home") == saved
    log = capsys.readouterr().err
    assert lacking(log, "push: UrlRefused: ", "503") == []
    assert "X-Amz" not in log


def test_a_stop_at_once_waits_for_no_push(s3: S3Emulator, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_push, "AGAIN_S", 0.02)
    s3.fail(10_000)
    trainer.save(10)
    pusher = s3_push.begin_push(str(trainer.root))
    (trainer.root / "agent" / "stop.json").write_text('{"now": true, "reason": "farewell"}')
    begun = time.monotonic()
    pusher.finish()
    assert time.monotonic() - begun < s3_push.LAST_S / 10
    s3.fail(0)
    pusher.thread.join(10)


def test_a_bucket_that_stays_away_is_left_after_a_last_half_hour(
    s3: S3Emulator, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert s3_push.LAST_S == 1800, "as docs/STAGE.md has it"
    monkeypatch.setattr(s3_push, "LAST_S", 0.5)
    monkeypatch.setattr(s3_push, "AGAIN_S", 0.02)
    s3.fail(10_000)
    trainer.save(10)
    pusher = s3_push.begin_push(str(trainer.root))
    ending = threading.Thread(target=pusher.finish, daemon=True)
    ending.start()
    ending.join(60)
    assert not ending.is_alive(), "the keeper would never end"
    s3.fail(0)
    pusher.thread.join(10)


def test_charged_pushes_are_the_newest_spread_out_and_the_last(
    s3: S3Emulator, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(s3_push, "AGAIN_S", 0.02)
    limit = 6 * (4 << 20)
    trainer.order(most_bytes=limit, steps=100)
    for step in range(5, 105, 5):
        saved = trainer.save(step - 5, step, size=2 << 20)
        Pusher(str(trainer.root)).push()
        assert s3.uploaded_bytes(f"{PLACE}/slot") <= limit * step / 100
    found = trainer.pushed()
    assert found is not None
    assert found.seq == 4
    last = s3_push.begin_push(str(trainer.root))
    last.finish()
    here = trainer.brought(tmp_path / "home")
    assert {name: content for name, content in saved.items() if name.startswith("checkpoints/000100")} == here
    assert s3.uploaded_bytes(f"{PLACE}/slot") <= limit


def test_charged_bytes_count_when_cut_but_not_when_never_sent(
    s3: S3Emulator, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.order(most_bytes=6 << 20, steps=100)
    trainer.save(100, size=2 << 20)
    trainer.pusher.over.set()

    def refused(*_: Any) -> None:
        raise UrlRefused("unreachable", "no route")

    with monkeypatch.context() as patch:
        patch.setattr(s3_push, "put_object", refused)
        for _ in range(9):
            with pytest.raises(UrlRefused):
                trainer.pusher.push()
    trainer.pusher.push()
    assert trainer.pushed() is not None, "nothing had left before"
    trainer.save(101, size=2 << 20)
    Pusher(str(trainer.root)).push()
    assert s3.uploaded_bytes(f"{PLACE}/slot") < 6 << 20, "what has left is remembered over a restart"
