"""What staging means for a plan: what is in the bucket already, what is uploaded before renting, what that saves.

Faults of the bucket are reported here, before anything is requested.
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
    """Return the plan with its bucket checked; without files, for data that is not prepared, nothing more is done.

    Without a bucket, the plan says what one would save, if that is much. UsageError, SetupError or BucketLost if the
    bucket cannot be used.
    """
    if not plan.choices.stage:
        worth_bytes = sum(file.bytes for file in _worth_staging(seen))
        notes = advice(plan.offer, plan.uplink, worth_bytes) if plan.mode is Mode.PAID else ()
        return plan.told(*notes)
    address = parse_address(plan.choices.stage)
    if plan.mode is Mode.LOCAL:
        hint = "Leave --stage out, or rent a machine."
        raise UsageError("stage.local", "--stage is for machines elsewhere; nothing is sent to this one.", hint=hint)
    if plan.mode is Mode.REHEARSAL:
        note = f"The rehearsal uploads nothing; {address} is for the paid run."
        return plan.told(note)
    bucket = Bucket(address, clock)
    bucket.look()
    files = _worth_staging(seen)
    there = _there(bucket, files, plan)
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
    return plan.model_copy(update={"stage": stage}).told(warnings=_warnings(bucket, stage, plan))


def _worth_staging(seen: Survey | None) -> list[PackedFile]:
    return [file for file in (seen.files if seen else ()) if file.is_here and is_worth_staging(file.bytes)]


def _there(bucket: Bucket, files: list[PackedFile], plan: Plan) -> list[PackedFile]:
    """Return those of the files that are in the bucket, by the digests in their manifest; the others are read later."""
    digests = _digests(Path(plan.data.beside or plan.data.folder))
    known = [(file, digests[file.name]) for file in files if file.name in digests]
    with ThreadPoolExecutor(_ASK_AT_ONCE) as pool:
        found = pool.map(lambda pair: find_staged(bucket, pair[1], pair[0].bytes) is not None, known)
        return [file for (file, _), is_there in zip(known, found, strict=True) if is_there]


def _digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of the shards, by their place in the pack, from data.json, which has been checked by now."""
    try:
        manifest = read_object(folder / "data.json")
    except FileNotFoundError:
        return {}
    shards = [*manifest.get("train", ()), *manifest.get("val", ())]
    return {f"data/{Path(str(shard['name'])).name}": str(shard["sha256"]) for shard in shards if "sha256" in shard}


def _is_private(host: str) -> bool:
    """Return whether an address is known only in its own network; False for a name that is not known here."""
    try:
        return host == "localhost" or ip_address(host).is_private
    except ValueError:
        return False


def _warnings(bucket: Bucket, stage: StagePlan, plan: Plan) -> list[str]:
    """Return what should be known about the bucket."""
    is_near = place_facts(plan.offer.provider).store == AWS
    warnings = ["Files in the bucket stay there, and are billed, until you remove them: no cap covers that."]
    if not stage.is_of_aws:
        warnings.append(f"Staged files, and requests signed with your key, go to {bucket.endpoint}.")
    if bucket.endpoint.startswith("http://"):
        warnings.append("That way is not encrypted: digests are checked anyway, but shards and checkpoints show.")
    if not place_facts(plan.offer.provider).is_own_box and _is_private(urlsplit(bucket.endpoint).hostname or ""):
        what = f"{bucket.endpoint} is in your own network, which a rented machine can hardly reach"
        warnings.append(f"{what}: then the shards go over SSH, on paid time, and no checkpoint is pushed.")
    if stage.is_of_aws and stage.bytes and not is_near:
        what = f"AWS bills what leaves the bucket, and the cap does not cover it: up to {aws_bill(stage.bytes)}"
        warnings.append(f"{what} for the {format_bytes(stage.bytes)} of shards that the machine downloads.")
    if stage.is_of_aws and is_near and not stage.is_beside(plan.offer):
        where = f"The bucket is in {bucket.region}, the machine in {plan.offer.region}"
        warnings.append(f"{where}: that is slower, and AWS bills traffic between regions (about $0.02 a GB).")
    pushed = early_bytes(plan)
    if pushed and not stage.is_beside(plan.offer):
        what = f"Data that leaves the machine for the bucket is charged, so it pushes at most {format_bytes(pushed)}"
        warnings.append(f"{what} of its checkpoints, which the cap covers; none come home before training ends.")
    return warnings
