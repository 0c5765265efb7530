"""A line that breaks again and again, and in between carries something, brings a large file there and home."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpurun.core.clock import VirtualClock
from gpurun.core.paths import Home, RunFolder
from gpurun.core.progress import RunState
from gpurun.lifecycle import salvage, stage
from gpurun.lifecycle.context import Context
from gpurun.machine.answers import Manifest, ManifestFile
from gpurun.machine.base import MachineLost
from gpurun.machine.bucket.objects import Index
from gpurun.machine.bucket.pushed import Pushed
from gpurun.machine.bucket.trouble import BucketLost
from gpurun.machine.bucket.upload import Digests
from gpurun.machine.bucket.wire import Bucket
from gpurun.machine.fetch import noted_bytes
from gpurun.machine.pack import PackedFile

HOUR_S = 3600.0


def test_a_file_that_takes_hours_to_stage_survives_a_line_that_breaks_each_hour(
    own: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, tries = VirtualClock(), 5
    done = Index(sha256="0" * 64, bytes=1, part_bytes=1, sent=(1,), etag="")

    def hours(_: Bucket, __: PackedFile, ___: Digests, ____: Path, on_sent: Callable[[int], None]) -> Index:
        nonlocal tries
        clock.sleep(HOUR_S)
        on_sent(1)
        tries -= 1
        if tries:
            raise BucketLost("the line broke")
        return done

    monkeypatch.setattr(stage, "stage_file", hours)
    monkeypatch.setattr(stage, "find", lambda *_: None)
    context = SimpleNamespace(clock=clock, home=own, heed=lambda _: None)
    staging = stage._Staging(cast(RunState, None), cast(Context, context), cast(Bucket, None), lambda _: None)
    told = staging.stage(PackedFile("data/a.bin", 1, b""), Digests("0" * 64, 1, ("0" * 64,)))
    assert (told.sha256, staging.sent_bytes) == ("0" * 64, 5)


def test_a_file_that_takes_hours_to_come_home_survives_a_line_that_breaks_each_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, folder = VirtualClock(), RunFolder(tmp_path / "fox-41")
    file = ManifestFile(name="checkpoints/000010.weights", bytes=9, sha256="0" * 64, kind="weights", step=10)
    notes = folder.artifacts / ".partial" / f"{file.sha256}.parts"
    notes.parent.mkdir(parents=True)
    notes.write_bytes(b"")
    folder.push_key.write_text("key")

    def hours(*_: Any) -> Path:
        clock.sleep(HOUR_S)
        notes.write_bytes(notes.read_bytes() + b"0 1\n")
        if noted_bytes(folder.artifacts, file.sha256) < 5:
            raise MachineLost("the line broke")
        return folder.artifacts / file.name

    monkeypatch.setattr(Bucket, "look", lambda _: None)
    monkeypatch.setattr(salvage, "read_pushed", lambda *_, **__: Pushed(Manifest(latest=10, files=(file,)), {}, (), 1))
    monkeypatch.setattr(salvage, "fetch_pushed", hours)
    found = salvage.bring_pushed(folder, "s3://shards/gpt", "gpt/runs/fox-41/gr", clock)
    assert (found.here, found.missing) == ((file,), {})
