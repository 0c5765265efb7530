"""Tests that a command's --data in a bucket is first downloaded here, with the user's keys, and then uploaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpurun.core.clock import SystemClock
from gpurun.core.errors import UsageError
from gpurun.core.run_plan import Request
from gpurun.planning.command_proposal import summarize_data
from gpurun.remote.s3.s3_client import Bucket


def put(bucket: Bucket, names: dict[str, bytes]) -> None:
    for name, content in names.items():
        bucket.put(bucket.address.key("corpus", *name.split("/")), content)


def downloaded(folder: Path, address: str) -> dict[str, bytes]:
    summary = summarize_data(Request(recipe="", data=address), folder, SystemClock(), lambda _: None)
    files = {
        path.relative_to(folder / "data").as_posix(): path for path in (folder / "data").rglob("*") if path.is_file()
    }
    assert summary.bytes == sum(path.stat().st_size for path in files.values())
    return {name: path.read_bytes() for name, path in files.items()}


@pytest.mark.boto
def test_all_below_the_address_comes_and_nothing_beside_it(bucket: Bucket, tmp_path: Path) -> None:
    many = {f"part/{number:04d}.txt": b"x" * number for number in range(1, 1105)}  # More than one page of a list.
    put(bucket, {"a.txt": b"one", "empty": b"", **many})
    bucket.put(bucket.address.key("corpus-2", "b.txt"), b"other")
    assert downloaded(tmp_path, "s3://shards/team/gpt/corpus") == {"a.txt": b"one", "empty": b"", **many}


@pytest.mark.parametrize(("name", "code"), [("../../outside", "data.bad_name"), ("", "data.missing")])
def test_a_name_out_of_the_folder_and_an_empty_url_are_refused(
    bucket: Bucket, tmp_path: Path, name: str, code: str
) -> None:
    if name:
        put(bucket, {name: b"x"})
    (tmp_path / "run").mkdir()
    with pytest.raises(UsageError) as refused:
        downloaded(tmp_path / "run", "s3://shards/team/gpt/corpus")
    assert refused.value.code == code
    assert not (tmp_path / "outside").exists()
