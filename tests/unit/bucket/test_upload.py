"""Tests of staging: a file is uploaded once despite cuts, and a refusal of S3 is reported by its name."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import boto3
import pytest
import zstandard
from werkzeug.serving import WSGIRequestHandler, make_server

from gpurun.core.clock import SystemClock
from gpurun.core.errors import GpurunError, SetupError, UsageError, VerificationFailed
from gpurun.core.filelock import exclusive
from gpurun.remote.archive import PackedFile, survey
from gpurun.remote.s3 import objects
from gpurun.remote.s3.address import parse_address
from gpurun.remote.s3.s3_client import Bucket, Head
from gpurun.remote.s3.s3_errors import BucketLost, explain_s3_refusal
from gpurun.remote.s3.s3_upload import digests_of, stage_file
from tests.emulators.s3 import S3Emulator
from tests.refusals import refusal
from tests.unit.bucket.conftest import shard


def put(bucket: Bucket, file: PackedFile, notes: Path) -> objects.Index:
    return stage_file(bucket, file, digests_of(file, lambda: None), notes, lambda _: None)


def test_a_file_is_staged_once_as_plain_zst_under_its_digest(s3: S3Emulator, bucket: Bucket, tmp_path: Path) -> None:
    file = shard(tmp_path / "data", "a.bin", 3 << 20)
    put(bucket, file, tmp_path / "notes")
    content = (tmp_path / "data" / "a.bin").read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    assert s3.keys() == [f"team/gpt/files/{sha256}.json", f"team/gpt/files/{sha256}.zst"]
    plain = zstandard.ZstdDecompressor().stream_reader(s3.content(s3.keys()[1]), read_across_frames=True).read()
    assert plain == content

    sent = s3.uploaded_bytes()
    again = put(bucket, shard(tmp_path / "other", "same.bin", 3 << 20), tmp_path / "elsewhere")
    assert again.sha256 == sha256
    assert s3.uploaded_bytes() == sent, "another name, another machine's notes: the content is there"


def test_an_upload_of_several_pieces_goes_on_where_it_was_cut(s3: S3Emulator, bucket: Bucket, tmp_path: Path) -> None:
    file = shard(tmp_path / "data", "big.bin", 44 << 20)
    digests = digests_of(file, lambda: None)
    cut(bucket, file, tmp_path / "notes", after_bytes=20 << 20)
    assert objects.find_staged(bucket, digests.sha256, file.bytes) is None, "half of it is nothing"
    index = stage_file(bucket, file, digests, tmp_path / "notes", lambda _: None)
    assert s3.uploaded_bytes() <= 1.3 * file.bytes
    assert objects.find_staged(bucket, digests.sha256, file.bytes) == index
    plain = zstandard.ZstdDecompressor().stream_reader(
        s3.content(objects.data_key(bucket, digests.sha256)), read_across_frames=True
    )
    assert hashlib.sha256(plain.read()).hexdigest() == digests.sha256
    assert not list((tmp_path / "notes").glob("*.pieces"))


def test_equal_pieces_are_sent_where_required_even_after_a_cut(s3: S3Emulator, bucket: Bucket, tmp_path: Path) -> None:
    """Cloudflare R2 demands equal pieces (the last may be smaller), and reports a violation only at the end."""
    s3.wants_equal_pieces = True
    file = words(tmp_path / "data")
    cut(bucket, file, tmp_path / "notes", after_bytes=10 << 20)
    index = put(bucket, file, tmp_path / "notes")
    assert objects.find_staged(bucket, index.sha256, file.bytes) == index
    assert s3.uploaded_bytes() < 1.6 * index.sent_bytes


def test_pieces_of_two_compressors_are_not_mixed(
    s3: S3Emulator, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = words(tmp_path / "data")
    cut(bucket, file, tmp_path / "notes", after_bytes=10 << 20)
    monkeypatch.setattr("gpurun.remote.chunks._ZSTD_LEVEL", 3)  # Other bytes of the same content.
    index = put(bucket, file, tmp_path / "notes")
    content = s3.content(objects.data_key(bucket, index.sha256))
    plain = zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True)
    assert hashlib.sha256(plain.read()).hexdigest() == index.sha256


def words(folder: Path) -> PackedFile:
    """Return a file whose pieces compress differently, so that no two of them have equal sizes in the upload."""
    folder.mkdir()
    dense = random.Random(1).randbytes(19 << 20)
    parts = (dense[start : start + (1 << 20)] for start in range(0, len(dense), 1 << 20))
    (folder / "words.bin").write_bytes(b"".join(part + part[: len(part) // 2].hex().encode() for part in parts))
    return survey({"data": folder}).files[0]


def cut(bucket: Bucket, file: PackedFile, notes: Path, *, after_bytes: int) -> None:
    """Stage a file over a line that breaks after `after_bytes` bytes."""
    sent = 0

    def count(size: int) -> None:
        nonlocal sent
        sent += size
        if sent > after_bytes:
            raise BucketLost("cut")

    with pytest.raises(BucketLost):
        stage_file(bucket, file, digests_of(file, lambda: None), notes, count)


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "replaced since"])
def test_an_unheard_upload_is_not_sent_again_if_it_is_whole(
    s3: S3Emulator, bucket: Bucket, tmp_path: Path, is_whole: bool
) -> None:
    file = shard(tmp_path / "data", "big.bin", 18 << 20)
    digests = digests_of(file, lambda: None)
    s3.deny_writing_of(".json")
    with pytest.raises(SetupError):
        stage_file(bucket, file, digests, tmp_path / "notes", lambda _: None)
    s3.deny_writing_of("")
    if not is_whole:
        bucket.put(objects.data_key(bucket, digests.sha256), b"something else")
    sent = s3.uploaded_bytes()
    stage_file(bucket, file, digests, tmp_path / "notes", lambda _: None)
    assert (s3.uploaded_bytes() - sent < 10_000) is is_whole
    assert objects.find_staged(bucket, digests.sha256, file.bytes) is not None


def test_two_runs_with_the_same_shards_send_them_once(s3: S3Emulator, bucket: Bucket, tmp_path: Path) -> None:
    file = shard(tmp_path / "data", "a.bin", 1 << 20)
    digests, notes = digests_of(file, lambda: None), tmp_path / "notes"
    notes.mkdir(mode=0o700)
    with ThreadPoolExecutor() as pool:
        with exclusive(notes / f"{digests.sha256}.lock"):
            second = pool.submit(stage_file, bucket, file, digests, notes, lambda _: None)
            with pytest.raises(TimeoutError):
                second.result(timeout=0.3)
            assert s3.uploaded_bytes() == 0
        assert second.result(timeout=20).sha256 == digests.sha256


def test_a_run_that_waits_for_anothers_upload_can_be_stopped(bucket: Bucket, tmp_path: Path) -> None:
    file, notes = shard(tmp_path / "data", "a.bin", 1 << 20), tmp_path / "notes"
    digests = digests_of(file, lambda: None)
    notes.mkdir(mode=0o700)

    class Stop(Exception):
        pass

    looks = iter(range(3))

    def stop_soon(sent_bytes: int) -> None:
        assert sent_bytes == 0
        if next(looks, None) is None:
            raise Stop

    with exclusive(notes / f"{digests.sha256}.lock"), pytest.raises(Stop):
        stage_file(bucket, file, digests, notes, stop_soon)


def test_a_file_that_reads_differently_is_not_called_staged(bucket: Bucket, tmp_path: Path) -> None:
    file = shard(tmp_path / "data", "a.bin", 1 << 20)
    digests = digests_of(file, lambda: None)
    with refusal(VerificationFailed, "pack.changed", "data/a.bin"):
        stage_file(bucket, file, replace(digests, parts=("0" * 64,)), tmp_path / "notes", lambda _: None)
    assert objects.find_staged(bucket, digests.sha256, file.bytes) is None


def test_an_object_s3_did_not_keep_whole_is_not_called_staged(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, head = shard(tmp_path / "data", "a.bin", 1 << 20), bucket.head

    def less(key: str) -> Head | None:
        found = head(key)
        return found and Head(found.bytes - 1, found.etag)

    with monkeypatch.context() as patch:
        patch.setattr(bucket, "head", less)
        with refusal(BucketLost, "stage.unreachable"):
            put(bucket, file, tmp_path / "notes")
    assert bucket.get(objects.index_key(bucket, digests_of(file, lambda: None).sha256), 1 << 20) is None


def test_notes_of_an_upload_that_s3_forgot_are_worth_nothing(s3: S3Emulator, bucket: Bucket, tmp_path: Path) -> None:
    file = shard(tmp_path / "data", "big.bin", 10 << 20)
    digests = digests_of(file, lambda: None)
    (tmp_path / "notes").mkdir()
    key = objects.data_key(bucket, digests.sha256)
    lines = [
        f'{{"upload": "gone", "key": "{key}", "bucket": "shards"}}',
        '{"number": 1, "sha256": "x", "etag": "x"}',
        "{",
    ]
    (tmp_path / "notes" / f"{digests.sha256}.pieces").write_text("\n".join(lines))
    stage_file(bucket, file, digests, tmp_path / "notes", lambda _: None)
    assert objects.find_staged(bucket, digests.sha256, file.bytes) is not None


def test_an_upload_that_s3_has_ended_meanwhile_is_begun_anew(s3: S3Emulator, bucket: Bucket, tmp_path: Path) -> None:
    """A lifecycle rule or a user may end an unfinished upload: it must then start again."""
    file = shard(tmp_path / "data", "big.bin", 18 << 20)
    digests = digests_of(file, lambda: None)
    with pytest.raises(BucketLost, match="NoSuchUpload"):
        stage_file(bucket, file, digests, tmp_path / "notes", lambda sent: s3.fail(not sent, 404, "NoSuchUpload"))
    s3.fail(0)
    stage_file(bucket, file, digests, tmp_path / "notes", lambda _: None)
    assert objects.find_staged(bucket, digests.sha256, file.bytes) is not None


def test_a_replaced_object_is_not_taken_for_the_file_but_resent(s3: S3Emulator, bucket: Bucket, tmp_path: Path) -> None:
    file = shard(tmp_path / "data", "a.bin", 1 << 20)
    index = put(bucket, file, tmp_path / "notes")
    bucket.put(objects.data_key(bucket, index.sha256), b"something else")
    assert objects.find_staged(bucket, index.sha256, file.bytes) is None
    put(bucket, file, tmp_path / "notes")
    assert objects.find_staged(bucket, index.sha256, file.bytes) is not None


@pytest.mark.parametrize(
    ("stored", "is_there"),
    [("GLACIER", False), ("DEEP_ARCHIVE", False), ("GLACIER_IR", True), ("STANDARD_IA", True)],
)
def test_an_archived_object_is_staged_again_before_a_pull_fails(
    s3: S3Emulator, bucket: Bucket, tmp_path: Path, stored: str, is_there: bool
) -> None:
    """An archived object has the right size and tag, but reading it would take hours: it must be staged again."""
    file = shard(tmp_path / "data", "a.bin", 1 << 20)
    index = put(bucket, file, tmp_path / "notes")
    s3.objects.get_object("shards", objects.data_key(bucket, index.sha256))._storage_class = stored
    assert (objects.find_staged(bucket, index.sha256, file.bytes) is not None) is is_there
    put(bucket, file, tmp_path / "notes")
    assert objects.find_staged(bucket, index.sha256, file.bytes) == index


@pytest.mark.parametrize(
    ("answer", "is_there"),
    [
        ({"ArchiveStatus": "ARCHIVE_ACCESS"}, False),
        ({"StorageClass": "GLACIER", "Restore": 'ongoing-request="true"'}, False),
        ({"StorageClass": "GLACIER", "Restore": 'ongoing-request="false", expiry-date="later"'}, True),
    ],
    ids=["by itself", "on its way", "brought back"],
)
def test_an_archived_object_is_there_only_once_restored(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, answer: dict[str, str], is_there: bool
) -> None:
    monkeypatch.setattr(bucket, "_call", lambda *_, **__: {"ContentLength": 1, "ETag": '"x"', **answer})
    assert (bucket.head("x") == Head(1, "x")) is is_there


def test_the_index_of_another_file_is_not_taken_for_this_ones(s3: S3Emulator, bucket: Bucket, tmp_path: Path) -> None:
    """Anyone who can write to the bucket could replace a shard by another one, together with its index."""
    files = [shard(tmp_path / "data", f"{seed}.bin", 1 << 20, seed) for seed in (1, 2)]
    ours, other = (put(bucket, file, tmp_path / "notes") for file in files)
    for key in (objects.index_key, objects.data_key):
        bucket.put(key(bucket, ours.sha256), bucket.get(key(bucket, other.sha256), 4 << 20) or b"")
    assert objects.find_staged(bucket, ours.sha256, files[0].bytes) is None


@pytest.mark.parametrize("index", [b"", b"[]", b'{"v": 1, "sent": [-1]}', b"x" * (2 << 20)])
def test_an_index_that_makes_no_sense_is_none(s3: S3Emulator, bucket: Bucket, index: bytes) -> None:
    bucket.put(objects.index_key(bucket, "0" * 64), index)
    assert objects.find_staged(bucket, "0" * 64, 1000) is None


def test_a_file_that_changes_while_it_is_staged_is_refused(s3: S3Emulator, bucket: Bucket, tmp_path: Path) -> None:
    file = shard(tmp_path / "data", "a.bin", 2 << 20)
    digests = digests_of(file, lambda: None)
    shard(tmp_path / "data", "a.bin", 2 << 20, seed=2)
    with refusal(UsageError, "pack.changed", "data/a.bin"):
        stage_file(bucket, file, digests, tmp_path / "notes", lambda _: None)
    assert objects.find_staged(bucket, digests.sha256, file.bytes) is None


def refusal_of(bucket: Bucket) -> GpurunError:
    def use() -> None:
        bucket.look()
        bucket.put("team/gpt/x", b"x")

    with pytest.raises(GpurunError) as refused:
        use()
    return refused.value


def test_a_missing_bucket_is_named_with_where_it_was_sought(s3: S3Emulator) -> None:
    error = refusal_of(Bucket(parse_address("s3://nowhere/x"), SystemClock()))
    assert (error.code, "nowhere" in error.what, s3.environment["AWS_ENDPOINT_URL_S3"] in error.what) == (
        "stage.no_bucket", True, True,
    )  # fmt: skip


@pytest.mark.parametrize("action", ["s3:ListBucket", "s3:PutObject"])
def test_a_permission_that_is_missing_is_named(s3: S3Emulator, bucket: Bucket, action: str) -> None:
    s3.denied.add(action)
    error = refusal_of(bucket)
    assert error.code == "stage.denied"
    assert f"may not {action} on" in error.what


def test_an_unknown_key_and_no_key_at_all_are_told_apart(s3: S3Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAOTHER")
    assert refusal_of(Bucket(parse_address("s3://shards"), SystemClock())).code == "stage.key"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert refusal_of(Bucket(parse_address("s3://shards"), SystemClock())).code == "auth.aws"


def test_a_bucket_in_another_region_is_used_and_signed_for_there(s3: S3Emulator, bucket: Bucket) -> None:
    s3.region = "eu-west-1"
    bucket.look()
    bucket.put("team/gpt/x", b"hello")
    assert bucket.region == "eu-west-1"
    assert "eu-west-1" in bucket.url_to_get("team/gpt/x", 60).reveal()


@pytest.mark.parametrize(
    ("region", "hint"), [("eu-west-1", "AWS_DEFAULT_REGION=eu-west-1"), ("", "AWS_DEFAULT_REGION")]
)
def test_a_service_that_refuses_another_region_names_what_to_set(region: str, hint: str) -> None:
    place = parse_address("s3://shards/gpt")
    error = explain_s3_refusal("head_object", "301", "Moved Permanently", region, "gpt/x", place, "https://s3.example")
    assert error.code == "stage.wrong_region"
    assert region in error.what
    assert hint in error.hint


@pytest.mark.parametrize(("ahead_s", "figure"), [(3600.0, "60 min behind"), (-3600.0, "60 min ahead")])
def test_a_clock_too_far_off_for_s3_is_refused_by_how_much(
    s3: S3Emulator, bucket: Bucket, ahead_s: float, figure: str
) -> None:
    s3.ahead_s = ahead_s
    with refusal(SetupError, "stage.clock", figure):
        bucket.look()


def test_a_url_never_shows_itself(s3: S3Emulator, bucket: Bucket) -> None:
    url = bucket.url_to_put("x", 60)
    assert "Signature" in url.reveal()
    assert "Signature" not in f"{url} {url!r}"


def test_a_bucket_that_does_not_answer_is_lost_not_refused(
    s3: S3Emulator, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with pytest.raises(BucketLost):
        Bucket(parse_address("s3://shards"), SystemClock()).look()


@pytest.mark.parametrize("text", ["shards", "s3:/x", "s3://", "s3://UPPER", "s3://a b", "s3://abc/../x", "https://x/y"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with refusal(UsageError, "stage.address", repr(text)):
        parse_address(text)


def test_credentials_are_found_by_the_sdk_alone() -> None:
    assert "AWS_ACCESS_KEY_ID" not in os.environ
    with refusal(SetupError, "auth.aws", "Unable to locate credentials"):
        Bucket(parse_address("s3://shards"), SystemClock()).look()


def test_two_threads_that_ask_first_at_once_make_one_client(
    s3: S3Emulator, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """boto3 cannot safely make a client in two threads, so the second thread must wait."""
    made: list[object] = []
    session = boto3.session.Session()
    client, other = session.client, threading.Thread(target=bucket.look)

    def slowly(*words: object, **more: object) -> object:
        made.append(words)
        if not other.ident:  # The first thread is overtaken here, unless the other must wait for it.
            other.start()
            other.join(0.3)
        return client(*words, **more)

    monkeypatch.setattr(session, "client", slowly)
    monkeypatch.setattr(bucket._session, "_boto", session)
    bucket.look()
    other.join()
    assert len(made) == 1


class Quiet(WSGIRequestHandler):
    def log(self, *_: object) -> None:
        """Log nothing."""


@pytest.mark.parametrize(
    ("status", "page"),
    [(404, b""), (404, b'{"message": "no route"}'), (200, b""), (200, b"<html><body>Welcome</body></html>")],
    ids=["nothing", "no route", "empty", "a console"],
)
def test_a_server_that_is_not_s3_is_named_and_given_nothing(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, status: int, page: bytes
) -> None:
    """Behind the URL may be a gateway, or the console of an S3 service: the refusal must say that it is not S3."""

    def answers(_: object, start_response: Callable[..., object]) -> list[bytes]:
        start_response(f"{status} -", [("Content-Type", "text/html"), ("Content-Length", str(len(page)))])
        return [page]

    server = make_server("127.0.0.1", 0, answers, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.server_port}")
    try:
        assert refusal_of(bucket).code == "stage.refused"
        for change in (lambda: bucket.put("x", b"1"), lambda: bucket.begin("x")) if status == 404 else ():
            with pytest.raises(SetupError):
                change()
    finally:
        server.shutdown()
        server.server_close()
