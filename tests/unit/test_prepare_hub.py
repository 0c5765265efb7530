"""Tests of data sets from the Hub: downloaded, or else read from the Hub's cache, or else refused with advice."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpurun.core.errors import GpurunError, SetupError, UsageError
from gpurun.data import hub
from tests.refusals import lacking, refusal

huggingface_hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("huggingface_hub.errors")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return a folder like the Hub's cache, which holds one data set of three files."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    place = tmp_path / "hf" / "hub" / "datasets--me--corpus"
    folder = place / "snapshots" / "abc" / "sample"
    (place / "refs").mkdir(parents=True)
    (place / "blobs").mkdir()
    folder.mkdir(parents=True)
    (place / "refs" / "main").write_text("abc")
    (folder / "README.md").write_text("Not a part of the corpus.")
    for number in range(2):
        rows = [f"Row {number}.{i}: " + "some words of it. " * 50 for i in range(200)]
        parquet.write_table(arrow.table({"text": rows}), place / "blobs" / str(number))
        (folder / f"{number}.parquet").symlink_to(place / "blobs" / str(number))
    return tmp_path / "hf"


PREPARED = """
import pathlib, sys
from gpurun.data.prepare import PrepareOrder, prepare
made = prepare(PrepareOrder(sys.argv[1], "char", pathlib.Path(sys.argv[2]), 0.2), print)
print(made.manifest["source"])
"""


def prepared(source: str, cache: Path, out: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    line = [sys.executable, "-c", PREPARED, source, str(out)]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_an_earlier_download_is_prepared_without_a_network(cache: Path, tmp_path: Path) -> None:
    done = prepared("hf:me/corpus/sample", cache, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "'kind': 'hub'" in done.stdout
    assert "'documents': 400" in done.stdout
    assert "incomplete" in done.stdout


def test_what_was_not_is_refused_with_what_to_do(cache: Path, tmp_path: Path) -> None:
    done = prepared("hf:me/other", cache, tmp_path / "out")
    assert done.returncode == 1
    assert lacking(done.stderr, "cache", "hub") == []
    assert not (tmp_path / "out").exists()


def test_a_pattern_names_some_files_of_a_set_that_has_no_folders(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[dict[str, Any]] = []

    def snapshot_download(dataset: str, **wanted: Any) -> Any:
        calls.append({"dataset": dataset, **wanted})
        return [] if wanted.get("dry_run") else str(tmp_path)

    for name in ("shard_000.parquet", "shard_014.parquet", "shard_020.parquet", "README.md"):
        (tmp_path / name).touch()
    constants = SimpleNamespace(HF_HUB_CACHE=str(tmp_path))
    fake = SimpleNamespace(snapshot_download=snapshot_download, errors=huggingface_hub.errors, constants=constants)
    monkeypatch.setattr(hub, "_huggingface_hub", lambda: fake)
    found = hub.download_files("me/corpus/shard_0[01]*", lambda _: None)
    assert found == (tmp_path, ["shard_000.parquet", "shard_014.parquet"])
    assert [call["allow_patterns"] for call in calls] == [["shard_0[01]*"]] * 2


@pytest.mark.parametrize("name", ["me", "me/", "/corpus", "", "me/my corpus", "me/corpus!", "-me/corpus"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with refusal(UsageError, "usage.hub_name", f"hf:{name}"):
        hub.download_files(name, lambda _: None)


def request_of(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    free: int,
    calls: list[dict[str, Any]],
    broken: Exception | None = None,
) -> list[str]:
    """Download from a fake Hub that has one file of 5 GB; record its calls, and return the messages to the user.

    `free` is the disk's free space in bytes, and `broken` is the error of the download.
    """

    def snapshot_download(dataset: str, **wanted: Any) -> Any:
        calls.append({"dataset": dataset, **wanted})
        if wanted.get("dry_run"):
            return [SimpleNamespace(will_download=True, file_size=5 * 10**9)]
        if broken and not wanted.get("local_files_only"):
            raise broken
        (tmp_path / "sample").mkdir()
        (tmp_path / "sample" / "0.parquet").touch()
        return str(tmp_path)

    constants = SimpleNamespace(HF_HUB_CACHE=str(tmp_path / "not" / "there" / "yet"))
    errors = huggingface_hub.errors
    fake = SimpleNamespace(snapshot_download=snapshot_download, errors=errors, constants=constants)
    monkeypatch.setattr(hub, "_huggingface_hub", lambda: fake)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    said: list[str] = []
    assert hub.download_files("me/corpus/sample@v2", said.append) == (tmp_path, ["sample/0.parquet"])
    return said


def test_only_the_named_files_and_revision_are_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []
    said = request_of(monkeypatch, tmp_path, 10**12, calls)
    assert any("5.00 GB" in line for line in said)
    assert [(call["dataset"], call["revision"], call["repo_type"]) for call in calls] == [
        ("me/corpus", "v2", "dataset")
    ] * 2
    assert all(pattern.startswith("sample/") for call in calls for pattern in call["allow_patterns"])


def test_a_cache_without_room_is_said_before_the_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []
    with refusal(SetupError, "disk.too_small", "5.00 GB", "4,000 MB"):
        request_of(monkeypatch, tmp_path, 10**9, calls)
    assert [call.get("dry_run") for call in calls] == [True]


def test_a_download_that_breaks_off_is_not_a_data_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    line_error = huggingface_hub.errors.HfHubHTTPError.__bases__[0]
    for broken, code in (
        (line_error("peer closed connection"), "data.hub_unreachable"),
        (TimeoutError("timed out"), "data.hub_unreachable"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk.full"),
    ):
        with pytest.raises(GpurunError) as raised:
            request_of(monkeypatch, tmp_path, 10**12, [], broken)
        assert (raised.value.code, raised.value.exit_code) == (code, 4 if code == "disk.full" else 2)
