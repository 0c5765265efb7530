"""Upload the shards to the bucket before anything is rented. Files that the bucket already has are not sent again."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from gpurun.core.errors import SetupError
from gpurun.core.journal_events import StageIntended, StageObserved
from gpurun.core.journal_records import RunState
from gpurun.core.paths import write_atomic
from gpurun.core.records import canonical
from gpurun.core.transfer_progress import Tell, moving
from gpurun.jobs.survey import survey_run_files
from gpurun.lifecycle.context import Context, Note
from gpurun.remote.archive import PackedFile
from gpurun.remote.s3.address import parse_address
from gpurun.remote.s3.objects import find_staged, is_worth_staging
from gpurun.remote.s3.s3_client import Bucket
from gpurun.remote.s3.s3_retry import retry_bucket_call
from gpurun.remote.s3.s3_upload import FileDigests, digests_of, stage_file
from gpurun.remote.s3.staged_files import Staged, StagedFile, staged_file

T = TypeVar("T")
READ_AT_ONCE = 4
PATIENCE_S = 900.0


def stage(state: RunState, context: Context) -> Iterator[Note]:
    """Read every file that is large enough to stage, and upload those that the bucket lacks.

    Wait for a bucket that does not answer, because nothing is billed yet. Raise SetupError if the bucket refuses, or if
    this home cannot note which files were sent.
    """
    seen = survey_run_files(context.plan, context.trainer)
    seen.demand_clean()
    files = [file for file in seen.files if file.is_here and is_worth_staging(file.bytes)]
    bucket = Bucket(parse_address(context.plan.choices.stage), context.clock)
    yield StageIntended(url=str(bucket.address), files=len(files), bytes=_sum_bytes(files))
    started = context.clock.monotonic()
    _retry_until_answer(state, context, bucket.look)
    # Writing the marker also detects a key without write access when the bucket already has every file.
    _retry_until_answer(
        state, context, partial(bucket.put, _make_marker_key(bucket, context), _marker_content(context))
    )
    try:
        with moving(context.folder, context.clock, "stage", _sum_bytes(files)) as tell:
            sending = _Staging(state, context, bucket, tell)
            staged = [sending.stage(file, digests) for file, digests in sending.read_all(files)]
        write_atomic(context.folder.staged, Staged(url=str(bucket.address), files=tuple(staged)).to_json().encode())
    except OSError as error:
        what = f"Staging stopped at {error.filename or context.home.uploads}: {error.strerror}."
        hint = "Free some space there or give yourself access; then the same command continues where this one stopped."
        raise SetupError("stage.no_notes", what, hint=hint) from error
    yield StageObserved(
        url=str(bucket.address),
        endpoint=bucket.endpoint,
        files=len(staged),
        bytes=_sum_bytes(files),
        there_files=sending.there_files,
        there_bytes=sending.there_bytes,
        sent_bytes=sending.sent_bytes,
        seconds=round(context.clock.monotonic() - started, 3),
    )


def _sum_bytes(files: list[PackedFile]) -> int:
    return sum(file.bytes for file in files)


def _make_marker_key(bucket: Bucket, context: Context) -> str:
    return bucket.address.key("runs", context.plan.run, "run.json")


def _marker_content(context: Context) -> bytes:
    """Return the content of the file that names the run in its folder in the bucket. It contains no secrets."""
    plan = hashlib.sha256(context.folder.plan.read_bytes()).hexdigest()
    return canonical({"v": 1, "run": context.plan.run, "plan_sha256": plan})


def _retry_until_answer(
    state: RunState, context: Context, attempt: Callable[[], T], moved: Callable[[], object] = lambda: None
) -> T:
    """Call `attempt` until the bucket answers, at most PATIENCE_S without progress. Raise after a stop request."""
    return retry_bucket_call(
        context.clock, PATIENCE_S, attempt, raise_if_stopped=partial(context.raise_if_stopped, state), moved=moved
    )


class _Staging:
    """Uploads one run's files to the bucket.

    `there_files` and `there_bytes` count what the bucket already had; `sent_bytes` counts what was sent.
    """

    def __init__(self, state: RunState, context: Context, bucket: Bucket, tell: Tell) -> None:
        self.there_files = self.there_bytes = self.sent_bytes = 0
        self._state, self._context, self._bucket, self._tell = state, context, bucket, tell
        self._done_bytes = 0
        self._counting = threading.Lock()

    def read_all(self, files: list[PackedFile]) -> Iterator[tuple[PackedFile, FileDigests]]:
        """Yield every file with its digests, in this order. Several files are read at the same time."""
        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            yield from zip(
                files, pool.map(partial(digests_of, raise_if_stopped=self._raise_if_stopped), files), strict=True
            )

    def stage(self, file: PackedFile, digests: FileDigests) -> StagedFile:
        """Upload one file unless the bucket has it; return its entry."""
        find_it = partial(find_staged, self._bucket, digests.sha256, file.bytes)
        index = _retry_until_answer(self._state, self._context, find_it)
        if index is not None:
            self.there_files += 1
            self.there_bytes += file.bytes
        else:
            notes = self._context.home.uploads
            logging.info("staging %s (%d bytes)", file.name, file.bytes)
            send = partial(stage_file, self._bucket, file, digests, notes, self._count)
            index = _retry_until_answer(self._state, self._context, send, moved=lambda: self.sent_bytes)
        self._done_bytes += file.bytes
        self._tell(self._done_bytes)
        return staged_file(file, digests, index)

    def _count(self, sent_bytes: int) -> None:
        self._raise_if_stopped()
        with self._counting:
            self.sent_bytes += sent_bytes

    def _raise_if_stopped(self) -> None:
        self._context.raise_if_stopped(self._state)
