"""Upload the trainer, the recipe and the shards. The agent checks every digest before anything starts.

The machine pulls staged files from the bucket; files that it cannot pull are sent over SSH. It downloads public shards
from their source; if they do not arrive, the run ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import ceil

from gpurun.core.errors import GpurunError, NoOffer, SetupError, TrainingFailed
from gpurun.core.journal_events import Incident, ShipIntended, ShipObserved
from gpurun.core.journal_records import RunState
from gpurun.core.retry import Retry
from gpurun.core.transfer_progress import moving
from gpurun.jobs.survey import require_planned_program, survey_run_files
from gpurun.lifecycle.connect import AWAY_S, Patience
from gpurun.lifecycle.context import Context, Note, get_instance
from gpurun.planning.transfer import SHIP_START_S, download_s
from gpurun.remote.archive import Pack, PackedFile
from gpurun.remote.client import FarSide
from gpurun.remote.interface import FarRefusal
from gpurun.remote.s3.address import parse_address
from gpurun.remote.s3.objects import forget
from gpurun.remote.s3.pull_request import PullResult, have_downloaded, have_pulled
from gpurun.remote.s3.s3_client import Bucket
from gpurun.remote.s3.s3_errors import BucketLost
from gpurun.remote.s3.s3_retry import AGAIN_S, retry_bucket_call
from gpurun.remote.s3.s3_upload import digests_of
from gpurun.remote.s3.staged_files import StagedFile, read_staged
from gpurun.view.number_format import format_bytes, format_duration

PATIENCE_S = 60.0
"""Seconds to wait for a bucket. A longer wait could cost more than sending the files from this computer."""


def ship(state: RunState, context: Context) -> Iterator[Note]:
    """Send the pack to the agent in parts. The agent puts the files in place only when all of them are verified."""
    require_planned_program(context.plan, context.trainer)
    seen = survey_run_files(context.plan, context.trainer)
    yield ShipIntended(files=len(seen.files), bytes=seen.total_bytes)
    _check_room(seen.total_bytes, state, disk_gb=context.plan.job.disk_gb)
    started = context.clock.monotonic()
    far = context.reach(get_instance(state))
    pack, pulled = Pack(seen), PullResult()  # A retry sends only the files that the agent has not verified yet.
    if context.plan.data.public:
        _download(state, context, far)
    yield from pull_staged(state, context, far, pack, pulled)
    patience, there_most = Patience(state, context, limit_s=context.plan.lease.ship_s), 0
    if pulled.missing_bytes:  # Sending these files over SSH may use up training time.
        patience.limit_s += context.plan.lease.train_s
    with moving(context.folder, context.clock, "ship", seen.total_bytes) as tell:

        def on_progress(there_bytes: int) -> None:
            nonlocal there_most
            if there_bytes > there_most:
                there_most = there_bytes
                patience.moved()
            tell(there_bytes)
            context.raise_if_stopped(state)

        arrived = patience.until_done(lambda: far.unpack(pack, on_progress=on_progress, timeout_s=patience.left_s))
    seconds = round(context.clock.monotonic() - started, 3)
    fields = {**arrived.model_dump(mode="json"), "sent_bytes": pack.sent_bytes, "seconds": seconds}
    if context.plan.choices.stage:
        fields |= {"pulled_files": len(pulled.files), "pulled_bytes": pulled.sent_bytes}
    if context.plan.data.public:
        fields |= {"public": context.plan.data.source, "public_bytes": context.plan.data.public_bytes}
    yield ShipObserved(**fields)


def _download(state: RunState, context: Context, far: FarSide) -> None:
    """Let the machine download the public shards. Raise NoOffer if it fails or takes twice the planned time."""
    data, came, began_mono = context.plan.data, PullResult(), context.clock.monotonic()
    limit_s = SHIP_START_S + 2 * download_s(data.public_bytes)
    patience = Patience(state, context, limit_s=limit_s)

    def why(code: str, problem: str) -> NoOffer:
        rate = format_bytes(int(came.sent_bytes / max(1.0, context.clock.monotonic() - began_mono)))
        here = f"{format_bytes(came.sent_bytes)} of {format_bytes(data.public_bytes)} arrived, {rate} a second"
        hint = "Try again with another machine, or send your own shards: --data DIR --stage s3://BUCKET/PREFIX."
        return NoOffer(code, f"The machine could not download {data.source}: {problem}; {here}.", hint=hint)

    with moving(context.folder, context.clock, "ship", data.public_bytes) as tell:

        def on_progress() -> None:
            patience.moved()
            tell(came.sent_bytes)
            context.raise_if_stopped(state)
            if patience.left_s <= 1:
                raise why("data.slow", f"it was not done after {format_duration(limit_s)}, twice the planned time")

        order = partial(have_downloaded, far, data.public, data.public_origin, came, on_progress=on_progress)
        for _ in _pull_tries(came, context):
            patience.until_done(lambda: order(timeout_s=patience.left_s))
    for first in came.failed.values():
        raise why(f"data.{first.code}", first.message)


def _check_room(size: int, state: RunState, *, disk_gb: int) -> None:
    """Raise SetupError unless the machine's free disk space is at least 1.1 times the size of the upload."""
    free, needed = state.facts.get("disk_free_bytes"), size * 11 // 10
    if isinstance(free, int) and needed > free:
        ask_gb = disk_gb + ceil((needed - free) / 1e9)
        raise SetupError(
            "box.disk_small",
            f"The upload needs {format_bytes(needed)} on the machine, {format_bytes(needed - free)} more than is free.",
            hint=f"Ask for a larger disk: --set hardware.disk_gb={ask_gb}. On your own machine, free some space.",
        )


def pull_staged(state: RunState, context: Context, far: FarSide, pack: Pack, came: PullResult) -> Iterator[Note]:
    """Let the machine pull the pack's staged files from the bucket, and collect the results in `came`.

    Failures are recorded, not raised, because the files are then sent over SSH. Only errors that also prevent an upload
    over SSH are raised: a full disk on the machine (FarRefusal), a lost machine, a stop request.
    """
    files = _staged_of(state, context, pack)
    if not files:
        return
    if "zstd" not in (state.facts.get("codecs") or ("zstd",)):
        came.missing_bytes = sum(file.bytes for file in files)
        yield _over_ssh_note("stage.no_zstd", "the machine has no zstd to unpack the staged files", files)
        return
    bucket, lease = Bucket(parse_address(context.plan.choices.stage), context.clock, is_paid=True), context.plan.lease
    try:
        retry_bucket_call(
            context.clock, PATIENCE_S, bucket.look, raise_if_stopped=partial(context.raise_if_stopped, state)
        )
        patience, pace = Patience(state, context, limit_s=lease.ship_s + lease.train_s), _Pace(came, context)

        def on_progress() -> None:
            patience.moved()
            context.raise_if_stopped(state)
            pace.require_speed()

        order = partial(have_pulled, far, bucket, files, came, on_progress=on_progress)
        for _ in _pull_tries(came, context):
            patience.until_done(lambda: order(timeout_s=patience.left_s))
    except FarRefusal as refusal:
        if refusal.reason == "disk_full":
            raise
        yield _over_ssh_note("stage.not_pulled", refusal.what.rstrip("."), _list_missing_files(files, came))
    # If the machine itself is lost, the upload over SSH will detect that.
    except (SetupError, BucketLost, TrainingFailed) as error:
        yield _over_ssh_note(
            "stage.not_pulled", f"{error.code}: {error.what.rstrip('.')}", _list_missing_files(files, came)
        )
    else:
        yield from _failure_notes(files, came)
        yield from _forget_altered(bucket, files, came)
    came.missing_bytes = sum(file.bytes for file in _list_missing_files(files, came))


class _Pace:
    """Measures how fast the bucket delivers, and gives up on the bucket only if SSH would be faster."""

    def __init__(self, came: PullResult, context: Context) -> None:
        self._came, self._clock, self._uplink = came, context.clock, context.plan.uplink
        self._since_mono = self._heard_mono = float("-inf")
        self._since_bytes = 0

    def require_speed(self) -> None:
        """Raise SetupError `stage.slow` if less arrived in the last PATIENCE_S than SSH would have sent."""
        now_mono, came_bytes = self._clock.monotonic(), self._came.sent_bytes
        was_away, self._heard_mono = now_mono - self._heard_mono > AWAY_S, now_mono
        seconds, brought_bytes = now_mono - self._since_mono, came_bytes - self._since_bytes
        if was_away:  # After this computer slept or the connection broke, start a new measurement.
            self._since_mono, self._since_bytes = now_mono, came_bytes
        elif seconds >= PATIENCE_S:
            if 8 * brought_bytes < self._uplink.bits_per_s * seconds:
                what = f"it delivered {brought_bytes:,} bytes in {seconds:.0f} s, less than SSH would"
                raise SetupError("stage.slow", what, hint="Nothing to do.")
            self._since_mono, self._since_bytes = now_mono, came_bytes


def _pull_tries(came: PullResult, context: Context) -> Iterator[None]:
    """Yield once per try. Retry while the machine cannot reach the bucket, until nothing has arrived for PATIENCE_S."""
    retry, sent_bytes = Retry(context.clock, AGAIN_S, limit_s=PATIENCE_S), came.sent_bytes
    while True:
        yield
        if came.sent_bytes > sent_bytes:
            sent_bytes = came.sent_bytes
            retry.moved()
        is_away = any(failure.code == "unreachable" for failure in came.failed.values())
        if not is_away or not retry.pauses():
            return


def _staged_of(state: RunState, context: Context, pack: Pack) -> list[StagedFile]:
    """Return the pack's staged files that have not changed on this computer, and give the pack their digests."""
    staged = read_staged(context.folder.staged) if context.plan.choices.stage else None
    by_name, raise_if_stopped = (
        {file.name: file for file in pack.survey.files},
        partial(context.raise_if_stopped, state),
    )
    here = [file for file in (staged.files if staged else ()) if file.name in by_name]
    found = [file for file in here if _is_same(file, by_name[file.name], raise_if_stopped)]
    pack.known.update({file.name: file.sha256 for file in found})
    return found


def _is_same(staged: StagedFile, file: PackedFile, raise_if_stopped: Callable[[], None]) -> bool:
    """Return whether a file has the same content as when it was staged.

    If only its size still agrees, it is read again, which is faster than sending it over SSH.
    """
    return staged.is_of(file) or (
        staged.bytes == file.bytes and digests_of(file, raise_if_stopped).sha256 == staged.sha256
    )


def _list_missing_files(files: Sequence[StagedFile], came: PullResult) -> list[StagedFile]:
    return [file for file in files if file.sha256 not in came.files]


def _failure_notes(files: Sequence[StagedFile], came: PullResult) -> Iterator[Note]:
    """Yield one note for each reason why files could not be pulled."""
    reasons = Counter((failure.code, failure.message) for failure in came.failed.values())
    for code, message in reasons:
        yield _over_ssh_note(f"stage.{code}", message, [f for f in files if _is_failed(f, came, code, message)])


def _is_failed(file: StagedFile, came: PullResult, code: str, message: str) -> bool:
    why = came.failed.get(file.sha256)
    return why is not None and (why.code, why.message) == (code, message)


def _forget_altered(bucket: Bucket, files: Sequence[StagedFile], came: PullResult) -> Iterator[Note]:
    """Remove files that were altered or absent from the bucket's index, so that the next run stages them again."""
    spoilt = [f for f in files if (why := came.failed.get(f.sha256)) and why.code in ("altered", "absent")]
    for file in {file.sha256: file for file in spoilt}.values():
        try:
            forget(bucket, file.sha256)
        except GpurunError as error:
            yield Incident(code="stage.kept", message=f"its index could not be removed: {error.what}")


def _over_ssh_note(code: str, why: str, files: Sequence[StagedFile]) -> Note:
    first, size = files[0], sum(file.bytes for file in files)
    what = first.name if len(files) == 1 else f"{first.name} and {len(files) - 1} more"
    message = f"{what} ({size:,} bytes) could not be pulled from the bucket: {why}; sent over SSH instead"
    return Incident(code=code, message=message)
