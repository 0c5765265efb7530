"""Plan the staging of shards: which files the bucket has, which are uploaded before renting, and what that saves.

Problems with the bucket are reported before anything is rented.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from math import ceil
from pathlib import Path
from urllib.parse import urlsplit

from gpurun.core.clock import Clock
from gpurun.core.errors import UsageError
from gpurun.core.places import AWS, place_facts
from gpurun.core.run_plan import Mode, Plan
from gpurun.core.stage_plan import StagePlan
from gpurun.core.untrusted import read_object
from gpurun.planning.transfer import BUCKET_BITS_PER_S, advice, aws_bill, early_bytes
from gpurun.remote.archive import PackedFile, Survey
from gpurun.remote.s3.address import parse_address
from gpurun.remote.s3.objects import find_staged, is_worth_staging
from gpurun.remote.s3.s3_client import Bucket
from gpurun.view.number_format import format_bytes

_ASK_AT_ONCE = 8


def with_stage(plan: Plan, seen: Survey | None, clock: Clock) -> Plan:
    """Check the plan's bucket; return the plan with the files to stage. `seen` is None for data that is not prepared.

    Without a bucket, add a note if a bucket would save much time. Raise UsageError, SetupError or BucketLost if the
    bucket cannot be used.
    """
    if not plan.choices.stage:
        worth_bytes = sum(file.bytes for file in _list_files_worth_staging(seen))
        notes = advice(plan.offer, plan.uplink, worth_bytes) if plan.mode is Mode.PAID else ()
        return plan.with_notes(*notes)
    address = parse_address(plan.choices.stage)
    if plan.mode is Mode.LOCAL:
        hint = "Leave --stage out, or rent a machine."
        raise UsageError("stage.local", "--stage is for other machines; nothing is sent to this one.", hint=hint)
    if plan.mode is Mode.REHEARSAL:
        note = f"The rehearsal uploads nothing; {address} is for the paid run."
        return plan.with_notes(note)
    bucket = Bucket(address, clock)
    bucket.look()
    files = _list_files_worth_staging(seen)
    there = _in_bucket(bucket, files, plan)
    whole, found = sum(file.bytes for file in files), sum(file.bytes for file in there)
    stage = StagePlan(
        url=str(address),
        endpoint=bucket.endpoint,
        region=bucket.region,
        files=len(files),
        bytes=whole,
        there_files=len(there),
        there_bytes=found,
        upload_s=ceil(8 * (whole - found) / plan.uplink.bits_per_s),
        saves_s=int(8 * whole / plan.uplink.bits_per_s - 8 * whole / BUCKET_BITS_PER_S),
    )
    return plan.model_copy(update={"stage": stage}).with_notes(warnings=_list_bucket_warnings(bucket, stage, plan))


def _list_files_worth_staging(seen: Survey | None) -> list[PackedFile]:
    return [file for file in (seen.files if seen else ()) if file.is_here and is_worth_staging(file.bytes)]


def _in_bucket(bucket: Bucket, files: list[PackedFile], plan: Plan) -> list[PackedFile]:
    """Return the files that the bucket has, by the digests in their manifest.

    Files without a digest count as missing until staging, which checks them.
    """
    digests = _read_shard_digests(Path(plan.data.beside or plan.data.folder))
    known = [(file, digests[file.name]) for file in files if file.name in digests]
    with ThreadPoolExecutor(_ASK_AT_ONCE) as pool:
        found = pool.map(lambda pair: find_staged(bucket, pair[1], pair[0].bytes) is not None, known)
        return [file for (file, _), is_there in zip(known, found, strict=True) if is_there]


def _read_shard_digests(folder: Path) -> dict[str, str]:
    """Return the shards' sha256, keyed by their path in the pack, from data.json."""
    try:
        manifest = read_object(folder / "data.json")
    except FileNotFoundError:
        return {}
    shards = [*manifest.get("train", ()), *manifest.get("val", ())]
    return {f"data/{Path(str(shard['name'])).name}": str(shard["sha256"]) for shard in shards if "sha256" in shard}


def _is_private(host: str) -> bool:
    """Return whether a host is localhost or a private IP address; False for other names."""
    try:
        return host == "localhost" or ip_address(host).is_private
    except ValueError:
        return False


def _list_bucket_warnings(bucket: Bucket, stage: StagePlan, plan: Plan) -> list[str]:
    """Return warnings about the bucket: cost, encryption, and reachability."""
    is_near = place_facts(plan.offer.provider).store == AWS
    warnings = ["Files stay in the bucket, and are billed, until you remove them. The cap does not cover that."]
    if not stage.is_of_aws:
        warnings.append(f"Staged files, and requests signed with your key, go to {bucket.endpoint}.")
    if bucket.endpoint.startswith("http://"):
        warnings.append("It is not encrypted: digests are checked, but others could read shards and checkpoints.")
    if not place_facts(plan.offer.provider).is_own_box and _is_private(urlsplit(bucket.endpoint).hostname or ""):
        what = f"{bucket.endpoint} is in your own network, which a rented machine probably cannot reach"
        warnings.append(f"{what}. Then the shards are sent over SSH, in paid time, and no checkpoint is pushed.")
    if stage.is_of_aws and stage.bytes and not is_near:
        what = f"AWS bills data that leaves the bucket, and the cap does not cover that: up to {aws_bill(stage.bytes)}"
        warnings.append(f"{what} for the {format_bytes(stage.bytes)} of shards that the machine downloads.")
    if stage.is_of_aws and is_near and not stage.is_beside(plan.offer):
        where = f"The bucket is in {bucket.region}, the machine in {plan.offer.region}"
        warnings.append(f"{where}: that is slower, and AWS bills traffic between regions (about $0.02 a GB).")
    pushed = early_bytes(plan)
    if pushed and not stage.is_beside(plan.offer):
        what = f"Pushing from the machine to the bucket is charged, so it pushes at most {format_bytes(pushed)}"
        warnings.append(f"{what} of its checkpoints, which the cap covers. None are downloaded before training ends.")
    return warnings
