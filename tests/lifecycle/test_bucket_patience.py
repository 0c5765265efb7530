"""Tests that a large file gets to a bucket and back although the line breaks every hour."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from gpurun.core.clock import VirtualClock
from gpurun.core.journal_records import RunState
from gpurun.core.paths import Home, RunFolder
from gpurun.lifecycle.artifacts import on_demand
from gpurun.lifecycle.context import Context
from gpurun.lifecycle.steps import stage_shards
from gpurun.remote.archive import PackedFile
from gpurun.remote.download import WantedFile
from gpurun.remote.interface import MachineLost
from gpurun.remote.messages import Manifest, ManifestFile
from gpurun.remote.s3.objects import Index
from gpurun.remote.s3.pushed_files import Pushed
from gpurun.remote.s3.s3_client import Bucket
from gpurun.remote.s3.s3_errors import BucketLost
from gpurun.remote.s3.s3_upload import FileDigests

HOUR_S = 3600.0


def test_hours_of_staging_survive_a_line_that_breaks_each_hour(own: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tries = VirtualClock(), 5
    done = Index(sha256="0" * 64, bytes=1, part_bytes=1, sent=(1,), etag="")

    def hours(_: Bucket, __: PackedFile, ___: FileDigests, ____: Path, on_sent: Callable[[int], None]) -> Index:
        nonlocal tries
        clock.sleep(HOUR_S)
        on_sent(1)
        tries -= 1
        if tries:
            raise BucketLost("the line broke")
        return done

    monkeypatch.setattr(stage_shards, "stage_file", hours)
    monkeypatch.setattr(stage_shards, "find_staged", lambda *_: None)
    context = SimpleNamespace(clock=clock, home=own, raise_if_stopped=lambda _: None)
    staging = stage_shards._Staging(cast(RunState, None), cast(Context, context), cast(Bucket, None), lambda _: None)
    staged = staging.stage(PackedFile("data/a.bin", 1, b""), FileDigests("0" * 64, 1, ("0" * 64,)))
    assert (staged.sha256, staging.sent_bytes) == ("0" * 64, 5)


def test_hours_of_fetching_survive_a_line_that_breaks_each_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, folder = VirtualClock(), RunFolder(tmp_path / "fox-41")
    file = ManifestFile(name="checkpoints/000010.weights", bytes=9, sha256="0" * 64, kind="weights", step=10)
    folder.path.mkdir()
    have = list[str]()
    folder.push_key.write_text("key")

    def hours(_: Bucket, place: str, pushed: Pushed, wanted: WantedFile, into: Path) -> Path:
        wanted.tell(len(have))
        clock.sleep(HOUR_S)
        have.append(place)
        wanted.tell(len(have))
        if len(have) < 5:
            raise MachineLost("the line broke")
        return folder.artifacts / file.name

    monkeypatch.setattr(Bucket, "look", lambda _: None)
    monkeypatch.setattr(
        on_demand, "read_pushed", lambda *_, **__: Pushed(Manifest(latest=10, files=(file,)), {}, (), 1)
    )
    monkeypatch.setattr(on_demand, "fetch_pushed", hours)
    found = on_demand.download_pushed_files(folder, "s3://shards/gpt", "gpt/runs/fox-41/gr", clock)
    assert (found.here, found.missing) == ((file,), {})
