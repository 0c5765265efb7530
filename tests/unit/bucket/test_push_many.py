"""Tests that many small files of a command take few objects in the bucket, and few requests to download."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from gpurun.core.clock import SystemClock
from gpurun.core.paths import RunFolder
from gpurun.lifecycle.artifacts.downloader import Downloader
from gpurun.lifecycle.artifacts.inventory import Inventory, due_files
from gpurun.lifecycle.artifacts.on_demand import Brief, _BucketSource
from gpurun.remote.agent import s3_push
from gpurun.remote.agent.s3_push import Pusher
from gpurun.remote.s3 import push_slots
from gpurun.remote.s3.pushed_files import read_pushed
from gpurun.remote.s3.s3_client import Bucket
from tests.any_names import below

pytestmark = pytest.mark.boto
PLACE, KEY, SLOT_BYTES = "team/gpt/runs/fox-41/gr-1", "k" * 64, 1 << 20


class Command:
    """A machine's run folder, with the files that a command has written."""

    def __init__(self, root: Path, bucket: Bucket) -> None:
        self.root, self.bucket, self.files = root, bucket, dict[bytes, bytes]()
        (root / "agent").mkdir(parents=True)
        order = push_slots.push_order(bucket, PLACE, run="fox-41", key=KEY, slot_bytes=SLOT_BYTES, seconds=3600)
        (root / "agent" / "push.json").write_bytes(order)
        self.pusher = Pusher(str(root))

    def leaves(self, files: dict[bytes, bytes]) -> None:
        self.files |= files
        listed = []
        for name, content in sorted(self.files.items()):
            path = Path(self.root / "out/outputs" / name.decode())
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), "kind": "output", "step": 0}
            listed.append({"name": quote(b"outputs/" + name, safe="/=+@,"), **facts})
        manifest = {"v": 1, "latest": None, "best": None, "files": listed}
        (self.root / "out" / "MANIFEST.json").write_text(json.dumps(manifest))
        self.pusher.push()

    def brought(self, into: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[bytes, bytes], int]:
        """Download the pushed files; return them by name, with the number of requests."""
        pushed = read_pushed(self.bucket, PLACE, run="fox-41", key=KEY, most_bytes=1 << 40)
        assert pushed is not None
        assert pushed.left_out == ()
        requests, real = [], Bucket.stream

        def counted(bucket: Bucket, *where: Any) -> Any:
            requests.append(where)
            return real(bucket, *where)

        monkeypatch.setattr(Bucket, "stream", counted)
        (into / "artifacts").mkdir(parents=True)
        source = _BucketSource(self.bucket, PLACE, pushed)
        inventory = Inventory(RunFolder(into))
        downloads = Downloader(source, inventory, Brief(SystemClock()), SystemClock())
        downloads.bring(due_files(pushed.manifest))
        assert downloads.missing == {}
        return below(into / "artifacts" / "outputs"), len(requests)


def test_many_small_files_travel_in_few_objects_and_requests(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = Command(tmp_path / "box", bucket)
    command.leaves({b"frames/img %05d.png" % number: b"%d" % number * 250 for number in range(3000)})
    command.leaves({b"more/%d" % number: b"%d" % number for number in range(20)})
    here, requests = command.brought(tmp_path / "home", monkeypatch)
    assert here == command.files
    assert requests <= 8


def test_small_files_in_sequence_never_use_up_the_slots(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each push once took a slot for its new files, so after 128 pushes no file could be uploaded."""
    command = Command(tmp_path / "box", bucket)
    for number in range(push_slots.SLOTS + 12):
        command.leaves({b"step %d.json" % number: b"{}" * number})
    assert command.brought(tmp_path / "home", monkeypatch)[0] == command.files


def test_a_restarted_keeper_keeps_all_that_its_last_list_names(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper was killed after it uploaded its list and before it noted that: no listed file must be overwritten."""
    command = Command(tmp_path / "box", bucket)
    command.leaves({b"a": b"a" * 1000})
    monkeypatch.setattr(Pusher, "note", lambda self, state: None)
    command.leaves({b"b": b"b" * 1000})
    monkeypatch.undo()
    before = command.pusher.sure
    command.pusher = Pusher(str(command.root))
    assert command.pusher.sure == before
    (command.root / "agent" / s3_push.PLACES).write_bytes(b"half a line")
    command.pusher = Pusher(str(command.root))
    command.leaves({b"c": b"c" * 1000})
    assert command.brought(tmp_path / "home", monkeypatch)[0] == command.files
